# SPDX-License-Identifier: Apache-2.0
"""Recorders of sampling in vLLM: responses; in v1 also the sets that tokens are drawn from, and experts of tokens.

Truncation is our own definition, applied before vLLM's sampler. A request carries its limits in
`SamplingParams.extra_args`. Sets are stored by request and position, so that the set of a token discarded by chunked
prefill or preemption is overwritten.

Hooks on the routers record routes, which vLLM itself returns only with the v2 model runner. Routes are stored per
KV-cache block, for prefix-cache hits, and per request, for preemption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_rl.engines.protocol import Request, SamplingConfig
from megatron_rl.engines.truncation import truncate
from megatron_rl.types import KeptSets, RouteShape

_KEY = "kept_sets"


def list_sampling_arguments(name: str, request: Request) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` for a request, in the engine and in a server alike.

    If sampling is truncated, `extra_args` has `name` for the recorded sets, the position of the first response token,
    and the sampling limits.
    """
    cut, extra = request.sampling, {}
    if cut.is_truncated:
        limits = cut.stop_token_ids, cut.top_p, cut.top_k, cut.min_p, cut.max_kept_tokens, cut.min_tokens
        extra = {_KEY: [name, len(request.tokens) - request.num_sampled, *limits]}
    return dict(
        temperature=cut.temperature,
        max_tokens=cut.max_tokens,
        seed=request.seed,
        stop_token_ids=list(cut.stop_token_ids),
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
    )


