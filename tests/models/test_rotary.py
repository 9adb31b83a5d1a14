# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding against transformers' Llama, bit by bit, at arbitrary positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_rl.models.attention import compute_rotary_table, rotate
from megatron_rl.weights.rope import read_rope_scaling

HEAD_DIM = 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_equals_transformers(theta: float, dtype: torch.dtype) -> None:
    """Positions repeat, jump and go back, as behind a shared prompt."""
    positions = torch.tensor([0, 1, 2, 700, 3, 4, 3, 4, 5, 0, 40000])
    torch.manual_seed(0)
    heads = torch.randn(len(positions), 3, HEAD_DIM).to(dtype)
    config = LlamaConfig(
        hidden_size=3 * HEAD_DIM,
        num_attention_heads=3,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    cosine, sine = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cosine, sine)
    found = rotate(heads, *compute_rotary_table(positions, head_dim=HEAD_DIM, theta=theta, dtype=dtype))
    assert found.dtype == dtype and torch.equal(found, expected[0].transpose(0, 1))


def test_position_zero_is_not_rotated() -> None:
    heads = torch.randn(2, 1, HEAD_DIM)
    table = compute_rotary_table(torch.tensor([0, 1]), head_dim=HEAD_DIM, theta=1e4, dtype=torch.float32)
    found = rotate(heads, *table)
    assert torch.equal(found[0], heads[0]) and not torch.allclose(found[1], heads[1])
    torch.testing.assert_close(found.norm(dim=-1), heads.norm(dim=-1))


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    "yarn-mscale": dict(
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=1024,
        beta_fast=8,
        beta_slow=2,
        mscale=0.7,
        mscale_all_dim=1.0,
    ),
    "yarn-exact": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=1000, attention_factor=1.5, truncate=False
    ),
    "longrope": dict(
        rope_type="longrope",
        original_max_position_embeddings=1024,
        short_factor=[1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0],
        long_factor=[2.0] * 8,
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_equal_transformers(name: str) -> None:
    """Bit by bit. The positions stay in the context of pretraining, in which longrope uses its short factors."""
    positions = torch.tensor([0, 1, 2, 700, 3, 4, 999])
    config = LlamaConfig(
        hidden_size=3 * HEAD_DIM,
        num_attention_heads=3,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters=SCALINGS[name] | {"rope_theta": 1e4},
    )
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    scaling, _ = read_rope_scaling(SCALINGS[name], dict(max_position_embeddings=4096))
    found = compute_rotary_table(positions, head_dim=HEAD_DIM, theta=1e4, dtype=torch.float32, scaling=scaling)
    plain = compute_rotary_table(positions, head_dim=HEAD_DIM, theta=1e4, dtype=torch.float32)
    assert torch.equal(found[0][:, 0], cosine[0])
    assert torch.equal(found[1][:, 0, HEAD_DIM // 2 :], sine[0, :, : HEAD_DIM // 2])
    assert (found[0] - plain[0]).abs().max() > 0.1
