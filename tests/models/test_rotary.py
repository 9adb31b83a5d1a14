# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding against transformers' Llama, bit by bit, at arbitrary positions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_rl.models.rotary import compute_rotary_table, rotate

HEAD_DIM = 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_equals_transformers(theta: float, dtype: torch.dtype) -> None:
    """Positions repeat, jump and go back, as behind a shared prompt. Scaled variants of RoPE are not supported."""
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
