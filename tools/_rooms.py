# SPDX-License-Identifier: Apache-2.0
"""Layers of the packages, and wings, for tests/test_house.py and docs/architecture.md."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """A subpackage or root module of megatron_rl, `launch` or `tools`.

    Attributes:
        layer: may import lower layers only.
    """

    layer: int
    does: str


# A new package needs a layer here; packages of the same layer must not import each other.
ROOMS: dict[str, Room] = {
    "config": Room(0, "settings: declarations, rules, batch arithmetic"),
    "types": Room(0, "shared types: prompts, rollouts, user errors"),
    "observability": Room(1, "metrics, logs, TensorBoard, status page"),
    "extension": Room(0, "registries, plugins, abilities of engines"),
    "parallel": Room(1, "layouts, process groups, collectives, Ulysses, CPU runtime"),
    "compat": Room(1, "names of verl and TRL, translated into ours"),
    "weights": Room(2, "logical tensors, model families, placements"),
    "algorithms": Room(2, "advantage estimators, losses, KL, corrections; pure"),
    "data": Room(2, "prompts, tokenizers, chat templates"),
    "rewards": Room(2, "rules, functions, services, validation metrics"),
    "samples": Room(3, "a step's samples: headers, tokens, columns, microbatches"),
    "agents": Room(3, "episodes: transcripts, environments, their processes"),
    "models": Room(4, "megatron-core models over packed rows"),
    "engines": Room(5, "rollout engines; the only room that imports an engine's library"),
    "transfer": Room(6, "the actor's weights to engines and back: plan, execution, certificate, switch"),
    "checkpoint": Room(7, "weights and optimizer states on disk"),
    "planning": Room(7, "memory, traffic and time of a job before it starts"),
    "training": Room(8, "packed models, heads, optimizers, the step; actor, critic, reference, reward model, teachers"),
    "rollout": Room(8, "requests to engines: dispatch, serving, scoring"),
    "capsule": Room(8, "capture of a step"),
    "run": Room(9, "the loops (RL, fine-tuning), and a run: command line, inputs, checkpoints, watchdog"),
    "__init__": Room(10, "the public names"),
    "tools": Room(10, "commands; wings: benchmarks, conversion, replay, parity, rehearsal, serving, viewer, planning"),
    "launch": Room(11, "entry points, recipes"),
}


class Wing(NamedTuple):
    """A part of the package that is loaded only by runs whose config asks for it.

    Attributes:
        door: settings or files that ask for it.
        modules: starts of its modules' names.
    """

    door: str
    modules: tuple[str, ...]


WINGS: dict[str, Wing] = {
    "adapters": Wing(
        "`actor.lora.rank`", ("models.lora_linears", "training.adapted_model", "weights.adapters", "checkpoint.peft")
    ),
    "agents": Wing("`agents.environment`, `agents.tools`, `agents.program`", ("agents.",)),
    "capsules": Wing("`trainer.capture_step`", ("capsule.",)),
    "elastic and expert-parallel engines": Wing(
        "`schedule.elastic`, `rollout.data_parallel_size`", ("engines.elastic.", "engines.lock_step")
    ),
    "engine servers": Wing("`rollout.engine`: vllm_server, sglang, openai", ("engines.servers.",)),
    "mixtures of experts": Wing(
        "the model's config.json",
        ("models.experts", "models.routing", "training.router_replay", "weights.packed_experts"),
    ),
    "multi-token prediction": Wing("`actor.mtp_lr`", ("training.roles.mtp",)),
    "Muon": Wing("`actor.optimizer`", ("training.muon",)),
    "names of verl and TRL": Wing("a recipe with such names, `--help`", ("compat.",)),
    "planner": Wing(
        "a GPU and `trainer.check_memory`, `layout.mode`",
        ("planning.admission", "planning.cluster", "planning.memory", "planning.parameters"),
    ),
    "reasoning-gym": Wing("`reasoning-gym:NAME` as a file or environment", ("extension.reasoning_gym",)),
    "trackers": Wing("`observability.trackers`", ("observability.trackers",)),
    "ZeRO-3": Wing("`actor.zero_stage`", ("training.fully_sharded", "weights.row_shards")),
}
