# SPDX-License-Identifier: Apache-2.0
"""The conversion tools and inspect_checkpoint.py as commands; test_conversion.py tests their results."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from actor_runs import Case, build_actor
from checkpoint_runs import make_content, make_saver
from distributed import run_ranks
from megatron_rl.checkpoint.saving import SaveOutcome
from shards import find_differences
from tiny_models import save_tiny_model

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load_tool(name: str) -> ModuleType:
    return importlib.import_module(f"tools.{name}")


TO_MEGATRON, TO_HF, INSPECT = map(load_tool, ("convert_hf_to_megatron", "convert_megatron_to_hf", "inspect_checkpoint"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "llama", num_hidden_layers=2)
    return directory


@pytest.fixture(scope="module")
def broken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, its weights half downloaded."""
    directory = tmp_path_factory.mktemp("broken")
    for file in model.iterdir():
        content = file.read_bytes()
        (directory / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    return directory


def test_there_and_back(model: Path, tmp_path: Path, capsys):
    megatron, back, description = tmp_path / "megatron", tmp_path / "back", tmp_path / "found.json"
    assert TO_MEGATRON.main([f"--hf={model}", f"--out={megatron}", "--file-gib=0.0002", "--processes=2"]) == 0
    assert INSPECT.main([str(megatron), "--tensors", "--verify", f"--json={description}"]) == 0
    assert TO_HF.main([f"--checkpoint={megatron}", f"--out={back}"]) == 0
    tensors = [load_file(directory / "model.safetensors") for directory in (back, model)]
    assert find_differences(*tensors) == []
    printed = capsys.readouterr()
    assert f"wrote {megatron}" in printed.out and f"wrote {back}" in printed.out and "100%" in printed.err
    assert "llama, 2 layers of 64, vocabulary 517" in printed.out
    assert "all files are as they were written" in printed.out
    assert "decoder.layers.self_attention.linear_qkv.weight" in printed.out
    found = json.loads(description.read_text())
    assert found["kind"] == "weights" and len(found["digest"]) == 64 and found["problems"] == []
    (qkv,) = [t for t in found["parts"]["model"] if t["name"].endswith("linear_qkv.weight")]
    assert qkv["shape"] == [2, 128, 64] and qkv["dtype"] == "float32" and qkv["bytes"] == 4 * 2 * 128 * 64


def test_training_checkpoints(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A run directory stands for its newest checkpoint; the commands are those of docs/getting-started.md."""
    command = "python tools/inspect_checkpoint.py checkpoints/runs/first"
    described = command.split()[2:]
    command = "python tools/convert_megatron_to_hf.py --checkpoint checkpoints/runs/first --out policy"
    converted = command.split()[2:]
    monkeypatch.chdir(tmp_path)

    def save(rank: int, world_size: int) -> None:
        outcomes: list[SaveOutcome] = []
        content = make_content(model, 3, 6)
        make_saver(tmp_path / "checkpoints/runs/first/checkpoints", outcomes).save(
            replace(content, state=content.state | {"record": {"loss": 0.5}}),
            {"actor": build_actor(Case(2, dict(pp_size=2)), model)},
        )

    run_ranks(save, 2)
    assert INSPECT.main([*described, "--recipe"]) == 0
    printed = capsys.readouterr().out
    assert "record       1 metrics, the step's row of metrics.jsonl" in printed and "0.5" not in printed
    assert "step         3, policy version 6, weights and optimizer" in printed and "trainer: {}" in printed
    assert "world=2 tp=1 pp=2" in printed.replace("world_size", "world") and '"offset": 6' in printed
    assert TO_HF.main(converted) == 0
    assert (tmp_path / "policy/config.json").is_file()
    file = tmp_path / "checkpoints/runs/first/checkpoints/step_3/actor/__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert INSPECT.main([*described, "--verify"]) == 1
    assert "damaged: actor/__1_0.distcp has" in capsys.readouterr().out


def test_models_in_hf_format(model: Path, capsys):
    assert INSPECT.main([str(model), "--tensors"]) == 0
    assert "model.layers.1.self_attn.k_proj.weight" in capsys.readouterr().out
    assert INSPECT.main([str(model), "--verify"]) == 2


@pytest.mark.parametrize(
    "tool,arguments,found",
    [
        (TO_MEGATRON, ["--hf=absent", "--out=x"], "there is no directory absent"),
        (TO_MEGATRON, ["--hf={model}", "--out={model}"], "exists"),
        (TO_MEGATRON, ["--hf={model}", "--out={out}", "--processes=0"], "--processes 0"),
        (TO_MEGATRON, ["--hf={model}", "--out=/proc/nothing/x"], "cannot be written"),
        (TO_MEGATRON, ["--hf={broken}", "--out={out}"], "model.safetensors is damaged: "),
        (INSPECT, ["{broken}"], "model.safetensors is damaged: "),
        (TO_HF, ["--checkpoint={model}", "--out={out}"], "holds no Megatron distributed checkpoint"),
        (INSPECT, ["absent"], "holds no Megatron distributed checkpoint"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else None,
)
def test_bad_input_is_one_error(
    tool: ModuleType, arguments: list[str], found: str, model: Path, broken: Path, tmp_path: Path, capsys
):
    assert tool.main([text.format(model=model, broken=broken, out=tmp_path / "out") for text in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "error: " in printed.err and found in printed.err and "hint:" in printed.err
    assert not list(tmp_path.iterdir())


def test_help_needs_neither_megatron_core_nor_transformers():
    code = (
        f"import runpy, sys; sys.argv = ['convert', '--help']\n"
        f"try: runpy.run_path({str(TOOLS / 'convert_hf_to_megatron.py')!r}, run_name='__main__')\n"
        f"except SystemExit as exit: assert exit.code == 0\n"
        f"assert not [name for name in ('megatron.core', 'vllm', 'transformers') if name in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


@pytest.mark.slow
def test_torchrun(model: Path, tmp_path: Path):
    """Four ranks convert there and back; an error is printed and ends all of them."""

    def launch(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", str(TOOLS / tool), *arguments]
        return subprocess.run(command, timeout=120, capture_output=True, text=True)

    there = launch("convert_hf_to_megatron.py", f"--hf={model}", f"--out={tmp_path / 'm'}", "--file-gib=0.0001")
    back = launch("convert_megatron_to_hf.py", f"--checkpoint={tmp_path / 'm'}", f"--out={tmp_path / 'h'}")
    assert there.returncode == back.returncode == 0, there.stderr + back.stderr
    assert len(list((tmp_path / "m").glob("*.distcp"))) > 4 and there.stdout.count("wrote") == 1
    assert "rank 0 of 4: 100%" in there.stderr
    again = launch("convert_hf_to_megatron.py", f"--hf={model}", f"--out={tmp_path / 'm'}")
    assert again.returncode != 0 and "error:" in again.stderr and not dist.is_initialized()
