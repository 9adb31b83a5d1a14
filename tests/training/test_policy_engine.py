# SPDX-License-Identifier: Apache-2.0
"""The engine that is the policy, on one rank: greedy tokens of each family, batches, interruptions, seeds, bytes.

Several ranks, an optimizer step and the weights' road are in tests/transfer/test_hybrid_engine.py, a run in
tests/run/test_policy_engine_in_loop.py. Not covered: GPUs.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import megatron_rl.parallel  # noqa: F401 (before megatron.core)
from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.build import BuiltEngine, build_engine
from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, SamplingConfig
from megatron_rl.parallel.collectives import Process
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rollout.generation import ControlMessage, generate, serve
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.roles.frozen import score_sequences
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import CONFIGS, save_tiny_model
from tools.parity.check import build_policy

FAMILIES = sorted({*CONFIGS} - {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})  # it has no cache for states
GREEDY = SamplingConfig(temperature=0.0, max_tokens=10, stop_token_ids=(2,))
LENGTHS = (3, 40, 17, 1, 70, 18, 9)
BLOCK_BYTES = 16 * 4 * 2 * 4 * 16 * 4  # slots, layers, keys and values, KV heads, head_dim, float32


def make_requests(sampling: SamplingConfig) -> list[Request]:
    rng = np.random.default_rng(1)
    return [Request(i, rng.integers(3, 517, n, dtype=np.int32), 100 + i, sampling) for i, n in enumerate(LENGTHS)]


def to_lists(sampled: list[Sampled]) -> list[tuple[list[int], list[float], str]]:
    return [(s.tokens.tolist(), s.logprobs.tolist(), s.finish_reason) for s in sampled]


def open_policy(path: Path) -> PackedModel:
    return build_policy(path, load_model_shape(path), "float32", ParallelLayout(1), sequence_parallel=False)


def open_engine(path: Path, policy: PackedModel | None, engine: str = "megatron", **rollout: Any) -> BuiltEngine:
    return build_engine(
        EngineSpec(
            model_path=str(path),
            shape=load_model_shape(path),
            dtype="float32",
            max_prompt_length=80,
            max_response_length=24,
            config=RolloutConfig(engine=engine, **rollout),
            process=Process(0, 1, 0, 1, torch.device("cpu")),
            seed=0,
            model=policy,
        )
    )


def count_bytes() -> int:
    """Bytes of all tensors that live in this process, each storage once."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def interrupt_and_resume(engine: BuiltEngine) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens until an interruption before the fourth step, and the tokens of the requests that continue."""
    requests, partial, steps = make_requests(GREEDY), {}, iter(range(4))

    def take(wait: bool) -> ControlMessage:
        step = next(steps)
        return ControlMessage(
            interrupts=range(len(requests)) if step == 3 else (), requests=() if step else requests, stop=step == 3
        )

    assert serve(engine.requests, take, lambda sampled: partial.update({sampled.key: sampled})) is None
    assert not engine.requests.has_requests() and engine.requests.tokens_in_flight() == 0
    first = [partial[request.key].tokens for request in requests]
    rest = [
        Request(r.key, np.append(r.tokens, had), r.seed, SamplingConfig(0.0, 10 - len(had), (2,)))
        for r, had in zip(requests, first, strict=True)
    ]
    return [tokens.tolist() for tokens in first], [s.tokens.tolist() for s in generate(engine.requests, rest)]


