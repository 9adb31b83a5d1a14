# SPDX-License-Identifier: Apache-2.0
"""The settings of low-rank adapters, `actor.lora` and `critic.lora`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.config.declaring import option

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA, 2106.09685): they are trained, and the model stays as it is."""

    rank: int = option(0, "Rank of the adapters; 0: the model itself is trained.", ge=0)
    alpha: float | None = option(None, "Adapters are scaled by alpha / rank; default: twice the rank.", gt=0)
    rslora: bool = option(False, "Multiply by alpha / sqrt(rank) instead (rsLoRA, 2312.03732).")
    target_modules: list[str] = option(
        [ALL_LINEAR],
        "Matrices with adapters, in PEFT's words: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj "
        "(Mixtral: w1, w3, w2; of every expert); all-linear: all, in a mixture of experts the first four.",
    )
    path: str | None = option(None, "Adapters to start from, as PEFT saves them; default: A random, B zero.")

    @property
    def scale(self) -> float:
        """What the product B A is multiplied by."""
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
