# SPDX-License-Identifier: Apache-2.0
"""Static steps equal eager ones to the last bit on the same padded microbatches, and padding changes nothing.

Compared after every optimizer step: gradient buffers (reduced and clipped), weights, states of Adam, all metrics, and
the log-probs or values before it. The batches are ragged and new in every step. Not covered: CUDA (tests/gpu).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from role_setups import take_step

import megatron_rl.training.optimizer as step_module
from distributed import run_ranks
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.training.cuda_graph import StaticInputs, check_step_mode, describe_shape, find_shape
from megatron_rl.training.optimizer import StepLoss
from megatron_rl.types import UserError
from shards import make_shape
from step_runs import Setup, build_ragged_batch, build_role, compare_modes, measure_padding
from tiny_models import save_tiny_model

SP, FULL, SHARED = dict(sequence_parallel=True), dict(recompute_granularity="full"), dict(share_prompts=True)
EARLY = dict(overlap_grad_reduce=True)
SETUPS: dict[int, dict[str, Setup]] = {
    1: {
        "plain": Setup(),
        "full": Setup(config=FULL),
        "selective": Setup(config=dict(recompute_granularity="selective")),
        "shared-prompts": Setup(config=SHARED),
        "own-ladder": Setup(config=dict(bucket_tokens=[40, 64])),
        "bfloat16": Setup(dtype="bfloat16"),
    },
    2: {
        "tp2": Setup(sizes=dict(tp_size=2)),
        "tp2-sp-full": Setup(sizes=dict(tp_size=2), config=SP | FULL),
        "pp2": Setup(sizes=dict(pp_size=2)),
        "pp2-vpp2-full": Setup(sizes=dict(pp_size=2, vpp_size=2), config=FULL),
        "pp2-shared-prompts": Setup(sizes=dict(pp_size=2), config=SHARED),
        "cp2": Setup(sizes=dict(cp_size=2)),
        "cp2-full": Setup(sizes=dict(cp_size=2), config=FULL),
        "dp2": Setup(),
        "dp2-replicated": Setup(config=dict(zero_stage=0)),
        "dp2-overlap": Setup(config=EARLY),
    },
    4: {
        "tp2-pp2-sp": Setup(sizes=dict(tp_size=2, pp_size=2), config=SP),
        "cp2-tp2-sp-full": Setup(sizes=dict(cp_size=2, tp_size=2), config=SP | FULL),
        "cp2-pp2": Setup(sizes=dict(cp_size=2, pp_size=2)),
        "tp2-dp2": Setup(sizes=dict(tp_size=2)),
        "pp2-dp2-overlap": Setup(sizes=dict(pp_size=2), config=EARLY),
    },
}
ROLES = ("actor", "critic")
PLAIN = ("tp2", "pp2", "cp2", "dp2")
PADDING_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen2")
    save_tiny_model(directory, "qwen2")
    return directory


def _compare_on_rank(rank: int, world_size: int, setups: dict[str, Setup], path: Path, num_steps: int) -> Any:
    return {name: compare_modes(setup, path, world_size, num_steps) for name, setup in setups.items()}


def assert_equal_to_eager(world_size: int, setups: dict[str, Setup], path: Path, num_steps: int) -> None:
    """Assert bitwise equality on every rank in every step, and at most one shape per bucket."""
    for rank, found in enumerate(run_ranks(_compare_on_rank, world_size, setups, path, num_steps, timeout=1500)):
        for name, result in found.items():
            assert not result["differences"], f"rank {rank}, {name}: {result['differences']}"
            assert 1 < result["shapes"] <= result["sizes"], (name, result["shapes"], result["sizes"])


@pytest.mark.parametrize("role", ROLES)
def test_static_equals_eager_for_eight_steps(role: str, path: Path) -> None:
    assert_equal_to_eager(1, {"plain": Setup(role)}, path, 8)


def _is_in_turn(role: str, name: str) -> bool:
    return name not in PLAIN if role == "actor" else name in ("shared-prompts", *PLAIN)


def test_static_equals_eager_on_one_rank(path: Path) -> None:
    """The critic has the plain setups, the actor those with more to them; more ranks are in the slow tier, below."""
    setups = {
        f"{role}-{name}": replace(setup, role=role)
        for name, setup in SETUPS[1].items()
        for role in ROLES
        if _is_in_turn(role, name)
    }
    assert_equal_to_eager(1, setups, path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("world_size", SETUPS)
def test_static_equals_eager_for_twenty_steps_in_every_layout(world_size: int, role: str, path: Path) -> None:
    assert_equal_to_eager(
        world_size, {name: replace(setup, role=role) for name, setup in SETUPS[world_size].items()}, path, 20
    )


def _measure_on_rank(rank: int, world_size: int, setups: dict[str, Setup], path: Path) -> Any:
    return {name: measure_padding(setup, path, world_size) for name, setup in setups.items()}


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_padding_changes_nothing(world_size: int, path: Path) -> None:
    """Scores, metrics and gradients of a step in which all rollouts are padded to buckets, against none padded."""
    setups = {
        f"{role}-{name}": replace(setup, role=role)
        for name, setup in SETUPS[world_size].items()
        for role in ROLES
        if setup.dtype == "float32" and (world_size != 2 or _is_in_turn(role, name))
    }
    for found in run_ranks(_measure_on_rank, world_size, setups, path, timeout=300):
        gaps = {(name, what): gap for name, all_gaps in found.items() for what, gap in all_gaps.items()}
        assert max(gaps.values()) <= PADDING_TOLERANCE, {k: v for k, v in gaps.items() if v > PADDING_TOLERANCE}


def _load_on_rank(rank: int, world_size: int, path: Path) -> None:
    groups = build_groups(ParallelLayout(world_size))
    model = build_role(Setup(config=SHARED), path, groups, "static").model
    batch = build_ragged_batch(model, model.buckets, 0, shares_prompts=True)
    microbatches, inputs = batch.microbatches(), StaticInputs()
    by_shape: dict[Any, list[Any]] = {}
    for microbatch in [*microbatches, *build_ragged_batch(model, model.buckets, 1, shares_prompts=True).microbatches()]:
        by_shape.setdefault(find_shape(microbatch), []).append(microbatch)
        static = inputs.load(microbatch)
        assert static.slices[0].cu_seqlens.tolist() == microbatch.slices[0].cu_seqlens.tolist()
        for name in ("tokens", "loss_mask", "loss_weights", "advantages", "position_ids"):
            assert torch.equal(getattr(static, name), getattr(microbatch, name)), name
        if microbatch.slices[0].keys is not None:
            assert torch.equal(static.slices[0].keys.index, microbatch.slices[0].keys.index)
    shape, same = next((shape, found) for shape, found in by_shape.items() if len(found) > 1)
    first, second = (inputs.load(microbatch) for microbatch in same[:2])
    assert first is second and first.tokens.data_ptr() != same[0].tokens.data_ptr()
    assert inputs.load(same[0], slot=1) is not first and len({shape for shape, _ in inputs._buffers}) == len(by_shape)
    assert "tokens in up to 64 sequences" in describe_shape(same[0]) and shape[0] == same[0].tokens.shape


def test_static_inputs_stay_where_they_are(path: Path) -> None:
    run_ranks(_load_on_rank, 1, path, timeout=60)


def _raise_on_rank(rank: int, world_size: int, path: Path, bad: float) -> Any:
    actor = build_role(Setup(sizes={}), path, build_groups(ParallelLayout(world_size)), "static")
    batch = build_ragged_batch(actor.model, actor.model.buckets, 0, shares_prompts=False)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    first, second = batch.minibatches()
    take_step(actor, first, AlgorithmConfig())
    weights = [x.clone() for x in actor.model.params.values()]
    states = [x.clone() for adam in actor.optimizer.adams for s in adam.state.values() for x in s.values()]
    second.advantages[second.sequence_ids == 9] = bad
    try:
        take_step(actor, second, AlgorithmConfig())
    except UserError as error:
        kept = [x for adam in actor.optimizer.adams for s in adam.state.values() for x in s.values()]
        same = all(torch.equal(a, b) for a, b in zip(weights, actor.model.params.values(), strict=True))
        return str(error), same, all(torch.equal(a, b) for a, b in zip(states, kept, strict=True))
    return None


@pytest.mark.parametrize(
    ("bad", "message"),
    [(float("nan"), "the loss of optimizer step 2 is nan"), (-1e38, "the gradient norm of optimizer step 2 is inf")],
)
def test_an_unsound_step_changes_neither_weights_nor_states(bad: float, message: str, path: Path) -> None:
    """The decision is made on the device, after which Adam leaves everything as it was."""
    for found in run_ranks(_raise_on_rank, 2, path, bad, timeout=60):
        assert found is not None and found[0].startswith(message) and found[1:] == (True, True)


def _check() -> None:
    """Check that this machine captures graphs; tests/rehearsal/test_gpu_paths.py covers GPUs with experts."""
    config = ActorConfig(step_mode="graph")
    spec = RoleSpec(name="actor", path="-", section="actor", settings=config, head="logprob", trainable=True)
    check_step_mode(spec, make_shape("qwen2"), "bfloat16")


def test_graph_without_cuda_says_to_use_static() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UserError, match="step_mode=static") as caught:
        _check()
    assert caught.value.source == "actor.step_mode"


def _name_metrics(rank: int, world_size: int) -> tuple[list[tuple[str, ...]], int]:
    """Return a rank's metrics after each of three steps, the third with other settings, and its messages."""
    messages, share_object = [], step_module.share_object
    step_module.share_object = lambda *arguments: messages.append(1) or share_object(*arguments)
    loss = StepLoss("any", lambda name, microbatch: (torch.ones(()), {name: torch.ones(())}), torch.device("cpu"))
    known = []
    for name in ("loss", "loss", "max/loss"):
        loss.set_settings(name)
        if rank == 1:  # the last stage
            loss(None)
        loss.share_names(dist.group.WORLD, 1)
        known.append((*loss.metric_names, loss.num_sums))
    return known, len(messages)


def test_stages_hear_of_names_once() -> None:
    assert run_ranks(_name_metrics, 2) == [([("loss", 1), ("loss", 1), ("max/loss", 0)], 2)] * 2
