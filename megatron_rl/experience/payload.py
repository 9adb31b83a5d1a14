# SPDX-License-Identifier: Apache-2.0
"""The tokens of a step that one rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.experience.table import Headers
from megatron_rl.types import Branch, Rollout


@dataclass(frozen=True)
class Payload:
    """The tokens that are here.

    Attributes:
        branches: by index of the sequence.
        ranks: [num_replicas, width] the ranks on which the sequences of each holder are.
        num_bytes: that this rank has received for it.
    """

    branches: Mapping[int, Branch]
    ranks: np.ndarray
    num_bytes: int = 0


def hold(held: Iterable[tuple[int, Rollout]], headers: Headers, ranks: np.ndarray, num_bytes: int) -> Payload:
    """The payload of this rank.

    Args:
        held: the rollouts that are here, with the index of their prompt in the step.
        headers: of the step.
        ranks, num_bytes: as in `Payload`.
    """
    firsts = headers.rollouts.rows
    starts = dict(
        zip(
            zip(firsts["group"].tolist(), firsts["sample_index"].tolist(), strict=True),
            headers.first_of_rollout.tolist(),
            strict=True,
        )
    )
    return Payload(
        {
            starts[index, rollout.sample_index] + place: branch
            for index, rollout in held
            for place, branch in enumerate(rollout.branches)
        },
        ranks,
        num_bytes,
    )
