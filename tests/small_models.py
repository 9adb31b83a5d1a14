# SPDX-License-Identifier: Apache-2.0
"""Small real models and tasks for tests: HF directories with random weights, and the toy task."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

_CONFIGS = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}


def make_hf_model(
    directory: Path, family: str, *, tied: bool = False, seed: int = 0, **overrides: object
) -> torch.nn.Module:
    """Write a randomly initialised model with non-trivial norms and biases; returns it in eval mode.

    head_dim 32 is the smallest that vLLM serves on CPU; the vocabulary of 517 is no multiple of anything.
    """
    sizes = dict(vocab_size=517, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=tied,
                 bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(seed)
    config = _CONFIGS[family](**{**sizes, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    return model.eval()
