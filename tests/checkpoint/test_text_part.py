# SPDX-License-Identifier: Apache-2.0
"""Image-text models (Qwen3.5, Gemma 4) are read as their text part, and written as a text model.

That Megatron computes the logits of the whole model from these files is tests/models/test_gpt.py's matter, and that a
run starts from them that of tests/run/test_families_in_loop.py. Not covered: images, published checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from actor_runs import Case, build_actor
from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import ShardedModel, save_huggingface
from megatron_rl.transfer.planner import group_shards
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import load_model_shape, model_shape_from_config
from megatron_rl.weights.packed_experts import split_huggingface_experts
from shards import find_differences
from tiny_models import draw_tokens, save_tiny_model
from tools.conversion.conversion import CheckpointWeights, convert_to_huggingface, convert_to_megatron
from tools.conversion.units import Workers

SETTINGS: dict[str, Any] = dict(dtype=None, file_bytes=1 << 16, force=False, workers=Workers())
FAMILIES = ("qwen3_5", "qwen3_5_moe", "gemma4")
DRAFTS = {
    "mtp.fc.weight": torch.randn(64, 128),
    "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 128, 64),
    "mtp.layers.0.mlp.experts.down_proj": torch.randn(4, 64, 64),
}


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def save_published(directory: Path, family: str) -> dict[str, torch.Tensor]:
    """An image-text model in bfloat16, A_log in float32, with draft layers; returns the logical tensors."""
    save_tiny_model(directory, family)
    stored = read_tensors(directory) | (DRAFTS if family != "gemma4" else {})
    stored = {name: x if name.endswith("A_log") else x.bfloat16() for name, x in stored.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mlp_only_layers": []}
    (directory / "config.json").write_text(json.dumps(config))
    seeing = [
        name for name in stored if name.startswith(("model.visual.", "model.vision_tower.", "model.embed_vision."))
    ]
    assert seeing
    assert any(name.endswith("experts.gate_up_proj") for name in stored if "language_model" in name) is (
        family == "qwen3_5_moe"
    )
    text = {name.replace("model.language_model.", "model."): x for name, x in stored.items() if name not in seeing}
    drafts = {name: text.pop(name) for name in DRAFTS if name in text}
    return split_huggingface_experts(load_model_shape(directory), text) | drafts


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_it_is_a_text_model(family: str, tmp_path: Path) -> None:
    """Bit for bit, each tensor in its type; transformers computes the same from it as from the whole model's text."""
    expected = save_published(tmp_path / "hf", family)
    convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", **SETTINGS)
    convert_to_huggingface(CheckpointWeights(tmp_path / "megatron"), tmp_path / "text", **SETTINGS)
    found = read_tensors(tmp_path / "text")
    assert find_differences(found, expected) == []
    assert family == "gemma4" or found["model.layers.0.linear_attn.A_log"].dtype == torch.float32
    config = json.loads((tmp_path / "text/config.json").read_text())
    assert config["model_type"] == f"{family}_text" and config["mtp_num_hidden_layers"] == (family != "gemma4")
    assert load_model_shape(tmp_path / "text") == load_model_shape(tmp_path / "hf")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    assert config["architectures"] == [type(text).__name__]
    tokens = torch.from_numpy(draw_tokens([40])[0])[None]
    with torch.no_grad():
        assert torch.equal(text(tokens).logits, whole(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_run_exports_is_the_text_model(family: str, tmp_path: Path) -> None:
    """With the draft layers as they were."""
    expected = save_published(tmp_path / "hf", family)

    def save(rank: int, world_size: int) -> None:
        actor = build_actor(Case(world_size, dtype="bfloat16"), tmp_path / "hf")
        shards = group_shards(actor.model.placements, actor.model.shard_key, actor.model.layout.ranks)
        whole = ShardedModel(actor.model.shape, shards, actor.model.params, actor.model.groups.world, torch.bfloat16)
        save_huggingface(tmp_path / "text", whole, side_files_from=tmp_path / "hf", bucket_bytes=1 << 20)

    run_ranks(save, 1, timeout=100)
    found = read_tensors(tmp_path / "text")
    assert find_differences(found, {name: x.bfloat16() for name, x in expected.items()}) == []
    assert json.loads((tmp_path / "text/config.json").read_text())["model_type"] == f"{family}_text"


def test_what_is_said_of_the_whole_model_counts(tmp_path: Path) -> None:
    """Tied embeddings, and an encoding of the weights, which is refused; a class with a score head stays one."""
    save_tiny_model(tmp_path, "qwen3_5")
    config = json.loads((tmp_path / "config.json").read_text())
    assert not load_model_shape(tmp_path).tied_embeddings
    assert model_shape_from_config(config | {"tie_word_embeddings": True}, source="here").tied_embeddings
    with pytest.raises(UserError, match="quantization_config="):
        model_shape_from_config(config | {"quantization_config": {"quant_method": "fp8"}}, source="here")
    with pytest.raises(UserError, match="Qwen3_5ForSequenceClassification has no language-model head"):
        model_shape_from_config(config | {"architectures": ["Qwen3_5ForSequenceClassification"]}, source="here")
    del config["text_config"]
    with pytest.raises(UserError, match="unknown architecture 'qwen3_5'"):
        model_shape_from_config(config, source="here")
