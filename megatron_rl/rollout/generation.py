# SPDX-License-Identifier: Apache-2.0
"""Generation of rollouts from prompts: the loop between an engine's samples and its requests, with checks of both.

An engine's first rank broadcasts a control message before each step: its ranks stay in sync only if they receive the
same requests before the same step.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.build import BuiltEngine
from megatron_rl.engines.protocol import Request, RolloutEngine, Sampled
from megatron_rl.observability.progress import RolloutProgress
from megatron_rl.parallel.collectives import (
    align_group_names,
    gather_objects,
    make_group,
    raise_together,
    reduce_scalars,
    share_object,
)
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rollout.episodes import Episodes, Following, SampleGroups, Samples, describe_episodes
from megatron_rl.rollout.phase_ends import PhaseEnd
from megatron_rl.types import Prompt, Rollout, RouteShape, UserError

if TYPE_CHECKING:
    from megatron_rl.agents.in_rank import AnyEpisodes
    from megatron_rl.engines.elastic.front import Front
    from megatron_rl.parallel.pairs import Pair
    from megatron_rl.transfer.hybrid_engine import HybridEngine


_IDLE_SECONDS = 0.002
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ControlMessage:
    """Actions of an engine's ranks before the next step, in field order."""

    interrupts: Sequence[int] = ()  # keys of requests to abort, keeping their partial results
    requests: Sequence[Request] = ()  # requests to add, in the order of (turn, key)
    stop: bool = False  # no message follows; running requests are completed


class Channel:
    """Broadcast channel from an engine's first rank to its other ranks: 8 bytes for an empty message.

    Args:
        group: CPU group of the engine's ranks; `None` if a single rank, or every rank by itself, creates the messages.
        star: faster connections between the first and each other rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, star: Sequence[Pair] = ()) -> None:
        self._group, self._star = group, star
        self.is_first = group is None or group.rank() == 0

    def share(self, message: ControlMessage | None) -> ControlMessage:
        """Return the first rank's message; collective over the engine."""
        if self._group is None:
            assert message is not None
            return message
        payload = torch.empty(0, dtype=torch.uint8)
        if message is not None and (message.interrupts or message.requests or message.stop):
            payload = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        size = torch.tensor([len(payload)])
        self._bring(size, self._group)
        if not size:
            return ControlMessage()
        if message is None:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self._bring(payload, self._group)
        return message or pickle.loads(payload.numpy().tobytes())

    def _bring(self, values: torch.Tensor, group: dist.ProcessGroup) -> None:
        if not self._star or not self._star[0].fits(values.nbytes):
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            return
        for pair in self._star:
            if self.is_first:
                pair.send(values)
            else:
                pair.receive(values)


def open_channel(engines: EngineRanks, rank: int, timeout: timedelta | None = None) -> Channel:
    """Open the channel of this rank's engine; collective over the job."""
    if engines.width == 1:
        return Channel()
    align_group_names()
    from megatron_rl.parallel.pairs import open_star

    index, _ = engines.places.get(rank, (-1, 0))
    group = None if index < 0 else make_group(engines.of[index], timeout)
    return Channel(group, open_star(group, timeout) if group is not None else ())


