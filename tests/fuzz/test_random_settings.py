# SPDX-License-Identifier: Apache-2.0
"""Two hundred runs with random settings end well with finite numbers, or are refused in four parts by all ranks alike.

`python tests/fuzz/random_runs.py SEED` repeats one. Not covered: whether the numbers are right, more than four ranks,
GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.random_runs import Problem, carry_out, draw, make_fuzz_task

RUNS, BLOCK = 200, 5


@pytest.fixture(scope="session")
def fuzz_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz")
    make_fuzz_task(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, RUNS, BLOCK))
def test_a_run_ends_well_or_is_refused_by_all_ranks_alike(
    first: int, fuzz_task: Path, tmp_path: Path, vllm_imported: None
) -> None:
    problems = []
    for seed in range(first, first + BLOCK):
        run = draw(seed)
        try:
            print(seed, carry_out(run, fuzz_task, tmp_path / f"run{seed}"))
        except Problem as error:
            problems.append(f"python tests/fuzz/random_runs.py {seed}\n{run.describe()}\n{error}")
    assert not problems, "\n\n".join(problems)


def test_draws_depend_on_the_seed_alone_and_take_every_mode() -> None:
    """Each of the modes that a run may have is in some of the two hundred."""
    runs = [draw(seed) for seed in range(RUNS)]
    assert runs == [draw(seed) for seed in range(RUNS)]
    values = {f"{name}={value}" for run in runs for name, value in run.settings.items()}
    engines = {f"rollout.engine={name}" for name in ("vllm", "hf", "megatron", "vllm_server")}
    modes = {"actor.zero_stage=3", "hybrid.lora=adapter", "actor.quantization=nf4", "algorithm.adv_estimator=gae"}
    modes |= {
        "actor.step_mode=static",
        "rollout.bitwise=True",
        "schedule.updates=in_flight",
        "agents.tools=['calculator']",
    }
    modes |= {"actor.expert_model_parallel_size=2", "actor.router_replay=engine", "data.weights=[1.0, 3.0]"}
    assert engines | modes <= values, (engines | modes) - values
    assert {run.world_size for run in runs} == {1, 2, 3, 4} and any(run.is_sft for run in runs)
