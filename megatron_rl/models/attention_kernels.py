# SPDX-License-Identifier: Apache-2.0
"""Attention backends of GPUs and of batch invariance, and trials of optional GPU libraries.

* flash-attn, torch-varlen: one kernel over all segments; CUDA, 16-bit types;
* efficient: torch's memory-efficient kernel over all segments; float32 as well;
* tiled: bits of a row depend only on its own sequence; for batch invariance, never chosen for speed.

A kernel is chosen only after a trial on the device.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalVariant

from megatron_rl.models.segments import TILE, Segments, TileBatch
from megatron_rl.parallel.collectives import find_failure
from megatron_rl.types import UserError

# Backends with one kernel over all segments, fastest first -> module that must be importable.
KERNELS = {"flash-attn": "flash_attn", "torch-varlen": "torch.nn.attention.varlen", "efficient": "torch"}
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def list_kernels(dtype: torch.dtype) -> list[str]:
    """Return the names of the kernels that support a dtype, fastest first."""
    return [name for name in KERNELS if dtype in _KERNEL_DTYPES or name == "efficient"]


@cache
def find_kernel_failure(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Try one of `KERNELS`: return `None` if it agrees with sdpa, "" if it is not installed, else the error."""

    def call() -> None:
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor(ends, dtype=torch.int32, device=device) for ends in ([0, 3, 8], [0, 3, 10])
        )
        segments = Segments(backend, cu_seqlens_q, cu_seqlens_k, 5, 7)
        reference = build_tiles(replace(segments, backend="tiled"))
        found, expected = (_run_trial(one, device, dtype) for one in (segments, reference))
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)

    return find_failure(KERNELS[backend], call)


