# SPDX-License-Identifier: Apache-2.0
"""One set of weights, two modes: the actor's Megatron shards and the engine's rollout shards.

    with hybrid.rollout_mode():            # weights: Megatron TP/PP/DP -> engine TP, shard to shard
        groups = hybrid.generate(prompts, ...)

Where the two layouts agree on a parameter, the engine uses the actor's own storage and nothing moves.
The rest is planned once from the two placement tables; entering the mode executes the plan, certifies
that both sides hold the same bits, and drops what the engine computed with older weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import HybridConfig
from megatron_rl.engines.checking import EngineName, check_generations
from megatron_rl.engines.protocol import Generation, RolloutEngine
from megatron_rl.engines.sampling import SamplingConfig, derive_seed
from megatron_rl.observability.rollout_progress import RolloutProgress
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import Process, gather_arrays, raise_together, reduce_scalars
from megatron_rl.resharding.aliasing import gather_names
from megatron_rl.resharding.certificate import Certificate, Side, count_once
from megatron_rl.resharding.executor import Resharder, ReshardStats
from megatron_rl.resharding.planner import Shard, group_shards, plan_rank
from megatron_rl.types import Prompt, Rollout, RolloutGroup, UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.shard_box import ShardBox

_FINISH_REASONS = ("stop", "length")


class SourceModel(Protocol):
    """The weights that the engine gets."""

    shape: ModelShape
    params: Mapping[str, torch.Tensor]
    padded_params: tuple[str, ...]

    def shard_key(self, rank: int) -> Hashable:
        """Ranks with equal keys have equal placement tables."""

    def placements(self, rank: int) -> list[ShardBox]:
        """ShardBox table of any rank of the job."""


class Releasable(Protocol):
    """What training holds besides the weights."""

    def release(self) -> None:
        """Give back what generation does not need; training takes it back by itself."""


class WeightSource(Protocol):
    """What the engine needs of an actor."""

    model: SourceModel
    optimizer: Releasable
    policy_version: int


class HybridEngine:
    """The actor's weights in an in-process rollout engine; building it is collective.

    Args:
        actor: whose weights are used.
        engine: this rank's share of the engine.
        engine_tp_size: ranks per engine.
        process: this rank.
        group: all ranks of the job.
        config: transport, bucket size, verification.
        run_seed: seed of the run, see `derive_seed`.
        timers: count the phases "reshard", "verify" and "rollout".

    Attributes:
        progress: is told of responses while they are generated; to be set after building.
    """

    def __init__(
        self, actor: WeightSource, engine: RolloutEngine, *, engine_tp_size: int, process: Process,
        group: dist.ProcessGroup, config: HybridConfig, run_seed: int, timers: PhaseTimers,
    ) -> None:
        self._actor, self._engine, self._group, self._run_seed = actor, engine, group, run_seed
        self._timers, self._verify = timers, config.verify
        self._num_engines = process.world_size // engine_tp_size
        self._engine_index, self._engine_rank = divmod(process.rank, engine_tp_size)
        self._engine_tp_size = engine_tp_size
        source = group_shards(actor.model.placements, actor.model.shard_key, process.world_size)
        self._resharder = self._build_resharder(source, process, config)
        self._certificate = self._build_certificate(source, process)
        self.reshard_stats = self._total_stats()
        self._policy_version = -1
        self.verified_tensors = 0
        self.progress = RolloutProgress()

    def _build_resharder(self, source: Sequence[Shard], process: Process, config: HybridConfig) -> Resharder:
        """Plan what is not borrowed, and make it ready."""
        actor, engine = self._actor.model, self._engine
        borrowed = gather_names(engine.borrowed, self._group)
        destination = group_shards(
            lambda rank: [p for p in engine.placements(rank) if p.param not in borrowed[rank]],
            lambda rank: (engine.shard_key(rank), borrowed[rank]), process.world_size)
        plan = plan_rank(process.rank, source, destination, ranks_per_node=process.ranks_per_node)
        return Resharder(
            plan, actor.params, engine.params, self._group, dtype=self._dtype, bucket_bytes=config.bucket_bytes,
            transport=config.transport, ranks_per_node=process.ranks_per_node)

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._engine.params.values())).dtype

    @property
    def transport(self) -> str:
        """How pieces cross between ranks: pull, buckets, or pull+buckets."""
        return self._resharder.transport

    def _build_certificate(self, source: Sequence[Shard], process: Process) -> Certificate:
        actor, engine, first = self._actor.model, self._engine, process.rank - self._engine_rank
        destination = group_shards(
            lambda rank: engine.placements(first + rank), lambda rank: engine.shard_key(first + rank),
            self._engine_tp_size)
        padded = [name for name in actor.params if name.endswith(actor.padded_params)]
        return Certificate(
            actor.shape.logical_tensors(), Side(actor.params, count_once(source, process.rank), padded),
            Side(engine.params, count_once(destination, self._engine_rank),
                 [name for name in engine.padded_params if name in engine.params]),
            dtype=self._dtype, num_engines=self._num_engines, engine=self._engine_index, group=self._group)

    def _total_stats(self) -> ReshardStats:
        """Bytes of one reshard, all ranks together."""
        mine = asdict(self._resharder.stats)
        mine["bytes_aliased"] = sum(self._engine.params[name].nbytes for name in self._engine.borrowed)
        total = reduce_scalars(mine, dist.ReduceOp.SUM, self._group, torch.device("cpu"))
        return ReshardStats(**{name: int(value) for name, value in total.items()})

    def reshard(self) -> None:
        """Write the actor's current weights into the engine and verify them; collective.

        Raises:
            CertificateError: the engine does not hold the actor's weights; names tensor, rank and box.
        """
        with self._timers.phase("reshard"):
            self._engine.begin_weight_update()
            self._resharder.run()
            if self._verify != "off":
                with self._timers.phase("verify"):
                    self.verified_tensors = self._certificate.verify(sample=self._verify == "sample")
            self._engine.end_weight_update()
        self._policy_version = self._actor.policy_version

    @contextmanager
    def rollout_mode(self) -> Iterator[HybridEngine]:
        """Reshard, lend the engine, and put it to sleep afterwards; collective.

        Training memory is given back before the engine takes its own, and the engine sleeps before
        training takes it back, so that the peak is that of one mode, not of both.
        """
        self._actor.optimizer.release()
        self.reshard()
        try:
            yield self
        finally:
            self._engine.sleep()

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingConfig, step: int,
        round: int = 0, on_finished: Callable[[Rollout], None] | None = None,
    ) -> list[RolloutGroup]:
        """Generate `group_size` responses per prompt; collective.

        Whole groups go to one engine, so that its prefix cache serves the shared prompt.

        Args:
            prompts: the same on every rank.
            group_size: responses per prompt.
            sampling: how to draw them.
            step, round: part of every response's seed.
            on_finished: given on every rank or on none; called on the first rank of an engine (see
                `rank_of_group`) with each rollout as soon as its response is there, while others are being
                generated. The same objects are in the result. The response is not decoded yet.

        Returns:
            One group per prompt, in order, the same on every rank; responses are not scored yet.

        Raises:
            Exception: what `on_finished` raised, after the generation, on every rank.
            UserError: the engine returned something else than what it was asked for; on every rank.
        """
        mine = prompts[self._engine_index :: self._num_engines]
        # The position in the batch is part of the sample's identity: a prompt can come twice in a step,
        # at an epoch boundary, and must not get the same responses twice.
        occurrence = _count_occurrences(prompts)[self._engine_index :: self._num_engines]
        requests = [(prompt, seen * group_size + sample)
                    for prompt, seen in zip(mine, occurrence, strict=True) for sample in range(group_size)]
        stream = None
        if self._engine_rank == 0:
            stream = _Stream([prompt for prompt, _ in requests], group_size, self._policy_version, on_finished,
                             self.progress.count)
        in_flight = self._engine.tokens_in_flight if self._engine_rank == 0 else None
        with self._timers.phase("rollout"), self.progress.follow(len(prompts) * group_size, in_flight):
            generations = self._engine.generate(
                [prompt.tokens for prompt, _ in requests],
                [derive_seed(self._run_seed, step, prompt.prompt_id, sample, round) for prompt, sample in requests],
                sampling, stream)
            raise_together(self._find_error(generations, requests, group_size, sampling, stream), self._group)
            return self._assemble(prompts, self._share(generations), group_size, stream.rollouts if stream else {})

    def _find_error(
        self, generations: Sequence[Generation], requests: Sequence[tuple[Prompt, int]], group_size: int,
        sampling: SamplingConfig, stream: _Stream | None,
    ) -> Exception | None:
        """What is wrong with the responses of this engine, or what the listener raised."""
        if stream is None:
            return None  # not the engine's first rank
        first = self._engine_index * self._engine_tp_size
        engine = EngineName(
            self._engine_index, range(first, first + self._engine_tp_size), type(self._engine).__name__)
        names = [f"prompt_id {prompt.prompt_id}, sample {sample % group_size}" for prompt, sample in requests]
        try:
            check_generations(generations, names, max_tokens=sampling.max_tokens,
                              vocab_size=self._actor.model.shape.vocab_size, engine=engine)
        except UserError as error:
            return error
        return stream.error

    def rank_of_group(self, index: int) -> int:
        """The rank on which `on_finished` is called with the rollouts of the prompt at that index."""
        return index % self._num_engines * self._engine_tp_size

    def _share(self, generations: list[Generation]) -> list[list[Generation]]:
        """Give every rank the responses of every engine: [engine][request]."""
        mine = generations if self._engine_rank == 0 else []
        tokens = gather_arrays([g.tokens for g in mine], np.int32, self._group)
        logprobs = gather_arrays([g.logprobs for g in mine], np.float32, self._group)
        reasons = gather_arrays(
            [np.array([_FINISH_REASONS.index(g.finish_reason) for g in mine], np.int32)], np.int32, self._group)
        leaders = range(0, len(tokens), self._engine_tp_size)
        return [
            [Generation(t, lp, _FINISH_REASONS[reason])
             for t, lp, reason in zip(tokens[rank], logprobs[rank], reasons[rank][0], strict=True)]
            for rank in leaders
        ]

    def _assemble(
        self, prompts: Sequence[Prompt], by_engine: list[list[Generation]], group_size: int,
        announced: Mapping[int, Rollout],
    ) -> list[RolloutGroup]:
        """Rollouts from the responses of all engines; those announced, by request of this engine, as they are."""
        groups = []
        for index, prompt in enumerate(prompts):
            engine, position = index % self._num_engines, index // self._num_engines
            first = position * group_size
            known = announced if engine == self._engine_index else {}
            rollouts = [
                known.get(first + sample)
                or Rollout.from_response(prompt, sample, g.tokens, g.logprobs, g.finish_reason, self._policy_version)
                for sample, g in enumerate(by_engine[engine][first : first + group_size])
            ]
            groups.append(RolloutGroup(prompt, rollouts))
        return groups

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs: which tensors the next sample of the certificate looks at."""
        return {"certificate_turn": self._certificate.turn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved state."""
        self._certificate.turn = state["certificate_turn"]

    def close(self) -> None:
        """Release the engine."""
        self._engine.close()


class _Stream:
    """Counts finished requests, tells a listener of them as rollouts, and keeps its first error for later.

    Raising inside of the engine would leave the engine's other ranks waiting.
    """

    def __init__(self, prompts: Sequence[Prompt], group_size: int, policy_version: int,
                 listener: Callable[[Rollout], None] | None, count: Callable[[int], None]) -> None:
        self._prompts, self._group_size, self._policy_version = prompts, group_size, policy_version
        self._listener, self._count = listener, count
        self.rollouts: dict[int, Rollout] = {}
        self.error: Exception | None = None

    def __call__(self, index: int, generation: Generation) -> None:
        rollout = self.rollouts[index] = Rollout.from_response(
            self._prompts[index], index % self._group_size, generation.tokens, generation.logprobs,
            generation.finish_reason, self._policy_version)
        self._count(len(generation.tokens))
        if self.error is None and self._listener is not None:
            try:
                self._listener(rollout)
            except Exception as error:
                self.error = error


def _count_occurrences(prompts: Sequence[Prompt]) -> list[int]:
    """How often each prompt came before in this batch (0 unless an epoch boundary repeats it)."""
    seen: dict[int, int] = {}
    counts = []
    for prompt in prompts:
        counts.append(seen.get(prompt.prompt_id, 0))
        seen[prompt.prompt_id] = counts[-1] + 1
    return counts
