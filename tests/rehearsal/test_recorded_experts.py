# SPDX-License-Identifier: Apache-2.0
"""Steps of mixtures of experts in fixed shapes: static and replayed ones equal eager ones, to the last bit.

Compared after every optimizer step: gradients, weights (router biases among them), Adam's states, scores, and all
metrics, including router metrics; on ragged batches (in all buckets in the slow tier), on memory that is filled with
NaN before every replay. Not covered: a GPU, whose kernels are others; the dispatcher by itself
(tests/models/test_dispatcher.py).
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from role_setups import take_step

from distributed import run_ranks
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.experts import GroupedExperts
from megatron_rl.models.routing import LocalDispatcher
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError
from step_runs import Setup, build_ragged_batch, build_role, compare_modes, measure_padding, replay_any
from tiny_models import save_tiny_model
from tools.rehearsal.recorder import recorded_graphs

SP, FULL, LADDER = dict(sequence_parallel=True), dict(recompute_granularity="full"), dict(bucket_tokens=[32, 48, 64])
EARLY = dict(overlap_grad_reduce=True)
BIASED = dict(router_bias_rate=0.01)  # of the family whose routers have biases
ADAPTERS = LoraConfig(rank=4, target_modules=["q_proj", "gate_proj", "down_proj"])
ETP1 = dict(tp_size=2, etp_size=1)
SETUPS: dict[int, dict[str, Setup]] = {
    1: {
        "plain": Setup(config=LADDER),
        "full-replay": Setup(config=LADDER | FULL, replays=True),
        "biased-replay": Setup(config=LADDER | BIASED, replays=True),
        "biased-full": Setup(config=LADDER | BIASED | FULL),
        "shared-prompts": Setup(config=LADDER | dict(share_prompts=True)),
        "bfloat16": Setup(config=LADDER, dtype="bfloat16"),
        "critic": Setup("critic", config=LADDER),
        "lora": Setup(config=LADDER | dict(lora=ADAPTERS)),
    },
    2: {
        "tp2-replay": Setup(sizes=dict(tp_size=2), config=LADDER | SP, replays=True),
        "tp2-full": Setup(sizes=dict(tp_size=2), config=LADDER | SP | FULL),
        "tp2-etp1-full": Setup(sizes=ETP1, config=LADDER | SP | FULL | dict(expert_tensor_parallel_size=1)),
        "pp2-full-replay": Setup(sizes=dict(pp_size=2), config=LADDER | FULL, replays=True),
        "cp2-replay": Setup(sizes=dict(cp_size=2), config=LADDER, replays=True),
        "dp2-biased": Setup(config=LADDER | BIASED),
        "pp2-biased-little-memory": Setup(sizes=dict(pp_size=2), config=LADDER | BIASED | dict(graph_memory_gib=1e-6)),
        "dp2-overlap-replay": Setup(config=LADDER | EARLY, replays=True),
    },
}
LONG = {"shared-prompts", "bfloat16", "critic", "lora", "biased-full", "cp2-replay", "pp2-biased-little-memory"}
# Covered by `tp2-etp1-full`, `pp2-full-replay` and `biased-replay`; left to the longer test.
COVERED = {"tp2-replay", "tp2-full", "dp2-biased", "plain"}
EXCHANGED = {  # with static; graph refuses them
    "replay": Setup(sizes=dict(ep_size=2), config=LADDER, replays=True),
    "biased-overlap": Setup(sizes=dict(ep_size=2), config=LADDER | BIASED | EARLY),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of each kind of router."""
    directory = tmp_path_factory.mktemp("mixtures")
    for family in ("qwen3_moe", "glm4_moe"):
        save_tiny_model(directory / family, family)
    return directory


def find_model(path: Path, name: str) -> Path:
    return path / ("glm4_moe" if "biased" in name else "qwen3_moe")


def compare(rank: int, world_size: int, setups: dict[str, Setup], path: Path, num_steps: int, mode: str) -> Any:
    with recorded_graphs():
        return {
            name: compare_modes(setup, find_model(path, name), world_size, num_steps, mode)
            for name, setup in setups.items()
        }


