# SPDX-License-Identifier: Apache-2.0
"""Weight transfer of a rehearsed rank: the real `HybridEngine` writes parameters with vLLM's names and sizes.

The reshard plan is real. Peers on the same host are mapped as memory of other ranks; buckets go to absent ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from megatron_rl.engines.protocol import share_params
from megatron_rl.observability.progress import PhaseTimers
from megatron_rl.parallel.collectives import Process
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.parameters import FUSED_LATENTS, caches_latents, is_coded
from megatron_rl.run.building import find_shared
from megatron_rl.transfer import hybrid_engine, transports
from megatron_rl.transfer.hybrid_engine import HybridEngine
from megatron_rl.weights.adapters import adapter_placements
from megatron_rl.weights.megatron_layout import padded_vocab_size
from megatron_rl.weights.placement_tables import as_table
from megatron_rl.weights.rollout_layout import VLLM_PADDED_PARAMETERS, vllm_placements
from megatron_rl.weights.shard_box import ShardBox
from tools.rehearsal.ledger import Ledger


def can_switch(job: Job) -> bool:
    """Whether the transfer goes to vLLM on the actor's ranks, in the actor's dtype."""
    is_vllm = job.config.rollout.supports("vllm_modes") and not job.config.rollout.supports("is_server")
    return is_vllm and not job.config.placement.placed and not is_coded(job)


class SleepingEngine:
    """vLLM's weights on one rank, released while it sleeps (`EngineWeights`).

    Args:
        actor: shares its storage if the layouts agree.
    """

    def __init__(self, job: Job, actor: Any, process: Process) -> None:
        self._job, self._tp_size, shape = job, job.engine_tp, job.shape
        self.padded_params: tuple[str, ...] = VLLM_PADDED_PARAMETERS
        table = self.placements(process.rank)
        sizes = _find_sizes(table)
        for name in {*self.padded_params} & {*sizes}:
            sizes[name][0] = padded_vocab_size(shape.vocab_size, self._tp_size) // self._tp_size
        adapters = actor.model.adapters if job.config.hybrid.lora == "adapter" else None
        if adapters is not None:
            sizes |= _find_sizes(adapter_placements(adapters, as_table(table), is_stacked=False))
        wide = {p.param for p in table if shape.is_router_bias(p.hf_name)}
        self.params: Mapping[str, torch.Tensor] = {
            name: torch.empty(size, dtype=torch.float32 if name in wide else actor.model.dtype, device=process.device)
            for name, size in sizes.items()
        }
        names = _find_shared(job, actor, process.rank, table)
        absorbed = [x for name, x in self.params.items() if ".kv_b_proj." in name and caches_latents(job)]
        self.shared_params = share_params(self.params, {name: actor.model.params[own] for name, own in names.items()})
        mine = [tensor for name, tensor in self.params.items() if name not in self.shared_params]
        mine += [torch.empty_like(tensor) for tensor in absorbed]  # up-projections that vLLM keeps in a second form
        self._storages = [(tensor.untyped_storage(), tensor.nbytes) for tensor in mine]

    def shard_key(self, rank: int) -> int:
        """Return a rank's position in its engine."""
        return (rank - self._job.rollout_ranks.start) % self._job.engine_width

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """Return vLLM's placement table."""
        job, place = self._job, self.shard_key(rank)
        return vllm_placements(job.shape, tp_size=self._tp_size, place=place, ep_size=job.engine_ep)

    def begin_weight_update(self) -> None:
        """Restore the memory."""
        for storage, size in self._storages:
            storage.resize_(size)

    def end_weight_update(self) -> None:
        """Do nothing: there is no cache."""

    def sleep(self) -> None:
        """Release the memory."""
        for storage, _ in self._storages:
            storage.resize_(0)


def build_switch(job: Job, actor: Any, rank: int, ledger: Ledger) -> HybridEngine:
    """Build the transfer from the actor to a rank's engine."""
    cluster = job.cluster
    device = torch.device("cuda", 0)
    process = Process(rank, cluster.world_size, rank % cluster.gpus_per_node, cluster.gpus_per_node, device)
    engine = SleepingEngine(job, actor, process)

    def name_shared(names: frozenset[str], group: Any) -> list[frozenset[str]]:
        """Compute the shared names of all ranks."""
        known: dict[Any, frozenset[str]] = {}
        found = []
        for peer in range(cluster.world_size):
            key = actor.model.shard_key(peer), engine.shard_key(peer)
            if key not in known:
                known[key] = frozenset(_find_shared(job, actor, peer, engine.placements(peer)))
            found.append(known[key])
        assert found[rank] == names, "a rank shares what the tables say"
        return found

    def map_peers(plan: Any, source: Mapping[str, Any], *_: Any) -> Any:
        """Map peers as `transports` does, as memory of other ranks."""
        first = rank - process.local_rank
        near = {*range(first, first + cluster.gpus_per_node)}
        with ledger.of_others():
            mapped = {peer: _map(ops, source, device) for peer, ops in plan.receives.items() if peer in near}
        return "pull" if len(mapped) == len(plan.receives) else "pull+buckets", mapped, near

    with patch.object(hybrid_engine, "gather_names", name_shared), patch.object(transports, "map_peers", map_peers):
        return HybridEngine(
            actor,
            engine,
            engines=EngineRanks.consecutive(job.rollout_ranks, job.engine_width),
            process=process,
            config=job.config.hybrid,
            timers=PhaseTimers(),
        )


def _find_shared(job: Job, actor: Any, rank: int, table: Sequence[ShardBox]) -> dict[str, str]:
    """Return the engine's parameters that share the actor's storage, without those that vLLM fuses."""
    fused = FUSED_LATENTS if caches_latents(job) else ()
    names = find_shared(job.config, actor, rank, table)
    if actor.model.is_fully_sharded and actor.model.dtype != torch.float32:  # its trained shards are float32
        wide = {p.param for p in table if job.shape.is_router_bias(p.hf_name)}
        names = {name: own for name, own in names.items() if name in wide}
    return {name: own for name, own in names.items() if not name.endswith(fused)}


def _find_sizes(table: Sequence[ShardBox]) -> dict[str, list[int]]:
    sizes: dict[str, list[int]] = {}
    for placed in table:
        stops = [stop for _, stop in placed.local_box]
        sizes[placed.param] = [max(pair) for pair in zip(sizes.get(placed.param, stops), stops, strict=True)]
    return sizes


def _map(ops: Sequence[Any], source: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    sizes: dict[str, list[int]] = {}
    for op in ops:
        stops = [stop for _, stop in op.src_box]
        sizes[op.src_param] = [max(pair) for pair in zip(sizes.get(op.src_param, stops), stops, strict=True)]
    dtype = next(iter(source.values())).dtype
    return {name: torch.empty(size, dtype=dtype, device=device) for name, size in sizes.items()}
