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
    "types": Room(0, "shared types: prompts, rollouts, user errors"),
    "observability": Room(0, "metrics, logs, TensorBoard, status page"),
    "extension": Room(0, "registries, plugins, abilities of engines"),
    "parallel": Room(1, "layouts, process groups, collectives, Ulysses, CPU runtime"),
    "weights": Room(2, "logical tensors, model families, placements"),
    "algorithms": Room(2, "advantage estimators, losses, KL, corrections; pure"),
    "data": Room(2, "prompts, tokenizers, chat templates"),
    "packing": Room(2, "microbatches of a token budget, shared prompts, buckets"),
    "rewards": Room(2, "rules, functions, services, validation metrics"),
    "resharding": Room(3, "weight transfer: plan, execution, certificate"),
    "models": Room(3, "megatron-core models over packed rows"),
    "experience": Room(3, "a step's samples: headers, tokens, columns"),
    "engines": Room(4, "rollout engines; the only room that imports an engine's library"),
    "checkpoint": Room(4, "weights and optimizer states on disk"),
    "agents": Room(4, "episodes: transcripts, environments, their processes"),
    "planning": Room(4, "memory, traffic and time of a job before it starts"),
    "weight_sync": Room(5, "switches between training and rollout"),
    "training": Room(5, "packed models, heads, optimizers, the step"),
    "rollout": Room(5, "requests to engines: dispatch, serving, scoring"),
    "roles": Room(6, "actor, critic, reference, reward model, teachers: which a run has, and how they are built"),
    "lifecycle": Room(6, "opening and resuming a run, preemption, watchdog, failures"),
    "capsule": Room(7, "capture of a step"),
    "trainer": Room(8, "primitives, and the loops: RL, fine-tuning, evaluation"),
    "__init__": Room(9, "the public names"),
    "launch": Room(10, "entry points, recipes"),
    "tools": Room(
        9,
        "other commands, benchmarks, and wings: conversion, replay, parity, rehearsal, viewer, schedules",
    ),
}
