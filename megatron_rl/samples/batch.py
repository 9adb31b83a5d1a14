# SPDX-License-Identifier: Apache-2.0
"""TrainBatch: the packed tensors of one DP rank for one step, cut into minibatches and microbatches.

All token-level tensors are flat `[t]` over the rank's microbatches in execution order, so per-token results of a role
are aligned by construction. A microbatch is padded to a multiple (sequence or context parallelism) or a bucket size,
and never empty; padding enters no loss and no metric.

With `step_mode` static or graph, microbatches have one of a few sizes (buckets): these steps have fixed shapes.

With shared prefixes (`prefix.py`) every token after a prompt has a row, since each has its own loss; the model computes
shared tokens once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.parallel.vocab_parallel import PackedKeptSets
from megatron_rl.samples.microbatches import MicrobatchPlan
from megatron_rl.samples.prefix import SegmentKeys, SharedPrefixes, build_segment_keys, move_to_device
from megatron_rl.types import Branch, KeptSets, LossLedger

if TYPE_CHECKING:
    from megatron_rl.samples.fixed_shapes import Buckets


@dataclass(frozen=True)
class Padding:
    """Rule by which microbatches are padded.

    Attributes:
        multiple: without buckets, lengths are rounded up to a multiple of this.
        buckets: fixed lengths to pad to instead.
        max_seqlen: with buckets, the largest number of tokens in a segment, padding segments included.
    """

    multiple: int
    buckets: Buckets | None = None
    max_seqlen: int | None = None

    def find_size(self, num_tokens: int) -> int:
        """Return the padded length of a microbatch."""
        if self.buckets is None:
            return max(-(-num_tokens // self.multiple), 1) * self.multiple
        return next(size for size in self.buckets.sizes if size >= num_tokens)


class Rows:
    """Builder of the flat rows of a batch.

    Attributes:
        lengths: rows of each segment of the current microbatch.
        paths: per segment, the computed rows of its prefix and then its own.
        num_tokens, num_computed: all rows and computed rows of the current microbatch.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.paths: list[np.ndarray] = []
        self.num_tokens = self.num_computed = self._total = 0
        self._last, self._path = np.empty(0, np.int32), np.empty(0, np.int64)  # tokens and rows of the last sequence
        integers = np.empty(0, np.int64)
        self._pieces = [(integers, integers, integers, np.empty(0, bool), integers, np.empty(0, np.float32))]
        self._kept: list[KeptSets] = []
        self._has_kept = False
        self._own: list[np.ndarray] = []
        self._instead: list[tuple[np.ndarray, np.ndarray]] = []

    def append(self, sequence: Branch, index: int, num_shared: int) -> None:
        """Add sequence `index`, which shares its first `num_shared` tokens with the previous sequence.

        Shared prompt tokens get no row; shared response tokens get rows that are not computed.
        """
        same = np.array_equal(sequence.tokens[:num_shared], self._last[:num_shared])
        assert same, "sequences have in common what they share"
        length, skipped = len(sequence.tokens), min(num_shared, sequence.num_prompt_tokens)
        positions = np.arange(skipped, length)
        rows, own, repeated = positions + (self.num_tokens - skipped), length - num_shared, num_shared - skipped
        path = np.concatenate([self._path[:num_shared], np.arange(self.num_computed, self.num_computed + own)])
        mask = sequence.sampled[skipped:] & (positions > 0)
        tokens, logprobs, ids = sequence.tokens[skipped:], sequence.logprobs[skipped:], np.full(len(positions), index)
        predecessors = path[np.maximum(positions - 1, 0)]
        self._pieces.append((tokens, positions, predecessors, mask, ids, logprobs))
        kept = sequence.kept or KeptSets.whole(length)
        self._kept.append(KeptSets(kept.ids, kept.counts[skipped:]))  # prompt tokens have no kept ids
        self._has_kept |= sequence.kept is not None
        if own:
            self.lengths.append(own)
            self.paths.append(path)
            self._own.append(rows[repeated:])
        if (learned := np.flatnonzero(mask[:repeated])).size:
            self._instead.append((path[skipped + learned], rows[learned]))
        self._last, self._path = sequence.tokens, path
        self.num_tokens += len(positions)
        self.num_computed += own

    def close_microbatch(self, padding: Padding, device: torch.device) -> MicrobatchSlice:
        """Pad the current microbatch, and begin the next one."""
        buckets = padding.buckets
        length, most = padding.find_size(self.num_computed), padding.max_seqlen if buckets else None
        while (missing := length - self.num_computed) > 0:  # append padding segments
            count = min(missing, most or missing)
            self.append(Branch.of_response(np.zeros(count, np.int32), count), -1, 0)
        computed = None
        if self.num_computed < self.num_tokens:
            chosen = np.concatenate(self._own)
            for rows, others in self._instead:
                chosen[rows] = others
            computed = move_to_device(chosen, device)
        bounds, longest = np.cumsum([0, *self.lengths]), max(self.lengths)
        keys = build_segment_keys(self.paths, self.lengths, device)
        if buckets is not None:
            assert computed is None, "prefix trees have no fixed shape"
            longest = min(padding.max_seqlen or length, length)
            bounds, keys = buckets.pad_segments(bounds, keys, longest)
        first, self._total = self._total, self._total + self.num_tokens
        self.lengths, self.paths, self._own, self._instead = [], [], [], []
        self.num_tokens = self.num_computed = 0
        cu_seqlens = move_to_device(bounds.astype(np.int32), device)
        return MicrobatchSlice(first, self._total, cu_seqlens, longest, keys, buckets is not None, computed)

    def build_columns(self, device: torch.device) -> dict[str, Any]:
        """Concatenate the columns of all rows, [t] each; `kept` is `None` if sampling was not truncated."""
        names = ("tokens", "position_ids", "predecessors", "loss_mask", "sequence_ids", "rollout_logprobs")
        columns = [np.concatenate(pieces) for pieces in zip(*self._pieces, strict=True)]
        columns[-1] = columns[-1].astype(np.float32, copy=False)
        found = {name: move_to_device(column, device) for name, column in zip(names, columns, strict=True)}
        return found | {"kept": PackedKeptSets.pack(self._kept, device) if self._has_kept else None}


