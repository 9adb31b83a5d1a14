# SPDX-License-Identifier: Apache-2.0
"""Replay of a captured step: the same bits in its layout, the same numbers in others; changes are named.

Two captured runs of two steps serve all checks; replays are the tool's own `main` in forked ranks, once the command.
Not covered: GPUs, several nodes, and repeated generation (a replay reuses the responses).
"""

from __future__ import annotations

import importlib
import io
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers  # noqa: F401  for the forks
from sabotage import Blow, kill

from distributed import run_ranks
from launch_runs import ROOT, assert_succeeded, fork_ranks, run_script
from megatron_rl.checkpoint.files import DIGESTS_FILE
from megatron_rl.checkpoint.torch_dist import ChunkReader
from rl_runs import layout_overrides, overrides_for, train

ONE_RANK = [
    "actor.tensor_model_parallel_size=1",
    "actor.pipeline_model_parallel_size=1",
    "actor.sequence_parallel=false",
]
COMMON = [
    "rollout.engine=hf",
    "data.validation_files=[]",
    "trainer.save_freq=null",
    "observability.trackers=[]",
    "trainer.capture_step=2",
    "actor.lr=1e-4",
]
GRPO = [*COMMON, *layout_overrides(2, 2, 1)]
# The critic lies otherwise than the actor, so values and returns travel; a static step whose first pass gives
# old_logprobs and makes weights of the mismatch.
PPO = [
    *COMMON,
    *layout_overrides(1, 2, 1),
    "algorithm.adv_estimator=gae",
    "algorithm.gae_lambda=0.9",
    "critic.lr=1e-4",
    "critic.tensor_model_parallel_size=2",
    "actor.step_mode=static",
    "actor.ppo_mini_batch_size=8",
    "actor.ppo_epochs=2",
    "algorithm.kl_target=0.1",
    "algorithm.importance_sampling=token-truncate",
    "rollout.top_k=4",
]
# The critic on ranks of its own, engines beside both.
PLACED = [
    *COMMON,
    "algorithm.adv_estimator=gae",
    "algorithm.kl_in=reward",
    "critic.lr=1e-4",
    "critic.tensor_model_parallel_size=2",
    "actor.pipeline_model_parallel_size=2",
    "algorithm.importance_sampling=token-truncate",
    "placement.actor=0-1",
    "placement.reference=2-3",
    "placement.critic=2-3",
    "placement.rollout=1-4",
]
DOWN, LAYER, ROW, COLUMN = "decoder.layers.mlp.linear_fc2.weight", 1, 3, 5


def load_tool() -> ModuleType:
    return importlib.import_module("tools.replay_step")


TOOL = load_tool()


@pytest.fixture(scope="module")
def grpo(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capsule of the second step of a run on TP2 x PP2."""
    return capture(tmp_path_factory.mktemp("grpo") / "run", 4, task, GRPO)


@pytest.fixture(scope="module")
def ppo(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capsule of the second step of a run with a critic on two ranks."""
    return capture(tmp_path_factory.mktemp("ppo") / "run", 2, task, PPO)


def capture(run_dir: Path, world_size: int, task: Path, settings: list[str]) -> Path:
    errors = run_ranks(train, world_size, overrides_for(task, run_dir, *settings), timeout=150)
    assert errors == [None] * world_size
    return run_dir / "capsules/step_2"


def replay(capsule: Path, report: Path, world_size: int, *arguments: str) -> tuple[list[int], dict[str, Any]]:
    """Exit codes of all ranks, and the report ({} without one)."""
    report.unlink(missing_ok=True)
    codes = run_ranks(
        lambda rank, world_size: TOOL.main([str(capsule), "--json", str(report), *arguments]), world_size, timeout=150
    )
    return codes, json.loads(report.read_text()) if report.exists() else {}


def rows_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in report["rows"]}


