# SPDX-License-Identifier: Apache-2.0
"""The settings of on-policy distillation, `algorithm.distillation`; the teachers have a section of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.declaring import option

SAMPLED = "sampled"


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """How the policy learns from the teachers (section `teachers`)."""

    kind: Literal["sampled", "full", "top_k"] = option(
        SAMPLED,
        "sampled: the difference of log-probs of the sampled token is added to the advantage; full: the loss "
        "compares the whole distributions; top_k: the teacher's k likeliest tokens and all others as one.",
    )
    direction: Literal["reverse", "forward"] = option(
        "reverse", "full, top_k: KL(policy || teacher) (reverse) or KL(teacher || policy) (forward)."
    )
    coef: float = option(1.0, "Weight of the term; with adv_estimator distill it is the only one.", ge=0)
    k: int = option(64, "top_k: tokens of the teacher that are compared one by one.", "tokens", ge=1)
    choose_by: str | None = option(
        None,
        "Column of the data whose value chooses the teacher (teachers.NAME.values); null: all teachers, by weight.",
    )
