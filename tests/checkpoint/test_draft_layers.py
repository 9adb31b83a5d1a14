# SPDX-License-Identifier: Apache-2.0
"""Layers that predict further tokens: kept by conversions and exports, or reported as missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from mtp_models import read_tensors
from safetensors.torch import load_file, save_file

from actor_runs import Case, build_actor
from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import ShardedModel, save_huggingface
from megatron_rl.checkpoint.pieces import load_weights
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.planner import group_shards
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import megatron_placements
from megatron_rl.weights.model_config import load_model_shape
from shards import cut_shards, find_differences, make_empty_shards
from tiny_models import save_tiny_model
from tools.conversion.conversion import CheckpointWeights, convert_to_huggingface, convert_to_megatron
from tools.conversion.units import Workers

SETTINGS: dict[str, Any] = dict(dtype=None, file_bytes=1 << 16, force=False, workers=Workers())


def save_with_drafts(directory: Path) -> ModelShape:
    """A tiny DeepSeek-V3 with two tensors of a layer behind its last, in a file of their own."""
    save_tiny_model(directory, "deepseek_v3")
    config = json.loads((directory / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    drafts = {f"model.layers.4.{name}": torch.randn(64, 128) for name in ("eh_proj.weight", "shared_head.head.weight")}
    save_file(drafts, directory / "drafts.safetensors", metadata={"format": "pt"})
    names = {name: file.name for file in directory.glob("*.safetensors") for name in load_file(file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return load_model_shape(directory)


def test_draft_layers_under_names_of_their_own(tmp_path: Path) -> None:
    """Of Qwen3-Next they begin with mtp; a conversion there and back keeps them."""
    save_tiny_model(tmp_path / "hf", "qwen3_next")
    drafts = {"mtp.fc.weight": torch.randn(64, 128), "mtp.layers.0.input_layernorm.weight": torch.randn(64)}
    save_file(drafts, tmp_path / "hf/drafts.safetensors", metadata={"format": "pt"})
    original = read_tensors(tmp_path / "hf")
    names = {name: file.name for file in (tmp_path / "hf").glob("*.safetensors") for name in load_file(file)}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert len(original) == len(load_model_shape(tmp_path / "hf").logical_tensors()) + 2
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", **SETTINGS)
    convert_to_huggingface(CheckpointWeights(tmp_path / "megatron"), tmp_path / "back", **SETTINGS)
    assert find_differences(read_tensors(tmp_path / "back"), original) == []


def test_draft_layers_are_kept_as_they_are(tmp_path: Path) -> None:
    """Through a conversion and by the export of a run; without their weights, config.json has none."""
    shape = save_with_drafts(tmp_path / "hf")
    original = read_tensors(tmp_path / "hf")
    assert len(original) == len(shape.logical_tensors()) + 2
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", **SETTINGS)
    table = megatron_placements(shape, ParallelLayout(4, tp_size=2, ep_size=2), 3)
    params = make_empty_shards(table)
    load_weights(tmp_path / "megatron", shape, table, params)
    assert find_differences(params, cut_shards(table, original)) == []
    convert_to_huggingface(CheckpointWeights(tmp_path / "megatron"), tmp_path / "back", **SETTINGS)
    assert find_differences(read_tensors(tmp_path / "back"), original) == []
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    assert json.loads((tmp_path / "back/config.json").read_text()) == config

    def save(rank: int, world_size: int) -> None:
        actor = build_actor(Case(world_size), tmp_path / "hf")
        for source, target in (("hf", "exported"), ("megatron/config", "without")):
            shards = group_shards(actor.model.placements, actor.model.shard_key, actor.model.layout.ranks)
            whole = ShardedModel(shape, shards, actor.model.params, actor.model.groups.world, torch.float32)
            save_huggingface(tmp_path / target, whole, side_files_from=tmp_path / source, bucket_bytes=1 << 20)

    run_ranks(save, 1, timeout=100)
    assert find_differences(read_tensors(tmp_path / "exported"), original) == []
    assert json.loads((tmp_path / "exported/config.json").read_text())["num_nextn_predict_layers"] == 1
    assert read_tensors(tmp_path / "without").keys() == shape.logical_tensors().keys()
    assert json.loads((tmp_path / "without/config.json").read_text())["num_nextn_predict_layers"] == 0
