# SPDX-License-Identifier: Apache-2.0
"""Every metric of a record, declared once: unit, meaning, reduction, and where it is shown and watched.

docs/metrics.md, the console line, the charts of the status page, a panel of curves.png, and the metrics of each alarm
are derived from this table. A logged metric without a row fails the tests that read a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Metric:
    """Declaration of a metric, or of all metrics whose names have one pattern.

    Attributes:
        name: key in a record; `<word>` stands for any text.
        meaning: text of docs/metrics.md.
        unit: "" for a plain number.
        first_only: a step with several values (one per optimizer step) logs the first of them instead of their mean.
        console: format of the console column, with the words of the pattern as fields; columns have the table's order.
        chart: title of a chart of `status.py`.
        curve: legend in the panel "KL and rollout mismatch" of curves.png.
        alarm: check of `health.py` that watches the metric.
    """

    name: str
    meaning: str
    unit: str = ""
    first_only: bool = False
    console: str = ""
    chart: str = ""
    curve: str = ""
    alarm: str = ""

    def match(self, key: str) -> re.Match[str] | None:
        """Match a key with the name; the groups are the texts of the placeholders."""
        return re.fullmatch(re.sub("<(\\w+)>", r"(?P<\1>.+)", re.escape(self.name)), key)


# fmt: off
ROWS: tuple[Metric, ...] = (
    Metric("reward/mean", "mean over the rollouts of the step, but those whose episode or reward service failed",
           console="reward {:.4f}", chart="reward"),
    Metric("reward/<data_source>/mean", "the same of the rollouts of each data source, where a step has several"),
    Metric("reward/<component>", "the same of each part: sources, keys that a reward function returns",
           alarm="components"),
    Metric("reward/overlong", "the same of the soft overlong punishment", alarm="components"),
    Metric("reward/model", "the same of the reward model, in a sum"),
    Metric("reward/unmarked_answers", "responses that mark no answer", "share"),
    Metric("reward/math_timeouts", "responses whose answer took too long to read", "share"),
    Metric("reward/math_unparsable_truth", "responses whose ground truth could only be compared as text", "share"),
    Metric("reward/service_failures", "responses on which a reward service failed", "share", alarm="failures"),
    Metric("reward/restates_prompt", "responses with a reward above 0 that repeat a part of the prompt", "share",
           alarm="restating"),
    Metric("reward/uninformative_groups", "groups whose rewards are all the same", "share",
           chart="truncated responses, groups without signal", alarm="no-signal"),
    Metric("response/truncated", "responses cut at data.max_response_length", "share",
           chart="truncated responses, groups without signal", alarm="truncated"),
    Metric("tokens/prompt", "of all rollouts of the step", "tokens"),
    Metric("tokens/response", "of all rollouts of the step", "tokens", chart="tokens of all responses", alarm="length"),
    Metric("rollout/prefix_cache_hits", "of what engines were asked to continue, what their caches had", "share"),
    Metric("sampling/rounds", "generation rounds (algorithm.dynamic_sampling, as the four below)", "rounds"),
    Metric("sampling/generated_groups", "in all rounds", "groups"),
    Metric("sampling/informative_groups", "of them, those with different rewards", "groups"),
    Metric("sampling/filled_groups", "uninformative ones that had to be used", "groups"),
    Metric("sampling/dropped_groups", "informative ones that were more than needed", "groups"),
    Metric("sampling/kept_mean", "tokens that one was drawn from (rollout.top_p, top_k, min_p; the two below too)",
           "tokens"),
    Metric("sampling/kept_max", "the largest of these sets", "tokens"),
    Metric("sampling/kept_at_limit", "of these sets, those with rollout.max_kept_tokens", "share"),
    Metric("sampling/thoughts_ended", "of responses, those whose thought rollout.thinking_budget ended", "share"),
    Metric("validation/<set>/accuracy", "mean correctness on a set", console="val {set} {:.4f}",
           chart="validation accuracy"),
    Metric("validation/<set>/mean@<k>", "with rollout.validation_n = k responses to each prompt: their mean"),
    Metric("validation/<set>/pass@<k>", "prompts with a correct response among k", "share"),
    Metric("validation/<set>/best@<k>", "mean of the best of k"),
    Metric("validation/<set>/failed", "episodes that failed, each of which is worth 0", "share"),
    Metric("validation/<set>/maj@<k>", "mean of the answer that most of k responses name"),
    Metric("sft/loss", "SFT: next-token loss", "nats", console="loss {:.4f}", chart="loss"),
    Metric("kl/mean", "to the reference, per token, in the update", "nats", console="kl {:.2e}",
           chart="KL to the reference", curve="KL to reference"),
    Metric("kl/per_response", "to the reference, per response, before the update", "nats"),
    Metric("kl/coef", "coefficient in use"),
    Metric("distill/kl", "to the teachers, per token: log-prob of the policy minus that of the teachers, before the "
           "update; with algorithm.distillation.kind full or top_k the divergence in the update", "nats"),
    Metric("distill/<teacher>", "the same to each of several teachers, on the tokens that it was asked about", "nats"),
    Metric("policy/loss", "of the optimizer steps"),
    Metric("policy/clip_fraction", "tokens whose loss is clipped", "share", console="clip {:.4f}",
           chart="clipped tokens", alarm="clipping"),
    Metric("policy/grad_norm", "of the whole gradient, before it is clipped", console="grad {:.3g}",
           chart="gradient norm", alarm="gradient"),
    Metric("policy/lr", "learning rate", chart="learning rate"),
    Metric("policy/entropy", "of the next-token distribution", "nats", chart="entropy", alarm="entropy"),
    Metric("policy/ratio_max_deviation",
           "largest log-prob change before the first optimizer step: 0 when everything agrees", "nats",
           first_only=True),
    Metric("lora/norm", "of the products s B A of all adapters together: how far they have moved the model"),
    Metric("value/loss", "of its optimizer steps"),
    Metric("value/grad_norm", "of the whole gradient, before it is clipped", chart="gradient norm"),
    Metric("value/lr", "learning rate"),
    Metric("value/clip_fraction", "tokens whose gradient critic.value_clip cuts off", "share"),
    Metric("value/explained_variance", "of the returns by the values; 1 is perfect, 0 no better than a constant",
           chart="explained variance", alarm="critic"),
    Metric("mismatch/mean", "mean gap of the log-probs of the same tokens and weights", "nats",
           chart="engine against trainer", curve="mismatch, mean", alarm="mismatch"),
    Metric("mismatch/max", "largest such gap", "nats", console="mismatch {:.1e}", curve="mismatch, max"),
    Metric("mismatch/k3", "KL estimate of the gap", "nats"),
    Metric("mismatch/effective_sample_size", "1: no correction would be needed", "share", alarm="sample-size"),
    Metric("mismatch/mean_weight", "of algorithm.importance_sampling, before it is normalized"),
    Metric("mismatch/truncated_fraction", "tokens whose weight was truncated", "share"),
    Metric("mismatch/masked_fraction", "tokens whose weight was masked", "share"),
    Metric("mismatch/rejected_fraction", "responses that algorithm.reject_sequence_above dropped", "share"),
    Metric("mismatch/lag<steps>", "mean gap of tokens that weights of this age sampled; lag0: numerics", "nats",
           chart="engine against trainer", alarm="mismatch"),
    Metric("loss/<name>/<metric>", "what a policy loss reports: mean over the tokens in the loss"),
    Metric("estimator/<name>/<metric>", "what an advantage estimator reports"),
    Metric("aggregation/<name>/<metric>", "what a loss aggregation reports"),
    Metric("schedule/staleness_mean", "age of the weights that began a response, mean over the step's", "steps",
           chart="staleness"),
    Metric("schedule/staleness_max", "the same of the oldest; at most schedule.max_staleness", "steps",
           chart="staleness"),
    Metric("schedule/carried", "responses that begin ahead of their step, after the rollout", "responses"),
    Metric("schedule/carried_tokens", "their tokens so far", "tokens"),
    Metric("schedule/engine_busy", "share of the rollout in which an engine has requests", "share",
           chart="busy engines"),
    Metric("agents/turns", "replies of an episode", "replies"),
    Metric("agents/forks", "branches of an episode beyond its first (`agents.history: template`)", "branches"),
    Metric("agents/tokens_sampled", "tokens that the policy has sampled", "tokens"),
    Metric("agents/tokens_observed", "other tokens behind the prompts", "tokens"),
    Metric("agents/max_turns", "episodes that were cut at `agents.max_turns`", "share"),
    Metric("agents/failed", "of all that the step generated, the two below together", "share", alarm="failures"),
    Metric("agents/timeouts", "episodes whose environment did not answer in time", "episodes"),
    Metric("agents/errors", "episodes whose environment raised or ended", "episodes"),
    Metric("agents/environment_seconds", "of an episode in `reset` and `step`", "s"),
    Metric("agents/wait_share", "share of the rollout in which engines wait for environments", "share"),
    Metric("moe/max_load", "load of the busiest expert of all layers, relative to an even load",
           chart="load of the busiest expert"),
    Metric("moe/mean_load", "the same of the busiest expert of each layer, mean over layers"),
    Metric("moe/dead_experts", "experts without a token in the loss, over all layers", "experts", chart="dead experts",
           alarm="dead-experts"),
    Metric("moe/entropy", "of the gates' distributions over that of even ones", chart="entropy of routers"),
    Metric("moe/agreement", "choices in a layer that the router alone would have made as it replays them", "share"),
    Metric("moe/bias_norm", "of all biases of routers that have them, after the update"),
    Metric("moe/flipped_tokens", "tokens whose experts would have been others in some layer", "share"),
    Metric("moe/replayed_stale", "replayed tokens whose experts weights of an earlier step chose", "share"),
    Metric("moe/max_load/<third>", "moe/max_load of the first, middle or last third of the layers with experts",
           chart="load of the busiest expert"),
    Metric("moe/dead_experts/<third>", "the same of moe/dead_experts", "experts", chart="dead experts"),
    Metric("moe/entropy/<third>", "the same of moe/entropy", chart="entropy of routers"),
    Metric("moe/<metric>/<third>", "the same of the other metrics, but for flipped_tokens and replayed_stale"),
    Metric("mtp/loss", "negative log-likelihood of the token after the next, by the layer behind the last"),
    Metric("mtp/acceptance", "mean of min(1, q / p) over sampled tokens, q by this layer and p by the engine: how "
           "many of its drafts speculative decoding accepts", "share"),
    Metric("mtp/grad_norm", "of the layer, before clipping"),
    Metric("ledger/<term>/numerator", "of a term of the loss: policy, kl, entropy, value"),
    Metric("ledger/<term>/denominator", "what it was divided by; 1 where a plugin aggregates"),
    Metric("packing/efficiency", "real over computed tokens", "share"),
    Metric("packing/padded_efficiency", "what padding to the longest would give", "share"),
    Metric("packing/budget_use", "tokens over max_tokens_per_microbatch", "share"),
    Metric("packing/imbalance", "heaviest data-parallel rank over the mean"),
    Metric("packing/prompt_repeats", "executed over unique prompt tokens"),
    Metric("packing/prefix_repeats", "computed over unique tokens (`actor.share_prompts: tree`)"),
    Metric("packing/padding_share", "padding of the buckets (step_mode static and graph)", "share"),
    Metric("packing/padding_share_<bucket>", "the same of each bucket", "share"),
    Metric("samples/bytes_per_rank", "samples received by the rank that received most: headers, the tokens it trains "
           "on, columns; not what the rollout log fetches", "bytes"),
    Metric("reshard/bytes_moved", "between ranks, per switch", "bytes"),
    Metric("reshard/bytes_copied", "inside ranks, per switch", "bytes"),
    Metric("reshard/bytes_aliased", "shared by trainer and engine", "bytes"),
    Metric("reshard/verified_tensors", "that the last certificate covered", "tensors"),
    Metric("time/step", "the whole step", "s", chart="seconds per step"),
    Metric("tokens/per_second", "tokens/prompt and tokens/response over time/step", "tokens/s", console="tok/s {:,.0f}",
           chart="tokens per second"),
    Metric("time/reshard", "weights to the engines", "s"),
    Metric("time/verify", "their certificate", "s"),
    Metric("time/rollout", "generation", "s", chart="seconds per step"),
    Metric("time/reward", "scoring after generation", "s"),
    Metric("time/old_logprobs", "log-probs of the policy before the update; absent where its first pass gives them",
           "s"),
    Metric("time/ref_logprobs", "log-probs of the reference", "s"),
    Metric("time/teachers", "log-probs or distributions of the teachers", "s"),
    Metric("time/values", "values of the critic", "s"),
    Metric("time/update", "optimizer steps of the policy", "s", chart="seconds per step"),
    Metric("time/update_critic", "optimizer steps of the critic", "s"),
    Metric("time/validation", "generation and scoring of the validation sets", "s"),
    Metric("time/save", "checkpoints, as far as training waits for them", "s"),
    Metric("time/capture", "trainer.capture_step", "s"),
    Metric("memory/<phase>", "at the end of a phase: on CUDA the device's peak, on a CPU resident memory", "bytes"),
)
# fmt: on


@cache
def find_metric(key: str) -> Metric | None:
    """Return the declaration of a key of a record, the one with the fewest placeholders; `None` if it has none."""
    found = [metric for metric in ROWS if metric.match(key) is not None]
    return min(found, key=lambda metric: metric.name.count("<"), default=None)


def format_columns(record: Mapping[str, float]) -> list[str]:
    """Return the console columns of the metrics of a record."""
    return [
        metric.console.format(value, **found.groupdict())
        for metric in ROWS
        if metric.console
        for key, value in record.items()
        if find_metric(key) is metric and (found := metric.match(key))
    ]


def accuracy_set(key: str) -> str | None:
    """Return the set of a key `validation/<set>/accuracy`, `None` for any other key."""
    found = re.fullmatch("validation/(.+)/accuracy", key)
    return None if found is None else found[1]
