# SPDX-License-Identifier: Apache-2.0
"""Triton kernels equal the torch operations that they replace: on a GPU if there is one, else in Triton's interpreter.

The interpreter computes the same values one block at a time with numpy; it truncates where a GPU rounds to 16 bits, so
16-bit results are compared to a few units in the last place. Not covered: speed, a GPU's compiler.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from megatron_rl.models.attention import compute_rotary_table
from megatron_rl.models.stages import _GatedActivation
from megatron_rl.parallel import collectives as choice
from megatron_rl.parallel.vocab_parallel import (
    OutputSoftmax,
    VocabShard,
    compute_linear_logprobs_and_entropy,
    compute_logits_gradient,
    compute_summary,
)

kernels = pytest.importorskip("megatron_rl.parallel.triton_kernels", exc_type=ModuleNotFoundError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ULPS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}  # largest relative difference of an element


can_run = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's process"
)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the GPU runs them")
def test_this_file_in_the_interpreter() -> None:
    """Triton decides at its import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "kernel_"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and "14 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Reproducible normal values."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def find_difference(got: torch.Tensor, want: torch.Tensor, floor: float = 1e-6) -> float:
    """Largest difference relative to an element, or to `floor` of the largest one."""
    got, want = got.double(), want.double()
    return float(((got - want).abs() / want.abs().clamp(min=floor * float(want.abs().max()) + 1e-30)).max())


@can_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "start", "temperature"), [(9000, 0, 1.0), (100, 300, 0.7), (151_936, 0, 1.0)])
def test_kernel_summaries_and_gradients_of_logits(
    dtype: torch.dtype, width: int, start: int, temperature: float
) -> None:
    """Targets at both ends of the shard and on both sides of it; with and without a gradient of the entropy.

    The last width is the vocabulary of Qwen2.5.
    """
    logits, shard = draw(4, width, scale=6.0, dtype=dtype), VocabShard(start, width)
    logits[3, :5] = -1e30
    targets = torch.tensor([start, start + width - 1, start + width, start - 1], device=DEVICE)
    z = logits.float() / temperature
    got = kernels.summarize_logits(logits, targets, start, temperature)
    want = compute_summary(z.clone(), targets, shard)
    assert torch.equal(logits.float() / temperature, z), "not overwritten"
    assert torch.equal(got[3] == 0, want[3] == 0) and want[3, 2] == 0
    assert all(find_difference(*pair) < 1e-5 for pair in zip(got, want, strict=True))
    lse, entropy, slope = z.logsumexp(-1) + 0.3, draw(4).abs(), draw(4)
    for of_entropy in (None, draw(4, scale=0.1)):
        factors = dict(lse=lse, entropy=entropy, grad_logprobs=slope, grad_entropy=of_entropy)
        got = kernels.differentiate_logits(logits.clone(), targets, start, temperature, **factors)
        want = compute_logits_gradient(z.clone(), targets, shard, **factors)
        assert got.dtype == dtype
        assert find_difference(got, want, floor=1e-3) < 2 * ULPS[dtype]


@can_run
def test_kernel_not_a_number_stays_one() -> None:
    logits = draw(2, 50)
    logits[1, 7] = math.nan
    total = kernels.summarize_logits(logits, torch.zeros(2, dtype=torch.int64, device=DEVICE), 0, 1.0)[1]
    assert total.isnan().tolist() == [False, True]


@can_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_swiglu(dtype: torch.dtype) -> None:
    """More columns than a block, and a middle dimension."""
    inputs, gradient = draw(3, 2, 2 * 1100, scale=3.0, dtype=dtype), draw(3, 2, 1100, dtype=dtype)
    gate, up = inputs.double().requires_grad_().chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    got = kernels.apply_swiglu(inputs)
    assert got.dtype == dtype and got.shape == want.shape
    assert find_difference(got, want) < 3 * ULPS[dtype]
    of_inputs = kernels.differentiate_swiglu(inputs, gradient)
    wanted = torch.cat(torch.autograd.grad(want, [gate, up], gradient.double()), -1)
    assert find_difference(of_inputs, wanted, floor=1e-2) < 4 * ULPS[dtype]


@can_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_rotation(dtype: torch.dtype) -> None:
    """Three heads that are a part of a wider tensor; turned back by the opposite angle."""
    table = compute_rotary_table(torch.tensor([0, 5, 70, 1000]), head_dim=8, theta=1e4, dtype=dtype)
    cosine, sine = table.cosine.to(DEVICE), table.sine.to(DEVICE)
    heads = draw(4, 5, 8, dtype=dtype)[:, 1:4]
    first, second = heads.double().chunk(2, -1)
    want = torch.cat([second, first], -1) * sine.double() + heads.double() * cosine.double()
    got = kernels.rotate_halves(heads, cosine, sine, 1.0)
    assert got.dtype == dtype and got.is_contiguous()
    assert find_difference(got, want, floor=0.1) < 8 * ULPS[dtype]
    back = kernels.rotate_halves(got, cosine, sine, -1.0)
    assert find_difference(back, heads, floor=0.1) < 16 * ULPS[dtype]


@can_run
def test_kernel_of_no_rows() -> None:
    nothing, no_ids = draw(0, 8), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert kernels.summarize_logits(nothing, no_ids, 0, 1.0).shape == (4, 0)
    assert kernels.apply_swiglu(nothing).shape == (0, 4)
    assert kernels.differentiate_swiglu(nothing, draw(0, 4)).shape == (0, 8)


@can_run
@pytest.mark.parametrize("chunk_tokens", [4, 16])
def test_kernel_log_probs_and_gradients_through_the_head(chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head with kernels against the head without them: several chunks, and one whose logits are kept."""

    class OneRank:
        def size(self) -> int:
            return 1

        rank = staticmethod(lambda: 0)

    softmax = OutputSoftmax(vocab_size=60, temperature=0.8, tp_group=OneRank(), chunk_tokens=chunk_tokens)  # type: ignore[arg-type]
    targets = torch.arange(10, device=DEVICE)
    found = []
    for chosen in (None, kernels):
        monkeypatch.setattr("megatron_rl.parallel.vocab_parallel.choose_triton_kernels", lambda tensor, c=chosen: c)
        hidden, weight = draw(10, 8).requires_grad_(), draw(64, 8).requires_grad_()
        logprobs, entropy = compute_linear_logprobs_and_entropy(hidden, weight, targets, softmax)
        grads = torch.autograd.grad((logprobs * draw(10)).sum() + (entropy * 0.1).sum(), [hidden, weight])
        found.append([logprobs.detach(), entropy.detach(), *grads])
    for without, with_kernels in zip(*found, strict=True):
        torch.testing.assert_close(with_kernels, without, rtol=1e-5, atol=1e-6)


def test_a_cpu_has_no_kernels() -> None:
    assert choice.choose_triton_kernels(torch.zeros(1)) is None
    inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    gate, up = inputs.chunk(2, -1)
    assert torch.equal(_GatedActivation.apply(inputs, False), torch.nn.functional.silu(gate) * up)