def test_same_layout_is_bitwise_and_leaves_the_run_alone(
    grpo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(grpo.parents[1].rglob("*"))}
    codes, report = replay(grpo, tmp_path / "report.json", 4)
    out = capfd.readouterr().out
    assert codes == [0] * 4 and out.count("verdict: equal") == 1 and "actor tp=2 pp=2 dp=1" in out
    assert report["tolerance"] is None and {row["verdict"] for row in report["rows"]} == {"bitwise"}
    names = [row["what"] for row in report["rows"]]
    order = [
        "actor weights before",
        "actor optimizer before",
        "rollouts: response tokens",
        "rollouts: reward",
        "forward: old_logprobs",
        "forward: ref_logprobs",
        "estimate: kl/per_response",
        "estimate: advantages",
        "actor updates: policy/loss",
        "actor updates: policy/grad_norm",
        "actor updates: update_logprobs",
        "actor weights after",
    ]
    assert [name for name in names if name in order] == order
    rows = rows_of(report)
    assert rows["actor updates: policy/loss"]["count"] == 2, "optimizer steps"
    assert rows["actor optimizer before"]["count"] == 2 * rows["actor weights before"]["count"]
    assert {path: path.stat().st_mtime_ns for path in sorted(grpo.parents[1].rglob("*"))} == before


def test_another_layout_is_within_the_tolerance(grpo: Path, tmp_path: Path) -> None:
    """TP2 x PP2 on one rank, and with prompts that are not shared on DP 2; a tolerance below rounding names the first
    number that the layout changes."""
    _, one = replay(grpo, tmp_path / "report.json", 1, *ONE_RANK)
    _, two = replay(
        grpo, tmp_path / "report.json", 2, *ONE_RANK, "actor.share_prompts=false", "actor.max_tokens_per_microbatch=64"
    )
    for report in (one, two):
        rows = rows_of(report)
        assert report["verdict"] == "equal" and report["tolerance"] == 1e-5
        for name in ("actor weights before", "actor optimizer before", "rollouts: reward", "estimate: advantages"):
            assert rows[name]["verdict"] == "bitwise", name
        for name in ("forward: old_logprobs", "actor updates: policy/grad_norm", "actor weights after"):
            assert 0 < rows[name]["max_relative"] < 1e-5, name
    codes, report = replay(grpo, tmp_path / "report.json", 1, *ONE_RANK, "--tolerance", "1e-9")
    assert codes == [1] and report["first_difference"]["what"] == "forward: old_logprobs"
    assert report["first_difference"]["where"].startswith("rollout ")


def test_ppo_with_a_critic(ppo: Path, tmp_path: Path) -> None:
    """Two trained roles in two layouts."""
    codes, report = replay(ppo, tmp_path / "report.json", 2)
    rows = rows_of(report)
    assert codes == [0, 0] and {row["verdict"] for row in report["rows"]} == {"bitwise"}
    for name in (
        "critic weights before",
        "critic optimizer before",
        "forward: old_logprobs",
        "forward: values",
        "estimate: returns",
        "estimate: importance_weights",
        "critic updates: value/loss",
        "critic weights after",
    ):
        assert rows[name]["count"] > 0, name
    codes, report = replay(ppo, tmp_path / "report.json", 1, *ONE_RANK, "critic.tensor_model_parallel_size=1")
    assert codes == [0] and 0 < rows_of(report)["critic weights after"]["max_relative"] < 1e-5


