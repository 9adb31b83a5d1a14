# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of one pipeline stage: separate graphs for forward and backward, with messages in between.

Under 1F1B a stage has at most as many microbatches in flight as there are stages from it on, and they return in order:
each of these slots has its own buffers, graphs and memory pool.
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
    """Forward and backward graph of one shape in one slot.

    Attributes:
        forward_graph: returns the tensor to send, [t, 1, h], or the packed metrics on the last stage.
        backward_graph: returns the gradient of `received`; a dummy on the first stage.
        received: input of forward, [t, 1, h]; `None` on the first stage.
        gradient: input of backward, [t, 1, h]; `None` on the last stage.
    """

    forward_graph: Captured
    backward_graph: Captured
    received: torch.Tensor | None
    gradient: torch.Tensor | None

    def run_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Replay forward on received hidden states."""
        if self.received is not None:
            self.received.copy_(hidden)
        return self.forward_graph.replay()

    def run_backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Replay backward on a received gradient."""
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
        """See `PackedModel.forward_step`."""
        microbatch, slot = next(batches), next(slots)
        static = self._inputs.load(microbatch, slot)
        graphs = self._graphs.get((loss.name, find_shape(microbatch), slot))
        if graphs is None:
            output, compute = self.model.forward_step(self._head, loss, iter((static,)), module)
        else:
            output: Any = _Replayed.apply(self._root if self._is_first else module.module.decoder.input_tensor, graphs)
            compute = _count_nothing
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


def _count_nothing(metrics: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a dummy loss, a token count of 0, and the metrics."""
    return metrics.sum(), torch.zeros((), dtype=torch.int, device=metrics.device), metrics.detach()
