# SPDX-License-Identifier: Apache-2.0
"""Hybrid engine: one set of weights as the actor's Megatron shards and the engine's rollout shards.

    with hybrid.rollout_mode():            # weights: Megatron TP/PP/DP -> engine TP, shard to shard
        collector.collect(step)

Parameters with equal layouts share the actor's storage. All others are moved by a plan, computed once, and certified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rl.config.schema import HybridConfig
from megatron_rl.engines.protocol import EngineWeights
from megatron_rl.observability.progress import PhaseTimers
from megatron_rl.parallel.collectives import Process, gather_rows, reduce_scalars, share_object, world
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.transfer.executor import ReshardStats, TensorSet, Transfer, TransferContext, split_types
from megatron_rl.weights.placement_tables import as_table

if TYPE_CHECKING:
    from megatron_rl.weights.quantization import CodeFormat


def gather_names(names: frozenset[str], group: dist.ProcessGroup) -> list[frozenset[str]]:
    """Gather the sets of all ranks, by rank, sending each distinct set once; collective."""
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).digest()[:8]
    mine = torch.tensor([[int.from_bytes(digest, "little", signed=True)]])
    digests = gather_rows(mine, group)[:, 0].tolist()
    owners = {found: rank for rank, found in reversed(list(enumerate(digests)))}  # the first rank of each set
    sets = {
        found: share_object(names, group, dist.get_global_rank(group, rank))
        for found, rank in sorted(owners.items(), key=lambda item: item[1])
    }
    return [sets[found] for found in digests]


class HybridEngine:
    """The actor's weights in an in-process rollout engine; building it is collective.

    Args:
        actor: with the trained `model`, a `training.setup.LaidOutModel`, and its `policy_version`.
        end_update: replaces the engine's `end_weight_update`, if given.

    Attributes:
        engine: this rank's share of the engine.
        policy_version: of the engine's weights; -1 before the first reshard.
        reshard_stats: bytes of one reshard, summed over ranks.
        verified_tensors: number that the last reshard compared.
        is_apart: no rank has both the actor and an engine.
    """

    def __init__(
        self,
        actor: Any,
        engine: EngineWeights,
        *,
        engines: EngineRanks,
        process: Process,
        config: HybridConfig,
        timers: PhaseTimers,
        end_update: Callable[[], None] | None = None,
    ) -> None:
        self._actor, self.engine, self.shape = actor, engine, actor.model.shape
        self._group, self._end_update = (group := world()), end_update or engine.end_weight_update
        self._timers, self._verify = timers, config.verify
        model, shared = actor.model, gather_names(engine.shared_params, group)
        dtype, self._wide, code_format = self._ask_engine(engines)
        self._context = context = TransferContext(
            model.layout.ranks, model.shard_key, engine, shared, engines, process, group, config, dtype
        )
        tensor_sets = [split_types(tensors, context, self._wide) for tensors in self._list_tensor_sets(config, shared)]
        if code_format is not None:
            from megatron_rl.transfer.coding import split_coded
            from megatron_rl.weights.quantization import list_matrices

            matrices = list_matrices(self.shape)
            tensor_sets = [
                [*split_coded(tensors, context, code_format, matrices), *rest] for tensors, *rest in tensor_sets
            ]
        self._transfers = [Transfer(tensors, context) for part in tensor_sets for tensors in part]
        self._transferred_once = len(tensor_sets[0]) if len(tensor_sets) > 1 else 0
        self.is_apart = not {rank for ranks in engines.of for rank in ranks} & {*model.layout.ranks}
        # A sleeping engine on a GPU loses its own weights, and vLLM on a CPU reorders experts in place for its kernel.
        packs_experts = process.device.type == "cpu" and self.shape.num_experts > 0
        self._loses_model = packs_experts or process.device.type == "cuda" and not self.is_apart
        self._has_model = False
        self.reshard_stats = self._sum_stats()
        self.policy_version = -1
        self._certificate_turn = 0
        self.verified_tensors = 0
        self._releases: list[Callable[[], None]] = []

    def _sum_stats(self) -> ReshardStats:
        parts = [asdict(transfer.resharder.stats) for transfer in self._transfers[self._transferred_once :]]
        mine = {name: float(sum(part[name] for part in parts)) for name in parts[0]}
        mine["bytes_aliased"] = sum(self.engine.params[name].nbytes for name in self.engine.shared_params)
        total = reduce_scalars(mine, dist.ReduceOp.SUM, self._group, torch.device("cpu"))
        return ReshardStats(**{name: int(value) for name, value in total.items()})

    def add_transfers(self, build: Callable[[TransferContext, frozenset[str]], list[Transfer]]) -> None:
        """Run further transfers at each reshard; `build` gets the engine's float32 tensors, too; collective."""
        self._transfers += build(self._context, self._wide)
        self.reshard_stats = self._sum_stats()

    def release_first(self, release: Callable[[], None]) -> None:
        """Register a release of memory that training reallocates by itself, to be called before each rollout."""
        self._releases.append(release)

    def _list_tensor_sets(self, config: HybridConfig, shared: Sequence[frozenset[str]]) -> list[TensorSet]:
        """List the tensor sets: unmodified parameters, then merged matrices or separate adapters."""
        model, engine, shape = self._actor.model, self.engine, self._actor.model.adapters
        # An engine that shares a matrix with adapters runs the actor's own modules, which apply the adapters.
        merged = model.merged_params.difference(*shared)
        quantized = model.quantized_params
        whole = TensorSet(model.shape.logical_tensors(), model.params, model.placements, engine.placements, quantized)
        if shape is None or not merged:
            return [whole]
        if config.lora == "merge":
            table = model.placements(model.layout.first_rank)
            kinds = {kind for param, _, kind in table.rows if param in merged}
            changing = frozenset(name for name, kind in model.shape.tensor_kinds().items() if kind in kinds)
            changed = replace(whole.only(changing), params=model.merge(), computed=merged | quantized)
            return [whole.only(frozenset(whole.shapes) - changing), changed]
        from megatron_rl.weights.adapters import adapter_placements

        adapters = TensorSet(
            shape.logical_tensors(),
            model.trained.scale(),
            lambda rank: adapter_placements(shape, model.placements(rank)),
            lambda rank: adapter_placements(shape, as_table(engine.placements(rank)), is_stacked=False),
        )
        table = adapters.source(model.layout.first_rank)
        return [whole, replace(adapters, computed=frozenset(p.param for p in table if p.param.endswith("lora_B")))]

    def _ask_engine(self, engines: EngineRanks) -> tuple[torch.dtype, frozenset[str], CodeFormat | None]:
        """Return an engine's dtype, the HF names of float32 exceptions, and its 8-bit code format; collective."""
        code_format = getattr(self.engine, "code_format", None)
        params, mine, rank = self.engine.params, None, self._group.rank()
        if dtype := next((param.dtype for param in params.values()), None):
            table = self.engine.placements(rank) if dtype != torch.float32 else ()
            wide = frozenset(p.hf_name for p in table if params[p.param].dtype == torch.float32)
            mine = dtype, wide, code_format
        found = mine if engines.num_ranks == self._group.size() else share_object(mine, self._group, engines.of[0][0])
        assert found is not None, "an engine has parameters"
        return found

    @property
    def transport(self) -> str:
        """Transport between ranks: pull (reads of peers' memory on the same host), buckets (messages), or both."""
        return self._transfers[-1].resharder.transport

    def reshard(self) -> None:
        """Write the actor's current weights into the engine and verify them; collective.

        Raises:
            CertificateError: the engine does not hold the actor's weights.
        """
        with self._timers.phase("reshard"):
            self.engine.begin_weight_update()
            # Weights that training does not change move again only if the engine lost them.
            for transfer in self._transfers[self._transferred_once if self._has_model else 0 :]:
                transfer.run()
            self._has_model = not self._loses_model
            if self._verify != "off":
                with self._timers.phase("verify"):
                    samples = self._verify == "sample"
                    turn = self._certificate_turn if samples else None
                    self.verified_tensors = sum(transfer.certificate.verify(turn) for transfer in self._transfers)
                    self._certificate_turn += samples
            self._end_update()
        version = self._actor.policy_version
        if self._actor.model.layout.world_size < self._group.size():  # some ranks have no actor
            found = reduce_scalars({"version": version}, dist.ReduceOp.MAX, self._group, torch.device("cpu"))
            version = int(found["version"])
        self.policy_version = version

    @contextmanager
    def rollout_mode(self) -> Iterator[HybridEngine]:
        """Reshard before the block; after it, an engine that shares ranks with the actor sleeps; collective.

        Training memory is released first, so that the peak is that of one mode.
        """
        for release in self._releases:
            release()
        self.reshard()
        try:
            yield self
        finally:
            if not self.is_apart:
                self.engine.sleep()

    def state_dict(self) -> dict[str, int]:
        """Return the position of the rotating certificate sample, for resuming."""
        return {"certificate_turn": self._certificate_turn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore a saved state."""
        self._certificate_turn = state["certificate_turn"]
