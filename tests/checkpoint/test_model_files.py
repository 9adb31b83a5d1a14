# SPDX-License-Identifier: Apache-2.0
"""Packed experts of gpt-oss, also in MXFP4: read as transformers reads them, and written packed in bfloat16.

Not covered: published checkpoints, whose files are larger.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import make_setup
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import (
    ModelFiles,
    ShardedModel,
    check_checkpoint,
    decode_mxfp4,
    load_huggingface,
    save_huggingface,
)
from megatron_rl.config.schema import ActorConfig
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.transfer.planner import group_shards
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.packed_experts import split_huggingface_experts
from megatron_rl.weights.rollout_layout import huggingface_placements
from shards import find_differences
from tiny_models import save_tiny_model
from tools.conversion.conversion import CheckpointWeights, convert_to_huggingface, convert_to_megatron
from tools.conversion.units import Workers
from tools.parity.weights import compare_weights

LAYER = "model.layers.0.mlp.experts."


def draw_mxfp4(*sizes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [..., 16] and scales of these sizes; all codes, and exponents from tiny to large."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*sizes, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(110, 140, sizes, generator=generator).to(torch.uint8)


@pytest.fixture
def quantized(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model in bfloat16 with experts in MXFP4, scales in another file than blocks; and the tensors as decoded."""
    source = tmp_path / "mxfp4"
    model = save_tiny_model(source, "gpt_oss", num_hidden_layers=2)
    tensors = {name: x.to(torch.bfloat16) for name, x in model.state_dict().items()}
    decoded, scales = dict(tensors), {}
    for layer in range(2):
        for seed, (what, rows, columns) in enumerate((("gate_up_proj", 2 * 96, 64), ("down_proj", 64, 96))):
            name = f"model.layers.{layer}.mlp.experts.{what}"
            blocks, exponents = draw_mxfp4(4, rows, columns // 32, seed=2 * layer + seed)
            del tensors[name]
            tensors[f"{name}_blocks"], scales[f"{name}_scales"] = blocks, exponents
            decoded[name] = convert_moe_packed_tensors(blocks, exponents)
    files = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": scales}
    (source / "model.safetensors").unlink()
    for file, content in files.items():
        save_file(content, source / file, metadata={"format": "pt"})
    weight_map = {name: file for file, content in files.items() for name in content}
    (source / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=weight_map)))
    config = json.loads((source / "config.json").read_text())
    quantization = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    config |= dict(dtype="bfloat16", quantization_config=quantization)
    (source / "config.json").write_text(json.dumps(config))
    return source, decoded


def test_mxfp4_is_decoded_as_transformers_decodes_it() -> None:
    """Every pair of codes with every exponent; transformers' result has rows and columns exchanged."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].repeat(1, 1, 16)
    found = decode_mxfp4(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert found.shape == (1, 256, 512) and found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))


def test_mxfp4_becomes_megatrons_weights_and_bfloat16(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Loaded directly, and converted there and back, after which config.json requests no decoding."""
    source, decoded = quantized
    shape = load_model_shape(source)
    check_checkpoint(source, shape)
    params = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in shape.logical_tensors().items()}
    load_huggingface(source, huggingface_placements(shape), params)
    assert find_differences(params, split_huggingface_experts(shape, decoded)) == []
    settings: dict[str, Any] = dict(dtype=None, file_bytes=1 << 16, force=False, workers=Workers())
    checkpoint = convert_to_megatron(source, source.parent / "megatron", **settings)
    back = convert_to_huggingface(CheckpointWeights(checkpoint), source.parent / "back", **settings)
    written = {name: x for file in back.glob("*.safetensors") for name, x in load_file(file).items()}
    assert find_differences(written, decoded) == []
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    assert load_model_shape(back) == shape
    assert compare_weights(source, huggingface_placements(shape), params) == []
    params[f"{LAYER}1.up_proj.weight"].copy_(params[f"{LAYER}1.gate_proj.weight"].clone())
    (wrong,) = compare_weights(source, huggingface_placements(shape), params)
    assert (wrong.name, wrong.what) == (f"{LAYER}1.up_proj.weight", f"is {LAYER}1.gate_proj.weight")


def test_blocks_without_scales_are_refused(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    source, _ = quantized
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"][f"{LAYER}down_proj_scales"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="down_proj_blocks, but no .*down_proj_scales"):
        ModelFiles(source)


def test_a_packed_tensor_of_another_size_is_named(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    source, _ = quantized
    config = json.loads((source / "config.json").read_text()) | dict(intermediate_size=64)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"experts.0.*_proj.* is \[.*96.*\], config.json says \[.*64"):
        check_checkpoint(source, load_model_shape(source))


def test_packed_names_of_other_families_are_their_own(tmp_path: Path) -> None:
    """Others stack gates above ups: to read them as gpt-oss' would be another model."""
    save_tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=1)
    name = f"{LAYER}gate_up_proj"
    save_file({name: torch.zeros(4, 64, 128)}, tmp_path / "model.safetensors")
    assert list(ModelFiles(tmp_path)) == [name]


def _save(rank: int, world_size: int, source: Path, out: Path) -> None:
    groups = build_groups(ParallelLayout(world_size, tp_size=2, ep_size=2))
    policy = PackedModel(make_setup("reference", source, ActorConfig(sequence_parallel=True), groups, dtype="bfloat16"))
    shards = group_shards(policy.placements, policy.shard_key, groups.layout.ranks)
    params: dict[str, Any] = dict(policy.params)
    model = ShardedModel(policy.shape, shards, params, groups.world, torch.bfloat16)
    save_huggingface(out, model, side_files_from=source, bucket_bytes=1 << 12, max_file_bytes=1 << 16)


def test_what_ranks_export_is_packed_in_bfloat16(quantized: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """TP 2 times EP 2 load MXFP4, and write the tensors that transformers would have decoded."""
    source, decoded = quantized
    out = source.parent / "export"
    run_ranks(_save, 4, source, out, timeout=100)
    written = {name: x for file in out.glob("*.safetensors") for name, x in load_file(file).items()}
    assert find_differences(written, decoded) == []
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
