# SPDX-License-Identifier: Apache-2.0
"""One real vLLM engine under work as users have it: long prompts, large batches, errors in the middle.

Tokens that the scheduler's update leaves to the recorder of responses change nothing.

Its log-probs are compared with transformers in tests/transfer/test_hybrid_engine.py. Not covered: GPUs.
"""

from __future__ import annotations

import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from distributed import run_ranks
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, SamplingConfig
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.engines.vllm.vllm_settings import CPU_BLOCK_SIZE
from megatron_rl.parallel.collectives import Process
from megatron_rl.rollout.generation import generate
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.rollout_layout import huggingface_placements
from megatron_rl.weights.shard_box import box_shape, box_slices
from tiny_models import ENGINE_SIZES, save_tiny_model

SAMPLED = SamplingConfig(temperature=1.0, max_tokens=6, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen2", **ENGINE_SIZES, num_hidden_layers=2, max_position_embeddings=8192)
    return directory


def build(model: Path, max_prompt_length: int, **rollout: Any) -> VllmEngine:
    """An engine of one rank with random weights."""
    engine = VllmEngine(
        EngineSpec(
            model_path=str(model),
            shape=load_model_shape(model),
            dtype="float32",
            max_prompt_length=max_prompt_length,
            max_response_length=16,
            config=RolloutConfig(**rollout),
            process=Process(0, 1, 0, 1, torch.device("cpu")),
            seed=0,
        )
    )
    generator = torch.Generator().manual_seed(5)
    for param in engine.params.values():
        param.normal_(std=0.15, generator=generator)
    engine.end_weight_update()
    return engine


def reload_experts(rank: int, world_size: int, model: Path) -> list[Any]:
    """Responses after the weights were written, and after vLLM's own loader has read the same ones, twice."""
    import_module("megatron_rl.engines.vllm.vllm_worker")  # as in a server
    engine, prompts, shape = build(model, 64), make_prompts([9, 40]), load_model_shape(model)
    tensors = {box.param: torch.empty(box_shape(box.local_box)) for box in huggingface_placements(shape)}
    generator = torch.Generator().manual_seed(3)
    for tensor in tensors.values():
        tensor.normal_(std=0.15, generator=generator)
    for box in engine.placements(0):
        engine.params[box.param][box_slices(box.local_box)] = tensors[box.hf_name][box_slices(box.hf_box)]
    found = []
    runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    engine.end_weight_update()
    for _ in range(3):
        found.append(to_lists(generate(engine, requests_for(prompts))))
        runner.reload_weights(weights_iterator=iter(tensors.items()))
        engine._llm.reset_prefix_cache()
    engine.close()
    return found


def make_prompts(lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, 517, length, dtype=np.int32) for length in lengths]


def requests_for(prompts: list[np.ndarray], first_seed: int = 0) -> list[Request]:
    """Return a request per prompt, with consecutive seeds."""
    return [Request(i, prompt, first_seed + i, SAMPLED) for i, prompt in enumerate(prompts)]


def to_lists(generations: list[Sampled]) -> list[tuple[list[int], list[float]]]:
    return [(g.tokens.tolist(), g.logprobs.tolist()) for g in generations]


def work(rank: int, world_size: int, model: Path) -> dict[str, Any]:
    """Generate in one batch and one by one; then again after an error in the first forward and in a later one."""
    random.seed(7)
    np.random.seed(7)
    streams = read_streams()
    engine, prompts = build(model, 4200), make_prompts([500] * 9 + [4200])
    llm = engine._llm.llm_engine
    result: dict[str, Any] = {"batch": to_lists(generate(engine, requests_for(prompts))), "errors": []}
    blocks = llm.vllm_config.cache_config.num_gpu_blocks - 1  # the first is never used
    result["load"] = {"blocks": engine.load["cache"] * blocks, "waiting": engine.load["waiting"]}
    engine.end_weight_update()
    result["single"] = [to_lists(generate(engine, requests_for([p], seed)))[0] for seed, p in enumerate(prompts)]

    result["short"] = [generate_short(engine, block_size) for block_size in (0, CPU_BLOCK_SIZE)]
    forwards_left = 0

    def fail(module: torch.nn.Module, inputs: Any) -> None:
        nonlocal forwards_left
        forwards_left -= 1
        if forwards_left == 0:
            raise MemoryError("no room for activations")

    llm.model_executor.driver_worker.worker.get_model().register_forward_pre_hook(fail)
    for forwards in (1, 3):
        engine.end_weight_update()  # an empty prefix cache, as after every switch
        forwards_left = forwards
        with pytest.raises(MemoryError) as caught:
            generate(engine, requests_for(prompts[:4]))
        running = engine.tokens_in_flight(), sum(llm.engine_core.engine_core.scheduler.get_request_counts())
        result["errors"].append((str(caught.value), running, to_lists(generate(engine, requests_for(prompts[:4])))))
    engine.close()
    return result | {"streams": (streams, read_streams())}


