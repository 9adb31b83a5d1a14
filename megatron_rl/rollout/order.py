# SPDX-License-Identifier: Apache-2.0
"""Numbering of samples: the prompt, the seed and the engine of each sample key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.engines.protocol import SamplingConfig
from megatron_rl.types import Prompt

# A prompt token costs about a sixteenth of a sampled one (8B parameters on one GPU: 40 us; 0.6 ms with 32 running
# responses), and spreading saves about a quarter of the time if lengths correlate by 0.5 (bench_dispatch.py).
_PREFILL_COST = 1 / 16
_SAVING = 1 / 4


class Samples:
    """Samples (rollouts to generate), by key = prompt position * group_size + sample index; equal on every rank."""

    group_size: int
    round: int = 0

    def sample_of(self, key: int) -> tuple[Prompt, int]:
        """Return a sample's prompt and its index in the group."""
        return self._find_prompt(key // self.group_size)[0], key % self.group_size

    def step_of(self, key: int) -> int:
        """Return the step that trains on a sample, provided that no earlier group is dropped."""
        raise NotImplementedError

    def seed_parts(self, key: int) -> tuple[int, int, int, int]:
        """Return the arguments of `derive_seed` after the run's seed: step, prompt_id, sample, round.

        A prompt that occurs twice, at an epoch boundary, gets different seeds.
        """
        prompt, occurrence = self._find_prompt(key // self.group_size)
        return self.step_of(key), prompt.prompt_id, occurrence * self.group_size + key % self.group_size, self.round

    def _find_prompt(self, position: int) -> tuple[Prompt, int]:
        """Return the prompt at a position, and the number of its previous occurrences in the batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class SampleGroups(Samples):
    """Samples whose groups begin and end in one call of `generate`."""

    prompts: Sequence[Prompt]
    group_size: int
    sampling: SamplingConfig
    step: int
    round: int = 0

    def __len__(self) -> int:
        return len(self.prompts) * self.group_size

    def step_of(self, key: int) -> int:
        """Return the step of all samples."""
        return self.step

    def _find_prompt(self, position: int) -> tuple[Prompt, int]:
        return self.prompts[position], self._occurrences[position]

    @cached_property
    def _occurrences(self) -> list[int]:
        return count_occurrences(self.prompts)


class SampleOrder(Samples):
    """Samples of a whole run, numbered in data order."""

    def __init__(self, prompts: PromptBatches[Prompt], config: RunConfig) -> None:
        self.prompts, self.group_size = prompts, config.rollout.n
        self._batch_size = config.data.train_batch_size

        def read(number: int) -> list[tuple[Prompt, int]]:
            first = number * self._batch_size
            batch = [prompts.prompt(position) for position in range(first, first + self._batch_size)]
            return list(zip(batch, count_occurrences(batch), strict=True))

        self._batch = lru_cache(maxsize=config.schedule.max_staleness + 2)(read)

    def step_of(self, key: int) -> int:
        """Return the step whose batch has the sample's prompt."""
        return key // self.group_size // self._batch_size + 1

    def _find_prompt(self, position: int) -> tuple[Prompt, int]:
        return self._batch(position // self._batch_size)[position % self._batch_size]


def count_occurrences(prompts: Sequence[Prompt]) -> list[int]:
    """Count previous occurrences of each prompt in the batch (nonzero only at an epoch boundary)."""
    seen: dict[int, int] = {}
    counts = []
    for prompt in prompts:
        counts.append(seen.get(prompt.prompt_id, 0))
        seen[prompt.prompt_id] = counts[-1] + 1
    return counts


def assign_engines(
    dispatch: str,
    prompt_tokens: Sequence[int],
    group_size: int,
    num_engines: int,
    max_tokens: int,
    loads: np.ndarray | None = None,
) -> np.ndarray:
    """Assign an engine to each sample, equally on every rank; without effect on the samples.

    Response lengths of one prompt are correlated: an engine with the whole group of a hard prompt finishes last.

    Args:
        dispatch: "groups" assigns all samples of a prompt to the least loaded engine; "samples" spreads them, balancing
            numbers of samples and prompt tokens. "auto" is "groups" for one engine, or if further prefills cost more
            than spreading saves: copies * prompt tokens / 16 > (responses * max_tokens) / 4, with copies =
            min(group_size, num_engines) - 1 (8 responses on 8 engines: prompts longer than 4.6 * max_tokens).
        loads: [num_engines] unfinished samples; `None` means zero.

    Returns:
        [prompts * group_size] int64, grouped by prompt.
    """
    if dispatch == "auto":
        prefills = (min(group_size, num_engines) - 1) * sum(prompt_tokens)
        saved = len(prompt_tokens) * group_size * max_tokens * _SAVING
        dispatch = "groups" if num_engines == 1 or prefills * _PREFILL_COST > saved else "samples"
    engines = np.empty((len(prompt_tokens), group_size), np.int64)
    samples = np.zeros(num_engines, np.int64) if loads is None else loads.copy()
    if dispatch == "groups":
        for prompt in range(len(prompt_tokens)):
            engines[prompt] = samples.argmin()
            samples[engines[prompt, 0]] += group_size
        return engines.reshape(-1)
    tokens = np.zeros(num_engines, np.int64)
    for prompt in np.argsort(-np.asarray(prompt_tokens), kind="stable"):  # longest first, for balance
        order = np.lexsort((tokens, samples))  # by samples, then tokens
        engines[prompt] = np.resize(order, group_size)
        counts = np.bincount(engines[prompt], minlength=num_engines)
        samples += counts
        tokens += counts * prompt_tokens[prompt]
    return engines.reshape(-1)
