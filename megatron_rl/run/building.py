# SPDX-License-Identifier: Apache-2.0
"""Build the objects of a training loop: roles on samples, engines and rewards (`Primitives`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.build import import_library
from megatron_rl.parallel.collectives import Process, init_distributed
from megatron_rl.run.inputs import RlInputs
from megatron_rl.run.parts import Parts
from megatron_rl.run.preparing import prepare
from megatron_rl.run.primitives import Policy, Primitives
from megatron_rl.run.roles import build_roles, group_timeout
from megatron_rl.run.rollout_members import RunSinks, build_rollout_members
from megatron_rl.run.state import TrainedPart, TrainingState, side_files
from megatron_rl.samples.pack import Packer
from megatron_rl.training.roles.on_samples import CriticOnSamples, PolicyOnSamples


def load(
    model_path: str | Path, config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), **parts: Any
) -> Primitives:
    """Build the primitives for a loop of your own; collective.

    Unlike a `Trainer`, it has no run directory and no watchdog. Without torchrun, the process is a job of one rank. For
    the arguments, see `Trainer.from_hf_config`.

    Raises:
        UserError: bad input; on every rank alike, before any process group exists.
    """
    prepared = prepare(model_path, config, overrides, Parts(**parts))
    process = init_distributed(group_timeout(prepared.config) / timedelta(minutes=1))
    prepared.agree()
    return build_primitives(prepared.config, prepared.inputs, prepared.parts, process, RunSinks())


def build_primitives(
    config: RunConfig, inputs: RlInputs, parts: Parts, process: Process, sinks: RunSinks
) -> Primitives:
    """Build the roles on samples, the engines and the training state; collective."""
    spec, timers = inputs.spec, sinks.timers
    if not parts.rollouts and process.rank in config.placement.ranks_of("rollout", process.world_size):
        import_library(config.rollout.engine, process.device)
    roles = build_roles(config, inputs, parts)
    reference, critic = roles.get("reference"), roles.get("critic")
    sampling = build_rollout_members(config, inputs, roles, process, sinks, parts)
    packers = {
        name: Packer(roles[name].model, spec.roles[name].settings, inputs.plan, config.algorithm, process.device)
        for name in spec.roles
    }
    saved = [role.spec for role in inputs.roles.values() if role.spec.trainable or role.spec.is_reset]
    state = TrainingState(
        {
            role.name: TrainedPart(roles[role.name].model.trained, roles[role.name].optimizer)
            for role in saved
            if roles[role.name].model.dp_rank is not None
        },
        {"prompts": sampling.prompts, "hybrid": sampling.hybrid}
        | ({"stream": sampling.stream} if sampling.stream is not None else {}),
        {role.name: side_files(config, role.path) for role in saved},
        sampling.stream,
    )
    actor = timers.watch(
        roles["actor"],
        compute_logprobs="old_logprobs",
        compute_sum_pi_squared="old_logprobs",
        forward_backward="update",
        optim_step="update",
    )
    policy = Policy(actor, packers["actor"], sampling, state, config)
    teachers = {
        name: timers.watch(
            roles[role.name], compute_logprobs="teachers", compute_top_k="teachers", compute_hidden="teachers"
        )
        for name, role in spec.teachers.items()
    }
    asked = None
    if teachers:
        from megatron_rl.training.roles.teachers import TeachersOnSamples

        asked = TeachersOnSamples(teachers, {name: packers[f"teachers.{name}"] for name in teachers}, policy, config)
    return Primitives(
        config=config,
        inputs=inputs,
        policy=policy,
        teachers=asked,
        reference=reference
        and PolicyOnSamples(timers.watch(reference, compute_logprobs="ref_logprobs"), packers["reference"]),
        critic=critic
        and CriticOnSamples(
            timers.watch(critic, compute_values="values", forward_backward="update_critic", optim_step="update_critic"),
            packers["critic"],
        ),
        reward_model=sampling.reward_model,
        state=state,
    )
