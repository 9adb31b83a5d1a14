# SPDX-License-Identifier: Apache-2.0
"""Samples on several ranks: tokens stay with their engines, roles in different layouts fetch their share.

Models are left out: results of roles are written by hand. Whole runs are in tests/run.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sample_rollouts import make_prompt, make_rollout

from distributed import run_ranks
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Packer
from megatron_rl.samples.experience import Column, Experience, describe_updates, replicate
from megatron_rl.samples.table import Holders, Payload, build_headers, gather_headers, index_branches
from megatron_rl.types import Rollout, UserError

GROUPS, GROUP_SIZE = 8, 4
ALGORITHM = AlgorithmConfig(mask_truncated=True)
TOKEN_BYTES = 4 + 4 + 1  # token, log-prob, flag


def draw() -> list[tuple[int, Rollout]]:
    """Eight groups of four; responses of 1 to 40 tokens; responses of more than 4 tokens are cut at the limit."""
    rng = np.random.default_rng(0)
    prompts = [make_prompt(i) for i in range(GROUPS)]
    return [
        (g, make_rollout(prompts[g], s, int(rng.integers(1, 41)), float(s), digits=float(g)))
        for g in range(GROUPS)
        for s in range(GROUP_SIZE)
    ]


def collect(rank: int, world_size: int, engine_tp: int, **options: Any) -> Experience:
    """As a collector does it: group g is on engine g modulo their number, whose ranks share the scoring."""
    engine, place = divmod(rank, engine_tp)
    held = [(g, r) for g, r in draw() if g % (world_size // engine_tp) == engine]
    headers, num_bytes = gather_headers(
        build_headers(held[place::engine_tp], holder=engine, **options), dist.group.WORLD
    )
    ranks = np.arange(world_size).reshape(-1, engine_tp)
    prompts = [make_prompt(i) for i in range(GROUPS)]
    return Experience(headers, prompts, Payload(index_branches(held, headers), ranks, num_bytes), dist.group.WORLD)


def make_packer(rank: int, layout: ParallelLayout, share_prompts: bool = False) -> Packer:
    dp_rank = layout.coordinates(rank).dp if rank in layout.ranks else None
    model = SimpleNamespace(
        layout=layout, dp_rank=dp_rank, pad_multiple=4, microbatch_count_multiple=1, attention_ratio=0.0, buckets=None
    )
    plan = SimpleNamespace(rollouts_per_minibatch=16, max_response_length=40, longest_sequence=80)
    config = ActorConfig(max_tokens_per_microbatch=256, share_prompts=share_prompts)
    return Packer(model, config, plan, ALGORITHM, torch.device("cpu"))


def _measure(rank: int, world_size: int, tp: int, engine_tp: int) -> tuple[int, int, int]:
    samples = collect(rank, world_size, engine_tp)
    packer = make_packer(rank, ParallelLayout(world_size, tp_size=tp))
    batch = samples.read(packer)
    assert samples.read(packer).tokens is batch.tokens, "packed once"
    mine = batch.sequence_ids.unique()
    share = TOKEN_BYTES * int(samples.headers["num_tokens"][mine[mine >= 0].numpy()].sum())
    held = samples.headers["holder"][mine[mine >= 0].numpy()] == rank // engine_tp
    most = samples.measure_bytes()["samples/bytes_per_rank"]
    assert samples.num_bytes <= most
    return samples.num_bytes, share, int(held.sum())


@pytest.mark.parametrize(("world_size", "tp", "engine_tp"), [(4, 2, 1), (4, 1, 2), (8, 2, 4), (8, 1, 1)])
def test_a_rank_receives_its_own_share(world_size: int, tp: int, engine_tp: int) -> None:
    """At most its training tokens and 100 bytes per sequence of the step; less if it has some of them already."""
    found = run_ranks(_measure, world_size, tp, engine_tp)
    for received, share, _ in found:
        assert received <= 1.1 * share + 100 * GROUPS * GROUP_SIZE
    assert sum(held for *_, held in found) > 0
    everything = TOKEN_BYTES * sum(len(r.branches[0].tokens) for _, r in draw())
    assert max(share for _, share, _ in found) < 0.7 * everything, "a share is not everything"


def _train(rank: int, world_size: int, share_prompts: bool) -> dict[str, Any]:
    """An actor on TP 2 x DP 2 and a critic on PP 2 x DP 2; their results encode rollout and position."""
    samples = collect(rank, world_size, 1, mask_truncated=True)
    actor = make_packer(rank, ParallelLayout(4, tp_size=2), share_prompts)
    critic = make_packer(rank, ParallelLayout(4, pp_size=2))
    batch, other = samples.read(actor), samples.read(critic)

    def name_tokens(b: Any, factor: float) -> torch.Tensor:
        return torch.where(b.loss_mask, factor * (100.0 * b.sequence_ids + b.position_ids), 0.0)

    samples.values = Column(name_tokens(other, 1.0), samples.pack(critic))
    samples.old_logprobs = Column(name_tokens(batch, -1.0), samples.pack(actor))
    before = samples.num_bytes
    read = samples.read(actor, ["values", "old_logprobs", "returns"])
    moved = samples.num_bytes - before
    assert torch.equal(read.values, name_tokens(batch, 1.0)) and read.returns is None
    assert read.old_logprobs is samples.old_logprobs.values
    assert samples.read(actor, ["values"]).values is read.values and samples.num_bytes == before + moved
    assert torch.equal(samples.read(critic, ["old_logprobs"]).old_logprobs, name_tokens(other, -1.0))
    with pytest.raises(UserError, match="samples.values is set already"):
        samples.values = samples.old_logprobs
    sizes = samples.read(actor).minibatch_sizes
    values = {"values": samples.columns["values"]}
    logged = samples.fetch_rollouts([0, 1, 2], lambda tokens: f"{len(tokens)} tokens", values)
    everywhere = samples.fetch_rollouts(range(len(samples.rewards)), str, on_all=True)
    some = samples.fetch_rollouts([1, 5, 6], str)
    return {
        "minibatches": len(sizes),
        "logged": [
            (
                r.prompt.prompt_id,
                r.sample_index,
                r.response_tokens.tolist(),
                r.response,
                r.reward,
                r.reward_components,
                r.finish_reason,
                r.policy_version,
                len(r.turns),
                {k: v.tolist() for k, v in values.items()},
            )
            for r, values in logged
        ],
        "some": [(r.prompt.prompt_id, r.sample_index) for r, _ in some],
        "everywhere": [(r.prompt.prompt_id, r.sample_index) for r, _ in everywhere],
    }


@pytest.mark.parametrize("share_prompts", [False, True])
def test_columns_travel_between_roles_and_to_the_writer(share_prompts: bool) -> None:
    found = run_ranks(_train, 4, share_prompts)
    writer, *others = (rank["logged"] for rank in found)
    assert others == [[]] * 3 and len(writer) == 3
    for index, (row, (group, rollout)) in enumerate(zip(writer, draw(), strict=False)):
        length, start = len(rollout.response_tokens), 2 + group
        is_cut = rollout.finish_reason == "length"
        assert row[:8] == (
            group,
            index,
            rollout.response_tokens.tolist(),
            f"{length} tokens",
            float(index),
            {"digits": float(group)},
            rollout.finish_reason,
            7,
        )
        assert row[8] == 1 and row[9]["values"] == (
            [] if is_cut else [100.0 * index + p for p in range(start, start + length)]
        )
    expected = [(g, s) for g in range(GROUPS) for s in range(GROUP_SIZE)]
    assert [rank["some"] for rank in found] == [[expected[number] for number in (1, 5, 6)], [], [], []]
    assert [(rank["minibatches"], rank["everywhere"]) for rank in found] == [(2, expected)] * 4


def _fetch_turn_rewards(rank: int, world_size: int) -> list[float]:
    """As with an environment, whose turn rewards only the first rank of each engine has."""
    engine, place = divmod(rank, 2)
    held = [(g, r) for g, r in draw() if g % 2 == engine]
    if not place:
        for _, rollout in held:
            rewards = np.zeros(len(rollout.branches[0].tokens), np.float32)
            rewards[-1] = 1 + rollout.sample_index
            rollout.branches[:] = [replace(rollout.branches[0], rewards=rewards)]
    headers, num_bytes = gather_headers(build_headers([] if place else held, holder=engine), dist.group.WORLD)
    payload = Payload(index_branches(held, headers), np.arange(world_size).reshape(-1, 2), num_bytes)
    samples = Experience(headers, [make_prompt(i) for i in range(GROUPS)], payload, dist.group.WORLD)
    found = samples.fetch_rollouts(range(GROUPS * GROUP_SIZE), str, on_all=True)
    return [float(rollout.branches[0].rewards.sum()) for rollout, _ in found]


def test_rewards_of_turns_come_from_the_rank_that_has_the_environment() -> None:
    assert run_ranks(_fetch_turn_rewards, 4) == [[1.0, 2.0, 3.0, 4.0] * GROUPS] * 4


def _record(rank: int, world_size: int) -> list[dict[str, list[float]]]:
    """Two replicas of two stages, of which the last one records updates; every rank has all rollouts."""
    samples = replicate(draw(), [make_prompt(i) for i in range(GROUPS)], dist.group.WORLD)
    packer = make_packer(rank, ParallelLayout(4, pp_size=2))
    packing, batch = samples.pack(packer), samples.read(packer)
    assert samples.num_bytes == 0
    now = torch.full_like(batch.rollout_logprobs, torch.nan)
    entropy = now.clone()
    if rank >= 2:  # of the last stage: all but the second rollout is used
        used = batch.sequence_ids != 1
        now[used], entropy[used] = np.log(1.5), 3.0
    batch = replace(
        batch,
        old_logprobs=torch.zeros_like(now),
        advantages=torch.where(batch.sequence_ids == 0, 1.0, -1.0),
        update_logprobs=now,
        update_entropy=entropy,
    )
    last = Holders(packing.holders.replica_of, np.array([[2], [3]]))
    found = describe_updates(batch, AlgorithmConfig())
    columns = {name: Column(values, packing, last) for name, values in found.items()}
    return [
        {name: x.tolist() for name, x in values.items()} for _, values in samples.fetch_rollouts(range(3), str, columns)
    ]


def test_what_the_last_stage_records_is_logged() -> None:
    """PPO clips a ratio of 1.5 for positive advantages; NaN before the first use."""
    first, second, third = run_ranks(_record, 4)[0]
    lengths = [len(rollout.response_tokens) for _, rollout in draw()]
    assert first["ratio"] == pytest.approx([1.5] * lengths[0]) and first["entropy"] == [3.0] * lengths[0]
    assert first["clipped"] == [1.0] * lengths[0] and third["clipped"] == [0.0] * lengths[2]
    assert all(np.isnan(second[name]).all() and len(second[name]) == lengths[1] for name in second)
