# SPDX-License-Identifier: Apache-2.0
"""Headers: built from rollouts, gathered over ranks, chosen by group, and counted by rollout."""

from __future__ import annotations

import time
from hashlib import blake2b

import numpy as np
import pytest
import torch.distributed as dist
from sample_rollouts import ROLLOUTS, make_prompt, make_rollout, split

from distributed import run_ranks
from megatron_rl.samples.table import (
    HEADER,
    Headers,
    build_headers,
    gather_headers,
    join_headers,
    merge_names,
)


def test_a_header_is_small_and_says_what_decides() -> None:
    headers = build_headers(reversed(ROLLOUTS), holder=2, mask_truncated=True, with_answers=True)
    assert HEADER.itemsize <= 80
    assert headers["group"].tolist() == [0, 0, 1, 1] and headers["rollout"].tolist() == [0, 1, 2, 3]
    assert headers["num_prompt_tokens"].tolist() == [7, 7, 5, 5] and headers["num_tokens"].tolist() == [11, 13, 8, 6]
    assert headers["num_sampled"].tolist() == [4, 6, 3, 1] and headers.num_loss_tokens.tolist() == [4, 0, 3, 1]
    assert headers["last_version"].tolist() == headers["first_version"].tolist() == [7] * 4
    assert headers["reward"].tolist() == [0.5, 1.0, -1.0, 0.25] and set(headers["holder"]) == {2}
    hashes = {text: int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") for text in "01"}
    assert headers["answer"].tolist() == [hashes[text] for text in "1001"]
    assert headers.reported(1) == {"a": 2.0, "overlong": -1.0} and headers.reported(3) == {"b": 4.0, "overlong": 0.0}
    assert list(headers.reported(2)) == ["b", "overlong"], "in the order in which the reward reports them"


def _gather(rank: int, world_size: int) -> tuple[list[tuple], list[str], list[list[float]], int, int]:
    mine = [] if rank == 2 else ROLLOUTS[rank::3]  # ranks 0 and 1 have one or two, rank 2 has none
    if rank == 1:
        mine = mine + [ROLLOUTS[2]]
    headers, received = gather_headers(build_headers(mine, holder=rank), dist.group.WORLD)
    sent = len(build_headers(mine, holder=rank)) * (HEADER.itemsize + 8 * len(headers.names))
    return headers.rows.tolist(), list(headers.names), headers.components.tolist(), received, sent


def test_every_rank_gets_the_same_table() -> None:
    found = run_ranks(_gather, 3)
    expected = build_headers(ROLLOUTS, holder=0)
    for rows, names, components, received, sent in found:
        assert (rows, names) == (found[0][0], found[0][1])
        got = Headers(np.array(rows, HEADER), tuple(names), np.array(components))
        for field in set(HEADER.names) - {"holder"}:
            assert got[field].tolist() == expected[field].tolist(), field
        assert got["holder"].tolist() == [0, 1, 1, 0]
        for name in ("a", "b", "overlong"):
            np.testing.assert_array_equal(got.component(name), expected.component(name))
        texts = received - (4 * (HEADER.itemsize + 24) - sent)
        assert 0 <= texts < 100, "rows of others, and names of components"


@pytest.mark.parametrize(
    ("lists", "merged"),
    [
        ([["a", "overlong"], ["b", "overlong"]], ["b", "a", "overlong"]),
        ([["a", "b"], ["b", "a"]], ["a", "b"]),
        ([[], ["x"]], ["x"]),
    ],
)
def test_names_keep_their_order(lists: list[list[str]], merged: list[str]) -> None:
    assert merge_names(lists) == tuple(merged)


def test_groups_of_two_generations_are_chosen() -> None:
    first = build_headers(ROLLOUTS, holder=0)
    prompt = make_prompt(9)
    second = build_headers([(0, split(make_rollout(prompt, 0, 6, 2.0, c=1.0), (2, 4)))], holder=1)
    joined = join_headers([first, second])
    assert joined["group"].tolist() == [0, 0, 1, 1, 2, 2] and joined["rollout"].tolist() == [0, 1, 2, 3, 4, 4]
    chosen, order = joined.select_groups([2, 0])
    assert order.tolist() == [4, 5, 0, 1] and chosen["prompt_id"].tolist() == [9, 9, 5, 5]
    assert chosen["group"].tolist() == [0, 0, 1, 1] and chosen["rollout"].tolist() == [0, 0, 1, 2]
    assert chosen.group_sizes.tolist() == [1, 2] and chosen.rollouts["reward"].tolist() == [2.0, 0.5, 1.0]
    assert chosen.sum_per_rollout(chosen.num_loss_tokens).tolist() == [6, 4, 6]
    assert chosen.reported(0) == {"c": 1.0} and chosen.reported(3) == {"a": 2.0, "overlong": -1.0}
    more = chosen.rescore(np.array([1.0, 2.0, 3.0]), "model", np.array([0.1, 0.2, 0.3]))
    assert more["reward"].tolist() == [1.0, 1.0, 2.0, 3.0] and more.component("model").tolist() == [0.1, 0.1, 0.2, 0.3]


def test_a_table_of_8192_sequences_takes_no_time() -> None:
    """The bound is of the order of magnitude; every rank numbers and chooses once per step."""
    rows = np.zeros(8192, HEADER)
    rows["group"], rows["sample_index"] = np.repeat(np.arange(512), 16), np.tile(np.arange(16), 512)
    rows["rollout"] = np.arange(8192)
    headers = Headers(rows, ("x",), np.zeros((8192, 1)))
    start = time.perf_counter()
    joined = join_headers([headers, headers])
    chosen, _ = joined.select_groups(range(0, 1024, 2))
    assert len(chosen.rollouts) == 8192 and chosen.group_sizes.tolist() == [16] * 512
    seconds = time.perf_counter() - start
    print(f"join, choose, number: {1000 * seconds:.1f} ms")
    assert seconds < 0.5
