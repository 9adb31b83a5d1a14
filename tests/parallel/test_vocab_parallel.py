# SPDX-License-Identifier: Apache-2.0
"""Log-probs, entropy and gradient of a split vocabulary against autograd's log_softmax of the whole one in float64.

The shards live in one process here; that ranks gather them is tested in test_chunked_logprobs.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megatron_rl.parallel.vocab_parallel import (
    VocabShard,
    compute_logits_gradient,
    compute_summary,
    find_vocab_shard,
    merge_summaries,
)

NUM_TOKENS = 6


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison; columns beyond `vocab_size` are padding with tempting values."""

    vocab_size: int
    padded_size: int
    scale: float = 3.0
    dtype: torch.dtype = torch.float32

    def make_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scaled logits [t, v], targets and the weights of both outputs in the loss."""
        generator = torch.Generator().manual_seed(7)
        z = self.scale * torch.randn(NUM_TOKENS, self.padded_size, generator=generator, dtype=self.dtype)
        z[:, self.vocab_size :] = 10 * self.scale
        targets = torch.randint(0, self.vocab_size, (NUM_TOKENS,), generator=generator)
        a, b = torch.randn(2, NUM_TOKENS, generator=generator, dtype=self.dtype)
        return z, targets, a, b

    def make_reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs, entropy and gradient of their weighted sum, all float64 and unsplit."""
        z, targets, a, b = self.make_inputs()
        z = z.double().requires_grad_()
        log_p = torch.log_softmax(z[:, : self.vocab_size], dim=-1)
        logprobs = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        (logprobs @ a.double() + entropy @ b.double()).backward()
        return logprobs.detach(), entropy.detach(), z.grad


def run_split(case: Case, tp_size: int, with_entropy: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs [t], entropy [t] and the gradient [t, v] put together from all shards (0 on padding)."""
    z, targets, a, b = case.make_inputs()
    width = case.padded_size // tp_size
    shards = [find_vocab_shard(case.vocab_size, width, rank) for rank in range(tp_size)]
    parts = [z[:, s.start : s.start + s.width] for s in shards]
    summaries = torch.stack([compute_summary(part.clone(), targets, s) for part, s in zip(parts, shards, strict=True)])
    logprobs, entropy, lse = merge_summaries(summaries)
    gradient = torch.zeros_like(z)
    for part, s in zip(parts, shards, strict=True):
        gradient[:, s.start : s.start + s.width] = compute_logits_gradient(
            part.clone(),
            targets,
            s,
            lse=lse,
            entropy=entropy,
            grad_logprobs=a,
            grad_entropy=b if with_entropy else None,
        )
    return logprobs, entropy, gradient


CASES = [
    Case(16, 16),
    Case(11, 16),  # over 4 ranks the last has padding only, the third both
    Case(4, 16),  # over 4 ranks three have padding only
    Case(11, 16, scale=1e3),  # exp() of the raw logits overflows
    Case(11, 16, dtype=torch.float64),
    Case(1, 4),  # a certain token: probability 1, entropy 0
]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradient_equal_the_unsplit_ones(case: Case, tp_size: int) -> None:
    """float64 inputs are computed in float64: there the formula itself is checked, to 12 digits."""
    logprobs, entropy, gradient = run_split(case, tp_size)
    expected_logprobs, expected_entropy, expected_gradient = case.make_reference()
    assert logprobs.dtype == entropy.dtype == gradient.dtype == case.dtype
    digits = 1e-12 if case.dtype == torch.float64 else 1e-5
    close = dict(rtol=digits, atol=digits * case.scale / 3.0, check_dtype=False)
    torch.testing.assert_close(logprobs, expected_logprobs, **close)
    torch.testing.assert_close(entropy, expected_entropy, **close)
    torch.testing.assert_close(gradient, expected_gradient, **close)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_gradient_of_the_logprobs_alone_is_one_hot_minus_softmax(tp_size: int) -> None:
    case = Case(11, 16)
    z, targets, a, _ = case.make_inputs()
    _, _, gradient = run_split(case, tp_size, with_entropy=False)
    expected = torch.zeros_like(z)
    expected[:, :11] = torch.nn.functional.one_hot(targets, 11) - z[:, :11].softmax(-1)
    torch.testing.assert_close(gradient, a[:, None] * expected)


def test_shards_cover_the_vocabulary_once() -> None:
    """11 tokens in 4 times 4 columns: padding is in no shard."""
    shards = [find_vocab_shard(11, 4, rank) for rank in range(4)]
    assert shards == [VocabShard(0, 4), VocabShard(4, 4), VocabShard(8, 3), VocabShard(12, 0)]
    targets = torch.tensor([0, 3, 4, 10])
    located = [shard.locate(targets) for shard in shards]
    assert [is_mine.tolist() for _, is_mine in located] == [
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
        [False] * 4,
    ]
    assert [columns.tolist() for columns, _ in located] == [[0, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 2], [0] * 4]
