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
    """Declaration of a metric, or of all metrics whose names have one pattern."""

    name: str  # key in a record; `<word>` stands for any text
    meaning: str  # text of docs/metrics.md
    unit: str = ""
    first_only: bool = False  # a step with several values (one per optimizer step) logs the first, not their mean
    console: str = ""  # format of the console column, with the words of the pattern as fields, in the table's order
    chart: str = ""  # title of a chart of `status.py`
    curve: str = ""  # legend in the panel "KL and rollout mismatch" of curves.png
    alarm: str = ""  # check of `health.py` that watches the metric

    def match(self, key: str) -> re.Match[str] | None:
        """Match a key of a record with `name`; the named groups contain the texts for its `<word>` placeholders."""
        return re.fullmatch(re.sub("<(\\w+)>", r"(?P<\1>.+)", re.escape(self.name)), key)


# fmt: off
ROWS: tuple[Metric, ...] = (
    Metric("reward/mean", "mean over the rollouts of the step, without those whose episode or reward service failed",
           console="reward {:.4f}", chart="reward"),
    Metric("reward/<data_source>/mean", "mean reward of each data source, if a step has several"),
    Metric("reward/<component>", "mean of a component: a source, or a key that a reward function returns",
           alarm="components"),
    Metric("reward/overlong", "mean of the soft overlong penalty", alarm="components"),
    Metric("reward/model", "mean score of the reward model, if the reward is a sum"),
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
    Metric("tokens/prompt", "prompt tokens of all rollouts of the step", "tokens"),
    Metric("tokens/response", "response tokens of all rollouts of the step", "tokens", chart="tokens of all responses",
           alarm="length"),
    Metric("rollout/prefix_cache_hits", "tokens of requests found in the engines' prefix caches", "share"),
    Metric("sampling/rounds", "generation rounds of algorithm.dynamic_sampling", "rounds"),
    Metric("sampling/generated_groups", "groups of all rounds", "groups"),
    Metric("sampling/informative_groups", "generated groups with different rewards", "groups"),
    Metric("sampling/filled_groups", "uninformative groups used to fill the batch", "groups"),
    Metric("sampling/dropped_groups", "informative groups beyond the batch", "groups"),
    Metric("sampling/kept_mean", "mean size of the set from which a token was drawn (rollout.top_p, top_k, min_p)",
           "tokens"),
    Metric("sampling/kept_max", "largest such set", "tokens"),
    Metric("sampling/kept_at_limit", "tokens whose set has rollout.max_kept_tokens members", "share"),
    Metric("sampling/thoughts_ended", "responses whose thought rollout.thinking_budget ended", "share"),
    Metric("validation/<set>/accuracy", "mean correctness on a set", console="val {set} {:.4f}",
           chart="validation accuracy"),
    Metric("validation/<set>/mean@<k>", "mean over rollout.validation_n = k responses to each prompt"),
    Metric("validation/<set>/pass@<k>", "prompts with a correct response among k", "share"),
    Metric("validation/<set>/best@<k>", "mean of the best of k responses"),
    Metric("validation/<set>/failed", "episodes that failed and count as 0", "share"),
    Metric("validation/<set>/maj@<k>", "mean correctness of the most frequent answer of k responses"),
    Metric("sft/loss", "next-token loss", "nats", console="loss {:.4f}", chart="loss"),
    Metric("preference/loss", "mean loss of the examples", console="loss {:.4f}", chart="loss"),
    Metric("preference/accuracy", "pairs whose chosen response has the higher reward; process: right steps", "share",
           chart="validation accuracy"),
    Metric("preference/margin", "reward of the chosen response minus that of the rejected one"),
    Metric("preference/chosen_reward", "mean reward of chosen responses: beta times their log-ratio, or the score"),
    Metric("preference/rejected_reward", "mean reward of rejected responses"),
    Metric("preference/nll", "mean negative log-prob of the chosen responses' tokens", "nats"),
    Metric("validation/<set>/margin", "preference/margin on a set"),
    Metric("validation/<set>/calibration_error", "gap of sigmoid(margin) to the share of right predictions", "share"),
    Metric("kl/mean", "KL to the reference per token, in the update", "nats", console="kl {:.2e}",
           chart="KL to the reference", curve="KL to reference"),
    Metric("kl/per_response", "KL to the reference per response, before the update", "nats"),
    Metric("kl/coef", "KL coefficient in use"),
    Metric("distill/kl", "log-prob of the policy minus that of the teachers per token, before the update; the "
           "divergence in the update if algorithm.distillation.kind is full or top_k", "nats"),
    Metric("distill/<teacher>", "distill/kl to one of several teachers, on its own tokens", "nats"),
    Metric("policy/loss", "mean loss of the optimizer steps"),
    Metric("policy/clip_fraction", "tokens whose loss is clipped", "share", console="clip {:.4f}",
           chart="clipped tokens", alarm="clipping"),
    Metric("policy/grad_norm", "norm of the whole gradient before clipping", console="grad {:.3g}",
           chart="gradient norm", alarm="gradient"),
    Metric("policy/lr", "learning rate", chart="learning rate"),
    Metric("policy/entropy", "entropy of the next-token distribution", "nats", chart="entropy", alarm="entropy"),
    Metric("policy/ratio_max_deviation",
           "largest log-prob change before the first optimizer step; 0 if all passes agree", "nats", first_only=True),
    Metric("lora/norm", "norm of the products s B A of all adapters: their distance from the base model"),
    Metric("value/loss", "mean loss of the critic's optimizer steps"),
    Metric("value/grad_norm", "norm of the whole gradient of the critic before clipping", chart="gradient norm"),
    Metric("value/lr", "learning rate of the critic"),
    Metric("value/clip_fraction", "tokens whose gradient critic.value_clip removes", "share"),
    Metric("value/explained_variance", "explained variance of the returns; 1 is perfect, 0 no better than a constant",
           chart="explained variance", alarm="critic"),
    Metric("mismatch/mean", "mean log-prob gap between engine and trainer on the same tokens and weights", "nats",
           chart="engine against trainer", curve="mismatch, mean", alarm="mismatch"),
    Metric("mismatch/max", "largest log-prob gap", "nats", console="mismatch {:.1e}", curve="mismatch, max"),
    Metric("mismatch/k3", "KL estimate of the gap", "nats"),
    Metric("mismatch/effective_sample_size", "effective sample size of the importance weights; 1 without a gap",
           "share", alarm="sample-size"),
    Metric("mismatch/mean_weight", "mean weight of algorithm.importance_sampling before normalization"),
    Metric("mismatch/truncated_fraction", "tokens whose weight was truncated", "share"),
    Metric("mismatch/masked_fraction", "tokens whose weight was masked", "share"),
    Metric("mismatch/rejected_fraction", "responses rejected by algorithm.reject_sequence_above", "share"),
    Metric("mismatch/lag<steps>", "mean gap of tokens sampled by weights of this age; lag0 is numerical error", "nats",
           chart="engine against trainer", alarm="mismatch"),
    Metric("loss/<name>/<metric>", "metric of a policy loss: mean over the tokens in the loss"),
    Metric("estimator/<name>/<metric>", "metric of an advantage estimator"),
    Metric("aggregation/<name>/<metric>", "metric of a loss aggregation"),
    Metric("schedule/staleness_mean", "mean age of the weights that began a response", "steps", chart="staleness"),
    Metric("schedule/staleness_max", "largest age of such weights; at most schedule.max_staleness", "steps",
           chart="staleness"),
    Metric("schedule/carried", "responses begun ahead of their step, after the rollout", "responses"),
    Metric("schedule/carried_tokens", "tokens of the carried responses so far", "tokens"),
    Metric("schedule/engine_busy", "part of the rollout in which an engine has requests, mean over engines", "share",
           chart="busy engines"),
    Metric("agents/turns", "mean replies of an episode", "replies"),
    Metric("agents/forks", "mean branches of an episode beyond its first (`agents.history: template`)", "branches"),
    Metric("agents/tokens_sampled", "tokens sampled by the policy", "tokens"),
    Metric("agents/tokens_observed", "other tokens after the prompts", "tokens"),
    Metric("agents/max_turns", "episodes cut at `agents.max_turns`", "share"),
    Metric("agents/failed", "generated episodes that failed: timeouts and errors", "share", alarm="failures"),
    Metric("agents/timeouts", "episodes whose environment exceeded its time", "episodes"),
    Metric("agents/errors", "episodes whose environment raised or exited", "episodes"),
    Metric("agents/environment_seconds", "mean time of an episode in `reset` and `step`", "s"),
    Metric("agents/wait_share", "part of the rollout in which engines wait for environments", "share"),
    Metric("moe/max_load", "load of the busiest expert of all layers, relative to an even load",
           chart="load of the busiest expert"),
    Metric("moe/mean_load", "load of the busiest expert of each layer, mean over layers"),
    Metric("moe/dead_experts", "experts without a token in the loss, over all layers", "experts", chart="dead experts",
           alarm="dead-experts"),
    Metric("moe/entropy", "entropy of the gates relative to even gates", chart="entropy of routers"),
    Metric("moe/agreement", "replayed choices that the layer's router would have made as well", "share"),
    Metric("moe/bias_norm", "norm of all router biases after the update"),
    Metric("moe/flipped_tokens", "replayed tokens for which the router of some layer would have chosen other experts",
           "share"),
    Metric("moe/replayed_stale", "replayed tokens whose experts were chosen by weights of an earlier step", "share"),
    Metric("moe/max_load/<third>", "moe/max_load of the first, middle or last third of the layers with experts",
           chart="load of the busiest expert"),
    Metric("moe/dead_experts/<third>", "moe/dead_experts of a third", "experts", chart="dead experts"),
    Metric("moe/entropy/<third>", "moe/entropy of a third", chart="entropy of routers"),
    Metric("moe/<metric>/<third>", "mean_load, agreement and bias_norm of a third"),
    Metric("mtp/loss", "negative log-likelihood of the token after the next, by the MTP layer"),
    Metric("mtp/acceptance", "mean of min(1, q / p) over sampled tokens, with q of the MTP layer and p of the engine: "
           "acceptance rate of its drafts in speculative decoding", "share"),
    Metric("mtp/grad_norm", "gradient norm of the MTP layer before clipping"),
    Metric("ledger/<term>/numerator", "numerator of a term of the loss: policy, kl, entropy, value"),
    Metric("ledger/<term>/denominator", "denominator of the term; 1 if a plugin aggregates"),
    Metric("packing/efficiency", "real tokens over computed tokens", "share"),
    Metric("packing/padded_efficiency", "packing/efficiency if every sequence were padded to the longest", "share"),
    Metric("packing/budget_use", "real tokens over micro-batches times max_tokens_per_microbatch", "share"),
    Metric("packing/imbalance", "cost of the heaviest data-parallel rank over the mean"),
    Metric("packing/prompt_repeats", "computed prompt tokens over unique ones (shared prompts)"),
    Metric("packing/prefix_repeats", "computed tokens over unique ones (`actor.share_prompts: tree`)"),
    Metric("packing/padding_share", "padding in the buckets (step_mode static and graph)", "share"),
    Metric("packing/padding_share_<bucket>", "padding in one bucket", "share"),
    Metric("samples/bytes_per_rank",
           "headers, tokens and columns received by the rank that received most, without rows of the rollout log",
           "bytes"),
    Metric("reshard/bytes_moved", "moved between ranks per switch", "bytes"),
    Metric("reshard/bytes_copied", "copied inside ranks per switch", "bytes"),
    Metric("reshard/bytes_aliased", "shared by trainer and engine", "bytes"),
    Metric("reshard/verified_tensors", "tensors covered by the last certificate", "tensors"),
    Metric("time/step", "the whole step", "s", chart="seconds per step"),
    Metric("tokens/per_second", "tokens/prompt and tokens/response over time/step", "tokens/s", console="tok/s {:,.0f}",
           chart="tokens per second"),
    Metric("time/reshard", "transfer of weights to the engines", "s"),
    Metric("time/verify", "certificate of the transfer", "s"),
    Metric("time/rollout", "generation", "s", chart="seconds per step"),
    Metric("time/reward", "scoring after generation", "s"),
    Metric("time/old_logprobs",
           "log-probs of the policy before the update; absent if the first pass of the update gives them", "s"),
    Metric("time/ref_logprobs", "log-probs of the reference", "s"),
    Metric("time/teachers", "log-probs or distributions of the teachers", "s"),
    Metric("time/values", "values of the critic", "s"),
    Metric("time/update", "optimizer steps of the policy", "s", chart="seconds per step"),
    Metric("time/update_critic", "optimizer steps of the critic", "s"),
    Metric("time/validation", "generation and scoring of the validation sets", "s"),
    Metric("time/save", "time for which training waits for checkpoints", "s"),
    Metric("time/capture", "trainer.capture_step", "s"),
    Metric("memory/<phase>", "at the end of a phase: peak of the device on CUDA, resident memory on a CPU", "bytes"),
)
# fmt: on


@cache
def find_metric(key: str) -> Metric | None:
    """Return the declaration of a record's key, with the fewest placeholders if several match; `None` if none does."""
    found = [metric for metric in ROWS if metric.match(key) is not None]
    return min(found, key=lambda metric: metric.name.count("<"), default=None)


def format_columns(record: Mapping[str, float]) -> list[str]:
    """Format the metrics of a record that have a console column, in the table's order."""
    return [
        metric.console.format(value, **found.groupdict())
        for metric in ROWS
        if metric.console
        for key, value in record.items()
        if find_metric(key) is metric and (found := metric.match(key))
    ]


def accuracy_set(key: str) -> str | None:
    """Return <set>, the validation set's name, of a key `validation/<set>/accuracy`; `None` for any other key."""
    found = re.fullmatch("validation/(.+)/accuracy", key)
    return None if found is None else found[1]
