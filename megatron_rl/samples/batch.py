# SPDX-License-Identifier: Apache-2.0
"""TrainBatch: the packed tensors of one DP rank for one step, cut into minibatches and microbatches; and its packing.

A role's `Packer` plans the packing from the headers, before any token is fetched.

All token-level tensors are flat `[t]` over the rank's microbatches in execution order, so per-token results of a role
are aligned by construction. A microbatch is padded to a multiple (sequence or context parallelism) or a bucket size,
and never empty; padding enters no loss and no metric.

With `step_mode` static or graph, microbatches have one of a few sizes (buckets): these steps have fixed shapes.

With shared prefixes (`microbatches.py`) every token after a prompt has a row, since each has its own loss; the model
computes shared tokens once. A segment that continues a prefix also attends to the keys of that prefix, wherever it is
packed, and continues its positions (`SegmentKeys`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron_rl.algorithms.losses import aggregate, build_ledger, find_options
from megatron_rl.config.schema import AlgorithmConfig, LayoutConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.parallel.vocab_parallel import PackedKeptSets
from megatron_rl.samples.microbatches import (
    MicrobatchPlan,
    SharedPrefixes,
    microbatch_sizes,
    packing_metrics,
    plan_microbatches,
    share_prompts,
)
from megatron_rl.samples.table import Headers, Holders
from megatron_rl.types import Branch, KeptSets, LossLedger, RouteShape

if TYPE_CHECKING:
    from megatron_rl.config.batch_plan import BatchPlan
    from megatron_rl.config.sft_plan import SftPlan
    from megatron_rl.samples.fixed_shapes import Buckets


@dataclass(frozen=True)
class SegmentKeys:
    """The keys that the queries of each segment attend to: the whole prefix, then the segment itself, causally."""

    index: torch.Tensor  # [k] int64, rows of the microbatch by segment; -1 on padding
    cu_seqlens: torch.Tensor  # [num_segments + 1] int32, boundaries in `index`
    max_seqlen: int  # most keys of a segment


def build_segment_keys(paths: Sequence[np.ndarray], lengths: Sequence[int], device: torch.device) -> SegmentKeys | None:
    """List the keys of every segment of a microbatch; `None` if no segment has a prefix.

    Args:
        paths: int64, per segment the rows of its prefix and then its own.
        lengths: own rows of each segment.
    """
    num_keys = [len(path) for path in paths]
    if num_keys == [*lengths]:
        return None
    cu_seqlens = move_to_device(np.cumsum([0, *num_keys], dtype=np.int32), device)
    return SegmentKeys(move_to_device(np.concatenate(paths), device), cu_seqlens, max(num_keys))


def move_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a tensor on the device; copies to a GPU are asynchronous."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def double_until(room: int, needed: int) -> int:
    """Double `room` until it holds `needed`."""
    while room < needed:
        room *= 2
    return room


def pad_segments(
    bounds: np.ndarray, keys: SegmentKeys | None, max_num_seqs: int, longest: int
) -> tuple[np.ndarray, SegmentKeys | None]:
    """Pad the bounds of a full microbatch's segments, and their keys, to a fixed number.

    Args:
        max_num_seqs: padded number of segments, doubled if exceeded.
        longest: the result's largest number of keys of a segment.
    """
    # One extra segment, so that there always is an empty one: it owns the padding of the keys.
    slots, stop = double_until(max_num_seqs, len(bounds)), int(bounds[-1])
    bounds = np.pad(bounds, (0, slots + 1 - len(bounds)), mode="edge")
    if keys is None:
        return bounds, None
    count, room = len(keys.index), slots + 1 - len(keys.cu_seqlens)
    num_keys = double_until(stop, count)
    assert room > 0 and keys.max_seqlen <= longest
    cu_seqlens = F.pad(keys.cu_seqlens, (0, room), value=count)
    cu_seqlens[-1] = num_keys
    return bounds, SegmentKeys(F.pad(keys.index, (0, num_keys - count), value=-1), cu_seqlens, longest)


@dataclass(frozen=True)
class Padding:
    """Rule by which microbatches are padded."""

    multiple: int  # without buckets, lengths are rounded up to a multiple of this
    buckets: Buckets | None = None  # fixed lengths to pad to instead
    max_seqlen: int | None = None  # with buckets, the largest number of tokens in a segment, padding segments included

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
            bounds, keys = pad_segments(bounds, keys, buckets.max_num_seqs, longest)
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
    """Rows [start, stop) of a microbatch; `cu_seqlens` and `keys` count computed rows."""

    start: int
    stop: int
    cu_seqlens: torch.Tensor  # [num_segments + 1] int32; a segment is a sequence, or its rest after a shared prefix
    max_seqlen: int  # longest segment; with buckets a common bound
    keys: SegmentKeys | None = None  # keys that each segment attends to; `None` without shared prefixes
    is_bucketed: bool = False  # whether all shapes are padded to `Buckets`
    # [m] int64 relative to `start`: for each computed row one of the rows that share it, preferably a loss token.
    # `None` if all rows are computed.
    computed: torch.Tensor | None = None


@dataclass(frozen=True)
class TrainBatch:
    """Packed tensors of one DP rank, [t] (one row per token) unless noted; position 0 of each sequence is masked."""

    tokens: torch.Tensor
    position_ids: torch.Tensor  # int64, in the sequence including a shared prompt
    predecessors: torch.Tensor  # int64, the computed row whose hidden state predicts this token; unused at position 0
    loss_mask: torch.Tensor
    # Float32; `sum(loss_weights * loss)` over all microbatches and DP ranks of a minibatch is its loss.
    loss_weights: torch.Tensor
    sequence_ids: torch.Tensor  # int64, index of the sequence (a branch of a rollout) in the step; -1 on padding
    rollout_logprobs: torch.Tensor
    slices: list[MicrobatchSlice]
    minibatch_sizes: list[int]
    # old_logprobs, sum_pi_squared, ref_logprobs, advantages, values, returns, importance_weights: float32, `None` until
    # computed.
    old_logprobs: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    importance_weights: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None  # float32, mean of the teachers, if added to the advantages
    # [t, 2, k + 1] float32, `compute_linear_top_k` of the teacher, if the loss uses it.
    teacher_top_k: torch.Tensor | None = None
    teacher_hidden: torch.Tensor | None = None  # [t, h of the teacher] float32, likewise
    chosen: torch.Tensor | None = None  # bool, tokens that the policy loss treats specially (clip_cov, kl_cov)
    rollout_rows: torch.Tensor | None = None  # int64, if losses take rollouts as sequences; see `PolicyLossInputs`
    # update_logprobs, update_entropy: float32, at the last optimizer step that used the token (NaN before); written by
    # the actor's last pipeline stage if allocated.
    update_logprobs: torch.Tensor | None = None
    update_entropy: torch.Tensor | None = None
    # Token sets that truncated sampling drew the tokens from; `None` means the whole vocabulary.
    kept: PackedKeptSets | None = None
    replayed_routes: torch.Tensor | None = None  # [t, layers, choices] experts that the actor replays; see `RouteShape`
    # Same shape; experts chosen on this rank's rows and layers, written by a forward pass if allocated.
    routes_used: torch.Tensor | None = None
    # Bool; tokens whose router disagrees with the replayed experts, written by an update if allocated.
    flipped: torch.Tensor | None = None
    targets: torch.Tensor | None = None  # [t] or [t, k] int64, predicted instead of `tokens`, if given
    columns: torch.Tensor | None = None  # [t, c] float32, inputs of a loss over `training.datums`, if given
    ledgers: Sequence[LossLedger] = ()  # global `LossLedger` of each minibatch; not checked if empty
    names: Sequence[str] = ()  # names of the sequences in messages; may be empty

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


FetchBranches = Callable[[Holders], Mapping[int, Branch]]


@dataclass(frozen=True)
class Packing:
    """Sequences of a step that a role needs on one rank, packed into a batch."""

    batch: TrainBatch
    holders: Holders
    starts: np.ndarray  # [n] row of the first token after the prompt; 0 for remote sequences
    lengths: np.ndarray  # [n] tokens after the prompt
    versions: torch.Tensor  # [t] int32, policy version that sampled each token; undefined elsewhere
    turn_rewards: torch.Tensor | None  # [t] float32, at the last token of each turn, if local turns have rewards
    turn_states: torch.Tensor | None  # [t] int64, at the first token of each turn, see `Branch`
    routes: torch.Tensor | None  # [t, layers, choices] experts chosen by the engine, if returned
    metrics: dict[str, float]  # `packing/...`, averaged over minibatches; shares of padding over the step

    def rows(self, sequences: np.ndarray) -> torch.Tensor:
        """Return the rows of the tokens after the prompt of local `sequences`, concatenated."""
        lengths = self.lengths[sequences]
        firsts = self.starts[sequences] - np.cumsum(lengths) + lengths
        return torch.from_numpy(np.repeat(firsts, lengths) + np.arange(lengths.sum())).to(self.batch.tokens.device)


@dataclass(frozen=True)
class Packer:
    """Builder of one role's `Packing` of a step."""

    model: Any  # the role's `LaidOutModel`
    config: LayoutConfig
    plan: BatchPlan | SftPlan
    algorithm: AlgorithmConfig
    device: torch.device
    whole_prompts: bool = False  # keep all responses to a prompt in one microbatch

    @property
    def key(self) -> Hashable:
        """Cache key; roles with equal keys share one packing."""
        model, config = self.model, self.config
        layout = (model.layout, model.pad_multiple, model.buckets)
        return (*layout, config.max_tokens_per_microbatch, config.share_prompts)

    def pack(self, headers: Headers, fetch_branches: FetchBranches) -> Packing:
        """Plan all DP replicas' microbatches, then fetch and pack the sequences of this replica; collective."""
        shared = None
        if self.config.share_prompts == "tree":
            from megatron_rl.samples.branches import share_branches

            shared = share_branches(headers.rows)
        elif self.config.share_prompts:
            shared = share_prompts(number_prompts(headers), headers["num_prompt_tokens"])
        has_whole = self.algorithm.ratio_by == "rollout" and len(headers) > len(headers.rollouts)
        if has_whole:
            from megatron_rl.samples.branches import check_whole, count_rows

            check_whole(headers.rows, shared, self.config.max_tokens_per_microbatch)
        plans, metrics = self._plan(headers, shared, "rollout" if has_whole else "group" if self.whole_prompts else "")
        replica_of = np.full(len(headers), -1)
        for indices, plan in plans:
            for replica, microbatches in enumerate(plan):
                replica_of[[indices[i] for members in microbatches for i in members]] = replica
        holders = Holders(replica_of, list_replicas(self.model.layout))
        branches = {
            index: branch if headers.rows["in_loss"][index] else replace(branch, sampled=np.zeros_like(branch.sampled))
            for index, branch in fetch_branches(holders).items()
        }
        weights, ledgers = self._weigh(headers)
        batch = build_train_batch(
            branches,
            weights,
            plans,
            dp_rank=self.model.dp_rank,
            device=self.device,
            padding=self._padding,
            shared=shared,
        )
        batch = replace(batch, ledgers=ledgers, names=headers.list_titles())
        if has_whole:
            owners = np.append(headers["rollout"], -1)[batch.sequence_ids.cpu().numpy()]
            rows = count_rows(owners, [(part.start, part.stop) for part in batch.slices])
            batch = replace(batch, rollout_rows=rows.to(self.device))
        ids, positions = batch.sequence_ids.cpu().numpy(), batch.position_ids.cpu().numpy()
        rows = np.flatnonzero((ids >= 0) & (positions == headers["num_prompt_tokens"][ids]))
        starts = np.zeros(len(headers), np.int64)
        starts[ids[rows]] = rows
        versions = _place(branches, "versions", starts, batch)
        return Packing(
            batch,
            holders,
            starts,
            headers.num_response_tokens,
            torch.zeros_like(batch.tokens, dtype=torch.int32) if versions is None else versions,
            _place(branches, "rewards", starts, batch),
            _place(branches, "states", starts, batch),
            _place_routes(branches, ids, positions, self.device),
            metrics,
        )

    def _plan(
        self, headers: Headers, shared: SharedPrefixes | None, whole: str
    ) -> tuple[list[tuple[range, MicrobatchPlan]], dict[str, float]]:
        """Return the sequences and the plan of each minibatch, and the metrics of all plans.

        Sequences with one value of the field `whole`, if any, stay together.
        """
        model, pad, budget = self.model, self._padding.find_size, self.config.max_tokens_per_microbatch
        ratio = model.attention_ratio
        lengths, firsts = headers["num_tokens"].tolist(), headers.first_of_rollout[:: self.plan.rollouts_per_minibatch]
        edges = np.diff(headers.rows[whole or "group"], prepend=-1, append=-1)  # other than 0 where one begins
        plans, metrics, sizes = [], [], list[int]()
        for start, stop in pairwise([*firsts.tolist(), len(headers)]):
            part, own = None if shared is None else shared.part(start, stop), lengths[start:stop]
            plan = plan_microbatches(
                own,
                dp_size=model.layout.dp_size,
                max_tokens=budget,
                count_multiple=model.microbatch_count_multiple,
                attention_ratio=ratio,
                shared=part,
                whole=np.flatnonzero(edges[start : stop + 1]) if whole else None,
            )
            plans.append((range(start, stop), plan))
            metrics.append(packing_metrics(plan, own, budget, pad=pad, attention_ratio=ratio, shared=part))
            sizes += microbatch_sizes(plan, own, part) if model.buckets else []
        means = {key: float(np.mean([m[key] for m in metrics])) for key in metrics[0]}
        if model.buckets:
            from megatron_rl.samples.fixed_shapes import padding_metrics

            means |= padding_metrics((size, pad(size)) for size in sizes)
        return plans, means

    def _weigh(self, headers: Headers) -> tuple[np.ndarray, list[LossLedger]]:
        mode, constant = self.algorithm.loss_agg_mode, self.algorithm.loss_scale_factor or self.plan.max_response_length
        in_loss, size = headers.sum_per_rollout(headers.num_loss_tokens), self.plan.rollouts_per_minibatch
        options = find_options(self.algorithm, mode)
        parts = [in_loss[first : first + size].tolist() for first in range(0, len(in_loss), size)]
        weights = np.concatenate([aggregate(mode, part, constant, options).weights for part in parts])
        return weights[headers.rows["rollout"]], [build_ledger(mode, part, constant, options) for part in parts]

    @property
    def _padding(self) -> Padding:
        return Padding(self.model.pad_multiple, self.model.buckets, self.plan.longest_sequence)


