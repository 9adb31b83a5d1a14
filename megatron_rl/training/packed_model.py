# SPDX-License-Identifier: Apache-2.0
"""A megatron-core model over packed batches: what all roles (actor, reference, critic, reward model) have in common.

The schedule is megatron-core's (no pipelining, 1F1B or interleaved). The last pipeline stage ends in hidden states;
a role says what it makes of them (`_read_out`), and only that stage ever has it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_rl.checkpoint.distributed import load_weights
from megatron_rl.config.schema import LayoutConfig, ModelConfig, TrainableConfig
from megatron_rl.models.gpt import build_gpt_stages, choose_transformer_impl
from megatron_rl.models.packed_sequences import build_packed_sequences
from megatron_rl.models.transformer_config import DTYPES, build_transformer_config
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.packing.buckets import Buckets, build_buckets
from megatron_rl.packing.microbatches import compute_attention_ratio
from megatron_rl.parallel.collectives import broadcast_tensors
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.ulysses import combine_shards, shard_rows
from megatron_rl.training.host_memory import HostMemory
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS, megatron_placements
from megatron_rl.weights.shard_box import ShardBox, check_placements

# (microbatch, *what the role reads out [t]) -> loss and the sums (or maxima, "max/...") that make up its metrics
LossFunction = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class PackedModel:
    """This rank's stages of one model.

    Attributes:
        shape: the architecture.
        groups: process groups of the role.
        stages: model chunks (`vpp_size` of them), weights loaded.
        modules: what the schedule runs; roles with an optimizer put DDP wrappers here.
        params: this rank's parameters by name.
        buckets: the shapes that its training step takes; None: any.
        padded_params: ends of the names of parameters with rows that pad the vocabulary.
    """

    padded_params = PADDED_PARAMETERS
    _may_lack: tuple[str, ...] = ()  # logical tensors that are zero when the checkpoint does not have them

    def __init__(
        self, model: ModelConfig, layout_config: LayoutConfig, shape: ModelShape, groups: ParallelGroups,
        *, path: str | Path, seed: int,
    ) -> None:
        self.shape, self.groups = shape, groups
        at = groups.at
        # Dropout is 0, yet megatron-core forks these RNG streams on every forward.
        model_parallel_cuda_manual_seed(
            seed, tp_rank=at.tp, ep_rank=groups.expert_at.ep, etp_rank=at.tp, force_reset_rng=True)
        self.transformer_impl = choose_transformer_impl(model.transformer_impl)
        self.config = build_transformer_config(
            shape, groups.layout, dtype=DTYPES[model.dtype], sequence_parallel=layout_config.sequence_parallel,
            recompute_granularity=layout_config.recompute_granularity,
            use_transformer_engine=self.transformer_impl == "transformer_engine")
        self.buckets = self._build_buckets(layout_config)
        self.stages = build_gpt_stages(shape, self.config, groups, self.transformer_impl)
        self.modules: list[torch.nn.Module] = list(self.stages)
        self.params = {name: p.data for name, p in self.stages.named_parameters()}
        placements = self.placements(groups.layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp))
        check_placements(
            placements, {name: tuple(p.shape) for name, p in self.params.items()}, where=f"megatron {at}",
            padded=[name for name in self.params if name.endswith(PADDED_PARAMETERS)])
        load_weights(Path(path), shape, placements, self.params, may_lack=self._may_lack)
        self._host_memory = HostMemory(next(self.stages.parameters()).device)
        self._on_host: list[torch.Tensor] = []  # copies of the weights, once they have been offloaded

    def _build_buckets(self, config: LayoutConfig) -> Buckets | None:
        if not isinstance(config, TrainableConfig) or config.step_mode == "eager":
            return None
        return build_buckets(
            config.max_tokens_per_microbatch, config.bucket_tokens, self.pad_multiple, config.max_num_seqs)

    def placements(self, rank: int) -> list[ShardBox]:
        """ShardBox table of any rank of the layout."""
        layout = self.groups.layout
        at = layout.coordinates(rank)
        return megatron_placements(
            self.shape, tp_size=layout.tp_size, tp_rank=at.tp, pp_size=layout.pp_size, pp_rank=at.pp,
            vpp_size=layout.vpp_size, ep_size=layout.ep_size, ep_rank=layout.expert_coordinates(rank).ep)

    def shard_key(self, rank: int) -> Hashable:
        """Ranks with equal keys have equal placement tables."""
        at = self.groups.layout.expert_coordinates(rank)
        return at.tp, at.pp, at.ep

    @property
    def pad_multiple(self) -> int:
        """Every microbatch's token count is a multiple of this."""
        layout = self.groups.layout
        return layout.cp_size * (layout.tp_size if self.config.sequence_parallel else 1)

    @property
    def attention_ratio(self) -> float:
        """Cost of attention in units of the linear layers, see `compute_attention_ratio`."""
        shape = self.shape
        return compute_attention_ratio(
            shape.hidden_size, shape.ffn_hidden_size * (shape.experts_per_token if shape.num_experts else 1),
            shape.num_heads, shape.num_kv_heads, shape.head_dim)

    @property
    def microbatch_count_multiple(self) -> int:
        """The number of microbatches is a multiple of this (interleaved schedules go by pipeline size)."""
        return self.groups.layout.pp_size if self.groups.layout.vpp_size > 1 else 1

    def offload(self) -> None:
        """Keep the weights on the host and give their device memory back, until `restore`.

        They are copied to the host once: for models whose weights do not change.
        """
        if not self._on_host:
            self._on_host = self._host_memory.store([p.data for p in self.stages.parameters()])
        for p in self.stages.parameters():
            p.data = torch.empty(0, dtype=p.dtype, device=p.device)
        self.params = {}

    def restore(self) -> None:
        """Bring offloaded weights back; does nothing if they are here."""
        if self.params:
            return
        for p, weights in zip(self.stages.parameters(), self._host_memory.load(self._on_host), strict=True):
            p.data = weights
        self.params = {name: p.data for name, p in self.stages.named_parameters()}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Weights that were offloaded are here meanwhile, and go back to the host afterwards."""
        was_offloaded = not self.params
        self.restore()
        try:
            yield
        finally:
            if was_offloaded:
                self.offload()

    @torch.no_grad()
    def compute_forward(self, batch: TrainBatch) -> torch.Tensor:
        """The first thing the role reads out, [t] float32 for a packed batch, the same on every rank of the replica."""
        results = self.run_schedule(batch, loss_function=None)
        if self.groups.is_last_stage:
            found = torch.cat(results)
        else:
            found = torch.empty(len(batch.tokens), dtype=torch.float32, device=batch.tokens.device)
        broadcast_tensors([found], self.groups.last_stage_rank, self.groups.pp)
        return found

    def run_schedule(self, batch: TrainBatch, loss_function: LossFunction | None) -> list[Any]:
        """Run all microbatches of `batch` through the pipeline.

        Args:
            batch: microbatches of one minibatch (or more, forward only).
            loss_function: forward and backward with this loss, or None for forward only.

        Returns:
            On the last stage one entry per microbatch: the loss's metrics, or the first tensor [t] that the role
            reads out when `loss_function` is None; empty on other stages.
        """
        return self.run_microbatches(batch.microbatches(), loss_function)

    def run_microbatches(self, microbatches: Sequence[TrainBatch], loss_function: LossFunction | None) -> list[Any]:
        """`run_schedule` for microbatches that exist already."""
        layout = self.groups.layout
        is_forward_only = loss_function is None
        is_interleaved = layout.vpp_size > 1
        iterators = [iter(microbatches) for _ in self.modules]
        forward_backward = get_forward_backward_func(layout.pp_size, layout.vpp_size if is_interleaved else None)
        for module in self.modules:
            module.train(not is_forward_only)
        p2p = P2PCommunicator(self.groups.pp, self.config) if layout.pp_size > 1 else None
        return forward_backward(
            forward_step_func=partial(self.forward_step, loss_function),
            data_iterator=iterators if is_interleaved else iterators[0],
            model=self.modules if is_interleaved else self.modules[0],
            num_microbatches=len(microbatches),
            seq_length=max(len(m.tokens) for m in microbatches),
            micro_batch_size=1,
            forward_only=is_forward_only,
            collect_non_loss_data=is_forward_only,
            pg_collection=self.groups.collection,
            **({"p2p_communicator": p2p} if p2p else {}),
        )

    def forward_step(
        self, loss_function: LossFunction | None, batches: Iterator[TrainBatch], module: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """megatron-core's forward step function: the output of `module`, and what makes a loss or a result of it."""
        microbatch = next(batches)
        piece = microbatch.slices[0]
        packed = build_packed_sequences(
            piece, microbatch.position_ids, head_dim=self.shape.head_dim, rope_theta=self.shape.rope_theta,
            dtype=self.config.params_dtype, cp_size=self.groups.layout.cp_size, cp_rank=self.groups.at.cp,
            rope_scaling=self.shape.rope_scaling)
        mine = self._own_rows(microbatch)
        output = module(
            microbatch.tokens[None, mine], microbatch.position_ids[None, mine], attention_mask=None,
            packed_seq_params=packed)

        def finish(hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
            found = self._read_out(hidden, microbatch)
            if non_loss_data:
                return found[0]
            loss, metrics = loss_function(microbatch, *found)
            # The loss carries its global denominator already: no token count to divide by.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics

        return output, finish

    def _read_out(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor, ...]:
        """What the role makes of the last stage's hidden states [t/cp, 1, h] (or [t/cp/tp, 1, h] under TP-SP).

        The results are [t] of the whole microbatch, on every context parallel rank: the loss knows nothing of shards.
        """
        raise NotImplementedError

    def _own_rows(self, microbatch: TrainBatch) -> slice:
        """The rows of a microbatch that this context parallel rank holds."""
        return shard_rows(len(microbatch.tokens), self.groups.layout.cp_size, self.groups.at.cp)

    def _predicted_rows(self, microbatch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor | slice, torch.Tensor]:
        """Tokens that this context parallel rank predicts: those in the loss, or where shapes must be fixed all.

        Of a bucketed microbatch all rows predict, each its successor; where prompts are shared (which needs cp = 1)
        all places are predicted, each by its predecessor. What is not in the loss is dropped by `_combine`.

        Returns:
            Their places in the microbatch [k]; the rows of the rank's shard whose hidden states predict them [k]; the
            tokens [k]. Place t, behind the end, stands for nothing.
        """
        mine, predecessors = self._own_rows(microbatch), microbatch.predecessors
        tokens, piece = microbatch.tokens, microbatch.slices[0]
        if not piece.is_bucketed:
            is_mine = microbatch.loss_mask & (predecessors >= mine.start) & (predecessors < mine.stop)
            places = is_mine.nonzero()[:, 0]
            return places, predecessors[places] - mine.start, tokens[places]
        if piece.keys is not None:
            assert self.groups.layout.cp_size == 1, "shared prompts have no fixed shape under context parallelism"
            return torch.arange(len(predecessors), device=tokens.device), predecessors, tokens
        places = torch.arange(mine.start + 1, mine.stop + 1, device=tokens.device)
        return places, slice(None), F.pad(tokens, (0, 1))[mine.start + 1 : mine.stop + 1]

    def _combine(self, values: torch.Tensor, places: torch.Tensor, microbatch: TrainBatch) -> torch.Tensor:
        """Values [k] of every context parallel rank at their places: [t], 0 where no rank has one."""
        length = len(microbatch.tokens)
        if not microbatch.slices[0].is_bucketed:
            return combine_shards(values, places, length, self.groups.cp)
        combined = combine_shards(values, places, length + 1, self.groups.cp)[:length]
        return torch.where(microbatch.loss_mask, combined, 0.0)
