# SPDX-License-Identifier: Apache-2.0
"""A whole model over context parallel shards and shared prompts: log-probs and gradients of one rank, plain packing.

Two groups of three and two responses and a single sequence, of ragged lengths, are packed into one row, whose shards
are cut wherever they fall. Log-probs are scored as a role does it: hidden states of the predecessors in the own shard,
combined over the context parallel ranks. The loss is a weighted sum of the log-probs of the responses; its gradients,
summed over the context parallel ranks, are compared parameter by parameter with the run on one context parallel rank.

Not covered: pipeline parallelism (it does not touch attention), NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from role_setups import make_setup

from distributed import run_ranks
from megatron_rl.config.schema import ActorConfig
from megatron_rl.models.attention import build_packed_sequences, shard_rows
from megatron_rl.models.stages import combine_shards, gather_for_shards
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.parallel.vocab_parallel import OutputSoftmax, compute_linear_logprobs_and_entropy
from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.samples.prefix import share_prompts
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.types import Branch
from tiny_models import draw_tokens, save_tiny_model

PROMPT_LENGTHS, RESPONSE_LENGTHS, GROUP_OF = [9, 9, 9, 4, 4, 6], [5, 12, 1, 3, 8, 7], [0, 0, 0, 1, 1, 2]
NUM_SEQUENCES = len(GROUP_OF)


@dataclass(frozen=True)
class Case:
    """A layout and its enabled features."""

    tp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    shares_prompts: bool = False
    sequence_parallel: bool = False
    recompute: str = "none"

    @property
    def world_size(self) -> int:
        return self.tp_size * self.cp_size


@dataclass(frozen=True)
class Found:
    """Results of a rank: log-probs of each response (the same on all ranks) and gradients of its parameters."""

    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    rows: int


CASES = {
    "shared": Case(shares_prompts=True),
    "cp2": Case(cp_size=2),
    "cp4-shared": Case(cp_size=4, shares_prompts=True),  # two KV heads, each on two ranks
    "cp2-tp2-shared-selective": Case(2, 2, shares_prompts=True, recompute="selective"),
    "cp2-tp2-sp-full": Case(2, 2, sequence_parallel=True, recompute="full"),
    "cp4-tp2-sp-shared-full": Case(2, 4, shares_prompts=True, sequence_parallel=True, recompute="full"),
}


@cache
def draw_sequences() -> list[Branch]:
    """Random tokens; a group has one prompt."""
    prompts = draw_tokens([PROMPT_LENGTHS[GROUP_OF.index(g)] for g in range(3)])
    responses = draw_tokens(RESPONSE_LENGTHS, seed=1)
    return [
        Branch.of_response(np.concatenate([prompts[g], r]), len(prompts[g]))
        for g, r in zip(GROUP_OF, responses, strict=True)
    ]


def build_batch(case: Case) -> TrainBatch:
    """Return one microbatch with everything, padded to the layout's multiple."""
    lengths = [p + r for p, r in zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)]
    shared = share_prompts(GROUP_OF, PROMPT_LENGTHS) if case.shares_prompts else None
    plan = plan_microbatches(lengths, dp_size=1, max_tokens=100, shared=shared)
    return build_train_batch(
        draw_sequences(),
        np.ones(NUM_SEQUENCES),
        [(range(NUM_SEQUENCES), plan)],
        dp_rank=0,
        padding=Padding(case.cp_size * (case.tp_size if case.sequence_parallel else 1)),
        device=torch.device("cpu"),
        shared=shared,
    )


def run_case(rank: int, world_size: int, case: Case, path: Path) -> Found:
    """Forward and backward of one microbatch."""
    groups = build_groups(ParallelLayout(world_size, tp_size=case.tp_size, cp_size=case.cp_size, ep_size=case.ep_size))
    config = ActorConfig(sequence_parallel=case.sequence_parallel, recompute_granularity=case.recompute)
    policy = PackedModel(make_setup("reference", path, config, groups))
    policy.stages.requires_grad_(True)
    batch = build_batch(case)
    logprobs = score(policy, batch)
    weights = torch.cos(7.0 * batch.sequence_ids + batch.position_ids) * batch.loss_mask
    (weights * logprobs).sum().backward()
    responses = [logprobs[(batch.sequence_ids == i) & batch.loss_mask].detach() for i in range(NUM_SEQUENCES)]
    return Found(responses, sum_gradients(policy, case), len(batch.tokens))


