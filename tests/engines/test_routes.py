# SPDX-License-Identifier: Apache-2.0
"""Engines report the same routes as transformers, regardless of how they computed a token.

vLLM preempts here, finds prompts in its prefix cache, and continues interrupted responses; the policy engine is two
pipeline stages of two expert parallel ranks. Not covered: GPUs; ties, which rounding may decide.
"""

from __future__ import annotations

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
from megatron_rl.rollout.episodes import Recording, SampleGroups
from megatron_rl.rollout.generation import check_sampled, generate
from megatron_rl.rollout.packed_episodes import pack_rollouts, unpack_rollouts
from megatron_rl.types import Prompt, RouteShape, UserError
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import ENGINE_SIZES, engine_sizes, save_tiny_model
from tools._runner_on_cpu import use_gpu_modes
from tools.parity.check import build_policy

SHAPE = RouteShape(layers=2, choices=2, experts=8)
EARLY = {"async_scheduling": True}
SAMPLED = SamplingConfig(temperature=1.0, max_tokens=24, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen3_moe", **ENGINE_SIZES, num_hidden_layers=2, num_experts=8)
    return directory


def make_requests() -> list[Request]:
    """Nine prompts: some that need a second block of 32 tokens soon, and three that share more than two blocks."""
    rng = np.random.default_rng(1)
    prefix = rng.integers(3, 517, 70)
    prompts = [rng.integers(3, 517, n) for n in (1, 30, 29, 28, 30, 40)] + [np.append(prefix, i + 5) for i in range(3)]
    return [Request(i, tokens.astype(np.int32), 50 + i, SAMPLED) for i, tokens in enumerate(prompts)]


def open_engine(rank: int, world_size: int, path: Path, name: str, **rollout: Any) -> BuiltEngine:
    """Open an engine with the weights of the model."""
    shape = load_model_shape(path)
    policy = None
    if name == "megatron":
        layout = ParallelLayout(world_size, pp_size=2 if world_size > 1 else 1, ep_size=2 if world_size > 1 else 1)
        policy = build_policy(path, shape, "float32", layout, sequence_parallel=False)
    engine = build_engine(
        EngineSpec(
            model_path=str(path),
            shape=shape,
            dtype="float32",
            max_prompt_length=80,
            max_response_length=24,
            config=RolloutConfig(engine=name, **rollout),
            process=Process(rank, world_size, rank, world_size, torch.device("cpu")),
            seed=0,
            model=policy,
            records_routes=True,
        )
    )
    if policy is None:
        params: Any = engine.weights.params
        load_huggingface(path, engine.weights.placements(rank), params)
        engine.weights.end_weight_update()
    return engine


def interrupt_and_continue(engine: BuiltEngine) -> tuple[list[Request], list[Sampled]]:
    """Each response in two parts, of which the second one computes the first again, or finds it in a cache."""
    requests = make_requests()[:3]
    engine.requests.add(requests)
    for _ in range(4):
        assert not engine.requests.step()
    samples = SampleGroups([Prompt(r.key, r.tokens, "", "") for r in requests], 1, SAMPLED, step=1)
    held = {r.key: Recording(*samples.sample_of(r.key)) for r in requests}
    for part in engine.requests.interrupt([0, 1, 2]):
        held[part.key].reply(part.tokens, part.logprobs, 0, routes=part.routes, is_whole=False)
    packed = pack_rollouts({key: one.finish("interrupted") for key, one in held.items()})
    kept = unpack_rollouts(packed, samples.sample_of)
    held = {key: Recording.of(rollout) for key, rollout in kept.items() if rollout is not None}
    rest = [Request(r.key, held[r.key].tokens, 90 + r.key, SamplingConfig(1.0, 6, (2,))) for r in requests]
    for part in generate(engine.requests, rest):
        held[part.key].reply(part.tokens, part.logprobs, 1, routes=part.routes)
    whole = [held[r.key].finish("stop") for r in requests]
    return requests, [
        Sampled(r.key, w.response_tokens, w.rollout_logprobs, "", routes=w.branches[0].routes)
        for r, w in zip(requests, whole, strict=True)
    ]


def count_preemptions(engine: Any) -> list[str]:
    """Names of requests that vLLM preempts from now on."""
    scheduler, names = engine._llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def note(request: Any, *arguments: Any, **options: Any) -> None:
        names.append(request.request_id)
        preempt(request, *arguments, **options)

    scheduler._preempt_request = note
    return names


def work(rank: int, world_size: int, path: Path, name: str, rollout: dict[str, Any]) -> list[Any]:
    """Prompts and responses: in one batch; then some of them again, from the prefix cache; then in two parts."""
    is_early = "engine_options" in rollout
    if is_early:
        use_gpu_modes("v1")
    engine, requests = open_engine(rank, world_size, path, name, **rollout), make_requests()
    preempted = []
    if name == "vllm":
        preempted, core = count_preemptions(engine.requests), engine.requests._llm.llm_engine.engine_core.engine_core
        assert (core.batch_queue is not None) == is_early, "plans the next step early"
    found = list(zip(requests, generate(engine.requests, requests), strict=True))
    found += list(zip(requests[-3:], generate(engine.requests, requests[-3:]), strict=True))
    if name != "hf":  # its step is a whole batch
        found += list(zip(*interrupt_and_continue(engine), strict=True))
    assert bool(preempted) == (name == "vllm" and "kv_cache_gib" in rollout)
    return [(request.tokens, sampled.tokens, sampled.routes) for request, sampled in found]


def route_with_transformers(path: Path, tokens: np.ndarray) -> np.ndarray:
    """Return the routes [s, layers, choices] of a sequence in transformers."""
    model, chosen = transformers.AutoModelForCausalLM.from_pretrained(path).eval(), []
    for block in model.model.layers:
        router = getattr(block.mlp, "gate", getattr(block.mlp, "router", None))
        if router is not None:
            router.register_forward_hook(lambda gate, inputs, output: chosen.append(output[2]))
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64))[None])
    return torch.stack(chosen, 1).numpy()


