# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of one pipeline stage: forward and backward of a microbatch are two, since messages travel between them.

megatron-core's schedule runs and sends; where it would compute, a graph is replayed. What forward leaves for backward
stays in memory meanwhile. A stage has at most as many microbatches under way as there are stages from it on, and they
come back in their order (1F1B): each of these slots has buffers, graphs and a memory pool of its own. Hidden states and
their gradients come and leave through buffers that all shapes share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.cuda_graph import Captured, GraphStep, Key
from megatron_rl.training.optimizer import Optimizer
from megatron_rl.training.packed_model import Head, PackedModel
from megatron_rl.training.step import StepLoss, find_shape


@dataclass
class StageGraphs:
    """Two graphs of one shape in one slot.

    Attributes:
        forward_graph: its result is what the stage sends, [t, 1, h], or the packed metrics on the last one.
        backward_graph: its result is the gradient of what the stage has received; nothing of use on the first one.
        received: what its forward reads, [t, 1, h]; None: the first stage.
        gradient: what backward reads, [t, 1, h]; None: the last stage.
    """

    forward_graph: Captured
    backward_graph: Captured
    received: torch.Tensor | None
    gradient: torch.Tensor | None

    def run_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Replay it on what has arrived."""
        if self.received is not None:
            self.received.copy_(hidden)
        return self.forward_graph.replay()

    def run_backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Replay it on what has arrived."""
        if self.gradient is not None:
            self.gradient.copy_(gradient)
        found = self.backward_graph.replay()
        return None if self.received is None else found


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, graphs: StageGraphs) -> torch.Tensor:
        ctx.graphs = graphs
        return graphs.run_forward(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.graphs.run_backward(*gradients), None


class StageGraphStep(GraphStep):
    """`GraphStep` of one stage of several, which are not interleaved; arguments as there."""

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
        self._root = torch.zeros((), device=model.device, requires_grad=True)  # of a first stage's graph of autograd

    def run(self, minibatch: TrainBatch, loss: StepLoss) -> list[torch.Tensor]:
        """Forward and backward; packed metrics of each microbatch, empty on all but the last stage."""
        slots = cycle(range(self._num_slots))
        return self.model.run_microbatches(
            minibatch.microbatches(), self._head, loss, partial(self._step_forward, loss, slots)
        )

    def _step_forward(
        self, loss: StepLoss, slots: Iterator[int], batches: Iterator[TrainBatch], module: Any
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """megatron-core's forward step function; see `PackedModel.forward_step`."""
        microbatch, slot = next(batches), next(slots)
        static = self._inputs.load(microbatch, slot)
        graphs = self._graphs.get((loss.name, find_shape(microbatch), slot))
        if graphs is None:
            output, compute = self.model.forward_step(self._head, loss, iter((static,)), module)
        else:
            output: Any = _Replayed.apply(self._root if self._is_first else module.module.decoder.input_tensor, graphs)
            compute = _count_nothing
        if not self._is_last:  # megatron-core finishes on the last stage only
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


def _count_nothing(metrics: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What megatron-core takes for a loss, which backward does not read; a number of tokens; and the metrics."""
    return metrics.sum(), torch.zeros((), dtype=torch.int, device=metrics.device), metrics.detach()
