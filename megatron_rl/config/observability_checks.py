# SPDX-License-Identifier: Apache-2.0
"""The part of the checks of a config that is about watching and debugging a run."""

from __future__ import annotations

import importlib.util

from megatron_rl.config.checked import CheckedConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.types import UserError


def check_observability(config: CheckedConfig) -> None:
    """Check that the package of each enabled metrics service is installed."""
    config.require(
        config.get("observability.wandb") == "off" or importlib.util.find_spec("wandb") is not None,
        "observability.wandb",
        "needs the package wandb",
        expected="the package, or off",
        hint="pip install wandb, at the version of requirements.txt",
    )


def check_debugging(config: CheckedConfig) -> None:
    """The debugger is installed, on every rank, and a step to stop at has a rank that stops."""
    rank, step = config.get("trainer.debug_rank"), config.get("trainer.breakpoint_step")
    config.require(
        rank is None or importlib.util.find_spec("debugpy") is not None,
        "trainer.debug_rank",
        "needs the package debugpy",
        expected="the package, or null",
        hint="pip install debugpy, at the version of requirements.txt",
    )
    config.require(
        step is None or rank is not None,
        "trainer.breakpoint_step",
        "without a rank that stops there",
        expected="trainer.debug_rank",
        hint="add --debug-rank R, or leave this out",
    )


def check_debug_rank(cfg: RunConfig, world_size: int) -> None:
    """Refuse a rank that the job does not have, for which no rank would wait.

    Raises:
        UserError: see above.
    """
    rank = cfg.trainer.debug_rank
    if rank is not None and not 0 <= rank < world_size:
        raise UserError(
            f"trainer.debug_rank = {rank} in a job of {world_size} ranks",
            source="trainer.debug_rank",
            expected=f"0 or more, below {world_size}",
            hint="choose one of them",
        )
