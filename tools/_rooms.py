# SPDX-License-Identifier: Apache-2.0
"""The rooms of the house by layer: tests/test_house.py enforces the table, docs/architecture.md draws it."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """A sub-package or root module of megatron_rl, `launch` or `tools`.

    Attributes:
        layer: it imports lower ones only.
        does: one line for the page.
    """

    layer: int
    does: str


# A new room must be given a layer here; two rooms of one layer do not know each other.
ROOMS: dict[str, Room] = {
    "config": Room(0, "settings: schema, recipes, command line, batch arithmetic, verl's names"),
    "types": Room(0, "the words of all rooms: prompts, rollouts, errors of the user"),
    "observability": Room(0, "metrics, logs, TensorBoard, status page, the page of rollouts"),
    "extension": Room(0, "registries, plugins, code of the user"),
    "parallel": Room(1, "layouts, process groups, collectives, Ulysses, the CPU runtime"),
    "weights": Room(2, "logical tensors, families of models, and which box of which lies where"),
    "algorithms": Room(2, "advantage estimators, losses, KL, corrections; pure"),
    "data": Room(2, "prompts, tokenizers, chat templates"),
    "packing": Room(2, "microbatches of a token budget, shared prompts, buckets"),
    "rewards": Room(2, "rules, functions, services, and metrics of validation"),
    "resharding": Room(3, "plans that move weights from layout to layout, their execution and certificate"),
    "models": Room(3, "megatron-core models over packed rows"),
    "experience": Room(3, "the samples of a step: headers everywhere, tokens where they are, columns by name"),
    "engines": Room(4, "rollout engines; the only room that imports an engine's library"),
    "checkpoint": Room(4, "weights and optimizer states on the disk, conversion"),
    "agents": Room(4, "episodes: transcripts, environments and their processes"),
    "planning": Room(4, "memory, traffic and time of a job before it starts"),
    "weight_sync": Room(5, "one set of weights, two modes: training and rollout"),
    "training": Room(5, "packed models, heads, optimizers, the step"),
    "rollout": Room(5, "requests to the engines: dispatch, serving, scoring"),
    "parity": Room(6, "transformers, Megatron and the engine compared"),
    "roles": Room(6, "which models a run has, how they are built, actor, critic, reference, reward model"),
    "lifecycle": Room(6, "opening and resuming a run, preemption, watchdog, failures"),
    "capsule": Room(7, "a step written down and done again"),
    "rehearsal": Room(7, "GPUs that are not there: graphs recorded on a CPU, jobs of fake tensors measured"),
    "trainer": Room(8, "primitives, and the loops: GRPO and relatives, fine-tuning, evaluation"),
    "__init__": Room(9, "the names that a user's program imports"),
    "launch": Room(9, "entry points and recipes"),
    "tools": Room(9, "all other commands, and benchmarks"),
}
