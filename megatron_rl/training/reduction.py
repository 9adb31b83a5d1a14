# SPDX-License-Identifier: Apache-2.0
"""Timing of the gradient reduction over data parallel ranks.

With `overlap_grad_reduce` gradients are reduced during the backward of the last microbatch. The end of the step waits
for them in `step_mode` eager; in static and graph the function of the last microbatch does, since a CUDA graph must
contain both send and wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_rl.config.schema import TrainedConfig


class EarlyReduction(DistributedDataParallel):
    """DDP-wrapped stage whose gradients are reduced within the last microbatch."""

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """Send gradients during the backward in this block and wait for all of them at its end."""
        for part in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            part.reset()  # bucket counters: a captured function runs several times
        yield
        super().finish_grad_sync()

    def finish_grad_sync(self, *unused: Any, **options: Any) -> None:
        """Do nothing: `reduced` has already waited."""


def wrap_stages(
    stages: Iterable[torch.nn.Module],
    config: TransformerConfig,
    training: TrainedConfig,
    groups: ProcessGroupCollection,
) -> list[DistributedDataParallel]:
    """Wrap stages in DDP, which moves the parameters into contiguous buffers.

    Gradients are summed (not averaged) over microbatches and DP, in float32; see `transformer_config`.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=training.use_distributed_optimizer,
        overlap_grad_reduce=training.overlap_grad_reduce,
    )
    is_early = training.overlap_grad_reduce and training.step_mode != "eager"
    wrap = EarlyReduction if is_early else DistributedDataParallel
    wrapped = [
        wrap(config, options, stage, disable_bucketing=index > 0, pg_collection=groups)
        for index, stage in enumerate(stages)
    ]
    if training.overlap_grad_reduce:
        no_sync: Any = [stage.no_sync for stage in wrapped]  # one or a list of them: annotated as one
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


@contextmanager
def reduce_early(stages: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Complete the reduction of all `EarlyReduction` stages before the end of the block."""
    with ExitStack() as stack:
        for stage in stages:
            if isinstance(stage, EarlyReduction):
                stack.enter_context(stage.reduced())
        yield
