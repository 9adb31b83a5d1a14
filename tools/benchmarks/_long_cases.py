# SPDX-License-Identifier: Apache-2.0
"""The cases of bench_long.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tools.benchmarks._scripted_workloads import Workload, draw_lognormal_lengths

_PROMPT = 64


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        part, arm: part of the benchmark, variant.
        length: the varied length, tokens.
        max_tokens: budget of a micro-batch.
        chunk_tokens: tokens whose logits exist at once; no limit if `None`.
        is_padded: pad sequences to the longest.
        shares_prompts: pack a group's prompt once per micro-batch.
        recompute: `recompute_granularity`.
        is_timed: False measures memory only.
    """

    part: str
    arm: str
    length: int
    work: Workload
    max_tokens: int
    vocab_size: int
    cp_size: int = 1
    chunk_tokens: int | None = 1024
    is_padded: bool = False
    shares_prompts: bool = False
    recompute: str = "none"
    is_timed: bool = True


def list_length_cases(options: argparse.Namespace, world_size: int) -> Iterator[Case]:
    """Vary the longest response: packing or padding, chunked or full logits, cp."""
    for length in options.lengths:
        lengths = draw_lognormal_lengths((4, 2), length / 8, 1.0, length, options.seed)
        lengths[0][0] = length  # fix the maximum
        work = Workload([_PROMPT] * 4, lengths, options.seed)
        for cp_size in (size for size in options.cp if world_size % size == 0):
            for arm, settings in (
                ("packed, chunked", {}),
                ("padded, chunked", {"is_padded": True}),
                ("packed, full logits", {"chunk_tokens": None}),
            ):
                yield Case("lengths", arm, length, work, length + _PROMPT, options.vocab, cp_size, **settings)


def list_logits_cases(options: argparse.Namespace, world_size: int) -> Iterator[Case]:
    """Vary a micro-batch's length with a large vocabulary."""
    for length in options.logits_lengths:
        work = Workload([1] * world_size, [[length - 1]] * world_size, options.seed)
        for arm, chunk in (("256 tokens", 256), ("512 tokens", 512), ("1024 tokens", 1024), ("full logits", None)):
            yield Case("logits", arm, length, work, length, options.large_vocab, chunk_tokens=chunk, is_timed=False)


def list_context_cases(options: argparse.Namespace, world_size: int) -> Iterator[Case]:
    """Vary cp and recomputation."""
    length = options.context_length
    for cp_size in (size for size in options.cp if world_size % size == 0):
        replicas = world_size // cp_size
        work = Workload([1] * replicas, [[length // 4 - 1] * 4] * replicas, options.seed)
        for recompute in ("none", "selective", "full"):
            yield Case(
                "context", recompute, length, work, length, 1024, cp_size, 256, recompute=recompute, is_timed=False
            )


def list_packing_cases(options: argparse.Namespace, world_size: int) -> Iterator[Case]:
    """Compare padding, packing, and shared prompts."""
    prompts = options.packing_prompts
    lengths = draw_lognormal_lengths((prompts, 8), 128, 1.0, 4096, options.seed)
    work = Workload([_PROMPT] * prompts, lengths, options.seed)
    longest = _PROMPT + work.longest_response
    for arm, settings in (
        ("padded", {"is_padded": True}),
        ("packed", {}),
        ("packed, shared prompts", {"shares_prompts": True}),
    ):
        yield Case("packing", arm, longest, work, max(4096, longest), 1024, **settings)


def list_linear_cases(options: argparse.Namespace, world_size: int) -> Iterator[Case]:
    """Vary the number of sequences from 1 to 16 times."""
    for factor in (1, 2, 4, 8, 16):
        count = 8 * factor * world_size
        work = Workload([1] * count, [[511]] * count, options.seed)
        yield Case("linear", "512-token sequences", 512 * count, work, 4096, 1024)


PARTS: dict[str, Callable[[argparse.Namespace, int], Iterator[Case]]] = {
    "lengths": list_length_cases,
    "logits": list_logits_cases,
    "context": list_context_cases,
    "packing": list_packing_cases,
    "linear": list_linear_cases,
}