def score(policy: PackedModel, batch: TrainBatch) -> torch.Tensor:
    """Log-probs [t] of the response tokens, 0 elsewhere."""
    groups, (piece,) = policy.groups, batch.slices
    mine = shard_rows(len(batch.tokens), groups.cp.size(), groups.cp.rank())
    packed = build_packed_sequences(
        piece, batch.position_ids, policy.shape, dtype=torch.float32, cp_size=groups.cp.size(), cp_rank=groups.cp.rank()
    )
    hidden = policy.stages[0](batch.tokens[None, mine], None, attention_mask=None, packed_seq_params=packed)
    hidden = gather_for_shards(  # [t/cp, h]
        hidden, sequence_parallel=policy.config.sequence_parallel, tp_group=groups.tp
    )[:, 0]
    is_mine = batch.loss_mask & (batch.predecessors >= mine.start) & (batch.predecessors < mine.stop)
    index = is_mine.nonzero()[:, 0]
    logprobs, _ = compute_linear_logprobs_and_entropy(
        hidden[batch.predecessors[index] - mine.start],
        policy.stages[0].output_weight,
        batch.tokens[index],
        OutputSoftmax(vocab_size=policy.shape.vocab_size, temperature=1.0, tp_group=groups.tp, chunk_tokens=64),
    )
    return combine_shards(logprobs, index, len(batch.tokens), groups.cp)


def sum_gradients(policy: PackedModel, case: Case) -> dict[str, torch.Tensor]:
    """Sum over the context parallel ranks, and over TP for parameters that Megatron's sequence parallelism splits.

    Experts are left out: with expert parallelism each rank has others.
    """
    gradients = {}
    for name, parameter in policy.stages[0].named_parameters():
        if ".experts." in name:
            continue
        gradient = parameter.grad.clone()
        dist.all_reduce(gradient, group=policy.groups.cp)
        is_partial = case.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        if case.tp_size > 1 and (is_partial or name.endswith(("q_layernorm.weight", "k_layernorm.weight"))):
            dist.all_reduce(gradient, group=policy.groups.tp)
        gradients[name] = gradient
    return gradients


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight query heads of two KV heads, with norms on both; dense, and a mixture of four experts."""
    result = {}
    for family in ("qwen3", "qwen3_moe"):
        result[family] = tmp_path_factory.mktemp(family)
        save_tiny_model(result[family], family, num_key_value_heads=2, num_hidden_layers=2)
    return result


@pytest.fixture(scope="module")
def references(paths: dict[str, Path]) -> dict[int, list[Found]]:
    """By TP size: plain packing on one context parallel rank."""
    return {tp_size: run_ranks(run_case, tp_size, Case(tp_size), paths["qwen3"]) for tp_size in (1, 2)}


def assert_equal(found: Found, expected: Found) -> None:
    """Log-probs of about -6 and gradients of up to 10 (relative to the largest of a parameter) to 1e-5."""
    for got, want in zip(found.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert found.gradients.keys() == expected.gradients.keys()
    for parameter, want in expected.gradients.items():
        gap = (found.gradients[parameter] - want).abs().max() / want.abs().max()
        assert gap <= 1e-5, (parameter, float(gap))


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_packing_on_one_rank(
    name: str, paths: dict[str, Path], references: dict[int, list[Found]]
) -> None:
    case = CASES[name]
    layout = ParallelLayout(case.world_size, tp_size=case.tp_size, cp_size=case.cp_size)
    for rank, found in enumerate(run_ranks(run_case, case.world_size, case, paths["qwen3"])):
        assert_equal(found, references[case.tp_size][layout.coordinates(rank).tp])


def test_experts_take_the_tokens_of_their_shard(paths: dict[str, Path]) -> None:
    """Two context parallel ranks own half of the experts each: tokens travel for attention and for their experts."""
    (expected,) = run_ranks(run_case, 1, Case(), paths["qwen3_moe"])
    for found in run_ranks(run_case, 2, Case(cp_size=2, ep_size=2, shares_prompts=True), paths["qwen3_moe"]):
        assert_equal(found, expected)


def test_shared_prompts_save_their_tokens(references: dict[int, list[Found]]) -> None:
    """Two of three prompts of 9 and one of two prompts of 4."""
    assert len(build_batch(Case(shares_prompts=True)).tokens) == references[1][0].rows - 2 * 9 - 4
