# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule by flash-linear-attention's kernel, if installed and equal to plain torch in a trial.

The kernel rounds its products' inputs to 16 bits; the fallback `delta_rule.py` computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from megatron_rl.models.attention_backends import Segments
from megatron_rl.models.delta_rule import SequenceRows, apply_delta_rule, build_sequence_rows
from megatron_rl.models.trial import find_failure

# (query, key, value, decay, beta [1, n, heads, ...], normalizing query and key, cu_seqlens) -> output and last state
Kernel = Callable[..., tuple[torch.Tensor, Any]]
DeltaRule = Callable[..., torch.Tensor]  # signature of `apply_delta_rule`


@cache
def choose_delta_rule(device: torch.device, dtype: torch.dtype) -> DeltaRule:
    """Return the fastest implementation that works for this device and dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16 or find_kernel_failure(device) is not None:
        return apply_delta_rule
    return _apply_fla


@cache
def find_kernel_failure(device: torch.device) -> str | None:
    """Compare the kernel with plain torch on two short sequences; see `find_failure`."""

    def call() -> None:
        ends = torch.tensor([0, 70, 75], dtype=torch.int32, device=device)
        rows = build_sequence_rows(Segments("sdpa", ends, ends, 70, 70), 2)
        found, expected = (_run_trial(rule, rows, device) for rule in (_apply_fla, apply_delta_rule))
        for got, want in zip(found, expected, strict=True):
            assert (got - want).abs().max() <= 0.05 * want.abs().max()

    return find_failure("fla", call)


def _run_trial(rule: DeltaRule, rows: SequenceRows, device: torch.device) -> list[torch.Tensor]:
    sizes = (len(rows.tokens), 2, 64), (len(rows.tokens), 2, 64), (len(rows.tokens), 4, 64), (75, 4), (75, 4)
    drawn = [torch.arange(float(torch.Size(size).numel()), device=device).mul(0.7).sin().view(size) for size in sizes]
    query, key, value, decay, beta = drawn
    inputs = [*(x.bfloat16() for x in (query, key, value)), -decay.abs(), (beta / 2 + 0.5).bfloat16()]
    inputs = [x.requires_grad_() for x in inputs]
    output = rule(*inputs, rows).float()
    return [output, *(x.float() for x in torch.autograd.grad(output.square().sum(), inputs))]


def _apply_fla(*inputs: Any) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]  # optional

    return apply_kernel(chunk_gated_delta_rule, *inputs)


def apply_kernel(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rows: SequenceRows,
) -> torch.Tensor:
    """Run `kernel` over every sequence; arguments and result as in `apply_delta_rule`."""
    repeats = value.shape[1] // key.shape[1]
    query, key, value = (x.index_select(0, rows.whole) for x in (query, key, value))
    query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
    tokens = rows.tokens.index_select(0, rows.whole)
    decay, beta = decay.float().index_select(0, tokens), beta.index_select(0, tokens).to(value.dtype)
    packed = [x[None] for x in (query, key, value, decay, beta)]
    output, _ = kernel(*packed, use_qk_l2norm_in_kernel=True, cu_seqlens=rows.cu_seqlens)
    of_chunks = output.new_zeros(len(rows.tokens), *output.shape[2:]).index_copy(0, rows.whole, output[0])
    return of_chunks.index_select(0, rows.places)
