# SPDX-License-Identifier: Apache-2.0
"""Products and log-softmax whose rows keep their bits, whatever their number."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.parallel import batch_invariant
from megatron_rl.parallel.batch_invariant import compute_all_logprobs, find_variance, multiply
from megatron_rl.parallel.vocab_parallel import (
    compute_summary,
    find_vocab_shard,
    merge_summaries,
)


@pytest.mark.parametrize(("hidden", "width"), [(64, 96), (128, 517), (640, 128)])
def test_a_row_has_the_same_bits_in_any_company(hidden: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((300, hidden), (width, hidden), (width,)))
    whole = x @ weight.t() + bias
    for count in (1, 2, 3, 5, 15, 16, 17, 100):
        assert torch.equal(multiply(x[7 : 7 + count].contiguous(), weight, bias), whole[7 : 7 + count])
    assert torch.equal(multiply(x.view(3, 100, hidden), weight, bias), whole.view(3, 100, width))


def test_a_machine_on_which_rows_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the padding the trial meets the kernel for few rows; parts that are not the whole are reported."""
    shapes = [(640, 128, 64, 64), (640, 128)]
    assert find_variance(shapes) is None

    def multiply_with_an_error(x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
        return x @ weight.t() + (1e-3 if len(x) == 37 else 0.0)

    monkeypatch.setattr(batch_invariant, "multiply", multiply_with_an_error)
    assert find_variance(shapes) == "37 of 256 rows times [256, 640] have other bits"


@pytest.mark.parametrize(("vocab_size", "num_columns"), [(517, 576), (517, 288), (40, 32), (30, 32)])
def test_the_whole_vocabulary_has_the_log_probs_of_its_shards(vocab_size: int, num_columns: int) -> None:
    """An engine's result from gathered logits equals the TP ranks' result from their columns; few rows and many."""
    z = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    targets = torch.arange(40) * 7 % vocab_size
    summaries = []
    for rank in range(2):
        shard = find_vocab_shard(vocab_size, num_columns, rank)
        summaries.append(compute_summary(z[:, shard.start : shard.start + shard.width].clone(), targets, shard))
    expected = merge_summaries(torch.stack(summaries))[0]
    for count in (1, 3, 40):
        found = compute_all_logprobs(z[:count], num_columns)
        assert torch.equal(found.gather(1, targets[:count, None])[:, 0], expected[:count])
    torch.testing.assert_close(expected, z.log_softmax(-1).gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