def serve(
    engine: RolloutEngine,
    take: Callable[[bool], ControlMessage],
    on_sampled: Callable[[Sampled], None],
    channel: Channel | None = None,
    on_requests: Callable[[Sequence[Request]], None] | None = None,
) -> Exception | None:
    """Step an engine until a stop message and completion of all requests; collective over the engine's ranks.

    Args:
        take: called before each step on the first rank (without a channel on every rank, with equal results), with
            whether the engine is idle.
        on_sampled: called on every rank with each finished or interrupted result.
        on_requests: called on every rank before requests are added.

    Returns:
        The first exception of `take` or `on_sampled`, after which neither is called. All requests are interrupted, or
        completed if a stop message came first.

    Raises:
        Exception: an error of the engine; all requests are interrupted.
    """
    running: set[int] = set()
    errors: list[Exception] = []
    channel = channel or Channel()

    def take_message() -> ControlMessage:
        if not errors:
            try:
                return take(not engine.has_requests())
            except Exception as error:
                errors.append(error)
        return ControlMessage(interrupts=sorted(running), stop=True)  # after an error

    def deliver(sampled: Sequence[Sampled]) -> None:
        for one in sampled:
            running.discard(one.key)
            if not errors:
                try:
                    on_sampled(one)
                except Exception as error:  # deferred, because other ranks would wait
                    errors.append(error)

    try:
        is_last = False
        while not is_last or engine.has_requests():
            if not is_last:
                message = channel.share(take_message() if channel.is_first else None)
                is_last = message.stop
                deliver(engine.interrupt(message.interrupts) if message.interrupts else [])
                if on_requests is not None:
                    on_requests(message.requests)
                if message.requests:  # in an order independent of their arrival
                    engine.add(sorted(message.requests, key=lambda request: (request.turn, request.key)))
                    running.update(request.key for request in message.requests)
            deliver(engine.step() if engine.has_requests() else [])
    except BaseException:
        engine.interrupt(sorted(running))
        raise
    return errors[0] if errors else None


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Sampled]:
    """Generate results for a batch of requests, in their order; collective over the engine's ranks."""
    found: dict[int, Sampled] = {}
    message = ControlMessage(requests=requests, stop=True)
    error = serve(engine, lambda is_idle: message, lambda sampled: found.update({sampled.key: sampled}))
    if error is not None:
        raise error
    return [found[request.key] for request in requests if request.key in found]


class Phase:
    """Control of one engine during a phase (stretch of generation), on its first rank.

    Args:
        awaited: positions of the leading prompts, which the step may take.
        left: this engine's unfinished samples of each prompt, `awaited` first.
        end: if `None`, the phase ends when no requests follow.

    Attributes:
        num_steps: decode steps before the end.
    """

    def __init__(self, awaited: Sequence[int], left: np.ndarray, end: PhaseEnd | None) -> None:
        self._left, self._end = left.copy(), end
        self._places = {position: place for place, position in enumerate(awaited)}
        self.num_steps, self._has_begun = 0, False
        self._started, self._idle_seconds = time.monotonic(), 0.0

    def take(self, is_idle: bool, following: Following, running: Iterable[int]) -> ControlMessage:
        """Return the engine's next control message for `serve`: new requests, or the end of the phase."""
        if self._end is None:
            return ControlMessage(requests=following.requests, stop=following.is_last)
        if self._has_begun:
            if self._end.is_over(self._left):
                return ControlMessage(interrupts=sorted(running), stop=True)
            is_idle &= not following.requests
            self.num_steps += not is_idle
            if is_idle:
                time.sleep(_IDLE_SECONDS)
                self._idle_seconds += _IDLE_SECONDS
        self._has_begun = True
        return ControlMessage(requests=following.requests)

    def finish(self, position: int) -> bool:
        """Record a finished sample of the prompt at `position`; return whether the step may take this prompt."""
        place = self._places.get(position)
        if place is not None:
            self._left[place] -= 1
        return place is not None

    def guard(self, call: Callable[[T], R]) -> Callable[[T], R]:
        """Wrap a callback so that its error ends the phase for all engines."""

        def guarded(argument: T) -> R:
            try:
                return call(argument)
            except Exception:
                if self._end is not None:
                    self._end.give_up()
                raise

        return guarded

    def busy_share(self) -> float:
        """Return the share of time in which the engine had requests."""
        return 1 - self._idle_seconds / max(time.monotonic() - self._started, _IDLE_SECONDS)


class OpenRequests:
    """Request counts of one engine in one phase; `running`: unfinished requests by key."""

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        self.num_requests = self.num_responses = 0
        names = ("asked", "cached", "loads", "cache", "waiting", "drafted", "accepted")
        self._sums: dict[str, float] = dict.fromkeys(names, 0.0)

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
        """Return shares of cached and of accepted tokens, and means of the engines' largest loads; collective.

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
        if sums["drafted"]:
            found["rollout/draft_acceptance"] = sums["accepted"] / sums["drafted"]
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
