# SPDX-License-Identifier: Apache-2.0
"""Interfaces of rollout engines, and their registration by name; read this before you write an engine.

An engine runs in the processes of the job: `tensor_model_parallel_size` consecutive ranks form one engine (or the ranks
that a `PlacedEngine` returns), and all engines together span `placement.rollout`. It has two sides. `RolloutEngine`
takes requests and returns finished responses step by step (`rollout.serving` is the only caller). `EngineWeights` has
the parameters and their placement table, which the hybrid engine uses to write weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.sampling import SamplingConfig, StopStrings, Thoughts
from megatron_rl.extension.engines import ENGINES, RegisteredEngine
from megatron_rl.extension.registry import add_entry
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.types import KeptSets, RouteShape
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.fused_experts import is_fused, join_matrices, name_matrix
from megatron_rl.weights.shard_box import ShardBox

if TYPE_CHECKING:  # a dry run reads the names of the engines, without torch
    import torch

    from megatron_rl.parallel.collectives import Process
    from megatron_rl.weights.row_quantization import CodeFormat


@dataclass(frozen=True)
class Request:
    """A prompt or partial response for an engine to continue.

    Attributes:
        key: sample number; a sample has at most one running request, so key and `turn` identify it.
        tokens: [s] int32 prompt, followed by tokens of the response sampled earlier.
        seed: seed of this response alone.
        turn: number of earlier turns in the episode.
        num_sampled: number of trailing `tokens` that belong to the response.
    """

    key: int
    tokens: np.ndarray
    seed: int
    sampling: SamplingConfig
    turn: int = 0
    num_sampled: int = 0

    def response(self, sampled: Sequence[int]) -> Sequence[int]:
        """Return the response so far: its tokens in the request, followed by `sampled`."""
        return [*self.tokens[len(self.tokens) - self.num_sampled :].tolist(), *sampled] if self.num_sampled else sampled

    def ends_by(self, stop: StopStrings, sampled: Sequence[int]) -> bool:
        """Return whether the last sampled token completes a stop string."""
        return self.num_sampled + len(sampled) > self.sampling.min_tokens and stop.ends(self.response(sampled))

    def continued(self, tokens: np.ndarray, seed: int) -> Request:
        """Return a request that continues the response after `tokens`, with a seed for the tokens that follow."""
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            seed=seed,
            sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(tokens)),
            num_sampled=self.num_sampled + len(tokens),
        )


@dataclass(frozen=True)
class Sampled:
    """Tokens that an engine sampled for a request.

    Attributes:
        key: key of the request.
        tokens: [s] int32 sampled tokens, the stop token included.
        logprobs: [s] float32 under the distribution that was sampled from (temperature applied).
        finish_reason: "stop", "length", or "interrupted" before either.
        kept: [s] sets from which the tokens were drawn, if `sampling.is_truncated`.
        num_cached: request tokens found in the prefix cache; `None` if the engine does not report it.
        routes: [n, layers, choices] experts of the request's and the sampled tokens, if `EngineSpec.records_routes`;
            unknown for the last token, which is never fed to the model.
        inserted: [s] bool, tokens that were inserted, not sampled (`engines.thinking`): log-prob 0, no kept set. `None`
            if there are none.
    """

    key: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    kept: KeptSets | None = None
    num_cached: int | None = None
    routes: np.ndarray | None = None
    inserted: np.ndarray | None = None


@dataclass(frozen=True)
class Probed:
    """A server's continuations of a fixed prompt.

    Attributes:
        prompt: [s] int32.
        sampled: the greedy continuation, then one at the rollout temperature.
        temperatures: temperature of each continuation.
    """

    prompt: np.ndarray
    sampled: Sequence[Sampled]
    temperatures: Sequence[float]


@dataclass(frozen=True)
class EngineSpec:
    """The inputs of an engine's constructor.

    Attributes:
        model_path: HF directory, of which the engine reads the config, not the weights.
        shape: the architecture parsed from that config.
        dtype: "float32" or "bfloat16".
        max_prompt_length, max_response_length: tokens.
        config: `rollout` section of the settings.
        process: this rank.
        seed: seed of the engine's global random numbers (responses have seeds of their own).
        shareable: maps this rank's placement table to tensors of the actor, by engine-side parameter name, that hold
            the same pieces; the engine may use them as parameters instead of storage of its own.
        model: the actor's `training.packed_model.PackedModel`, for an engine that runs its modules; `None` without
            actor.
        ranks: job ranks with engines; all if `None`.
        adapters: adapters that the engine keeps apart from the weights; `None` if they are merged into the weights.
        stop: strings that end a response, checked after each token; `None` if there are none.
        records_routes: responses contain the experts chosen for each token.
        thoughts: tags of thoughts, if `rollout.thinking_budget` bounds them.
    """

    model_path: str
    shape: ModelShape
    dtype: str
    max_prompt_length: int
    max_response_length: int
    config: RolloutConfig
    process: Process
    seed: int
    shareable: Callable[[Sequence[ShardBox]], Mapping[str, torch.Tensor]] = lambda placements: {}
    model: Any = None
    ranks: range | None = None
    adapters: AdapterShape | None = None
    stop: StopStrings | None = None
    records_routes: bool = False
    thoughts: Thoughts | None = None

    @property
    def route_shape(self) -> RouteShape | None:
        """Shape of the routes in responses; `None` if responses have no routes."""
        return self.shape.route_shape if self.records_routes else None

    def find_place(self, rank: int) -> int:
        """Return the TP rank of a job rank in its engine, which consists of `tensor_model_parallel_size` neighbors."""
        return (rank - (self.ranks.start if self.ranks else 0)) % self.config.tensor_model_parallel_size


class AnyEngine(Protocol):
    """Methods that every engine has."""

    def tokens_in_flight(self) -> int:
        """Count the tokens sampled so far for unfinished requests; called from another thread."""
        ...

    def close(self) -> None:
        """Release the engine; the job's process groups must survive."""


