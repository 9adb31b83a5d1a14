# SPDX-License-Identifier: Apache-2.0
"""The endless order in which training sees its prompts: what comes at position i follows from (seed, i) alone.

Invariants: nothing is drawn before anything else is, so any position may be asked for at any time; each item comes
exactly once per epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from megatron_rl.types import UserError

T = TypeVar("T")


class EpochOrder:
    """The numbers 0 to size - 1, epoch after epoch, a permutation of its own for each.

    Args:
        size: numbers of an epoch.
        seed: of the permutations, together with the epoch.
        shuffle: False: the numbers in order.
    """

    def __init__(self, size: int, seed: Sequence[int], shuffle: bool) -> None:
        self._size, self._seed, self._shuffle = size, tuple(seed), shuffle
        self._permutation = lru_cache(maxsize=2)(self._permute)  # a batch may run across the end of an epoch

    def at(self, position: int) -> int:
        """The number at a position, counted from the start of the first epoch."""
        epoch, offset = divmod(position, self._size)
        return int(self._permutation(epoch)[offset]) if self._shuffle else offset

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([*self._seed, epoch]).permutation(self._size)


class PromptStream(Generic[T]):
    """Prompts without an end: each once per epoch, in an order that (seed, epoch) alone decides.

    Args:
        prompts: of the data set.
        shuffle: a new permutation for each epoch; False: the order of the files.
        seed: of the permutations.

    Attributes:
        num_prompts: of the data set.
    """

    def __init__(self, prompts: Sequence[T], shuffle: bool, seed: int) -> None:
        self._prompts, self._order = prompts, EpochOrder(len(prompts), [seed], shuffle)
        self.num_prompts = len(prompts)

    def prompt(self, position: int) -> T:
        """The prompt at a position of the stream, from 0."""
        return self._prompts[self._order.at(position)]


class PromptBatches(Generic[T]):
    """The prompts of a stream in batches.

    A batch may run across the end of an epoch, so no prompt is dropped or repeated inside an epoch; such
    a batch can hold a prompt twice (last of one epoch, first of the next).

    Args:
        stream: what to cut into batches.
        batch_size: prompts per batch.

    Attributes:
        stream: see there.
        position: in the stream, of the first prompt that has not been given out.

    Raises:
        UserError: there are fewer prompts than one batch takes.
    """

    def __init__(self, stream: PromptStream[T], batch_size: int) -> None:
        if not 1 <= batch_size <= stream.num_prompts:
            raise UserError(
                f"{stream.num_prompts} prompts cannot fill a batch of {batch_size}",
                source="data.train_batch_size",
                expected=f"a batch of 1 to {stream.num_prompts} prompts",
                hint="lower data.train_batch_size, or add prompts",
            )
        self.stream, self.position, self._batch_size = stream, 0, batch_size

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        first, self.position = self.position, self.position + self._batch_size
        return [self.stream.prompt(i) for i in range(first, self.position)]

    def advance(self, count: int) -> None:
        """Give out so many prompts, which the stream has."""
        self.position += count

    def state_dict(self) -> dict[str, int]:
        """Where the iteration stands: epoch, prompts of it already given out, and the size of the data set."""
        epoch, offset = divmod(self.position, self.stream.num_prompts)
        return {"epoch": epoch, "offset": offset, "num_prompts": self.stream.num_prompts}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from where `state_dict` was taken (same prompts, shuffle and seed; batch_size may differ).

        Raises:
            UserError: the data set has another size than the one the state belongs to.
        """
        if state["num_prompts"] != self.stream.num_prompts:
            found = f"the checkpoint was made with {state['num_prompts']} prompts, there are {self.stream.num_prompts}"
            raise UserError(
                found,
                source="data.train_files",
                expected="the data set of the run that is resumed",
                hint="restore the files, or start a new run",
            )
        self.position = state["epoch"] * self.stream.num_prompts + state["offset"]
