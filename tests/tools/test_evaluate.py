# SPDX-License-Identifier: Apache-2.0
"""evaluate.py and trainer.total_steps=0 give the numbers of the run's validation, in any layout, from any weights.

Not covered: mixtures of experts, a reward model as the source, GPUs.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from distributed import run_ranks
from launch_runs import assert_succeeded, fork_program
from rl_runs import layout_overrides, overrides_for, read_records, train
from tools._evaluation import write_chosen
from tools._weights import find_weights
from tools.viewer.rollout_page import write_page

TOOL = importlib.import_module("tools.evaluate")
SAMPLES = ["rollout.validation_n=4", "rollout.validation_temperature=1.0"]


@pytest.fixture(scope="module")
def trained(task: Path, tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Path:
    """Two steps on two ranks (TP 2, two engines), validated before and after with four responses to each prompt."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert (
        run_ranks(train, 2, overrides_for(task, run_dir, *layout_overrides(2, 1, 1), *SAMPLES), timeout=150)
        == [None] * 2
    )
    return run_dir


def settings_for(task: Path, model: Path, *extra: str) -> list[str]:
    """Return the settings of an evaluation, and none of training."""
    return [
        f"model.path={model}",
        "model.dtype=float32",
        f"data.validation_files=[{task}/validation.jsonl]",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "rollout.max_num_seqs=32",
        f"reward.function={task}/reward.py:score",
        *extra,
    ]


def run_tool(world_size: int, *arguments: object) -> list[int]:
    """Exit codes of all ranks."""
    return run_ranks(lambda rank, world_size: TOOL.main(list(map(str, arguments))), world_size, timeout=150)


def validation_of(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith("validation/")}