@dataclass(frozen=True)
class MicrobatchSlice:
    """Rows [start, stop) of a microbatch; `cu_seqlens` and `keys` count computed rows.

    Attributes:
        cu_seqlens: [num_segments + 1] int32; a segment is a sequence, or its rest after a shared prefix.
        max_seqlen: longest segment; with buckets a common bound.
        keys: keys that each segment attends to; `None` without shared prefixes.
        is_bucketed: whether all shapes are padded to `Buckets`.
        computed: [m] int64 relative to `start`: for each computed row one of the rows that share it, preferably a loss
            token. `None` if all rows are computed.
    """

    start: int
    stop: int
    cu_seqlens: torch.Tensor
    max_seqlen: int
    keys: SegmentKeys | None = None
    is_bucketed: bool = False
    computed: torch.Tensor | None = None


@dataclass(frozen=True)
class TrainBatch:
    """Packed tensors of one DP rank, [t] (one row per token) unless noted; position 0 of each sequence is masked.

    Attributes:
        position_ids: int64, in the sequence including a shared prompt.
        predecessors: int64, the computed row whose hidden state predicts this token; unused at position 0.
        loss_weights: float32; `sum(loss_weights * loss)` over all microbatches and DP ranks of a minibatch is its loss.
        sequence_ids: int64, index of the sequence (a branch of a rollout) in the step; -1 on padding.
        old_logprobs, sum_pi_squared, ref_logprobs, advantages, values, returns, importance_weights: float32, `None`
            until computed.
        teacher_logprobs: float32, mean of the teachers, if added to the advantages.
        teacher_top_k: [t, 2, k + 1] float32, `compute_linear_top_k` of the teacher, if the loss uses it.
        teacher_hidden: [t, h of the teacher] float32, likewise.
        chosen: bool, tokens that the policy loss treats specially (clip_cov, kl_cov).
        update_logprobs, update_entropy: float32, at the last optimizer step that used the token (NaN before); written
            by the actor's last pipeline stage if allocated.
        kept: token sets that truncated sampling drew the tokens from; `None` means the whole vocabulary.
        replayed_routes: [t, layers, choices] experts that the actor replays; see `RouteShape`.
        routes_used: same shape; experts chosen on this rank's rows and layers, written by a forward pass if allocated.
        targets: [t] or [t, k] int64, predicted instead of `tokens`, if given.
        columns: [t, c] float32, inputs of a loss over `training.datums`, if given.
        flipped: bool; tokens whose router disagrees with the replayed experts, written by an update if allocated.
        ledgers: global `LossLedger` of each minibatch; not checked if empty.
        names: names of the sequences in messages; may be empty.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    predecessors: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor
    sequence_ids: torch.Tensor
    rollout_logprobs: torch.Tensor
    slices: list[MicrobatchSlice]
    minibatch_sizes: list[int]
    old_logprobs: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    importance_weights: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    teacher_top_k: torch.Tensor | None = None
    teacher_hidden: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    update_logprobs: torch.Tensor | None = None
    update_entropy: torch.Tensor | None = None
    kept: PackedKeptSets | None = None
    replayed_routes: torch.Tensor | None = None
    routes_used: torch.Tensor | None = None
    flipped: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    ledgers: Sequence[LossLedger] = ()
    names: Sequence[str] = ()

    def name_sequence(self, index: int) -> str:
        """Return the name of a sequence for messages."""
        return self.names[index] if self.names else f"sequence {index}"

    def column(self, name: str) -> torch.Tensor:
        """Return a column (AssertionError if it has not been computed)."""
        values = getattr(self, name)
        assert values is not None, f"{name} is not known"
        return values

    def computed(self, column: torch.Tensor) -> torch.Tensor:
        """Select a microbatch's rows that the model computes (shared tokens once): [t, ...] -> [m, ...]."""
        rows = self.slices[0].computed
        return column if rows is None else column[rows]

    @property
    def num_computed(self) -> int:
        """Number of rows of a microbatch that the model computes (shared tokens once)."""
        rows = self.slices[0].computed
        return len(self.tokens if rows is None else rows)

    def find_kept(self, places: torch.Tensor) -> PackedKeptSets | None:
        """Return the token sets that truncated sampling kept for rows `places` (t: padding); `None` without it."""
        return None if self.kept is None else self.kept.pad(1)[places]

    def minibatch(self, index: int) -> TrainBatch:
        """Return the batch of optimizer step `index`, as views."""
        first = sum(self.minibatch_sizes[:index])
        part = self._part(self.slices[first : first + self.minibatch_sizes[index]])
        return replace(part, ledgers=self.ledgers[index : index + 1])

    def minibatches(self) -> Iterator[TrainBatch]:
        """Iterate over the optimizer steps."""
        return map(self.minibatch, range(len(self.minibatch_sizes)))

    def microbatches(self) -> list[TrainBatch]:
        """Return one batch per forward/backward, as views."""
        return [self._part([piece]) for piece in self.slices]

    def take_updates(self, other: TrainBatch) -> None:
        """Copy `update_logprobs`, `update_entropy`, `flipped` (if this batch has them) from one of the same rows."""
        if self.update_logprobs is not None and self.update_entropy is not None:
            assert other.update_logprobs is not None and other.update_entropy is not None, "it was given room as well"
            self.update_logprobs.copy_(other.update_logprobs)
            self.update_entropy.copy_(other.update_entropy)
        if self.flipped is not None and other.flipped is not None:
            self.flipped.copy_(other.flipped)

    def _part(self, slices: list[MicrobatchSlice]) -> TrainBatch:
        start, stop = slices[0].start, slices[-1].stop
        moved = [replace(s, start=s.start - start, stop=s.stop - start) for s in slices]
        part = self.map_tensors(lambda x: x[start:stop])
        kept = None if self.kept is None else self.kept[start:stop]
        return replace(part, kept=kept, slices=moved, minibatch_sizes=[len(slices)])

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TrainBatch:
        """Apply `function` to every tensor [t, ...], not to `slices` and `kept`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: function(x) for name, x in values.items() if isinstance(x, torch.Tensor)})


def expand_to_tokens(values: Sequence[float] | np.ndarray, batch: TrainBatch) -> torch.Tensor:
    """Expand one value per sequence to its tokens, [n] -> [t] float32; 0 on padding."""
    table = torch.tensor([*values, 0.0], dtype=torch.float32, device=batch.tokens.device)
    return table[batch.sequence_ids]


def build_train_batch(
    sequences: Mapping[int, Branch] | Sequence[Branch],
    sequence_weights: Sequence[float] | np.ndarray,
    minibatch_plans: Sequence[tuple[Sequence[int], MicrobatchPlan]],
    *,
    dp_rank: int | None,
    padding: Padding,
    device: torch.device,
    shared: SharedPrefixes | None = None,
) -> TrainBatch:
    """Pack the sequences of one DP rank.

    Args:
        sequences: at least this DP rank's branches.
        sequence_weights: loss weight per response token of each sequence.
        minibatch_plans: per minibatch, the indices of its sequences and their `plan_microbatches`.
        dp_rank: `None` outside the role, for an empty batch.
        shared: prefixes to pack once.
    """
    rows = Rows()
    slices: list[MicrobatchSlice] = []
    sizes: list[int] = []
    for indices, plan in minibatch_plans:
        mine = [] if dp_rank is None else plan[dp_rank]
        sizes.append(len(mine))
        for members in mine:
            chosen = [indices[i] for i in members]
            lengths = np.zeros(len(chosen), np.int64) if shared is None else shared.measure(chosen)
            for index, num_shared in zip(chosen, lengths.tolist(), strict=True):
                rows.append(sequences[index], index, num_shared)
            slices.append(rows.close_microbatch(padding, device))
    columns = rows.build_columns(device)
    batch = TrainBatch(**columns, loss_weights=columns["rollout_logprobs"], slices=slices, minibatch_sizes=sizes)
    return replace(batch, loss_weights=expand_to_tokens(sequence_weights, batch) * batch.loss_mask)
