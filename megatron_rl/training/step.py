# SPDX-License-Identifier: Apache-2.0
"""Forward and backward over the microbatches of a minibatch, in three modes with bitwise equal results.

    eager    megatron-core's schedule on the tensors of the batch
    static   the same model on static buffers, one set per microbatch shape (`static_step.py`)
    graph    the static step as one CUDA graph per shape (`cuda_graph.py`)

Values that change between steps (KL coefficient, learning rate) are persistent device tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.parallel.collectives import share_object
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.optimizer import Optimizer
from megatron_rl.training.packed_model import Head, PackedModel
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape

_GROUPED_KERNELS = (9, 10)  # major compute capabilities on which torch's `grouped_mm` needs no host sync


class StepLoss:
    """Loss of an optimizer step, called by the schedule with a microbatch and the head's outputs.

    Args:
        name: unique per role; part of the key of captured graphs.
        function: (settings, microbatch, *head outputs) -> scalar loss and metrics by name: sums, or maxima if the name
            begins with "max/"; the same names for every microbatch.

    Attributes:
        settings: Python numbers from the config; changing them invalidates captured graphs.
        metric_names: sums first; empty before the first call.
        is_pulled: 0-d device bool: a head output received a nonzero gradient.
    """

    def __init__(
        self, name: str, function: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]], device: torch.device
    ) -> None:
        self.name, self._function = name, function
        self.settings: Any = None
        self.metric_names: tuple[str, ...] = ()
        self._are_names_shared = False
        self.is_pulled = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, microbatch: TrainBatch, *found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scalar loss and its metrics packed in one float64 tensor [num_metrics]."""
        for values in found:
            if values.requires_grad:
                values.register_hook(self._note_gradient)
        loss, metrics = self._function(self.settings, microbatch, *found)
        sums = [name for name in metrics if not name.startswith("max/")]
        names = (*sums, *(name for name in metrics if name.startswith("max/")))
        if self.metric_names not in ((), names):
            differing = ", ".join(sorted({*names} ^ {*self.metric_names})) or "its metrics in another order"
            raise UserError(
                f"in some microbatches only, the {self.name} loss reports {differing}",
                source="algorithm.policy_loss",
                expected="the same metrics in each microbatch",
                hint="report a tensor of zeros for a metric without a value",
            )
        self.metric_names = names
        return loss, torch.stack([metrics[name].detach().double() for name in names])

    @property
    def num_sums(self) -> int:
        """Number of metrics that are sums."""
        return sum(not name.startswith("max/") for name in self.metric_names)

    def share_names(self, group: dist.ProcessGroup, source: int) -> None:
        """Broadcast the metric names from the last pipeline stage, unless done since the last `set_settings`."""
        if not self._are_names_shared:
            self.metric_names = share_object(self.metric_names, group, source)
            self._are_names_shared = True

    def set_settings(self, settings: Any) -> None:
        """Set the settings of the following steps."""
        if settings != self.settings:
            self.settings, self.metric_names, self._are_names_shared = settings, (), False

    def _note_gradient(self, gradient: torch.Tensor) -> None:
        self.is_pulled.logical_or_(gradient.any())  # on the device: part of a captured step


class EagerStep:
    """Optimizer step by megatron-core's schedule on the batch's own tensors."""

    def __init__(self, model: PackedModel, head: Head, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self._head = model, optimizer, head

    def prepare(self, minibatch: TrainBatch, loss: StepLoss) -> None:
        """Prepare the step, before gradients are cleared: `GraphStep` captures graphs, which overwrites the buffers."""

    def run(self, minibatch: TrainBatch, loss: StepLoss) -> list[torch.Tensor]:
        """Run forward and backward; return packed metrics per microbatch, empty before the last stage."""
        return self.model.run_microbatches(minibatch.microbatches(), self._head, loss)

    def finish(self) -> torch.Tensor:
        """Update the weights and return the gradient norm; see `Optimizer.finish`."""
        return self.optimizer.finish()


def check_step_mode(spec: RoleSpec, shape: ModelShape, dtype: str) -> None:
    """Reject a step mode that this machine cannot run.

    Raises:
        UserError: mode graph without CUDA, or with experts for which this GPU has no kernel.
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
    if found:
        raise UserError(
            f"{spec.section}.step_mode = graph, but {found}",
            source=f"{spec.section}.step_mode",
            expected=expected,
            hint=f"set {spec.section}.step_mode=static: the same step without capture",
        )
