# SPDX-License-Identifier: Apache-2.0
"""One set of weights, two modes: the actor's Megatron shards and the engine's rollout shards.

    with hybrid.rollout_mode():            # weights: Megatron TP/PP/DP -> engine TP, shard to shard
        collector.collect(step)

Where the two layouts agree on a parameter, the engine uses the actor's own storage and nothing moves.
The rest is planned once from the two placement tables; entering the mode executes the plan, certifies
that both sides hold the same bits, and drops what the engine computed with older weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_rl.config.schema import HybridConfig
from megatron_rl.engines.protocol import CodedEngine, EngineWeights
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import Process, reduce_scalars, share_object
from megatron_rl.parallel.layout import EngineRanks, ParallelLayout
from megatron_rl.resharding.aliasing import gather_names
from megatron_rl.resharding.computed import SourceParams
from megatron_rl.resharding.executor import ReshardStats
from megatron_rl.weight_sync.move import Cargo, Move, Way, split_types
from megatron_rl.weights.adapters import AdapterShape, adapter_placements, separate_placements
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.row_quantization import CodeFormat, list_matrices
from megatron_rl.weights.tables import PlacementTable, as_table


class SourceModel(Protocol):
    """The weights that the engine gets."""

    shape: ModelShape
    layout: ParallelLayout
    adapters: AdapterShape | None

    @property
    def params(self) -> SourceParams:
        """Of this rank, by name; none where the actor is not."""
        ...

    @property
    def merged_params(self) -> frozenset[str]:
        """Parameters of any rank that adapters are added to."""
        ...

    @property
    def quantized_params(self) -> frozenset[str]:
        """Parameters of any rank that are in NF4: they are dequantized when they are read."""
        ...

    def merge(self) -> SourceParams:
        """The parameters of this rank with their adapters."""
        ...

    def scale_adapters(self) -> SourceParams:
        """The adapters of this rank, B with their scale."""
        ...

    def shard_key(self, rank: int) -> Hashable:
        """Ranks with equal keys have equal placement tables."""
        ...

    def placements(self, rank: int) -> PlacementTable:
        """ShardBox table of any rank of the layout, without adapters."""
        ...


class Releasable(Protocol):
    """What training holds besides the weights."""

    def release(self) -> None:
        """Give back what generation does not need; training takes it back by itself."""


class WeightSource(Protocol):
    """What the engine needs of an actor."""

    @property
    def model(self) -> SourceModel:
        """Its weights."""
        ...

    @property
    def optimizer(self) -> Releasable:
        """What trains them."""
        ...

    @property
    def policy_version(self) -> int:
        """Optimizer steps behind the weights."""
        ...


class HybridEngine:
    """The actor's weights in an in-process rollout engine; building it is collective.

    Args:
        actor: whose weights are used.
        engine: the weights of this rank's share of the engine.
        engines: the ranks of each.
        process: this rank.
        group: all ranks of the job.
        config: transport, bucket size, verification.
        timers: count the phases "reshard" and "verify".

    Attributes:
        shape: of the model.
        policy_version: of the weights that the engine has; -1 before the first reshard.
        reshard_stats: bytes of one reshard, all ranks together.
        verified_tensors: number of tensors that the last certificate has compared.
        is_apart: no rank has both the actor and an engine.
    """

    def __init__(
        self,
        actor: WeightSource,
        engine: EngineWeights,
        *,
        engines: EngineRanks,
        process: Process,
        group: dist.ProcessGroup,
        config: HybridConfig,
        timers: PhaseTimers,
    ) -> None:
        self._actor, self._engine, self._group, self.shape = actor, engine, group, actor.model.shape
        self._timers, self._verify = timers, config.verify
        model, shared = actor.model, gather_names(engine.shared_params, group)
        dtype, wide, code_format = self._ask_engine(engines)
        way = Way(model.layout.ranks, model.shard_key, engine, shared, engines, process, group, config, dtype)
        cargoes = [split_types(cargo, way, wide) for cargo in self._list_cargoes(config, shared)]
        if code_format is not None:
            from megatron_rl.weight_sync.coding import split_cargo

            matrices = list_matrices(self.shape)
            cargoes = [[*split_cargo(cargo, way, code_format, matrices), *rest] for cargo, *rest in cargoes]
        self._moves = [Move(cargo, way) for part in cargoes for cargo in part]
        self._moved_once = len(cargoes[0]) if len(cargoes) > 1 else 0
        self.is_apart = not {rank for ranks in engines.of for rank in ranks} & {*model.layout.ranks}
        # On a GPU an engine that sleeps loses what it has of its own.
        # And on a CPU vLLM brings experts into the order of its kernel, in place.
        packs_experts = process.device.type == "cpu" and self.shape.num_experts > 0
        self._loses_model = packs_experts or process.device.type == "cuda" and not self.is_apart
        self._has_model = False
        self.reshard_stats = self._total_stats()
        self.policy_version = -1
        self._certificate_turn = 0
        self.verified_tensors = 0
        self._releasable = [actor.optimizer]

    def also_release(self, training: Releasable) -> None:
        """Name what another role holds for its training, which it gives back as the actor does before a rollout."""
        self._releasable.append(training)

    def _list_cargoes(self, config: HybridConfig, shared: Sequence[frozenset[str]]) -> list[Cargo]:
        """What the engines get: first what stays as it is, then the matrices with their adapters in them, or those."""
        model, engine, shape = self._actor.model, self._engine, self._actor.model.adapters
        # An engine that shares a matrix with adapters runs the actor's own modules, which add them by themselves.
        merged = model.merged_params.difference(*shared)
        quantized = model.quantized_params
        whole = Cargo(model.shape.logical_tensors(), model.params, model.placements, engine.placements, quantized)
        if shape is None or not merged:
            return [whole]
        if config.lora == "merge":
            changing = self._list_tensors(merged)
            changed = replace(whole.only(changing), params=model.merge(), computed=merged | quantized)
            return [whole.only(frozenset(whole.shapes) - changing), changed]
        adapters = Cargo(
            shape.logical_tensors(),
            model.scale_adapters(),
            lambda rank: adapter_placements(shape, model.placements(rank)),
            lambda rank: separate_placements(shape, as_table(engine.placements(rank))),
        )
        table = adapters.source(model.layout.first_rank)
        return [whole, replace(adapters, computed=frozenset(p.param for p in table if p.param.endswith("lora_B")))]

    def _list_tensors(self, params: frozenset[str]) -> frozenset[str]:
        """The logical tensors of all layers that lie in such parameters."""
        model = self._actor.model
        kinds = {kind for param, _, kind in model.placements(model.layout.first_rank).rows if param in params}
        return frozenset(name for name, kind in model.shape.tensor_kinds().items() if kind in kinds)

    def _ask_engine(self, engines: EngineRanks) -> tuple[torch.dtype, frozenset[str], CodeFormat | None]:
        """The type of an engine's parameters, logical tensors that are float32 in it all the same, and its codes.

        Ranks without an engine ask for it; collective then.
        """
        code_format = self._engine.code_format if isinstance(self._engine, CodedEngine) else None
        params, mine, rank = self._engine.params, None, self._group.rank()
        if dtype := next((param.dtype for param in params.values()), None):
            table = self._engine.placements(rank) if dtype != torch.float32 else ()
            wide = frozenset(p.hf_name for p in table if params[p.param].dtype == torch.float32)
            mine = dtype, wide, code_format
        found = mine if engines.num_ranks == self._group.size() else share_object(mine, self._group, engines.of[0][0])
        assert found is not None, "an engine has parameters"
        return found

    @property
    def transport(self) -> str:
        """How pieces cross between ranks: pull, buckets, or pull+buckets."""
        return self._moves[-1].resharder.transport

    def _total_stats(self) -> ReshardStats:
        """Bytes of one reshard, all ranks together; without what moves once."""
        parts = [asdict(move.resharder.stats) for move in self._moves[self._moved_once :]]
        mine = {name: float(sum(part[name] for part in parts)) for name in parts[0]}
        mine["bytes_aliased"] = sum(self._engine.params[name].nbytes for name in self._engine.shared_params)
        total = reduce_scalars(mine, dist.ReduceOp.SUM, self._group, torch.device("cpu"))
        return ReshardStats(**{name: int(value) for name, value in total.items()})

    def reshard(self) -> None:
        """Write the actor's current weights into the engine and verify them; collective.

        Raises:
            CertificateError: the engine does not hold the actor's weights; names tensor, rank and box.
        """
        with self._timers.phase("reshard"):
            self._engine.begin_weight_update()
            for move in self._list_moves():
                move.run()
            if self._verify != "off":
                with self._timers.phase("verify"):
                    samples = self._verify == "sample"
                    turn = self._certificate_turn if samples else None
                    self.verified_tensors = sum(move.certificate.verify(turn) for move in self._moves)
                    self._certificate_turn += samples
            self._engine.end_weight_update()
        self.policy_version = self._find_version()

    def _list_moves(self) -> list[Move]:
        """What has to be moved now: what adapters do not change is moved once."""
        if self._moved_once and self._has_model:
            return self._moves[self._moved_once :]
        self._has_model = not self._loses_model
        return self._moves

    def _find_version(self) -> int:
        """The version of the actor's weights, which ranks without an actor ask for; collective then."""
        version = self._actor.policy_version
        if self._actor.model.layout.world_size == self._group.size():
            return version
        found = reduce_scalars({"version": version}, dist.ReduceOp.MAX, self._group, torch.device("cpu"))
        return int(found["version"])

    @contextmanager
    def rollout_mode(self) -> Iterator[HybridEngine]:
        """Reshard, and put an engine that shares its rank to sleep after the block; collective.

        Training memory is given back before the engine takes its own, and the engine sleeps before
        training takes it back, so that the peak is that of one mode, not of both.
        """
        for training in self._releasable:
            training.release()
        self.reshard()
        try:
            yield self
        finally:
            if not self.is_apart:
                self._engine.sleep()

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs: which tensors the next sample of the certificate looks at."""
        return {"certificate_turn": self._certificate_turn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved state."""
        self._certificate_turn = state["certificate_turn"]
