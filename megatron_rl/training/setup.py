# SPDX-License-Identifier: Apache-2.0
"""A role before its construction: its inputs, shape and layout of its model."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_rl.config.algorithm import DistillationConfig
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import FULLY_SHARDED, ModelConfig
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.microbatches import compute_attention_ratio
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import choose_chunk_tokens, find_shard_key, megatron_placements
from megatron_rl.weights.model_config import find_adapters
from megatron_rl.weights.placement_tables import PlacementTable

if TYPE_CHECKING:
    from megatron_rl.samples.fixed_shapes import Buckets
    from megatron_rl.transfer.computed import SourceParams
    from megatron_rl.weights.adapters import AdapterShape


@dataclass(frozen=True)
class LearnedTeacher:
    """Teacher whose token distributions, not only log-probs of sampled tokens, the policy learns."""

    config: DistillationConfig
    path: str  # checkpoint; for `config.kind` full, the policy loads the teacher's output layer from it
    shape: ModelShape


@dataclass(frozen=True, kw_only=True)
class RoleSetup:
    """Inputs of a role's construction, equal on all of its ranks except for `groups`.

    Attributes:
        model: dtype and implementation of the layers.
        shape: with a score head (`load_model_shape(path, head="score")`) unless `spec.head` is "logprob".
        seed: seed of megatron-core's RNG streams.
        temperature: divisor of a language model's logits.
        total_optimizer_steps: length of the learning-rate schedule.
        teacher: `None` unless the actor learns from a teacher's distributions.
        memory_bytes: of the role's smallest GPU; `None` without GPUs.
    """

    spec: RoleSpec
    model: ModelConfig
    shape: ModelShape
    groups: ParallelGroups
    seed: int
    temperature: float = 1.0
    total_optimizer_steps: int = 0
    teacher: LearnedTeacher | None = None
    memory_bytes: int | None = None

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits exist at once."""
        given, tp_size = self.spec.settings.logprob_chunk_tokens, self.groups.layout.tp_size
        return given or choose_chunk_tokens(self.shape.vocab_size, tp_size, self.memory_bytes)


_NUM_SEQUENCES = 64  # per microbatch of a fixed shape; more take a buffer of twice, four times the size


@dataclass(frozen=True)
class LaidOutAdapters:
    """Shape and layout of a model's adapters, without weights."""

    shape: AdapterShape
    layout: ParallelLayout

    def scale(self) -> SourceParams:
        """Return this rank's adapters: none."""
        return {}


class LaidOutModel:
    """Shape and layout of a model: parameter placement and accepted microbatch shapes.

    Attributes:
        params: this rank's parameters by name, without adapters; empty outside of the role.
        adapters: trained adapters; `None` without LoRA.
        dp_rank: `None` outside of the role.
        buckets: shapes accepted by the training step; `None` accepts any.
        batch_invariant: the bits of a token's results do not depend on the rest of the batch.
        is_fully_sharded: data parallel ranks shard the rows of every parameter (ZeRO-3).
    """

    def __init__(self, spec: RoleSpec, shape: ModelShape, layout: ParallelLayout, dp_rank: int | None = None) -> None:
        self.shape, self.layout, self.dp_rank = shape, layout, dp_rank
        self.batch_invariant, self._sequence_parallel = spec.batch_invariant, spec.settings.sequence_parallel
        self.is_fully_sharded = spec.settings.zero_stage == FULLY_SHARDED
        self.params: SourceParams = {}
        self.adapters = find_adapters(shape, spec.lora, spec.section, is_quantized=spec.is_quantized)
        self.buckets: Buckets | None = None
        if spec.trainable and spec.training.step_mode != "eager":
            from megatron_rl.samples.fixed_shapes import build_buckets

            config = spec.training
            self.buckets = build_buckets(
                config.max_tokens_per_microbatch, config.bucket_tokens, self.pad_multiple, _NUM_SEQUENCES
            )

    def placements(self, rank: int) -> PlacementTable:
        """List the slices of checkpoint tensors that a rank's parameters hold, without adapters."""
        if self.is_fully_sharded:
            from megatron_rl.weights.row_shards import sharded_placements

            return sharded_placements(self.shape, self.layout, rank)
        return megatron_placements(self.shape, self.layout, rank)

    @property
    def trained(self) -> Any:
        """Trained part: the model, or its adapters."""
        return self if self.adapters is None else LaidOutAdapters(self.adapters, self.layout)

    @property
    def merged_params(self) -> frozenset[str]:
        """Names of the base weights that have an adapter, equal on every rank."""
        if self.adapters is None:
            return frozenset()
        from megatron_rl.weights.adapters import adapted_parameters

        return adapted_parameters(self.adapters, self.placements(self.layout.first_rank))

    @property
    def quantized_params(self) -> frozenset[str]:
        """Names of NF4 parameters on any rank."""
        if self.adapters is None or not self.adapters.is_quantized:
            return frozenset()
        from megatron_rl.weights.quantization import list_quantized

        return list_quantized(self.placements(self.layout.first_rank))

    def merge(self) -> SourceParams:
        """Return this rank's parameters, with adapters merged lazily on read."""
        return self.params

    def shard_key(self, rank: int) -> Hashable:
        """Return a key that is equal for ranks with equal `placements`."""
        if self.is_fully_sharded:
            from megatron_rl.weights.row_shards import find_sharded_key

            return find_sharded_key(self.layout, rank)
        return find_shard_key(self.layout, rank)

    @cached_property
    def pad_multiple(self) -> int:
        """Divisor of every microbatch's token count."""
        sp_size = self.layout.tp_size if self._sequence_parallel else 1
        # Equal shards, each large enough for batch-invariant matrix products.
        if self.batch_invariant:
            from megatron_rl.parallel.batch_invariant import MIN_ROWS

            sp_size = math.lcm(sp_size, MIN_ROWS)
        return self.layout.cp_size * sp_size

    @cached_property
    def attention_ratio(self) -> float:
        """Cost of attention relative to the linear layers, per token of length."""
        shape = self.shape
        linear = shape.attention_elements + 3 * shape.hidden_size * shape.active_columns
        return compute_attention_ratio(linear, shape.num_heads, shape.head_dim, shape.value_dim)

    @cached_property
    def microbatch_count_multiple(self) -> int:
        """Divisor of the number of microbatches, for interleaved schedules."""
        return self.layout.pp_size if self.layout.vpp_size > 1 else 1
