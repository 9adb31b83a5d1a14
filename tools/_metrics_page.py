# SPDX-License-Identifier: Apache-2.0
"""The page `docs/metrics.md`, made from the table of metrics in megatron_rl/observability/metrics.py."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.observability.metrics import ROWS, Metric

# First metric of a section -> its title.
_TITLES = {
    "reward/mean": "Reward and responses",
    "validation/<set>/accuracy": "Validation",
    "sft/loss": "Supervised fine-tuning",
    "kl/mean": "KL",
    "advantages/mean": "Advantages",
    "policy/loss": "Policy",
    "value/loss": "Critic",
    "mismatch/mean": "Engine against trainer",
    "loss/<name>/<metric>": "Plugins",
    "schedule/staleness_mean": "Schedule (schedule.max_staleness > 0)",
    "agents/turns": "Agents",
    "moe/max_load": "Mixtures of experts (docs/mixtures.md)",
    "mtp/loss": "Multi-token prediction",
    "ledger/<term>/numerator": "Loss ledger",
    "packing/efficiency": "Packing",
    "reshard/bytes_moved": "Weights",
    "time/step": "Time on rank 0",
    "memory/<phase>": "Memory of rank 0",
}

# Ours -> the names of verl, TRL and prime-rl for the same quantity ("" if they have none).
PEERS = (
    ("reward/mean", "critic/score/mean", "reward", "reward/all/mean"),
    ("reward/std", "", "reward_std (within groups)", ""),
    ("reward/min", "critic/score/min", "", "reward/all/min"),
    ("reward/max", "critic/score/max", "", "reward/all/max"),
    ("reward/<component>", "", "rewards/NAME/mean", "metrics/all/NAME"),
    ("sources/<source>/reward", "", "", "reward/ENV/mean"),
    ("reward/uninformative_groups", "", "frac_reward_zero_std", "solve_none/all + solve_all/all"),
    ("response/length_mean", "response_length/mean", "completions/mean_length", "decode_len/all/mean"),
    ("response/length_min", "response_length/min", "completions/min_length", "decode_len/all/min"),
    ("response/length_max", "response_length/max", "completions/max_length", "decode_len/all/max"),
    ("response/truncated", "response_length/clip_ratio", "completions/clipped_ratio", "is_truncated/all/mean"),
    ("prompt/length_mean", "prompt_length/mean", "", "prefill_len/all/mean"),
    ("prompt/length_min", "prompt_length/min", "", "prefill_len/all/min"),
    ("prompt/length_max", "prompt_length/max", "", "prefill_len/all/max"),
    ("tokens/response", "", "num_tokens (of the whole run)", "progress/decode_tokens"),
    ("tokens/prompt", "", "", "progress/prefill_tokens"),
    ("advantages/mean", "critic/advantages/mean", "", ""),
    ("advantages/min", "critic/advantages/min", "", ""),
    ("advantages/max", "critic/advantages/max", "", ""),
    ("returns/mean", "critic/returns/mean", "", ""),
    ("values/mean", "critic/values/mean", "", ""),
    ("value/explained_variance", "critic/vf_explained_var", "", ""),
    ("value/loss", "critic/vf_loss", "", ""),
    ("value/clip_fraction", "critic/vf_clipfrac", "", ""),
    ("policy/loss", "actor/pg_loss", "loss", "loss/mean"),
    ("policy/clip_fraction", "actor/pg_clipfrac", "clip_ratio/region_mean", ""),
    ("policy/clip_fraction_low", "", "clip_ratio/low_mean", ""),
    ("policy/clip_fraction_high", "", "clip_ratio/high_mean", ""),
    ("policy/entropy", "actor/entropy", "entropy", "entropy/all/mean"),
    ("policy/grad_norm", "actor/grad_norm", "grad_norm", "optim/grad_norm"),
    ("policy/lr", "actor/lr", "learning_rate", "optim/lr"),
    ("kl/mean", "actor/kl_loss", "kl", ""),
    ("mismatch/k3", "rollout_corr/kl", "", "mismatch_kl/all/mean"),
    ("agents/turns", "num_turns/mean", "", "num_turns/all/mean"),
    ("throughput/step", "perf/throughput", "", ""),
    ("throughput/update", "", "", "perf/throughput_per_gpu"),
    ("mfu/update", "perf/mfu/actor", "", "perf/mfu"),
    ("memory/<phase>", "perf/max_memory_allocated_gb", "", "perf/peak_memory"),
    ("time/step", "timing_s/step", "step_time", "time/step"),
    ("time/rollout", "timing_s/gen", "", "time/generate_completions"),
    ("time/update", "timing_s/update_actor", "", "time/forward_backward"),
)
# Names of peers without one of ours -> why.
_LEFT_OUT = (
    ("verl: critic/rewards/*", "the score minus the KL penalty; kl/per_response times kl/coef is the difference"),
    ("verl: actor/ppo_kl", "policy/ratio_max_deviation, the clip shares and kl/mean show how far an update moves"),
    ("verl: actor/pg_clipfrac_lower", "the share that dual_clip bounds; it is part of policy/clip_fraction_high"),
    ("verl: response/aborted_ratio", "a response has a token, or its episode failed: agents/failed"),
    (
        "verl: prompt_length/clip_ratio",
        "prompts are cut or dropped once, when they are read: the start has the numbers",
    ),
    ("verl: timing_per_token_ms/*", "the inverse of throughput/*"),
    ("verl: training/rollout_actor_probs_pearson_corr", "mismatch/mean and max are in nats, which the corrections use"),
    ("TRL: completions/*_terminated_length", "response/truncated has their share; rollouts/ has the lengths"),
    ("TRL: clip_ratio/low_min, high_max", "the extremes over microbatches depend on their size"),
    ("TRL: rewards/NAME/std", "reward/std shows a reward that no longer tells responses apart; rollouts/ has the rest"),
    (
        "prime-rl: solve_none, solve_all",
        "they need a right and a wrong; reward/uninformative_groups holds for any reward",
    ),
    ("prime-rl: optim/zero_grad_ratio", "a pass over all gradients, for a number that follows from the experts in use"),
    ("prime-rl: time/wait_for_batch", "schedule/engine_busy and agents/wait_share say which side waits"),
    ("queue and cache use of a server", "its own /metrics have them"),
)


def format_page() -> str:
    """Return the text of docs/metrics.md."""
    parts = [_INTRODUCTION]
    for metric in ROWS:
        if metric.name in _TITLES:
            parts.append(f"\n## {_TITLES[metric.name]}\n\n| metric | unit | what it is |\n|---|---|---|\n")
        parts.append(f"| `{metric.name}` | {metric.unit} | {_describe(metric)} |\n")
    return "".join([*parts, *_compare()])


def _compare() -> Iterator[str]:
    """Yield the tables of other libraries' names."""
    yield _NAMES
    for ours, *others in PEERS:
        yield f"| {' | '.join(_name(text) for text in (ours, *others))} |\n"
    yield "\nNot here:\n\n"
    for name, why in _LEFT_OUT:
        yield f"- {name.replace('*', '...')}: {why.replace('*', '...')}\n".replace("_", "\\_")


