# SPDX-License-Identifier: Apache-2.0
"""Steps replayed from CUDA graphs equal eager ones, for every bucket and across updates of the weights.

One process, one GPU: `bash tests/run.sh -m gpu tests/gpu`. float32 goes through the memory-efficient
attention kernel, bfloat16 through flash attention. Deterministic algorithms are on: otherwise the order of additions in
some backward kernels is free, and runs of one mode differ as well. Not covered: several GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from role_setups import take_step

from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.training.cuda_graph import GraphStep, find_shape
from megatron_rl.types import UserError
from step_runs import Setup, build_ragged_batch, build_role, compare_modes, find_differences, take_steps
from tiny_models import save_tiny_model

FULL, SHARED = dict(recompute_granularity="full"), dict(share_prompts=True)
OFFLOAD = dict(offload_gradients=True, offload_optimizer=True)
SETUPS = {
    "float32": Setup(),
    "bfloat16": Setup(dtype="bfloat16"),
    "full": Setup(dtype="bfloat16", config=FULL),
    "shared-prompts": Setup(dtype="bfloat16", config=SHARED),
    "critic": Setup("critic", dtype="bfloat16"),
    "float32-shared-prompts": Setup(config=SHARED),
    "offload": Setup(dtype="bfloat16", config=OFFLOAD),
    "stream": Setup(dtype="bfloat16", config=OFFLOAD | dict(offload_optimizer="stream")),
}


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    """A job of one rank, with reproducible kernels."""
    init_distributed(timeout_minutes=5)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen2")
    save_tiny_model(directory, "qwen2")
    return directory


@pytest.mark.parametrize("mode", ["static", "graph"])
@pytest.mark.parametrize("name", SETUPS)
def test_twenty_steps_equal_eager(name: str, mode: str, path: Path) -> None:
    """Gradients, weights, Adam's states and metrics, bit by bit; the KL coefficient and the learning rate move."""
    result = compare_modes(SETUPS[name], path, 1, 20, mode)
    assert not result["differences"], result["differences"]
    assert 1 < result["shapes"] <= result["sizes"]


def test_every_bucket_is_captured_once_and_replayed(path: Path) -> None:
    groups = build_groups(ParallelLayout(1))
    eager, graph = (build_role(SETUPS["bfloat16"], path, groups, mode) for mode in ("eager", "graph"))
    assert isinstance(graph.step, GraphStep)
    shapes, counts = set(), []
    for step in range(12):
        batches = [build_ragged_batch(eager.model, graph.model.buckets, step, shares_prompts=False) for _ in range(2)]
        shapes |= {find_shape(m) for m in batches[1].microbatches()}
        for actor, batch in zip((eager, graph), batches, strict=True):
            take_steps(actor, batch, step)
        counts.append((len(graph.step._graphs), graph.step.memory_bytes))
    assert not find_differences(eager, graph)
    assert counts[-1][0] <= len(shapes) and counts[-1][1] > 0
    largest = max(memory for _, memory in counts)
    assert largest <= 3 * counts[0][1] + (64 << 20), f"graphs share one pool: {counts}"


def test_a_full_budget_runs_uncaptured_and_equal(path: Path) -> None:
    setup = replace(SETUPS["bfloat16"], config=dict(graph_memory_gib=1e-6))
    assert not compare_modes(setup, path, 1, 4, "graph")["differences"]
    actor = build_role(setup, path, build_groups(ParallelLayout(1)), "graph")
    for step in range(4):
        take_steps(actor, build_ragged_batch(actor.model, actor.model.buckets, step, shares_prompts=False), step)
    assert len(actor.step._graphs) == 1


def test_an_unsound_step_changes_nothing(path: Path) -> None:
    actor = build_role(SETUPS["bfloat16"], path, build_groups(ParallelLayout(1)), "graph")
    batch = build_ragged_batch(actor.model, actor.model.buckets, 0, shares_prompts=False)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    minibatch = next(batch.minibatches())
    take_step(actor, minibatch, AlgorithmConfig())
    weights = [x.clone() for x in actor.model.params.values()]
    minibatch.advantages[minibatch.loss_mask] = float("nan")
    with pytest.raises(UserError, match="the loss of optimizer step 2"):
        take_step(actor, minibatch, AlgorithmConfig())
    assert all(torch.equal(a, b) for a, b in zip(weights, actor.model.params.values(), strict=True))


def test_failed_capture_names_operation_and_bucket(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that looks at a value on the host cannot be captured."""
    actor = build_role(SETUPS["bfloat16"], path, build_groups(ParallelLayout(1)), "graph")
    batch = build_ragged_batch(actor.model, actor.model.buckets, 0, shares_prompts=False)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    inner = actor._policy_loss._function

    def nosy(settings: AlgorithmConfig, microbatch: Any, *found: torch.Tensor) -> Any:
        found[0].sum().item()
        return inner(settings, microbatch, *found)

    monkeypatch.setattr(actor._policy_loss, "_function", nosy)
    with pytest.raises(UserError, match=r"(?s)microbatch of \d+ tokens.*_local_scalar_dense"):
        take_step(actor, next(batch.minibatches()), AlgorithmConfig())


def test_twenty_step_run_on_one_gpu(tmp_path: Path) -> None:
    """The whole program with engine hf: a run in step_mode graph ends in the metrics of one in step_mode static."""
    from rl_runs import make_task, overrides_for, read_records, train

    make_task(tmp_path)
    records = {}
    for mode in ("static", "graph"):
        overrides = overrides_for(
            tmp_path,
            tmp_path / mode,
            "rollout.engine=hf",
            "trainer.total_steps=20",
            f"actor.step_mode={mode}",
            "model.dtype=bfloat16",
            "actor.share_prompts=false",
            "trainer.save_freq=null",
        )
        assert train(0, 1, overrides) is None
        records[mode] = read_records(tmp_path / mode)
    assert len(records["graph"]) == 21
    last = {
        mode: json.dumps({k: v for k, v in found[-1].items() if k.startswith(("policy/", "reward/mean"))})
        for mode, found in records.items()
    }
    assert last["graph"] == last["static"]
