# SPDX-License-Identifier: Apache-2.0
"""Thoughts that a budget ends: in each engine, token by token, and how the tags of a model are found.

Whole runs, with thoughts that are interrupted, saved and resumed, are in tests/run/test_thinking_in_loop.py.
Not covered: GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.build import build_engine
from megatron_rl.engines.endings import Thoughts
from megatron_rl.engines.protocol import EngineSpec, Request, RolloutEngine, Sampled, SamplingConfig
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rollout.generation import generate
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import ENGINE_SIZES, save_tiny_model
from tools.parity.check import build_policy

BUDGET, LONGEST, OPEN = 6, 24, 7
GREEDY = SamplingConfig(temperature=0.0, max_tokens=LONGEST, stop_token_ids=(2,), thinking_budget=BUDGET)
DRAWN = replace(GREEDY, temperature=1.0, top_p=0.9)


class Tokens:
    """A tokenizer of which one token in forty closes a thought."""

    eos_token_id = pad_token_id = 2
    vocab_size = 517

    def encode(self, text: str) -> list[int]:
        return [9, 40, 9] if "</think>" in text else [9]

    encode_content = encode_rendered = encode

    def decode(self, ids: Sequence[int], keep: Collection[str] = ()) -> str:
        return "".join("<think>" if i == OPEN else "</think>" if i % 40 == 0 else "." for i in ids)

    def read_vocabulary(self) -> dict[str, int]:
        return {}

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return ""

    render = apply_chat_template


THOUGHTS = Thoughts("\n</think>\n", Tokens())
CLOSING = THOUGHTS.closing.tolist()


def make_requests(sampling: SamplingConfig) -> list[Request]:
    """Of prompts that open a thought, but for every third one."""
    rng = np.random.default_rng(1)
    prompts = [[*rng.integers(41, 79, 10 + 7 * i), 8 if i % 3 == 2 else OPEN] for i in range(12)]
    return [Request(i, np.array(prompt, np.int32), i, sampling) for i, prompt in enumerate(prompts)]


def find_interrupted(engine: RolloutEngine, steps: int) -> dict[int, Sampled]:
    """Return the first tokens of greedy responses."""
    requests = make_requests(GREEDY)
    engine.add(requests)
    found = {sampled.key: sampled for _ in range(steps) for sampled in engine.step()}
    found |= {sampled.key: sampled for sampled in engine.interrupt([request.key for request in requests])}
    assert not engine.has_requests()
    return found


def continue_interrupted(engine: RolloutEngine, found: dict[int, Sampled]) -> list[list[int]]:
    """Return the whole responses, continued by the engine as in a later phase."""
    rest = [
        request.continued(np.asarray(found[request.key].tokens, np.int32), request.seed)
        for request in make_requests(GREEDY)
        if found[request.key].finish_reason == "interrupted"
    ]
    later = {sampled.key: sampled for sampled in generate(engine, rest)}
    return [[*found[key].tokens, *(later[key].tokens if key in later else ())] for key in sorted(found)]


def work(rank: int, world_size: int, model: Path, name: str) -> dict[str, Any]:
    """Run requests with and without a budget on an engine."""
    process, shape = init_distributed(2), load_model_shape(model)
    policy = None
    if name == "megatron":
        policy = build_policy(model, shape, "float32", ParallelLayout(1), sequence_parallel=False)
    spec = EngineSpec(
        model_path=str(model),
        shape=shape,
        dtype="float32",
        max_prompt_length=120,
        max_response_length=LONGEST,
        process=process,
        seed=0,
        config=RolloutConfig(engine=name, max_num_seqs=16, tensor_model_parallel_size=world_size),
        model=policy,
        thoughts=THOUGHTS,
    )
    engine = build_engine(spec)
    if policy is None:
        load_huggingface(model, engine.weights.placements(process.rank), engine.weights.params)
    engine.weights.end_weight_update()
    requests, found = engine.requests, {}
    for kind, sampling in (("greedy", GREEDY), ("drawn", DRAWN)):
        found[kind] = generate(requests, make_requests(sampling))
        found[f"{kind} whole"] = generate(requests, make_requests(replace(sampling, thinking_budget=None)))
    ended = {s.key: s.tokens[: BUDGET + len(CLOSING)] for s in found["greedy"] if s.inserted is not None}
    found["rest"] = generate(
        requests,
        [
            replace(r, sampling=replace(GREEDY, thinking_budget=None)).continued(ended[r.key], 0)
            for r in make_requests(GREEDY)
            if r.key in ended
        ],
    )
    steps = [0] if name == "hf" else [0, 4, BUDGET, BUDGET + 1, BUDGET + 5]  # a step of hf is a whole batch
    found["continued"] = [continue_interrupted(requests, find_interrupted(requests, n)) for n in steps]
    assert not requests.has_requests() and requests.tokens_in_flight() == 0
    requests.close()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen2", **ENGINE_SIZES, num_hidden_layers=2, tie_word_embeddings=False)
    return directory


@pytest.mark.parametrize(("name", "ranks"), [("vllm", 2), ("hf", 1), ("megatron", 1)])
def test_an_engine_ends_thoughts(model: Path, vllm_imported: None, name: str, ranks: int) -> None:
    """The tokens before the end equal those without a budget; the tokens after it are the engine's own samples."""
    every = run_ranks(work, ranks, model, name, timeout=150)
    found, requests = every[0], make_requests(GREEDY)
    for kind in ("greedy", "drawn"):
        for other in every:
            assert [s.tokens.tolist() for s in other[kind]] == [s.tokens.tolist() for s in found[kind]]
        for request, ended, whole in zip(requests, found[kind], found[f"{kind} whole"], strict=True):
            assert_ended(request, ended, whole, kind)
    rest = {sampled.key: sampled for sampled in found["rest"]}
    ended = {s.key: s for s in found["greedy"] if s.inserted is not None}
    assert rest.keys() == ended.keys() and 2 < len(ended) < 9, "thoughts are ended, and some end by themselves"
    for key, sampled in rest.items():
        assert ended[key].tokens[BUDGET + len(CLOSING) :].tolist() == sampled.tokens.tolist()
        assert ended[key].logprobs[BUDGET + len(CLOSING) :] == pytest.approx(sampled.logprobs, abs=1e-5)
    for continued in found["continued"]:
        assert continued == [s.tokens.tolist() for s in found["greedy"]]


