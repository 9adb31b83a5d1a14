# SPDX-License-Identifier: Apache-2.0
"""Truncated sampling in vLLM: the tokens among which it draws are cut by our definition, and remembered.

vLLM itself samples from what is left, and its log-probs are of that. Sets are kept by request and by the place of the
token: where a step computes only a part of a prompt, or a prompt again after a preemption, the set of a token that is
thrown away is written over by that of the token which counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.engines.truncation import truncate
from megatron_rl.types import KeptSets


class KeptSetRecorder:
    """Stands before the sampler of a model runner (vLLM's v1).

    Args:
        runner: vLLM's; its rows of logits are its requests, in order.
    """

    def __init__(self, runner: Any) -> None:
        self._batch = runner.input_batch
        self._sampling: dict[str, SamplingConfig] = {}
        self._sets: dict[str, dict[int, KeptSets]] = {}
        sampler = runner.sampler.topk_topp_sampler
        sampler.forward = self._before(sampler.forward)

    def expect(self, name: str, sampling: SamplingConfig) -> None:
        """A request, by vLLM's name for it."""
        if sampling.is_truncated:
            self._sampling[name], self._sets[name] = sampling, {}

    def take(self, name: str, first: int, count: int) -> KeptSets | None:
        """What so many tokens of a request were drawn from, the first of them at place `first`; it is forgotten."""
        if self._sampling.pop(name, None) is None:
            return None
        sets = self._sets.pop(name)
        return KeptSets.join([KeptSets.whole(0), *(sets[first + i] for i in range(count))])

    def clear(self) -> None:
        """Forget all requests."""
        self._sampling, self._sets = {}, {}

    def _before(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def cut_and_sample(logits: torch.Tensor, *arguments: Any) -> Any:
            return sample(self._cut(logits) if self._sampling else logits, *arguments)

        return cut_and_sample

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        """[b, v] over the temperature -> the same, without probability outside of the sets."""
        names = self._batch.req_ids
        assert len(names) == len(logits), f"{len(logits)} rows for {len(names)} requests"
        rows_of: dict[SamplingConfig, list[int]] = {}
        for row, name in enumerate(names):
            if name in self._sampling:
                rows_of.setdefault(self._sampling[name], []).append(row)
        for sampling, rows in rows_of.items():
            index = torch.tensor(rows, device=logits.device)
            logits[index], kept = truncate(logits[index], sampling)
            for row, kept_set in zip(rows, kept.split(), strict=True):
                self._sets[names[row]][int(self._batch.num_tokens_no_spec[row])] = kept_set
        return logits