@runtime_checkable
class RolloutEngine(AnyEngine, Protocol):
    """One rank's share of a stepped engine; all of its ranks make the same calls in the same order."""

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests, which start at the next step beside the running ones."""

    def step(self) -> list[Sampled]:
        """Advance running requests by one or more tokens; return the finished ones, equal on every rank."""
        ...

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests and return their partial responses, possibly empty; ignore unknown keys."""
        ...

    def has_requests(self) -> bool:
        """Return whether any request runs or waits."""
        ...


class EngineWeights(Protocol):
    """One rank's view of the weights of an engine that lives in the job's ranks."""

    params: Mapping[str, torch.Tensor]
    shared_params: frozenset[str]  # parameters whose storage is the actor's
    padded_params: tuple[str, ...]  # may hold padding, which no logical tensor fills

    def shard_key(self, rank: int) -> Hashable:
        """Return a key that is equal for ranks with equal placement tables."""
        ...

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """Return the `ShardBox` table of any rank of the job."""
        ...

    def begin_weight_update(self) -> None:
        """Make the parameters writable; their memory may have been released during training."""

    def end_weight_update(self) -> None:
        """Drop everything computed with the old weights, such as the prefix cache."""

    def sleep(self) -> None:
        """Release memory until the next weight update."""


@runtime_checkable
class PlacedEngine(Protocol):
    """An engine whose ranks are not `rollout.tensor_model_parallel_size` neighbors."""

    @property
    def engine_ranks(self) -> EngineRanks:
        """The ranks of every engine of the job."""
        ...


@runtime_checkable
class CodedEngine(Protocol):
    """An engine that can keep its matrices in eight bits (`weights.row_quantization`).

    Coded `params` are int8; their scales, [n, 1] float32, have the same name with `SCALE_SUFFIX`.
    """

    code_format: CodeFormat | None


@runtime_checkable
class ProbedEngine(Protocol):
    """An engine whose weights the job cannot read, such as a server's."""

    def probe(self) -> Probed | None:
        """Sample continuations of a fixed prompt; `None` on all but the engine's first rank."""
        ...


class ClosedBatches(AnyEngine, EngineWeights, Protocol):
    """The smallest interface of a user's engine: whole batches and weights; see `engines.build.OneTurn`."""

    def generate(self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingConfig) -> list[Sampled]:
        """Return one response per prompt, in order, equal on every rank of the engine; their keys are ignored."""
        ...


class SteppedEngine(RolloutEngine, EngineWeights, Protocol):
    """A stepped engine with its weights in one object."""


EngineMaker = Callable[[EngineSpec], SteppedEngine | ClosedBatches]


def register_rollout_engine(name: str, supports: Collection[str] = ()) -> Callable[[EngineMaker], EngineMaker]:
    """Register the decorated `engine(spec)`, a class or function, as rollout.engine = `name`.

    Args:
        supports: abilities beyond plain sampling (`extension.engines.ABILITIES`); runs that need more are refused.

    Raises:
        UserError: the name is taken, or an ability does not exist.
    """

    def register(engine: EngineMaker) -> EngineMaker:
        add_entry(ENGINES, name, RegisteredEngine(engine, frozenset(supports)), engine, "rollout.engine")
        return engine

    return register


def share_params(params: Mapping[str, torch.Tensor], shareable: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Rebind parameters to the actor's storage if shape, dtype and device agree too; return the names of shared
    tensors.

    A fused expert parameter is rebound only if all of its matrices are shareable and contiguous in the actor in the
    same order. Must run before anything captures the parameters' addresses.
    """
    shared: set[str] = set()
    for name, param in params.items():
        names = [name_matrix(name, expert) for expert in range(len(param))] if is_fused(name, param) else [name]
        found = [shareable.get(view) for view in names]
        mine = join_matrices(found) if is_fused(name, param) else found[0]
        if mine is not None and (mine.shape, mine.dtype, mine.device) == (param.shape, param.dtype, param.device):
            param.data = mine
            shared.update(names)
    return frozenset(shared)
