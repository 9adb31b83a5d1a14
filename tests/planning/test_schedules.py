# SPDX-License-Identifier: Apache-2.0
"""The simulator of schedules against engines that are stepped, the bounds of its theory, and lengths.

Scripted engines count the seconds of their own passes, so both must agree to rounding. Not covered: how well a pass of
a real engine is described by four numbers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed import run_ranks
from megatron_rl.engines.protocol import Request, SamplingConfig
from megatron_rl.rollout.generation import assign_engines, generate
from megatron_rl.types import UserError
from tools.benchmarks._scripted_engine import ScriptedEngine
from tools.benchmarks._scripted_stream import ScriptedStream
from tools.planning.engine_clock import EngineClock, EngineModel, Response, StepCost
from tools.planning.lengths import LengthModel, make_lognormal, read_lengths
from tools.planning.schedules import Costs, Schedule, simulate

PASSES = StepCost(fixed=1.0, per_request=0.0)  # seconds are decoding passes
COST = StepCost(fixed=1.0, per_request=0.03, per_prompt_token=0.01, per_context_token=0.002)
SAMPLING = SamplingConfig(temperature=1.0, max_tokens=400, stop_token_ids=())
LENGTHS = make_lognormal(30, 1.0, 0.5)
PROMPT, ROOMY = 7, 10**9


def make_costs(cost: StepCost, *, engines: int = 3, slots: int = 5, cache: int = ROOMY, batch: int = 8) -> Costs:
    """Batches of `batch` prompts x 4 responses; training takes a hundred seconds and a token's tenth."""
    model = EngineModel(cost, slots, cache)
    return Costs(model, engines, batch, 4, PROMPT, SAMPLING.max_tokens, lambda tokens: 100 + 0.1 * tokens, 3.0)