def assert_ended(request: Request, ended: Sampled, whole: Sampled, kind: str) -> None:
    """A response with a budget is right beside the one without."""
    tokens, count = ended.tokens.tolist(), len(CLOSING)
    begin = tokens[:BUDGET]
    assert begin == whole.tokens[:BUDGET].tolist() and len(tokens) == len(ended.logprobs) <= LONGEST
    is_open = len(whole.tokens) > BUDGET and THOUGHTS.are_open([*request.tokens.tolist(), *begin])
    assert (ended.inserted is not None) == is_open
    if ended.inserted is not None:
        assert tokens[BUDGET : BUDGET + count] == CLOSING and len(tokens) > BUDGET + count
        assert np.flatnonzero(ended.inserted).tolist() == [*range(BUDGET, BUDGET + count)]
        assert not ended.logprobs[ended.inserted].any() and (ended.logprobs[~ended.inserted] < 0).all()
    elif kind == "greedy":
        assert tokens == whole.tokens.tolist()
        assert ended.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    if kind == "drawn":
        assert ended.kept is not None and len(ended.kept.counts) == len(tokens)
        inserted = np.zeros(len(tokens), bool) if ended.inserted is None else ended.inserted
        assert ((ended.kept.counts == 0) == inserted).all()


@pytest.mark.parametrize("text", ["", "so", "<think>", "</thought"])
def test_a_text_without_a_closing_tag_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="ends no thought"):
        Thoughts(text, Tokens())


def test_a_thought_is_open_from_its_tag_on() -> None:
    """In the prompt or in the response; a template that switches thinking off closes it in the prompt."""
    assert THOUGHTS.are_open([1, OPEN, 1]) and THOUGHTS.are_open([OPEN, 40, OPEN])
    assert not any(map(THOUGHTS.are_open, ([], [1], [OPEN, 40], [OPEN, 1, 40, 1], [40])))
