# SPDX-License-Identifier: Apache-2.0
"""The endless order of training prompts: the prompt at position i depends only on (seed, i).

Each prompt occurs once per epoch, of all files together or, with `data.weights`, of its file, unless a function of the
user decides (`data.shuffle`).
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
Order = Callable[[int], np.ndarray]  # epoch -> indices of the prompts


def _order_epochs(size: int, seed: Sequence[int], shuffle: bool | Order) -> Callable[[int], int]:
    """Return position -> number below `size`, each once per epoch: in random order with `shuffle`, its, or in order."""

    @lru_cache(maxsize=2)  # a batch may span the end of an epoch
    def permute(epoch: int) -> np.ndarray:
        return shuffle(epoch) if callable(shuffle) else np.random.default_rng([*seed, epoch]).permutation(size)

    def find(position: int) -> int:
        epoch, offset = divmod(position, size)
        return int(permute(epoch)[offset]) if shuffle else offset

    return find


class PromptBatches(Generic[T]):
    """Batches of an endless stream of prompts; a batch that spans two epochs may contain a prompt twice.

    Args:
        prompts: file after file.
        shuffle: in random order, in order, or as a function decides (then without weights).
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
        shuffle: bool | Order,
        seed: int,
        *,
        weights: Sequence[float] | None = None,
        file_sizes: Sequence[int] = (),
    ) -> None:
        self._prompts, self._batch_size, self.position = prompts, batch_size, 0
        if weights is None:
            self._turn: Callable[[int], tuple[int, int]] = lambda position: (0, position)
            self._orders, self._first = [_order_epochs(len(prompts), [seed], shuffle)], [0]
        else:
            from megatron_rl.data.chosen_order import Turns

            self._turn = Turns(reduce_weights(weights)).at
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
        file, draw = self._turn(position)
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
