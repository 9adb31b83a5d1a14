# SPDX-License-Identifier: Apache-2.0
"""The endless order of training prompts: the prompt at position i depends only on (seed, i).

Each prompt occurs once per epoch, of all files together or, with `data.weights`, of its file. With weights, files
alternate in a fixed pattern: n prompts include n w of a file with share w, within less than one (the chairman
assignment of R. Tijdeman, Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from megatron_rl.config.sections import reduce_weights
from megatron_rl.types import UserError

T = TypeVar("T")


def _order_epochs(size: int, seed: Sequence[int], shuffle: bool) -> Callable[[int], int]:
    """Return position -> number below `size`, each once per epoch, in random order with `shuffle`, else in order."""

    @lru_cache(maxsize=2)  # a batch may span the end of an epoch
    def permute(epoch: int) -> np.ndarray:
        return np.random.default_rng([*seed, epoch]).permutation(size)

    def find(position: int) -> int:
        epoch, offset = divmod(position, size)
        return int(permute(epoch)[offset]) if shuffle else offset

    return find


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


class PromptBatches(Generic[T]):
    """Batches of an endless stream of prompts; a batch that spans two epochs may contain a prompt twice.

    Args:
        prompts: file after file.
        weights: relative share of each file; `None` treats all files as one set.
        file_sizes: prompts per file, needed with weights.

    Attributes:
        position: of the next prompt in the stream.

    Raises:
        UserError: the data set has fewer prompts than a batch.
    """

    def __init__(
        self,
        prompts: Sequence[T],
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        weights: Sequence[float] | None = None,
        file_sizes: Sequence[int] = (),
    ) -> None:
        self._prompts, self._batch_size, self.position = prompts, batch_size, 0
        if weights is None:
            self._turns, self._orders, self._first = Turns([1]), [_order_epochs(len(prompts), [seed], shuffle)], [0]
        else:
            self._turns = Turns(reduce_weights(weights))
            self._orders = [_order_epochs(size, [seed, file], shuffle) for file, size in enumerate(file_sizes)]
            self._first = [0, *accumulate(file_sizes)]
        num_prompts = len(prompts)
        if not 1 <= batch_size <= num_prompts:
            raise UserError(
                f"{num_prompts} prompts cannot fill a batch of {batch_size}",
                source="data.train_batch_size",
                expected=f"a batch of 1 to {num_prompts} prompts",
                hint="lower data.train_batch_size, or add prompts",
            )

    def prompt(self, position: int) -> T:
        """Return the prompt at a position of the stream, from 0."""
        file, draw = self._turns.at(position)
        return self._prompts[self._first[file] + self._orders[file](draw)]

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        first, self.position = self.position, self.position + self._batch_size
        return [self.prompt(i) for i in range(first, self.position)]

    def advance(self, count: int) -> None:
        """Skip `count` prompts."""
        self.position += count

    def state_dict(self) -> dict[str, int]:
        """Return epoch, offset, and the data set size that defines an epoch."""
        epoch, offset = divmod(self.position, len(self._prompts))
        return {"epoch": epoch, "offset": offset, "num_prompts": len(self._prompts)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore `state_dict` (UserError if the size of the data set has changed); batch_size may differ."""
        if state["num_prompts"] != len(self._prompts):
            found = f"the checkpoint was made with {state['num_prompts']} prompts, there are {len(self._prompts)}"
            raise UserError(
                found,
                source="data.train_files",
                expected="the data set of the run that is resumed",
                hint="restore the files, or start a new run",
            )
        self.position = state["epoch"] * len(self._prompts) + state["offset"]
