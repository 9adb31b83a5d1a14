# SPDX-License-Identifier: Apache-2.0
"""The share of prefix cache hits, and the largest loads; tests/engines/test_served.py tests the counts of engines."""

from __future__ import annotations

import numpy as np
import pytest

from distributed import run_ranks
from megatron_rl.engines.protocol import Request, Sampled, SamplingConfig
from megatron_rl.parallel.collectives import init_distributed, world
from megatron_rl.rollout.generation import OpenRequests


def work(rank: int, world_size: int, counts: list[list[int | None]]) -> dict[str, float]:
    """Requests of 10 tokens; rank 1 does not speak for its engine."""
    init_distributed(2)
    use, sampling = OpenRequests(), SamplingConfig(1.0, 4, ())
    use.add([Request(key, np.zeros(10, np.int32), 0, sampling) for key in range(len(counts[rank]))])
    for key, count in enumerate(counts[rank]):
        use.finish(Sampled(key, np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", num_cached=count))
    load = None if counts[rank] == [None] else {"cache": 0.2 * (rank + 1), "waiting": 2.0 * rank}
    return use.describe(rank != 1, world(), load)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (  # 12 of 30; 0.2 and 0.6, 0 and 4
            [[8, 0, None], [10], [4]],
            {"rollout/prefix_cache_hits": 0.4, "rollout/cache_max": 0.4, "rollout/waiting_max": 2.0},
        ),
        ([[None], [10], [None]], {}),  # engines without a cache, or without its counts
    ],
)
def test_share_of_what_engines_say(counts: list[list[int | None]], expected: dict[str, float]) -> None:
    assert run_ranks(work, 3, counts) == [pytest.approx(expected)] * 3
