# SPDX-License-Identifier: Apache-2.0
"""Which tokens truncated sampling leaves: against a loop in float64, vLLM's own sampler and transformers' warpers.

That engines draw from these sets is in tests/engines/test_truncated_engines.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_rl.engines.protocol import Request, SamplingConfig
from megatron_rl.engines.truncation import truncate
from megatron_rl.engines.vllm.vllm_engine import list_sampling_arguments
from megatron_rl.engines.vllm.vllm_library import KeptSetRecorder
from megatron_rl.parallel.vocab_parallel import OUTSIDE

VOCAB_SIZE = 40


def make_sampling(**changes: Any) -> SamplingConfig:
    return SamplingConfig(1.0, 8, (), **changes)


def draw_logits(seed: int, spread: float, rows: int = 3) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, (rows, VOCAB_SIZE))).float()


def keep_by_loop(row: torch.Tensor, sampling: SamplingConfig) -> list[int]:
    """Return the kept token ids by the definition of truncation, token by token, in float64."""
    order = sorted(range(len(row)), key=lambda i: -float(row[i]))
    left = [i for i in order if float(row[i]) >= float(row[order[0]]) + math.log(sampling.min_p or 1e-300)]
    left = left[: sampling.top_k] if sampling.top_k > 0 else left
    weights = [math.exp(float(row[i]) - float(row[order[0]])) for i in left]
    kept, before = [], 0.0
    for token, weight in zip(left, weights, strict=True):
        if not kept or before < sampling.top_p * sum(weights):
            kept.append(token)
        before += weight
    return kept[: sampling.max_kept_tokens]


@given(
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    top_k=st.sampled_from([-1, 1, 5, 39, 400]),
    min_p=st.sampled_from([0.0, 0.02, 0.6]),
    limit=st.sampled_from([1, 6, 1024]),
)
def test_sets_are_those_of_the_definition(
    seed: int, spread: float, top_p: float, top_k: int, min_p: float, limit: int
) -> None:
    """Most likely first; kept tokens keep their logits, all others have no probability."""
    sampling = make_sampling(top_p=top_p, top_k=top_k, min_p=min_p, max_kept_tokens=limit)
    scaled = draw_logits(seed, spread)
    left, kept = truncate(scaled.clone(), sampling)
    sets = [part.ids.tolist() for part in kept.split()]
    assert sets == [keep_by_loop(row, sampling) for row in scaled]
    for row, found, before in zip(left, sets, scaled, strict=True):
        assert row.softmax(-1).nonzero()[:, 0].tolist() == sorted(found) or spread == 4.0  # whose tail may underflow
        assert torch.equal(row[found], before[found])
        rest = sorted({*range(VOCAB_SIZE)} - {*found})
        assert not row.softmax(-1)[rest].any()


@pytest.mark.parametrize(
    "settings",
    [
        dict(top_k=7),
        dict(top_p=0.7),
        dict(min_p=0.2),
        dict(top_k=9, top_p=0.8),
        dict(top_p=0.9, min_p=0.1),
        dict(top_k=12, top_p=0.95, min_p=0.05),
    ],
    ids=str,
)
def test_sets_are_vllms_and_transformers(settings: dict[str, Any], vllm_imported: None) -> None:
    """vLLM's in its order; transformers' if the order does not matter (it applies min-p last)."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    scaled = draw_logits(3, 1.5, rows=200)
    found = [sorted(part.ids.tolist()) for part in truncate(scaled, make_sampling(**settings))[1].split()]

    def list_left(logits: torch.Tensor) -> list[list[int]]:
        return [torch.isfinite(row).nonzero()[:, 0].tolist() for row in logits]

    lowest = scaled.amax(-1, keepdim=True) + math.log(settings.get("min_p", 1e-300))
    theirs = scaled.masked_fill(scaled < lowest, -math.inf)
    k = torch.full((200,), settings["top_k"]) if "top_k" in settings else None
    p = torch.full((200,), settings["top_p"]) if "top_p" in settings else None
    assert found == list_left(apply_top_k_top_p(theirs, k, p))
    if not {"top_p", "min_p"} <= settings.keys():
        warped, nothing = scaled.clone(), torch.zeros(200, 1, dtype=torch.int64)
        for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
            warped = warper(settings[name])(nothing, warped) if name in settings else warped
        assert found == list_left(warped)


