# SPDX-License-Identifier: Apache-2.0
"""`GraphStep` on recorded graphs: replays equal eager steps to the last bit, and faults of a capture are named.

Steps of ragged batches, two minibatches each (twenty steps in all buckets in the slow tier), on memory that is filled
with NaN before every replay. Not covered: a GPU (tests/gpu), which has other kernels, streams, and an allocator.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from role_setups import take_step

from distributed import run_ranks
from megatron_rl.parallel.groups import build_groups, list_gather_buffers
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training import fixed_memory, packed_model
from megatron_rl.types import UserError
from step_runs import Setup, build_ragged_batch, build_role, compare_modes, gradients, take_steps
from tiny_models import save_tiny_model
from tools.rehearsal.recorder import CaptureError, RecordedGraph, recorded_graphs

SP, FULL, SHARED = dict(sequence_parallel=True), dict(recompute_granularity="full"), dict(share_prompts=True)
EARLY = dict(overlap_grad_reduce=True)
LITTLE = dict(graph_memory_gib=1e-6)  # shapes that come later run uncaptured
LADDER = dict(bucket_tokens=[32, 48, 64])
OFFLOAD = dict(offload_gradients=True, offload_optimizer=True)
STREAM = dict(offload_gradients=True, offload_optimizer="stream")
SETUPS: dict[int, dict[str, Setup]] = {
    1: {
        "plain": Setup(config=LADDER),
        "full": Setup(config=LADDER | FULL),
        "shared-prompts": Setup(config=LADDER | SHARED),
        "critic": Setup("critic", config=LADDER),
        "offload": Setup(dtype="bfloat16", config=LADDER | OFFLOAD),
        "stream": Setup(config=LADDER | STREAM),
        "stream-bfloat16": Setup(dtype="bfloat16", config=LADDER | STREAM),
        "critic-offload": Setup("critic", config=LADDER | OFFLOAD),
        "critic-full": Setup("critic", config=LADDER | FULL),
    },
    2: {
        "tp2": Setup(sizes=dict(tp_size=2), config=LADDER),
        "tp2-sp-full": Setup(sizes=dict(tp_size=2), config=LADDER | SP | FULL),
        "cp2": Setup(sizes=dict(cp_size=2), config=LADDER),
        "cp2-full": Setup(sizes=dict(cp_size=2), config=LADDER | FULL),
        "dp2": Setup(config=LADDER),
        "dp2-offload": Setup(config=LADDER | OFFLOAD),
        "dp2-stream-bfloat16": Setup(dtype="bfloat16", config=LADDER | STREAM),
        "dp2-muon-offload": Setup(config=LADDER | OFFLOAD | dict(optimizer="muon")),
        "pp2-offload": Setup(sizes=dict(pp_size=2), dtype="bfloat16", config=LADDER | OFFLOAD),
        "pp2": Setup(sizes=dict(pp_size=2), config=LADDER),
        "pp2-full-shared-prompts": Setup(sizes=dict(pp_size=2), config=LADDER | FULL | SHARED),
        "dp2-replicated": Setup(config=LADDER | dict(zero_stage=0)),
        "dp2-overlap": Setup(config=LADDER | EARLY),
        "dp2-overlap-replicated-full": Setup(config=LADDER | EARLY | FULL | dict(zero_stage=0)),
        "critic-tp2": Setup("critic", sizes=dict(tp_size=2), config=LADDER),
        "critic-tp2-sp-full": Setup("critic", sizes=dict(tp_size=2), config=LADDER | SP | FULL),
        "critic-cp2": Setup("critic", sizes=dict(cp_size=2), config=LADDER),
        "critic-cp2-full": Setup("critic", sizes=dict(cp_size=2), config=LADDER | FULL),
        "critic-dp2": Setup("critic", config=LADDER),
        "critic-pp2": Setup("critic", sizes=dict(pp_size=2), config=LADDER),
        "critic-pp2-full": Setup("critic", sizes=dict(pp_size=2), config=LADDER | FULL),
        "critic-cp2-overlap": Setup("critic", sizes=dict(cp_size=2), config=LADDER | EARLY),
        "dp2-overlap-little-memory": Setup(config=LADDER | EARLY | LITTLE),
        "pp2-little-memory": Setup(sizes=dict(pp_size=2), config=LADDER | LITTLE),
    },
}
# Left to the longer tests.
LONG = {
    *("plain", "critic-full", "tp2", "cp2", "dp2", "pp2", "cp2-full", "dp2-replicated", "dp2-overlap-replicated-full"),
    *("critic-tp2", "critic-tp2-sp-full", "critic-cp2", "critic-cp2-full", "critic-dp2", "critic-pp2"),
    *("critic-pp2-full", "critic-cp2-overlap", "dp2-overlap-little-memory", "pp2-little-memory"),
    *("stream", "critic-offload"),
}


_IN_PARTS = partial(packed_model.DistributedDataParallelConfig, bucket_size=2000)  # an early reduction sends several


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen2")
    save_tiny_model(directory, "qwen2")
    return directory


def _compare_on_rank(rank: int, world_size: int, setups: dict[str, Setup], path: Path, num_steps: int) -> Any:
    with recorded_graphs(), patch.object(packed_model, "DistributedDataParallelConfig", _IN_PARTS):
        return {name: compare_modes(setup, path, world_size, num_steps, "graph") for name, setup in setups.items()}


def assert_replay_equals_eager(world_size: int, setups: dict[str, Setup], path: Path, num_steps: int) -> None:
    """Gradients, weights, Adam's states, metrics, scores; on every rank, in every step, in every bucket."""
    for rank, found in enumerate(run_ranks(_compare_on_rank, world_size, setups, path, num_steps, timeout=1500)):
        for name, result in found.items():
            assert not result["differences"], f"rank {rank}, {name}: {result['differences']}"
            assert num_steps < 20 or result["shapes"] >= result["sizes"], f"{name}: a bucket was never used"


