# SPDX-License-Identifier: Apache-2.0
"""One step mode of `bench_ppo_step.py`."""

from __future__ import annotations

import gc
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.models.gpt import DTYPES
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.samples.fixed_shapes import build_buckets
from megatron_rl.weights.families import ModelShape
from tools.benchmarks._bench_actor import ALGORITHM, Stopwatch, build_bench_actor, build_bench_batch
from tools.benchmarks._scripted_workloads import Workload

_FILL = 0.97  # share of real tokens in a micro-batch
_PROMPT = 8
_WARM_UPS = 2


def _qwen(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2**17,
        "rope_theta": 1e6,
        "hidden_act": "silu",
    }


SHAPES = {
    "1m": _qwen(128, 384, 4, 4, 2, 512),
    "10m": _qwen(256, 768, 8, 8, 4, 8192),
    "100m": _qwen(640, 1920, 16, 10, 5, 32768),
    "0.5b": _qwen(896, 4864, 24, 14, 2, 151936),  # Qwen2.5-0.5B
    "1.5b": _qwen(1536, 8960, 28, 12, 2, 151936),  # Qwen2.5-1.5B
}


@dataclass(frozen=True)
class Draw:
    """Tokens of a padded micro-batch, micro-batches per update, approximate longest sequence."""

    size: int
    microbatches: int
    sequence_length: int

    def lengths(self) -> list[int]:
        """Draw ragged sequences that fill a micro-batch to `_FILL`."""
        rng, left, found = np.random.default_rng(self.size), int(self.size * _FILL), []
        while left > _PROMPT:
            length = min(int(rng.integers(self.sequence_length // 2, self.sequence_length + 1)), left)
            found.append(max(length, _PROMPT + 1))
            left -= found[-1]
        return found


class Contestant:
    """A step mode under test, or "transformer_engine", the eager step on layers of that library.

    Attributes:
        seconds: per update.
        fingerprint: metrics of every update, and final weight bits.
    """

    def __init__(
        self,
        mode: str,
        path: Path,
        groups: ParallelGroups,
        draw: Draw,
        *,
        dtype: str,
        recompute: str,
        device: torch.device,
    ) -> None:
        self.mode, self._path, self._groups, self._draw = mode, path, groups, draw
        self._dtype, self._recompute, self._device = dtype, recompute, device
        self.seconds: list[float] = []
        self.fingerprint: list[Any] = []
        self._found: dict[str, Any] = {"busy": None, "graph_bytes": 0, "graphs": 0}

    def open(self) -> None:
        """Build actor and batch, and warm up."""
        has_engine = self.mode == "transformer_engine"
        step_mode = "eager" if has_engine else self.mode
        fixed = {} if step_mode == "eager" else {"bucket_tokens": [self._draw.size]}
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._actor = build_bench_actor(
            self._path,
            self._groups,
            self._dtype,
            "transformer_engine" if has_engine else "local",
            step_mode=step_mode,
            share_prompts=False,
            max_tokens_per_microbatch=self._draw.size,
            recompute_granularity=self._recompute,
            **fixed,
        )
        self._batch = self._build_batch()
        for _ in range(_WARM_UPS):
            self._update()

    def _build_batch(self) -> TrainBatch:
        actor, draw = self._actor, self._draw
        # All modes use the batch shapes that static modes need.
        buckets = build_buckets(draw.size, [draw.size], actor.model.pad_multiple, 64)
        lengths = draw.lengths()
        work = Workload([_PROMPT] * draw.microbatches, [[n - _PROMPT for n in lengths]] * draw.microbatches)
        self.real_tokens = sum(lengths)
        batch = build_bench_batch(
            actor, work, max_tokens=draw.size, shares_prompts=False, device=self._device, buckets=buckets
        )
        assert len(batch.slices) == draw.microbatches and len(batch.tokens) == draw.size * draw.microbatches
        return replace(batch, old_logprobs=torch.full_like(batch.loss_weights, -math.log(actor.model.shape.vocab_size)))

    def _update(self) -> None:
        self._actor.forward_backward(self._batch, ALGORITHM)
        self.fingerprint.append(self._actor.optim_step())

    def take_round(self) -> None:
        """Time one update."""
        watch = Stopwatch(self._device)
        self._update()
        wall, cpu = watch.read()
        self.seconds.append(wall if self._device.type == "cuda" else cpu)

    def measure_busy(self) -> None:
        """Trace the share of an update in which a kernel runs; CUDA only."""
        from torch.profiler import ProfilerActivity, profile

        self._update()
        torch.cuda.synchronize(self._device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._update()
            torch.cuda.synchronize(self._device)
        events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        spans = sorted((e.time_range.start, e.time_range.end) for e in events)
        busy, end = 0.0, -math.inf
        for first, last in spans:
            busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
        self._found["busy"] = busy / (end - spans[0][0])

    def close(self) -> None:
        """Take the fingerprint and release all memory."""
        self.fingerprint.append(
            [
                int(p.view(torch.int32 if p.element_size() == 4 else torch.int16).long().sum())
                for p in self._actor.model.params.values()
            ]
        )
        self._shape = self._actor.model.shape
        if self.mode == "graph":
            self._found |= {"graph_bytes": self._actor.step.memory_bytes, "graphs": len(self._actor.step._graphs)}
        if self._device.type == "cuda":
            self._found["peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        del self._actor, self._batch
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def report(self, ceiling: float) -> dict[str, Any]:
        """Return the row, given the FLOP/s of the fastest matrix product."""
        median = statistics.median(self.seconds) / self._draw.microbatches
        lengths, tp_size = self._draw.lengths(), self._groups.layout.tp_size
        flops = count_flops(self._shape, lengths) / tp_size
        return self._found | {
            "milliseconds": 1e3 * median,
            "tokens_per_second": self.real_tokens / median,
            "mfu": flops / median / ceiling,
            "tflops": flops / median / 1e12,
            "real_tokens": self.real_tokens,
            "sequences": len(lengths),
            "seconds": self.seconds,
        }


def count_flops(shape: ModelShape, lengths: list[int]) -> float:
    """Count model FLOPs of forward and backward: 6 per weight and token, plus causal attention."""
    heads = shape.num_heads * shape.head_dim
    layer = shape.hidden_size * (2 * heads + 2 * shape.num_kv_heads * shape.head_dim + 3 * shape.ffn_hidden_size)
    weights = shape.num_layers * layer + shape.hidden_size * shape.vocab_size
    attention = 6 * shape.num_layers * heads * sum(n * n for n in lengths)
    return 6.0 * weights * sum(lengths) + attention


def measure_matmul_ceiling(device: torch.device, dtype: str) -> float:
    """Return the FLOP/s of the fastest square matrix product."""
    best, sizes = 0.0, (2048, 4096, 8192) if device.type == "cuda" else (512, 1024)
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(2))
        for _ in range(3):
            a @ b
        watch = Stopwatch(device)
        for _ in range(5):
            a @ b
        wall, cpu = watch.read()
        best = max(best, 5 * 2 * size**3 / (wall if device.type == "cuda" else cpu))
    return best
