# SPDX-License-Identifier: Apache-2.0
"""`VllmEngine` with device "cuda" on a model of vLLM's worker: sleeping memory is woken in order, and rewritten.

Real actor, real switch and certificate. Not covered: vLLM itself, its generation, and memory of a GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_worker import KEPT_BYTES, Llm, Unmapped, install
from role_setups import take_step

from actor_runs import ALGORITHM, Case, build_actor, build_batch
from distributed import run_ranks
from megatron_rl.config.schema import ActorConfig, DataConfig, HybridConfig, ModelConfig, RolloutConfig, RunConfig
from megatron_rl.engines.protocol import EngineSpec, register_rollout_engine
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.engines.vllm.vllm_library import keep_memory_pools, prepare_vllm
from megatron_rl.observability.progress import PhaseTimers, RolloutProgress
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.run import building
from megatron_rl.transfer.executor import CertificateError
from megatron_rl.transfer.hybrid_engine import HybridEngine
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import save_tiny_model


def _build(path: Path, shares: bool) -> tuple[Any, HybridEngine, Llm]:
    if not shares:
        building.find_shared = lambda *_: {}
    process, shape = init_distributed(2), load_model_shape(path)
    install(shape)

    @register_rollout_engine("vllm_on_gpu")
    def make_engine(spec: EngineSpec) -> VllmEngine:
        return VllmEngine(replace(spec, process=replace(spec.process, device=torch.device("cuda"))))

    config = RunConfig(
        model=ModelConfig(path=str(path), dtype="float32"),
        data=DataConfig(train_files=[], train_batch_size=8, max_prompt_length=16, max_response_length=8),
        actor=ActorConfig(),
        rollout=RolloutConfig(engine="vllm_on_gpu"),
        hybrid=HybridConfig(verify="full"),
    )
    actor = build_actor(Case(), path)
    hybrid, _ = building.build_rollout(config, actor, process, PhaseTimers(), RolloutProgress())
    return actor, hybrid, Llm.made[-1]


def _train(actor: Any) -> None:
    batch = build_batch(actor.model, Case())
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    take_step(actor, next(iter(batch.minibatches())), ALGORITHM)


def _take_turns(rank: int, world_size: int, path: Path, shares: bool) -> dict[str, Any]:
    """Three rollouts with steps between them."""
    actor, hybrid, llm = _build(path, shares)
    addresses = {name: param.data_ptr() for name, param in hybrid.engine.params.items()}
    awake, asleep, verified = [], [], []
    for _ in range(3):
        with hybrid.rollout_mode():
            llm.llm_engine.step()
            awake.append(llm.held_bytes)
        verified.append(hybrid.verified_tensors)
        asleep.append(llm.held_bytes)
        _train(actor)
    assert {name: param.data_ptr() for name, param in hybrid.engine.params.items()} == addresses
    shared = hybrid.engine.shared_params
    own = sum(x.nbytes for name, x in hybrid.engine.params.items() if name not in shared)
    return dict(calls=llm.calls, awake=awake, asleep=asleep, verified=verified, own=own, shared=len(shared))


def _forget_to_rewrite(rank: int, world_size: int, path: Path) -> str:
    """One parameter is left out of the second switch."""
    actor, hybrid, _ = _build(path, shares=False)
    with hybrid.rollout_mode():
        pass
    resharder, forgotten = hybrid._transfers[0].resharder, hybrid.engine.params["lm_head.weight"].data_ptr()
    copies = zip(resharder._targets, resharder._origins, strict=True)
    kept = [(target, origin) for target, origin in copies if target.data_ptr() != forgotten]
    vars(resharder).update(_targets=[target for target, _ in kept], _origins=[origin for _, origin in kept])
    return _name_failure(hybrid, CertificateError)


def _forget_to_wake(rank: int, world_size: int, path: Path) -> str:
    """The weights are written while they sleep."""
    _, hybrid, _ = _build(path, shares=False)
    with hybrid.rollout_mode():
        pass
    vars(hybrid.engine).update(begin_weight_update=lambda: None)
    return _name_failure(hybrid, Unmapped)


def _close(rank: int, world_size: int, path: Path) -> list[str]:
    """The engine is closed in a rollout, as after an error."""
    _, hybrid, llm = _build(path, shares=True)
    with hybrid.rollout_mode():
        hybrid.engine.close()
    return llm.calls


def _name_failure(hybrid: HybridEngine, kind: type[Exception]) -> str:
    try:
        with hybrid.rollout_mode():
            Llm.made[-1].llm_engine.step()
    except kind as error:
        return str(error)
    return "nothing was seen"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(directory, "qwen3")
    return directory


@pytest.mark.parametrize("shares", [False, True])
def test_engine_on_a_gpu_wakes_is_rewritten_and_sleeps(shares: bool, path: Path) -> None:
    [found] = run_ranks(_take_turns, 1, path, shares)
    first, later = ["reset", "step", "sleep"], ["wake weights", "wake kv_cache", "reset", "step", "sleep"]
    assert found["calls"] == first + 2 * later
    assert set(found["asleep"]) == {KEPT_BYTES}, "all of the pool is given back"
    assert set(found["awake"]) == {KEPT_BYTES + found["own"] + 4 * (1 << 16)}
    assert (found["shared"] > 0) == shares, "what is shared is not lost"
    assert min(found["verified"]) == max(found["verified"]) > 10


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_forget_to_rewrite, "weights differ between training and rollout:\n  lm_head.weight: "),
        (_forget_to_wake, "weights are not mapped"),
    ],
)
def test_planted_fault_is_caught(fault: Callable[..., str], said: str, path: Path) -> None:
    [found] = run_ranks(fault, 1, path)
    assert said in found


def test_engine_gives_memory_back_when_it_closes(path: Path) -> None:
    [calls] = run_ranks(_close, 1, path)
    assert calls == ["reset", "sleep", "keep pools", "shutdown"]


def test_memory_pools_outlive_vllm_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own allocator drops its pools at shutdown; on a GPU, to free what sleeps crashed the finished run."""
    prepare_vllm(torch.device("cpu"))
    cumem = import_module("vllm.device_allocator.cumem")
    pools = [[_Pool(), _Pool()], [_Pool(), _Pool()]]
    alive = [weakref.ref(pool) for pair in pools for pool in pair]
    allocator = cumem.CuMemAllocator()
    allocator.allocator_and_pools = {"weights": [pools.pop()], "kv_cache": [pools.pop()]}
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    keep_memory_pools()
    allocator.release_pools()
    del allocator
    gc.collect()
    assert all(pool() is not None for pool in alive)


class _Pool:
    """A `torch.cuda.MemPool`, whose end would free its memory."""