def _run_trial(segments: Segments, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = [
        torch.arange(rows * heads * 64.0).mul(0.7).sin().view(rows, heads, 64).to(device, dtype).requires_grad_()
        for rows, heads in ((8, 2), (10, 1), (10, 1))
    ]
    output = BACKENDS[segments.backend](*inputs, segments, 0.125)
    return [output, *torch.autograd.grad(output.float().square().sum(), inputs)]


def _attend_flash_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]  # optional dependency

    return flash_attn_varlen_func(
        query,
        key,
        value,
        *segments.lengths,
        softmax_scale=scale,
        causal=True,
        **({"window_size": (segments.window - 1, 0)} if segments.window else {}),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _attend_torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # absent before torch 2.10

    output = varlen_attn(
        query,
        key,
        value,
        *segments.lengths,
        scale=scale,
        window_size=(segments.window - 1, 0),  # -1: all
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor), "a pair only where an auxiliary output is asked for"
    return output


def _attend_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    assert not segments.window, "build_packed_sequences chooses another backend"
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    # The kernel under `scaled_dot_product_attention`, called directly because sdpa takes no segment boundaries.
    output, *_ = torch.ops.aten._efficient_attention_forward(
        query[None],
        key[None],
        value[None],
        None,
        *segments.lengths,
        0.0,
        int(CausalVariant.LOWER_RIGHT),
        needs_grad,
        scale=scale,
    )
    return output[0]


def build_tiles(segments: Segments) -> Segments:
    """Cut the queries of all segments into tiles of 32 positions (see `TileBatch`); reads lengths on the host.

    The n queries of a segment have positions k - n to k - 1 of its k keys.
    """
    cu_seqlens_q, cu_seqlens_k = segments.cu_seqlens_q, segments.cu_seqlens_k
    members: dict[int, list[int]] = {}
    for segment, (n, k) in enumerate(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)):
        if n:
            for number in range((k - n) // TILE, (k - 1) // TILE + 1):
                members.setdefault(number, []).append(segment)
    places = torch.empty(int(cu_seqlens_q[-1]), dtype=torch.int64, device=cu_seqlens_q.device)
    batches, base = [], 0
    inside = torch.arange(TILE, device=cu_seqlens_q.device)
    for number, chosen in sorted(members.items()):
        index = torch.tensor(chosen, device=cu_seqlens_q.device)
        start, stop = cu_seqlens_q[index].long(), cu_seqlens_q[index + 1].long()
        first_key, last_key = cu_seqlens_k[index].long(), cu_seqlens_k[index + 1].long() - 1
        offset = (last_key + 1 - first_key) - (stop - start)  # position of the segment's first query
        rows = (start - offset + number * TILE)[:, None] + inside
        is_query = (rows >= start[:, None]) & (rows < stop[:, None])
        places[rows[is_query]] = base + is_query.flatten().nonzero()[:, 0]
        base += rows.numel()
        batches.append(TileBatch(number, rows.clamp(start[:, None], stop[:, None] - 1).flatten(), first_key, last_key))
    return replace(segments, tiles=tuple(batches), places=places)


def attend_in_tiles(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Compute `attend` in blocks of 32 queries (`TileBatch`): queries [t, n, d], keys and values [k, ng, d]."""
    assert segments.places is not None and not segments.window, "prepared for this backend, and not bitwise"
    outputs = []
    for batch in segments.tiles:
        num_keys = (batch.number + 1) * TILE
        positions = torch.arange(num_keys, device=query.device)
        keys = (batch.first_key[:, None] + positions).minimum(batch.last_key[:, None]).flatten()
        output = F.scaled_dot_product_attention(
            *(
                x.index_select(0, rows).unflatten(0, (len(batch.first_key), -1)).transpose(1, 2)
                for x, rows in ((query, batch.queries), (key, keys), (value, keys))
            ),
            attn_mask=positions <= positions[-TILE:, None],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, segments.places)


BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "flash-attn": _attend_flash_attn,
    "torch-varlen": _attend_torch_varlen,
    "efficient": _attend_efficient,
    "tiled": attend_in_tiles,
}


# Libraries of kernels -> module, and what does their work if they are not used.
LIBRARIES = {
    "flash-attn": ("flash_attn", "torch has the same algorithm (varlen)"),
    "transformer-engine": ("transformer_engine", "without FP8 its products and norms are torch's"),
    "apex": ("apex", "torch's fused AdamW is one kernel, too, and reads rate and soundness on the GPU"),
    "liger-kernel": (
        "liger_kernel",
        "kernels of its kind are built in: softmax head in chunks, SwiGLU, rotary embedding",
    ),
}


def describe_library(name: str) -> str:
    """Return the version of one of `LIBRARIES`, or "not installed"; nothing is imported."""
    if importlib.util.find_spec(LIBRARIES[name][0]) is None:
        return "not installed"
    try:
        return f"found {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:  # a directory of sources
        return "found"


def check_transformer_engine() -> None:
    """Raise `UserError` if Transformer Engine does not work on this machine."""
    failure = find_transformer_engine_failure() if torch.cuda.is_available() else ""
    if failure is not None:
        raise UserError(
            f"Transformer Engine is not usable here{failure and f': {failure}'}",
            source="model.transformer_impl",
            expected="an installed transformer_engine and a CUDA device",
            hint="use model.transformer_impl=local",
        )


@cache
def find_transformer_engine_failure() -> str | None:
    """Try Transformer Engine on the GPU: return `None` if it works, "" if it is not installed, else the error."""

    def call() -> None:
        import transformer_engine.pytorch as engine  # pyright: ignore[reportMissingImports]  # optional dependency
        from megatron.core.extensions import transformer_engine as te

        assert te.TENorm and te.TEColumnParallelLinear and te.TERowParallelLinear
        options: dict[str, Any] = dict(params_dtype=torch.bfloat16, device="cuda")
        x = torch.ones(16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        linear = engine.Linear(32, 32, bias=False, init_method=torch.nn.init.ones_, **options)
        norm = engine.RMSNorm(32, **options)
        linear(norm(x)).sum().backward()
        assert x.grad is not None
        x.grad.sum().item()

    return find_failure("transformer_engine", call)
