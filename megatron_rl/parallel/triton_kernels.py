# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for what a GPU spends most time on between matrix products: the softmax head, and SwiGLU.

Each reads and writes its operands once, where torch's operations make about ten passes over float32 copies of them.
Arithmetic is in float32. Rows are independent and each is summed in one fixed order, so results are deterministic.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# (a launch has options beside the kernel's arguments, and takes numbers for constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SUMMARY_BLOCK, _GRADIENT_BLOCK, _GATE_BLOCK = 8192, 4096, 1024  # columns of a program's step
_LEAST = tl.constexpr(-3.0e38)  # below every logit, and finite


def summarize_logits(logits: torch.Tensor, targets: torch.Tensor, start: int, temperature: float) -> torch.Tensor:
    """Return `vocab_parallel.compute_summary` of `logits / temperature`, [4, t] float32, without overwriting.

    Args:
        logits: [t, width] of a shard with at least one column, contiguous.
        targets: [t] token ids of the whole vocabulary.
        start: the shard's first token id.
    """
    rows, width = logits.shape
    summary = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _summarize[(rows,)](
            logits, targets, summary, rows, width, start, temperature, BLOCK=_SUMMARY_BLOCK, num_warps=8
        )
    return summary


@triton.jit
def _summarize(logits, targets, summary, rows, width, start, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    lanes = tl.arange(0, BLOCK)
    high = tl.full((), _LEAST, tl.float32)
    total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        z = tl.load(logits + first + lanes, mask=first + lanes < width, other=-1e30).to(tl.float32) / temperature
        higher = tl.maximum(high, tl.max(z, 0))
        exp_z = tl.exp(z - higher)
        shrink = tl.exp(high - higher)
        weighted = (weighted + total * (high - higher)) * shrink + exp_z * (z - higher)
        total = total * shrink + exp_z
        high = higher
    column = tl.load(targets + row) - start
    is_mine = (column >= 0) & (column < width)
    target_z = tl.load(logits + column, mask=is_mine, other=0.0).to(tl.float32) / temperature
    tl.store(summary + row, high)
    tl.store(summary + rows + row, tl.sum(total, 0))
    tl.store(summary + 2 * rows + row, tl.sum(weighted, 0))
    tl.store(summary + 3 * rows + row, target_z)


def differentiate_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    start: int,
    temperature: float,
    *,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Overwrite `logits` with `vocab_parallel.compute_logits_gradient` of `logits / temperature`, and return it.

    Args:
        logits: [t, width] of a shard with at least one column, contiguous.
        lse, entropy, grad_logprobs, grad_entropy: [t] float32, as there.
    """
    rows, width = logits.shape
    if rows:
        _differentiate[(rows, triton.cdiv(width, _GRADIENT_BLOCK))](
            logits,
            targets,
            lse,
            entropy,
            grad_logprobs,
            grad_logprobs if grad_entropy is None else grad_entropy,
            width,
            start,
            temperature,
            HAS_ENTROPY=grad_entropy is not None,
            BLOCK=_GRADIENT_BLOCK,
            num_warps=8,
        )
    return logits


@triton.jit
def _differentiate(
    logits,
    targets,
    lse,
    entropy,
    grad_logprobs,
    grad_entropy,
    width,
    start,
    temperature,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = logits + row * width + columns
    z = tl.load(places, mask=columns < width, other=0.0).to(tl.float32) / temperature
    log_probs = z - tl.load(lse + row)
    of_target = tl.load(grad_logprobs + row)
    slope = of_target
    if HAS_ENTROPY:
        slope += tl.load(grad_entropy + row) * (log_probs + tl.load(entropy + row))
    gradient = -slope * tl.exp(log_probs)
    gradient += tl.where(columns == tl.load(targets + row) - start, of_target, 0.0)
    tl.store(places, gradient.to(logits.dtype.element_ty), mask=columns < width)


def apply_swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Map gate then up, [..., 2 f] contiguous, to silu(gate) * up, [..., f], rounded after each of the two."""
    size = gate_and_up.shape[-1] // 2
    output = gate_and_up.new_empty(*gate_and_up.shape[:-1], size)
    if output.numel():
        grid = (output.numel() // size, triton.cdiv(size, _GATE_BLOCK))
        _swiglu[grid](gate_and_up, output, size, BLOCK=_GATE_BLOCK)
    return output


@triton.jit
def _swiglu(gate_and_up, output, size, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < size
    gate_and_up += row * 2 * size
    gate = tl.load(gate_and_up + columns, mask=is_real).to(tl.float32)
    up = tl.load(gate_and_up + size + columns, mask=is_real).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * size + columns, (active * up).to(output.dtype.element_ty), mask=is_real)


def differentiate_swiglu(gate_and_up: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `gate_and_up`, [..., 2 f], from that of `apply_swiglu`'s result, [..., f] contiguous."""
    size = gradient.shape[-1]
    result = torch.empty_like(gate_and_up)
    if gradient.numel():
        grid = (gradient.numel() // size, triton.cdiv(size, _GATE_BLOCK))
        _swiglu_backward[grid](gate_and_up, gradient, result, size, BLOCK=_GATE_BLOCK)
    return result


@triton.jit
def _swiglu_backward(gate_and_up, gradient, result, size, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < size
    gate_and_up += row * 2 * size
    result += row * 2 * size
    slope = tl.load(gradient + row * size + columns, mask=is_real).to(tl.float32)
    gate = tl.load(gate_and_up + columns, mask=is_real).to(tl.float32)
    up = tl.load(gate_and_up + size + columns, mask=is_real).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    active = (gate * share).to(result.dtype.element_ty).to(tl.float32)
    of_active = (slope * up).to(result.dtype.element_ty).to(tl.float32)
    of_gate = of_active * share * (1.0 + gate * (1.0 - share))
    tl.store(result + columns, of_gate.to(result.dtype.element_ty), mask=is_real)
    tl.store(result + size + columns, (slope * active).to(result.dtype.element_ty), mask=is_real)


def rotate_halves(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, sign: float) -> torch.Tensor:
    """Rotate the pairs (i, i + d/2) of [t, n, d] by a `RotaryTable` of [t, 1, d]; each product is rounded, as in torch.

    Args:
        heads: with contiguous channels.
        sign: 1, or -1 for the opposite angle.
    """
    rows, number, width = heads.shape
    output = torch.empty(rows, number, width, dtype=heads.dtype, device=heads.device)
    if output.numel():
        block = triton.next_power_of_2(number * width // 2)
        _rotate[(rows,)](
            heads, cosine, sine, output, heads.stride(0), heads.stride(1), number, width // 2, sign, BLOCK=block
        )
    return output


@triton.jit
def _rotate(heads, cosine, sine, output, row_stride, head_stride, number, half, sign, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    head, channel = lanes // half, lanes % half
    is_real = head < number
    places, targets = heads + row * row_stride + head * head_stride + channel, output + row * number * 2 * half
    first = tl.load(places, mask=is_real).to(tl.float32)
    second = tl.load(places + half, mask=is_real).to(tl.float32)
    cosine += row * 2 * half + channel
    sine += row * 2 * half + channel
    for_first = _turn(first, second, tl.load(cosine), tl.load(sine), sign, output.dtype.element_ty)
    for_second = _turn(second, first, tl.load(cosine + half), tl.load(sine + half), sign, output.dtype.element_ty)
    tl.store(targets + head * 2 * half + channel, for_first, mask=is_real)
    tl.store(targets + head * 2 * half + half + channel, for_second, mask=is_real)


@triton.jit
def _turn(own, other, cosine, sine, sign, dtype: tl.constexpr):
    turned = (other * sine.to(tl.float32) * sign).to(dtype).to(tl.float32)
    kept = (own * cosine.to(tl.float32)).to(dtype).to(tl.float32)
    return (turned + kept).to(dtype)
