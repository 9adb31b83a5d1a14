# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy of a split vocabulary against log_softmax of the whole one in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.parallel.vocab_parallel import compute_logprobs_and_entropy

NUM_TOKENS = 6


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison; columns beyond `vocab_size` are padding with tempting values."""

    vocab_size: int
    padded_size: int
    temperature: float
    dtype: torch.dtype
    scale: float = 3.0

    def make_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [t, padded v], targets [t] with the first and last id, weights of both outputs [t]."""
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(NUM_TOKENS, self.padded_size, generator=generator) * self.scale
        logits[:, self.vocab_size:] = 50 * self.scale
        targets = torch.randint(0, self.vocab_size, (NUM_TOKENS,), generator=generator)
        targets[0], targets[1] = 0, self.vocab_size - 1
        weights = torch.randn(2, NUM_TOKENS, generator=generator)
        return logits.to(self.dtype), targets, weights[0], weights[1]

    def make_reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs, entropy and gradient of their weighted sum, all float64 and unsplit."""
        logits, targets, a, b = self.make_inputs()
        logits = logits.double().requires_grad_()
        log_p = torch.log_softmax(logits[:, : self.vocab_size] / self.temperature, dim=-1)
        logprobs = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        ((logprobs * a.double()).sum() + (entropy * b.double()).sum()).backward()
        return logprobs.detach(), entropy.detach(), logits.grad


def compute_split(rank: int, tp_size: int, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one rank gets: log-probs [t], entropy [t] and the gradient of its columns [t, v/tp]."""
    logits, targets, a, b = case.make_inputs()
    local = logits.chunk(tp_size, dim=1)[rank].clone().requires_grad_()
    logprobs, entropy = compute_logprobs_and_entropy(
        local, targets, vocab_size=case.vocab_size, temperature=case.temperature, tp_group=dist.group.WORLD)
    ((logprobs * a).sum() + (entropy * b).sum()).backward()
    return logprobs.detach(), entropy.detach(), local.grad


CASES = [
    Case(16, 16, 1.0, torch.float32),
    Case(11, 16, 0.7, torch.float32),  # over 4 ranks the last has padding only, the third both
    Case(4, 16, 1.3, torch.float32),  # over 4 ranks three have padding only
    Case(11, 16, 0.7, torch.bfloat16),
    Case(11, 16, 1.0, torch.float32, scale=1e3),  # exp() of the raw logits overflows
]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_values_and_gradients_equal_the_unsplit_float64_ones(tp_size: int) -> None:
    """Not covered: more than one dimension before the vocabulary, and float16 logits."""

    def compute(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return [compute_split(rank, world_size, case) for case in CASES]

    results = run_ranks(compute, tp_size, timeout=90)
    for case, per_rank in zip(CASES, zip(*results, strict=True), strict=True):
        logprobs, entropy, gradient = case.make_reference()
        close = dict(rtol=1e-5, atol=1e-5 * case.scale / 3.0, check_dtype=False)
        for local_logprobs, local_entropy, local_gradient in per_rank:
            assert local_logprobs.dtype == local_entropy.dtype == torch.float32
            assert local_gradient.dtype == case.dtype
            torch.testing.assert_close(local_logprobs, logprobs, **close)
            torch.testing.assert_close(local_entropy, entropy, **close)
            assert torch.equal(local_logprobs, per_rank[0][0]) and torch.equal(local_entropy, per_rank[0][1])
        joined = torch.cat([result[2] for result in per_rank], dim=1)
        if case.dtype == torch.bfloat16:
            close = dict(rtol=2**-8, atol=1e-5, check_dtype=False)
        torch.testing.assert_close(joined, gradient, **close)
        assert not joined[:, case.vocab_size:].any()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_gradient_equals_finite_differences(tp_size: int) -> None:
    """Central differences in float32, so to three digits only; ties the backward to this very forward."""
    case, step = Case(5, 6, 0.8, torch.float32, scale=1.0), 1e-2

    def differentiate(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits, targets, a, b = case.make_inputs()
        analytic = compute_split(rank, world_size, case)[2]

        def loss(full: torch.Tensor) -> torch.Tensor:
            logprobs, entropy = compute_logprobs_and_entropy(
                full.chunk(world_size, dim=1)[rank], targets, vocab_size=case.vocab_size,
                temperature=case.temperature, tp_group=dist.group.WORLD)
            return logprobs * a + entropy * b  # [t]: rows are independent of each other

        columns = []
        for column in range(case.padded_size):
            bump = torch.zeros_like(logits)
            bump[:, column] = step
            columns.append((loss(logits + bump) - loss(logits - bump)) / (2 * step))
        return analytic, torch.stack(columns, dim=1)

    results = run_ranks(differentiate, tp_size, timeout=60)
    analytic = torch.cat([result[0] for result in results], dim=1)
    torch.testing.assert_close(analytic, results[0][1], rtol=2e-3, atol=2e-3)


def test_each_output_can_be_differentiated_alone() -> None:
    """An entropy that only is logged gets no gradient; the one of the log-probs is softmax minus one-hot."""
    case = Case(11, 16, 1.0, torch.float32)

    def compute(rank: int, world_size: int) -> torch.Tensor:
        logits, targets, *_ = case.make_inputs()
        logits.requires_grad_()
        logprobs, _ = compute_logprobs_and_entropy(
            logits, targets, vocab_size=case.vocab_size, temperature=1.0, tp_group=dist.group.WORLD)
        logprobs.sum().backward()
        return logits.grad

    gradient = run_ranks(compute, 1, timeout=60)[0]
    logits, targets, *_ = case.make_inputs()
    expected = torch.zeros_like(logits)
    expected[:, :11] = torch.nn.functional.one_hot(targets, 11) - logits[:, :11].softmax(-1)
    torch.testing.assert_close(gradient, expected)
