# SPDX-License-Identifier: Apache-2.0
"""Optimizer step on reused input buffers, one set per microbatch shape, and the same replayed from CUDA graphs.

There is one graph per microbatch shape, and one for the end of the step. Captured functions access only memory that is
never reallocated: static inputs, weights, gradient buffers, Adam's states (offloaded ones return to the same addresses:
`fixed_memory.py`) and a few persistent tensors (KL coefficient, learning rates, `is_sound`). Graphs thus stay valid
across updates, and a rollout engine that shares the weights sees them.

New shapes are captured largest first: a smaller graph reuses the memory of a larger one. DDP must be built on the
capture stream (`PackedModel.stream`), because gradients accumulate there.

Each stage of a pipeline has separate graphs for forward and backward, with messages in between. Under 1F1B a stage has
at most as many microbatches in flight as there are stages from it on, and they return in order: each of these slots has
its own buffers, graphs and memory pool.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from itertools import cycle, takewhile
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.random import get_all_rng_states, model_parallel_cuda_manual_seed
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.parallel.groups import list_gather_buffers
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.optimizer import EagerStep, Optimizer, StepLoss
from megatron_rl.training.packed_model import EarlyReduction, Head, PackedModel
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape

Shape = tuple[Any, ...]
_WARM_UPS = 3
_OF_MODES = ("__torch_dispatch__", "__torch_function__")  # frames of dispatch modes, which are not callers
_GIB = 1 << 30
_GROUPED_KERNELS = (9, 10)  # major compute capabilities on which torch's `grouped_mm` needs no host sync
Key = tuple[str, Shape, int]  # loss name, shape, and is_last or the pipeline slot
log = logging.getLogger(__name__)


class StaticStep(EagerStep):
    """Forward and backward passes of an optimizer step on reused input buffers of bucketed shapes."""

    def __init__(self, model: PackedModel, head: Head, optimizer: Optimizer) -> None:
        super().__init__(model, head, optimizer)
        self._inputs = StaticInputs()

    def run(self, minibatch: TrainBatch, loss: StepLoss) -> list[torch.Tensor]:
        """Run forward and backward; return packed metrics per microbatch, empty before the last stage."""
        microbatches = minibatch.microbatches()
        if self.model.groups.layout.pp_size > 1:
            # Several microbatches are in flight at once: each needs its own buffers.
            static = [self._inputs.load(microbatch, slot) for slot, microbatch in enumerate(microbatches)]
            with reduce_early(self.model.ddp):
                metrics = self.model.run_microbatches(static, self._head, loss)
            for microbatch, buffers in zip(microbatches, static, strict=True):
                microbatch.take_updates(buffers)
            return metrics
        return [self._run_one(microbatch, loss, is_last) for microbatch, is_last in self._mark_last(microbatches)]

    def _mark_last(self, microbatches: Sequence[TrainBatch]) -> list[tuple[TrainBatch, bool]]:
        """Pair each microbatch with whether it reduces the gradients."""
        last = len(microbatches) - 1 if self.model.reduces_early else None
        return [(microbatch, index == last) for index, microbatch in enumerate(microbatches)]

    def _run_one(self, microbatch: TrainBatch, loss: StepLoss, is_last: bool) -> torch.Tensor:
        static = self._inputs.load(microbatch)
        metrics = self.forward_backward(static, loss, is_last)
        microbatch.take_updates(static)
        return metrics

    def forward_backward(self, static: TrainBatch, loss: StepLoss, is_last: bool) -> torch.Tensor:
        """Add a microbatch's gradients to the buffers, which `is_last` also reduces over DP; return packed metrics."""
        (module,) = self.model.ddp
        if not module.training:
            module.train()
        with reduce_early([module]) if is_last else module.no_sync():
            output, finish = self.model.forward_step(self._head, loss, iter((static,)), module)
            value, _, metrics = finish(output)
            value.backward()
        return metrics


