# SPDX-License-Identifier: Apache-2.0
"""Frozen policies, and log-probs of a few sequences outside of a step's samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import LayoutConfig, ModelConfig
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Padding, build_train_batch
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import RoleSetup
from megatron_rl.training.token_heads import LogprobHead
from megatron_rl.types import Branch
from megatron_rl.weights.families import ModelShape


def build_policy(
    weights: Path,
    shape: ModelShape,
    dtype: Literal["float32", "bfloat16"],
    layout: ParallelLayout,
    *,
    sequence_parallel: bool,
) -> PackedModel:
    """Build a frozen model on all ranks; collective."""
    config = LayoutConfig(
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        sequence_parallel=sequence_parallel,
    )
    spec = RoleSpec(name="policy", path=str(weights), section="layout", settings=config, head="logprob")
    return PackedModel(
        RoleSetup(
            spec=spec,
            model=ModelConfig(path=str(weights), dtype=dtype),
            shape=shape,
            groups=build_groups(layout),
            seed=0,
        )
    )


def score_sequences(
    policy: PackedModel, sequences: Sequence[np.ndarray], skip: Sequence[int], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Compute log-probs of the tokens from `skip` on; every DP replica scores all sequences. Collective.

    Args:
        sequences: [s] int32 each.
        skip: unscored leading tokens per sequence.
        temperature: divisor of the logits.
    """
    packed = [Branch.of_response(tokens, first) for tokens, first in zip(sequences, skip, strict=True)]
    lengths = [len(tokens) for tokens in sequences]
    plan = plan_microbatches(
        lengths, dp_size=1, max_tokens=max(lengths), count_multiple=policy.microbatch_count_multiple
    )
    batch = build_train_batch(
        packed,
        [0.0] * len(packed),
        [(range(len(packed)), plan)],
        dp_rank=0,
        padding=Padding(policy.pad_multiple),
        device=policy.device,
    )
    logprobs = policy.compute_forward(batch, LogprobHead(policy, temperature))
    return [logprobs[(batch.sequence_ids == i) & batch.loss_mask].cpu() for i in range(len(packed))]
