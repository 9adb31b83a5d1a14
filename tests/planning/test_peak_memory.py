# SPDX-License-Identifier: Apache-2.0
"""The planned peak of an update and of a scoring pass, against the tensors of real actors.

Measured: the storage of every tensor that an operation allocates, forward and backward, until it is released; the peak
of their sum on top of weights, gradients and optimizer states (exact: test_parameters.py). Activations are most of it,
so the tolerance of a tenth judges their count. Not covered: scratch memory inside an operation; GPUs, on which norms
and attention keep less, and the allocator's rounding and fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import take_step
from storage_watch import measure_peak

from actor_runs import ALGORITHM, Case, build_actor
from distributed import run_ranks
from megatron_rl.algorithms.losses import aggregate
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.cluster import Cluster, Job, build_job
from megatron_rl.planning.memory import compute_memory
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve
from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch, expand_to_tokens
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.training.roles.actor import Actor
from megatron_rl.types import Branch
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import draw_tokens, save_tiny_model

PROMPT, LENGTH, BUDGET, ROLLOUTS = 4, 128, 2048, 128
SIZES: dict[str, Any] = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=4, vocab_size=1000)
NAMES = {
    "tp_size": "tensor_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "vpp_size": "virtual_pipeline_model_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "expert_model_parallel_size",
    "shard_size": "zero_shard_size",
}


@dataclass(frozen=True)
class Layout:
    """World size, sizes of the layout, further settings of the actor, and family of the model."""

    world_size: int = 1
    sizes: dict[str, int] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"

    def config(self, path: Path) -> RunConfig:
        """The recipe that describes it."""
        settings = {NAMES[name]: size for name, size in self.sizes.items()} | self.actor
        return load_config(
            None,
            [
                f"model.path={path}",
                "model.dtype=float32",
                "data.train_files=[x.jsonl]",
                f"data.train_batch_size={ROLLOUTS // 4}",
                "rollout.n=4",
                f"data.max_prompt_length={PROMPT}",
                f"data.max_response_length={LENGTH - PROMPT}",
                f"actor.max_tokens_per_microbatch={BUDGET}",
                *(f"actor.{name}={str(value).lower()}" for name, value in settings.items()),
            ],
        ).config


SP, ZERO_3 = dict(sequence_parallel=True), dict(zero_stage=3)
LAYOUTS = {
    "one": Layout(),
    "qk-norm": Layout(family="qwen3"),
    "full recomputation": Layout(actor=dict(recompute_granularity="full")),
    "small chunks of logits": Layout(actor=dict(logprob_chunk_tokens=128)),
    "tp2": Layout(2, dict(tp_size=2)),
    "tp2 with sequence parallelism": Layout(2, dict(tp_size=2), SP),
    "pp2": Layout(2, dict(pp_size=2)),
    "pp2 vpp2": Layout(2, dict(pp_size=2, vpp_size=2)),
    "cp2": Layout(2, dict(cp_size=2)),
    "dp2": Layout(2),
    "experts ep2": Layout(2, dict(ep_size=2), family="qwen3_moe"),
    "experts tp2 ep2": Layout(4, dict(tp_size=2, ep_size=2), SP, family="qwen3_moe"),
    "zero 3 dp2": Layout(2, actor=ZERO_3),
    "zero 3 dp2 full recomputation": Layout(2, actor=ZERO_3 | dict(recompute_granularity="full")),
    "zero 3 pp2 dp2": Layout(4, dict(pp_size=2), ZERO_3),
    "zero 3 tp2 cp2": Layout(4, dict(tp_size=2, cp_size=2), ZERO_3 | SP),
    "zero 3 replicas": Layout(4, dict(shard_size=2), ZERO_3),
    "zero 3 experts ep2 dp4": Layout(4, dict(ep_size=2), ZERO_3, family="qwen3_moe"),
    "zero 3 dense and experts ep2 dp4": Layout(4, dict(ep_size=2), ZERO_3, family="glm4_moe"),
}


def build_batch(actor: Actor) -> TrainBatch:
    """Rollouts of the full length, complete but for the old logprobs; every microbatch is full."""
    lengths, groups = [LENGTH] * ROLLOUTS, actor.model.groups
    sequences = [Branch.of_response(tokens, PROMPT) for tokens in draw_tokens(lengths)]
    plan = plan_microbatches(
        lengths, dp_size=groups.layout.dp_size, max_tokens=BUDGET, count_multiple=actor.model.microbatch_count_multiple
    )
    weights = aggregate("token-mean", [LENGTH - PROMPT] * ROLLOUTS, LENGTH).weights
    batch = build_train_batch(
        sequences,
        weights,
        [(tuple(range(ROLLOUTS)), plan)],
        dp_rank=groups.at.dp,
        padding=Padding(actor.model.pad_multiple),
        device=torch.device("cpu"),
    )
    advantages = expand_to_tokens([1.0] * ROLLOUTS, batch)
    return replace(batch, advantages=advantages, ref_logprobs=torch.full_like(advantages, -7.0))


def _measure_rank(rank: int, world_size: int, layout: Layout, path: Path) -> dict[str, int]:
    actor = build_actor(Case(world_size, layout.sizes, layout.actor | dict(max_tokens_per_microbatch=BUDGET)), path)
    batch = build_batch(actor)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    take_step(actor, batch, ALGORITHM)  # makes the optimizer's states
    return {
        "log-probs": measure_peak(lambda: actor.compute_logprobs(batch)),
        "actor update": measure_peak(lambda: take_step(actor, batch, ALGORITHM)),
    }


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {layout.family: tmp_path_factory.mktemp(layout.family) for layout in LAYOUTS.values()}
    for family, path in found.items():
        save_tiny_model(path, family, **SIZES)
    return found


def plan(layout: Layout, path: Path) -> Job:
    cluster = Cluster(
        nodes=1, gpus_per_node=layout.world_size, memory_bytes=1 << 40, reserve_bytes=0, has_fused_attention=False
    )
    config = layout.config(path)
    return build_job(config, resolve(config), cluster, load_model_shape(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_peak_is_within_a_tenth(name: str, paths: dict[str, Path]) -> None:
    layout = LAYOUTS[name]
    path = paths[layout.family]
    measured = run_ranks(_measure_rank, layout.world_size, layout, path)
    for planned in compute_memory(plan(layout, path)):
        for phase in planned.phases:
            if phase.name not in measured[planned.rank]:
                continue
            lasting = sum(phase.parts.get(part, 0) for part in ("weights", "gradients", "optimizer"))
            found = lasting + measured[planned.rank][phase.name]
            print(
                f"{name}, rank {planned.rank}, {phase.name}: planned {phase.total / 2**20:.1f} MiB, found "
                f"{found / 2**20:.1f}, of which {lasting / 2**20:.1f} last; {phase.parts}"
            )
            if phase.name == "actor update":
                assert found > 2 * lasting, "most of it is to be activations"
            assert phase.total == pytest.approx(found, rel=0.1), phase
