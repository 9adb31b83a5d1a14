# SPDX-License-Identifier: Apache-2.0
"""Two distributions compared in chunks: values and gradients against autograd through whole float64 softmaxes.

Not covered: the transfer of the teacher's columns (tests/run/test_distillation.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.parallel.chunked_divergence import (
    compute_linear_divergence,
    compute_linear_logprobs_of,
    compute_linear_top_k,
)
from megatron_rl.parallel.vocab_parallel import OutputSoftmax
from megatron_rl.training.teacher_divergence import compute_top_k_divergence

NUM_TOKENS, VOCAB_SIZE = 13, 21
DIRECTIONS = ("reverse", "forward")


@dataclass(frozen=True)
class Case:
    """Inputs of a comparison; rows of the weights beyond the vocabulary are padding with tempting values."""

    dtype: torch.dtype
    padded_size: int = 32
    temperature: float = 0.7
    softcaps: tuple[float | None, float | None] = (None, None)  # of the student and the teacher

    def make_inputs(self) -> tuple[torch.Tensor, ...]:
        """hidden [t, 6] and weight [v, 6] of the student, [t, 9] and [v, 9] of the teacher, weights of the loss [t]."""
        generator = torch.Generator().manual_seed(5)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(self.dtype)

        weight, teacher_weight = draw(self.padded_size, 6), draw(self.padded_size, 9)
        weight[VOCAB_SIZE:] *= 10
        teacher_weight[VOCAB_SIZE:] *= 10
        return draw(NUM_TOKENS, 6), weight, draw(NUM_TOKENS, 9), teacher_weight, draw(NUM_TOKENS)

    def make_softmax(self, chunk_tokens: int, *, of_teacher: bool = False) -> OutputSoftmax:
        """Return softmax settings for a vocabulary over all ranks."""
        assert dist.group.WORLD is not None
        return OutputSoftmax(
            vocab_size=VOCAB_SIZE,
            temperature=self.temperature,
            tp_group=dist.group.WORLD,
            chunk_tokens=chunk_tokens,
            softcap=self.softcaps[of_teacher],
        )

    def make_probs(self, logits: torch.Tensor, *, of_teacher: bool) -> torch.Tensor:
        """Return the probabilities [v] of a token's logits."""
        cap = self.softcaps[of_teacher]
        return torch.softmax((logits if cap is None else cap * (logits / cap).tanh()) / self.temperature, 0)


def make_reference(case: Case, k: int | None, direction: str) -> list[torch.Tensor]:
    """Divergences, d hidden and d weight: a loop over tokens in float64."""
    hidden, weight, teacher_hidden, teacher_weight, a = (x.double() for x in case.make_inputs())
    hidden.requires_grad_(), weight.requires_grad_()
    found = []
    for x, y in zip(hidden, teacher_hidden, strict=True):
        p = case.make_probs(weight[:VOCAB_SIZE] @ x, of_teacher=False)
        q = case.make_probs(teacher_weight[:VOCAB_SIZE] @ y, of_teacher=True)
        if k is not None:
            best = q.argsort(descending=True)[:k]
            is_other = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill(0, best, False)
            p, q = (torch.cat([z[best], z[is_other].sum()[None]]) for z in (p, q))
        found.append((p * (p / q).log()).sum() if direction == "reverse" else (q * (q / p).log()).sum())
    divergence = torch.stack(found)
    (divergence @ a).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [divergence.detach(), hidden.grad, weight.grad]


def run_chunked(case: Case, k: int | None, direction: str, chunk_tokens: int) -> list[torch.Tensor]:
    """Compute divergences and gradients in chunks on this rank, d hidden summed over the ranks."""
    rank, size, softmax = dist.get_rank(), dist.get_world_size(), case.make_softmax(chunk_tokens)
    hidden, weight, teacher_hidden, teacher_weight, a = case.make_inputs()
    hidden.requires_grad_()
    weight, teacher_weight = (w.chunk(size)[rank].clone() for w in (weight, teacher_weight))
    weight.requires_grad_()
    if k is None:
        found = compute_linear_divergence(
            hidden, weight, teacher_hidden, teacher_weight, direction, softmax, case.softcaps[1]
        )
    else:
        theirs = case.make_softmax(chunk_tokens, of_teacher=True)
        ids, logprobs = compute_linear_top_k(teacher_hidden, teacher_weight, k, theirs).unbind(1)
        logprobs_of = compute_linear_logprobs_of(hidden, weight, ids[:, :-1].long(), softmax)
        found = compute_top_k_divergence(logprobs_of, logprobs, direction)
    (found @ a.to(found.dtype)).backward()
    assert hidden.grad is not None and weight.grad is not None
    dist.all_reduce(hidden.grad)
    return [found.detach(), hidden.grad, weight.grad]


