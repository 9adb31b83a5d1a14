# SPDX-License-Identifier: Apache-2.0
"""Settings of training checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.declaring import option


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Training checkpoints (written every trainer.save_freq steps) and what a run does with those it finds."""

    resume: str = option(
        "auto",
        "auto: from the newest valid checkpoint in trainer.run_dir, if any; must: end the run if there is none; "
        "never: begin a new run; or a checkpoint directory to start from.",
    )
    save_optimizer: bool = option(True, "Save all that resuming needs; false: weights only.")
    save_huggingface: bool = option(
        True, "Also write the policy in HF format into step_<N>/huggingface (not on a signal)."
    )
    async_save: bool = option(True, "Write in the background while training continues (one copy in host memory).")
    save_every_minutes: float | None = option(
        30.0,
        "Save also this long after the last save, without the HF format, until the next checkpoint; null: off.",
        "minutes",
        gt=0,
    )
    keep_last: int | None = option(
        None, "Keep the newest N checkpoints, delete older ones; null: all.", "checkpoints", ge=1
    )
    allow_changes: list[
        Literal["model", "critic", "reference", "reward_model", "teachers", "train_files", "reward", "plugins"]
    ] = option([], "Inputs that may differ on resuming; an error there says which name it takes.")
