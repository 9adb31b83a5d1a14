# SPDX-License-Identifier: Apache-2.0
"""Packing of a role: planned from headers, counted by rollouts. Fetching is in test_experience.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sample_rollouts import ROLLOUTS, split

from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Packer, Packing, list_replicas, number_prompts
from megatron_rl.samples.table import Headers, Holders, build_headers
from megatron_rl.types import Branch, Rollout, RouteShape


def pack(rollouts: list[tuple[int, Rollout]], algorithm: AlgorithmConfig, size: int = 4) -> tuple[Headers, Packing]:
    """Pack on one rank, which holds everything."""
    model = SimpleNamespace(
        layout=ParallelLayout(1),
        dp_rank=0,
        pad_multiple=1,
        microbatch_count_multiple=1,
        attention_ratio=0.0,
        buckets=None,
    )
    plan = SimpleNamespace(rollouts_per_minibatch=size, max_response_length=100, longest_sequence=200)
    headers = build_headers(rollouts, holder=0, mask_truncated=algorithm.mask_truncated)

    def fetch_branches(wanted: Holders) -> dict[int, Branch]:
        branches = [branch for _, rollout in rollouts for branch in rollout.branches]
        assert (wanted.replica_of == 0).all()
        return dict(enumerate(branches))

    return headers, Packer(model, ActorConfig(), plan, algorithm, torch.device("cpu")).pack(headers, fetch_branches)


@pytest.mark.parametrize("factor, denominator", [(None, 4 * 100.0), (32.0, 4 * 32.0)])
def test_loss_scale_factor_stands_in_for_the_longest_response(factor: float | None, denominator: float) -> None:
    """Weight of each token of the mode constant."""
    _, packing = pack(ROLLOUTS, AlgorithmConfig(loss_agg_mode="constant", loss_scale_factor=factor))
    batch = packing.batch
    assert batch.ledgers[0].denominator == denominator
    assert batch.loss_weights[batch.loss_mask].tolist() == pytest.approx([1 / denominator] * 14)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
def test_branches_of_a_rollout_weigh_as_much_as_the_rollout(mode: str) -> None:
    """A rollout cut into branches with the same sampled tokens: every token keeps its weight."""
    algorithm = AlgorithmConfig(loss_agg_mode=mode)
    cut = [ROLLOUTS[0], (0, split(ROLLOUTS[1][1], (1, 2, 3))), *ROLLOUTS[2:]]
    (_, whole), (headers, parts) = pack(ROLLOUTS, algorithm, 2), pack(cut, algorithm, 2)
    assert headers["rollout"].tolist() == [0, 1, 1, 1, 2, 3]
    assert parts.batch.ledgers == whole.batch.ledgers and len(whole.batch.ledgers) == 2

    def weights_by_rollout(packing: Packing, rollout_of: np.ndarray) -> list[list[float]]:
        ids, mask = packing.batch.sequence_ids, packing.batch.loss_mask
        rollout = torch.from_numpy(rollout_of)[ids]
        return [sorted(packing.batch.loss_weights[mask & (rollout == i)].tolist()) for i in range(4)]

    assert weights_by_rollout(parts, headers["rollout"]) == weights_by_rollout(whole, np.arange(4))


def test_rows_of_the_tokens_behind_the_prompts() -> None:
    """With shared prompts, whose responses lie apart from them, and a response that is kept out of the loss."""
    headers, packing = pack(ROLLOUTS, AlgorithmConfig(mask_truncated=True))
    batch = packing.batch
    for order in ([0, 1, 2, 3], [3, 1], []):
        rows = packing.rows(np.array(order, np.int64))
        expected = [(i, headers["num_prompt_tokens"][i] + p) for i in order for p in range(packing.lengths[i])]
        assert list(zip(batch.sequence_ids[rows].tolist(), batch.position_ids[rows].tolist(), strict=True)) == expected
    assert not batch.loss_mask[batch.sequence_ids == 1].any() and batch.ledgers[0].num_tokens == 8


def test_a_prompt_is_shared_where_the_engine_routed_it_alike() -> None:
    """Of three responses to a prompt the last one's prompt went to other experts; routes follow their tokens."""
    shape, rollouts = RouteShape(1, 1, 8), []
    for sample in range(3):
        rollout = replace(ROLLOUTS[0][1], sample_index=sample)
        routes = shape.unknown(len(rollout.branches[0].tokens))
        routes[:-1] = 3 if sample == 2 else 5
        routes[rollout.branches[0].num_prompt_tokens : -1] = sample
        rollouts.append((0, replace(rollout, branches=[replace(rollout.branches[0], routes=routes)])))
    headers, packing = pack(rollouts, AlgorithmConfig())
    assert number_prompts(headers).tolist() in ([0, 0, 1], [1, 1, 2])
    batch, start = packing.batch, headers["num_prompt_tokens"][0]
    assert packing.routes is not None and int((batch.position_ids[batch.sequence_ids >= 0] == 0).sum()) == 2
    for sample in range(3):
        is_mine = batch.sequence_ids == sample
        found = packing.routes[is_mine & (batch.position_ids >= start), 0, 0].tolist()
        assert found == [sample] * (len(found) - 1) + [255]
    assert packing.routes[(batch.sequence_ids == 2) & (batch.position_ids < start)].unique().tolist() == [3]


def test_replicas_of_a_layout() -> None:
    for layout in (ParallelLayout(16, tp_size=2, pp_size=2, cp_size=2), ParallelLayout(8, tp_size=2)):
        replicas = list_replicas(layout)
        assert replicas.tolist() == [
            [rank for rank in range(layout.world_size) if layout.coordinates(rank).dp == dp]
            for dp in range(layout.dp_size)
        ]
