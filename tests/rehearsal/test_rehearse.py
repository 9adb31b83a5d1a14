# SPDX-License-Identifier: Apache-2.0
"""Jobs rehearsed without a GPU: a small one agrees with its plan, and planted faults are named.

Each rehearsal is a separate process. Not covered: anything without a shape (kernels, streams, values), and generation.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.run.loading import load_config
from tools.rehearsal.report import find_problems

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "launch/recipes/qwen2.5_0.5b_gsm8k.yaml"
EXPECTED = {
    "host tensor in a collective": "a collective of a tensor on the host at planted_faults.py:",
    "item": "the host waits 3 times for the device at megatron_rl/training/optimizer.py:",  # two losses, one report
    "forgotten device": "found at least two devices, cuda:0 and cpu",
    "second wait": "the host waits for the device at planted_faults.py:",
    "leak": "1.9 MiB (0.1%) more are held after the second actor update than after the first",
    "memory that nobody plans": "actor update: ",
    "bytes that nobody plans": "actor DP: ",
}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four layers of a small model, TP 2 with sequence parallelism, DP 2."""
    file = tmp_path_factory.mktemp("shape") / "config.json"
    shape = json.loads((ROOT / "launch/recipes/shapes/Qwen2.5-0.5B-Instruct.json").read_text())
    file.write_text(json.dumps(shape | {"num_hidden_layers": 4}))
    settings = ["actor.tensor_model_parallel_size=2", "actor.sequence_parallel=true", "actor.step_mode=eager"]
    return [str(RECIPE), "--hf-config", str(file), "--nodes", "1", "--gpus-per-node", "4", *settings]


