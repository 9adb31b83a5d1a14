# SPDX-License-Identifier: Apache-2.0
"""Branches packed as prefix trees: shared tokens can be read back, and are computed once.

Models are left out (tests/training/test_prefix_trees.py), and so is fetching (test_experience.py).
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_rollouts import ROLLOUTS

from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Packer, Packing, TrainBatch
from megatron_rl.samples.branches import share_branches
from megatron_rl.samples.table import Holders, build_headers
from megatron_rl.types import Branch, Prompt, Rollout
from tools.benchmarks.bench_trees import ForkedEpisodes, count_unique_tokens

Groups = list[tuple[int, Rollout]]


def pack(rollouts: Groups, *, share_prompts: bool | str = "tree", budget: int = 10_000, **sizes: int) -> list[Packing]:
    """Pack the rollouts on every DP rank."""
    layout, packings = ParallelLayout(sizes.get("dp_size", 1)), []
    plan = SimpleNamespace(
        rollouts_per_minibatch=sizes.get("minibatch", 10_000), max_response_length=100, longest_sequence=10_000
    )
    config = ActorConfig(max_tokens_per_microbatch=budget, share_prompts=share_prompts)
    for dp_rank in range(layout.dp_size):
        model = SimpleNamespace(
            layout=layout,
            dp_rank=dp_rank,
            pad_multiple=sizes.get("pad_multiple", 1),
            microbatch_count_multiple=1,
            attention_ratio=1e-2,
            buckets=None,
        )
        headers = build_headers(rollouts, holder=0)
        packer = Packer(model, config, plan, AlgorithmConfig(), torch.device("cpu"))
        packings.append(packer.pack(headers, partial(find_branches, rollouts, dp_rank)))
    return packings


def find_branches(rollouts: Groups, dp_rank: int, wanted: Holders) -> dict[int, Branch]:
    branches = [branch for _, rollout in rollouts for branch in rollout.branches]
    return {index: branches[index] for index in np.flatnonzero(wanted.replica_of == dp_rank).tolist()}


@st.composite
def draw_rollouts(draw: st.DrawFn) -> Groups:
    """Branches over an alphabet of two letters, which begin with the prompt or with a part of it."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6)
    rollouts = []
    for group, prompt in enumerate(draw(st.lists(tokens, min_size=1, max_size=3))):
        for sample in range(draw(st.integers(1, 3))):
            branches = []
            for _ in range(draw(st.integers(1, 4))):
                own = prompt[: draw(st.integers(0, len(prompt)))] + draw(tokens)
                common = next((i for i, (a, b) in enumerate(zip(own, prompt, strict=False)) if a != b), len(prompt))
                branch = Branch.of_response(np.array(own, np.int32), min(common, len(own) - 1))
                branch.sampled[:] &= np.array(draw(st.lists(st.booleans(), min_size=len(own), max_size=len(own))))
                branches.append(branch)
            task = Prompt(group, np.array(prompt, np.int32), "", None)
            rollouts.append((group, Rollout(task, sample, branches, [], "stop", reward=0.0)))
    return rollouts


@given(draw_rollouts(), st.integers(1, 3), st.integers(12, 40), st.integers(1, 3), st.integers(1, 4))
def test_trees_give_back_what_went_in(
    rollouts: Groups, dp_size: int, budget: int, pad_multiple: int, minibatch: int
) -> None:
    """Every branch is in one microbatch, has a row per token behind its prompt, and is seen whole from each of them."""
    branches, found = [branch for _, rollout in rollouts for branch in rollout.branches], []
    packings = pack(rollouts, budget=budget, dp_size=dp_size, pad_multiple=pad_multiple, minibatch=minibatch)
    for packing in packings:
        for part in packing.batch.microbatches():
            assert part.num_computed % pad_multiple == 0 and part.num_computed < budget + pad_multiple
            found += check_microbatch(part, branches)
    assert sorted(found) == list(range(len(branches)))
    learned = sum(int(packing.batch.loss_mask.sum()) for packing in packings)
    assert learned == sum(branch.num_loss_tokens for branch in branches)


