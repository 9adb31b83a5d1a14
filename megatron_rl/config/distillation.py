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
        "What is compared at each token of a response: the log-probs of that token, whose difference is added to the "
        "advantage (sampled); or, as a term of the loss, the whole distributions (full), or the teacher's k likeliest "
        "tokens and all others as one (top_k).",
    )
    direction: Literal["reverse", "forward"] = option(
        "reverse", "full, top_k: reverse is KL(policy || teacher), forward KL(teacher || policy); sampled is reverse."
    )
    coef: float = option(1.0, "Weight of the term beside the reward's; with adv_estimator distill there is no other.")
    k: int = option(64, "top_k: tokens of the teacher that are compared one by one.", "tokens")
    choose_by: str | None = option(
        None,
        "Column of the data, such as data_source, whose value chooses the teacher of a prompt (teachers.NAME.values); "
        "null: all teachers, by their weights.",
    )