class StaticInputs:
    """Static microbatch buffers, one set per shape and slot (place among microbatches in flight)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Shape, int], TrainBatch] = {}

    def load(self, microbatch: TrainBatch, slot: int = 0) -> TrainBatch:
        """Copy a microbatch into the buffers of its shape and return them."""
        assert microbatch.slices[0].is_bucketed, "step_mode static and graph take bucketed microbatches"
        key = (find_shape(microbatch), slot)
        if key not in self._buffers:
            piece, keys = microbatch.slices[0], microbatch.slices[0].keys
            if keys is not None:
                keys = replace(keys, index=keys.index.clone(), cu_seqlens=keys.cu_seqlens.clone())
            piece = replace(piece, cu_seqlens=piece.cu_seqlens.clone(), keys=keys)
            self._buffers[key] = replace(microbatch.map_tensors(torch.clone), kept=None, slices=[piece])
        else:
            _copy(_list_tensors(microbatch), _list_tensors(self._buffers[key]))
        buffers, kept = self._buffers[key], microbatch.kept
        return buffers if kept is None else replace(buffers, kept=kept)  # varies in size, so it is not captured


def find_shape(microbatch: TrainBatch) -> Shape:
    """Return a microbatch's key for graphs and buffers: tensor sizes (`None` if absent) and longest sequences."""
    piece = microbatch.slices[0]
    sizes = tuple(None if x is None else x.shape for x in _list_optional(microbatch))
    return (*sizes, piece.max_seqlen, piece.keys.max_seqlen if piece.keys else None)


def describe_shape(microbatch: TrainBatch) -> str:
    """Format a shape for log messages."""
    piece = microbatch.slices[0]
    keys = "" if piece.keys is None else f" and {len(piece.keys.index)} keys"
    return f"{len(microbatch.tokens)} tokens in up to {len(piece.cu_seqlens) - 1} sequences{keys}"


def _list_optional(microbatch: TrainBatch) -> list[torch.Tensor | None]:
    piece = microbatch.slices[0]
    found = [getattr(microbatch, item.name) for item in fields(microbatch)]
    flat = [x for x in found if x is None or isinstance(x, torch.Tensor)]
    keys = [piece.keys.index, piece.keys.cu_seqlens] if piece.keys is not None else [None, None]
    return [*flat, piece.cu_seqlens, *keys]


def _list_tensors(microbatch: TrainBatch) -> list[torch.Tensor]:
    return [x for x in _list_optional(microbatch) if x is not None]


