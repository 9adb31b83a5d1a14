# SPDX-License-Identifier: Apache-2.0
"""Generation of rollouts from prompts: the loop between an engine's samples and its requests, with checks of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.build import BuiltEngine
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.observability.progress import RolloutProgress
from megatron_rl.parallel.collectives import gather_objects, raise_together, reduce_scalars, share_object
from megatron_rl.rollout.episodes import Episodes, SampleGroups, Samples, describe_episodes
from megatron_rl.rollout.serving import Channel, ControlMessage, Phase, generate, serve
from megatron_rl.types import Prompt, Rollout, RouteShape, UserError

if TYPE_CHECKING:
    from megatron_rl.agents.in_rank import AnyEpisodes
    from megatron_rl.engines.elastic.front import Front
    from megatron_rl.transfer.hybrid_engine import HybridEngine


class OpenRequests:
    """Request counts of one engine in one phase; `running`: unfinished requests by key."""

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        self.num_requests = self.num_responses = 0
        self._sums = {"asked": 0.0, "cached": 0.0, "loads": 0.0, "cache": 0.0, "waiting": 0.0}

    def add(self, requests: Sequence[Request]) -> None:
        """Record requests submitted to the engine."""
        self.running |= {request.key: request for request in requests}
        self.num_requests += len(requests)

    def finish(self, sampled: Sampled) -> Request | None:
        """Record a response and return its request, if any."""
        self.num_responses += 1
        request = self.running.pop(sampled.key, None)
        if request is not None and sampled.num_cached is not None:
            self._sums["asked"] += len(request.tokens)
            self._sums["cached"] += sampled.num_cached
        return request

    def describe(
        self, counts: bool, group: dist.ProcessGroup, load: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return `rollout/prefix_cache_hits`, and means of the engines' largest loads; collective.

        Args:
            counts: whether this rank speaks for its engine.
            load: `RolloutEngine.load` of an engine that has it.
        """
        mine = dict(self._sums) if counts else dict.fromkeys(self._sums, 0.0)
        if counts and load is not None:
            mine |= {"loads": 1.0, **load}
        sums, found = reduce_scalars(mine, dist.ReduceOp.SUM, group, torch.device("cpu")), dict[str, float]()
        if sums["asked"]:
            found["rollout/prefix_cache_hits"] = sums["cached"] / sums["asked"]
        if sums["loads"]:
            found |= {f"rollout/{name}_max": sums[name] / sums["loads"] for name in ("cache", "waiting")}
        return found


# Callback with each finished, undecoded rollout and its training step, provided that no group is dropped.
OnFinished = Callable[[Rollout, int], None]


