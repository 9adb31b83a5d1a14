# SPDX-License-Identifier: Apache-2.0
"""Truncated sampling in real engines: the log-probs they report equal the trainer's from the sets that they return.

vLLM (one rank and two, its cache too small for all requests) and transformers; the policy's own engine draws the same
way in tests/run/test_bitwise.py and test_schedule.py. Not covered: GPUs, and prompts computed in parts, which CPU
vLLM cannot do (tests/engines/test_truncation.py has the rule for them).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.build import build_engine
from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, SamplingConfig
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.rollout.generation import ControlMessage, generate, serve
from megatron_rl.types import KeptSets
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import ENGINE_SIZES, save_tiny_model

PLAIN = SamplingConfig(temperature=0.3, max_tokens=20, stop_token_ids=(2,))
TRUNCATED = [
    replace(PLAIN, top_k=20, top_p=0.9),
    replace(PLAIN, min_p=0.02),
    replace(PLAIN, top_p=0.95, max_kept_tokens=7),
]
# A third of the vocabulary ends a response, but none of its first nine tokens.
PATIENT = replace(PLAIN, temperature=1.0, stop_token_ids=tuple(range(2, 517, 3)), min_tokens=9)
Response = tuple[list[int], list[float], list[list[int]] | None]


def make_requests(*samplings: SamplingConfig, number: int = 6) -> list[Request]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 517, 10 + 11 * i, dtype=np.int32) for i in range(number)]
    return [Request(i, prompt, i, samplings[i % len(samplings)]) for i, prompt in enumerate(prompts)]


def describe(sampled: Sampled) -> Response:
    kept = sampled.kept and [part.ids.tolist() for part in sampled.kept.split()]
    return sampled.tokens.tolist(), sampled.logprobs.tolist(), kept


def interrupt_and_resume(engine: Any, requests: list[Request]) -> list[Response]:
    """Ended after six steps, and continued: both parts together."""
    partial: dict[int, Sampled] = {}
    messages = iter([ControlMessage(requests=requests), *[ControlMessage()] * 5])
    end = ControlMessage(interrupts=range(len(requests)), stop=True)
    assert serve(engine, lambda wait: next(messages, end), lambda s: partial.update({s.key: s})) is None
    rest = [
        Request(
            r.key,
            np.append(r.tokens, had.tokens),
            50 + r.key,
            replace(r.sampling, max_tokens=20 - len(had.tokens)),
            num_sampled=len(had.tokens),
        )
        for r, had in ((r, partial[r.key]) for r in requests)
        if had.finish_reason == "interrupted"
    ]
    assert len(rest) > 3
    further = {sampled.key: sampled for sampled in generate(engine, rest)}
    joined = []
    for key, had in sorted(partial.items()):
        tokens, logprobs, kept = describe(had)
        more = describe(further[key]) if key in further else ([], [], [])
        joined.append((tokens + more[0], logprobs + more[1], (kept or []) + (more[2] or [])))
    return joined


def work(rank: int, world_size: int, model: Path, name: str) -> dict[str, list[Response]]:
    process = init_distributed(2)
    block_bytes = 32 * 2 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, KV heads, head_dim, float32
    rollout = dict(kv_cache_gib=9 * block_bytes / (1 << 30)) if name == "vllm" and world_size == 1 else {}
    engine = build_engine(
        EngineSpec(
            model_path=str(model),
            shape=load_model_shape(model),
            dtype="float32",
            max_prompt_length=80,
            max_response_length=24,
            process=process,
            seed=0,
            config=RolloutConfig(engine=name, max_num_seqs=8, tensor_model_parallel_size=world_size, **rollout),
        )
    )
    load_huggingface(model, engine.weights.placements(process.rank), engine.weights.params)
    engine.weights.end_weight_update()
    greedy = replace(TRUNCATED[0], temperature=0.0)
    batches = {
        "alike": make_requests(TRUNCATED[0]),
        "patient": make_requests(PATIENT),
        "patient and likely": make_requests(replace(PATIENT, top_k=20)),
        "mixed": make_requests(*TRUNCATED, PLAIN, greedy, TRUNCATED[0], number=8),
    }
    found = {key: [describe(s) for s in generate(engine.requests, batch)] for key, batch in batches.items()}
    if name == "vllm":
        found["resumed"] = interrupt_and_resume(engine.requests, batches["alike"])
        found["patient, resumed"] = interrupt_and_resume(engine.requests, batches["patient"])
        assert not engine.requests._kept._sets
    engine.requests.close()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen2", **ENGINE_SIZES, num_hidden_layers=2, tie_word_embeddings=False)
    return directory


@torch.no_grad()
def assert_scored(model: Path, requests: list[Request], responses: list[Response]) -> list[int]:
    """Compare the log-probs with transformers' logits over the sets; return the sizes of the sets."""
    reference, sizes = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), []
    for request, (tokens, logprobs, kept) in zip(requests, responses, strict=True):
        ids = torch.tensor([[*request.tokens.tolist(), *tokens]])
        scaled = reference(ids).logits[0, len(request.tokens) - 1 : -1] / (request.sampling.temperature or 1.0)
        assert (kept is not None) == request.sampling.is_truncated
        sets = [found or list(range(517)) for found in kept or [[]] * len(tokens)]
        assert len(sets) == len(tokens) == len(logprobs)
        for row, token, logprob, found in zip(scaled, tokens, logprobs, sets, strict=True):
            assert float(row[found].log_softmax(-1)[found.index(token)]) == pytest.approx(logprob, abs=1e-5)
        sizes += [len(found) for found in kept or []]
    return sizes