@pytest.fixture(scope="module")
def problems(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    directory = tmp_path_factory.mktemp("faults")
    given, found = directory / "arguments.json", directory / "problems.json"
    given.write_text(json.dumps(arguments))
    program = [sys.executable, str(Path(__file__).with_name("planted_faults.py")), str(given), str(found)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(found.read_text())


@pytest.mark.slow
def test_what_is_right_has_no_problem(problems: dict[str, list[str]]) -> None:
    assert problems["none"] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", EXPECTED)
def test_planted_fault_is_named(fault: str, problems: dict[str, list[str]]) -> None:
    assert any(EXPECTED[fault] in problem for problem in problems[fault]), problems[fault]


def make_report(**changes: Any) -> dict[str, Any]:
    """Make the report of a rank that agrees with its plan, except for changes of its update, memory or traffic."""
    row = {"phase": "actor update", "planned": 2 << 30, "rehearsed": 2 << 30, "at_peak": []}
    traffic = {"role": "actor", "axis": "DP", "planned": 1 << 30, "rehearsed": 1 << 30}
    update = {"host_collectives": [], "mixes": [], "syncs": {"megatron_rl/training/optimizer.py:1": 1}, "peak": 2 << 30}
    update |= {"live": 1 << 30, "held": {"a.py:1": 1 << 30}}
    return {
        "rank": 0,
        "memory": [row | changes.get("memory", {})],
        "host": {"planned": 0, "rehearsed": 0} | changes.get("host", {}),
        "traffic": [traffic | changes.get("traffic", {})],
        "most_planned": 2 << 30,
        "phases": {
            "first actor update": update,
            "save": update | {"syncs": {}} | changes.get("save", {}),
            "actor update": update | changes.get("update", {}),
        },
    }


# Finding of a rehearsal -> words of the problem; `EXPECTED` has the words of whole rehearsals.
FOUND: dict[str, tuple[dict[str, Any], str]] = {
    "memory": ({"memory": {"rehearsed": 3 << 30}}, "actor update: 3.00 GiB rehearsed, 2.00 planned"),
    "page-locked memory": ({"host": {"rehearsed": 1 << 30}}, "1.00 GiB of page-locked memory rehearsed, 0.00 planned"),
    "bytes": ({"traffic": {"rehearsed": 2 << 30}}, "actor DP: 2.000 GiB sent, 1.000 planned"),
    "host collective": ({"update": {"host_collectives": ["x.py:7"]}}, "a collective of a tensor on the host at x.py:7"),
    "mix": ({"update": {"mixes": ["x.py:8"]}}, "tensors of the host and of the device at x.py:8"),
    "wait": (
        {"update": {"syncs": {"megatron_rl/training/fast_path.py:9": 1}}},
        "waits for the device at megatron_rl/train",
    ),
    "second wait": ({"update": {"syncs": {"megatron_rl/training/optimizer.py:1": 2}}}, "the host waits 2 times for"),
    "a save": ({"save": {"peak": 3 << 30}}, "save: 3.00 GiB rehearsed, more than the 2.00 of any planned phase"),
    "leak": (
        {"update": {"live": (1 << 30) + (1 << 20), "held": {"a.py:1": 1 << 30, "b.py:2": 1 << 20}}},
        "1.0 MiB (0.1%) more are held after the second actor update than after the first, made at b.py:2",
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_a_problem_is_named_by_itself(found: str) -> None:
    assert [*find_problems(make_report(), {"actor": "eager"})] == []
    changes, words = FOUND[found]
    (problem,) = find_problems(make_report(**changes), {"actor": "eager"})
    assert problem.startswith("rank 0") and words in problem


@pytest.mark.slow
def test_tool_rehearses_every_class_and_agrees(arguments: list[str], tmp_path: Path) -> None:
    """The reference keeps the weights it has; two ranks stand for four."""
    out = tmp_path / "rehearsal.json"
    command = [sys.executable, "tools/rehearse.py", *arguments, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    found = json.loads(out.read_text())
    assert done.returncode == 0 and found["problems"] == [], done.stdout + done.stderr
    assert [rank["rank"] for rank in found["ranks"]] == [0, 3] and found["world_size"] == 4
    for rank in found["ranks"]:
        update = rank["phases"]["actor update"]
        assert sum(update["syncs"].values()) == 1 + 2, "one in each update, and one per eager microbatch"
        calls = {(call["operation"], call["group"]): call["calls"] for call in update["traffic"]}
        assert calls["reduce_scatter_tensor_coalesced", "dp"] == calls["allgather_into_tensor_coalesced", "dp"] == 1
        assert update["at_peak"] and update["peak"] > update["live"] > 0
        assert not update["copies"] and not update["mixes"]
        states, phases = rank["host"]["rehearsed"], rank["phases"]
        back, away = phases["restore"]["copied"], phases["release"]["copied"]
        assert back["cpu to cuda"] == away["cuda to cpu"] == pytest.approx(states, rel=1e-3), "rounded up to blocks"
        assert phases["release"]["live"] < phases["switch"]["peak"] < update["peak"]
        assert phases["save"]["copied"]["cuda to cpu"] > states, "the weights are saved as well"
        planned = {row["phase"]: row["planned"] for row in rank["memory"]}
        assert planned["switch"] > phases["release"]["live"], "the engine's own weights"
        assert phases["switch"]["live"] < planned["switch"], "the engine sleeps after a rollout"


def _rehearse(arguments: list[str], out: Path, ranks: str = "0") -> dict[str, Any]:
    """The report; phases and memory of rank 0."""
    command = [sys.executable, "tools/rehearse.py", *arguments, "--rank-class", ranks, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode in (0, 1) and out.is_file(), done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["ranks"], found["problems"]
    return found | {"phases": found["ranks"][0]["phases"], "memory": found["ranks"][0]["memory"]}


def _copy_recipe(name: str, directory: Path, num_layers: int) -> str:
    """A recipe beside models of few layers."""
    (directory / "shapes").mkdir()
    for shape in (ROOT / "launch/recipes/shapes").glob("*.json"):
        layers = {"num_hidden_layers": num_layers}
        (directory / "shapes" / shape.name).write_text(json.dumps(json.loads(shape.read_text()) | layers))
    return shutil.copy(ROOT / "launch/recipes" / name, directory)


@pytest.mark.slow
def test_experts_whose_ranks_share_all_weights_agree(tmp_path: Path) -> None:
    """ZeRO-3 with expert parallelism, four layers a stage: memory, and the bytes of every gather."""
    recipe = _copy_recipe("qwen3_30b_a3b_zero3.yaml", tmp_path, 8)
    found = _rehearse([recipe, "--nodes", "2", "--gpus-per-node", "8"], tmp_path / "found.json")
    assert found["problems"] == []
    assert {row["phase"] for row in found["memory"]} == {"switch", "log-probs", "actor update"}
    assert sum(found["phases"]["actor update"]["syncs"].values()) > 0


@pytest.mark.slow
def test_interleaved_pipeline_agrees(tmp_path: Path) -> None:
    """Both stages: memory, and the bytes of every link; with two stages one way is over the group of all ranks."""
    recipe = _copy_recipe("qwen2.5_0.5b_gsm8k.yaml", tmp_path, 8)
    settings = ["actor.pipeline_model_parallel_size=2", "actor.virtual_pipeline_model_parallel_size=2"]
    settings.append("actor.step_mode=eager")
    found = _rehearse([recipe, "--nodes", "1", "--gpus-per-node", "4", *settings], tmp_path / "found.json", "all")
    assert found["problems"] == []
    for rank in found["ranks"]:
        for row in rank["memory"]:
            assert row["rehearsed"] == pytest.approx(row["planned"], rel=0.05)
        traffic = {row["axis"]: (row["rehearsed"], row["planned"]) for row in rank["traffic"]}
        for axis in ("DP", "PP", "embedding"):
            assert traffic[axis][0] == pytest.approx(traffic[axis][1], rel=0.01) and traffic[axis][1] > 0
        assert traffic["other"][0] < 1 << 10, "sums of metrics"


@pytest.mark.slow
def test_teacher_is_asked(tmp_path: Path) -> None:
    """It comes from the host and goes back; the policy learns from the likeliest tokens of a whole step."""
    recipe = _copy_recipe("qwen2.5_7b_distill.yaml", tmp_path, 4)
    found = _rehearse([recipe, "--nodes", "1", "--gpus-per-node", "8"], tmp_path / "found.json")
    rows = {row["phase"]: row for row in found["memory"]}
    for phase in ("teacher large", "actor update"):
        assert rows[phase]["rehearsed"] == pytest.approx(rows[phase]["planned"], rel=0.05)
    assert found["phases"]["teacher large"]["copied"]["cpu to cuda"] > 1 << 30
    assert rows["actor update"]["parts"]["teachers' columns"] > 1 << 29


def test_failed_rank_is_a_problem(arguments: list[str]) -> None:
    """Status 1 and the error for faults found in the run; status 2 for jobs that cannot be planned."""
    assert load_config(RECIPE, []).config.rollout.n == 8
    command = [sys.executable, "tools/rehearse.py", *arguments, "--rank-class", "9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "rank 9 of 4" in done.stderr, done.stdout + done.stderr
