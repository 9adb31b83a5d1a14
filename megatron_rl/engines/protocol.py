# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine is, and how one is registered under a name.

An engine lives in the processes of the job: `tensor_model_parallel_size` consecutive ranks form one engine (or the
ranks that it names itself: `PlacedEngine`), and all engines together span `placement.rollout`. It has two sides.
`RolloutEngine`: requests are added, and each step returns what is finished (`rollout.serving` is the only caller).
`EngineWeights`: parameters and their placement table, so that the hybrid engine can write weights into it shard to
shard.
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
    """What an engine is asked to continue.

    Attributes:
        key: the number of its sample, of which one request runs at a time: with `turn` it names the request.
        tokens: [s] int32 prompt, and what was sampled of it before.
        seed: of this response alone.
        sampling: how to draw it.
        turn: exchanges of the same episode before this one.
        num_sampled: of `tokens`, the last so many belong to the response.
    """

    key: int
    tokens: np.ndarray
    seed: int
    sampling: SamplingConfig
    turn: int = 0
    num_sampled: int = 0

    def response(self, sampled: Sequence[int]) -> Sequence[int]:
        """The response so far: what the request brings of it, and what was sampled after that."""
        return [*self.tokens[len(self.tokens) - self.num_sampled :].tolist(), *sampled] if self.num_sampled else sampled

    def ends_by(self, stop: StopStrings, sampled: Sequence[int]) -> bool:
        """Whether the last of the tokens that were sampled completes a string that ends the response."""
        return self.num_sampled + len(sampled) > self.sampling.min_tokens and stop.ends(self.response(sampled))

    def continued(self, tokens: np.ndarray, seed: int) -> Request:
        """What continues the response after further tokens of it, with the seed of what follows them."""
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            seed=seed,
            sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(tokens)),
            num_sampled=self.num_sampled + len(tokens),
        )


@dataclass(frozen=True)
class Sampled:
    """What an engine sampled for a request.

    Attributes:
        key: of the request.
        tokens: [s] int32 sampled tokens, the stop token included.
        logprobs: [s] float32 of the distribution that was sampled from (temperature applied).
        finish_reason: "stop", "length", or "interrupted" before either.
        kept: [s] what the tokens were drawn from, where `sampling.is_truncated`.
        num_cached: tokens of the request that a prefix cache had; None: the engine does not say.
        routes: [n, layers, choices] of the request's tokens and these, where `EngineSpec.records_routes`; the
            last token, which is not fed, has none.
        inserted: [s] bool, these tokens were put in (`engines.thinking`): log-prob 0, no kept set. None: none were.
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
    """What a server says of a fixed prompt.

    Attributes:
        prompt: [s] int32.
        sampled: greedy first, then at the temperature of the rollouts.
        temperatures: of each.
    """

    prompt: np.ndarray
    sampled: Sequence[Sampled]
    temperatures: Sequence[float]


@dataclass(frozen=True)
class EngineSpec:
    """What an engine needs to be built.

    Attributes:
        model_path: HF directory; only its config.json is read.
        shape: the same architecture, parsed.
        dtype: "float32" or "bfloat16".
        max_prompt_length, max_response_length: tokens.
        config: the rollout section.
        process: this rank.
        seed: of the engine's own random numbers (responses have seeds of their own).
        shareable: given the engine's placement table of this rank, tensors of the actor by the engine's names for
            them, which may be its parameters instead of storage of its own (they hold the same pieces).
        model: the actor's `training.packed_model.PackedModel`, for an engine that runs its modules; None: no actor.
        ranks: of the job, on which the engines are; None: all.
        adapters: that the engine keeps beside the model's weights; None: it has the sum of both.
        stop: strings that end a response beside its stop tokens (the engine asks after each token); None: none.
        records_routes: responses come with the experts that were chosen for each of their tokens.
        thoughts: what thoughts begin and end with, where `rollout.thinking_budget` bounds them; None: it does not.
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
        """Of the routes that responses come with; None: they come without."""
        return self.shape.route_shape if self.records_routes else None

    def find_place(self, rank: int) -> int:
        """Of a rank in its engine, where `tensor_model_parallel_size` neighbors are one."""
        return (rank - (self.ranks.start if self.ranks else 0)) % self.config.tensor_model_parallel_size


