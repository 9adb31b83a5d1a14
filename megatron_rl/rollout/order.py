# SPDX-License-Identifier: Apache-2.0
"""The samples of a run in the order of its data: which prompt each one answers, and what an engine is asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompt_order import PromptBatches
from megatron_rl.engines.protocol import Request
from megatron_rl.engines.sampling import SamplingConfig, derive_seed
from megatron_rl.types import Prompt

STRIDE = 1 << 40  # from the key of a request to that of the next turn of its episode; the first one has its sample's


class Samples(Protocol):
    """Samples by number, their key."""

    def sample_of(self, key: int) -> tuple[Prompt, int]:
        """The prompt of a sample, and its place in the group."""
        ...

    def request(self, key: int, sampling: SamplingConfig, position: int = 0) -> Request:
        """What begins a sample; its seed is that of what follows so many tokens of the first reply."""
        ...


class SampleOrder:
    """The samples of a run; a key is the position of the prompt in the data order * group_size + sample_index.

    Args:
        prompts: the data order; its position says how many prompts have begun.
        config: the resolved config.

    Attributes:
        prompts: see above.
        group_size: samples of a prompt.
    """

    def __init__(self, prompts: PromptBatches[Prompt], config: RunConfig) -> None:
        self.prompts, self.group_size = prompts, config.rollout.n
        self._batch_size, self._run_seed = config.data.train_batch_size, config.trainer.seed
        self._batch = lru_cache(maxsize=config.schedule.max_staleness + 2)(self._read_batch)

    def sample_of(self, key: int) -> tuple[Prompt, int]:
        """See `Samples.sample_of`."""
        return self._prompt_of(key)[0], key % self.group_size

    def request(self, key: int, sampling: SamplingConfig, position: int = 0) -> Request:
        """See `Samples.request`."""
        prompt, occurrence = self._prompt_of(key)
        sample = occurrence * self.group_size + key % self.group_size
        seed = derive_seed(self._run_seed, self.step_of(key), prompt.prompt_id, sample, position=position)
        return Request(key, prompt.tokens, seed, sampling)

    def step_of(self, key: int) -> int:
        """The step that learns from a sample, where none is dropped; also part of its seed."""
        return key // self.group_size // self._batch_size + 1

    def name(self, key: int) -> str:
        """What a message calls the sample of a request."""
        return name_sample(*self.sample_of(key % STRIDE))

    def _prompt_of(self, key: int) -> tuple[Prompt, int]:
        """The prompt of a sample, and how often the same one came before in its batch."""
        number, place = divmod(key // self.group_size, self._batch_size)
        return self._batch(number)[place]

    def _read_batch(self, number: int) -> list[tuple[Prompt, int]]:
        first = number * self._batch_size
        prompts = [self.prompts.stream.prompt(position) for position in range(first, first + self._batch_size)]
        return list(zip(prompts, count_occurrences(prompts), strict=True))


def name_sample(prompt: Prompt, sample: int) -> str:
    """What a message calls a sample."""
    return f"prompt_id {prompt.prompt_id}, sample {sample}"


def count_occurrences(prompts: Sequence[Prompt]) -> list[int]:
    """How often each prompt came before in this batch (0 unless an epoch boundary repeats it)."""
    seen: dict[int, int] = {}
    counts = []
    for prompt in prompts:
        counts.append(seen.get(prompt.prompt_id, 0))
        seen[prompt.prompt_id] = counts[-1] + 1
    return counts
