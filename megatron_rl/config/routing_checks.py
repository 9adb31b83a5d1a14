# SPDX-License-Identifier: Apache-2.0
"""The parts of the checks of a config that are about routers and experts, and about multi-token prediction."""

from __future__ import annotations

from megatron_rl.config.checked import CheckedConfig
from megatron_rl.extension.engines import name_engines

_HINT = "set actor.router_replay=trainer, which asks nothing of the engine, or {}"


def check_routers(config: CheckedConfig) -> None:
    """Routes can be recorded where the forward of the engine is in sight, one step at a time."""
    config.require(
        not config.get("actor.router_bias_rate") or config.get("actor.lora.rank") == 0,
        "actor.router_bias_rate",
        "with actor.lora, which leaves the weights of the model as they are",
        expected="0",
        hint="leave it out",
    )
    engine, supports = config.get("rollout.engine"), config.supports
    split = config.get("actor.expert_tensor_parallel_size")
    config.require(
        split in (None, config.get("actor.tensor_model_parallel_size")) or not supports("is_actor"),
        "actor.expert_tensor_parallel_size",
        f"with rollout.engine = {engine!r}, whose engines are made of whole tensor parallel groups",
        expected="actor.tensor_model_parallel_size",
        hint="leave it out, or choose another rollout.engine",
    )
    if config.get("actor.router_replay") != "engine":
        return
    config.require(
        supports("routes"),
        "actor.router_replay",
        f"with rollout.engine = {engine!r}, which does not tell which experts it chooses",
        expected="off or trainer",
        hint=_HINT.format(f"rollout.engine={name_engines('routes')}"),
    )
    for leaf, needed in (("enforce_eager", True), ("async_scheduling", False), ("model_runner", "v1")):
        config.require(
            not supports("vllm_modes") or config.get(f"rollout.{leaf}") == needed,
            f"rollout.{leaf}",
            "with actor.router_replay = 'engine': routers are listened to in each forward",
            expected=str(needed).lower(),
            hint=_HINT.format(f"rollout.{leaf}={str(needed).lower()}"),
        )


def check_mtp(config: CheckedConfig) -> None:
    """The layer behind the last one learns from the whole weights of a policy, microbatch by microbatch."""
    rate = config.get("actor.mtp_lr")
    for name, needed in (("step_mode", "eager"), ("lora.rank", 0), ("zero_stage", 1)):
        config.require(
            not rate or config.get(f"actor.{name}") == needed,
            f"actor.{name}",
            f"with actor.mtp_lr = {rate}",
            expected=str(needed),
            hint=f"set actor.{name}={needed}, or leave actor.mtp_lr out",
        )
