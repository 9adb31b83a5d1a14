# SPDX-License-Identifier: Apache-2.0
"""PackedAttention against a softmax with an explicit block-diagonal causal mask, forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace

import megatron_rl.parallel  # noqa: F401  the CPU runtime comes before megatron.core  # isort: skip

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron_rl.models.attention import PackedAttention
from megatron_rl.models.transformer_config import build_transformer_config
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.weights.families import ModelShape

HEAD_DIM = 8
SHAPE = ModelShape(
    family="llama", num_layers=1, hidden_size=32, ffn_hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM,
    vocab_size=64, tied_embeddings=False, qkv_bias=False, qk_norm=False, rms_norm_eps=1e-6, rope_theta=10000.0,
    max_position_embeddings=64)


def make_attention(**changes: float) -> PackedAttention:
    config = build_transformer_config(SHAPE, ParallelLayout(1), dtype=torch.float32)
    return PackedAttention(config, 1, AttnMaskType.causal, "self", **changes)


def draw_heads(*sizes: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """Query, key and value with these leading dimensions."""
    torch.manual_seed(0)
    return [torch.randn(*sizes, n, HEAD_DIM, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def attend_with_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence: list[int], scale: float
) -> torch.Tensor:
    """[t, heads, d] -> [t, heads * d], where a token sees those before it that are of its own sequence."""
    t, heads = query.shape[:2]
    repeat = heads // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    ids, position = torch.tensor(sequence), torch.arange(t)
    is_seen = (ids[:, None] == ids[None]) & (position[:, None] >= position[None])
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    probs = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, value).reshape(t, -1)


def assert_same_with_gradients(found: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    direction = torch.randn_like(found)
    for got, want in zip(
        torch.autograd.grad(found, inputs, direction), torch.autograd.grad(expected, inputs, direction), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [[7], [1, 5, 3], [4, 0, 1, 6]])
def test_packed_equals_the_masked_softmax(lengths: list[int], heads: int, kv_heads: int) -> None:
    """Sequences of several lengths, of one token and of none; grouped-query attention down to one KV head."""
    inputs = draw_heads(sum(lengths), heads=heads, kv_heads=kv_heads)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    found = make_attention()(*inputs, attention_mask=None, packed_seq_params=packed)
    sequence = [i for i, n in enumerate(lengths) for _ in range(n)]
    assert found.shape == (sum(lengths), heads * HEAD_DIM)
    assert_same_with_gradients(found, attend_with_mask(*inputs, sequence, 1 / math.sqrt(HEAD_DIM)), inputs)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("batch", [1, 3])
def test_plain_format_equals_the_masked_softmax(batch: int, heads: int, kv_heads: int) -> None:
    inputs = draw_heads(5, batch, heads=heads, kv_heads=kv_heads)
    found = make_attention()(*inputs)
    columns = [
        attend_with_mask(*(x[:, column] for x in inputs), [0] * 5, 1 / math.sqrt(HEAD_DIM)) for column in range(batch)
    ]
    assert found.shape == (5, batch, heads * HEAD_DIM)
    assert_same_with_gradients(found, torch.stack(columns, 1), inputs)


def test_given_scale_is_used() -> None:
    inputs = draw_heads(6, 1, heads=4, kv_heads=2)
    found = make_attention(softmax_scale=0.7)(*inputs)
    expected = attend_with_mask(*(x[:, 0] for x in inputs), [0] * 6, 0.7)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_other_sequences_have_no_influence() -> None:
    """Bitwise: what is packed before and after a sequence does not touch its output."""
    query, key, value = (x.detach() for x in draw_heads(9, heads=4, kv_heads=2))
    cu_seqlens = torch.tensor([0, 2, 6, 9], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    alone = replace(packed, cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32))
    attention = make_attention()
    together = attention(query, key, value, packed_seq_params=packed)[2:6]
    assert torch.equal(together, attention(query[2:6], key[2:6], value[2:6], packed_seq_params=alone))


def test_dropout_mask_and_bias_are_refused() -> None:
    with pytest.raises(AssertionError, match="dropout must be 0"):
        make_attention(attention_dropout=0.1)
    inputs = draw_heads(2, 1, heads=4, kv_heads=2)
    with pytest.raises(AssertionError, match="causal attention only"):
        make_attention()(*inputs, attention_mask=torch.ones(2, 2, dtype=torch.bool))
