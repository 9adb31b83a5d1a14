# SPDX-License-Identifier: Apache-2.0
"""Interfaces of rollout engines, their sampling contract, and registration; read this before you write an engine.

`RolloutConfig.ranks_per_engine` consecutive ranks (or the ranks of a `PlacedEngine`) are one engine; all engines
together span `placement.rollout`. `RolloutEngine` is the request side, called by `rollout.generation`; `EngineWeights`
is the weight side, called by the hybrid engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from megatron_rl.extension.registry import ENGINES, RegisteredEngine

if TYPE_CHECKING:
    import torch

    from megatron_rl.config.schema import RolloutConfig
    from megatron_rl.engines.endings import StopStrings, Thoughts
    from megatron_rl.parallel.collectives import Process
    from megatron_rl.parallel.layout import EngineRanks
    from megatron_rl.types import KeptSets, RouteShape
    from megatron_rl.weights.adapters import AdapterShape
    from megatron_rl.weights.families import ModelShape
    from megatron_rl.weights.shard_box import ShardBox


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling parameters.

    `min_tokens`, `min_p`, `top_k` and `top_p`, in this order, restrict the tokens to draw from (`engines.truncation`).
    Engines return these sets ("kept sets"), and training normalizes log-probs over them.
    """

    temperature: float  # divides logits in engine and training; 0 is greedy (validation only)
    max_tokens: int
    stop_token_ids: tuple[int, ...]  # end the response, as part of it
    top_p: float = 1.0  # keeps the fewest most likely tokens of this total probability; 1 is off
    top_k: int = -1  # keeps this many most likely tokens; -1 is off
    min_p: float = 0.0  # keeps tokens at least this fraction as likely as the best; 0 is off
    max_kept_tokens: int = 1024  # maximum set size
    min_tokens: int = 0  # response length below which no stop token or string ends it
    thinking_budget: int | None = None  # response tokens after which an open thought is closed (`engines.wrappers`)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def is_truncated(self) -> bool:
        """True if some tokens are drawn from restricted sets."""
        return not self.is_greedy and (self.keeps_likely or self.min_tokens > 0)

    @property
    def keeps_likely(self) -> bool:
        """True if top-p, top-k or min-p restricts the tokens to draw from."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def for_source(self, source: str) -> SamplingConfig:
        """Return the parameters for prompts of a source of `data.sources`."""
        return self

    def draws_like(self, other: SamplingConfig) -> bool:
        """Return whether both draw tokens from the same distribution; length limits and stop tokens may differ."""
        return self == replace(other, max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids)


def derive_seed(run_seed: int, step: int, prompt_id: int, sample_index: int, round: int = 0, position: int = 0) -> int:
    """Derive the 63-bit seed of a response, or of its continuation after `position` tokens.

    It depends on the arguments only, so DP size and scheduling never change a sample.

    Args:
        round: earlier sampling rounds of the step (dynamic sampling).
    """
    parts = [run_seed, step, prompt_id, sample_index]
    if round or position:
        parts.append(round)
    if position:
        parts.append(position)
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Request:
    """A prompt or partial response to continue."""

    key: int  # number of the sample, which runs one request at a time
    tokens: np.ndarray  # [s] int32 prompt and response so far
    seed: int
    sampling: SamplingConfig
    turn: int = 0  # number of earlier turns in the episode
    num_sampled: int = 0  # number of trailing `tokens` that belong to the response
    extras: Any = None  # `token_requests.Extras`, for an engine with ability "scores"

    def response(self, sampled: Sequence[int]) -> Sequence[int]:
        """Return the response so far, `sampled` included."""
        return [*self.tokens[len(self.tokens) - self.num_sampled :].tolist(), *sampled] if self.num_sampled else sampled

    def ends_by(self, stop: StopStrings | None, sampled: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string after the first `sampling.min_tokens` tokens."""
        stops = [one for one in (stop, self.extras and self.extras.stop) if one is not None]
        is_long = self.num_sampled + len(sampled) > self.sampling.min_tokens
        return is_long and any(one.ends(self.response(sampled)) for one in stops)

    def continued(self, tokens: np.ndarray, seed: int) -> Request:
        """Return the request that continues this one after `tokens` were sampled."""
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            seed=seed,
            sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(tokens)),
            num_sampled=self.num_sampled + len(tokens),
        )


@dataclass(frozen=True)
class Sampled:
    """The response to a request."""

    key: int
    tokens: np.ndarray  # [s] int32, stop token included
    logprobs: np.ndarray  # [s] float32 under the distribution sampled from (temperature applied)
    finish_reason: str  # "stop", "length", or "interrupted"
    kept: KeptSets | None = None  # [s] sets of tokens that each token was drawn from, if `sampling.is_truncated`
    num_cached: int | None = None  # number of request tokens found in the prefix cache, if reported
    # [n, layers, choices] experts of request and response tokens, if `EngineSpec.records_routes`; unknown for the last
    # token, which is never fed.
    routes: np.ndarray | None = None
    # [s] bool, true for tokens inserted by `engines.wrappers` with log-prob 0 and no kept set, if any.
    inserted: np.ndarray | None = None
    scores: Any = None  # `token_requests.Scores`, if the request has `extras`


