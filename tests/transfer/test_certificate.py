# SPDX-License-Identifier: Apache-2.0
"""The digest and the certificate: independent of layout, and broken by every fault that was planted.

Not covered: digests of types that are not 1, 2 or 4 bytes wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distributed import run_ranks
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer import executor
from megatron_rl.transfer.executor import Certificate, CertificateError, CertifiedParams, compute_digest, count_once
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.shard_box import ShardBox, box_volume, full_box
from shards import as_shards, cut_shards, make_full_tensors, make_shape, place_megatron, place_vllm

SHAPE = make_shape("qwen2", tied_embeddings=False)
MASK = (1 << 64) - 1


def digest_by_definition(tensor: torch.Tensor) -> int:
    """Compute a digest in Python integers, element by element."""
    bits = tensor.contiguous().view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).flatten().tolist()
    return sum(b * (2 * i + 1) for i, b in enumerate(bits)) & MASK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(7,), (5, 9), (3, 1)])
def test_digest_is_its_definition(size: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert int(compute_digest(tensor, full_box(size), size)) & MASK == digest_by_definition(tensor)


def test_digest_of_large_pieces_is_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(50, 7, generator=torch.Generator().manual_seed(2))
    whole = compute_digest(tensor, full_box((50, 7)), (50, 7))
    monkeypatch.setattr("megatron_rl.transfer.executor.CHUNK_ELEMENTS", 20)
    assert compute_digest(tensor, full_box((50, 7)), (50, 7)) == whole


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 7), st.integers(0, 7))
def test_digest_adds_up_over_any_cut(rows: int, columns: int, row: int, column: int) -> None:
    """Four boxes of a matrix, read as strided views."""
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    row, column = min(row, rows), min(column, columns)
    parts = 0
    for r in ((0, row), (row, rows)):
        for c in ((0, column), (column, columns)):
            piece = tensor[r[0] : r[1], c[0] : c[1]]
            if piece.numel():
                parts += int(compute_digest(piece, (r, c), (rows, columns)))
    assert parts & MASK == digest_by_definition(tensor)


@given(st.integers(0, 34), st.integers(0, 31))
def test_every_flipped_bit_shows(element: int, bit: int) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(4))
    flipped = tensor.clone()
    flipped.view(torch.int32).view(-1)[element] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    box = full_box((5, 7))
    assert compute_digest(tensor, box, (5, 7)) != compute_digest(flipped, box, (5, 7))


MOE_SHAPE = make_shape("qwen3_moe", tied_embeddings=False)


def count_by_definition(tables: list[list[ShardBox]], rank: int) -> list[ShardBox]:
    """Rank by rank: elements that no earlier rank and no earlier placement of this rank holds."""
    seen = {(p.hf_name, p.hf_box) for table in tables[:rank] for p in table}
    counted = []
    for p in tables[rank]:
        if (p.hf_name, p.hf_box) not in seen and box_volume(p.hf_box):
            seen.add((p.hf_name, p.hf_box))
            counted.append(p)
    return counted


@pytest.mark.parametrize(
    "sizes",
    [
        dict(tp_size=2, pp_size=2),
        dict(pp_size=4, vpp_size=1, cp_size=2),
        dict(tp_size=2, ep_size=4),
        dict(pp_size=2, vpp_size=2, ep_size=2),
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [MOE_SHAPE, make_shape("qwen3_moe", tied_embeddings=True)], ids=["untied", "tied"])
def test_counting_by_shard_is_counting_by_rank(shape: ModelShape, sizes: dict[str, int]) -> None:
    """The same placements in the same order, on every rank, also where ranks share KV heads."""
    for tables in (place_megatron(shape, ParallelLayout(8, **sizes)), place_vllm(shape, 8, 8)):
        counted = [count_once(as_shards(tables), rank) for rank in range(8)]
        assert counted == [count_by_definition(tables, rank) for rank in range(8)]
        assert sum(box_volume(p.hf_box) for table in counted for p in table) == sum(
            math.prod(size) for size in shape.logical_tensors().values()
        )


def no_fault(rank: int, destination: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    """Change nothing: the control."""


def swap_q_and_k(rank: int, destination: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    if rank == 1:
        weight = destination["model.layers.2.self_attn.qkv_proj.weight"]
        half = 2 * 2  # two KV heads of two rows on this rank
        weight[:half], weight[8 : 8 + half] = weight[8 : 8 + half].clone(), weight[:half].clone()


def drop_bias(rank: int, destination: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    if rank == 2:
        destination["model.layers.0.self_attn.qkv_proj.bias"].zero_()


def keep_stale_piece(rank: int, destination: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    if rank == 3:
        destination["model.layers.1.mlp.down_proj.weight"][3:5] += 0.25


def leave_padding(rank: int, destination: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    if rank == 1:
        destination["lm_head.weight"][-1, 3] = 1e-3


def flip_one_bit(rank: int, destination: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    if rank == 0:
        destination["model.layers.3.mlp.gate_up_proj.weight"].view(torch.int32)[0, 0] ^= 1


def change_a_replica(rank: int, destination: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    """A norm that both ranks of an engine hold is wrong on the second one."""
    if rank == 3:
        destination["model.layers.2.input_layernorm.weight"][1] *= 1.5


def exchange_experts(rank: int, destination: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    if rank == 3:
        one, two = (
            destination[name]
            for name in sorted(destination)
            if ".1." in name and "w2" in name and name.endswith((".1", ".2"))
        )
        kept = one.clone()
        one.copy_(two)
        two.copy_(kept)


FAULTS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "none": (no_fault, []),
    "q and k swapped": (swap_q_and_k, ["model.layers.2.self_attn.q_proj.weight", "rank 1", "engine 0"]),
    "bias dropped": (drop_bias, ["model.layers.0.self_attn.q_proj.bias", "rank 2", "engine 1"]),
    "stale piece": (keep_stale_piece, ["model.layers.1.mlp.down_proj.weight", "rank 3", "box"]),
    "padding": (leave_padding, ["lm_head.weight", "rank 1", "not zero"]),
    "wrong expert": (exchange_experts, ["model.layers.1.mlp.experts.1.down_proj.weight", "rank 3", "engine 1"]),
    "replica": (change_a_replica, ["model.layers.2.input_layernorm.weight", "rank 3", "engine 1", "1 of"]),
    "one bit": (flip_one_bit, ["model.layers.3.mlp.gate_proj.weight", "rank 0", "1 of"]),
}


def certify(rank: int, world_size: int, fault: str, sample: bool, rounds: int, dtype: torch.dtype) -> Any:
    """Megatron tp2 x pp2 and two engines of tp2 with one planted fault; the error's text, or the verified tensors."""
    shape = MOE_SHAPE if "expert" in fault else SHAPE
    source_tables = place_megatron(shape, ParallelLayout(world_size, tp_size=2, pp_size=2))
    tables = place_vllm(shape, world_size, 2)
    full = make_full_tensors(shape)
    source = cut_shards(source_tables[rank], full, padding_rows=3, fill=0.0)
    rounded = {name: tensor.to(dtype) for name, tensor in full.items()}
    destination = cut_shards(tables[rank], rounded, padding_rows=3, fill=0.0)
    FAULTS[fault][0](rank, destination, source)
    executor.SAMPLE_SHARE = 0.1
    certificate = Certificate(
        shape.logical_tensors(),
        CertifiedParams(
            source,
            count_once(as_shards(source_tables), rank),
            [n for n in source if "embed" in n or "output_layer" in n],
        ),
        CertifiedParams(
            destination,
            [p for p in tables[rank] if box_volume(p.hf_box)],
            ["model.embed_tokens.weight", "lm_head.weight"],
        ),
        dtype=dtype,
        num_engines=2,
        engine=rank // 2,
        group=dist.group.WORLD,
    )
    try:
        return [certificate.verify(turn if sample else None) for turn in range(rounds)]
    except CertificateError as error:
        return str(error)


