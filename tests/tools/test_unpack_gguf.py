# SPDX-License-Identifier: Apache-2.0
"""GGUF files written with the package gguf: unpacked weights, config and tokenizer, and refusals.

Not covered: models in several files; architectures that the tool refuses.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, Qwen2Config

from megatron_rl.types import UserError
from tools import unpack_gguf

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def make_model(architecture: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[architecture], dtype=torch.float32)


def write_gguf(path: Path, model: PreTrainedModel, architecture: str, kind: gguf.GGMLQuantizationType) -> None:
    """Write as llama.cpp's converter does: names of gguf, Q and K of Llama in rotary pairs, matrices quantized."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    characters = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(33 + number) for number in range(90)), "aa"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(characters + [f"<unused{number}>" for number in range(config.vocab_size - len(characters))])
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        number = heads.get(".".join(name.split(".")[-2:]))
        if number and architecture == "llama":
            values = values.reshape(number, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 2:
            values = gguf.quantize(values, kind)
            writer.add_tensor(found, values, raw_dtype=kind)
        else:
            writer.add_tensor(found, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_float32_weights_come_back_bit_by_bit(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture)
    write_gguf(tmp_path / "model.gguf", model, architecture, gguf.GGMLQuantizationType.F32)
    assert unpack_gguf.main([str(tmp_path / "model.gguf"), "--out", str(tmp_path / "model")]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(found) is type(model) and found.dtype == torch.float32
    expected, got = model.state_dict(), found.state_dict()
    assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
    for name in SIZES:
        assert getattr(found.config, name) == getattr(model.config, name), name


@pytest.mark.parametrize("architecture", CONFIGS)
def test_quantized_weights_are_those_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture)
    write_gguf(tmp_path / "model.gguf", model, architecture, gguf.GGMLQuantizationType.Q8_0)
    unpack_gguf.unpack(tmp_path / "model.gguf", tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
    assert not torch.equal(
        got["model.layers.0.mlp.up_proj.weight"], model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "aa"}], tokenize=False)
    assert text == "<|im_start|>aa<|im_end|>" and tokenizer.decode(tokenizer("aa")["input_ids"]) == "aa"
    assert tokenizer.eos_token == "<|im_end|>"


def test_what_cannot_be_unpacked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.gguf cannot be read"):
        unpack_gguf.unpack(tmp_path / "absent.gguf", tmp_path / "model")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00")
    with pytest.raises(UserError, match=r"cut\.gguf cannot be read"):
        unpack_gguf.unpack(tmp_path / "cut.gguf", tmp_path / "model")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="a model of the architecture mamba"):
        unpack_gguf.unpack(tmp_path / "other.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    (tmp_path / "model").mkdir()
    assert unpack_gguf.main([str(tmp_path / "other.gguf"), "--out", str(tmp_path / "model")]) == 2


def test_a_file_without_some_weights_is_refused(tmp_path: Path) -> None:
    model = make_model("qwen2")
    del model.model.layers[1].mlp.up_proj
    write_gguf(tmp_path / "part.gguf", model, "qwen2", gguf.GGMLQuantizationType.F32)
    with pytest.raises(UserError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight \(1 tensors\)"):
        unpack_gguf.unpack(tmp_path / "part.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()
