# SPDX-License-Identifier: Apache-2.0
"""Compare the responses of vLLM's second model runner with the first one's where both promise the same.

Greedy responses are equal. Sampled ones are not, since the second runner draws by (seed, position): they depend on
nothing but prompt and seed, not on the batch, async scheduling, or our shortcuts in vLLM. All log-probs are those of
transformers. Without a GPU the real second runner computes its kernels in Triton's interpreter
(`tools/_runner_on_cpu.py`). Not covered there: streams, CUDA graphs, a GPU's compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, SamplingConfig
from megatron_rl.engines.vllm import vllm_engine
from megatron_rl.parallel.collectives import Process
from megatron_rl.rollout.generation import generate
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import ENGINE_SIZES, save_tiny_model
from tools._runner_on_cpu import use_gpu_modes

HAS_GPU = torch.cuda.is_available()
SAMPLED = SamplingConfig(temperature=0.7, max_tokens=9, stop_token_ids=(2,))
GREEDY = replace(SAMPLED, temperature=0.0)
LENGTHS = (28, 60, 5, 60)  # two responses begin a KV-cache block, of 32 tokens on a CPU
ARMS: dict[str, dict[str, Any]] = {
    "first": {"model_runner": "v1", "engine_options": {"async_scheduling": False}},
    "second": {"model_runner": "v2", "engine_options": {"async_scheduling": False}},
    "async": {"model_runner": "v2", "engine_options": {"async_scheduling": True}},
}

here = pytest.mark.skipif(not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="in another process")


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="the GPU runs them")
def test_this_file_in_the_interpreter() -> None:
    """Run Triton's kernels in its interpreter, which is chosen when Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "runner_", "-m", "gpu"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen2", **ENGINE_SIZES, num_hidden_layers=2)
    return directory


@pytest.fixture(scope="module")
def found(path: Path) -> dict[str, dict[str, list[Sampled]]]:
    """Return the responses of each arm, and of vLLM with its own search for blocks; each engine has its process."""
    arms = {name: run_ranks(_work, 1, path, name, True)[0] for name in ARMS}
    return arms | {"plain": run_ranks(_work, 1, path, "async", False)[0]}


def _make_requests(sampling: SamplingConfig, first_seed: int) -> list[Request]:
    prompts = [np.random.default_rng(size).integers(3, 500, size, np.int32) for size in LENGTHS]
    return [Request(key, prompt, first_seed + key, sampling) for key, prompt in enumerate(prompts)]


def _work(rank: int, world_size: int, path: Path, arm: str, skips_searches: bool) -> dict[str, list[Sampled]]:
    device = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
    if arm != "first" and not HAS_GPU:
        use_gpu_modes(ARMS[arm]["model_runner"], **ARMS[arm]["engine_options"])
    spec = EngineSpec(
        model_path=str(path),
        shape=load_model_shape(path),
        dtype="float32",
        max_prompt_length=80,
        max_response_length=16,
        config=RolloutConfig(max_num_seqs=8, enforce_eager=True, gpu_memory_utilization=0.2, **ARMS[arm]),
        process=Process(0, 1, 0, 1, device),
        seed=0,
    )
    with ExitStack() as stack:
        if not skips_searches:
            stack.enter_context(patch.object(vllm_engine, "skip_block_searches", return_value=0))
        engine = vllm_engine.VllmEngine(spec)
    runner = type(engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    assert (".gpu." in runner.__mro__[1].__module__) == (arm != "first") or HAS_GPU, "not the runner of this arm"
    load_huggingface(path, engine.placements(0), engine.params)
    engine.end_weight_update()
    requests = _make_requests(SAMPLED, 7)
    result = {"greedy": generate(engine, _make_requests(GREEDY, 7)), "sampled": generate(engine, requests)}
    result["reversed"] = generate(engine, requests[::-1])[::-1]
    result["alone"] = [generate(engine, [request])[0] for request in requests]
    result["another seed"] = generate(engine, _make_requests(SAMPLED, 100))
    engine.add(requests)
    for _ in range(4):
        engine.step()
    result["interrupted"] = engine.interrupt(range(len(requests)))
    assert not engine.has_requests()
    rest = [request.continued(part.tokens, 50) for request, part in zip(requests, result["interrupted"], strict=True)]
    result["continued"] = generate(engine, rest)
    return result


def _tokens(responses: list[Sampled]) -> list[list[int]]:
    return [one.tokens.tolist() for one in responses]


@pytest.mark.gpu
@here
def test_runner_changes_no_greedy_response(found: dict[str, dict[str, list[Sampled]]]) -> None:
    expected = found["first"]["greedy"]
    assert all(len(one.tokens) == GREEDY.max_tokens or one.finish_reason == "stop" for one in expected)
    for arm in ("second", "async", "plain"):
        assert _tokens(found[arm]["greedy"]) == _tokens(expected)
        for got, want in zip(found[arm]["greedy"], expected, strict=True):
            np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


@pytest.mark.gpu
@here
def test_runner_draws_by_seed_alone(found: dict[str, dict[str, list[Sampled]]]) -> None:
    """A response depends on prompt and seed only: not on other requests, not on async scheduling."""
    expected = _tokens(found["second"]["sampled"])
    for arm in ("second", "async", "plain"):
        assert all(_tokens(found[arm][kind]) == expected for kind in ("sampled", "reversed", "alone"))
        others = _tokens(found[arm]["another seed"])
        assert others == _tokens(found["second"]["another seed"])
        assert all(a != b for a, b in zip(others, expected, strict=True))


@pytest.mark.gpu
@here
def test_runner_scores_as_transformers(found: dict[str, dict[str, list[Sampled]]], path: Path) -> None:
    """Compare the log-prob of every token at the temperature, also in interrupted responses and their continuations."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for arm in ("first", "async"):
        for kind in ("sampled", "another seed", "interrupted", "continued"):
            for key, response in enumerate(found[arm][kind]):
                prompt = _make_requests(SAMPLED, 7)[key].tokens
                if kind == "continued":
                    prompt = np.concatenate([prompt, found[arm]["interrupted"][key].tokens])
                ids = torch.tensor(np.concatenate([prompt, response.tokens])[None].astype(np.int64))
                with torch.no_grad():
                    logits = model(ids).logits[0, len(prompt) - 1 : -1] / SAMPLED.temperature
                want = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
                np.testing.assert_allclose(response.logprobs, want.numpy(), atol=2e-4)


@pytest.mark.gpu
@here
def test_runner_finds_the_same_blocks(found: dict[str, dict[str, list[Sampled]]]) -> None:
    """Requests reuse their cached prefix with our search for blocks and with vLLM's."""
    cached = {arm: [one.num_cached for one in found[arm]["continued"]] for arm in ("async", "plain")}
    assert cached["async"] == cached["plain"] and max(filter(None, cached["async"])) >= 32
    assert [one.num_cached for one in found["async"]["reversed"]] == [
        one.num_cached for one in found["plain"]["reversed"]
    ]
