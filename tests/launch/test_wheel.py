# SPDX-License-Identifier: Apache-2.0
"""The wheel: its extras, its scripts and recipes, and training from an environment without a checkout.

The slow test takes the packages of the test environment instead of installing the extra `cpu`. Not covered: that an
extra can be installed; launch/setup.sh installs the same files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from launch.check_environment import read_pins
from launch_runs import ROOT, environment
from megatron_rl.planning.admission import find_shape
from megatron_rl.run.scripts import SCRIPTS, build_command

PYTHON = sys.executable
GRPO = str(ROOT / "launch/pretrain_grpo.py")
RECIPE = str(ROOT / "launch/recipes/toy_arithmetic.yaml")
EXTRAS = {
    "cpu": "requirements-cpu.txt",
    "gpu": "requirements.txt",
    "test": "tests/requirements.txt",
    "docs": "docs/requirements.txt",
}
ONLY_FOR_TESTS = {"hypothesis", "ruff", "pyright", "playwright", "peft", "mkdocs", "mkdocs-material"}


def test_tests_and_the_site_are_in_no_runtime_extra() -> None:
    pins = {extra: read_pins(ROOT / file).keys() for extra, file in EXTRAS.items()}
    assert not ONLY_FOR_TESTS & (pins["cpu"] | pins["gpu"])
    assert pins["test"] | pins["docs"] >= ONLY_FOR_TESTS


@pytest.mark.parametrize(
    ("typed", "started"),
    [
        (["train", "toy_arithmetic.yaml", "actor.lr=1"], [PYTHON, GRPO, RECIPE, "actor.lr=1"]),
        (["train", "launch/recipes/toy_arithmetic.yaml"], [PYTHON, GRPO, RECIPE]),
        (["train", "mine.yaml"], [PYTHON, GRPO, "mine.yaml"]),
        (["train", "there.yaml", "--dry-run"], [PYTHON, GRPO, "there.yaml", "--dry-run"]),
        (
            ["train", "--nproc-per-node", "2", "toy_arithmetic.yaml"],
            [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", GRPO, RECIPE],
        ),
        (["convert", "to-megatron", "--hf"], [PYTHON, str(ROOT / "tools/convert_hf_to_megatron.py"), "--hf"]),
        (["convert"], None),
        (["fly"], None),
        ([], None),
    ],
)
def test_what_a_command_starts(
    typed: list[str], started: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert build_command(typed) == started


def test_a_file_here_wins_over_a_recipe_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_arithmetic.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert build_command(["train", "toy_arithmetic.yaml"]) == [PYTHON, GRPO, "toy_arithmetic.yaml"]


def test_scripts_exist_and_shapes_are_found() -> None:
    assert [name for name in SCRIPTS.values() if not (ROOT / name).is_file()] == []
    assert find_shape("models/Qwen3-8B", None).parent == ROOT / "launch/recipes/shapes"


def build_wheel(directory: Path) -> Path:
    """Build from a copy of what git knows: a build writes beside its sources."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "megatron_rl", "launch", "tools", "*requirements*.txt"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in [*names, "pyproject.toml", "LICENSE"]:
        (directory / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / "sources" / name).write_bytes((ROOT / name).read_bytes())
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), "./sources"]
    subprocess.run([PYTHON, "-m", "pip", *command], cwd=directory, check=True)
    (wheel,) = directory.glob("*.whl")
    packed, scripts = ZipFile(wheel).namelist(), "megatron_rl/scripts/"
    in_wheel = {name.removeprefix(scripts) for name in packed}
    kinds = (".py", ".yaml", ".json", ".js", ".css", ".html", "uplot/LICENSE")
    code = [name for name in names if name.endswith(kinds) and not name.startswith("launch/sglang")]
    assert [name for name in code if name not in in_wheel and not name.startswith("docs")] == []
    assert all(name.startswith("megatron_rl") for name in packed)  # no `tools` among the packages of others
    return wheel


@pytest.mark.slow
def test_training_from_a_wheel_in_another_directory(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    venv.create(tmp_path / "env", with_pip=False)
    target = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")})
    ZipFile(wheel).extractall(target)
    (metadata,) = Distribution.discover(name="megatron_rl", path=[target])
    wanted = [Requirement(line) for line in metadata.requires or []]  # lines with markers and comments among them
    for extra, file in EXTRAS.items():
        found = {
            x.name: str(x.specifier) for x in wanted if x.marker is not None and x.marker.evaluate({"extra": extra})
        }
        assert found == {name: f"=={version}" for name, version in read_pins(ROOT / file).items()}
    (Path(target) / "packages.pth").write_text(sysconfig.get_path("purelib"))
    start = "from megatron_rl.run.scripts import main; main()"  # as the console script, which pip writes
    (tmp_path / "elsewhere").mkdir()

    def run(typed: str, *more: str) -> str:
        command = [str(tmp_path / "env/bin/python"), "-c", start, *typed.split()[1:], *more]
        inside = environment(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
        inside.pop("PYTHONPATH", None)
        done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=inside, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    task = "megatron-rl toy-task --out checkpoints/toy_arithmetic"
    run(task, "--train", "128", "--validation", "8", "--layers", "2")
    run("megatron-rl finetune --nproc-per-node 2 toy_arithmetic_sft.yaml", "trainer.total_steps=2")
    train = "megatron-rl train --nproc-per-node 2 toy_arithmetic.yaml actor.pipeline_model_parallel_size=1"
    run(train, "trainer.total_steps=2", "trainer.run_dir=run")
    assert json.loads((tmp_path / "elsewhere/run/summary.json").read_text())["steps"] == 2
    shape = "import megatron_rl.planning.admission as a; print(a.__file__, a.find_shape('models/Qwen3-8B', None))"
    command = [str(tmp_path / "env/bin/python"), "-c", shape]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert [Path(path).relative_to(target).as_posix() for path in found] == [
        "megatron_rl/planning/admission.py",
        "megatron_rl/scripts/launch/recipes/shapes/Qwen3-8B.json",
    ]
