# SPDX-License-Identifier: Apache-2.0
"""Every metric of metrics.jsonl, with its unit and its meaning; `docs/metrics.md` is made from this table.

A name in angle brackets stands for any text. What plugins report has namespaces of its own, which are rows here. A
metric that is not in the table fails the tests that read a run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PLACEHOLDER = re.compile(r"<\w+>")


@dataclass(frozen=True)
class Metric:
    """One row.

    Attributes:
        name: key in a record.
        meaning: one line.
        unit: of the number; "" for a plain number.
    """

    name: str
    meaning: str
    unit: str = ""


METRICS: dict[str, tuple[Metric, ...]] = {
    "Mixtures of experts (docs/mixtures.md)": (
        Metric("moe/max_load", "load of the busiest expert of all layers, relative to an even load"),
        Metric("moe/mean_load", "the same of the busiest expert of each layer, mean over layers"),
        Metric("moe/dead_experts", "experts without a token in the loss, over all layers", "experts"),
        Metric("moe/entropy", "of the gates' distributions over that of even ones"),
        Metric("moe/agreement", "choices in a layer that the router alone would have made as it replays them", "share"),
        Metric("moe/bias_norm", "of all biases of routers that have them, after the update"),
        Metric("moe/flipped_tokens", "tokens whose experts would have been others in some layer", "share"),
        Metric("moe/replayed_stale", "replayed tokens whose experts weights of an earlier step chose", "share"),
        Metric(
            "moe/<metric>/<third>",
            "all but the last two, of the first, middle or last third of the layers with experts",
        ),
    ),
    "Multi-token prediction": (
        Metric("mtp/loss", "negative log-likelihood of the token after the next, by the layer behind the last"),
        Metric(
            "mtp/acceptance",
            "mean of min(1, q / p) over sampled tokens, q by this layer and p by the engine: how many of its drafts "
            "speculative decoding accepts",
            "share",
        ),
        Metric("mtp/grad_norm", "of the layer, before clipping"),
    ),
    "Reward and responses": (
        Metric("reward/mean", "mean over the rollouts of the step, but those whose episode or reward service failed"),
        Metric("reward/<data_source>/mean", "the same of the rollouts of each data source, where a step has several"),
        Metric("reward/<component>", "the same of each part: sources, keys that a reward function returns"),
        Metric("reward/overlong", "the same of the soft overlong punishment"),
        Metric("reward/model", "the same of the reward model, in a sum"),
        Metric(
            "reward/restates_prompt",
            "responses with a reward above 0 that repeat a part of the prompt ([how](health.md#restating))",
            "share",
        ),
        Metric("reward/uninformative_groups", "groups whose rewards are all the same", "share"),
        Metric("response/truncated", "responses cut at data.max_response_length", "share"),
        Metric("tokens/prompt", "of all rollouts of the step", "tokens"),
        Metric("tokens/response", "of all rollouts of the step", "tokens"),
        Metric("rollout/prefix_cache_hits", "of what engines were asked to continue, what their caches had", "share"),
        Metric("tokens/per_second", "both over time/step", "tokens/s"),
        Metric("sampling/rounds", "generation rounds (algorithm.dynamic_sampling, as the four below)", "rounds"),
        Metric("sampling/generated_groups", "in all rounds", "groups"),
        Metric("sampling/informative_groups", "of them, those with different rewards", "groups"),
        Metric("sampling/filled_groups", "uninformative ones that had to be used", "groups"),
        Metric("sampling/dropped_groups", "informative ones that were more than needed", "groups"),
        Metric(
            "sampling/kept_mean",
            "tokens that one was drawn from (rollout.top_p, top_k, min_p; the two below too)",
            "tokens",
        ),
        Metric("sampling/kept_max", "the largest of these sets", "tokens"),
        Metric("sampling/kept_at_limit", "of these sets, those with rollout.max_kept_tokens", "share"),
        Metric("sampling/thoughts_ended", "of responses, those whose thought rollout.thinking_budget ended", "share"),
    ),
    "Validation": (
        Metric("validation/<set>/accuracy", "mean correctness on a set"),
        Metric("validation/<set>/mean@<k>", "with rollout.validation_n = k responses to each prompt: their mean"),
        Metric("validation/<set>/pass@<k>", "prompts with a correct response among k", "share"),
        Metric("validation/<set>/best@<k>", "mean of the best of k"),
        Metric("validation/<set>/failed", "episodes that failed, each of which is worth 0", "share"),
        Metric("validation/<set>/maj@<k>", "mean of the answer that most of k responses name"),
    ),
    "Policy": (
        Metric("policy/loss", "of the optimizer steps"),
        Metric("policy/grad_norm", "of the whole gradient, before it is clipped"),
        Metric("policy/lr", "learning rate"),
        Metric("policy/entropy", "of the next-token distribution", "nats"),
        Metric("policy/clip_fraction", "tokens whose loss is clipped", "share"),
        Metric(
            "policy/ratio_max_deviation",
            "largest log-prob change before the first optimizer step: 0 when everything agrees",
            "nats",
        ),
        Metric("lora/norm", "of the products s B A of all adapters together: how far they have moved the model"),
        Metric("sft/loss", "SFT: next-token loss", "nats"),
    ),
    "KL": (
        Metric("kl/mean", "to the reference, per token, in the update", "nats"),
        Metric("kl/per_response", "to the reference, per response, before the update", "nats"),
        Metric("kl/coef", "coefficient in use"),
        Metric(
            "distill/kl",
            "to the teachers, per token: log-prob of the policy minus that of the teachers, before the update; with "
            "algorithm.distillation.kind full or top_k the divergence in the update",
            "nats",
        ),
        Metric(
            "distill/<teacher>", "the same to each of several teachers, on the tokens that it was asked about", "nats"
        ),
    ),
    "Critic": (
        Metric("value/loss", "of its optimizer steps"),
        Metric("value/grad_norm", "of the whole gradient, before it is clipped"),
        Metric("value/lr", "learning rate"),
        Metric("value/clip_fraction", "tokens whose gradient critic.value_clip cuts off", "share"),
        Metric("value/explained_variance", "of the returns by the values; 1 is perfect, 0 no better than a constant"),
    ),
    "Plugins": (
        Metric("loss/<name>/<metric>", "what a policy loss reports: mean over the tokens in the loss"),
        Metric("estimator/<name>/<metric>", "what an advantage estimator reports"),
        Metric("aggregation/<name>/<metric>", "what a loss aggregation reports"),
    ),
    "Engine against trainer": (
        Metric("mismatch/max", "largest gap of the log-probs of the same tokens and weights", "nats"),
        Metric("mismatch/mean", "mean gap", "nats"),
        Metric("mismatch/k3", "KL estimate of the gap", "nats"),
        Metric("mismatch/effective_sample_size", "1: no correction would be needed", "share"),
        Metric("mismatch/mean_weight", "of algorithm.importance_sampling, before it is normalized"),
        Metric("mismatch/truncated_fraction", "tokens whose weight was truncated", "share"),
        Metric("mismatch/masked_fraction", "tokens whose weight was masked", "share"),
        Metric("mismatch/rejected_fraction", "responses that algorithm.reject_sequence_above dropped", "share"),
        Metric("mismatch/lag<steps>", "mean gap of tokens that weights of this age sampled; lag0: numerics", "nats"),
    ),
    "Schedule (schedule.max_staleness > 0)": (
        Metric("schedule/staleness_mean", "age of the weights that began a response, mean over the step's", "steps"),
        Metric("schedule/staleness_max", "the same of the oldest; at most schedule.max_staleness", "steps"),
        Metric("schedule/carried", "responses that begin ahead of their step, after the rollout", "responses"),
        Metric("schedule/carried_tokens", "their tokens so far", "tokens"),
        Metric("schedule/engine_busy", "share of the rollout in which an engine has requests", "share"),
    ),
    "Agents": (
        Metric("agents/turns", "replies of an episode", "replies"),
        Metric("agents/forks", "branches of an episode beyond its first (`agents.history: template`)", "branches"),
        Metric("agents/tokens_sampled", "tokens that the policy has sampled", "tokens"),
        Metric("agents/tokens_observed", "other tokens behind the prompts", "tokens"),
        Metric("agents/max_turns", "episodes that were cut at `agents.max_turns`", "share"),
        Metric("agents/failed", "of all that the step generated, the two below together", "share"),
        Metric("agents/timeouts", "episodes whose environment did not answer in time", "episodes"),
        Metric("agents/errors", "episodes whose environment raised or ended", "episodes"),
        Metric("agents/environment_seconds", "of an episode in `reset` and `step`", "s"),
        Metric("agents/wait_share", "share of the rollout in which engines wait for environments", "share"),
    ),
    "Loss ledger": (
        Metric("ledger/<term>/numerator", "of a term of the loss: policy, kl, entropy, value"),
        Metric("ledger/<term>/denominator", "what it was divided by; 1 where a plugin aggregates"),
    ),
    "Packing": (
        Metric("packing/efficiency", "real over computed tokens", "share"),
        Metric("packing/padded_efficiency", "what padding to the longest would give", "share"),
        Metric("packing/budget_use", "tokens over max_tokens_per_microbatch", "share"),
        Metric("packing/imbalance", "heaviest data-parallel rank over the mean"),
        Metric("packing/prompt_repeats", "executed over unique prompt tokens"),
        Metric("packing/prefix_repeats", "computed over unique tokens (`actor.share_prompts: tree`)"),
        Metric("packing/padding_share", "padding of the buckets (step_mode static and graph)", "share"),
        Metric("packing/padding_share_<bucket>", "the same of each bucket", "share"),
        Metric(
            "samples/bytes_per_rank",
            "samples received by the rank that received most: headers, the tokens it "
            "trains on, columns; not what the rollout log fetches",
            "bytes",
        ),
    ),
    "Weights": (
        Metric("reshard/bytes_moved", "between ranks, per switch", "bytes"),
        Metric("reshard/bytes_copied", "inside ranks, per switch", "bytes"),
        Metric("reshard/bytes_aliased", "shared by trainer and engine", "bytes"),
        Metric("reshard/verified_tensors", "that the last certificate covered", "tensors"),
    ),
    "Seconds of rank 0": (
        Metric("time/step", "the whole step", "s"),
        Metric("time/reshard", "weights to the engines", "s"),
        Metric("time/verify", "their certificate", "s"),
        Metric("time/rollout", "generation", "s"),
        Metric("time/reward", "scoring after generation", "s"),
        Metric(
            "time/old_logprobs",
            "log-probs of the policy before the update; absent where its first pass gives them",
            "s",
        ),
        Metric("time/ref_logprobs", "log-probs of the reference", "s"),
        Metric("time/teachers", "log-probs or distributions of the teachers", "s"),
        Metric("time/values", "values of the critic", "s"),
        Metric("time/update", "optimizer steps of the policy", "s"),
        Metric("time/update_critic", "optimizer steps of the critic", "s"),
        Metric("time/validation", "generation and scoring of the validation sets", "s"),
        Metric("time/save", "checkpoints, as far as training waits for them", "s"),
        Metric("time/capture", "trainer.capture_step", "s"),
    ),
    "Memory of rank 0": (
        Metric("memory/<phase>", "at the end of a phase: on CUDA the device's peak, on a CPU resident memory", "bytes"),
    ),
}


def find_metric(key: str) -> Metric | None:
    """The row of a key of a record, the most literal one; None where there is none."""
    found = [
        metric
        for metrics in METRICS.values()
        for metric in metrics
        if re.fullmatch(_PLACEHOLDER.sub(".+", re.escape(metric.name)), key)
    ]
    return min(found, key=lambda metric: len(_PLACEHOLDER.findall(metric.name)), default=None)


def format_page() -> str:
    """The page `docs/metrics.md`."""
    parts = [_INTRODUCTION]
    for title, metrics in METRICS.items():
        parts.append(f"\n## {title}\n\n| metric | unit | what it is |\n|---|---|---|\n")
        parts += [f"| `{metric.name}` | {metric.unit} | {_escape(metric.meaning)} |\n" for metric in metrics]
    return "".join(parts)


_INTRODUCTION = """\
# Metrics

Every key of a record in `metrics.jsonl` besides `step`; `python tools/make_docs.py` makes this page from
`tools/_metrics_page.py`. TensorBoard and Weights & Biases show the same numbers under the same names.

A number that is measured several times in a step, usually once per optimizer step, is averaged. A record leaves out
what its run does not measure. Seconds and memory are rank 0's; all other numbers cover all ranks. A name in angle
brackets stands for any text. [Performance](performance.md) says what to tune when one looks wrong, [Health](health.md)
which curves are unhealthy, and [Extending](extending.md#metrics) how to report your own.
"""


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_")
