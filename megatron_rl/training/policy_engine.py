# SPDX-License-Identifier: Apache-2.0
"""Rollout engine that runs the actor's own modules, with a paged KV cache and the trainer's log-prob formula.

Nothing is transferred before a rollout, samples are scored exactly as in training, and every trainable family is
supported: the reference for other engines. It is slow: eager, one pipeline stage at a time, attention by the trainer's
backends.

An engine consists of the ranks that hold one copy of the model (`ParallelLayout.model_copies`); data and context
parallel ranks are separate engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.engines.protocol import EngineSpec, Sampled
from megatron_rl.engines.truncation import add_gumbel_noise, truncate
from megatron_rl.engines.wrappers import ContinuousBatch, PagedRows
from megatron_rl.models.attention import CachedRows, PackedAttention, PackedSequences, build_packed_sequences
from megatron_rl.models.routing import RowRoutes
from megatron_rl.models.stages import HiddenStatesModel, gather_for_shards
from megatron_rl.parallel.batch_invariant import MIN_ROWS
from megatron_rl.parallel.collectives import broadcast_tensors, gather_rows
from megatron_rl.parallel.vocab_parallel import (
    OutputSoftmax,
    PackedKeptSets,
    compute_summary,
    gather_summaries,
    merge_summaries,
)
from megatron_rl.samples.batch import MicrobatchSlice, SegmentKeys, move_to_device
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.types import KeptSets, UserError
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS
from megatron_rl.weights.support import list_cache_sizes

_BLOCK_SIZE = 16
_STEP_TOKENS = 4096
_MAX_CPU_CACHE_BYTES = 1 << 30


class PolicyEngine:
    """One rank of an engine that runs the policy's modules."""

    def __init__(self, spec: EngineSpec) -> None:
        model = spec.model
        assert isinstance(model, PackedModel), "it runs an actor's modules"
        self._model, self._dtype = model, model.config.params_dtype
        self.params = model.params
        self.shared_params = frozenset(model.params)
        self.shard_key, self.placements = model.shard_key, model.placements
        self.padded_params = tuple(name for name in model.params if name.endswith(PADDED_PARAMETERS))
        self.engine_ranks = model.groups.layout.model_copies()
        self._group = model.groups.collection.tp_ep_pp
        ranks = self.engine_ranks.of[self.engine_ranks.places[spec.process.rank][0]]
        self._leader = ranks[-(len(ranks) // model.groups.layout.pp_size)]  # the first of the last stage
        layers = [module for module in model.stages.modules() if isinstance(module, PackedAttention)]
        self._layer_numbers = [layer.layer_number for layer in layers]
        numbers = [number - 1 for number in self._layer_numbers]
        self._sizes = list_cache_sizes(model.shape, numbers, model.groups.layout.tp_size)
        num_blocks = self._count_blocks(spec)
        self._num_slots = num_blocks * _BLOCK_SIZE + model.pad_multiple  # slots behind the last block hold padding
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._batch = ContinuousBatch(
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            max_num_seqs=spec.config.max_num_seqs,
            max_tokens=_STEP_TOKENS,
            stop=spec.stop,
        )
        self.add, self.interrupt, self.has_requests = self._batch.add, self._batch.interrupt, self._batch.has_requests
        self.tokens_in_flight = self._batch.tokens_in_flight
        self._route_shape = spec.route_shape

    def _count_blocks(self, spec: EngineSpec) -> int:
        """Return the number of cache blocks, at most for `max_num_seqs` full sequences."""
        config, device = spec.config, spec.process.device
        longest = -(-(spec.max_prompt_length + spec.max_response_length) // _BLOCK_SIZE)
        per_block = 2 * _BLOCK_SIZE * sum(map(math.prod, self._sizes)) * self._dtype.itemsize
        if config.kv_cache_gib is not None:
            fitting = int(config.kv_cache_gib * (1 << 30)) // per_block
            if fitting < longest:
                raise UserError(
                    f"rollout.kv_cache_gib = {config.kv_cache_gib} holds {fitting * _BLOCK_SIZE} tokens",
                    source="rollout.kv_cache_gib",
                    expected=f"at least {longest * per_block / (1 << 30):.3g}, for a sequence of "
                    f"{longest * _BLOCK_SIZE} tokens",
                    hint="make it larger, or leave it out",
                )
            return min(fitting, longest * config.max_num_seqs)
        room = _MAX_CPU_CACHE_BYTES
        if device.type == "cuda":
            room = int(config.gpu_memory_utilization * torch.cuda.get_device_properties(device).total_memory)
        return max(longest, min(room // per_block, longest * config.max_num_seqs))

    def begin_weight_update(self) -> None:
        """Do nothing: the actor updates the weights in place."""

    def end_weight_update(self) -> None:
        """Check that no request holds cache entries of older weights."""
        assert not self.has_requests(), "weights change between responses only"

    @torch.no_grad()
    def step(self) -> list[Sampled]:
        """Run one forward and sample a token for each running request."""
        if not self.has_requests():
            return []
        rows = self._batch.plan(self._model.pad_multiple)  # padded as in training
        used = None  # expert choices, [t, layers, choices], if routes are recorded
        if self._route_shape is not None:
            used = torch.from_numpy(self._route_shape.unknown(len(rows.tokens))).to(self._model.device)
        hidden = self._run_stages(rows, used)
        found, kept = torch.empty(2, len(rows.running), dtype=torch.float64), None  # exact for tokens and for float32
        if hidden is not None:
            *values, kept = self._draw(hidden, rows)
            found = torch.stack([value.double().cpu() for value in values])
        broadcast_tensors([found], self._leader, self._group)
        if rows.running[0].request.sampling.is_truncated:
            kept = kept or KeptSets.whole(len(rows.running))
            counts = torch.from_numpy(kept.counts)
            broadcast_tensors([counts], self._leader, self._group)
            size = int(counts.sum())
            ids = torch.from_numpy(kept.ids) if len(kept.ids) == size else torch.empty(size, dtype=torch.int32)
            broadcast_tensors([ids], self._leader, self._group)
            kept = KeptSets(ids.numpy(), counts.numpy())
        tokens, logprobs = found.tolist()
        if used is not None:
            routes = used.int()  # "unknown" is the largest value
            dist.all_reduce(routes, op=dist.ReduceOp.MIN, group=self._group)
            self._batch.record_routes(rows, routes.to(used.dtype).cpu().numpy())
        return self._batch.record(rows, [int(token) for token in tokens], logprobs, kept)

    def _draw(self, hidden: torch.Tensor, rows: PagedRows) -> tuple[torch.Tensor, torch.Tensor, KeptSets | None]:
        """Sample one token per running response from the last stage's output; collective over TP.

        Returns:
            Tokens [b] int64, log-probs [b] float32 (greedy sampling scores at temperature 1), and the token sets that
            sampling kept, if truncated; equal on all TP ranks.
        """
        model, sampling, last = self._model, rows.running[0].request.sampling, move_to_device(rows.last, hidden.device)
        tp_group, stage = model.groups.tp, model.stages[-1]
        assert isinstance(stage, HiddenStatesModel), "a language model"
        weight = stage.output_weight
        whole = gather_for_shards(hidden, sequence_parallel=model.config.sequence_parallel, tp_group=tp_group)[:, 0]
        count, padding = len(last), max(0, MIN_ROWS - len(last))  # batch invariance
        last = F.pad(last, (0, padding))
        softmax = OutputSoftmax(
            vocab_size=model.shape.vocab_size,
            temperature=sampling.temperature or 1.0,
            tp_group=tp_group,
            chunk_tokens=len(last),
            softcap=model.shape.logit_softcap,
        )
        z, shard = softmax.make_logits(whole[last], weight), softmax.find_shard(weight)  # [b, v/tp]
        scores = z
        if tp_group.size() > 1:
            columns = F.pad(z, (0, len(weight) - shard.width)).t().contiguous()  # [v/tp with padding, b]
            scores = gather_rows(columns[None], tp_group).flatten(0, 1)[: model.shape.vocab_size].t()  # [b, v]
        scores, kept = scores[:count], None
        if sampling.is_truncated:
            scores, kept = truncate(
                scores, sampling, [one.request.num_sampled + len(one.tokens) for one in rows.running]
            )
            z = PackedKeptSets.pack([kept], z.device).pad(padding).mask(z, shard)
        if not sampling.is_greedy:
            scores = add_gumbel_noise(scores, [one.generator for one in rows.running])
        tokens = scores.argmax(-1)
        summary = compute_summary(z, F.pad(tokens, (0, padding)), shard)  # overwrites z
        return tokens, merge_summaries(gather_summaries(summary, tp_group))[0][:count], kept

    def _run_stages(self, rows: PagedRows, used: torch.Tensor | None) -> torch.Tensor | None:
        """Return hidden states [t, 1, h] (with sequence parallelism [t/tp, 1, h]) on the last stage, else `None`.

        Writes the chosen experts to `used` [t, layers, choices], if given.
        """
        model, groups = self._model, self._model.groups
        tokens, positions = (move_to_device(values, model.device) for values in (rows.tokens, rows.positions))
        packed = self._describe(rows, positions)
        if used is not None:
            assert model.routing is not None, "a mixture of experts"
            packed = replace(packed, routes=RowRoutes(used=used[model.routing.shard(0, len(used))]))
        size = len(rows.tokens) // (groups.layout.tp_size if model.config.sequence_parallel else 1)
        for module in model.modules:
            module.eval()
        hidden, stages = None, cast(Iterable[Any], model.stages)
        for chunk, stage in enumerate(stages):  # one pass through the ring of stages per chunk
            if chunk or groups.at.pp:
                hidden = torch.empty(size, 1, model.shape.hidden_size, dtype=self._dtype, device=model.device)
                dist.recv(hidden, group=groups.pp, group_src=(groups.at.pp - 1) % groups.layout.pp_size)
            stage.set_input_tensor(hidden)
            hidden = stage(tokens[None], positions[None], attention_mask=None, packed_seq_params=packed)
            stage.set_input_tensor(None)
            if chunk < groups.layout.vpp_size - 1 or not groups.is_last_stage:
                dist.send(hidden, group=groups.pp, group_dst=(groups.at.pp + 1) % groups.layout.pp_size)
        return hidden if groups.is_last_stage else None

    def _describe(self, rows: PagedRows, positions: torch.Tensor) -> PackedSequences:
        device, shape = self._model.device, self._model.shape
        if not self._layers:
            for number, size in zip(self._layer_numbers, self._sizes, strict=True):
                keys, values = torch.empty((2, self._num_slots, *size), dtype=self._dtype, device=device)
                self._layers[number] = keys, values
        bounds, key_bounds, slots, key_slots = (
            move_to_device(values, device) for values in (rows.bounds, rows.key_bounds, rows.slots, rows.key_slots)
        )
        seen = SegmentKeys(key_slots, key_bounds, int(np.diff(rows.key_bounds).max()))
        piece = MicrobatchSlice(0, len(rows.tokens), bounds, int(np.diff(rows.bounds).max()), seen)
        backend = self._model.attention_backend
        packed = build_packed_sequences(piece, positions, shape, dtype=self._dtype, backend=backend)
        return replace(packed, cache=CachedRows(self._layers, slots))

    def sleep(self) -> None:
        """Free the cache until the next step."""
        self._layers = {}

    def close(self) -> None:
        """Release the cache and the references to the parameters."""
        self._layers, self.params = {}, {}
