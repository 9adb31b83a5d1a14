# SPDX-License-Identifier: Apache-2.0
"""Heads on hidden states in both TP distributions: every gradient equals that of a single rank, in float64.

Not covered: the model in front of the heads (test_gpt.py), and Megatron's use of the weight's marks
(tests/training/test_critic.py compares the global gradient norm).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.models.gpt import build_transformer_config
from megatron_rl.models.other_stages import ScoreHead
from megatron_rl.models.stages import gather_for_shards
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.parallel.vocab_parallel import OutputSoftmax, compute_linear_logprobs_and_entropy
from shards import make_shape

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE, PADDED_SIZE = 8, 24, 13, 16
CLOSE = dict(rtol=1e-12, atol=1e-12)


def draw(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def take_rows(full: torch.Tensor, sequence_parallel: bool, world_size: int, rank: int) -> torch.Tensor:
    """A rank's positions: all of them, or its part under sequence parallelism."""
    return full.chunk(world_size)[rank].clone() if sequence_parallel else full.clone()


LAYOUTS = [(1, False), (2, False), (2, True), (4, True)]


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), LAYOUTS)
def test_gradients_of_a_split_output_layer(tp_size: int, sequence_parallel: bool) -> None:
    """Hidden states [t, 1, h] or [t/tp, 1, h]; the parts of the sum over the vocabulary are added up in backward."""
    targets = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5))
    hidden, weight = draw(NUM_TOKENS, 1, HIDDEN_SIZE, seed=1), draw(PADDED_SIZE, HIDDEN_SIZE, seed=2) / 4
    factors = draw(2, NUM_TOKENS, seed=3)

    def run(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = take_rows(hidden, sequence_parallel, world_size, rank).requires_grad_()
        rows = weight.chunk(world_size)[rank].clone().requires_grad_()
        logprobs, entropy = compute_linear_logprobs_and_entropy(
            gather_for_shards(x, sequence_parallel=sequence_parallel, tp_group=dist.group.WORLD)[:, 0],
            rows,
            targets,
            OutputSoftmax(vocab_size=VOCAB_SIZE, temperature=0.8, tp_group=dist.group.WORLD, chunk_tokens=3),
        )
        (logprobs @ factors[0] + entropy @ factors[1]).backward()
        return x.grad, rows.grad

    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_p = (x[:, 0] @ w[:VOCAB_SIZE].t() / 0.8).log_softmax(-1)
    logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (logprobs @ factors[0] + entropy @ factors[1]).backward()
    found = run_ranks(run, tp_size, timeout=60)
    for rank, (x_gradient, _) in enumerate(found):
        torch.testing.assert_close(x_gradient, take_rows(x.grad, sequence_parallel, tp_size, rank), **CLOSE)
    torch.testing.assert_close(torch.cat([rows_gradient for _, rows_gradient in found]), w.grad, **CLOSE)


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), LAYOUTS)
def test_gradients_of_a_replicated_score_head(tp_size: int, sequence_parallel: bool) -> None:
    """The weight's gradient is whole on every rank, or under sequence parallelism a part, consistent with its mark.

    Scores are made in float32.
    """
    hidden, weight, factors = draw(NUM_TOKENS, 1, HIDDEN_SIZE, seed=1), draw(1, HIDDEN_SIZE, seed=2), draw(8, seed=3)

    def run(rank: int, world_size: int) -> list[torch.Tensor]:
        config = build_transformer_config(
            make_shape(),
            ParallelLayout(world_size, tp_size=world_size),
            dtype=torch.float64,
            sequence_parallel=sequence_parallel,
        )
        head = ScoreHead(config, dist.group.WORLD)
        assert head.weight.shape == (1, HIDDEN_SIZE) and not head.weight.any()
        assert head.weight.sequence_parallel is sequence_parallel and head.weight.tensor_model_parallel is False
        head.weight.data.copy_(weight)
        x = take_rows(hidden, sequence_parallel, world_size, rank).requires_grad_()
        scores = head(x)
        (scores @ factors.float()).backward()
        return [scores.detach(), x.grad, head.weight.grad]

    found = run_ranks(run, tp_size, timeout=60)
    close = dict(rtol=1e-5, atol=1e-5, check_dtype=False)
    weight_gradient = factors @ hidden[:, 0]
    for rank, (scores, x_gradient, w_gradient) in enumerate(found):
        assert scores.dtype == torch.float32 and torch.equal(scores, found[0][0])
        torch.testing.assert_close(scores, hidden[:, 0] @ weight[0], **close)
        expected = take_rows(factors[:, None, None] * weight, sequence_parallel, tp_size, rank)
        torch.testing.assert_close(x_gradient, expected, **close)
        if not sequence_parallel:
            torch.testing.assert_close(w_gradient[0], weight_gradient, **close)
    if sequence_parallel:
        torch.testing.assert_close(sum(w for *_, w in found)[0], weight_gradient, **close)