def assert_equals_eager(world_size: int, names: set[str], path: Path, num_steps: int, mode: str = "graph") -> None:
    setups = {name: setup for name, setup in SETUPS[world_size].items() if name in names}
    assert len(setups) == len(names)
    for rank, found in enumerate(run_ranks(compare, world_size, setups, path, num_steps, mode, timeout=1500)):
        for name, result in found.items():
            assert not result["differences"], f"rank {rank}, {name}: {result['differences']}"
            assert num_steps < 20 or result["shapes"] >= result["sizes"], f"{name}: a bucket was never used"
            assert name == "critic" or result["metrics"]["moe/max_load"] > 1


def test_replay_equals_eager_on_one_rank(path: Path) -> None:
    """More ranks are in the slow tier, below."""
    assert_equals_eager(1, {*SETUPS[1]} - LONG - COVERED, path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", SETUPS)
def test_replay_equals_eager_for_twenty_steps_in_every_layout(world_size: int, path: Path) -> None:
    assert_equals_eager(world_size, {*SETUPS[world_size]}, path, 20)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_static_equals_eager(world_size: int, path: Path) -> None:
    assert_equals_eager(world_size, {*SETUPS[world_size]} - LONG, path, 3, "static")


def exchange(rank: int, world_size: int, path: Path) -> Any:
    found = {name: compare_modes(setup, find_model(path, name), world_size, 3) for name, setup in EXCHANGED.items()}
    return [result["differences"] for result in found.values()], found["biased-overlap"]["metrics"]["moe/bias_norm"]


@pytest.mark.slow
def test_static_equals_eager_where_experts_are_dealt_to_ranks(path: Path) -> None:
    for differences, bias_norm in run_ranks(exchange, 2, path):
        assert differences == [{}, {}] and bias_norm > 0


def pad(rank: int, world_size: int, path: Path) -> dict[str, dict[str, float]]:
    return {
        name: measure_padding(SETUPS[1][name], find_model(path, name), world_size) for name in ("plain", "biased-full")
    }


def test_padding_is_not_counted(path: Path) -> None:
    """Loads, dead experts and biases equal an unpadded run exactly; everything else up to rounding."""
    (found,) = run_ranks(pad, 1, path)
    for name, gaps in found.items():
        assert all(gaps[f"moe/{metric}"] == 0 for metric in ("max_load", "mean_load", "dead_experts")), (name, gaps)
        assert max(gaps.values()) < 1e-6, (name, gaps)
    assert found["biased-full"]["moe/bias_norm"] == 0


def item(dispatcher: Any, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
    assert routing_map.sum().item() > 0
    return SORT(dispatcher, hidden_states, routing_map, probs)


def tolist(experts: Any, x: torch.Tensor, tokens_per_expert: torch.Tensor, shares: torch.Tensor) -> Any:
    assert len(tokens_per_expert.tolist()) > 1
    return MULTIPLY(experts, x, tokens_per_expert, shares)


SORT, MULTIPLY = LocalDispatcher.dispatch_preprocess, GroupedExperts.forward
FAULTS: list[tuple[type, str, Any, str]] = [
    (LocalDispatcher, "dispatch_preprocess", item, "aten._local_scalar_dense.default"),
    (GroupedExperts, "forward", tolist, "Tensor.tolist"),
]


def plant(rank: int, world_size: int, path: Path) -> list[tuple[str, str | None]]:
    """Return each fault's error and the place it points to."""
    found = []
    with recorded_graphs():
        for owner, name, fault, _ in FAULTS:
            actor = build_role(SETUPS[1]["plain"], path / "qwen3_moe", build_groups(ParallelLayout(1)), "graph")
            batch = build_ragged_batch(actor.model, actor.model.buckets, 0, shares_prompts=False)
            batch = replay_any(batch, actor.model, 0)
            with patch.object(owner, name, fault), pytest.raises(UserError) as caught:
                take_step(actor, next(batch.minibatches()), AlgorithmConfig())
            found.append((str(caught.value), caught.value.source))
    return found


def test_fault_is_refused_with_its_line(path: Path) -> None:
    (found,) = run_ranks(plant, 1, path)
    for (message, source), (_, _, fault, operation) in zip(found, FAULTS, strict=True):
        assert operation in message and "the host reads values" in message
        lines, first = inspect.getsourcelines(fault)
        file, number, *_ = str(source).split(":")
        assert Path(file) == Path(__file__) and first < int(number.split()[0]) < first + len(lines), source