def test_replay_equals_eager_on_one_rank(path: Path) -> None:
    """More ranks are in the slow tier, below."""
    assert_replay_equals_eager(1, {name: setup for name, setup in SETUPS[1].items() if name not in LONG}, path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", SETUPS)
def test_replay_equals_eager_for_twenty_steps_in_every_layout(world_size: int, path: Path) -> None:
    assert_replay_equals_eager(world_size, SETUPS[world_size], path, 20)


def _visit_rollouts(rank: int, world_size: int, path: Path) -> tuple[bool, list[int], list[str]]:
    """Return whether addresses stay, released values that are not 0, and the differences if states move instead."""
    groups = build_groups(ParallelLayout(world_size))
    with recorded_graphs():
        actor = build_role(Setup(config=LADDER | OFFLOAD), path, groups, "graph")
        seen, left = [], []
        for step in range(3):
            actor.optimizer.release()
            left += [int(gradient.count_nonzero()) for gradient in gradients(actor.model)]
            batch = build_ragged_batch(actor.model, actor.model.buckets, step, shares_prompts=False)
            take_steps(actor, batch, step)
            states = [x for adam in actor.optimizer.adams for s in adam.state.values() for x in s.values()]
            seen.append([x.data_ptr() for x in (*gradients(actor.model), *states)])
        with patch.object(fixed_memory, "FixedStates", packed_model.HostMemory):
            moved = compare_modes(Setup(config=LADDER | OFFLOAD), path, world_size, 3, "graph")
    return seen[0] == seen[1] == seen[2], left, sum(moved["differences"].values(), [])


def test_offloaded_memory_returns_to_the_captured_addresses(path: Path) -> None:
    [(stays, left, differences)] = run_ranks(_visit_rollouts, 1, path)
    assert stays and left and not any(left) and "states" in differences


def _free_what_is_gathered_into(rank: int, world_size: int, path: Path) -> list[bool]:
    setup = Setup(sizes=dict(tp_size=2), config=LADDER | SP)
    with recorded_graphs():
        actor = build_role(setup, path, build_groups(ParallelLayout(world_size, tp_size=2)), "graph")
        batch = build_ragged_batch(actor.model, actor.model.buckets, 0, shares_prompts=False)
        take_step(actor, next(batch.minibatches()), _count_all)
        buffers = [weakref.ref(buffer) for buffer in list_gather_buffers()]
        actor.optimizer.release()
        gc.collect()
        kept = [buffer() is not None for buffer in buffers]
        del actor
        gc.collect()
        return [*kept, not list_gather_buffers(), *(buffer() is None for buffer in buffers)]


def test_graph_keeps_what_it_gathers_into(path: Path) -> None:
    """A release frees megatron-core's buffer, and a larger one takes its place; graphs write into the old one."""
    assert run_ranks(_free_what_is_gathered_into, 2, path) == [[True] * 3] * 2


Loss = Callable[[TrainBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]
_LEFT_BEHIND: list[torch.Tensor] = []


def _count(microbatch: TrainBatch, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs * microbatch.loss_weights).sum(), {}


def _count_all(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
    return _count(microbatch, logprobs)


def item(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
    assert logprobs.sum().item() < 0
    return _count(microbatch, logprobs)


def tolist(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
    assert len(microbatch.slices[0].cu_seqlens.tolist()) > 1
    return _count(microbatch, logprobs)


def nonzero(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
    return _count(microbatch, logprobs + 0 * len(microbatch.loss_mask.nonzero()))


def boolean_index(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
    return _count(microbatch, logprobs + 0 * logprobs[microbatch.loss_mask].sum())


def random_numbers(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
    return _count(microbatch, logprobs + torch.rand_like(logprobs))


def forgotten_device(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
    return _count(microbatch, logprobs + torch.zeros(len(logprobs)))


def copy_from_host(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
    return _count(microbatch, logprobs + torch.tensor([1.0] * len(logprobs), device=logprobs.device))


def left_behind(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
    before = sum(kept.sum() for kept in _LEFT_BEHIND[3:4])  # of the first capture, which comes after three warm-ups
    _LEFT_BEHIND.append(logprobs.detach() + 1)
    return _count(microbatch, logprobs + before)


FAULTS: dict[Loss, tuple[str, str]] = {
    item: ("aten._local_scalar_dense.default", "the host reads values"),
    tolist: ("Tensor.tolist", "the host reads values"),
    nonzero: ("aten.nonzero.default", "a shape from values"),
    boolean_index: ("aten.index.Tensor", "a shape from values"),
    random_numbers: ("aten.rand_like.default", "random numbers"),
    forgotten_device: ("aten.add.Tensor", "a tensor of the host among others"),
    copy_from_host: ("torch.tensor", "values come from the host"),
    left_behind: ("aten.sum.default", "memory of another capture"),
}


def _plant(rank: int, world_size: int, path: Path) -> dict[str, tuple[str, str | None]]:
    """Return each fault's error and the place it points to."""
    found = {}
    with recorded_graphs():
        actor = build_role(Setup(config=LADDER), path, build_groups(ParallelLayout(world_size)), "graph")
        batch = build_ragged_batch(actor.model, actor.model.buckets, 0, shares_prompts=False)
        for loss in FAULTS:
            _LEFT_BEHIND.clear()
            with pytest.raises(UserError) as caught:
                for _ in range(2):
                    for minibatch in batch.minibatches():
                        take_step(actor, minibatch, loss)
            found[loss.__name__] = str(caught.value), caught.value.source
            actor.update.passes = []
    return found


@pytest.fixture(scope="module")
def planted(path: Path) -> dict[str, tuple[str, str | None]]:
    return run_ranks(_plant, 1, path)[0]


@pytest.mark.parametrize("loss", FAULTS)
def test_fault_is_refused_with_its_line(loss: Loss, planted: dict[str, tuple[str, str | None]]) -> None:
    operation, why = FAULTS[loss]
    message, source = planted[loss.__name__]
    assert operation in message and why in message and "tokens in up to 64 sequences" in message
    lines, first = inspect.getsourcelines(loss)
    path, number, *_ = str(source).split(":")
    assert Path(path) == Path(__file__) and first < int(number.split()[0]) < first + len(lines), source


def _record_two() -> tuple[list[float], list[float]]:
    with recorded_graphs():
        pool, inputs = torch.cuda.graph_pool_handle(), torch.ones(3)
        graphs, results = [RecordedGraph(), RecordedGraph()], []
        for factor, graph in enumerate(graphs, start=1):
            with torch.cuda.graph(graph, pool=pool):
                results.append(inputs * factor)
        inputs.fill_(5.0)
        graphs[0].replay()
        first = results[0].tolist()
        graphs[1].replay()
        (segment,) = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == pool]
        assert segment["total_size"] == 12 and graphs[0].num_operations == 1
    return first, results[0].tolist()


def test_replay_reads_its_inputs_and_spoils_what_others_have_made() -> None:
    first, later = _record_two()
    assert first == [5.0, 5.0, 5.0] and all(value != value for value in later)


def test_backward_is_replayed_directly_after_its_forward() -> None:
    """It reads the forward's buffers; a replay of another graph in between would have overwritten them."""
    inputs, weight, out = torch.ones(3), torch.full((3,), 2.0, requires_grad=True), torch.zeros(3)
    with recorded_graphs():
        pool = torch.cuda.graph_pool_handle()
        forward, backward, other = (torch.cuda.CUDAGraph() for _ in range(3))
        with torch.cuda.graph(other, pool=pool):
            unused = inputs * 3
        with torch.cuda.graph(forward, pool=pool):
            loss = ((inputs * weight).square() * weight).sum()
        with torch.cuda.graph(backward, pool=pool):
            torch.autograd.backward(loss, torch.ones((), device="cpu"))
            out.copy_(weight.grad)  # type: ignore[arg-type]
        assert out.tolist() == [12.0] * 3 and len(unused) == 3
        inputs.fill_(2.0)
        for graph in (other, forward, backward):
            graph.replay()
        assert out.tolist() == [48.0] * 3
        other.replay()
        with pytest.raises(CaptureError, match="directly after the forward"):
            backward.replay()


def _reduce(rank: int, world_size: int) -> float:
    with recorded_graphs():
        graph, value = torch.cuda.CUDAGraph(), torch.ones(2)
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
            total = value * (rank + 1)
            dist.all_reduce(total)
            total += 1
        value.fill_(10.0)
        graph.replay()
    return float(total[0])


def test_collectives_are_replayed() -> None:
    assert run_ranks(_reduce, 2) == [31.0, 31.0]


def test_nothing_is_patched_afterwards() -> None:
    before = torch.cuda.CUDAGraph
    with recorded_graphs(), pytest.raises(CaptureError):
        assert torch.cuda.CUDAGraph is RecordedGraph
        raise CaptureError
    assert torch.cuda.CUDAGraph is before
