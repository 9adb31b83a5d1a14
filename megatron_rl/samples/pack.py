# SPDX-License-Identifier: Apache-2.0
"""Packing of a step's sequences for one role: planned from the headers, before any token is fetched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.algorithms.aggregation import aggregate, build_ledger
from megatron_rl.algorithms.catalog import find_options
from megatron_rl.config.schema import AlgorithmConfig, LayoutConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch
from megatron_rl.samples.fetch import Holders
from megatron_rl.samples.microbatches import MicrobatchPlan, microbatch_sizes, packing_metrics, plan_microbatches
from megatron_rl.samples.prefix import SharedPrefixes, share_prompts
from megatron_rl.samples.table import Headers
from megatron_rl.types import Branch, LossLedger, RouteShape

if TYPE_CHECKING:
    from megatron_rl.config.batch_plan import BatchPlan
    from megatron_rl.config.sft_plan import SftPlan

FetchBranches = Callable[[Holders], Mapping[int, Branch]]


@dataclass(frozen=True)
class Packing:
    """Sequences of a step that a role needs on one rank, packed into a batch.

    Attributes:
        starts: [n] row of the first token after the prompt; 0 for remote sequences.
        lengths: [n] tokens after the prompt.
        versions: [t] int32, policy version that sampled each token; undefined elsewhere.
        turn_rewards: [t] float32, at the last token of each turn, if local turns have rewards.
        routes: [t, layers, choices] experts chosen by the engine, if returned.
        metrics: `packing/...`, averaged over minibatches; shares of padding over the step.
    """

    batch: TrainBatch
    holders: Holders
    starts: np.ndarray
    lengths: np.ndarray
    versions: torch.Tensor
    turn_rewards: torch.Tensor | None
    routes: torch.Tensor | None
    metrics: dict[str, float]

    def rows(self, sequences: np.ndarray) -> torch.Tensor:
        """Return the rows of the tokens after the prompt of local `sequences`, concatenated."""
        lengths = self.lengths[sequences]
        firsts = self.starts[sequences] - np.cumsum(lengths) + lengths
        return torch.from_numpy(np.repeat(firsts, lengths) + np.arange(lengths.sum())).to(self.batch.tokens.device)


@dataclass(frozen=True)
class Packer:
    """Builder of one role's `Packing` of a step.

    Attributes:
        model: the role's `LaidOutModel`.
        whole_prompts: keep all responses to a prompt in one microbatch.
    """

    model: Any
    config: LayoutConfig
    plan: BatchPlan | SftPlan
    algorithm: AlgorithmConfig
    device: torch.device
    whole_prompts: bool = False

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
        plans, metrics = self._plan(headers, shared)
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
            _place_routes(branches, ids, positions, self.device),
            metrics,
        )

    def _plan(
        self, headers: Headers, shared: SharedPrefixes | None
    ) -> tuple[list[tuple[range, MicrobatchPlan]], dict[str, float]]:
        """Return the sequences and the plan of each minibatch, and the metrics of all plans."""
        model, pad, budget = self.model, self._padding.find_size, self.config.max_tokens_per_microbatch
        ratio = model.attention_ratio
        lengths, firsts = headers["num_tokens"].tolist(), headers.first_of_rollout[:: self.plan.rollouts_per_minibatch]
        edges = np.diff(headers.rows["group"], prepend=-1, append=-1)  # other than 0 where a prompt's responses begin
        plans, metrics, sizes = [], [], []
        for start, stop in pairwise([*firsts.tolist(), len(headers)]):
            part, own = None if shared is None else shared.part(start, stop), lengths[start:stop]
            plan = plan_microbatches(
                own,
                dp_size=model.layout.dp_size,
                max_tokens=budget,
                count_multiple=model.microbatch_count_multiple,
                attention_ratio=ratio,
                shared=part,
                whole=np.flatnonzero(edges[start : stop + 1]) if self.whole_prompts else None,
            )
            plans.append((range(start, stop), plan))
            metrics.append(packing_metrics(plan, own, budget, pad=pad, attention_ratio=ratio, shared=part))
            sizes += microbatch_sizes(plan, own, part)
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