@pytest.mark.parametrize(
    ("name", "world_size", "rollout"),
    [
        ("vllm", 1, {}),
        ("vllm", 1, {"kv_cache_gib": 7 * 32 * 2 * 2 * 2 * 32 * 4 / (1 << 30)}),  # seven blocks: it preempts
        ("vllm", 2, {"tensor_model_parallel_size": 2}),
        ("hf", 1, {"max_num_seqs": 3}),
        ("megatron", 1, {"max_num_seqs": 3}),
        pytest.param("megatron", 4, {}, marks=pytest.mark.slow),
        ("vllm", 1, {"engine_options": EARLY}),
        ("vllm", 1, {"engine_options": EARLY, "kv_cache_gib": 7 * 32 * 2 * 2 * 2 * 32 * 4 / (1 << 30)}),
    ],
)
def test_routes_are_those_of_transformers(
    path: Path, vllm_imported: None, name: str, world_size: int, rollout: dict[str, Any]
) -> None:
    compare_routes(path, SHAPE, name, world_size, rollout)


@pytest.mark.parametrize(
    ("family", "name", "world_size"),
    [
        ("glm4_moe", "vllm", 1),
        ("deepseek_v3", "vllm", 2),
        ("deepseek_v3", "hf", 1),
        ("gpt_oss", "hf", 1),
        ("glm4_moe", "megatron", 4),  # its first stage has no router
    ],
)
def test_routes_of_biased_routers_behind_a_dense_layer(
    tmp_path: Path, vllm_imported: None, family: str, name: str, world_size: int
) -> None:
    """Experts are chosen with a bias, in groups; routes count the layers that have routers."""
    save_tiny_model(tmp_path, family, **engine_sizes(family), num_hidden_layers=2)
    rollout = {"tensor_model_parallel_size": world_size} if name == "vllm" else {}
    compare_routes(tmp_path, load_model_shape(tmp_path).route_shape, name, world_size, rollout)


def compare_routes(path: Path, shape: RouteShape, name: str, world_size: int, rollout: dict[str, Any]) -> None:
    """Compare the routes of an engine with the experts that transformers chooses for the same tokens."""
    for found in run_ranks(work, world_size, path, name, rollout, timeout=150):
        for prompt, response, routes in found:
            tokens = np.concatenate([prompt, response])
            assert routes.dtype == shape.dtype and routes.shape == (len(tokens), shape.layers, shape.choices)
            assert np.array_equal(routes[-1:], shape.unknown(1)), "the last token is not fed"
            expected = route_with_transformers(path, tokens)[:-1]
            assert np.array_equal(np.sort(routes[:-1], -1), np.sort(expected, -1))


def test_an_engine_must_tell_routes() -> None:
    """Of all tokens, in the right type, of experts that there are."""
    tokens, logprobs = np.array([5, 6], np.int32), np.zeros(2, np.float32)
    good = SHAPE.unknown(5)
    good[:4] = 7

    def check(routes: np.ndarray | None) -> None:
        sampled = Sampled(0, tokens, logprobs, "stop", routes=routes)
        check_sampled(sampled, make_requests()[0], vocab_size=10, source="mine", route_shape=SHAPE)

    check(good)
    wrong = good.copy()
    wrong[0, 0, 0] = 8
    for routes in (None, good[:2], good.astype(np.int64), good[:, :1], wrong):
        with pytest.raises(UserError, match="without the experts"):
            check(routes)