@pytest.mark.parametrize("fault", FAULTS)
def test_full_certificate_finds_the_fault(fault: str) -> None:
    """Every rank stops, and the message names tensor, rank and box (and is the same everywhere)."""
    results = run_ranks(certify, 4, fault, False, 1, torch.float32, timeout=60)
    assert all(result == results[0] for result in results)
    expected = FAULTS[fault][1]
    if not expected:
        assert results[0] == [len(SHAPE.logical_tensors())]
        return
    for part in expected:
        assert part in results[0], results[0]


def test_samples_rotate_over_all_tensors() -> None:
    """A fault in one late tensor is found within one rotation; without one every tensor has its turn."""
    counts = run_ranks(certify, 4, "none", True, 40, torch.float32, timeout=60)[0]
    assert all(0 < count < len(SHAPE.logical_tensors()) for count in counts)
    rotation = next(n for n in range(1, 41) if sum(counts[:n]) == len(SHAPE.logical_tensors()))
    found = run_ranks(certify, 4, "one bit", True, rotation, torch.float32, timeout=60)
    assert all("model.layers.3.mlp.gate_proj.weight" in text for text in found)


def test_certificate_compares_after_conversion() -> None:
    """float32 training weights and a bfloat16 engine."""
    counts = run_ranks(certify, 4, "none", False, 1, torch.bfloat16, timeout=60)
    assert counts == [[len(SHAPE.logical_tensors())]] * 4