def _copy(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for source, destination in zip(sources, destinations, strict=True):
        pair = by_type.setdefault(source.dtype, ([], []))
        pair[0].append(source)
        pair[1].append(destination)
    for from_, to in by_type.values():
        torch._foreach_copy_(to, from_)  # pyright: ignore[reportPrivateImportUsage]  # one kernel


@contextmanager
def reduce_early(stages: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Complete the reduction of all `EarlyReduction` stages before the end of the block."""
    with ExitStack() as stack:
        for stage in stages:
            if isinstance(stage, EarlyReduction):
                stack.enter_context(stage.reduced())
        yield


def check_step_mode(spec: RoleSpec, shape: ModelShape, dtype: str) -> None:
    """Reject a step mode that this machine cannot run.

    Raises:
        UserError: mode graph without CUDA, with experts for which this GPU has no kernel, or with offloading without
            cuda-python.
    """
    if spec.training.step_mode != "graph":
        return
    found, expected = "", "a CUDA device"
    if not torch.cuda.is_available():
        found = "there is no CUDA device"
    elif shape.num_experts:
        major, minor = torch.cuda.get_device_capability()
        if dtype != "bfloat16" or major not in _GROUPED_KERNELS:
            found = f"torch multiplies experts in {dtype} one after the other on compute capability {major}.{minor}"
            expected = "a mixture of experts in bfloat16, on compute capability 9.x or 10.x"
    if not found and (spec.training.offload_gradients or spec.training.offload_optimizer):
        try:
            import_module("cuda.bindings.driver")
        except ImportError as error:
            found, expected = (
                f"offloaded memory cannot return to its addresses: {error}",
                "cuda-python, or no offloading",
            )
    if found:
        raise UserError(
            f"{spec.section}.step_mode = graph, but {found}",
            source=f"{spec.section}.step_mode",
            expected=expected,
            hint=f"set {spec.section}.step_mode=static: the same step without capture",
        )


@dataclass
class Captured:
    """CUDA graph with its result and megatron-core's buffers that it uses."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor
    buffers: list[torch.Tensor]

    def replay(self) -> torch.Tensor:
        """Replay the graph and return a copy of its result, which the next replay overwrites."""
        self.graph.replay()
        return self.result.clone()


class GraphStep(StaticStep):
    """`StaticStep` replayed from CUDA graphs.

    Args:
        memory_gib: graph memory in GiB beyond which new shapes run uncaptured; no limit if `None`.
    """

    def __init__(self, model: PackedModel, head: Head, optimizer: Optimizer, memory_gib: float | None) -> None:
        super().__init__(model, head, optimizer)
        assert model.stream is not None
        self._stream = model.stream
        self._pools: dict[int, Any] = {}
        self._graphs: dict[Key, Any] = {}  # results of `_capture_microbatch`
        self._uncaptured: set[Key] = set()
        self._finish: Captured | None = None
        self._settings: dict[str, Any] = {}
        self._memory_limit = None if memory_gib is None else int(memory_gib * _GIB)

    @property
    def memory_bytes(self) -> int:
        """Device memory held by the graphs."""
        if not self._pools:
            return 0
        pools = {tuple(pool) for pool in self._pools.values()}
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in pools)

    def prepare(self, minibatch: TrainBatch, loss: StepLoss, *, adds: bool) -> None:
        """Capture the missing graphs of a minibatch, which leaves arbitrary values in the gradient buffers.

        A pass that `adds` to gradients runs new shapes uncaptured.
        """
        if self._finish is None:
            # Generators that can be captured; dropout is 0, so their states do not matter.
            at, experts = self.model.groups.at, self.model.groups.expert_at
            model_parallel_cuda_manual_seed(
                torch.cuda.initial_seed() % (1 << 31),
                use_cudagraphable_rng=True,
                tp_rank=at.tp,
                ep_rank=experts.ep,
                etp_rank=experts.tp,
                force_reset_rng=True,
            )
        if self._settings.setdefault(loss.name, loss.settings) != loss.settings:
            log.warning("the settings of the %s loss have changed: its graphs are captured again", loss.name)
            self._graphs = {key: found for key, found in self._graphs.items() if key[0] != loss.name}
            self._settings[loss.name] = loss.settings
        if adds:
            return
        needed = self._list_needed(minibatch, loss)
        missing = needed.keys() - self._graphs.keys() - self._uncaptured
        for key in filter(self._reduces, needed):  # these graphs have collectives of all DP ranks
            if self._agree(key in missing, self.model.groups.dp):
                missing.add(key)
        in_order = [(key, needed[key]) for key in needed if key in missing]  # equal on all ranks
        for key, microbatch in sorted(in_order, key=lambda item: -len(item[1].tokens)):
            name, groups = describe_shape(microbatch), self.model.groups
            if self._memory_limit is not None:
                # Of the ranks in the capture's collectives.
                group = groups.world if self._reduces(key) else groups.collection.tp_cp
                if self._agree(self.memory_bytes >= self._memory_limit, group):
                    log.warning("no CUDA graph for microbatches of %s: the graphs hold all of graph_memory_gib", name)
                    self._uncaptured.add(key)
                    continue
            self.optimizer.zero_grad()
            self._graphs[key] = self._capture_microbatch(key, microbatch, loss, f"a microbatch of {name}")
            log.info("captured a CUDA graph for microbatches of %s; all hold %.2f GiB", name, self.memory_bytes / _GIB)
        if self._finish is None:
            self.optimizer.is_sound.fill_(False)  # Adam allocates its states and changes no weight
            self._warm_up(self.optimizer.finish)
            if self.optimizer.offloads:  # states return to the addresses that they keep
                self.optimizer.release()
                self.optimizer.restore()
            self._finish = self._record(self.optimizer.finish, "the end of the optimizer step")

    def _list_needed(self, minibatch: TrainBatch, loss: StepLoss) -> dict[Key, TrainBatch]:
        marked = self._mark_last(minibatch.microbatches())
        return {(loss.name, find_shape(microbatch), is_last): microbatch for microbatch, is_last in marked}

    def _reduces(self, key: Key) -> bool:
        """Whether the graph of this key reduces gradients over all data parallel ranks."""
        return self.model.reduces_early and bool(key[-1])

    def _capture_microbatch(self, key: Key, microbatch: TrainBatch, loss: StepLoss, name: str) -> Any:
        static = self._inputs.load(microbatch)

        def forward_backward() -> torch.Tensor:
            return self.forward_backward(static, loss, bool(key[-1]))

        self._warm_up(forward_backward)
        return self._record(forward_backward, name)

    def _agree(self, found: bool, group: dist.ProcessGroup) -> bool:
        """Return whether `found` is true on any rank of the group."""
        if group.size() == 1:
            return found
        anywhere = torch.tensor(int(found), device=self.model.device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        return bool(anywhere)

    def _run_one(self, microbatch: TrainBatch, loss: StepLoss, is_last: bool) -> torch.Tensor:
        static = self._inputs.load(microbatch)
        captured = self._graphs.get((loss.name, find_shape(microbatch), is_last))
        metrics = captured.replay() if captured else self.forward_backward(static, loss, is_last)
        microbatch.take_updates(static)
        return metrics

    def finish(self) -> torch.Tensor:
        """Replay `Optimizer.finish` from its graph."""
        assert self._finish is not None, "prepare comes first"
        return self._finish.replay()

    def _warm_up(self, *functions: Callable[[], torch.Tensor]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for function in functions * _WARM_UPS:
                function()
        current.wait_stream(self._stream)
        self.optimizer.megatron.zero_grad()  # no .grad must be left for a capture to add to
        gc.collect()

    def _record(self, function: Callable[[], torch.Tensor], name: str, pool: int = 0) -> Captured:
        graph, ops = torch.cuda.CUDAGraph(), OpRecorder()
        for state in (get_all_rng_states() or {}).values():
            graph.register_generator_state(state)
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        # thread_local: NCCL's watchdog may query its events during the capture.
        options: dict[str, Any] = dict(stream=self._stream, capture_error_mode="thread_local")
        try:
            with torch.cuda.graph(graph, pool=self._pools[pool], **options), ops:
                result = function()
        except Exception as error:
            raise explain_capture_failure(error, ops.last, name) from error
        return Captured(graph, result, list_gather_buffers())  # megatron-core may replace the buffers


class OpRecorder(TorchDispatchMode):
    """Dispatch mode that records the last operation started, such as "aten.nonzero.default"."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last = str(func)
        return func(*args, **(kwargs or {}))


def explain_capture_failure(error: BaseException, last_op: str, name: str) -> UserError:
    """Build the error of a failed capture, with the operation and its calling line."""
    cause: BaseException = error
    while cause.__context__ is not None:  # ending a failed capture raises as well
        cause = cause.__context__
    calls = takewhile(lambda f: f.name not in _OF_MODES, traceback.extract_tb(cause.__traceback__))
    frames = [f for f in calls if "/torch/" not in f.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown"
    return UserError(
        f"the CUDA graph of {name} could not be captured: operation {last_op} ({str(cause).splitlines()[0]})",
        source=where,
        expected="operations that do not look at values on the host and keep their shapes",
        hint="set step_mode=static (the same step without capture), and report the operation",
    )


@dataclass
class StageGraphs:
    """Forward and backward graph of one shape in one slot (place among microbatches in flight)."""

    forward_graph: Captured  # returns the tensor to send, [t, 1, h], or the packed metrics on the last stage
    backward_graph: Captured  # returns the gradient of `received`; a dummy on the first stage
    received: torch.Tensor | None  # input of forward, [t, 1, h]; `None` on the first stage
    gradient: torch.Tensor | None  # input of backward, [t, 1, h]; `None` on the last stage


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, graphs: StageGraphs) -> torch.Tensor:
        ctx.graphs = graphs
        if graphs.received is not None:
            graphs.received.copy_(hidden)
        return graphs.forward_graph.replay()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (gradient,) = gradients
        graphs: StageGraphs = ctx.graphs
        if graphs.gradient is not None:
            graphs.gradient.copy_(gradient)
        found = graphs.backward_graph.replay()
        return None if graphs.received is None else found, None


class StageGraphStep(GraphStep):
    """`GraphStep` of one stage of a non-interleaved pipeline."""

    def __init__(self, model: PackedModel, head: Head, optimizer: Optimizer, memory_gib: float | None) -> None:
        super().__init__(model, head, optimizer, memory_gib)
        assert model.buckets is not None
        stage, num_stages = model.groups.at.pp, model.layout.pp_size
        self._is_first, self._is_last, self._num_slots = stage == 0, stage == num_stages - 1, num_stages - stage
        rows = model.count_rows(model.buckets.sizes[-1])
        make = partial(torch.zeros, rows, 1, model.shape.hidden_size, dtype=model.dtype, device=model.device)
        self._received = [make() for _ in range(0 if self._is_first else self._num_slots)]
        self._sent, self._gradient, self._sent_back = make(), make(), make()
        self._one = torch.ones((), device=model.device)
        self._root = torch.zeros((), device=model.device, requires_grad=True)  # autograd root of a first stage

    def run(self, minibatch: TrainBatch, loss: StepLoss) -> list[torch.Tensor]:
        """Run forward and backward; return packed metrics per microbatch, empty before the last stage."""
        slots = cycle(range(self._num_slots))
        return self.model.run_microbatches(
            minibatch.microbatches(), self._head, loss, partial(self._step_forward, loss, slots)
        )

    def _step_forward(
        self, loss: StepLoss, slots: Iterator[int], batches: Iterator[TrainBatch], module: Any
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Replay the forward graph of the next microbatch, or run `PackedModel.forward_step` if there is none."""
        microbatch, slot = next(batches), next(slots)
        static = self._inputs.load(microbatch, slot)
        graphs = self._graphs.get((loss.name, find_shape(microbatch), slot))
        if graphs is None:
            output, compute = self.model.forward_step(self._head, loss, iter((static,)), module)
        else:
            output: Any = _Replayed.apply(self._root if self._is_first else module.module.decoder.input_tensor, graphs)

            def compute(metrics: torch.Tensor) -> Any:  # a dummy loss, a token count of 0, and the metrics
                return metrics.sum(), torch.zeros((), dtype=torch.int, device=metrics.device), metrics.detach()

        if not self._is_last:  # megatron-core calls `finish` on the last stage only
            microbatch.take_updates(static)

        def finish(output: torch.Tensor) -> Any:
            found = compute(output)
            microbatch.take_updates(static)
            return found

        return output, finish

    def _list_needed(self, minibatch: TrainBatch, loss: StepLoss) -> dict[Key, TrainBatch]:
        slots = cycle(range(self._num_slots))
        return {(loss.name, find_shape(m), slot): m for m, slot in zip(minibatch.microbatches(), slots, strict=False)}

    def _capture_microbatch(self, key: Key, microbatch: TrainBatch, loss: StepLoss, name: str) -> StageGraphs:
        slot, rows = key[-1], self.model.count_rows(len(microbatch.tokens))
        module: Any = self.model.ddp[0]
        static = self._inputs.load(microbatch, slot)
        received = None if self._is_first else self._received[slot][:rows]
        gradient = None if self._is_last else self._gradient[:rows]
        under_way: list[tuple[torch.Tensor | None, torch.Tensor]] = []

        def forward() -> torch.Tensor:
            module.train()
            hidden = None if received is None else received.detach().requires_grad_()
            module.module.set_input_tensor(hidden)
            output, compute = self.model.forward_step(self._head, loss, iter((static,)), module)
            if self._is_last:
                output, _, result = compute(output)
            else:
                result = self._sent[:rows].copy_(output.detach())
            under_way.append((hidden, output))
            return result

        def backward() -> torch.Tensor:
            hidden, output = under_way.pop()
            torch.autograd.backward(output, self._one if gradient is None else gradient)
            if hidden is None:
                return self._one
            assert hidden.grad is not None, "backward reaches what was received"
            return self._sent_back[:rows].copy_(hidden.grad)

        self._warm_up(forward, backward)
        return StageGraphs(
            self._record(forward, f"the forward of {name}", slot),
            self._record(backward, f"the backward of {name}", slot),
            received,
            gradient,
        )
