# SPDX-License-Identifier: Apache-2.0
"""Settings of training checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.declaring import option


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Training checkpoints (written every trainer.save_freq steps) and what a run does with those it finds."""

    resume: str = option(
        "auto",
        "auto: resume from the newest valid checkpoint in trainer.run_dir, if there is one; must: end the run "
        "where there is none; never: begin a new run; or the directory of a checkpoint to start from.",
    )
    save_optimizer: bool = option(
        True, "Save optimizer states, schedule, random numbers and data position; false: weights only, no resume."
    )
    save_huggingface: bool = option(
        True, "Write the policy in HF format as well, into step_<N>/huggingface (not when a signal ends the run)."
    )
    async_save: bool = option(True, "Write in the background while training continues (one copy in host memory).")
    save_every_minutes: float | None = option(
        30.0,
        "Save also when the last save is so long ago, so that a crash loses no more; without the HF format, and "
        "gone when the next checkpoint is there; null: off.",
        "minutes",
    )
    max_failed_saves: int = option(3, "So many saves in a row that fail end the run.", "saves")
    keep_last: int | None = option(None, "Keep the newest N checkpoints, delete older ones; null: all.", "checkpoints")
    keep_best: bool = option(True, "Never delete the one with the best trainer.best_metric.")
    allow_changes: list[str] = option(
        [],
        "What may differ from the run behind the checkpoint: reference, reward_model, teachers, train_files, reward, "
        "plugins (their content).",
    )
