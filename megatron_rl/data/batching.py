# SPDX-License-Identifier: Apache-2.0
"""TrainBatch: the packed tensors of one DP rank for one step, cut into minibatches and microbatches.

All token-level tensors are flat `[t]` over the rank's microbatches in execution order; a minibatch or
a microbatch is a slice of them, so `batch.old_logprobs = actor.compute_logprobs(batch)` is aligned by
construction. Each microbatch ends in a padding sequence where its length must be a multiple of
something (TP sequence parallelism) or would be zero; padding enters no loss and no metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from megatron_rl.data.packing import MicrobatchPlan


@dataclass(frozen=True)
class PackedSequence:
    """What packing needs of one prompt + response.

    Attributes:
        tokens: [s] prompt and response.
        num_prompt_tokens: leading tokens that do not enter the loss.
        rollout_logprobs: [s - num_prompt_tokens] as the engine reported them; zeros if there are none.
    """

    tokens: np.ndarray
    num_prompt_tokens: int
    rollout_logprobs: np.ndarray


@dataclass(frozen=True)
class MicrobatchSlice:
    """Where a microbatch lies in the flat tensors; `cu_seqlens` is relative to its start."""

    start: int
    stop: int
    cu_seqlens: torch.Tensor  # [num_seqs + 1] int32
    max_seqlen: int


@dataclass
class TrainBatch:
    """Packed tensors of one DP rank; all `[t]`, position 0 of each sequence is masked.

    Attributes:
        tokens: int64.
        position_ids: int64, position inside the sequence.
        loss_mask: bool, True on response tokens.
        loss_weights: float32, what each token's loss counts for: `sum(loss_weights * loss)` over all
            microbatches and DP ranks of a minibatch is the loss of that optimizer step.
        sequence_ids: int64, index of the rollout in the step's list; -1 on padding.
        rollout_logprobs: float32, from the engine.
        old_logprobs, ref_logprobs, advantages: float32, filled in along the step.
        slices: one per microbatch.
        minibatch_sizes: microbatches of each minibatch.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor
    sequence_ids: torch.Tensor
    rollout_logprobs: torch.Tensor
    slices: list[MicrobatchSlice]
    minibatch_sizes: list[int]
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None

    def minibatches(self) -> Iterator[TrainBatch]:
        """One batch per optimizer step; tensors are views."""
        first = 0
        for size in self.minibatch_sizes:
            yield self._part(self.slices[first : first + size])
            first += size

    def microbatches(self) -> list[TrainBatch]:
        """One batch per forward/backward; tensors are views."""
        return [self._part([piece]) for piece in self.slices]

    def _part(self, slices: list[MicrobatchSlice]) -> TrainBatch:
        start, stop = slices[0].start, slices[-1].stop
        cut = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor):
                cut[item.name] = value[start:stop]
        moved = [replace(s, start=s.start - start, stop=s.stop - start) for s in slices]
        return replace(self, **cut, slices=moved, minibatch_sizes=[len(slices)])


def expand_to_tokens(values: Sequence[float] | np.ndarray, batch: TrainBatch) -> torch.Tensor:
    """Give every token its sequence's value: [num_rollouts] -> [t] float32; 0 on padding."""
    table = torch.tensor([*values, 0.0], dtype=torch.float32, device=batch.tokens.device)
    return table[batch.sequence_ids]


def build_train_batch(
    sequences: Sequence[PackedSequence],
    sequence_weights: Sequence[float] | np.ndarray,
    minibatch_plans: Sequence[tuple[Sequence[int], MicrobatchPlan]],
    *,
    dp_rank: int,
    pad_multiple: int,
    device: torch.device,
) -> TrainBatch:
    """Pack the sequences of one DP rank.

    Args:
        sequences: all rollouts of the step (replicated on every rank).
        sequence_weights: loss weight of each of their response tokens.
        minibatch_plans: per minibatch, the indices of its sequences and their `plan_microbatches`.
        dp_rank: whose microbatches to build.
        pad_multiple: every microbatch's length becomes a multiple of this, and at least this.
        device: where the tensors live.
    """
    slices: list[MicrobatchSlice] = []
    members_of: list[list[int]] = []
    for indices, plan in minibatch_plans:
        members_of += [[indices[i] for i in members] for members in plan[dp_rank]]
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("tokens", "positions", "mask", "ids", "logprobs")}
    start = 0
    for members in members_of:
        lengths = _append(columns, sequences, members, pad_multiple)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        stop = start + int(cu_seqlens[-1])
        slices.append(MicrobatchSlice(start, stop, torch.from_numpy(cu_seqlens).to(device), max(lengths)))
        start = stop
    flat = {name: torch.from_numpy(np.concatenate(pieces)).to(device) for name, pieces in columns.items()}
    batch = TrainBatch(
        tokens=flat["tokens"], position_ids=flat["positions"], loss_mask=flat["mask"], loss_weights=flat["logprobs"],
        sequence_ids=flat["ids"], rollout_logprobs=flat["logprobs"], slices=slices,
        minibatch_sizes=[len(plan[dp_rank]) for _, plan in minibatch_plans],
    )
    batch.loss_weights = expand_to_tokens(sequence_weights, batch) * batch.loss_mask
    return batch


def _append(
    columns: dict[str, list[np.ndarray]], sequences: Sequence[PackedSequence], members: list[int], pad_multiple: int
) -> list[int]:
    """Append one microbatch to the columns; returns the lengths of its sequences, padding last."""
    lengths = []
    for index in members:
        sequence = sequences[index]
        s, prompt = len(sequence.tokens), sequence.num_prompt_tokens
        mask = np.arange(s) >= max(prompt, 1)
        logprobs = np.zeros(s, np.float32)
        logprobs[prompt:] = sequence.rollout_logprobs
        _append_row(columns, sequence.tokens, mask, np.full(s, index), logprobs)
        lengths.append(s)
    padding = max(-sum(lengths) % pad_multiple, 0 if lengths else pad_multiple)
    if padding:
        nothing = np.zeros(padding)
        _append_row(columns, nothing, nothing.astype(bool), np.full(padding, -1), nothing)
        lengths.append(padding)
    return lengths


def _append_row(
    columns: dict[str, list[np.ndarray]], tokens: np.ndarray, mask: np.ndarray, ids: np.ndarray, logprobs: np.ndarray
) -> None:
    columns["tokens"].append(np.asarray(tokens, np.int64))
    columns["positions"].append(np.arange(len(tokens), dtype=np.int64))
    columns["mask"].append(mask)
    columns["ids"].append(np.asarray(ids, np.int64))
    columns["logprobs"].append(np.asarray(logprobs, np.float32))
