# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in chunks equals its definition, token by token in float64, in values and gradients.

Sequences are packed, some are longer than a chunk, and some begin after a prefix that is packed elsewhere. Not covered:
the module around it (tests/models/test_gpt.py, tests/training/test_delta_nets.py), bfloat16. The rearrangement of
sequences for a kernel is tested with transformers' recurrence, the kernel itself on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from megatron_rl.models.attention import build_segments
from megatron_rl.models.delta_rule import (
    apply_delta_rule,
    apply_kernel,
    build_sequence_rows,
    choose_delta_rule,
    convolve,
    find_delta_failure,
)
from megatron_rl.models.segments import Segments
from megatron_rl.samples.batch import build_segment_keys

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 8, 6, 4
PARTS = [KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM]
# Rows of each segment, and the rows of its prefix.
PACKINGS: dict[str, tuple[list[int], list[list[int]]]] = {
    "plain": ([130, 3, 64, 65, 1], [[]] * 5),
    "shared prompt": ([70, 4, 2, 9], [[], [*range(66)], [*range(66)], []]),
    "tree": ([8, 5, 60, 3], [[], [*range(6)], [*range(6), 8, 9], [*range(6), 8, 9, *range(13, 73)]]),
}


def draw(num_tokens: int) -> list[torch.Tensor]:
    """Draw inputs of the convolution, filters, decays from slow to almost instant, and strengths."""
    generator = torch.Generator().manual_seed(0)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    speeds = torch.tensor([0.01, 0.1, 1.0, 8.0])
    drawn = [
        rand(num_tokens, sum(PARTS)),
        rand(sum(PARTS), 1, WIDTH),
        -rand(num_tokens, HEADS).abs() * speeds,
        rand(num_tokens, HEADS).sigmoid(),
    ]
    return [x.requires_grad_() for x in drawn]


def define(inputs: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    """Compute the delta rule by definition for the sequence of these rows: [s, heads, d_v]."""
    x, weight, decay, beta = (value.double() for value in inputs)
    state, outputs = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64), []
    for place, row in enumerate(rows):
        window = [(tap, rows[place - lag]) for lag, tap in enumerate(weight[:, 0].flip(1).unbind(1)) if place >= lag]
        query, key, value = F.silu(torch.stack([tap * x[at] for tap, at in window]).sum(0)).split(PARTS)
        query, key = (
            heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            for heads in (
                part.view(KEY_HEADS, KEY_DIM).repeat_interleave(HEADS // KEY_HEADS, 0) for part in (query, key)
            )
        )
        state = state * decay[row].exp()[:, None, None]
        error = value.view(HEADS, VALUE_DIM) - (state * key[..., None]).sum(1)
        state = state + key[..., None] * (beta[row][:, None] * error)[:, None]
        outputs.append((state * query[..., None]).sum(1) / KEY_DIM**0.5)
    return torch.stack(outputs)


def pack(lengths: list[int], prefixes: list[list[int]]) -> tuple[list[np.ndarray], Segments]:
    """The rows of each sequence from its first token on, and the segments."""
    ends = np.cumsum([0, *lengths])
    paths = [np.array([*prefix, *range(*ends[i : i + 2])]) for i, prefix in enumerate(prefixes)]
    keys = build_segment_keys(paths, lengths, torch.device("cpu"))
    return paths, build_segments(torch.from_numpy(ends.astype(np.int32)), max(lengths), keys, torch.float32)


def run_sequences(*inputs: torch.Tensor, use_qk_l2norm_in_kernel: bool, cu_seqlens: torch.Tensor) -> Any:
    """transformers' recurrence, which is called as the kernel is, for each of the packed sequences."""
    outputs = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        options = dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, initial_state=None, output_final_state=False)
        outputs.append(torch_recurrent_gated_delta_rule(*(x[:, start:stop] for x in inputs), **options)[0])
    return torch.cat(outputs, 1), None


RULES = {"chunks": apply_delta_rule, "kernel": partial(apply_kernel, run_sequences)}


def compute(inputs: Sequence[torch.Tensor], segments: Segments, rule: str = "chunks") -> torch.Tensor:
    """Compute our implementation's output, [t, heads, d_v]."""
    x, weight, decay, beta = inputs
    rows = build_sequence_rows(segments, WIDTH)
    query, key, value = convolve(x, weight, rows).split(PARTS, 1)
    query, key = (part.unflatten(1, (KEY_HEADS, KEY_DIM)) for part in (query, key))
    return RULES[rule](query, key, value.unflatten(1, (HEADS, VALUE_DIM)), decay, beta, rows)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", PACKINGS)
def test_rules_equal_the_definition(name: str, rule: str) -> None:
    """float32 leaves 4e-6 on values of up to 2: logs of decays add up to hundreds, as in transformers."""
    lengths, prefixes = PACKINGS[name]
    inputs = draw(sum(lengths))
    paths, segments = pack(lengths, prefixes)
    parts = [define(inputs, rows.tolist())[-length:] for length, rows in zip(lengths, paths, strict=True)]
    found, expected = compute(inputs, segments, rule), torch.cat(parts)
    assert (found - expected).abs().max() < 1e-5 < 0.05 < expected.std()
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((x * weights).sum(), inputs) for x in (found, expected)]
    for got, want in zip(*gradients, strict=True):
        assert (got - want).abs().max() < 1e-5 * max(want.abs().max(), 1.0)


def test_a_sequence_does_not_depend_on_its_neighbors() -> None:
    """Up to rounding."""
    lengths, prefixes = PACKINGS["plain"]
    inputs = draw(sum(lengths))
    _, segments = pack(lengths, prefixes)
    whole, start = compute(inputs, segments).detach(), 0
    for length in lengths:
        mine = slice(start, start + length)
        alone = [x[mine] if len(x) == sum(lengths) else x for x in inputs]
        assert (compute(alone, pack([length], [[]])[1]) - whole[mine]).abs().max() < 1e-6
        start += length


def test_a_cpu_takes_plain_torch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_delta_rule(torch.device("cpu"), dtype) is apply_delta_rule


@pytest.mark.gpu
def test_the_kernel_is_used_where_it_is_installed() -> None:
    """It has been compared with plain torch then, with its gradients."""
    pytest.importorskip("fla")
    assert find_delta_failure(torch.device("cuda")) is None
    assert choose_delta_rule(torch.device("cuda"), torch.bfloat16) is not apply_delta_rule
