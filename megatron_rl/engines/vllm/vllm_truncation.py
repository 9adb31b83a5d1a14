# SPDX-License-Identifier: Apache-2.0
"""Truncated sampling in vLLM v1 by our own definition, applied before vLLM's sampler.

A request carries its limits in `SamplingParams.extra_args`, as it may come from another process. Sets are stored by
request and position, so that the set of a token discarded by chunked prefill or preemption is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.engines.protocol import Request
from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.engines.truncation import truncate
from megatron_rl.types import KeptSets

_KEY = "kept_sets"


def list_extra_args(name: str, request: Request) -> dict[str, Any]:
    """Return a request's `extra_args`: name of its sets, start of its response, limits."""
    cut = request.sampling
    if not cut.is_truncated:
        return {}
    limits = cut.stop_token_ids, cut.top_p, cut.top_k, cut.min_p, cut.max_kept_tokens, cut.min_tokens
    return {_KEY: [name, len(request.tokens) - request.num_sampled, *limits]}


class KeptSetRecorder:
    """A wrapper of a sampler that truncates logits and records kept sets, row by row in order of requests."""

    def __init__(self, runner: Any) -> None:
        self._requests, self._batch = runner.requests, runner.input_batch
        self._sets: dict[str, dict[int, KeptSets]] = {}
        sampler = runner.sampler.topk_topp_sampler
        sampler.forward = self._before(sampler.forward)

    def take(self, name: str, first: int, count: int) -> KeptSets:
        """Remove a request; return `count` sets from position `first` on."""
        sets = self._sets.pop(name, {})
        return KeptSets.join([KeptSets.whole(0), *(sets[first + i] for i in range(count))])

    def clear(self) -> None:
        """Drop the sets of all requests."""
        self._sets = {}

    def _before(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def cut_and_sample(logits: torch.Tensor, *arguments: Any) -> Any:
            return sample(self._cut(logits), *arguments)

        return cut_and_sample

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Truncate logits over the temperature, [b, v] -> [b, v]."""
        names = self._batch.req_ids
        assert len(names) == len(logits), f"{len(logits)} rows for {len(names)} requests"
        rows_of: dict[tuple[Any, ...], list[tuple[int, str, int]]] = {}
        for row, name in enumerate(names):
            told = (self._requests[name].sampling_params.extra_args or {}).get(_KEY)
            if told is not None:
                set_name, first, stops, *limits = told
                rows_of.setdefault((tuple(stops), *limits), []).append((row, set_name, first))
        for limits, rows in rows_of.items():
            index = torch.tensor([row for row, _, _ in rows], device=logits.device)
            places = [int(self._batch.num_tokens_no_spec[row]) for row, _, _ in rows]
            in_response = [place - first for place, (_, _, first) in zip(places, rows, strict=True)]
            logits[index], kept = truncate(logits[index], SamplingConfig(1.0, 1, *limits), in_response)
            for (_, name, _), place, kept_set in zip(rows, places, kept.split(), strict=True):
                self._sets.setdefault(name, {})[place] = kept_set
        return logits
