# SPDX-License-Identifier: Apache-2.0
"""Which prompts of the data order may begin, and which of those that have begun a step takes.

With max_staleness k and B prompts per step, no prompt is learned from more than k steps after the one in which it may
begin. Let a step that has taken c prompts so far, and needs n more, have the number s = c + n: B at first, B more in
every further step, and more where dynamic sampling drops prompts. Prompt i may begin once i < s + k B - p; once
i < s - p it must be taken. The second holds k steps after the first at the latest. Prompts that must be taken never
outnumber those that are needed: s grows by what is needed from call to call.

`schedule.order: stream` has p = 0: a step takes the next prompts. `whole` has p = k B / 2: a step takes what must be
taken, and others whose responses are all there. As k B - p prompts are ahead at the end of a step, the mean staleness
is k - p / B: half the bound with `whole`. With p = 0 it is the bound, so that no prompt can be passed over within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def find_window(open_: Sequence[int], begun: int, wanted: int, ahead: int, passed: int) -> tuple[int, range]:
    """How many of the prompts that are open must be taken next, and which ones begin.

    Args:
        open_: positions in the data order of those that have begun and were not taken, in order.
        begun: prompts that have begun.
        wanted: prompts that the step needs.
        ahead: prompts that may begin before their step, k B.
        passed: of them, those that may be passed over.

    Returns:
        The first so many of `open_` and the new ones; and the positions of the new ones.
    """
    end = begun - len(open_) + wanted - passed
    new = range(begun, max(begun, end + ahead))
    return min(wanted, sum(position < end for position in [*open_, *new])), new


@dataclass(frozen=True)
class Goal:
    """What a phase waits for.

    Attributes:
        needed: the first so many groups.
        wanted: groups that are whole, those included.
        left: [groups] samples that this engine has to finish.
        holders: [groups] engines with samples to finish.
    """

    needed: int
    wanted: int
    left: np.ndarray
    holders: np.ndarray

    def is_reached(self, left: np.ndarray) -> bool:
        """Whether it is, with so many samples of each group to finish on all engines."""
        return not left[: self.needed].any() and int(np.count_nonzero(left == 0)) >= self.wanted

    def choose(self, left: np.ndarray) -> list[int]:
        """The groups that are taken then: the needed ones, and the first others that are whole."""
        return np.flatnonzero(left == 0)[: self.wanted].tolist()
