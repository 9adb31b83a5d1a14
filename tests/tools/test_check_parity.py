# SPDX-License-Identifier: Apache-2.0
"""check_parity.py as a command; tests/parity/test_check.py tests its findings."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file, save_file

from distributed import run_ranks
from tiny_models import ENGINE_SIZES, save_tiny_model
from tools.conversion.conversion import convert_to_megatron
from tools.conversion.units import Workers

ROOT = Path(__file__).resolve().parents[2]


def load_tool() -> ModuleType:
    return importlib.import_module("tools.check_parity")


TOOL = load_tool()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hf`, and `wrong`: a checkpoint of it in which the keys of a layer are its values."""
    directory = tmp_path_factory.mktemp("parity")
    save_tiny_model(directory / "hf", "llama", num_hidden_layers=2, **ENGINE_SIZES)
    save_tiny_model(directory / "changed", "llama", num_hidden_layers=2, **ENGINE_SIZES)
    tensors = load_file(directory / "hf/model.safetensors")
    key, value = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
    tensors[key] = tensors[value].clone()
    save_file(tensors, directory / "changed/model.safetensors", {"format": "pt"})
    convert_to_megatron(
        directory / "changed", directory / "wrong", dtype=None, file_bytes=1 << 30, force=False, workers=Workers()
    )
    return directory


def run_tool(world_size: int, capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[int], str, str]:
    """Return exit codes and output of all ranks."""
    codes = run_ranks(lambda rank, world_size: TOOL.main(list(map(str, arguments))), world_size, timeout=150)
    printed = capfd.readouterr()
    return codes, printed.out, printed.err


def test_report(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], vllm_imported: None) -> None:
    """All three models at once, in a layout; the table is printed once and the file has its numbers."""
    codes, out, _ = run_tool(
        2,
        capfd,
        "--hf",
        model / "hf",
        "--layout",
        "tp=2",
        "--engine-tp",
        2,
        "--num-prompts",
        2,
        "--prompt-length",
        12,
        "--response-length",
        6,
        "--json",
        tmp_path / "report.json",
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert codes == [0, 0] and out.count("verdict: equal") == 1 and "hf-vllm" in out
    assert report["verdict"] == "equal" and max(report["max_abs_logprob_gap"].values()) < 1e-4
    assert report["settings"]["engine"] == "vllm" and len(report["logprobs"]["vllm"]) == 2


def test_a_wrong_checkpoint(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    codes, out, _ = run_tool(1, capfd, "--hf", model / "hf", "--checkpoint", model / "wrong", "--engine", "none")
    assert codes == [1] and "verdict: different" in out and "<- first to differ" in out
    assert "model.layers.1.self_attn.k_proj.weight is model.layers.1.self_attn.v_proj.weight" in out


@pytest.mark.parametrize(
    "arguments,found",
    [
        (["--hf", "absent"], "there is no directory absent"),
        (["--hf", "{hf}", "--layout", "tp=3"], "tp"),
        (["--hf", "{hf}", "--layout", "tp=1,dp=2"], "--layout tp=1,dp=2 takes 2 ranks, there are 1"),
        (["--hf", "{hf}", "--checkpoint", "{hf}"], "holds no Megatron distributed checkpoint"),
        (["--hf", "{hf}", "--engine-tp", "2"], "--engine-tp 2 with 1 ranks"),
        (["--hf", "{hf}", "--num-prompts", "0"], "0 prompts"),
    ],
    ids=lambda value: " ".join(value[2:]) or "absent" if isinstance(value, list) else None,
)
def test_bad_input_is_one_error(
    arguments: list[str], found: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes, out, err = run_tool(1, capfd, *(text.format(hf=model / "hf") for text in arguments))
    assert codes == [2] and out == "" and found in err and "hint:" in err