@pytest.mark.slow
def test_roles_on_ranks_of_their_own(task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bitwise on the same ranks, with the metrics of the critic, which rank 0 lacks; on one rank within 1e-5."""
    placed = capture(tmp_path / "run", 5, task, PLACED)
    codes, report = replay(placed, tmp_path / "report.json", 5)
    rows = rows_of(report)
    assert codes == [0] * 5 and {row["verdict"] for row in report["rows"]} == {"bitwise"}
    for name in (
        "forward: values",
        "estimate: importance_weights",
        "critic updates: value/loss",
        "critic weights after",
    ):
        assert rows[name]["count"] > 0, name
    assert "actor tp=1 pp=2 dp=1, critic tp=2 pp=1 dp=1" in capfd.readouterr().out
    together = [f"placement.{role}=null" for role in ("actor", "reference", "critic", "rollout")]
    together += [*ONE_RANK, "critic.tensor_model_parallel_size=1", "critic.sequence_parallel=false"]
    codes, report = replay(placed, tmp_path / "report.json", 1, *together)
    rows = rows_of(report)
    assert codes == [0] and report["tolerance"] == 1e-5 and rows["critic weights before"]["verdict"] == "bitwise"
    assert 0 < rows["critic weights after"]["max_relative"] < 1e-5


def test_a_changed_file_without_a_changed_number(ppo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bytes behind the critic's chunks: the file is named, and no tensor, as each still reads as recorded."""
    capsule = tmp_path / "step_2"
    shutil.copytree(ppo, capsule)
    with (capsule / "state/step_1/critic/__0_0.distcp").open("ab") as file:
        file.write(b"more")
    assert replay(capsule, tmp_path / "report.json", 2)[0] == [2, 2]
    error = capfd.readouterr().err
    assert "critic/__0_0.distcp has" in error and " recorded, " not in error
    assert replay(capsule, tmp_path / "report.json", 2, "--allow-changed")[0] == [0, 0]


def change_weight(capsule: Path) -> tuple[float, float]:
    """Add 0.25 to one element of a weight in the state's files; return the old and the new value."""
    directory = capsule / "state/step_1/actor"
    reader = ChunkReader(directory)
    box = ((LAYER, LAYER + 1), (ROW, ROW + 1), (COLUMN, COLUMN + 1))
    (chunk,) = reader.chunks(DOWN, box)
    content = bytearray((directory / chunk.file).read_bytes())
    data = torch.load(io.BytesIO(content[chunk.start : chunk.start + chunk.length]), weights_only=True)
    place = tuple(index - start for (index, _), (start, _) in zip(box, chunk.box, strict=True))
    old = data[place].item()
    data[place] += 0.25
    buffer = io.BytesIO()
    torch.save(data, buffer)
    assert len(buffer.getvalue()) == chunk.length
    content[chunk.start : chunk.start + chunk.length] = buffer.getvalue()
    (directory / chunk.file).write_bytes(content)
    return old, data[place].item()


def test_a_changed_weight_is_named(grpo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the refusal, and by the comparison of a replay that continues nevertheless, in either kind of layout."""
    capsule = tmp_path / "step_2"
    shutil.copytree(grpo, capsule)
    old, new = change_weight(capsule)
    what = f"actor weights before: model.layers.{LAYER}.mlp.down_proj.weight"
    codes, report = replay(capsule, tmp_path / "report.json", 2, *ONE_RANK)
    message = capfd.readouterr().err
    assert codes == [2, 2] and report == {} and "has another content than was written" in message
    assert f"{what} at [{ROW}, {COLUMN}]: {old!r} recorded, {new!r} now" in message and "--allow-changed" in message
    for world_size, layout in ((1, ONE_RANK), (4, [])):
        codes, report = replay(capsule, tmp_path / "report.json", world_size, *layout, "--allow-changed")
        first = report["first_difference"]
        assert codes == [1] * world_size and report["verdict"] == "different"
        assert (first["what"], first["where"]) == (what, f"[{ROW}, {COLUMN}]")
        assert (first["recorded"], first["found"]) == (old, new)
        rows = rows_of(report)
        assert rows["actor weights before"]["num_different"] == 1 and rows["rollouts: reward"]["verdict"] == "bitwise"
        assert rows["forward: old_logprobs"]["verdict"] == "DIFFERENT"


def test_a_changed_reward_is_named(grpo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights are as recorded, and so are the log-probs; the reward and everything derived from it are not."""
    capsule = tmp_path / "step_2"
    shutil.copytree(grpo, capsule)
    lines = (capsule / "rollouts.jsonl").read_text().splitlines()
    row = json.loads(lines[6])
    lines[6] = json.dumps(row | {"reward": row["reward"] + 1.0})
    (capsule / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    codes, report = replay(capsule, tmp_path / "report.json", 1, *ONE_RANK)
    assert codes == [2] and report == {} and "rollouts.jsonl" in capfd.readouterr().err
    codes, report = replay(capsule, tmp_path / "report.json", 4, "--allow-changed")
    first, rows = report["first_difference"], rows_of(report)
    assert codes == [1] * 4 and (first["what"], first["where"]) == ("rollouts: reward", "rollout 6")
    assert first["found"] == first["recorded"] + 1.0
    for name in ("actor weights before", "forward: old_logprobs", "forward: ref_logprobs"):
        assert rows[name]["verdict"] == "bitwise", name
    for name in ("estimate: advantages", "actor updates: policy/grad_norm", "actor weights after"):
        assert rows[name]["verdict"] == "DIFFERENT", name


def test_another_setting_is_another_result(grpo: Path, tmp_path: Path) -> None:
    """A replay with another learning rate: everything up to the update is the same."""
    codes, report = replay(grpo, tmp_path / "report.json", 4, "actor.lr=2e-4")
    assert codes == [1] * 4 and report["first_difference"]["what"] == "actor updates: policy/lr"
    assert report["overrides"] == ["actor.lr=2e-4"]


def remove_manifest(capsule: Path) -> None:
    (capsule / "manifest.json").unlink()


def cut_values(capsule: Path) -> None:
    content = (capsule / "values.safetensors").read_bytes()
    (capsule / "values.safetensors").write_bytes(content[: len(content) // 2])


def remove_state_digests(capsule: Path) -> None:
    (capsule / "state/step_1" / DIGESTS_FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (remove_manifest, "manifest.json cannot be read"),
        (cut_values, "values.safetensors has"),
        (remove_state_digests, "SHA256SUMS is missing"),
        (shutil.rmtree, "there is no"),
    ],
)
def test_damage_is_refused(
    damage: Callable[[Path], None], found: str, grpo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capsule = tmp_path / "step_2"
    shutil.copytree(grpo, capsule)
    damage(capsule)
    assert replay(capsule, tmp_path / "report.json", 1, *ONE_RANK)[0] == [2]
    assert found in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "tp * pp * cp = 2 * 2 * 1"),
        (["actor.tensr=1"], "actor.tensr"),
        ([*ONE_RANK, "model.path=absent"], "absent"),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[str], found: str, grpo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert replay(grpo, tmp_path / "report.json", 1, *arguments)[0] == [2]
    error = capfd.readouterr().err
    assert found in error and error.count("error: ") == 1


def test_a_capture_that_is_cut_off_leaves_no_capsule(
    task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed in an update of the captured step; the run is started again and captures it whole."""
    overrides = overrides_for(task, tmp_path / "run", *COMMON, "trainer.save_freq=1", "checkpoint.contents=[optimizer]")
    assert kill(2, overrides, Blow("update", entry=7, rank=0))
    capsule = tmp_path / "run/capsules/step_2"
    assert not capsule.exists() and (capsule.parent / "step_2.partial/state/step_1/manifest.json").exists()
    assert replay(capsule, tmp_path / "report.json", 1)[0] == [2]
    assert "only an unfinished one" in capfd.readouterr().err
    assert run_ranks(train, 2, overrides, timeout=150) == [None] * 2
    assert [path.name for path in capsule.parent.iterdir()] == ["step_2"]
    assert replay(capsule, tmp_path / "report.json", 2)[0] == [0, 0]


def test_a_capsule_that_cannot_be_written_does_not_end_the_run(task: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/capsules").write_text("no directory")
    assert run_ranks(train, 1, overrides_for(task, tmp_path / "run", *COMMON), timeout=150) == [None]
    log = (tmp_path / "run/logs/rank0.log").read_text()
    assert "capsule of step 2 failed, the run continues" in log and (tmp_path / "run/summary.json").exists()


def test_command(grpo: Path, tmp_path: Path) -> None:
    """The program of docs/replay.md on two ranks of TP, in forks."""
    arguments = [grpo, "actor.pipeline_model_parallel_size=1", "--json", tmp_path / "report.json"]
    result = fork_ranks(partial(run_script, ROOT / "tools/replay_step.py", *arguments), 2, tmp_path)
    assert_succeeded(result)
    assert "verdict: equal" in result.stdout and "actor tp=2 pp=1 dp=1" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "equal"