def test_a_checkpoint_in_another_layout(
    task: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run's numbers to the last bit, from the run directory, with PP 2 and one engine of TP 2.

    The rollouts that are written open in the viewer, and prompts are chosen by them.
    """
    codes = run_tool(
        2,
        *settings_for(task, trained, *layout_overrides(1, 2, 2), "rollout.validation_temperature=1.0"),
        "--samples",
        4,
        "--json",
        tmp_path / "report.json",
        "--rollouts",
        tmp_path / "rollouts",
        "--choose",
        0.25,
        0.75,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert codes == [0, 0]
    expected, found = validation_of(read_records(trained)[-1]), report["metrics"]
    assert len(expected) == 5 and 0 < expected["validation/validation/accuracy"] < 1
    assert {name: found[name] for name in expected} == expected
    assert (report["step"], report["policy_version"], report["engine_tp_size"]) == (2, 4, 2)
    assert found["validation/validation/prompts"] == 16 and 0 <= found["validation/validation/truncated"] <= 1
    at = [found[f"validation/validation/pass@{k}"] for k in (1, 2, 4)]
    assert at == sorted(at) and at[0] < at[2]
    out = capfd.readouterr().out
    assert out.count("validation/validation/accuracy") == 1 and "PP2" in out.replace("=", "").upper()
    page = write_page([tmp_path / "rollouts/validation"], tmp_path / "page.html")
    assert (page.num_rollouts, page.num_steps) == (64, 1)
    rows = [
        json.loads(line)
        for line in (tmp_path / "rollouts/validation/rollouts/step_2.jsonl").read_text().split("\n")
        if line
    ]
    written = (trained / "validation/validation/rollouts/step_2.jsonl").read_text().splitlines()
    for line, row in zip(written, rows, strict=True):
        kept = json.loads(line)
        assert kept.items() <= row.items() and kept["num_tokens"] == len(row["tokens"]) and "tokens" not in kept
    assert sum(row["reward"] for row in rows) / 64 == pytest.approx(found["validation/validation/accuracy"])
    assert {row["policy_version"] for row in rows} == {4}
    correct = {i: sum(row["reward"] >= 0.5 for row in rows if row["prompt_id"] == i) for i in range(16)}
    lines = (task / "validation.jsonl").read_text().splitlines()
    expected = [json.loads(line) for i, line in enumerate(lines) if 1 <= correct[i] <= 3]
    chosen = (tmp_path / "rollouts/validation/chosen.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in chosen] == expected and 0 < len(chosen) < 16


def test_prompts_are_chosen_by_their_pass_rates(tmp_path: Path) -> None:
    """Both ends of the range count; a length penalty makes no answer wrong; a failed episode does not count."""
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "text {i}"}}\n' for i in range(6)))
    right, wrong = {"reward": 0.25, "reward_components": {"math": 1.0, "overlong": -0.75}}, {"reward": 0.0}
    rates = {0: 0, 1: 1, 2: 2, 3: 4}  # row 4 has failed episodes only, row 5 was not measured
    rows = [
        {"prompt_id": i, "finish_reason": "stop", "reward_components": {}} | (right if sample < rate else wrong)
        for i, rate in rates.items()
        for sample in range(4)
    ]
    failed = ({"finish_reason": "timeout"}, {"reward_components": {"service_failures": 1.0}})
    rows += [rows[0] | {"prompt_id": i} | change for i in (2, 4) for change in failed]

    def choose(low: float, high: float) -> list[int]:
        write_chosen(tmp_path / "chosen.jsonl", str(tmp_path / "train.jsonl"), rows, low, high)
        return [int(json.loads(line)["prompt"][-1]) for line in (tmp_path / "chosen.jsonl").read_text().splitlines()]

    assert (choose(0.25, 0.5), choose(0.3, 0.9), choose(0, 1)) == ([1, 2], [2], [0, 1, 2, 3])


def test_a_run_by_its_own_config_and_plain_python(task: Path, trained: Path, tmp_path: Path) -> None:
    """One process without torchrun: the command of README.md."""
    command = "python tools/evaluate.py checkpoints/runs/RUN/config.yaml model.path=checkpoints/runs/RUN --samples 4"
    words = command.replace("checkpoints/runs/RUN", str(trained)).split()
    more = [*layout_overrides(1, 1, 1), "--json", f"{tmp_path}/report.json"]
    assert_succeeded(fork_program([*words, *more], tmp_path))
    metrics = json.loads((tmp_path / "report.json").read_text())["metrics"]
    after = validation_of(read_records(trained)[-1])
    assert {name: metrics[name] for name in after} == after


def test_a_model_in_hf_format(task: Path, trained: Path, tmp_path: Path) -> None:
    """The numbers of the run before its first step."""
    assert run_tool(1, *settings_for(task, task / "model", *SAMPLES), "--json", tmp_path / "report.json") == [0]
    report, before = json.loads((tmp_path / "report.json").read_text()), validation_of(read_records(trained)[0])
    assert {name: report["metrics"][name] for name in before} == before and report["step"] == 0


def test_adapters(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """The numbers of the run that trained them, and without them those before it; alone they are no model."""
    lora = ["actor.lora.rank=4", "actor.lora.alpha=64"]
    overrides = overrides_for(task, tmp_path / "run", *lora, *SAMPLES, "actor.lr=1e-2")
    assert run_ranks(train, 1, overrides, timeout=150) == [None]
    before, after = (validation_of(read_records(tmp_path / "run")[index]) for index in (0, -1))
    assert before != after
    trained = f"actor.lora.path={tmp_path}/run/checkpoints/latest/huggingface"
    for settings, expected in (([*lora, trained], after), ([], before)):
        report = tmp_path / "report.json"
        arguments = settings_for(task, task / "model", *settings, *SAMPLES, *layout_overrides(2, 1, 1))
        assert run_tool(2, *arguments, "--json", report) == [0, 0]
        metrics = json.loads(report.read_text())["metrics"]
        assert {name: metrics[name] for name in expected} == expected
    assert run_tool(1, *settings_for(task, tmp_path / "run", *lora)) != [0]


def test_no_steps_validate_only(task: Path, trained: Path, tmp_path: Path) -> None:
    """A new run validates its model, a finished one its last checkpoint; nothing is trained and nothing is saved."""
    only = [*SAMPLES, "trainer.total_steps=0", "trainer.test_freq=0"]
    assert run_ranks(train, 1, overrides_for(task, tmp_path / "run", *only), timeout=150) == [None]
    before, *_, after = records = read_records(trained)
    assert read_records(tmp_path / "run") == [{"step": 0, **validation_of(before)}]
    assert not list(tmp_path.glob("run/checkpoints/step_*")) and (tmp_path / "run/summary.json").is_file()
    assert run_ranks(train, 1, overrides_for(task, trained, *only), timeout=150) == [None]
    assert read_records(trained) == [*records, {"step": 2, **validation_of(after)}]


def test_where_weights_are_found(task: Path, trained: Path) -> None:
    step = trained / "checkpoints/step_2"
    for path in (trained, step, step / "actor", trained / "checkpoints/latest"):
        found = find_weights(path)
        assert (found.path.resolve(), found.step, found.policy_version) == (step.resolve() / "actor", 2, 4)
    assert find_weights(step / "huggingface").step == 2 and find_weights(task / "model").step == 0


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["model.path={task}"], "holds no Megatron distributed checkpoint"),
        (["model.path=absent"], "there is no directory absent"),
        (["model.path={task}/model", "data.validation_files=[]"], "data.validation_files names no file"),
        (["model.path={task}/model", "actor.tensor_model_parallel_size=2"], "world_size 1 is no multiple"),
        (["model.path={task}/model", "--samples", "0"], "rollout.validation_n"),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[str], found: str, task: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(task=task) for argument in arguments]
    codes = run_tool(1, *settings_for(task, task / "model"), *given)
    printed = capfd.readouterr()
    assert codes == [2] and printed.out == "" and found in printed.err and printed.err.count("hint:") == 1
