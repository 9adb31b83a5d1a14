# SPDX-License-Identifier: Apache-2.0
"""Experts in an engine's fused parameters: the actor's own storage if layouts agree, otherwise few copies of blocks.

The engine is a stand-in with vLLM's parameters: vLLM's own experts are packed in place on a CPU and never shared there.
Not covered: kernels on GPUs that bring experts into another order, which then have tensors of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from role_setups import take_step

from actor_runs import ALGORITHM, Case, build_actor, build_batch
from distributed import run_ranks
from megatron_rl.config.schema import HybridConfig
from megatron_rl.engines.protocol import share_params
from megatron_rl.observability.progress import PhaseTimers
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.transfer.hybrid_engine import HybridEngine
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import padded_vocab_size
from megatron_rl.weights.packed_experts import split_experts
from megatron_rl.weights.rollout_layout import VLLM_PADDED_PARAMETERS, vllm_placements
from megatron_rl.weights.shard_box import ShardBox, box_slices, find_aliases
from tiny_models import save_tiny_model


class StandIn:
    """Parameters as vLLM has them, with the experts of a layer in two; `EngineWeights`."""

    padded_params = VLLM_PADDED_PARAMETERS

    def __init__(self, shape: ModelShape, tp_size: int) -> None:
        self._shape, self._tp_size = shape, tp_size
        sizes: dict[str, list[int]] = {}
        for p in self.placements(dist.get_rank()):
            stops = [stop for _, stop in p.local_box]
            sizes[p.param] = [max(pair) for pair in zip(sizes.get(p.param, stops), stops, strict=True)]
        for name in {*VLLM_PADDED_PARAMETERS} & {*sizes}:
            sizes[name][0] = padded_vocab_size(shape.vocab_size, tp_size) // tp_size
        whole: dict[str, list[int]] = {}
        for name, size in sizes.items():
            of_experts = ".experts." in name
            whole[name.rpartition(".")[0] if of_experts else name] = [shape.num_experts, *size] if of_experts else size
        self.whole = {name: torch.zeros(size) for name, size in whole.items()}
        self.shared_params: frozenset[str] = frozenset()

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """Experts as matrices."""
        return split_experts(self.whole)

    def shard_key(self, rank: int) -> int:
        return rank % self._tp_size

    def placements(self, rank: int) -> Sequence[ShardBox]:
        return vllm_placements(self._shape, tp_size=self._tp_size, place=self.shard_key(rank))

    def begin_weight_update(self) -> None:
        """The parameters are there."""

    def end_weight_update(self) -> None:
        """Nothing is cached."""

    def sleep(self) -> None:
        """It never does."""


def work(rank: int, world_size: int, path: Path, case: Case, engine_tp: int, alias: bool) -> dict[str, Any]:
    """Reshard, certify, take an optimizer step, and once more; compare with the actor."""
    process, actor = init_distributed(2), build_actor(case, path)
    engine: Any = StandIn(actor.model.shape, engine_tp)
    if alias:
        pairs = find_aliases(actor.model.placements(rank), engine.placements(rank))
        shareable: Any = {name: actor.model.params[own] for name, own in pairs.items()}
        engine.shared_params = share_params(engine.whole, shareable)
    engines = EngineRanks.consecutive(range(world_size), engine_tp)
    config = HybridConfig(verify="full", transport="pull" if world_size > 1 else "auto")
    hybrid = HybridEngine(actor, engine, engines=engines, process=process, config=config, timers=PhaseTimers())
    hybrid.reshard()
    before = {name: tensor.clone() for name, tensor in engine.params.items()}
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    take_step(actor, next(iter(batch.minibatches())), ALGORITHM)
    hybrid.reshard()
    stats = hybrid.reshard_stats
    total = stats.bytes_aliased + stats.bytes_copied + stats.bytes_moved
    params, table = actor.model.params, actor.model.placements(rank)
    own = {(p.hf_name, p.hf_box): params[p.param][box_slices(p.local_box)] for p in table}
    same = [
        torch.equal(engine.params[p.param][box_slices(p.local_box)], own[p.hf_name, p.hf_box])
        for p in engine.placements(rank)
        if (p.hf_name, p.hf_box) in own
    ]
    resharder = hybrid._transfers[-1].resharder
    return dict(
        share=stats.bytes_aliased / total,
        verified=hybrid.verified_tensors,
        same=bool(same) and all(same),
        changed=all(not torch.equal(before[name], tensor) for name, tensor in engine.params.items()),
        copies=len(resharder._targets),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen3_moe", num_hidden_layers=2)
    return directory


@pytest.mark.parametrize(("world_size", "sizes"), [(1, {}), (2, dict(tp_size=2))])
def test_equal_layouts_share_experts(world_size: int, sizes: dict[str, int], path: Path) -> None:
    """One storage: an optimizer step is in the engine at once, and the certificate covers every tensor."""
    case = Case(world_size, sizes, dict(sequence_parallel=True) if sizes else {})
    for found in run_ranks(work, world_size, path, case, world_size, True, timeout=100):
        print(f"aliased share {found['share']:.4f}")
        assert found["share"] >= 0.95 and found["same"] and found["changed"] and found["verified"] > 0


def test_without_sharing_the_engine_gets_the_same(path: Path) -> None:
    """Of two layers: two copies of experts each, beside eight of attention, norms and gate, and three of the ends."""
    (found,) = run_ranks(work, 1, path, Case(1), 1, False, timeout=100)
    assert found["share"] == 0 and found["same"] and found["changed"] and found["verified"] > 0
    assert found["copies"] == 2 * (2 + 8) + 3


def test_experts_of_two_ranks_move_in_blocks(path: Path) -> None:
    """EP2 into engines with all experts: half of a layer's experts are one copy, not one per matrix."""
    for found in run_ranks(work, 2, path, Case(2, dict(ep_size=2)), 1, True, timeout=100):
        assert 0 < found["share"] < 0.95 and found["same"] and found["changed"]
        assert found["copies"] == 2 * 2 * 2  # layers, ranks, and gates with ups or downs
