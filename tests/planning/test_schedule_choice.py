# SPDX-License-Identifier: Apache-2.0
"""The cost of a schedule for a job, and the recommended one.

Not covered: whether a cluster keeps to the figures.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planning_jobs import make_job, published_shape
from tools.planning.communication import Assumptions
from tools.planning.lengths import make_lognormal
from tools.planning.schedule_choice import Option, ScheduleChoice, choose_schedule, recommend
from tools.planning.schedules import Schedule, ScheduleTimes

TIMES = ScheduleTimes(1.0, 1.0, 0.0, None, 0.0, 0, 0.0)
LONG_TAIL = make_lognormal(1000, 1.2, 0.5)
BATCH = ("data.train_batch_size=32", "rollout.n=4", "rollout.max_num_seqs=64", "actor.max_tokens_per_microbatch=16384")


def choose(*overrides: str, nodes: int = 4, **cluster: float) -> ScheduleChoice:
    """8B on four nodes of 8 GPUs, 128 responses of at most 8192 tokens."""
    job = make_job(
        published_shape("Qwen3-8B"),
        *BATCH,
        "data.max_response_length=8192",
        "actor.tensor_model_parallel_size=8",
        "actor.recompute_granularity=full",
        *overrides,
        nodes=nodes,
        **cluster,
    )
    return choose_schedule(job, 1.0, LONG_TAIL, Assumptions())


def seconds(choice: ScheduleChoice) -> dict[str, float]:
    return {option.name: option.times.seconds for option in choice.options}


def test_a_pass_reads_weights_and_cache() -> None:
    """8.19e9 weights in bfloat16, 147,456 bytes of keys and values per token, at 70 % of 3.35 TB/s."""
    cost = choose("rollout.tensor_model_parallel_size=1").pass_cost
    assert cost.fixed == pytest.approx(2 * 8.19e9 / (0.7 * 3.35e12), rel=0.01)
    assert (cost.host_fixed, cost.host_per_request) == (0.004, 40e-6)
    assert cost.per_context_token == 2 * 36 * 8 * 128 * 2 / (0.7 * 3.35e12)
    assert cost.per_request == pytest.approx(2 * 7.57e9 / (0.4 * 990e12), rel=0.01)
    halved = choose("rollout.tensor_model_parallel_size=2").pass_cost
    assert halved.fixed == pytest.approx(cost.fixed / 2, rel=0.01)
    assert halved.per_context_token == cost.per_context_token / 2


def test_the_host_prepares_a_pass_during_the_one_before_or_after_it() -> None:
    """The longer of both counts, or their sum if nothing is planned early; few responses wait for the host."""
    early = choose("rollout.tensor_model_parallel_size=1").pass_cost
    late = choose("rollout.tensor_model_parallel_size=1", "rollout.engine_options.async_scheduling=false").pass_cost
    assert late.host_fixed == late.host_per_request == 0
    assert late.of_passes(3, 8, 100) == pytest.approx(early.of_passes(3, 8, 100) + 3 * (0.004 + 8 * 40e-6))
    waiting = replace(early, fixed=0.0)
    assert waiting.of_passes(3, 8, 100) == pytest.approx(3 * (0.004 + 8 * 40e-6))


def test_what_a_long_tail_takes() -> None:
    """Spread samples beat groups, partial rollouts beat both; shares are whole nodes; fewer trainers train longer."""
    choice = choose()
    found = seconds(choice)
    assert found["synchronous, samples spread"] < found["synchronous, whole groups"]
    assert found["partial rollouts, max_staleness 1"] < found["synchronous, samples spread"]
    shares = {option.engine_gpus for option in choice.options if option.schedule.own_ranks}
    assert shares and shares <= {8, 16, 24}
    slow = seconds(choose(flops=99e12))
    assert all(slow[name] > found[name] for name in found if name in slow)


def test_an_engine_that_is_the_actor_stays_with_it() -> None:
    choice = choose("rollout.engine=megatron")
    assert not any(option.schedule.own_ranks for option in choice.options)


def test_the_least_stale_of_the_fast_is_recommended() -> None:
    """A tenth does not justify staleness, and with equal staleness it does not justify splitting the ranks."""

    def option(name: str, staleness: int, own_ranks: bool, step: float) -> Option:
        return Option(name, Schedule(staleness, own_ranks=own_ranks), 8, [], replace(TIMES, seconds=step))

    near = [option("sync", 0, False, 109.0), option("partial", 1, False, 100.0)]
    assert recommend(near).name == "sync"
    far = [option("sync", 0, False, 120.0), option("own", 1, True, 100.0), option("partial", 1, False, 105.0)]
    assert recommend(far).name == "partial"
    assert recommend([*far, option("two", 2, False, 80.0)]).name == "two"
