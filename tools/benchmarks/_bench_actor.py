# SPDX-License-Identifier: Apache-2.0
"""Shared benchmark parts: a random model, an actor, and packed scripted responses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_rl.algorithms.advantages import AdvantageInputs, compute_advantages, compute_token_rewards
from megatron_rl.algorithms.losses import aggregate, build_ledger
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig, ModelConfig
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch
from megatron_rl.samples.fixed_shapes import Buckets
from megatron_rl.samples.microbatches import plan_microbatches, share_prompts
from megatron_rl.training.roles.actor import Actor
from megatron_rl.training.setup import RoleSetup
from megatron_rl.types import Branch
from megatron_rl.weights.model_config import load_model_shape, model_shape_from_config
from tools.benchmarks._scripted_workloads import Workload

ALGORITHM = AlgorithmConfig(adv_estimator="grpo", loss_agg_mode="token-mean")


def write_random_model(directory: Path, config: dict[str, Any]) -> Path:
    """Write a random HF model (normal, 0.02; norms 1)."""
    shape = model_shape_from_config(config, source="the benchmark")
    generator = torch.Generator().manual_seed(0)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {
            name: torch.ones(size) if name.endswith("norm.weight") else 0.02 * torch.randn(size, generator=generator)
            for name, size in shape.logical_tensors().items()
        },
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def build_bench_actor(
    path: Path, groups: ParallelGroups, dtype: str = "float32", layers: Any = "local", **settings: Any
) -> Actor:
    """Build an actor with `settings` of `ActorConfig` and `layers` as model.transformer_impl; collective."""
    config = ActorConfig(**(dict(lr=1e-5, weight_decay=0.0) | settings))
    spec = RoleSpec(name="actor", path=str(path), section="actor", settings=config, head="logprob", trainable=True)
    return Actor(
        RoleSetup(
            spec=spec,
            model=ModelConfig(path=str(path), dtype=dtype, transformer_impl=layers),
            shape=load_model_shape(path),
            groups=groups,
            seed=1,
            total_optimizer_steps=10**6,
        )
    )


def build_bench_batch(
    actor: Actor,
    work: Workload,
    *,
    max_tokens: int,
    shares_prompts: bool,
    device: torch.device,
    pad_to: int = 0,
    buckets: Buckets | None = None,
) -> TrainBatch:
    """Pack this rank's part of one minibatch as the main loop does.

    Args:
        max_tokens: budget of a micro-batch.
        shares_prompts: pack a group's prompt once per micro-batch.
        pad_to: minimum tokens per sequence; padding is computed and enters no loss.
        buckets: the actor's if `None`.
    """
    pairs = work.draw_tokens(actor.model.shape.vocab_size)
    responses = [len(response) for _, response in pairs]
    sequences = [_join(prompt, response, pad_to) for prompt, response in pairs]
    groups, shared = actor.model.groups, None
    if shares_prompts:
        shared = share_prompts(work.group_of, [s.num_prompt_tokens for s in sequences])
    plan = plan_microbatches(
        [len(s.tokens) for s in sequences],
        dp_size=groups.layout.dp_size,
        max_tokens=max_tokens,
        count_multiple=actor.model.microbatch_count_multiple,
        attention_ratio=actor.model.attention_ratio,
        shared=shared,
    )
    mode = ALGORITHM.loss_agg_mode
    batch = build_train_batch(
        sequences,
        aggregate(mode, responses, work.longest_response).weights,
        [(range(len(sequences)), plan)],
        dp_rank=groups.at.dp,
        device=device,
        shared=shared,
        padding=Padding(actor.model.pad_multiple, buckets or actor.model.buckets),
    )
    if pad_to:
        ends = torch.tensor([*work.lengths, 0], device=device)
        batch.loss_mask.logical_and_(batch.position_ids < ends[batch.sequence_ids])
        batch.loss_weights.mul_(batch.loss_mask)
    return replace(
        batch,
        ledgers=[build_ledger(mode, responses, work.longest_response)],
        advantages=_estimate_advantages(actor, work, batch),
    )


def _join(prompt: np.ndarray, response: np.ndarray, pad_to: int) -> Branch:
    padding = np.zeros(max(pad_to - len(prompt) - len(response), 0), np.int64)
    tokens = np.concatenate([prompt, response, padding])
    return Branch.of_response(tokens, len(prompt))


def _estimate_advantages(actor: Actor, work: Workload, batch: TrainBatch) -> torch.Tensor:
    rewards, mask, ids = work.draw_rewards(), batch.loss_mask, batch.sequence_ids
    return compute_advantages(
        AdvantageInputs(
            scores=rewards,
            group_sizes=np.array([len(lengths) for lengths in work.response_lengths]),
            baselines=None,
            token_rewards=compute_token_rewards(rewards, None, 0.0, mask, ids),
            values=None,
            loss_mask=mask,
            sequence_ids=ids,
            group=actor.model.groups.dp,
        ),
        ALGORITHM,
    ).advantages


def measure_peak(device: torch.device, function: Callable[[], Any]) -> int:
    """Return the growth of live tensor bytes during a call; profiling on a CPU slows it down."""
    if device.type == "cuda":
        start = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    return max(int(np.cumsum(sizes).max(initial=0)), 0)


class Stopwatch:
    """A clock of wall and process CPU time; the latter excludes other load, but is meaningless on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start, self._cpu_start = self._now()

    def read(self) -> tuple[float, float]:
        """Return wall and CPU-seconds."""
        now, cpu_now = self._now()
        return now - self._start, cpu_now - self._cpu_start

    def _now(self) -> tuple[float, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter(), time.process_time()