def compare(rank: int, world_size: int, padded_size: int) -> dict[str, float]:
    """The largest relative difference of each quantity by its case."""
    worst = {}
    caps = (None, None), (2.0, None), (3.0, 1.5)
    dtypes = torch.float64, torch.float32
    for dtype, k, direction, chunk, cap in product(dtypes, (None, 4, 20), DIRECTIONS, (5, 100), caps):
        case = Case(dtype, padded_size, softcaps=cap)
        expected = make_reference(case, k, direction)
        expected[2] = expected[2].chunk(world_size)[rank]
        for name, ours, theirs in zip(
            ("divergence", "d hidden", "d weight"), run_chunked(case, k, direction, chunk), expected, strict=True
        ):
            if theirs.numel() and theirs.abs().max():
                gap = (ours.double() - theirs).abs().max() / theirs.abs().max()
                worst[f"{name} {dtype} k={k} {direction} chunk={chunk} caps={cap}"] = float(gap)
    return worst


@pytest.mark.parametrize(("world_size", "padded_size"), [(1, 32), (2, 32), (3, 63)])
def test_values_and_gradients_are_those_of_the_whole_softmax(world_size: int, padded_size: int) -> None:
    """On three ranks the last one has padding only."""
    for worst in run_ranks(compare, world_size, padded_size):
        assert len(worst) >= 48
        assert max(gap for name, gap in worst.items() if "float64" in name) < 1e-10
        assert max(gap for name, gap in worst.items() if "float32" in name) < 5e-6


def find_top_k(rank: int, world_size: int) -> torch.Tensor:
    _, _, hidden, weight, _ = Case(torch.float64).make_inputs()
    return compute_linear_top_k(hidden, weight.chunk(world_size)[rank], 20, Case(torch.float64).make_softmax(5))


def test_top_k_is_sorted_and_the_same_on_every_rank() -> None:
    """Two ranks have 16 and 5 tokens of the vocabulary: fewer than k."""
    _, _, hidden, weight, _ = Case(torch.float64).make_inputs()
    logprobs = torch.log_softmax(hidden @ weight[:VOCAB_SIZE].t() / 0.7, -1)
    expected, ids = logprobs.topk(20)
    for found in run_ranks(find_top_k, 2):
        assert torch.equal(found[:, 0, :-1].long(), ids)
        assert (found[:, 1, :-1] - expected).abs().max() < 1e-12
        assert (found[:, 1, -1] - logprobs.min(-1).values).abs().max() < 1e-12, "one token is left"


def compare_with_itself(rank: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Divergences and gradients of a sharp model that is its own teacher."""
    hidden, weight, *_ = Case(dtype).make_inputs()
    results = []
    for direction, k in product(DIRECTIONS, (1, 20, VOCAB_SIZE)):
        mine, softmax = (30 * hidden).requires_grad_(), Case(dtype).make_softmax(5)
        ids, logprobs = compute_linear_top_k(mine, weight, k, softmax).unbind(1)
        ours = compute_linear_logprobs_of(mine, weight, ids[:, :-1].long(), softmax)
        found = compute_top_k_divergence(ours, logprobs, direction)
        found.sum().backward()
        assert mine.grad is not None
        results += [found.detach(), mine.grad]
    return results


# Logits reach 250; neighboring numbers are 1.5e-5 (float32) and 2.8e-14 (float64) apart there.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1.5e-5), (torch.float64, 1e-12)])
def test_a_student_that_is_its_teacher_has_no_divergence(dtype: torch.dtype, bound: float) -> None:
    """Also if the teacher's k tokens have all of the probability, or are the whole vocabulary."""
    (results,) = run_ranks(compare_with_itself, 1, dtype)
    assert max(float(found.abs().max()) for found in results) < bound
