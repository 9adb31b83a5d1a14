# SPDX-License-Identifier: Apache-2.0
"""Parity of transformers, Megatron and vLLM: equal models are called equal, and a planted fault is named.

A fault is planted in the checkpoint that Megatron reads; the model in HF format is unchanged. All Megatron checks share
one launch of TP2 x PP2, the engine has its own. Not covered: bfloat16, and faults of the engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distributed import run_ranks
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.layout import ParallelLayout
from tiny_models import ENGINE_SIZES, draw_tokens, save_tiny_model
from tools.conversion.conversion import convert_to_megatron
from tools.conversion.units import Workers
from tools.parity.check import ParityCheck, run_parity
from tools.parity.report import format_report

PROMPTS = draw_tokens([24, 9, 17])
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


def swap_keys_and_values(tensors: Tensors, config: Config) -> None:
    for what in ("weight", "bias"):
        key, value = (f"model.layers.2.self_attn.{name}_proj.{what}" for name in "kv")
        tensors[key], tensors[value] = tensors[value].clone(), tensors[key].clone()


def change_rope_base(tensors: Tensors, config: Config) -> None:
    config["rope_parameters"]["rope_theta"] = 1e6


def forget_biases(tensors: Tensors, config: Config) -> None:
    """Turn a Qwen2 without its biases into a Llama."""
    for name in [name for name in tensors if name.endswith("bias")]:
        del tensors[name]
    config.update(model_type="llama", architectures=["LlamaForCausalLM"])


def zero_a_bias(tensors: Tensors, config: Config) -> None:
    tensors["model.layers.3.self_attn.q_proj.bias"].zero_()


def tie_what_is_not_tied(tensors: Tensors, config: Config) -> None:
    del tensors["lm_head.weight"]
    config["tie_word_embeddings"] = True


FAULTS: dict[str, Callable[[Tensors, Config], None]] = {
    "swap": swap_keys_and_values,
    "rope": change_rope_base,
    "no-bias": forget_biases,
    "zero-bias": zero_a_bias,
    "tie": tie_what_is_not_tied,
}


def plant(model: Path, fault: Callable[[Tensors, Config], None] | None, out: Path) -> Path:
    """A distributed checkpoint of `model` with a fault."""
    wrong = out / "hf"
    shutil.copytree(model, wrong)
    if fault is not None:
        tensors, config = load_file(wrong / "model.safetensors"), json.loads((wrong / "config.json").read_text())
        fault(tensors, config)
        save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
        (wrong / "config.json").write_text(json.dumps(config))
    return convert_to_megatron(wrong, out / "megatron", dtype=None, file_bytes=1 << 30, force=False, workers=Workers())


def make_check(hf: Path, weights: Path | None, layout: ParallelLayout, **changes: Any) -> ParityCheck:
    settings = (
        dict(
            sequence_parallel=False, dtype="float32", engine=None, engine_tp_size=1, prompts=PROMPTS, response_length=8
        )
        | changes
    )
    return ParityCheck(hf=hf, weights=weights, layout=layout, **settings)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The report of every fault, and of models without one."""
    root = tmp_path_factory.mktemp("parity")
    save_tiny_model(root / "qwen2", "qwen2", tie_word_embeddings=False)
    save_tiny_model(root / "mixtral", "mixtral")
    save_tiny_model(root / "gemma", "gemma")
    cases: dict[str, tuple[Path, Path | None, bool]] = {
        "files": (root / "qwen2", None, False),
        "gemma": (root / "gemma", None, True),
        "mixtral": (root / "mixtral", plant(root / "mixtral", None, root / "same-mixtral"), True),
        "checkpoint": (root / "qwen2", plant(root / "qwen2", None, root / "same"), True),
    }
    cases |= {
        name: (root / "qwen2", plant(root / "qwen2", fault, root / name), False) for name, fault in FAULTS.items()
    }

    def check_all(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
        process, layout = init_distributed(2), ParallelLayout(world_size, tp_size=2, pp_size=2)
        found = {
            name: run_parity(make_check(hf, weights, layout, sequence_parallel=sequence_parallel), process)
            for name, (hf, weights, sequence_parallel) in cases.items()
        }
        sampled = make_check(root / "qwen2", None, layout, engine="megatron")
        return found | {"engine": run_parity(sampled, process)}

    found = run_ranks(check_all, 4, timeout=150)
    assert all(other == found[0] for other in found), "the report is the same on every rank"
    return found[0]


@pytest.mark.parametrize("name", ["files", "checkpoint", "gemma", "mixtral"])
def test_equal_models_are_equal(name: str, reports: dict[str, dict[str, Any]]):
    report = reports[name]
    assert report["verdict"] == "equal" and report["causes"] == [] and report["first_divergence"] is None
    assert report["max_abs_logprob_gap"]["hf-megatron"] < 2e-5
    assert len(report["trace"]) == 4 * 8 + 3 and max(gap["relative_gap"] for gap in report["trace"]) < 1e-5
    assert [len(scores) for scores in report["logprobs"]["megatron"]] == [23, 8, 16]


def test_the_megatron_engine_samples(reports: dict[str, dict[str, Any]]):
    """It runs the modules under comparison; transformers and Megatron score its samples."""
    report = reports["engine"]
    gaps = report["max_abs_logprob_gap"]
    assert report["verdict"] == "equal" and max(gaps.values()) < 2e-5
    assert set(gaps) == {"hf-megatron", "hf-megatron_engine", "megatron-megatron_engine"}
    assert report["logprob_gaps"]["hf-megatron_engine"]["tokens"] == 8 * len(PROMPTS)


@pytest.mark.parametrize(
    "name,first_tensor,cause",
    [
        (
            "swap",
            "model.layers.2.self_attn.k_proj",
            "megatron: model.layers.2.self_attn.k_proj.weight is model.layers.2.self_attn.v_proj.weight",
        ),
        (
            "rope",
            "model.layers.0.self_attn (heads)",
            "rope_theta is 1000000.0 in the checkpoint's config.json, 10000.0 in the model's",
        ),
        (
            "no-bias",
            "model.layers.0.self_attn.q_proj",
            "qkv_bias is False in the checkpoint's config.json, True in the model's",
        ),
        ("zero-bias", "model.layers.3.self_attn.q_proj", "megatron: model.layers.3.self_attn.q_proj.bias is zero"),
        ("tie", "lm_head", "tied_embeddings is True in the checkpoint's config.json, False in the model's"),
    ],
)
def test_a_planted_fault_is_named(name: str, first_tensor: str, cause: str, reports: dict[str, dict[str, Any]]):
    report = reports[name]
    assert report["verdict"] == "different" and report["max_abs_logprob_gap"]["hf-megatron"] > 1e-3
    assert report["first_divergence"]["tensor"] == first_tensor
    before = [
        gap["relative_gap"] for gap in report["trace"][: [g["tensor"] for g in report["trace"]].index(first_tensor)]
    ]
    assert max(before, default=0.0) < 1e-5 < 1e-3 < report["first_divergence"]["relative_gap"]
    assert any(found.startswith(cause) for found in report["causes"]), report["causes"]
    table = format_report(report)
    assert cause in table and f"{first_tensor} is the first result that differs" in table


@pytest.mark.parametrize("family", ["qwen2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_vllm_agrees(family: str, tmp_path: Path, vllm_imported: None):
    """The engine samples with temperature 1; transformers and Megatron score its samples."""
    save_tiny_model(tmp_path / "hf", family, **ENGINE_SIZES)
    weights = plant(tmp_path / "hf", None, tmp_path / "checkpoint")

    def check(rank: int, world_size: int) -> dict[str, Any]:
        layout = ParallelLayout(world_size, pp_size=2)
        return run_parity(make_check(tmp_path / "hf", weights, layout, engine="vllm"), init_distributed(2))

    report, other = run_ranks(check, 2, timeout=150)
    assert report == other and report["verdict"] == "equal" and report["wrong_weights"] == {}
    gaps = report["max_abs_logprob_gap"]
    assert set(gaps) == {"hf-megatron", "hf-vllm", "megatron-vllm"} and max(gaps.values()) < 1e-4
    assert report["logprob_gaps"]["hf-vllm"]["tokens"] == 8 * len(PROMPTS)