@dataclass
class Response:
    """Sampled tokens with their log-probs, NaN if vLLM scored another token.

    Attributes:
        longest: number of tokens, with the request's, at which the response ends.
        stops: tokens that end it.
        num_cached: number of request tokens found in the prefix cache, once the first token is sampled.
        likeliest: if other tokens' log-probs are wanted, ids and log-probs at each token: its own, then the likeliest.
        prompt: ids and log-probs [n, 1 + k] likewise, of consecutive parts of the prompt without its first token.
    """

    longest: int
    stops: frozenset[int | None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached: int | None = None
    is_stopped: bool = False
    likeliest: list[Any] = field(default_factory=list)
    prompt: list[Any] = field(default_factory=list)

    def append(self, output: Any, scored: tuple[int, float]) -> None:
        """Append a request's output of a step, whose log-prob is `scored`'s if it is for that token."""
        self.tokens += output.new_token_ids
        if output.new_token_ids:
            self.logprobs.append(scored[1] if output.new_token_ids == [scored[0]] else math.nan)
        if self.num_cached is None and output.prefill_stats is not None:
            self.num_cached = output.prefill_stats.num_cached_tokens
        self.is_stopped = output.finish_reason is not None and str(output.finish_reason) == "stop"


class ResponseRecorder:
    """A replacement of vLLM's `OutputProcessor`, which also prepares text, statistics and log-probs of other tokens.

    Log-probs are read from the arrays of a step, before vLLM cuts them into an object per request. Most tokens neither
    end a response nor begin or fill a KV-cache block: they are recorded here, and vLLM's scheduler updates the others.

    Args:
        block_size: tokens of a KV-cache block; 0 lets the scheduler update all tokens.
    """

    def __init__(self, scheduler: Any, block_size: int) -> None:
        self.running: dict[str, Response] = {}  # by vLLM's name of the request
        self._scored: dict[str, tuple[int, float]] = {}  # of the last step, by vLLM's name, for `process_outputs`
        self._likeliest: dict[str, Any] = {}  # likewise, if a running request wants them
        self._requests, self._longest, self._block_size = scheduler.requests, scheduler.max_model_len, block_size
        self._is_async = bool(scheduler.scheduler_config.async_scheduling)
        self._update, scheduler.update_from_output = scheduler.update_from_output, self._take_tokens

    def _take_tokens(self, scheduled: Any, output: Any) -> Any:
        others, self._scored, self._likeliest = scheduled.num_scheduled_tokens, {}, {}
        if output.logprobs is not None:
            ids, values = output.logprobs.logprob_token_ids, output.logprobs.logprobs
            scored = list(zip(ids[:, 0].tolist(), values[:, 0].tolist(), strict=True))
            if ids.shape[1] > 1:
                self._likeliest = dict(zip(output.req_ids, zip(ids, values, strict=True), strict=True))
            elif self._block_size and not output.prompt_logprobs_dict:
                others = self._record_most(others, output, scored)
            index = output.req_id_to_index
            self._scored = {name: scored[index[name]] for name in others if name in index}
            scheduled, output = replace(scheduled, num_scheduled_tokens=others), replace(output, logprobs=None)
        return self._update(scheduled, output)

    def _record_most(self, scheduled: dict[str, int], output: Any, scored: list[tuple[int, float]]) -> dict[str, int]:
        """Record tokens after the first that end neither a response nor a block; return the other requests."""
        # Equal to vLLM's update for these tokens: it appends them and counts down what is in flight.
        running, requests, size, others = self.running, self._requests, self._block_size, dict[str, int]()
        index, sampled, is_async = output.req_id_to_index, output.sampled_token_ids, self._is_async
        for name, count in scheduled.items():
            response, request = running.get(name), requests.get(name)
            if response and response.tokens and request and count == 1 and not request.num_stale_output_tokens:
                place, tokens = index[name], request._all_token_ids
                new, length = sampled[place], len(tokens)
                is_inside = 0 < length % size < size - 1 and length + 1 < response.longest
                if is_inside and len(new) == 1 and new[0] not in response.stops:
                    [token] = new
                    tokens.append(token)
                    request._output_token_ids.append(token)
                    request.num_in_flight_tokens -= 1
                    request.num_output_placeholders -= is_async
                    response.tokens.append(token)
                    scored_token, logprob = scored[place]
                    response.logprobs.append(logprob if token == scored_token else math.nan)
                    continue
            others[name] = count
        return others

    def add_request(self, request: Any, *text: Any) -> None:
        """Start an empty response."""
        params, length = request.sampling_params, len(request.prompt_token_ids)
        stops = frozenset({params.eos_token_id, *(params.stop_token_ids or ())})
        self.running[request.request_id] = Response(min(self._longest, length + params.max_tokens), stops)

    def process_outputs(self, outputs: Iterable[Any], **statistics: Any) -> Any:
        """Append each request's token; return finished ones with their names as `request_outputs`."""
        ended, running, scored = [], self.running, self._scored
        for output in outputs:
            name = output.request_id
            response = running.get(name)
            if response is None:  # interrupted during the step
                continue
            response.append(output, scored.get(name, (-1, math.nan)))
            if output.new_token_ids and name in self._likeliest:
                response.likeliest.append(self._likeliest[name])
            if (part := output.new_prompt_logprobs_tensors) is not None:
                response.prompt.append((part.logprob_token_ids.numpy(), part.logprobs.numpy()))
            if output.finish_reason is not None:
                ended.append((name, running.pop(name)))
        return SimpleNamespace(request_outputs=ended, reqs_to_abort=[])

    def abort_requests(self, names: Sequence[str], internal: bool) -> Sequence[str]:
        """Drop responses; return the names for the scheduler."""
        for name in names:
            self.running.pop(name, None)
        return names

    def has_unfinished_requests(self) -> bool:
        """Return whether any request runs or waits."""
        return bool(self.running)

    def update_scheduler_stats(self, statistics: Any) -> None:
        """Ignore vLLM's statistics."""


class KeptSetRecorder:
    """A wrapper of a sampler that truncates logits and records the remaining token sets (kept sets) of each request."""

    def __init__(self, runner: Any) -> None:
        self._requests, self._batch = runner.requests, runner.input_batch
        self._sets: dict[str, dict[int, KeptSets]] = {}
        sampler = runner.sampler.topk_topp_sampler
        sample = sampler.forward
        sampler.forward = lambda logits, *arguments: sample(self._cut(logits), *arguments)

    def take(self, name: str, first: int, count: int) -> KeptSets:
        """Remove a request; return the sets that its `count` tokens from position `first` on were drawn from."""
        sets = self._sets.pop(name, {})
        return KeptSets.join([KeptSets.whole(0), *(sets[first + i] for i in range(count))])

    def clear(self) -> None:
        """Drop the recorded token sets of all requests."""
        self._sets = {}

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Truncate logits [b, v] (divided by the temperature) in place; record the remaining sets."""
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


class RouteRecorder:
    """A recorder of routes (the experts chosen for each token), by hooks on routers and on the v1 model runner."""

    def __init__(self, model: torch.nn.Module, runner: Any, shape: RouteShape) -> None:
        self._batch, self._shape = runner.input_batch, shape
        self._step: dict[int, torch.Tensor] = {}  # layer -> experts of the current forward's rows
        self._routes: dict[str, np.ndarray] = {}  # by request; allocated for its maximum length
        self._known: dict[str, int] = {}  # by request: number of leading tokens with routes
        self._blocks: dict[int, np.ndarray] = {}  # by number of the KV-cache block
        modules: list[Any] = [*model.modules()]
        routers = [module.router for module in modules if hasattr(getattr(module, "router", None), "set_capture_fn")]
        assert len(routers) == shape.layers, f"{len(routers)} routers in {shape.layers} layers"
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._capture, layer))
        self._execute, runner.execute_model = runner.execute_model, self._execute_and_collect

    def expect(self, name: str, request: Request) -> None:
        """Prepare to record the expert choices of a request that vLLM calls `name`."""
        self._routes[name] = self._shape.unknown(len(request.tokens) + request.sampling.max_tokens)
        self._known[name] = 0

    def take(self, name: str, length: int) -> np.ndarray:
        """Remove a request; return the expert choices for its first `length` tokens, [length, layers, choices]."""
        del self._known[name]
        return self._routes.pop(name)[:length]

    def clear(self) -> None:
        """Drop the recorded expert choices of all requests and KV-cache blocks."""
        self._routes, self._known, self._blocks = {}, {}, {}

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._step[layer] = experts.clone()

    def _execute_and_collect(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._step.clear()
        result = self._execute(scheduled, *arguments, **options)
        if not self._step:
            return result
        experts = torch.stack([self._step[layer] for layer in range(self._shape.layers)], 1)
        rows = experts.cpu().numpy().astype(self._shape.dtype)  # [rows, layers, choices], request by request
        table, at = self._batch.block_table[0], 0
        for index, name in enumerate(self._batch.req_ids):
            first, count = int(self._batch.num_computed_tokens_cpu[index]), scheduled.num_scheduled_tokens[name]
            size, numbers = table.block_size, table.block_table.np[index]
            routes, found = self._routes.get(name), rows[at : at + count]
            at += count
            for place in range(first, first + count):
                block = self._blocks.setdefault(int(numbers[place // size]), self._shape.unknown(size))
                block[place % size] = found[place - first]
            if routes is not None:
                for place in range(self._known[name], first):  # from the prefix cache
                    routes[place] = self._blocks[int(numbers[place // size])][place % size]
                routes[first : first + count] = found
                self._known[name] = first + count
        return result