class RolloutGenerator:
    """Rollout generation with the engines' current weights; every rank makes the same calls.

    Attributes:
        metrics: metrics of the last phase, equal on every rank.
        engine_index: index of this rank's engine; -1 without one.
        place_in_engine: this rank's index in its engine.
        is_first: whether this rank is its engine's first.
        route_shape: shape of recorded expert routes; `None` if they are not recorded.
    """

    def __init__(
        self,
        engine: BuiltEngine,
        weights: HybridEngine,
        channel: Channel,
        *,
        config: RunConfig,
        group: dist.ProcessGroup,
        progress: RolloutProgress,
        processes: AnyEpisodes | None = None,
    ) -> None:
        self._engine, self._weights, self._channel, self._config = engine, weights, channel, config
        self._group, self._progress = group, progress
        self._processes = progress.spans.follow(processes) if progress.spans and processes else processes
        self.engines, self.metrics, self.route_shape = engine.ranks, dict[str, float](), engine.route_shape
        self.engine_index, self.place_in_engine = engine.ranks.places.get(group.rank(), (-1, 0))
        self.is_first = self.engine_index >= 0 and channel.is_first
        self._name = f"rollout engine {self.engine_index} ({engine.kind}, {engine.ranks.describe(self.engine_index)})"

    def generate(self, groups: SampleGroups, on_finished: OnFinished | None = None) -> dict[int, Rollout]:
        """Generate complete groups; collective.

        With an environment, `groups.sampling.max_tokens` bounds all tokens after the prompt, including observations.

        Args:
            on_finished: called on an engine's first rank during generation; given on every rank or on none.

        Returns:
            Rollouts of this rank's engine by key; finish reasons of environment episodes are valid on the first rank
            only.

        Raises:
            Exception: as `run`.
        """
        episodes = self.open(groups)
        mine = self.assign(groups.prompts, groups.group_size, groups.sampling.max_tokens)
        episodes.begin(mine)
        episodes.start(mine, groups.sampling)
        phase = Phase(range(len(groups.prompts)), np.zeros(len(groups.prompts)), end=None)
        try:
            self.run(episodes, phase, on_finished, total=len(groups))
        finally:
            episodes.close()
        if self._config.has_episodes:
            counts = reduce_scalars(episodes.counts, dist.ReduceOp.SUM, self._group, torch.device("cpu"))
            self.metrics |= describe_episodes(counts)
        return {key: episodes.rollout(key) for key in mine}

    def open(self, samples: Samples) -> Episodes:
        """Return an empty `Episodes` for this rank's engine; its `begin` adds samples."""
        return Episodes(samples, self._config, self._processes if self.is_first else None)

    def assign(
        self, prompts: Sequence[Prompt], group_size: int, max_tokens: int, loads: np.ndarray | None = None
    ) -> list[int]:
        """Return the samples, prompt * group_size + index, that `assign_engines` assigns to this rank's engine."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        dispatch, num_engines = self._config.rollout.dispatch, len(self.engines.of)
        engines = assign_engines(dispatch, lengths, group_size, num_engines, max_tokens, loads)
        return np.flatnonzero(engines == self.engine_index).tolist()

    def run(self, episodes: Episodes, phase: Phase, on_finished: OnFinished | None, total: int | None) -> None:
        """Serve the requests of `episodes` until the phase's end condition or, without one, none is left; collective.

        Args:
            on_finished: called on an engine's first rank with each finished rollout and its step.
            total: rollouts of all engines, for the progress display; `None` if unknown.

        Raises:
            Exception: error of an environment process or of `on_finished`; ends the phase; raised on every rank.
            UserError: the engine's responses do not match its requests; on every rank.
        """
        samples, requests, error = episodes.samples, OpenRequests(), None
        load: dict[str, float] | None = getattr(self._engine.requests, "load", None)
        if load is not None:
            load.update(dict.fromkeys(load, 0.0))
        spans = self._progress.spans if self.is_first else None

        def end(key: int) -> None:
            if phase.finish(key // samples.group_size) and self.is_first:
                self._progress.count(sum(turn.stop - turn.start for turn in episodes.rollout(key).turns))
            if on_finished is not None and self.is_first:
                on_finished(episodes.rollout(key), samples.step_of(key))

        def take(is_idle: bool) -> ControlMessage:
            if is_idle and requests.running:  # the engine is idle, so these would never finish
                raise miscounted(requests.num_responses, requests.num_requests, self._name)
            following = episodes.follow()
            for key in following.finished:
                end(key)
            return phase.take(is_idle, following, requests.running)

        def record(added: Sequence[Request]) -> None:
            requests.add(added)
            episodes.record_requests(added)
            if spans is not None:
                spans.begin_requests(episodes, added)

        def receive(sampled: Sampled) -> None:
            request = requests.finish(sampled)
            if spans is not None:
                spans.end_request(episodes, sampled)
            if request is not None:  # otherwise the counts differ at the end
                self._check(sampled, request, samples)
                if episodes.receive(sampled, self._weights.policy_version):
                    end(sampled.key)

        is_watching = self.is_first or self.engine_index < 0  # rank 0 displays the progress, with or without an engine
        in_flight = self._engine.requests.tokens_in_flight if is_watching else None
        with nullcontext() if total is None else self._progress.follow(total, in_flight):
            if self.engine_index >= 0:
                engine, guard = self._engine.requests, phase.guard
                error = serve(engine, guard(take), guard(receive), self._channel, on_requests=record)
            if error is None and requests.num_responses != requests.num_requests:
                error = miscounted(requests.num_responses, requests.num_requests, self._name)
            raise_together(error, self._group)
        episodes.stop()
        self.metrics = requests.describe(self.is_first, self._group, load)
        if self._config.schedule.elastic:
            front = cast("Front", self._engine.weights) if self.is_first else None
            self.metrics |= share_object(front and front.describe(), self._group, self.engines.of[0][0])

    def answer(self, requests: Sequence[Request]) -> list[Sampled]:
        """Return the responses to requests, whose keys are their indices, on every rank; collective."""
        mine, error = [], None
        try:
            if self.engine_index >= 0:
                mine = generate(self._engine.requests, requests[self.engine_index :: len(self.engines.of)])
            for one in mine:
                check_sampled(one, requests[one.key], vocab_size=self._weights.shape.vocab_size, source=self._name)
        except Exception as caught:
            error = caught
        raise_together(error, self._group)
        shares = gather_objects(mine if self.is_first else [], self._group)
        return sorted((one for share in shares for one in share), key=lambda one: one.key)

    def _check(self, sampled: Sampled, request: Request, samples: Samples) -> None:
        if sampled.finish_reason == "interrupted" and not len(sampled.tokens):
            return
        prompt, sample = samples.sample_of(request.key)
        source, size = f"{self._name}, prompt_id {prompt.prompt_id}, sample {sample}", self._weights.shape.vocab_size
        check_sampled(sampled, request, vocab_size=size, source=source, route_shape=self.route_shape)

    def close(self) -> None:
        """Stop the environment processes and close the engine."""
        if self._processes is not None:
            self._processes.close_all()
        self._engine.requests.close()


def check_sampled(
    response: Sampled, request: Request, *, vocab_size: int, source: str, route_shape: RouteShape | None = None
) -> None:
    """Check a response against its request.

    Args:
        source: engine and request, for errors.
        route_shape: shape of the expert choices (routes) that a response must have, if any.

    Raises:
        UserError: invalid length, token id, log-prob, routes, or kept set (the tokens that truncated sampling kept).
    """
    num_tokens, num_logprobs, max_tokens = len(response.tokens), len(response.logprobs), request.sampling.max_tokens
    if num_tokens != num_logprobs or np.ndim(response.tokens) != 1:
        raise UserError(
            f"a response of {num_tokens} tokens with {num_logprobs} log-probs",
            source=source,
            expected="one log-prob per sampled token, both [s]",
            hint="an engine of your own must return the log-prob of each sampled token, the stop token included; "
            "otherwise set rollout.engine=hf and compare",
        )
    if not 1 <= num_tokens <= max_tokens:
        raise UserError(
            f"a response of {num_tokens} tokens",
            source=source,
            expected=f"1 to {max_tokens} (data.max_response_length)",
            hint="the engine must stop at sampling.max_tokens, and needs room for a token behind the longest "
            "prompt: see data.max_prompt_length and data.max_response_length",
        )
    if request.sampling.is_truncated:
        from megatron_rl.engines.truncation import check_kept_sets

        check_kept_sets(response, not request.sampling.keeps_likely, source)
    _check_values(response, vocab_size, source)
    if route_shape is not None and not _has_routes(response, route_shape):
        layers, choices, dtype = route_shape.layers, route_shape.choices, route_shape.dtype.__name__
        raise UserError(
            "a response without the experts of its tokens",
            source=source,
            expected=f"Sampled.routes, [prompt and response, {layers}, {choices}] {dtype}",
            hint="set rollout.engine=vllm, hf or megatron, or actor.router_replay=trainer",
        )


def _check_values(response: Sampled, vocab_size: int, source: str) -> None:
    tokens, logprobs = np.asarray(response.tokens), np.asarray(response.logprobs)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"token id {tokens[(tokens < 0) | (tokens >= vocab_size)][0]} in a response",
            source=source,
            expected=f"0 to {vocab_size - 1}, the vocabulary of model.path",
            hint="model.path and model.tokenizer may belong to different models; an engine must not sample the rows "
            "that pad its vocabulary",
        )
    if not np.isfinite(logprobs).all():
        raise UserError(
            f"log-prob {logprobs[~np.isfinite(logprobs)][0]} of a sampled token",
            source=source,
            expected="finite log-probs",
            hint="the engine's weights or activations have overflowed: set hybrid.verify=full to rule out its weights, "
            "lower actor.lr if this comes after some steps, or set model.dtype=float32",
        )


def miscounted(num_responses: int, num_requests: int, source: str) -> UserError:
    """Build the error for a number of responses that differs from the number of requests."""
    return UserError(
        f"{num_responses} responses to {num_requests} requests",
        source=source,
        expected="one response per request, in their order",
        hint="this is a fault of the engine: check its version against requirements.txt, or set rollout.engine=hf",
    )


def _has_routes(response: Sampled, shape: RouteShape) -> bool:
    routes = response.routes
    if routes is None or routes.dtype != shape.dtype or routes.shape[1:] != (shape.layers, shape.choices):
        return False
    is_unknown = routes == np.iinfo(shape.dtype).max
    return len(routes) > len(response.tokens) and bool(((routes < shape.experts) | is_unknown).all())


# A prompt token costs about a sixteenth of a sampled one (8B parameters on one GPU: 40 us; 0.6 ms with 32 running
# responses), and spreading saves about a quarter of the time if lengths correlate by 0.5 (bench_dispatch.py).
_PREFILL_COST = 1 / 16
_SAVING = 1 / 4


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
