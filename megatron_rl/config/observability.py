# SPDX-License-Identifier: Apache-2.0
"""Settings of what a run writes about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.declaring import option


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Limits of the alarms about the curves of a run, keys of one setting; null turns one off."""

    window: int = option(10, "Steps whose mean is looked at.", "steps", ge=1)
    entropy_floor: float | None = option(0.1, "Alarm when the entropy is below this share of the first steps'.", ge=0)
    length_growth: float | None = option(
        1.5, "Alarm when responses are longer by this factor than four windows before, without more reward.", ge=0
    )
    mismatch_growth: float | None = option(
        10.0,
        "Alarm when engine and trainer differ by this factor more than in the first steps (and by 1e-3 nats).",
        ge=0,
    )
    gradient_growth: float | None = option(
        10.0, "Alarm when the gradient norm is larger by this factor than four windows before.", ge=0
    )
    clip_limit: float | None = option(0.2, "Alarm when a larger share of the tokens is clipped.", ge=0)
    truncated_limit: float | None = option(0.5, "Alarm when a larger share of the responses is truncated.", ge=0)
    uninformative_limit: float | None = option(0.9, "Alarm when a larger share of the groups has equal rewards.", ge=0)
    restating_limit: float | None = option(
        0.1, "Alarm when a larger share of the responses is rewarded for repeating a part of the prompt.", ge=0
    )
    failed_limit: float | None = option(
        0.1,
        "Alarm when this share of the episodes has failed, or a reward service on this share of the responses.",
        ge=0,
    )
    sample_size_floor: float | None = option(
        0.5, "Alarm when importance weights leave a smaller effective sample size, as a share.", ge=0
    )
    explained_variance_floor: float | None = option(
        0.0, "Alarm when the critic explains less of the returns' variance, after two windows."
    )
    dead_experts_limit: float | None = option(
        1.0, "Alarm when more experts, over all layers, get no token of an update.", "experts", ge=0
    )
    components: bool = option(True, "Alarm when one component of the reward rises while another falls.")


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Logging."""

    tensorboard: bool = option(True, "Write TensorBoard event files to <run_dir>/tensorboard.")
    histograms_every: int = option(
        10,
        "TensorBoard histograms (lengths, rewards, advantages, log-prob gap) and sample texts in step 1 and every "
        "N steps (0: never).",
        "steps",
        ge=0,
    )
    progress_bar: bool = option(
        True, "Bars of steps and responses on a terminal; else a line every 10 seconds of a generation."
    )
    console_every: int = option(1, "Print the console line every N steps.", "steps", ge=1)
    wandb: Literal["off", "offline", "online"] = option(
        "off", "Log to Weights & Biases (needs wandb); offline: into <run_dir>/wandb."
    )
    wandb_project: str = option("megatron_rl", "Project in Weights & Biases.")
    wandb_name: str | None = option(None, "Name of the run there; default: that of the run directory.")
    status_port: int | None = option(
        None,
        "Port of a read-only web page about the run (0: any free port, printed); null: off.",
        ge=0,
        lt=1 << 16,
        wrong="is no port",
        hint="0 takes any free port",
    )
    status_host: str = option("127.0.0.1", "Address that the page is served on; 0.0.0.0: every one of the machine.")
    health: HealthConfig = option(
        HealthConfig(), "Window and limits of the alarms (docs/health.md); null: no such alarm."
    )
