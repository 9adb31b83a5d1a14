# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: packages by layer, data and weight flow file by file, topics."""

from __future__ import annotations

from collections.abc import Iterable

from tools._rooms import ROOMS, WINGS

_HEAD = """<!-- Made by tools/make_docs.py from tools/_rooms.py; do not edit. -->
# Architecture

The code is divided into rooms, the subpackages of `megatron_rl/`. A room imports only rooms of lower layers and
`types`; `tests/test_house.py` enforces this from the table that generates this page.

## Rooms

| layer | room | what it does |
|---|---|---|
"""
_WINGS_HEAD = """
## Wings

A run loads these modules only if its config asks for them (`tests/test_house.py`); without them, the package has about
three quarters of its lines.

| wing | asked for by | modules |
|---|---|---|
"""
# Files of a step in order: description, file in the package, and a name in it; a test checks that they exist.
SAMPLES_ROAD = (
    ("prompts of step n, shuffled by (seed, epoch)", "data/prompts.py", "PromptBatches"),
    (
        "draws groups, has them scored, and draws again what dynamic sampling leaves out",
        "rollout/collector.py",
        "Collector",
    ),
    ("the loop between samples and engines", "rollout/generation.py", "RolloutGenerator"),
    ("samples that have begun, and the requests of their next turns", "rollout/episodes.py", "Episodes"),
    ("one engine, step by step, until the phase ends", "rollout/generation.py", "serve"),
    ("tokens and log-probs", "engines/vllm/vllm_engine.py", "VllmEngine"),
    ("rewards", "rewards/scoring.py", "Scorer"),
    ("headers of all samples on every rank", "samples/table.py", "Headers"),
    ("tokens that a role fetches", "samples/table.py", "fetch"),
    ("microbatches of a token budget", "samples/batch.py", "Packer"),
    ("columns of a role: log-probs, values", "training/roles/actor.py", "RoleOnSamples"),
    ("advantages and returns", "samples/experience.py", "compute_advantages"),
    ("the loss, with global denominators", "algorithms/losses.py", "compute_policy_loss"),
    ("forward and backward of packed rows", "training/packed_model.py", "PackedModel"),
    ("an optimizer step", "training/optimizer.py", "OptimizerStep"),
    ("one record per step", "observability/run.py", "Run"),
)
WEIGHTS_ROAD = (
    ("HF files, as boxes of logical tensors", "checkpoint/huggingface.py", "load_huggingface"),
    ("Megatron shards in the role's layout", "models/gpt.py", "build_gpt_stages"),
    ("optimizer steps", "training/optimizer.py", "Optimizer"),
    (
        "before a rollout: wakes the engine, moves the weights, certifies them",
        "transfer/hybrid_engine.py",
        "HybridEngine",
    ),
    ("which rank sends which box", "transfer/planner.py", "Planner"),
    ("copies between ranks", "transfer/executor.py", "Resharder"),
    ("digests of both sides", "transfer/executor.py", "Certificate"),
    ("back to disk, for any layout", "checkpoint/saving.py", "CheckpointSaver"),
)
_ROADS_END = """
`Trainer.train` in `megatron_rl/run/grpo.py` joins both roads. [Concepts](concepts.md) has pictures;
[Extending](extending.md#inside-the-package) says where changes go.
"""

_PLACES_HEAD = "| topic | file | name |\n|---|---|---|"
# Topic, file in the package, and a name in it; a test checks that they exist.
PLACES = (
    ("the algorithm, line by line", "run/grpo.py", "Trainer"),
    ("prompts of a step, and their order", "data/prompts.py", "PromptBatches"),
    ("seeds of responses", "engines/protocol.py", "derive_seed"),
    ("choice of the engine that serves a sample", "rollout/generation.py", "assign_engines"),
    ("the loop between samples and the requests of an engine", "rollout/generation.py", "RolloutGenerator"),
    ("steps of an engine", "rollout/generation.py", "serve"),
    ("end of a sampling phase", "rollout/phase_ends.py", "open_phase_end"),
    ("samples that may begin ahead of their step", "rollout/phase_ends.py", "find_window"),
    ("partial rollouts: continued, in a run and after a restart", "rollout/episodes.py", "Episodes"),
    ("partial rollouts: only their format in a checkpoint", "rollout/packed_episodes.py", "pack_rollouts"),
    ("prompts that have begun and were not learned from", "rollout/collector.py", "RolloutStream"),
    ("dynamic sampling: groups that are drawn again", "rollout/collector.py", "Collector"),
    ("episodes of several turns", "rollout/episodes.py", "Episodes"),
    ("the engine's sleep, and the move of weights", "transfer/hybrid_engine.py", "HybridEngine"),
    ("proof that weights arrived", "transfer/executor.py", "Certificate"),
    ("headers of a step's samples, known to every rank", "samples/table.py", "Headers"),
    ("sequences -> microbatches", "samples/microbatches.py", "plan_microbatches"),
    ("formula of GRPO's advantages", "algorithms/advantages.py", "compute_grpo_advantages"),
    ("formulas of the further advantage estimators (RLOO, GAE)", "algorithms/estimators.py", "compute_gae_advantages"),
    ("formulas of the further policy losses (GSPO, CISPO)", "algorithms/policy_losses.py", "compute_gspo_loss"),
    ("coefficient of the KL term, adapted", "algorithms/losses.py", "AdaptiveKL"),
    ("responses kept out of the loss (cut, failed)", "samples/table.py", "build_headers"),
    ("denominators of the loss", "algorithms/losses.py", "aggregate"),
    ("batch arithmetic and its refusals", "config/batch_plan.py", "BatchPlan"),
    ("context parallelism: the number of heads", "weights/support.py", "check_context_parallel"),
    ("layouts that a model refuses, context parallelism included", "planning/role_layouts.py", "check_layout"),
    ("an optimizer step", "training/optimizer.py", "OptimizerStep"),
    ("capture of a step as a CUDA graph", "training/cuda_graph.py", "GraphStep"),
    ("the end of a rank that hangs", "run/watchdog.py", "Watchdog"),
    ("checkpoints: when, and of which parts", "run/checkpoints.py", "Checkpoints"),
    ("the best checkpoint: chosen", "observability/run.py", "Run"),
    ("the best checkpoint: kept", "checkpoint/directory.py", "prune"),
    ("tool calls in a reply", "agents/tool_formats.py", "read_tool_calls"),
    ("verl's names -> ours", "compat/aliases.py", "translate"),
    ("alarms", "observability/run.py", "HealthMonitor"),
)


def format_page() -> str:
    """Format the page."""
    rows = sorted(ROOMS.items(), key=lambda item: -item[1].layer)
    table = [f"| {room.layer} | `{name}` | {room.does} |" for name, room in rows]
    wings = [f"| {name} | {wing.door} | {_as_paths(wing.modules)} |" for name, wing in WINGS.items()]
    parts = [_HEAD + "\n".join(table), _WINGS_HEAD + "\n".join(wings)]
    for title, rows_of in (
        ("The road of the samples", SAMPLES_ROAD),
        ("The road of the weights", WEIGHTS_ROAD),
        ("Places", PLACES),
    ):
        parts += [
            f"\n## {title}\n",
            _PLACES_HEAD,
            *(f"| {topic} | `megatron_rl/{file}` | `{name}` |" for topic, file, name in rows_of),
        ]
    return "\n".join([*parts, _ROADS_END])


def _as_paths(modules: Iterable[str]) -> str:
    """Return the paths of modules, or of folders, if their names end with a dot."""
    return ", ".join(f"`{name.replace('.', '/')}`" for name in modules)
