# SPDX-License-Identifier: Apache-2.0
"""Truncated sampling in vLLM: the tokens among which it draws are cut by our definition, and remembered.

vLLM itself samples from what is left, and its log-probs are of that. A request says how it is cut in its
`SamplingParams.extra_args`, and so it may come from another process. Sets are kept by request and by the place of the
token: where a step computes only a part of a prompt, or a prompt again after a preemption, the set of a token that is
thrown away is written over by that of the token which counts.
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
    """What a request brings, as JSON: the name by which its sets are taken, where it begins, and how they are cut."""
    cut = request.sampling
    if not cut.is_truncated:
        return {}
    limits = cut.stop_token_ids, cut.top_p, cut.top_k, cut.min_p, cut.max_kept_tokens, cut.min_tokens
    return {_KEY: [name, len(request.tokens) - request.num_sampled, *limits]}


class KeptSetRecorder:
    """Stands before the sampler of a model runner (vLLM's v1).

    Args:
        runner: vLLM's; its rows of logits are its requests, in order.
    """

    def __init__(self, runner: Any) -> None:
        self._requests, self._batch = runner.requests, runner.input_batch
        self._sets: dict[str, dict[int, KeptSets]] = {}
        sampler = runner.sampler.topk_topp_sampler
        sampler.forward = self._before(sampler.forward)

    def take(self, name: str, first: int, count: int) -> KeptSets:
        """What so many tokens of a request were drawn from, the first of them at place `first`; it is forgotten."""
        sets = self._sets.pop(name, {})
        return KeptSets.join([KeptSets.whole(0), *(sets[first + i] for i in range(count))])

    def clear(self) -> None:
        """Forget all requests."""
        self._sets = {}

    def _before(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        def cut_and_sample(logits: torch.Tensor, *arguments: Any) -> Any:
            return sample(self._cut(logits), *arguments)

        return cut_and_sample

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        """[b, v] over the temperature -> the same, without probability outside of the sets."""
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
