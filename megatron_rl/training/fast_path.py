# SPDX-License-Identifier: Apache-2.0
"""Report of which parts of a training step use their fastest implementation; needs no process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_rl.config.schema import TrainedConfig
from megatron_rl.models.attention import choose_attention_backend
from megatron_rl.models.gpt import DTYPES
from megatron_rl.parallel.collectives import find_triton_failure


@dataclass(frozen=True)
class FastPath:
    """Whether one part of a training step uses its fastest implementation, the fast path."""

    part: str
    active: str
    is_fast: bool  # no better implementation exists for this machine
    brings: str = ""  # benefit of the fast path, if it is missing
    advice: str = ""  # how to enable it; empty if unavailable here


def find_fast_paths(
    config: TrainedConfig, dtype: str, transformer_impl: str = "local", dp_size: int = 1, bitwise: bool = False
) -> Iterator[FastPath]:
    """Report whether each part of a role's step uses its fastest implementation."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cpu = device.type == "cpu"
    if is_cpu:
        arithmetic, gain, needed = dtype, "float32 is much faster on CPU", "float32"
    else:
        gain, needed = "matrix products on tensor cores, half the memory", "bfloat16"
        arithmetic = f"{dtype}, gradients and Adam in float32" if dtype == needed else dtype
    yield FastPath("arithmetic", arithmetic, dtype == needed, gain, f"model.dtype={needed}")
    yield from find_kernels(dtype, transformer_impl, device, bitwise)
    gain, advice = "no launch per kernel, which binds small microbatches", "step_mode=graph (no expert parallelism)"
    yield FastPath("step", config.step_mode, is_cpu or config.step_mode == "graph", gain, advice)
    if not is_cpu:
        yield FastPath("batches", "copied from pinned memory while the host continues", True)
    if dp_size > 1:
        is_hidden = config.overlap_grad_reduce
        active = "during backward" if is_hidden else "after backward"
        gain = "hidden behind the last backward"
        yield FastPath("gradient reduction", active, is_hidden or is_cpu, gain, "overlap_grad_reduce=true")
    if dp_size > 1 and config.use_distributed_optimizer:
        gain = (
            "hidden behind the next forward; not built: rollout and checkpoints read the weights right after the update"
        )
        yield FastPath("weight gathering", "after the update", is_cpu, gain)


def find_kernels(dtype: str, transformer_impl: str, device: torch.device, bitwise: bool = False) -> Iterator[FastPath]:
    """Report on the parts of a step that do not depend on a role's settings."""
    is_cpu = device.type == "cpu"
    attention = "tiled" if bitwise else choose_attention_backend(device, DTYPES[dtype])
    yield from _find_broken(dtype, device)
    yield FastPath(
        "attention",
        attention,
        is_cpu or attention not in ("sdpa", "efficient"),
        "one kernel over all sequences of a microbatch, for 16-bit types and grouped heads",
        "model.dtype=bfloat16 with torch >= 2.13, or pip install flash-attn",
    )
    is_local = transformer_impl == "local"
    yield FastPath("layers", "megatron-core's own" if is_local else "Transformer Engine", True)
    if not is_cpu:
        from megatron_rl.models.delta_rule import apply_delta_rule, choose_delta_rule

        rule = choose_delta_rule(device, DTYPES[dtype])
        yield FastPath(
            "delta nets",
            "plain torch" if rule is apply_delta_rule else "flash-linear-attention",
            rule is not apply_delta_rule,
            "one kernel over all sequences of a microbatch, for Qwen3-Next and Qwen3.5 in bfloat16",
            "pip install flash-linear-attention",
        )
    yield FastPath("optimizer", "torch's fused AdamW (one kernel per group, rate and soundness on the device)", True)
    yield FastPath("log-probs", "from hidden states in chunks, logits never held", True)
    if not is_cpu:
        is_fused = find_triton_failure() is None
        yield FastPath(
            "softmax, SwiGLU",
            "Triton kernels" if is_fused else "torch's operations",
            is_fused,
            "one pass over logits, gates and their gradients",
            "pip install triton",
        )
        from megatron_rl.models.attention_kernels import LIBRARIES, describe_library

        for name, (_, instead) in LIBRARIES.items():
            is_used = name == attention or (name == "transformer-engine" and not is_local)
            yield FastPath(name, f"{describe_library(name)}{'' if is_used else ', not used'}", is_used, instead)


def _find_broken(dtype: str, device: torch.device) -> Iterator[FastPath]:
    """List kernel libraries that are installed but fail."""
    if device.type == "cpu":
        return
    from megatron_rl.models.attention_kernels import find_kernel_failure, list_kernels

    chosen, broken = choose_attention_backend(device, DTYPES[dtype]), {}
    for name in list_kernels(DTYPES[dtype]):
        if name == chosen:
            break
        broken[name] = find_kernel_failure(name, device, DTYPES[dtype])
    broken["Triton"] = find_triton_failure()
    if dtype == "bfloat16":
        from megatron_rl.models.delta_rule import find_delta_failure

        broken["flash-linear-attention"] = find_delta_failure(device)
    for name, failure in broken.items():
        if failure:
            advice = "reinstall it for this torch and this GPU, or uninstall it"
            yield FastPath(name, "not used", False, f"it is installed and fails: {failure}", advice)


def format_table(paths: Iterable[FastPath]) -> list[str]:
    """Format a report as table lines."""
    rows = [("fast path", "active", "missing")]
    for path in paths:
        missing = "" if path.is_fast else f"{path.brings} ({path.advice})" if path.advice else path.brings
        rows.append((path.part, path.active, missing or "-"))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{part:<{first}}  {active:<{second}}  {missing}" for part, active, missing in rows]
