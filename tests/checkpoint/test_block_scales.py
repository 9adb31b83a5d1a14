# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in FP8 with block scales are read as the bfloat16 tensors that they stand for, in any layout.

The models are quantized here, by the published formula. Not covered: checkpoints as published (their size), and files
that were altered.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import (
    ModelFiles,
    ShardedModel,
    check_checkpoint,
    load_huggingface,
    save_huggingface,
)
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.planner import group_shards
from megatron_rl.types import UserError
from megatron_rl.weights.megatron_layout import megatron_placements
from megatron_rl.weights.model_config import load_model_shape
from shards import cut_shards, find_differences, make_empty_shards, place_megatron
from tiny_models import save_tiny_model
from tools.conversion.conversion import CheckpointWeights, convert_to_huggingface, convert_to_megatron
from tools.conversion.units import Workers

Tensors = dict[str, torch.Tensor]
_LARGEST = 448.0
BLOCK = (20, 12)  # divides no matrix of these models, and no part of one on a TP rank
_PLAIN = ("norm.weight", "mlp.gate.weight", "embed_tokens.weight", "head.weight", "bias")


def quantize(directory: Path, block: tuple[int, int] = BLOCK) -> Tensors:
    """Write the matrices of the layers in FP8; return the tensors in bfloat16 that the files stand for."""
    expected: Tensors = {}
    for file in directory.glob("*.safetensors"):
        written: Tensors = {}
        for name, tensor in load_file(file).items():
            written[name] = expected[name] = tensor.to(torch.bfloat16)
            if not name.endswith(_PLAIN):
                codes = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
                scales = torch.empty([math.ceil(n / edge) for n, edge in zip(tensor.shape, block, strict=True)])
                expected[name] = torch.empty(tensor.shape, dtype=torch.bfloat16)
                for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
                    at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                    scales[i, j] = tensor[at].abs().max() / _LARGEST
                    codes[at] = (tensor[at] / scales[i, j]).to(torch.float8_e4m3fn)
                    expected[name][at] = (codes[at].float() * scales[i, j]).to(torch.bfloat16)
                written |= {name: codes, f"{name}_scale_inv": scales}
        save_file(written, file, metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = {name: file.name for file in directory.glob("*.safetensors") for name in load_file(file)}
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    describe(directory, quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[*block])
    return expected


def describe(directory: Path, **encoding: Any) -> None:
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": encoding}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    found = {}
    for family in ("deepseek_v3", "qwen3", "qwen3_moe"):
        directory = tmp_path_factory.mktemp(family)
        save_tiny_model(directory, family)
        found[family] = directory, quantize(directory)
    return found


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", dict(tp_size=2)),
        ("deepseek_v3", dict(tp_size=2, ep_size=2, pp_size=2)),
        ("deepseek_v3", dict(tp_size=2, ep_size=4, etp_size=1)),
        ("qwen3", {}),
        ("qwen3", dict(tp_size=2, pp_size=2)),
        ("qwen3", dict(tp_size=4)),
        ("qwen3_moe", dict(tp_size=2, ep_size=2)),
    ],
    ids=str,
)
def test_ranks_read_the_decoded_numbers(
    quantized: dict[str, tuple[Path, Tensors]], family: str, sizes: dict[str, int]
) -> None:
    """Bit for bit, though no slice of a rank begins at a block."""
    directory, expected = quantized[family]
    shape = load_model_shape(directory)
    check_checkpoint(directory, shape)
    assert {name for name, (_, dtype) in ModelFiles(directory).read_headers().items() if dtype != "BF16"} == set()
    world = math.prod(size for name, size in sizes.items() if name != "etp_size")
    for placements in place_megatron(shape, ParallelLayout(world, **sizes)):
        params = make_empty_shards(placements, torch.bfloat16, padding_rows=3)
        load_huggingface(directory, placements, params)
        wanted = cut_shards(placements, expected, 3, fill=0.0)
        assert find_differences(params, wanted) == []


def test_published_blocks_and_their_formula(tmp_path: Path) -> None:
    """128 x 128, of which tiny matrices fill a part; the numbers differ from the unquantized by at most a sixteenth."""
    save_tiny_model(tmp_path, "qwen3")
    before = {name: x for file in tmp_path.glob("*.safetensors") for name, x in load_file(file).items()}
    expected = quantize(tmp_path, (128, 128))
    with ModelFiles(tmp_path).open() as files:
        for name, tensor in expected.items():
            found = files.get_slice(name)[:]
            assert found.dtype == torch.bfloat16 and torch.equal(found, tensor)
            gap = (found.float() - before[name].float()).abs()
            assert (gap <= before[name].abs() / 16 + before[name].abs().max() * 2**-17).all()


