# SPDX-License-Identifier: Apache-2.0
"""When the gradients of an optimizer step are reduced over its data parallel ranks.

By default at the end of the step. With `overlap_grad_reduce` a part of the gradient buffers is sent as soon as the
backward of the last microbatch has completed it. In `step_mode` eager the end of the step waits for what was sent; in
static and graph the function that computes the last microbatch does, since a CUDA graph must hold both.
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
    """A stage whose gradients are reduced where the last microbatch is computed, not at the end of the step."""

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """A backward in this block sends gradients on its way; at the end of the block all have arrived."""
        for part in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            part.reset()  # its counts: a function that is captured runs several times
        yield
        super().finish_grad_sync()

    def finish_grad_sync(self, *unused: Any, **options: Any) -> None:
        """The end of the step has nothing to wait for."""


def wrap_stages(
    stages: Iterable[torch.nn.Module],
    config: TransformerConfig,
    training: TrainedConfig,
    groups: ProcessGroupCollection,
) -> list[DistributedDataParallel]:
    """Wrap stages in DDP, which moves the parameters into buffers.

    Gradients are summed (not averaged) over microbatches and DP, in float32; see `transformer_config`.

    Args:
        stages: of this rank.
        config: theirs; its schedule is told when gradients are not to be reduced.
        training: section of the role.
        groups: of its layout.
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
    """Gradients of these stages that are to be reduced early are whole at the end of the block."""
    with ExitStack() as stack:
        for stage in stages:
            if isinstance(stage, EarlyReduction):
                stack.enter_context(stage.reduced())
        yield
