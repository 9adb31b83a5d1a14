# SPDX-License-Identifier: Apache-2.0
"""Per-token values on their way into the rollout log: two DP replicas of two ranks, of which one speaks.

The rest of experience/ is tested through whole runs (tests/trainer/).
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.experience.columns import gather_token_values
from megatron_rl.experience.pack import pack_rollouts
from megatron_rl.packing.batch import build_train_batch, expand_to_tokens
from megatron_rl.types import Branch
from reward_samples import make_rollout

# Prompt of 2, responses of 3, 1, 2 and 4 tokens; that of rollout 1 is kept out of the loss.
RESPONSES = [3, 1, 2, 4]
ADVANTAGES = [1.0, 0.0, -1.0, 2.0]


def _gather(rank: int, world_size: int) -> dict[str, Any]:
    sequences = [Branch.of_response(np.arange(2 + n), 2) for n in RESPONSES]
    sequences[1] = replace(sequences[1], sampled=np.zeros(2 + RESPONSES[1], bool))
    plans = [((0, 1), [[[1]], [[0]]]), ((2, 3), [[[1, 0]], [[]]])]  # replica 0: rollout 1, then 3 and 2
    batch = build_train_batch(
        sequences, [1.0] * 4, plans, dp_rank=rank // 2, pad_multiple=4, device=torch.device("cpu"))
    batch.advantages = expand_to_tokens(ADVANTAGES, batch)
    batch.old_logprobs = -(10.0 * batch.sequence_ids + batch.position_ids)  # rollout 3, token 4: -34
    algorithm, is_owner = AlgorithmConfig(clip_eps_low=0.2, clip_eps_high=0.2), rank % 2 == 1
    before = gather_token_values(batch, 4, algorithm, is_owner, dist.group.WORLD)
    batch.record_updates()
    unused = gather_token_values(batch, 4, algorithm, is_owner, dist.group.WORLD)
    batch.values = batch.old_logprobs / 2
    if is_owner:  # as the last pipeline stage alone does
        for minibatch in batch.minibatches():
            for microbatch in minibatch.microbatches():
                microbatch.update_logprobs.copy_(microbatch.old_logprobs + math.log(1.5))
                microbatch.update_entropy.copy_(microbatch.position_ids)
    after = gather_token_values(batch, 3, algorithm, is_owner, dist.group.WORLD)
    nothing = gather_token_values(batch, 0, algorithm, is_owner, dist.group.WORLD)
    return dict(before=before, unused=unused, after=after, nothing=nothing)


def test_every_rank_gets_the_values_of_the_first_rollouts_in_order() -> None:
    for found in run_ranks(_gather, 4):
        assert [list(x) for x in found["before"]] == [["old_logprobs", "advantages"]] * 4
        assert [x["old_logprobs"].tolist() for x in found["before"]] == [
            [-2, -3, -4], [], [-22, -23], [-32, -33, -34, -35]]
        assert [x["advantages"].tolist() for x in found["before"]] == [[1] * 3, [], [-1] * 2, [2] * 4]
        assert all(np.isnan(x[name]).all() for x in found["unused"] for name in ("ratio", "clipped", "entropy"))
        assert [x["values"].tolist() for x in found["after"]] == [[-1, -1.5, -2], [], [-11, -11.5]]
        np.testing.assert_allclose(found["after"][0]["ratio"], 1.5, rtol=1e-6)
        assert [x["clipped"].tolist() for x in found["after"]] == [[1, 1, 1], [], [0, 0]], "PPO clips where A > 0"
        assert [x["entropy"].tolist() for x in found["after"]] == [[2, 3, 4], [], [2, 3]]
        assert found["nothing"] == []


@pytest.mark.parametrize("factor, denominator", [(None, 4 * 100.0), (32.0, 4 * 32.0)])
def test_loss_scale_factor_stands_in_for_the_longest_response(factor: float | None, denominator: float) -> None:
    """Weight of each token of the mode constant; layout and lengths of a role of one rank are written out."""
    role = SimpleNamespace(
        groups=SimpleNamespace(layout=SimpleNamespace(dp_size=1), at=SimpleNamespace(dp=0)), pad_multiple=1,
        microbatch_count_multiple=1, attention_ratio=0.0, buckets=None)
    plan = SimpleNamespace(rollouts_per_minibatch=4, max_response_length=100, longest_sequence=200)
    algorithm = AlgorithmConfig(loss_agg_mode="constant", loss_scale_factor=factor)
    rollouts = [make_rollout("x" * n, prompt_id=n) for n in RESPONSES]
    batch, _ = pack_rollouts(rollouts, plan, algorithm, role, ActorConfig(), torch.device("cpu"))
    assert batch.ledgers[0].denominator == denominator
    assert batch.loss_weights[batch.loss_mask].tolist() == pytest.approx([1 / denominator] * sum(RESPONSES))
