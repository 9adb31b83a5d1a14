# SPDX-License-Identifier: Apache-2.0
"""PackedAttention is rotation and attention over the segments of a microbatch, on one rank.

The two are tested by themselves in test_rotary.py and test_attention_backends.py, several context parallel ranks in
test_context_parallel.py; the projections are compared with transformers in test_gpt.py.
"""

from __future__ import annotations

import math

import megatron_rl.parallel  # noqa: F401  the CPU runtime comes before megatron.core  # isort: skip

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.models.attention import (
    PackedAttention,
    PackedSequences,
    attend,
    build_packed_sequences,
    compute_rotary_table,
    rotate,
)
from megatron_rl.models.gpt import build_transformer_config
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Padding, build_train_batch
from megatron_rl.samples.microbatches import share_prompts
from megatron_rl.types import Branch
from megatron_rl.weights.families import ModelShape

HEAD_DIM = 8
SHAPE = ModelShape(
    family="llama",
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=HEAD_DIM,
    vocab_size=64,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=64,
)


def make_attention(**changes: float) -> PackedAttention:
    config = build_transformer_config(SHAPE, ParallelLayout(1), dtype=torch.float32)
    return PackedAttention(config, **changes)


def draw_heads(t: int) -> list[torch.Tensor]:
    """Query, key and value [t, heads, d]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t, n, HEAD_DIM, generator=generator) for n in (4, 2, 2)]


def make_packed(group_of: list[int] | None, **shard: int) -> tuple[PackedSequences, torch.Tensor]:
    """A prompt of 3 with responses of 2 and 4, and its positions; shared according to `group_of`."""
    sequences = [Branch.of_response(np.arange(3 + n), 3) for n in (2, 4)]
    batch = build_train_batch(
        sequences,
        [1.0, 1.0],
        [((0, 1), [[[0, 1]]])],
        dp_rank=0,
        padding=Padding(1),
        device=torch.device("cpu"),
        shared=None if group_of is None else share_prompts(group_of, [3, 3]),
    )
    packed = build_packed_sequences(batch.slices[0], batch.position_ids, SHAPE, dtype=torch.float32, **shard)
    return packed, batch.position_ids


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("group_of", [None, [0, 0]])
def test_rotates_and_attends(group_of: list[int] | None, scale: float | None) -> None:
    packed, positions = make_packed(group_of)
    query, key, value = draw_heads(len(positions))
    found = make_attention(softmax_scale=scale)(query, key, value, packed_seq_params=packed)
    table = compute_rotary_table(positions, head_dim=HEAD_DIM, theta=1e4, dtype=torch.float32)
    expected = attend(
        rotate(query, *table), rotate(key, *table), value, packed.segments, scale or 1 / math.sqrt(HEAD_DIM)
    )
    assert found.shape == (len(positions), 4 * HEAD_DIM) and torch.equal(found, expected.flatten(1))


def test_shared_prompt_gives_what_a_prompt_of_ones_own_gives() -> None:
    """Outputs of the second response, whose prompt is packed with the first."""
    plain, positions = make_packed(None)  # [prompt 2] [prompt 4]
    shared, shared_positions = make_packed([0, 0])  # [prompt 2] [4]
    heads = draw_heads(len(positions))
    for x in heads:
        x[5:8] = x[:3]  # both prompts are the same
    rows = [0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert shared_positions.tolist() == positions[rows].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    found = make_attention()(*(x[rows] for x in heads), packed_seq_params=shared)
    torch.testing.assert_close(found, make_attention()(*heads, packed_seq_params=plain)[rows], rtol=1e-5, atol=1e-6)


def test_rotary_table_is_that_of_the_shard() -> None:
    """A context parallel rank rotates its own rows, and attends over the whole row."""
    whole, positions = make_packed(None)
    parts = [make_packed(None, cp_size=3, cp_rank=rank)[0] for rank in range(3)]
    for i in range(2):
        assert torch.equal(torch.cat([p.rotary_table[i] for p in parts]), whole.rotary_table[i])
    assert all(p.segments.batches == whole.segments.batches == ((1, 5, 5), (1, 7, 7)) for p in parts)


def test_parameters_of_megatron_core_are_filled_in() -> None:
    packed, _ = make_packed([0, 0])
    assert packed.qkv_format == "thd" and (packed.max_seqlen_q, packed.max_seqlen_kv) == (5, 7)
    assert packed.cu_seqlens_q.tolist() == [0, 5, 9] and packed.cu_seqlens_kv.tolist() == [0, 5, 12]


def test_dropout_mask_and_missing_positions_are_refused() -> None:
    with pytest.raises(AssertionError, match="dropout must be 0"):
        make_attention(attention_dropout=0.1)
    packed, positions = make_packed(None)
    heads = draw_heads(len(positions))
    with pytest.raises(AssertionError, match="causal attention only"):
        make_attention()(*heads, attention_mask=torch.ones(2, 2, dtype=torch.bool), packed_seq_params=packed)
    with pytest.raises(AssertionError, match="with positions only"):
        make_attention()(*heads, packed_seq_params=PackedSeqParams(qkv_format="thd"))