@pytest.mark.parametrize(("name", "ranks"), [("vllm", 1), ("vllm", 2), ("hf", 1)])
def test_what_an_engine_reports_is_scored_from_its_sets(
    model: Path, vllm_imported: None, name: str, ranks: int
) -> None:
    """Requests of several kinds at once, and interrupted ones; TP ranks return the same."""
    found = run_ranks(work, ranks, model, name, timeout=150)
    assert all(other == found[0] for other in found)
    alike, mixed = make_requests(TRUNCATED[0]), found[0]["mixed"]
    sizes = assert_scored(model, alike, found[0]["alike"])
    assert max(sizes) <= 20 and len({*sizes}) > 3, "both limits count"
    samplings = [*TRUNCATED, PLAIN, replace(TRUNCATED[0], temperature=0.0), TRUNCATED[0]]
    assert_scored(model, make_requests(*samplings, number=8), mixed)
    assert max(len(part) for part in mixed[2][2] or []) == 7, "no set is larger than the bound"
    assert max(len(part) for part in mixed[1][2] or []) > 20
    assert_patient(model, found[0]["patient"])
    assert_patient(model, found[0]["patient and likely"], has_sets_later=True)
    if name == "vllm":
        assert_patient(model, found[0]["patient, resumed"])
        assert_scored(model, alike, found[0]["resumed"])


def assert_patient(model: Path, responses: list[Response], has_sets_later: bool = False) -> None:
    """No stop token among the first nine, which are scored without them, and one soon after."""
    requests, stops = (
        make_requests(replace(PATIENT, top_k=20) if has_sets_later else PATIENT),
        {*PATIENT.stop_token_ids},
    )
    assert_scored(model, requests, responses)
    for tokens, _, kept in responses:
        assert kept is not None and len(tokens) > 9 and not stops & {*tokens[:9]}
        assert all(found and not stops & {*found} for found in kept[:9])
        assert all(bool(found) == has_sets_later for found in kept[9:])
        assert has_sets_later or all(len(found) == 517 - len(stops) for found in kept[:9])
    assert any(tokens[-1] in stops for tokens, _, _ in responses)


def test_the_sets_decide_the_gap(model: Path, vllm_imported: None) -> None:
    """Scored over the whole vocabulary, as if nothing were cut, the same tokens are off by more than 0.1."""
    (found,) = run_ranks(work, 1, model, "hf", timeout=150)
    with pytest.raises(AssertionError):
        whole = [(tokens, logprobs, [list(range(517))] * len(tokens)) for tokens, logprobs, _ in found["alike"]]
        assert_scored(model, make_requests(TRUNCATED[0]), whole)


def test_sets_are_cut_and_joined() -> None:
    kept = KeptSets(np.array([9, 2, 7], np.int32), np.array([2, 0, 1], np.int32))
    assert [part.ids.tolist() for part in kept.split()] == [[9, 2], [], [7]]
    assert kept.cut(2).ids.tolist() == [9, 2] and kept.cut(2).counts.tolist() == [2, 0]
    joined = KeptSets.join([KeptSets.whole(1), kept.cut(1), kept])
    assert (joined.ids.tolist(), joined.counts.tolist()) == ([9, 2, 9, 2, 7], [0, 2, 2, 0, 1])
