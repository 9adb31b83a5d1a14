# SPDX-License-Identifier: Apache-2.0
"""Orders of prompts that a config chooses: files or sources that take turns by weights, and a function, `data.shuffle`;
and the teacher of each prompt.

With weights, files alternate in a fixed pattern: n prompts include n w of a file with share w, within less than one
(the chairman assignment of R. Tijdeman, Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megatron_rl.config.schema import RunConfig
from megatron_rl.extension.user_code import call_function, find_function
from megatron_rl.types import Prompt, UserError


class Turns:
    """A periodic order of data files (parties) with given shares.

    Args:
        shares: integer turns of each file per period.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self._shares, self._period = shares, sum(shares)
        self._party = np.array(_take_turns(shares))
        turns = np.arange(len(shares))[:, None] == self._party
        self._before = (np.cumsum(turns, axis=1) - turns)[self._party, np.arange(self._period)]

    def at(self, position: int) -> tuple[int, int]:
        """Return the data file at a position, and the number of its earlier positions."""
        period, place = divmod(position, self._period)
        party = int(self._party[place])
        return party, period * self._shares[party] + int(self._before[place])


def _take_turns(shares: Sequence[int]) -> list[int]:
    """Compute a period: of the eligible parties, the one with the earliest deadline takes the turn.

    With D = sum(shares) and d = 1 / (2 parties - 2), a party with c turns is eligible from the first n with n share / D
    - c >= d; its deadline is the last n with n share / D - c <= 1 - d.
    """
    if len(shares) == 1:
        return [0] * shares[0]
    total, parts, turns, counts = sum(shares), 2 * len(shares) - 2, [], [0] * len(shares)
    for n in range(1, total + 1):
        due = [
            ((parts * (count + 1) - 1) * total // (parts * share), party)
            for party, (share, count) in enumerate(zip(shares, counts, strict=True))
            if parts * (n * share - count * total) >= total
        ]
        turns.append(min(due)[1])
        counts[turns[-1]] += 1
    return turns


def find_order(name: str, prompts: Sequence[Prompt]) -> Callable[[int], np.ndarray]:
    """Return epoch -> the indices of the prompts in the order of the function `path.py:name` (UserError if none).

    The order of an epoch must be the same at each call, because ranks and a resumed run each call the function. It has
    as many indices as there are prompts, of which some may occur more than once and others never.
    """
    name, source = name.partition("?")[0], f"data.shuffle = {name}"
    expected = f"{len(prompts)} indices of prompts, from 0, that depend on (prompts, epoch) alone"
    function = find_function(name, "data.shuffle", "a function of (prompts, epoch) that returns indices")

    def find(epoch: int) -> np.ndarray:
        first, again = (call_function(function, source, prompts, epoch) for _ in range(2))
        first, again = (np.array([*order] if isinstance(order, Iterable) else order) for order in (first, again))
        is_right = first.shape == (len(prompts),) and first.dtype.kind in "iu"
        if not is_right or not 0 <= first.min() <= first.max() < len(prompts):
            raise UserError(f"{first!r:.80}", source=source, expected=expected, hint="return one index per prompt")
        if not np.array_equal(first, again):
            found = f"other indices at a second call for epoch {epoch}"
            hint = "draw by np.random.default_rng(epoch), and keep no state"
            raise UserError(found, source=source, expected=expected, hint=hint)
        return first

    return find


def choose_teachers(config: RunConfig, prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Return the indices of the prompts that each teacher scores; every teacher is a key.

    Raises:
        UserError: `algorithm.distillation.choose_by` maps a prompt to no teacher.
    """
    column, everything = config.algorithm.distillation.choose_by, list(range(len(prompts)))
    if column is None:
        return dict.fromkeys(config.teachers, everything)
    teacher_of = {value: name for name, teacher in config.teachers.items() for value in teacher.values or [name]}
    found: dict[str, list[int]] = {name: [] for name in config.teachers}
    for index, prompt in enumerate(prompts):
        value = prompt.row.get(column, prompt.data_source if column == "data_source" else None)
        if value not in teacher_of:
            raise UserError(
                f"{column} = {value!r} of prompt_id {prompt.prompt_id} names no teacher",
                source="algorithm.distillation.choose_by and data.train_files",
                expected=f"one of {', '.join(teacher_of)}",
                hint="add the value to teachers.NAME.values, or remove the row",
            )
        found[teacher_of[value]].append(index)
    return found
