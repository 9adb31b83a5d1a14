# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine is, and the registry in which `rollout.engine` is looked up.

An engine lives in the training processes: `tensor_model_parallel_size` consecutive ranks form one
engine, and all engines together span the job. It exposes its parameters and their placement table, so
that the hybrid engine can write weights into it shard to shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.extension.registry import Deferred, add_entry, find_entry
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.shard_box import ShardBox

if TYPE_CHECKING:  # a dry run reads the names of the engines, without torch
    import torch

    from megatron_rl.parallel.collectives import Process


@dataclass(frozen=True)
class Generation:
    """One response.

    Attributes:
        tokens: [s] int32 sampled tokens, the stop token included.
        logprobs: [s] float32 of the distribution that was sampled from (temperature applied).
        finish_reason: "stop" or "length".
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: str


OnFinished = Callable[[int, Generation], None]


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
        lend: given the engine's placement table of this rank, tensors by name that the engine may use as its
            parameters instead of allocating its own (they hold the same pieces).
    """

    model_path: str
    shape: ModelShape
    dtype: str
    max_prompt_length: int
    max_response_length: int
    config: RolloutConfig
    process: Process
    seed: int
    lend: Callable[[list[ShardBox]], Mapping[str, torch.Tensor]] = lambda placements: {}


class RolloutEngine(Protocol):
    """One rank's share of one engine."""

    params: Mapping[str, torch.Tensor]
    borrowed: frozenset[str]  # parameters whose storage is the actor's
    padded_params: tuple[str, ...]  # parameters that may hold elements which no logical tensor fills

    def shard_key(self, rank: int) -> int:
        """Ranks with equal keys have equal placement tables."""

    def placements(self, rank: int) -> list[ShardBox]:
        """ShardBox table of any rank of the job."""

    def begin_weight_update(self) -> None:
        """Make the parameters writable (they may have been given back while training)."""

    def end_weight_update(self) -> None:
        """The parameters hold new weights: drop everything computed with the old ones."""

    def generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingConfig,
        on_finished: OnFinished | None = None,
    ) -> list[Generation]:
        """Generate one response per prompt, in order; the same on every rank of the engine.

        Args:
            prompts, seeds: one of each per request.
            sampling: how to draw the responses.
            on_finished: called with the index of a request and its response as soon as it is there, while the
                others go on; must not raise, as the other ranks of the engine would wait for this one.
        """

    def tokens_in_flight(self) -> int:
        """Tokens sampled so far for responses that are not finished; asked by another thread during `generate`."""

    def sleep(self) -> None:
        """Give back memory until the next weight update."""

    def close(self) -> None:
        """Release the engine; process groups of the job stay alive."""


EngineMaker = Callable[[EngineSpec], RolloutEngine]

# Name -> what makes one; ours are imported when they are chosen: each engine's library is an import wall.
ENGINES: dict[str, EngineMaker] = {
    "vllm": Deferred("megatron_rl.engines.vllm", "VllmEngine"),
    "hf": Deferred("megatron_rl.engines.transformers", "HuggingFaceEngine"),
}
_SETTING = "rollout.engine"


def register_rollout_engine(name: str) -> Callable[[EngineMaker], EngineMaker]:
    """Decorator: make `engine(spec)`, such as a class with that argument, known as rollout.engine = `name`.

    Raises:
        UserError: the name is taken.
    """

    def register(engine: EngineMaker) -> EngineMaker:
        add_entry(ENGINES, name, engine, engine, _SETTING)
        return engine

    return register


def find_engine(name: str) -> EngineMaker:
    """The engine of a name; UserError naming the known ones if there is none."""
    return find_entry(ENGINES, name, _SETTING)


def borrow_params(
    params: Mapping[str, torch.nn.Parameter], lent: Mapping[str, torch.Tensor]
) -> frozenset[str]:
    """Rebind parameters to lent storage where shape, dtype and device agree too; returns their names.

    A lent name may also be that of a view of a parameter (an expert's matrix), which cannot be rebound.
    Must run before anything captures the parameters' addresses.
    """
    borrowed = {
        name for name, tensor in lent.items()
        if name in params and params[name].shape == tensor.shape and params[name].dtype == tensor.dtype
        and params[name].device == tensor.device
    }
    for name in borrowed:
        params[name].data = lent[name]
    return frozenset(borrowed)


def build_engine(spec: EngineSpec) -> RolloutEngine:
    """Build the engine named by `rollout.engine`; collective over the job.

    Raises:
        UserError: unknown name, or a layout that the model does not fit.
    """
    found = find_engine(spec.config.engine)
    spec.shape.check_rollout_layout(spec.config.tensor_model_parallel_size)
    return found(spec)