def test_equally_likely_tokens_do_not_make_a_set_larger() -> None:
    """vLLM's own top-k keeps all tokens that are as likely as the last one."""
    _, kept = truncate(torch.zeros(2, 9), make_sampling(top_k=4))
    assert kept.counts.tolist() == [4, 4]


def test_greedy_and_whole_sampling_are_not_truncated() -> None:
    assert not make_sampling().is_truncated and make_sampling(min_p=0.1).is_truncated
    assert not SamplingConfig(0.0, 8, (), top_k=3).is_truncated


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.2}, {"max_kept_tokens": 4}])
def test_stop_tokens_are_left_out_at_first(limits: dict[str, Any]) -> None:
    """Truncation then applies to the remaining tokens as if there were no others; later it is as usual."""
    scaled = draw_logits(7, 2.0, rows=4)
    stops = tuple(scaled[0].topk(3).indices.tolist())
    sampling = SamplingConfig(1.0, 8, stops, min_tokens=2, **limits)
    left, kept = truncate(scaled.clone(), sampling, [0, 1, 2, 5])
    others = scaled[:2].clone()
    others[:, list(stops)] = -math.inf
    loose = replace(sampling, min_tokens=0, top_k=limits.get("top_k", -1))
    early = truncate(others, loose)[1] if limits else None
    for row in (0, 1):
        found = {*kept.split()[row].ids.tolist()}
        expected = {*early.split()[row].ids.tolist()} if early else {*range(VOCAB_SIZE)}
        assert found == expected - {*stops} and {*(left[row] > OUTSIDE).nonzero()[:, 0].tolist()} == found
    if loose.keeps_likely:
        late = truncate(scaled[2:].clone(), loose)
        assert torch.equal(left[2:], late[0]) and kept.split()[2].ids.tolist() == late[1].split()[0].ids.tolist()
    else:
        assert torch.equal(left[2:], scaled[2:]) and kept.counts[2:].tolist() == [0, 0]


def test_the_last_set_of_a_place_counts() -> None:
    """A step that computes a part of a prompt draws a token that is thrown away; so does one after a preemption."""
    sampler = SimpleNamespace(forward=lambda logits, *_: logits)
    batch = SimpleNamespace(req_ids=["0-a", "1-b"], num_tokens_no_spec=np.array([3, 5]))
    samplings = {"0-a": make_sampling(top_k=2), "1-b": make_sampling()}  # whole: its row is unchanged
    requests = {
        name: SimpleNamespace(
            sampling_params=SimpleNamespace(
                **list_sampling_arguments(name[0], Request(0, np.zeros(3, np.int32), 0, sampling))
            )
        )
        for name, sampling in samplings.items()
    }
    runner = dict(requests=requests, input_batch=batch, sampler=SimpleNamespace(topk_topp_sampler=sampler))
    recorder = KeptSetRecorder(SimpleNamespace(**runner))
    steps = [draw_logits(seed, 1.0, rows=2) for seed in range(4)]
    for place, logits in zip((3, 3, 4, 4), steps, strict=True):
        batch.num_tokens_no_spec[0] = place
        left = sampler.forward(logits.clone(), {}, None, None)
        assert torch.equal(left[1], logits[1]) and int((left[0] == logits[0]).sum()) == 2
    kept = recorder.take("0", 3, 2)
    assert kept.counts.tolist() == [2, 2]
    assert kept.ids.tolist() == [*steps[1][0].topk(2).indices.tolist(), *steps[3][0].topk(2).indices.tolist()]
    assert not recorder._sets