def step_engines(costs: Costs, dispatch: str, steps: int) -> float:
    """Mean seconds of synchronous steps with scripted engines, training and the switch added."""
    total = 0.0
    for step in range(steps):
        lengths = LENGTHS.draw(1, step * costs.batch_size, costs.batch_size, costs.group_size, costs.longest).ravel()
        requests = [
            Request(index, np.full(PROMPT, index // costs.group_size), index, SAMPLING) for index in range(len(lengths))
        ]
        engine_of = assign_engines(
            dispatch, [PROMPT] * costs.batch_size, costs.group_size, costs.num_engines, costs.longest
        )
        slowest = 0.0
        for number in range(costs.num_engines):
            engine = ScriptedEngine(dict(enumerate(lengths.tolist())), costs.engine.max_num_seqs, costs.engine.cost)
            generate(engine, [requests[index] for index in np.flatnonzero(engine_of == number)])
            slowest = max(slowest, engine.seconds)
        total += slowest + costs.train(int(lengths.sum())) + costs.switch_seconds
    return total / steps


@pytest.mark.parametrize("dispatch", ["groups", "samples"])
@pytest.mark.parametrize("cost", [PASSES, COST], ids=["passes", "seconds"])
def test_synchronous_steps_take_what_stepped_engines_take(dispatch, cost):
    """Engines that the serving loop steps, responses that wait for a slot, a shared prompt computed once per engine."""
    costs = make_costs(cost)
    found = simulate(Schedule(dispatch=dispatch), costs, LENGTHS, steps=3)
    assert found.seconds == pytest.approx(step_engines(costs, dispatch, 3), rel=1e-12)
    assert (found.staleness_max, found.carried_tokens, found.trainer_idle) == (0, 0, None)


@pytest.mark.parametrize(
    "schedules",
    [
        [Schedule(2), Schedule(1, "drain"), Schedule(1, order="whole")],
        pytest.param([Schedule(1), Schedule(2, order="whole")], marks=pytest.mark.slow),
    ],
    ids=["each sort", "other staleness"],
)
def test_partial_rollouts_take_the_passes_of_a_run(schedules):
    """The stream of a run on three ranks with stepped engines; both interrupt after the same pass."""
    costs, steps = replace(make_costs(PASSES), train=lambda tokens: 0.0, switch_seconds=0.0), 6

    def measure(schedule: Schedule) -> list[float]:
        every = 1 if schedule.updates == "in_flight" else None
        stream = ScriptedStream(schedule, costs, LENGTHS, steps, steps_per_update=every)
        passes = [0.0]
        for _ in range(steps):
            stream.take()
            stream.train(lambda: None)
            passes.append(stream.engine.seconds)
        return np.diff(passes).tolist()

    measured = np.array(run_ranks(lambda rank, world_size: [measure(one) for one in schedules], 3)).max(axis=0)
    for schedule, passes in zip(schedules, measured.tolist(), strict=True):
        assert passes == [simulate(schedule, costs, LENGTHS, steps=n + 1, skip=n).rollout_seconds for n in range(steps)]


def test_colocated_partial_rollouts_end_with_the_batch():
    """Passes of one engine without limits, by hand: batch 0 takes 5, then batch 1 has 3 tokens left of its 8."""
    lengths = GivenLengths([5, 8, 20, 30])
    costs = Costs(EngineModel(PASSES, 99, ROOMY), 1, 1, 1, 0, 99, lambda tokens: 100.0, 3.0)
    two = simulate(Schedule(1), costs, lengths, steps=2)
    assert (two.seconds, two.rollout_seconds) == ((5 + 3) / 2 + 103, (5 + 3) / 2)
    assert (two.staleness_mean, two.staleness_max, two.carried_tokens) == (0.5, 1, (5 + 3) / 2)
    last = simulate(Schedule(1), costs, lengths, steps=3, skip=2)  # batch 2 ran 3 passes before
    assert last.seconds == 17 + 103


class GivenLengths(LengthModel):
    """Response lengths given by a test: one prompt of one response each."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(np.array(lengths), 0.0, "given")

    def draw(self, seed: int, first: int, num_prompts: int, group_size: int, longest: int) -> np.ndarray:
        return self.values[first : first + 1].reshape(1, 1)


def test_own_ranks_overlap_generation_and_training():
    """One engine, one response per batch, by hand; an update waits for the pass that runs, or for all that runs."""
    costs = Costs(EngineModel(PASSES, 99, ROOMY), 1, 1, 1, 0, 999, lambda tokens: 10.0, 3.0)
    flying = simulate(Schedule(1, "in_flight", own_ranks=True), costs, GivenLengths([5, 20, 9]), steps=2)
    # Batch 0 is there at 5 and trained at 15; the switch ends at 18. Batch 1 has 15 of 20 tokens and is there at 23,
    # trained at 33, switched at 36.
    assert (flying.seconds, flying.rollout_seconds, flying.staleness_max) == (18, 5, 1)
    assert flying.trainer_idle == pytest.approx(1 - 10 / 18)
    drained = simulate(Schedule(1, "drain", own_ranks=True), costs, GivenLengths([5, 20, 9]), steps=2)
    # The first switch waits for batch 1, to 20 + 3; batch 2 makes a pass, to 24; batch 1 is trained at 34, switched at
    # 37, and batch 2 is whole at 32.
    assert (drained.seconds, drained.rollout_seconds, drained.carried_tokens) == ((23 + 14) / 2, (5 + 1) / 2, 0)
    alone = simulate(Schedule(0, own_ranks=True), costs, GivenLengths([5, 20]), steps=2)
    assert alone.seconds == (5 + 20) / 2 + 10 + 3


@given(
    k=st.integers(0, 3),
    order=st.sampled_from(["stream", "whole"]),
    own_ranks=st.booleans(),
    drains=st.booleans(),
    train=st.floats(0, 300),
    cache=st.sampled_from([500, 2000, ROOMY]),
)
@settings(max_examples=40, deadline=None)
def test_no_response_is_older_than_the_gate_allows(k, order, own_ranks, drains, train, cache):
    """Nor on the average; of whole groups half as many are ahead."""
    updates = "drain" if drains else "in_flight"
    costs = Costs(EngineModel(COST, 5, cache), 3, 4, 4, PROMPT, 400, lambda tokens: train, 3.0)
    found = simulate(Schedule(k, updates, order, own_ranks), costs, LENGTHS, steps=9)
    assert found.staleness_mean <= k / (1 + (order == "whole")) + 1e-9
    assert found.staleness_max <= k
    assert 0 <= found.engine_idle <= 1 and found.seconds >= train + 3
    assert updates == "in_flight" or found.carried_tokens == 0


def test_a_full_cache_evicts_what_joined_last():
    """Two responses of 10 tokens in a cache of 17: the second gives way after 3 passes, and begins again at the end.

    It computes prompt and tokens again: the prompt is cached, 3 tokens are not.
    """
    cost = StepCost(fixed=1.0, per_request=0.0, per_prompt_token=0.5)
    engine = EngineClock(EngineModel(cost, 9, 17), 5)
    engine.queue.extend([Response(0, 10), Response(0, 10)])
    engine.fill()
    finished = []
    while engine.is_running:
        finished += [(engine.now, response.done) for response in engine.run_to_event()]
    first = 5 * 0.5 + 10
    assert [done for _, done in finished] == [10, 10]
    assert finished[1][0] == first + 3 * 0.5 + 7 and engine.busy == engine.now


def test_engines_run_on_past_a_time_by_less_than_a_pass():
    engine = EngineClock(EngineModel(COST, 9, ROOMY), 5)
    engine.queue.extend([Response(0, 100), Response(1, 80)])
    engine.fill()
    start = engine.now
    assert engine.run_past(start + 30) == [] and engine.now >= start + 30
    passes = engine.count_tokens() // 2
    assert engine.now == pytest.approx(start + COST.of_passes(passes, 2, 10))
    assert start + COST.of_passes(passes - 1, 2, 10) < start + 30


def test_lognormal_lengths_are_what_they_say():
    model = make_lognormal(4000, 1.0, 0.5)
    drawn = np.concatenate([model.draw(0, first, 500, 8, 32768) for first in range(0, 4000, 500)])
    logs = np.log(drawn)
    assert np.median(drawn) == pytest.approx(4000, rel=0.05) and logs.std() == pytest.approx(1.0, rel=0.05)
    assert drawn.max() == 32768 and np.mean(drawn) == pytest.approx(model.mean(32768), rel=0.03)
    pairs = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    assert pairs == pytest.approx(0.5, abs=0.05)
    assert (model.draw(0, 500, 500, 8, 32768) == drawn[500:1000]).all()


def test_lengths_come_from_rollouts_of_a_run_or_from_lines(tmp_path: Path):
    """The correlation is measured if prompts have more than one response."""
    truth = make_lognormal(300, 0.8, 0.6)
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2):
        rows = [
            {"prompt_id": prompt, "policy_version": step}
            | ({"tokens": [0] * int(length)} if step == 1 else {"num_tokens": int(length)})
            for prompt, lengths in enumerate(truth.draw(step, 0, 200, 4, 9999))
            for length in lengths
        ]
        rows.append({"prompt_id": 0, "policy_version": step, "tokens": [0] * 9999, "logged_as": "longest"})
        file = tmp_path / "rollouts" / f"step_{step}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_lengths(str(tmp_path))
    assert len(found.values) == 1600 and found.correlation == pytest.approx(0.6, abs=0.06)
    assert found.mean(9999) == np.mean([truth.draw(step, 0, 200, 4, 9999) for step in (1, 2)])
    lines = tmp_path / "lengths.txt"
    lines.write_text("5\n1\n\n3\n")
    plain = read_lengths(str(lines))
    assert plain.values.tolist() == [1, 3, 5] and plain.correlation == 0.5
    assert set(plain.draw(0, 0, 50, 4, 4).ravel().tolist()) == {1, 3, 4}
    assert read_lengths("lognormal:100,0,0.2").correlation == 0.2


@pytest.mark.parametrize("text", ["nowhere.txt", "lognormal:1", "lognormal:a,b", "lognormal:9,1,1", "{tmp}"])
def test_lengths_that_are_none_are_refused(text: str, tmp_path: Path):
    (tmp_path / "step_1.jsonl").write_text('{"reward": 1}\n')
    with pytest.raises(UserError, match="--lengths"):
        read_lengths(text.replace("{tmp}", str(tmp_path)))