def generate_short(engine: VllmEngine, block_size: int) -> tuple[list[Any], int]:
    """Generate over edges of KV-cache blocks, with an interruption; count the tokens that vLLM's scheduler updates."""
    recorder, prompts = engine._responses, make_prompts([1, 28, 30, 31, 32, 33, 60, 90])
    sampling = [replace(SAMPLED, max_tokens=70, stop_token_ids=stops) for stops in (tuple(range(2, 12)), ())]
    requests = [Request(i, prompt, 40 + i, sampling[i % 2]) for i, prompt in enumerate(prompts)]
    engine.end_weight_update()
    with (
        patch.object(recorder, "_block_size", block_size),
        patch.object(recorder, "_update", wraps=recorder._update) as update,
    ):
        engine.add(requests)
        ended = [one for _ in range(20) for one in engine.step()]
        parts = engine.interrupt([request.key for request in requests])
        found = ended + parts + generate(engine, [requests[p.key].continued(p.tokens, 50) for p in parts])
        num_updates = sum(len(call.args[0].num_scheduled_tokens) for call in update.call_args_list)
    everything = [
        (one.key, one.finish_reason, one.num_cached, one.tokens.tolist(), one.logprobs.tolist()) for one in found
    ]
    return everything, num_updates


def read_streams() -> tuple[Any, ...]:
    """States of the global random number generators."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def worked(model: Path, vllm_imported: None) -> dict[str, Any]:
    return run_ranks(work, 1, model, timeout=150)[0]


def test_more_prompt_tokens_than_one_step_takes(worked: dict[str, Any]) -> None:
    """9 x 500 tokens wait at once, and one prompt alone is longer than vLLM's default of 4096: the same responses."""
    for batch, single in zip(worked["batch"], worked["single"], strict=True):
        assert_same_response(batch, single)


def test_loads_are_the_largest_of_a_batch(worked: dict[str, Any]) -> None:
    """9 x 500 and 4,200 tokens, with at most 6 more each: two requests wait for the first forward of the others."""
    full = (9 * 500 + 4200) / CPU_BLOCK_SIZE
    assert worked["load"]["waiting"] == 2 and full < worked["load"]["blocks"] < full + 2 * 10


def assert_same_response(found: tuple[list[int], list[float]], expected: tuple[list[int], list[float]]) -> None:
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-4)


def test_an_error_leaves_nothing_behind(worked: dict[str, Any]) -> None:
    """After it nothing runs, and the same prompts give the same responses: no cached block without keys and values."""
    assert [text for text, _, _ in worked["errors"]] == ["no room for activations"] * 2
    for _, running, again in worked["errors"]:
        assert running == (0, 0)
        for found, expected in zip(again, worked["single"][:4], strict=True):
            assert_same_response(found, expected)


def test_recorded_tokens_equal_the_schedulers(worked: dict[str, Any]) -> None:
    """Tokens, log-probs, reasons and cache hits, to the last bit, at edges of blocks, stops, limits, interruptions."""
    (expected, all_updates), (found, updates) = worked["short"]
    assert found == expected
    reasons = {reason for _, reason, _, _, _ in found}
    assert reasons == {"stop", "length", "interrupted"}
    assert max(cached or 0 for _, _, cached, _, _ in found) >= CPU_BLOCK_SIZE
    num_tokens = sum(len(tokens) for _, _, _, tokens, _ in found)
    assert all_updates >= num_tokens > 5 * updates > 0


def test_random_streams_stay_the_trainers(worked: dict[str, Any]) -> None:
    """vLLM seeds Python, numpy and torch when it starts, and draws from torch when it samples."""
    before, after = worked["streams"]
    assert before == after


def test_a_large_batch_of_long_prompts(model: Path, vllm_imported: None) -> None:
    """64 prompts x 2,000 tokens x 8 responses with the default settings; one group equals the same group alone."""

    def work_alone(rank: int, world_size: int) -> Any:
        engine, prompts = build(model, 2000), make_prompts([2000] * 64)
        batch = generate(engine, requests_for([p for p in prompts for _ in range(8)]))
        engine.end_weight_update()
        return to_lists(batch[80:88]), to_lists(generate(engine, requests_for([prompts[10]] * 8, 80)))

    batch, alone = run_ranks(work_alone, 1, timeout=150)[0]
    for found, expected in zip(batch, alone, strict=True):
        assert_same_response(found, expected)


def test_experts_that_vllm_loads_again_are_packed(tmp_path: Path, vllm_imported: None) -> None:
    """As its servers do at every update; unpacked ones are 0.1 off."""
    save_tiny_model(tmp_path, "qwen3_moe", **ENGINE_SIZES, num_hidden_layers=1, max_position_embeddings=256)
    written, *loaded = run_ranks(reload_experts, 1, tmp_path, timeout=150)[0]
    for responses in loaded:
        for found, expected in zip(responses, written, strict=True):
            assert found[0] == expected[0]
            assert found[1] == pytest.approx(expected[1], abs=1e-6)
