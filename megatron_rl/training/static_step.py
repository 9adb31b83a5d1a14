# SPDX-License-Identifier: Apache-2.0
"""Optimizer step on reused input buffers, one set per microbatch shape: `step_mode` static, and the base of graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.optimizer import EagerStep, Optimizer, StepLoss
from megatron_rl.training.packed_model import EarlyReduction, Head, PackedModel

Shape = tuple[Any, ...]


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