def _save_on_rank(rank: int, world_size: int, source: Path, target: Path) -> None:
    shape, layout = load_model_shape(source), ParallelLayout(world_size, tp_size=world_size)
    shards = group_shards(lambda r: megatron_placements(shape, layout, r), lambda r: r, range(world_size))
    placements = list(megatron_placements(shape, layout, rank))
    params = make_empty_shards(placements, torch.bfloat16, 3)
    load_huggingface(source, placements, params)
    model = ShardedModel(shape, shards, params, torch.distributed.group.WORLD, torch.bfloat16)
    save_huggingface(target, model, side_files_from=source, bucket_bytes=2000)


def test_exports_and_conversions_are_bfloat16_with_their_draft_layers(tmp_path: Path) -> None:
    """The draft layer, copied from the model of the start, is decoded too; config.json names no encoding."""
    source = tmp_path / "fp8"
    save_tiny_model(source, "deepseek_v3")
    drafts = {f"model.layers.4.{name}": torch.randn(64, 128) for name in ("eh_proj.weight", "shared_head.norm.weight")}
    save_file(drafts, source / "drafts.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    config.pop("num_mtp_layers", None)
    (source / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = dict(dtype=None, file_bytes=1 << 16, force=False, workers=Workers())
    expected = quantize(source)
    run_ranks(_save_on_rank, 2, source, tmp_path / "exported", timeout=90)
    convert_to_megatron(source, tmp_path / "megatron", **settings)
    convert_to_huggingface(CheckpointWeights(tmp_path / "megatron"), tmp_path / "converted", **settings)
    for directory in (tmp_path / "exported", tmp_path / "converted"):
        found = {name: x for file in directory.glob("*.safetensors") for name, x in load_file(file).items()}
        wanted = {name: x.float() if name.endswith("e_score_correction_bias") else x for name, x in expected.items()}
        if directory.name == "converted":  # as stored
            wanted = expected
        assert find_differences(found, wanted) == []
        assert "quantization_config" not in json.loads((directory / "config.json").read_text())
        check_checkpoint(directory, load_model_shape(directory))


def _damage(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace or delete tensors that end with a name."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for end, value in changes.items():
            name = next(name for name in tensors if name.endswith(end.replace("__", ".")))
            tensors.pop(name)
            if value is not None:
                tensors[name] = value
        save_file(tensors, file, metadata={"format": "pt"})


_OF_Q = "0__self_attn__q_proj__weight_scale_inv"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({_OF_Q: torch.ones(3, 3)}, "q_proj.weight_scale_inv is [3, 3], blocks of [128, 64] are [7, 6]"),
        ({_OF_Q: None}, "q_proj.weight is F8_E4M3 without model.layers.0.self_attn.q_proj.weight_scale_inv"),
        ({"0__self_attn__q_proj__weight": torch.ones(128, 64)}, "q_proj.weight is F32 [128, 64] with scales in F32"),
        ({_OF_Q: torch.ones(7, 6, dtype=torch.int32)}, "q_proj.weight is F8_E4M3 [128, 64] with scales in I32"),
    ],
    ids=["other blocks", "no scales", "no codes", "scales of another type"],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    save_tiny_model(tmp_path, "qwen3")
    quantize(tmp_path)
    _damage(tmp_path, **changes)
    with pytest.raises(UserError) as error:
        check_checkpoint(tmp_path, load_model_shape(tmp_path))
    assert found in error.value.found and error.value.source == str(tmp_path)
    assert "weight_block_size = [20, 12]" in error.value.expected and "convert it to bfloat16" in error.value.hint


@pytest.mark.parametrize(
    "encoding",
    [
        dict(quant_method="fp8"),
        dict(quant_method="fp8", weight_block_size=None),
        dict(quant_method="fp8", weight_block_size=[128]),
        dict(quant_method="fp8", weight_block_size=[0, 128]),
        dict(quant_method="fp8", weight_block_size=[128, 128], fmt="e5m2"),
        dict(quant_method="compressed-tensors", weight_block_size=[128, 128]),
        dict(quant_method="awq", bits=4),
    ],
    ids=str,
)
def test_other_encodings_are_refused(tmp_path: Path, encoding: dict[str, Any]) -> None:
    save_tiny_model(tmp_path, "qwen3")
    describe(tmp_path, **encoding)
    with pytest.raises(UserError, match="quantization_config=") as error:
        load_model_shape(tmp_path)
    assert "FP8 (e4m3) with a weight_block_size" in error.value.expected
