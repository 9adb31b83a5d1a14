# SPDX-License-Identifier: Apache-2.0
"""Log-probs from hidden states in chunks: values, gradients and the largest tensor that is made on the way.

The reference is autograd through the whole float64 softmax. Not covered: time, and the region functions that add up
the hidden states' gradients over the ranks (tests/models/test_heads.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed import run_ranks
from megatron_rl.parallel.chunked_divergence import compute_linear_sum_pi_squared
from megatron_rl.parallel.vocab_parallel import (
    OutputSoftmax,
    compute_linear_logprobs_and_entropy,
)

NUM_TOKENS, HIDDEN_SIZE = 14, 8
CHUNKS = [1, 5, 7, 14, 1000]


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison; rows of the weight beyond `vocab_size` are padding with tempting values."""

    vocab_size: int = 11
    padded_size: int = 16
    temperature: float = 0.7
    dtype: torch.dtype = torch.float32
    softcap: float | None = None

    def make_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden [t, h], weight [v, h], targets [t] and the weights of both outputs in the loss [t]."""
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator).to(self.dtype)
        weight = torch.randn(self.padded_size, HIDDEN_SIZE, generator=generator).to(self.dtype)
        weight[self.vocab_size :] *= 10
        targets = torch.randint(0, self.vocab_size, (NUM_TOKENS,), generator=generator)
        a, b = torch.randn(2, NUM_TOKENS, generator=generator)
        return hidden, weight, targets, a, b

    def make_softmax(self, chunk_tokens: int) -> OutputSoftmax:
        """Return softmax settings for a vocabulary over all ranks."""
        return OutputSoftmax(
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            tp_group=dist.group.WORLD,
            chunk_tokens=chunk_tokens,
            softcap=self.softcap,
        )

    def make_logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the scaled logits [t, v] of the unsplit vocabulary."""
        logits = hidden @ weight[: self.vocab_size].t()
        capped = logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return capped / self.temperature

    def make_reference(self) -> list[torch.Tensor]:
        """Log-probs, entropy, d hidden and d weight, all float64 and unsplit."""
        hidden, weight, targets, a, b = self.make_inputs()
        hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
        log_p = torch.log_softmax(self.make_logits(hidden, weight), dim=-1)
        logprobs = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        (logprobs @ a.double() + entropy @ b.double()).backward()
        return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


def run_chunked(case: Case, chunk_tokens: int, tp_size: int, rank: int) -> list[torch.Tensor]:
    """Log-probs, entropy, this rank's part of d hidden, and d weight of its rows."""
    hidden, weight, targets, a, b = case.make_inputs()
    hidden, weight = hidden.requires_grad_(), weight.chunk(tp_size)[rank].clone().requires_grad_()
    logprobs, entropy = compute_linear_logprobs_and_entropy(hidden, weight, targets, case.make_softmax(chunk_tokens))
    (logprobs @ a.to(logprobs.dtype) + entropy @ b.to(entropy.dtype)).backward()
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


CASES = [
    Case(dtype=torch.float64),
    Case(),
    Case(temperature=1.0),
    Case(vocab_size=4),  # over 4 ranks three have padding only
    Case(vocab_size=16),
    Case(softcap=2.0),
    Case(dtype=torch.float64, softcap=1.5, temperature=1.0),
]


@pytest.mark.parametrize("tp_size", [1, 4])
def test_sum_of_squared_probabilities(tp_size: int) -> None:
    """Of the unsplit softmax, in chunks that divide the tokens and that do not; ranks agree bit for bit."""

    def on_rank(rank: int, world_size: int) -> list[torch.Tensor]:
        found = []
        for case in CASES:
            hidden, weight, *_ = case.make_inputs()
            found += [
                compute_linear_sum_pi_squared(hidden, weight.chunk(world_size)[rank], case.make_softmax(chunk))
                for chunk in (5, 14)
            ]
        return found

    ranks = run_ranks(on_rank, tp_size)
    assert all(torch.equal(x, y) for rank in ranks for x, y in zip(rank, ranks[0], strict=True))
    for i, case in enumerate(CASES):
        hidden, weight, *_ = case.make_inputs()
        logits = case.make_logits(hidden.double(), weight.double())
        expected = logits.softmax(-1).square().sum(-1)
        for found in ranks[0][2 * i : 2 * i + 2]:
            torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_values_and_gradients_equal_the_unsplit_unchunked_ones(tp_size: int) -> None:
    """d hidden is the sum over the ranks; padding rows get a gradient of exactly zero; ranks agree bit for bit."""

    def run(rank: int, world_size: int) -> list[list[torch.Tensor]]:
        return [run_chunked(case, chunk, world_size, rank) for case in CASES for chunk in CHUNKS]

    per_run = list(zip(*run_ranks(run, tp_size, timeout=60), strict=True))
    for (case, chunk), ranks in zip([(c, n) for c in CASES for n in CHUNKS], per_run, strict=True):
        digits = 1e-12 if case.dtype == torch.float64 else 1e-5
        for found in ranks:
            assert torch.equal(found[0], ranks[0][0]) and torch.equal(found[1], ranks[0][1])
            assert [x.dtype for x in found] == [case.dtype] * 4
        d_weight = torch.cat([found[3] for found in ranks])
        assert not d_weight[case.vocab_size :].any()
        together = [*ranks[0][:2], sum(found[2] for found in ranks), d_weight]
        for x, expected in zip(together, case.make_reference(), strict=True):
            torch.testing.assert_close(
                x, expected, rtol=digits, atol=digits, check_dtype=False, msg=f"{case}, {chunk} tokens"
            )