@dataclass(frozen=True)
class EngineSpec:
    """The inputs of an engine's constructor."""

    model_path: str  # HF directory; its weights are not read
    shape: ModelShape  # its config.json, parsed
    dtype: str  # "float32" or "bfloat16"
    max_prompt_length: int  # in tokens, like the next
    max_response_length: int
    config: RolloutConfig
    process: Process
    seed: int  # seed of the engine, not of responses
    # Placement table -> tensors of the actor, by the engine's names, that may serve as parameters.
    shareable: Callable[[Sequence[ShardBox]], Mapping[str, torch.Tensor]] = lambda placements: {}
    model: Any = None  # the actor's `training.packed_model.PackedModel`, for an engine that runs its modules
    ranks: range | None = None  # job ranks with engines; all if `None`
    adapters: AdapterShape | None = None  # adapters that the engine keeps apart; `None` if merged into the weights
    stop: StopStrings | None = None  # stop strings, checked after each token
    records_routes: bool = False  # responses contain the experts of each token
    thoughts: Thoughts | None = None  # tags of thoughts, if `rollout.thinking_budget` is set

    @property
    def route_shape(self) -> RouteShape | None:
        """Shape of the expert choices (routes) in responses, if they are recorded."""
        return self.shape.route_shape if self.records_routes else None

    def find_place(self, rank: int) -> int:
        """Return the place of a job rank in its engine, where TP ranks are neighbors."""
        return (rank - (self.ranks.start if self.ranks else 0)) % self.config.ranks_per_engine


Probed = Sequence[tuple[Request, Sampled]]  # a server's responses to fixed requests, for the comparison of weights


class AnyEngine(Protocol):
    """Methods of every engine."""

    def tokens_in_flight(self) -> int:
        """Count the tokens of unfinished responses; called from another thread."""
        ...

    def close(self) -> None:
        """Release the engine, but not the job's process groups."""


@runtime_checkable
class RolloutEngine(AnyEngine, Protocol):
    """One rank's share of an engine that generates in steps; all ranks make equal calls in equal order.

    Optional: `load: dict[str, float]`, since its values were set to 0: the largest `cache` (used share of the KV cache)
    and `waiting` (requests); the tokens `drafted` and of these `accepted`.
    """

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests, which start at the next step."""

    def step(self) -> list[Sampled]:
        """Advance by one or more tokens; return finished responses, equal on every rank."""
        ...

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests, ignoring unknown keys; return partial responses."""
        ...

    def has_requests(self) -> bool:
        """Return whether any request runs or waits."""
        ...


class EngineWeights(Protocol):
    """One rank's view of an engine's weights.

    Two members are optional. `code_format: CodeFormat | None`: `params` contains int8 matrices (`weights.quantization`)
    and, under names with `SCALE_SUFFIX`, scales of their rows, [rows, 1] float32. `probe() -> Probed | None`, for
    inaccessible weights: continue a fixed prompt, greedily and then at the rollout temperature, so that the trainer can
    verify the weights; `None` on all but the first rank.
    """

    params: Mapping[str, torch.Tensor]
    shared_params: frozenset[str] = frozenset()  # parameters whose storage is the actor's
    padded_params: tuple[str, ...] = ()  # may hold padding, which no logical tensor fills

    def shard_key(self, rank: int) -> Hashable:
        """Return an identifier of a rank's placement table, equal for ranks with equal tables."""
        ...

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """Return the placement table (the boxes of HF tensors) of any rank of the job."""
        ...

    def begin_weight_update(self) -> None:
        """Make the parameters writable, also after `sleep`."""

    def end_weight_update(self) -> None:
        """Drop everything computed with the old weights."""

    def sleep(self) -> None:
        """Release memory until the next weight update."""


@runtime_checkable
class PlacedEngine(Protocol):
    """An engine whose ranks are not neighbors."""

    @property
    def engine_ranks(self) -> EngineRanks:
        """The ranks of every engine of the job."""
        ...


class ClosedBatches(AnyEngine, EngineWeights, Protocol):
    """The smallest interface of a user's engine: it answers whole batches, formed by `engines.wrappers.OneTurn`."""

    def generate(self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingConfig) -> list[Sampled]:
        """Return one response per prompt, in order, equal on every rank."""
        ...


class SteppedEngine(RolloutEngine, EngineWeights, Protocol):
    """An engine that generates in steps, with its weights."""


EngineMaker = Callable[[EngineSpec], SteppedEngine | ClosedBatches]


def register_rollout_engine(name: str, supports: Collection[str] = ()) -> Callable[[EngineMaker], EngineMaker]:
    """Register the decorated `engine(spec)` as rollout.engine = `name`.

    Args:
        supports: abilities (`extension.registry.ABILITIES`); runs that need others are refused.

    Raises:
        UserError: the name is taken, or an ability does not exist.
    """

    def register(engine: EngineMaker) -> EngineMaker:
        ENGINES.add(name, RegisteredEngine(engine, frozenset(supports)), engine)
        return engine

    return register


def share_params(params: Mapping[str, torch.Tensor], shareable: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Rebind parameters to the actor's tensors of equal shape, dtype and device; return the names of these parameters.

    The actor must store fused experts contiguously, in the engine's order. Call this before
    the parameters' addresses are captured.
    """
    shared: set[str] = set()
    for name, param in params.items():
        names, mine = [name], shareable.get(name)
        if ".experts." in name:
            from megatron_rl.weights.packed_experts import find_shared_experts

            names, mine = find_shared_experts(name, param, shareable)
        if mine is not None and (mine.shape, mine.dtype, mine.device) == (param.shape, param.dtype, param.device):
            param.data = mine
            shared.update(names)
    return frozenset(shared)