class AnyEngine(Protocol):
    """What every engine has beside its requests and its weights."""

    def tokens_in_flight(self) -> int:
        """Tokens sampled so far for requests that are not finished; asked by another thread."""
        ...

    def close(self) -> None:
        """Release the engine; process groups of the job stay alive."""


@runtime_checkable
class RolloutEngine(AnyEngine, Protocol):
    """One rank's share of an engine that is stepped; its ranks make the same calls in the same order."""

    def add(self, requests: Sequence[Request]) -> None:
        """Take requests in; they run from the next step on, while others run."""

    def step(self) -> list[Sampled]:
        """Advance what runs, by a token each or by more; returns what is finished, the same on every rank."""
        ...

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Forget requests and return what they have so far, maybe no token; keys without a request are passed over."""
        ...

    def has_requests(self) -> bool:
        """True if a step has something to do."""
        ...


class EngineWeights(Protocol):
    """The weights of an engine that lives in the ranks, as one rank sees them."""

    params: Mapping[str, torch.Tensor]
    shared_params: frozenset[str]  # parameters whose storage is the actor's
    padded_params: tuple[str, ...]  # parameters that may hold elements which no logical tensor fills

    def shard_key(self, rank: int) -> Hashable:
        """Ranks with equal keys have equal placement tables."""
        ...

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """ShardBox table of any rank of the job."""
        ...

    def begin_weight_update(self) -> None:
        """Make the parameters writable (they may have been given back while training)."""

    def end_weight_update(self) -> None:
        """The parameters hold new weights: drop everything computed with the old ones."""

    def sleep(self) -> None:
        """Give back memory until the next weight update."""


@runtime_checkable
class PlacedEngine(Protocol):
    """What an engine has beside the rest whose ranks are not `rollout.tensor_model_parallel_size` neighbors."""

    @property
    def engine_ranks(self) -> EngineRanks:
        """The ranks of every engine of the job."""
        ...


@runtime_checkable
class CodedEngine(Protocol):
    """What an engine has beside the rest that may keep its matrices in eight bits (`weights.row_quantization`).

    Their `params` are codes, int8; under the same name with `SCALE_SUFFIX` are scales, [n, 1] float32.
    """

    code_format: CodeFormat | None


@runtime_checkable
class ProbedEngine(Protocol):
    """What an engine has beside the rest whose weights are out of sight, such as a server's."""

    def probe(self) -> Probed | None:
        """What it says of a fixed prompt; None on all but its first rank."""
        ...


class ClosedBatches(AnyEngine, EngineWeights, Protocol):
    """The least that an engine of the user's must have: whole batches and weights; see `engines.build.OneTurn`."""

    def generate(self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingConfig) -> list[Sampled]:
        """One response per prompt, in order, the same on every rank of the engine; their keys do not matter."""
        ...


class SteppedEngine(RolloutEngine, EngineWeights, Protocol):
    """Requests and weights in one object."""


EngineMaker = Callable[[EngineSpec], SteppedEngine | ClosedBatches]


def register_rollout_engine(name: str, supports: Collection[str] = ()) -> Callable[[EngineMaker], EngineMaker]:
    """Decorator: make `engine(spec)`, such as a class with that argument, known as rollout.engine = `name`.

    `supports`: what it can beside plain sampling (`extension.engines.ABILITIES`); a run that needs more is refused.

    Raises:
        UserError: the name is taken, or an ability does not exist.
    """

    def register(engine: EngineMaker) -> EngineMaker:
        add_entry(ENGINES, name, RegisteredEngine(engine, frozenset(supports)), engine, "rollout.engine")
        return engine

    return register


def share_params(params: Mapping[str, torch.Tensor], shareable: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Rebind parameters to the actor's storage where shape, dtype and device agree too; returns their names.

    A parameter of experts is rebound where all of its matrices are shareable and lie in it as they lie in the actor's.
    Must run before anything captures the parameters' addresses.
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