def work(rank: int, world_size: int, models: Path) -> dict[str, Any]:
    """Greedy tokens of every family; then one family at length."""
    found: dict[str, Any] = {"greedy": {}}
    for family in FAMILIES:
        policy = open_policy(models / family)
        engine = open_engine(models / family, policy)
        found["greedy"][family] = [s.tokens.tolist() for s in generate(engine.requests, make_requests(GREEDY)[:3])]
    del engine
    path = models / "qwen3"
    policy = open_policy(path)
    streams, before = torch.get_rng_state(), count_bytes()
    engine = open_engine(path, policy, max_num_seqs=3, kv_cache_gib=13 * BLOCK_BYTES / (1 << 30))
    sampled = make_requests(SamplingConfig(1.0, 24, tuple(range(2, 517, 30))))
    responses = generate(engine.requests, sampled)
    found["batch"] = to_lists(responses)
    found["cache"] = count_bytes() - before
    engine.weights.sleep()
    found["bytes"] = count_bytes() - before
    found["streams"] = torch.equal(streams, torch.get_rng_state())
    found["single"] = [to_lists(generate(engine.requests, [request]))[0] for request in sampled]
    whole = [np.concatenate([r.tokens, s.tokens]) for r, s in zip(sampled, responses, strict=True)]
    found["scores"] = [scores.tolist() for scores in score_sequences(policy, whole, list(LENGTHS))]
    found["interrupted"] = interrupt_and_resume(engine)
    found["uninterrupted"] = [s.tokens.tolist() for s in generate(engine.requests, make_requests(GREEDY))]
    engine.weights.end_weight_update()  # refuses while a request runs
    hf = open_engine(path, None, "hf")
    load_huggingface(path, hf.weights.placements(0), hf.weights.params)
    found["hf"] = to_lists(generate(hf.requests, sampled))
    with pytest.raises(UserError, match="holds 96 tokens"):
        open_engine(path, policy, kv_cache_gib=6.5 * BLOCK_BYTES / (1 << 30))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        save_tiny_model(directory / family, family)
    return directory


@pytest.fixture(scope="module")
def worked(models: Path) -> dict[str, Any]:
    return run_ranks(work, 1, models, timeout=150)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(worked: dict[str, Any], models: Path, family: str) -> None:
    """Prompts of different lengths in one batch here, one at a time there."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models / family).eval()
    for request, tokens in zip(make_requests(GREEDY), worked["greedy"][family], strict=False):
        ids = torch.from_numpy(request.tokens.astype(np.int64))[None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert tokens == out[0, ids.shape[1] :].tolist()


def assert_same(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    """Equal tokens and reasons; log-probs are rounded in another batch."""
    assert [(tokens, reason) for tokens, _, reason in found] == [(tokens, reason) for tokens, _, reason in expected]
    for (_, logprobs, _), (_, others, _) in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(others, abs=1e-5)


def test_batches_do_not_matter(worked: dict[str, Any]) -> None:
    """Seven requests, three places and blocks for two or three: the results equal those of single requests."""
    assert len({len(tokens) for tokens, _, _ in worked["batch"]}) > 3, "lengths must differ"
    assert_same(worked["batch"], worked["single"])


def test_seeds_mean_the_same_as_in_the_other_engine(worked: dict[str, Any]) -> None:
    assert_same(worked["batch"], worked["hf"])


def test_logprobs_are_those_of_training(worked: dict[str, Any]) -> None:
    gaps = [
        np.abs(np.array(scores) - np.array(logprobs)).max()
        for scores, (_, logprobs, _) in zip(worked["scores"], worked["batch"], strict=True)
    ]
    assert max(gaps) < 1e-5


def test_interrupted_responses_can_be_resumed(worked: dict[str, Any]) -> None:
    first, rest = worked["interrupted"]
    assert {len(tokens) for tokens in first} == {0, 3}, "some ran for three steps, the others waited"
    assert [a + b for a, b in zip(first, rest, strict=True)] == worked["uninterrupted"]


def test_there_is_no_second_copy_of_anything(worked: dict[str, Any]) -> None:
    """The cache during generation, nothing afterwards, and the trainer's random numbers do not advance."""
    assert worked["cache"] == 13 * BLOCK_BYTES + BLOCK_BYTES // 16  # and one slot for padding
    assert worked["bytes"] == 0 and worked["streams"]