def _name(text: str) -> str:
    name, _, words = text.partition(" (")
    return f"`{name}`{words and f' ({words}'}" if text else ""


_INTRODUCTION = """\
# Metrics

Every key of a record in `metrics.jsonl` besides `step`; `python tools/make_docs.py` makes this page from
`megatron_rl/observability/metrics.py`. TensorBoard and Weights & Biases show the same numbers under the same
names.

A number that is measured several times in a step, usually once per optimizer step, is averaged. A record leaves out
what its run does not measure. Seconds and memory are rank 0's; all other numbers cover all ranks. A name in angle
brackets stands for any text. [Performance](performance.md) says what to tune when one looks wrong, [Health](health.md)
which curves are unhealthy, and [Extending](extending.md#metrics) how to report your own.
"""


_NAMES = """
## Names in other libraries

The same quantities in verl (`verl/trainer/ppo/metric_utils.py`), TRL (`GRPOTrainer`) and prime-rl (trainer and
orchestrator), as their sources had them in 2026. An empty cell: it has none. Definitions may differ in what they
average over.

| here | verl | TRL | prime-rl |
|---|---|---|---|
"""


def _describe(metric: Metric) -> str:
    text = metric.meaning.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_")
    return f"{text} (alarm: [{metric.alarm}](health.md#{metric.alarm}))" if metric.alarm else text