def check_microbatch(part: TrainBatch, branches: list[Branch]) -> list[int]:
    """The branches of a microbatch, whose rows, predecessors and keys are compared with them."""
    (piece,), ids = part.slices, part.sequence_ids
    computed = torch.arange(len(part.tokens)) if piece.computed is None else piece.computed
    assert len(computed) == part.num_computed == piece.cu_seqlens[-1]
    tokens, positions = part.tokens[computed], part.position_ids[computed]
    keys = computed.new_tensor(range(len(computed))) if piece.keys is None else piece.keys.index
    bounds = piece.cu_seqlens if piece.keys is None else piece.keys.cu_seqlens
    seen = [keys[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
    for segment, path in enumerate(seen):
        start, stop = piece.cu_seqlens[segment : segment + 2].tolist()
        assert path[start - stop :].tolist() == list(range(start, stop)), "its own rows come last"
        assert positions[path].tolist() == list(range(len(path)))
    learned = torch.zeros(len(computed), dtype=torch.bool)
    members = [i for i in ids.unique().tolist() if i >= 0]
    for index in members:
        branch, rows = branches[index], (ids == index).nonzero()[:, 0]
        first = int(part.position_ids[rows[0]])
        assert rows.tolist() == list(range(int(rows[0]), int(rows[0]) + len(rows))), "one after another"
        assert first <= branch.num_prompt_tokens
        assert part.position_ids[rows].tolist() == list(range(first, len(branch.tokens)))
        assert part.tokens[rows].tolist() == branch.tokens[first:].tolist()
        mask = branch.sampled & (np.arange(len(branch.tokens)) > 0)
        assert part.loss_mask[rows].tolist() == mask[first:].tolist() and not mask[:first].any()
        path = next(path for path in seen if tokens[path].tolist()[: len(branch.tokens)] == branch.tokens.tolist())
        expected = path[(part.position_ids[rows] - 1).clamp(min=0)]
        assert tokens[part.predecessors[rows]].tolist() == tokens[expected].tolist()
        assert positions[part.predecessors[rows]].tolist() == positions[expected].tolist()
        own = path[: len(branch.tokens)]
        learned[own] |= torch.from_numpy(mask)
    if len(members) == 1:
        assert torch.equal(part.loss_mask[computed], learned)
    return members


def test_a_row_in_the_loss_is_given_for_those_that_share_it() -> None:
    """The second branch was sampled at a row that the computed first one was not: routers count rows in the loss."""
    tokens = np.array([1, 2, 3, 4], np.int32)
    branches = [Branch.of_response(tokens, 1), Branch.of_response(np.append(tokens[:3], 9).astype(np.int32), 1)]
    branches[0].sampled[:3] = False
    task = Prompt(0, tokens[:1], "", None)
    (packing,) = pack([(0, Rollout(task, 0, branches, [], "stop", reward=0.0))])
    batch = packing.batch
    assert batch.tokens.tolist() == [1, 2, 3, 4, 2, 3, 9] and batch.sequence_ids.tolist() == [0] * 4 + [1] * 3
    assert batch.slices[0].computed.tolist() == [0, 4, 5, 3, 6] and batch.predecessors.tolist() == [0, 0, 1, 2, 0, 1, 2]
    assert batch.loss_mask.tolist() == [False, False, False, True, True, True, True]
    assert batch.slices[0].keys.index.tolist() == [0, 1, 2, 3, 0, 1, 2, 4]
    assert packing.starts.tolist() == [1, 4] and packing.lengths.tolist() == [3, 3]


def test_with_one_branch_per_rollout_trees_are_shared_prompts() -> None:
    trees, prompts = (pack(ROLLOUTS, share_prompts=share, budget=24, minibatch=2) for share in ("tree", True))
    for name in ("tokens", "position_ids", "predecessors", "loss_mask", "sequence_ids", "loss_weights"):
        assert torch.equal(getattr(trees[0].batch, name), getattr(prompts[0].batch, name)), name
    for tree, prompt in zip(trees[0].batch.slices, prompts[0].batch.slices, strict=True):
        assert tree.computed is None and (tree.start, tree.stop) == (prompt.start, prompt.stop)
        assert torch.equal(tree.cu_seqlens, prompt.cu_seqlens)
        assert (tree.keys is None) == (prompt.keys is None)
        assert tree.keys is None or torch.equal(tree.keys.index, prompt.keys.index)


@pytest.mark.parametrize("budget", [2000, 4096])
def test_eight_ways_of_eight_turns_are_computed_once(budget: int) -> None:
    """At most 1.05 times the nodes of their trees, in several microbatches; the metric gives the computed tokens."""
    rollouts = ForkedEpisodes().draw(10_000)
    assert all(len(rollout.branches) == 64 for _, rollout in rollouts)
    (packing,) = pack(rollouts, budget=budget)
    computed = sum(part.num_computed for part in packing.batch.microbatches())
    unique, whole = count_unique_tokens(rollouts), sum(len(b.tokens) for _, r in rollouts for b in r.branches)
    assert len(packing.batch.slices) >= 3 and computed / unique <= 1.05 and whole / unique > 3
    assert packing.metrics["packing/prefix_repeats"] == pytest.approx(computed / unique)


def test_branches_that_leave_the_prompt_come_behind_those_with_all_of_it() -> None:
    """The first of two rollouts forks with half of the prompt: the second one shares its prompt all the same."""
    prompt, rollouts = np.array([1, 2, 3, 4], np.int32), []
    for sample, endings in enumerate(([[3, 4, 5], [8, 9]], [[3, 4, 6]])):
        branches = [Branch.of_response(np.array([1, 2, *end], np.int32), 4 if end[0] == 3 else 2) for end in endings]
        rollouts.append((0, Rollout(Prompt(0, prompt, "", None), sample, branches, [], "stop", reward=0.0)))
    shared = share_branches(build_headers(rollouts, holder=0).rows)
    assert shared.places.tolist() == [0, 2, 1] and shared.num_shared.tolist() == [0, 4, 2]