@pytest.mark.parametrize("tp_size", [1, 2])
def test_bfloat16_weights_gather_their_gradient_in_float32(tp_size: int) -> None:
    """2000 tokens in 1000 chunks: a bfloat16 sum would stop growing at 256 times one addend.

    Every token adds the same gradient, so one chunk of all tokens gives the exact sum.
    """
    num_tokens = 2000

    def run(rank: int, world_size: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        row = torch.randn(HIDDEN_SIZE, generator=generator)
        weight = torch.randn(8, HIDDEN_SIZE, generator=generator).bfloat16().chunk(world_size)[rank].clone()
        hidden = row.bfloat16().expand(num_tokens, -1).contiguous()
        found = []
        for chunk in (2, num_tokens):
            w = weight.clone().requires_grad_()
            logprobs, _ = compute_linear_logprobs_and_entropy(
                hidden,
                w,
                torch.zeros(num_tokens, dtype=torch.long),
                OutputSoftmax(vocab_size=8, temperature=1.0, tp_group=dist.group.WORLD, chunk_tokens=chunk),
            )
            assert logprobs.dtype == torch.float32
            logprobs.sum().backward()
            assert w.grad.dtype == torch.bfloat16
            found.append(w.grad.float())
        return found

    for chunked, whole in run_ranks(run, tp_size, timeout=60):
        assert whole.abs().max() > 100
        torch.testing.assert_close(chunked, whole, rtol=2**-7, atol=0.5)


@pytest.mark.parametrize("used", ["logprobs", "entropy", "both"])
def test_each_output_can_be_differentiated_alone(used: str) -> None:
    """An output that is only logged has no gradient; frozen inputs get none."""
    case = Case(dtype=torch.float64)

    def run(rank: int, world_size: int) -> list[Any]:
        hidden, weight, targets, *_ = case.make_inputs()
        expected_hidden = hidden.clone().requires_grad_()
        log_p = torch.log_softmax(expected_hidden @ weight[:11].t() / 0.7, dim=-1)
        expected = {"logprobs": log_p.gather(1, targets[:, None]).sum(), "entropy": -(log_p.exp() * log_p).sum()}
        hidden = hidden.requires_grad_()
        logprobs, entropy = compute_linear_logprobs_and_entropy(
            hidden,
            weight,
            targets,
            OutputSoftmax(vocab_size=11, temperature=0.7, tp_group=dist.group.WORLD, chunk_tokens=4),
        )
        found = {"logprobs": logprobs.sum(), "entropy": entropy.sum()}
        names = list(found) if used == "both" else [used]
        sum(expected[name] for name in names).backward()
        sum(found[name] for name in names).backward()
        return [hidden.grad, expected_hidden.grad, weight.grad]

    ((found, expected, frozen),) = run_ranks(run, 1, timeout=60)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert frozen is None


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.num_elements = max(self.num_elements, x.numel())
        return result


def _measure_largest(rank: int, world_size: int, num_tokens: int, vocab_size: int, chunk_tokens: int) -> int:
    hidden = torch.randn(num_tokens, 4, requires_grad=True)
    weight = torch.randn(vocab_size // world_size, 4, requires_grad=True)
    targets = torch.randint(0, vocab_size, (num_tokens,))
    with LargestTensor() as largest:
        logprobs, entropy = compute_linear_logprobs_and_entropy(
            hidden,
            weight,
            targets,
            OutputSoftmax(vocab_size=vocab_size, temperature=0.9, tp_group=dist.group.WORLD, chunk_tokens=chunk_tokens),
        )
        (logprobs - entropy).sum().backward()
    return largest.num_elements


@pytest.mark.parametrize("tp_size", [1, 2])
def test_no_tensor_is_larger_than_the_logits_of_one_chunk(tp_size: int) -> None:
    """Forward and backward; 512 tokens with a vocabulary of 1024 would be 524288 logits (over the TP ranks)."""

    def run(rank: int, world_size: int) -> list[int]:
        return [
            _measure_largest(rank, world_size, tokens, 1024, chunk)
            for tokens, chunk in ((512, 16), (128, 16), (512, 64), (512, 512))
        ]

    for largest in run_ranks(run, tp_size, timeout=60):
        assert largest == [16 * 1024 // tp_size, 16 * 1024 // tp_size, 64 * 1024 // tp_size, 512 * 1024 // tp_size]


class Clones(TorchDispatchMode):
    """Counts copies of tensors with as many elements as the logits."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.count, self._num_elements = 0, num_elements

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default and args[0].numel() == self._num_elements
        return func(*args, **(kwargs or {}))


def test_logits_of_a_single_chunk_are_kept_only_for_a_backward_pass() -> None:
    """Without gradients the same log-probs need no copy of the logits, although weight and hidden require them."""
    case = Case()

    def run(rank: int, world_size: int) -> list[Any]:
        hidden, weight, targets, *_ = case.make_inputs()
        found = []
        for has_grad in (True, False):
            with torch.set_grad_enabled(has_grad), Clones(NUM_TOKENS * case.vocab_size) as clones:
                logprobs, _ = compute_linear_logprobs_and_entropy(
                    hidden.requires_grad_(), weight.requires_grad_(), targets, case.make_softmax(1000)
                )
            found.append((clones.count, logprobs.detach()))
        return found

    (((kept, expected), (dropped, logprobs)),) = run_ranks(run, 1, timeout=60)
    assert (kept, dropped) == (1, 0)
    assert torch.equal(logprobs, expected)