def number_prompts(headers: Headers) -> np.ndarray:
    """Number the runs of adjacent sequences with equal prompt tokens and prompt routes, [n].

    Branches of one rollout can keep different parts of the prompt. Different routes (chosen experts) get different
    numbers, because the actor replays them.
    """
    names = ("prompt_id", "num_prompt_tokens", "prompt_routes")
    return np.cumsum(np.any([np.diff(headers.rows[name], prepend=headers.rows[name][:1]) for name in names], axis=0))


def list_replicas(layout: ParallelLayout) -> np.ndarray:
    """Return the ranks of each DP replica, [dp_size, pp * cp * tp]."""
    ranks = np.array(layout.ranks).reshape(layout.pp_size, layout.dp_size, -1)
    return ranks.transpose(1, 0, 2).reshape(layout.dp_size, -1)


def _place(branches: Mapping[int, Branch], name: str, starts: np.ndarray, batch: TrainBatch) -> torch.Tensor | None:
    """Pack field `name` of the tokens after the prompts into [t, ...], 0 elsewhere; `None` if all branches lack it."""
    values: np.ndarray | None = None
    for index, branch in branches.items():
        found = getattr(branch, name)
        if found is None:
            continue
        found = found[branch.num_prompt_tokens :]
        values = np.zeros(len(batch.tokens), found.dtype) if values is None else values
        values[starts[index] : starts[index] + len(found)] = found
    return None if values is None else torch.from_numpy(values).to(batch.tokens.device)


def _place_routes(
    branches: Mapping[int, Branch], ids: np.ndarray, positions: np.ndarray, device: torch.device
) -> torch.Tensor | None:
    known = {index: branch.routes for index, branch in branches.items() if branch.routes is not None}
    if not known:
        return None
    routes = RouteShape.of(next(iter(known.values()))).unknown(len(ids))
    bounds = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    for start, stop in pairwise(bounds):
        if (found := known.get(int(ids[start]))) is not None:
            routes[start:stop] = found[positions[start:stop]]
    return torch.from_numpy(routes).to(device)
