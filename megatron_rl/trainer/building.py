# SPDX-License-Identifier: Apache-2.0
"""The members of a run: roles as the loop calls them, the engine, the rewards, and what is saved of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.algorithms.kl import build_kl_controller
from megatron_rl.config.schema import RunConfig
from megatron_rl.experience.pack import Packer
from megatron_rl.lifecycle.checkpoints import Checkpoints
from megatron_rl.lifecycle.opening import OpenedRun
from megatron_rl.parallel.collectives import Process, open_store, world
from megatron_rl.roles.build import build_roles
from megatron_rl.roles.export import actor_export, side_files
from megatron_rl.roles.inputs import RlInputs
from megatron_rl.roles.on_samples import (
    ActorOnSamples,
    CriticOnSamples,
    PolicyOnSamples,
    RewardModelOnSamples,
)
from megatron_rl.roles.parts import Parts
from megatron_rl.trainer.sampling import RunSinks, build_rollout_members


@dataclass(frozen=True)
class Members:
    """What a run is made of.

    Attributes:
        actor, reference, critic, reward_model: given samples; None: the run has none.
        hybrid: the weights in the engines.
        collector: generates and scores.
        kl: the controller of the KL coefficient.
        trained: the roles whose states are saved, by name.
        checkpoints: of the run.
    """

    actor: ActorOnSamples
    reference: PolicyOnSamples | None
    critic: CriticOnSamples | None
    reward_model: RewardModelOnSamples | None
    hybrid: Any
    collector: Any
    kl: Any
    trained: dict[str, Any]
    checkpoints: Checkpoints


def build_members(
    config: RunConfig, inputs: RlInputs, parts: Parts, process: Process, opened: OpenedRun
) -> Members:
    """Build the roles, the engine and what surrounds them; collective."""
    plan, spec, timers = inputs.plan, inputs.spec, opened.run.timers
    roles = build_roles(config, inputs, parts)
    actor, reference, critic = roles["actor"], roles.get("reference"), roles.get("critic")
    sinks = RunSinks(timers, opened.run.follow_rollouts(open_store("rollouts", world())))
    made = build_rollout_members(config, inputs, roles, process, sinks, parts)
    packers = {name: Packer(roles[name].model, spec.roles[name].layout, plan, config.algorithm, process.device)
               for name in roles}
    kl = build_kl_controller(config.algorithm)
    trained = {role.name: roles[role.name] for role in spec.trained}
    return Members(
        actor=ActorOnSamples(
            timers.watch(
                actor, compute_logprobs="old_logprobs", compute_sum_pi_squared="old_logprobs", update="update"),
            packers["actor"], records_updates=config.trainer.log_rollouts != 0),
        reference=reference and PolicyOnSamples(
            timers.watch(reference, compute_logprobs="ref_logprobs"), packers["reference"]),
        critic=critic and CriticOnSamples(
            timers.watch(critic, compute_values="values", update="update_critic"), packers["critic"]),
        reward_model=made.reward_model, hybrid=made.hybrid, collector=made.collector, kl=kl, trained=trained,
        checkpoints=Checkpoints(
            config, opened, trained, {"prompts": made.prompts, "kl": kl, "hybrid": made.hybrid},
            side_files={role.name: side_files(config, role.path) for role in spec.trained},
            export=actor_export(config, actor.model), total_steps=plan.total_steps or 0))
