# SPDX-License-Identifier: Apache-2.0
"""A megatron-core language model over packed batches: what actor and reference have in common.

The schedule is megatron-core's (no pipelining, 1F1B or interleaved); the logits stay split over the
TP group, and only the last pipeline stage ever has them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.config.schema import ActorConfig, ModelConfig
from megatron_rl.data.batching import TrainBatch
from megatron_rl.models.gpt import build_gpt_stages, choose_transformer_impl
from megatron_rl.models.transformer_config import DTYPES, build_transformer_config
from megatron_rl.parallel.collectives import broadcast_tensors
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.vocab_parallel import compute_logprobs_and_entropy
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS, megatron_placements
from megatron_rl.weights.placement import Placement, check_placements

LossFunction = Callable[[TrainBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Policy:
    """This rank's stages of one language model.

    Attributes:
        shape: the architecture.
        groups: process groups of the role.
        stages: model chunks (`vpp_size` of them), weights loaded.
        modules: what the schedule runs; the actor puts DDP wrappers here.
        params: this rank's parameters by name.
        padded_params: ends of the names of parameters with rows that pad the vocabulary.
    """

    padded_params = PADDED_PARAMETERS

    def __init__(
        self, model: ModelConfig, layout_config: ActorConfig, shape: ModelShape, groups: ParallelGroups,
        *, path: str | Path, temperature: float, seed: int,
    ) -> None:
        self.shape, self.groups, self.temperature = shape, groups, temperature
        self._offloaded: dict[str, torch.Tensor] | None = None
        at = groups.at
        # Dropout is 0, yet megatron-core forks these RNG streams on every forward.
        model_parallel_cuda_manual_seed(
            seed, tp_rank=at.tp, ep_rank=groups.expert_at.ep, etp_rank=at.tp, force_reset_rng=True)
        self.transformer_impl = choose_transformer_impl(model.transformer_impl)
        self.config = build_transformer_config(
            shape, groups.layout, dtype=DTYPES[model.dtype], sequence_parallel=layout_config.sequence_parallel,
            recompute_granularity=layout_config.recompute_granularity,
            use_transformer_engine=self.transformer_impl == "transformer_engine")
        self.stages = build_gpt_stages(shape, self.config, groups, self.transformer_impl)
        self.modules: list[torch.nn.Module] = list(self.stages)
        self.params = {name: p.data for name, p in self.stages.named_parameters()}
        placements = self.placements(groups.layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp))
        check_placements(
            placements, {name: tuple(p.shape) for name, p in self.params.items()}, where=f"megatron {at}",
            padded=[name for name in self.params if name.endswith(PADDED_PARAMETERS)])
        load_huggingface(path, placements, self.params)

    def placements(self, rank: int) -> list[Placement]:
        """Placement table of any rank of the layout."""
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
        return self.groups.layout.tp_size if self.config.sequence_parallel else 1

    @property
    def microbatch_count_multiple(self) -> int:
        """The number of microbatches is a multiple of this (interleaved schedules go by pipeline size)."""
        return self.groups.layout.pp_size if self.groups.layout.vpp_size > 1 else 1

    def offload(self) -> None:
        """Keep the weights on the host and give their device memory back, until `restore`."""
        if self._offloaded is None:
            self._offloaded = {
                name: p.data.to("cpu", copy=True) for name, p in self.stages.named_parameters()}
            for p in self.stages.parameters():
                p.data = torch.empty(0, dtype=p.dtype, device=p.device)
            self.params = {}

    def restore(self) -> None:
        """Bring offloaded weights back; does nothing if they are here."""
        if self._offloaded is not None:
            device = next(self.stages.parameters()).device
            for name, p in self.stages.named_parameters():
                p.data = self._offloaded[name].to(device)
            self.params = {name: p.data for name, p in self.stages.named_parameters()}
            self._offloaded = None

    @torch.no_grad()
    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs of the tokens of a packed batch, [t] float32, the same on every rank of the replica.

        Values at masked positions mean nothing.
        """
        results = self.run_schedule(batch, loss_function=None)
        if self.groups.is_last_stage:
            logprobs = torch.cat(results)
        else:
            logprobs = torch.empty(len(batch.tokens), dtype=torch.float32, device=batch.tokens.device)
        broadcast_tensors([logprobs], self.groups.last_stage_rank, self.groups.pp)
        return logprobs

    def run_schedule(self, batch: TrainBatch, loss_function: LossFunction | None) -> list[Any]:
        """Run all microbatches of `batch` through the pipeline.

        Args:
            batch: microbatches of one minibatch (or more, forward only).
            loss_function: forward and backward with this loss, or None for forward only.

        Returns:
            On the last stage one entry per microbatch: the loss's metrics, or the logprobs [t] when
            `loss_function` is None; empty on other stages.
        """
        layout, microbatches = self.groups.layout, batch.microbatches()
        is_forward_only = loss_function is None
        is_interleaved = layout.vpp_size > 1
        iterators = [iter(microbatches) for _ in self.modules]
        forward_backward = get_forward_backward_func(layout.pp_size, layout.vpp_size if is_interleaved else None)
        for module in self.modules:
            module.train(not is_forward_only)
        p2p = P2PCommunicator(self.groups.pp, self.config) if layout.pp_size > 1 else None
        return forward_backward(
            forward_step_func=partial(self._forward_step, loss_function),
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

    def _forward_step(
        self, loss_function: LossFunction | None, batches: Iterator[TrainBatch], module: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        microbatch = next(batches)
        piece = microbatch.slices[0]
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=piece.cu_seqlens, cu_seqlens_kv=piece.cu_seqlens,
            max_seqlen_q=piece.max_seqlen, max_seqlen_kv=piece.max_seqlen)
        output = module(
            microbatch.tokens[None], microbatch.position_ids[None], attention_mask=None, packed_seq_params=packed)

        def finish(logits: torch.Tensor, non_loss_data: bool = False) -> Any:
            logprobs, entropy = self._score(logits, microbatch.tokens)
            if non_loss_data:
                return logprobs
            loss, metrics = loss_function(microbatch, logprobs, entropy)
            # The loss carries its global denominator already: no token count to divide by.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics

        return output, finish

    def _score(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [1, t, v/tp] -> logprobs [t] of `tokens` and entropy [t] of the distribution they came from.

        Logits at position i predict token i + 1, hence the shift by one; what wraps around lands on the
        first position of a sequence, which is masked.
        """
        targets = tokens.roll(-1)
        logprobs, entropy = compute_logprobs_and_entropy(
            logits[0], targets, vocab_size=self.shape.vocab_size, temperature=self.temperature,
            tp_group=self.groups.tp)
        return logprobs.roll(1), entropy.roll(1)
