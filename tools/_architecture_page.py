# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: the rooms by layer, and the two roads through them."""

from __future__ import annotations

from tools._rooms import ROOMS

_HEAD = """<!-- Made by tools/make_docs.py from tools/_rooms.py; do not edit. -->
# Architecture

The code is divided into rooms, the subpackages of `megatron_rl/`. A room imports only rooms of lower layers and
`types`; `tests/test_house.py` enforces this from the table that generates this page.

## Rooms

| layer | room | what it does |
|---|---|---|
"""
# Each line names rooms of the table above; a test holds the page to that.
_ROADS = """
## The road of the samples

```text
 data          prompts of step n, shuffled by (seed, epoch)
  |
 rollout       responses from engines, scored by rewards
  |
 samples       headers on every rank; each role fetches its tokens and packs them
  |
 training      columns: old log-probs, reference log-probs, values
  |
 algorithms    advantages and losses, with global denominators
  |
 training      optimizer steps of actor and critic
  |
 observability one record per step
```

## The road of the weights

```text
 checkpoint    HF files or a distributed checkpoint, as boxes of logical tensors (weights)
  |
 models        Megatron shards in the role's layout (parallel)
  |
 training      optimizer steps
  |
 transfer      moves the weights by a plan and certifies them
  |
 engines       the engine's own parameters
  |
 checkpoint    back to disk, for any layout
```

`Trainer.train` in `megatron_rl/run/grpo.py` joins both roads. [Concepts](concepts.md) has pictures;
[Extending](extending.md#inside-the-package) says where changes go.
"""

_PLACES_HEAD = "| topic | file | name |\n|---|---|---|"
# Topic -> file of the package, and the name in it; a test looks them up.
PLACES = (
    ("the algorithm, line by line", "run/grpo.py", "Trainer"),
    ("prompts of a step, and their order", "data/prompt_order.py", "PromptBatches"),
    ("seeds of responses", "engines/sampling.py", "derive_seed"),
    ("choice of the engine that serves a sample", "rollout/dispatch.py", "assign_engines"),
    ("the loop between samples and the requests of an engine", "rollout/generation.py", "RolloutGenerator"),
    ("steps of an engine", "rollout/serving.py", "serve"),
    ("end of a sampling phase", "rollout/phase.py", "open_phase_end"),
    ("samples that may begin ahead of their step", "rollout/phase.py", "find_window"),
    ("partial rollouts, kept and resumed", "rollout/packed_episodes.py", "pack_rollouts"),
    ("dynamic sampling: groups that are drawn again", "rollout/collector.py", "Collector"),
    ("episodes of several turns", "rollout/episodes.py", "Episodes"),
    ("the engine's sleep, and the move of weights", "transfer/hybrid_engine.py", "HybridEngine"),
    ("proof that weights arrived", "transfer/certificate.py", "Certificate"),
    ("headers of a step's samples, known to every rank", "samples/table.py", "Headers"),
    ("sequences -> microbatches", "samples/microbatches.py", "plan_microbatches"),
    ("denominators of the loss", "algorithms/aggregation.py", "aggregate"),
    ("batch arithmetic and its refusals", "config/batch_plan.py", "BatchPlan"),
    ("refusals of context parallelism", "parallel/layout.py", "check_context_parallel"),
    ("an optimizer step", "training/update.py", "OptimizerStep"),
    ("capture of a step as a CUDA graph", "training/cuda_graph.py", "GraphStep"),
    ("the end of a rank that hangs", "run/watchdog.py", "Watchdog"),
    ("checkpoints: when, and of which parts", "run/checkpoints.py", "Checkpoints"),
    ("alarms", "observability/health.py", "HealthMonitor"),
)


def format_page() -> str:
    """The page, the highest layer first."""
    rows = sorted(ROOMS.items(), key=lambda item: -item[1].layer)
    table = [f"| {room.layer} | `{name}` | {room.does} |" for name, room in rows]
    places = [f"| {topic} | `megatron_rl/{file}` | `{name}` |" for topic, file, name in PLACES]
    return "\n".join([_HEAD + "\n".join(table), _ROADS, "## Places\n", _PLACES_HEAD, *places, ""])
