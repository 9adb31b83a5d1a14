# SPDX-License-Identifier: Apache-2.0
"""Scored sequences of a step (`Experience`), and what is computed of them: KL, advantages, metrics, logged rows.

Every rank has all headers. Tokens stay on the ranks that generated them, and roles fetch their share.

    samples.values = critic.compute_values(samples)     # a column in the critic's packing
    samples.read(actor's packer, ["values"])            # the actor fetches it into its own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms import advantages as estimation
from megatron_rl.algorithms.catalog import CHOOSES_TOKENS
from megatron_rl.algorithms.losses import PolicyLossInputs, compute_kl, find_clipped, has_importance_weights
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.observability.metrics import NUM_BEST, TokenTexts, as_numbers, token_fields
from megatron_rl.parallel.collectives import reduce_scalars
from megatron_rl.rewards.answers import RESTATES
from megatron_rl.samples.batch import Packer, Packing, TrainBatch
from megatron_rl.samples.table import (
    FINISH_REASONS,
    Fetched,
    Headers,
    Holders,
    Payload,
    Read,
    build_headers,
    fetch,
    fetch_branches,
    index_branches,
    join_headers,
    plan_fetch,
    split_values,
)
from megatron_rl.types import SERVICE_FAILURES, Branch, Prompt, Rollout, RouteShape, Turn, UserError


@dataclass(frozen=True)
class Column:
    """Per-token result of a role: [t, ...] in the rows of `packing`, valid after the prompts."""

    values: torch.Tensor
    packing: Packing
    holders: Holders | None = None  # ranks with the values; `None` for all ranks of `packing`


_PER_ROLLOUT = ("mismatch", "lessons", "kl_per_rollout")


class _Slot:
    """Descriptor of an `Experience` column that is set once; `None` before."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, samples: Experience, owner: type | None = None) -> Any:
        return samples.columns.get(self._name)

    def __set__(self, samples: Experience, value: Any) -> None:
        if self._name in samples.columns:
            raise UserError(
                f"samples.{self._name} is set already",
                source=f"samples.{self._name}",
                expected="one assignment per sample",
                hint="sample again: to run a cell of a notebook again, run the cell with policy.sample first",
            )
        if self._name not in _PER_ROLLOUT and isinstance(value, Sequence | float | np.ndarray | torch.Tensor):
            check_kind(value, Column, f"samples.{self._name}", "a column, such as policy.expand(samples, values)")
        if value is not None:
            samples.columns[self._name] = value


class Experience:
    """Scored sequences of a step: all headers, the tokens held on this rank, and columns (results of roles).

    Args:
        prompts: one per group.
        baselines: [num_groups] reward of the greedy response (ReMax), NaN if it failed.
        metrics: metrics of the rollout phase.
    """

    old_logprobs = _Slot()
    sum_pi_squared = _Slot()
    ref_logprobs = _Slot()
    values = _Slot()
    importance_weights = _Slot()
    mismatch = _Slot()
    advantages = _Slot()
    returns = _Slot()
    chosen = _Slot()
    lessons = _Slot()
    teacher_logprobs = _Slot()
    teacher_top_k = _Slot()
    teacher_hidden = _Slot()
    kl_per_rollout = _Slot()
    update_logprobs = _Slot()
    update_entropy = _Slot()
    replayed_routes = _Slot()

    def __init__(
        self,
        headers: Headers,
        prompts: Sequence[Prompt],
        payload: Payload,
        group: dist.ProcessGroup,
        *,
        baselines: np.ndarray | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self.headers, self.prompts, self.baselines = headers, prompts, baselines
        self.metrics = dict(metrics or {})
        self.columns: dict[str, Any] = {}  # by name, each set once
        self._payload, self._group = payload, group
        self._holders = Holders(headers["holder"], payload.ranks)
        self.num_bytes = payload.num_bytes  # received by this rank for this step so far
        self._packings: dict[Hashable, Packing] = {}
        self._copies: dict[tuple[str, Hashable], torch.Tensor] = {}

    def __repr__(self) -> str:
        rewards, tokens = self.headers.rollouts["reward"], int(self.headers.num_response_tokens.sum())
        return (
            f"<{len(rewards)} samples of {len(self.prompts)} prompts: {tokens} response tokens, mean reward "
            f"{rewards.mean():.4g}; texts: fetch_rollouts; columns: {', '.join(self.columns) or 'none yet'}>"
        )

    def __getitem__(self, index: Any) -> None:
        """Refuse items (UserError): tokens are on the ranks that generated them, and all ranks fetch them together."""
        check_kind(self, (), f"samples[{index!r}]", "samples.fetch_rollouts([0], run.inputs.tokenizer.decode)")

    def pack(self, packer: Packer) -> Packing:
        """Return the packing of a role; built by the first call, which is collective."""
        if packer.key not in self._packings:
            self._packings[packer.key] = packer.pack(self.headers, self._fetch_branches)
        return self._packings[packer.key]

    def read(self, packer: Packer, names: Sequence[str] = ()) -> TrainBatch:
        """Return a role's batch with the named columns that exist; collective if one must be fetched."""
        packing = self.pack(packer)
        columns = {name: self._bring(name, packing, packer.key) for name in names if name in self.columns}
        return replace(packing.batch, **columns)

    def fetch_rollouts(
        self,
        chosen: Sequence[int],
        decode: Callable[[list[int]], str],
        columns: Mapping[str, Column] | None = None,
        *,
        on_all: bool = False,
    ) -> list[tuple[Rollout, dict[str, np.ndarray]]]:
        """Fetch whole rollouts, with `columns` of their loss tokens, to rank 0 or all ranks; collective.

        Args:
            chosen: rollout indices, ascending.
            decode: response tokens -> text.
        """
        bounds = [*self.headers.first_of_rollout.tolist(), len(self.headers)]
        parts = [range(bounds[number], bounds[number + 1]) for number in chosen]
        wanted = np.where(np.isin(self.headers["rollout"], list(chosen)), 0, -1)
        readers = Holders(wanted, np.arange(self._group.size() if on_all else 1)[None])
        branches = self._fetch_branches(readers)
        values: dict[str, dict[int, np.ndarray]] = {}
        for name, column in (columns or {}).items():
            found = self._fetch_column(column, readers)
            values[name] = split_values(found.columns["values"], found.sequences, self.headers.num_response_tokens)
        result = []
        for part in (part for part in parts if part[0] in branches):
            masks = []
            for i in part:
                mask = branches[i].sampled & self.headers.rows["in_loss"][i]
                mask[:1] = False
                masks.append(mask[branches[i].num_prompt_tokens :])
            kept = {
                name: np.concatenate([pieces[i][mask] for i, mask in zip(part, masks, strict=True)])
                for name, pieces in values.items()
            }
            result.append((self._restore(part[0], [branches[i] for i in part], decode), kept))
        return result

    @property
    def rewards(self) -> np.ndarray:
        """Reward of each rollout, [num_rollouts] float64; rollouts of one prompt are adjacent."""
        return self.headers.rollouts["reward"]

    def measure_bytes(self) -> dict[str, float]:
        """Return `samples/bytes_per_rank`: bytes received, maximum over ranks; collective."""
        found = {"samples/bytes_per_rank": float(self.num_bytes)}
        return reduce_scalars(found, dist.ReduceOp.MAX, self._group, torch.device("cpu"))

    @classmethod
    def join(cls, parts: Sequence[Experience], groups: Sequence[int], metrics: Mapping[str, float]) -> Experience:
        """Join groups of several generations, without columns, in the given order.

        Args:
            groups: indices counted over the concatenated parts.
        """
        headers, order = join_headers([part.headers for part in parts]).select_groups(groups)
        prompts = [prompt for part in parts for prompt in part.prompts]
        places = {int(old): new for new, old in enumerate(order)}
        starts = np.cumsum([0, *(len(part.headers) for part in parts)]).tolist()
        branches = {
            places[start + index]: branch
            for start, part in zip(starts, parts, strict=False)
            for index, branch in part._payload.branches.items()
            if start + index in places
        }
        num_bytes = sum(part.num_bytes for part in parts)
        has_kept = any(part._payload.has_kept for part in parts)
        payload = replace(parts[0]._payload, branches=branches, num_bytes=num_bytes, has_kept=has_kept)
        return cls(headers, [prompts[group] for group in groups], payload, parts[0]._group, metrics=metrics)

    def select(self, groups: Sequence[int]) -> tuple[Experience, np.ndarray]:
        """Return groups, in ascending order, as an experience, and the indices of their sequences in this one, [k].

        The result has no columns, except if all groups are chosen: then it is this experience itself.
        """
        if len(groups) == len(self.prompts):
            return self, np.arange(len(self.headers))
        return Experience.join([self], groups, {}), self.headers.select_groups(groups)[1]

    def take(self, column: Column, order: np.ndarray, part: Experience, packer: Packer) -> torch.Tensor:
        """Copy a column of the selection `part` to a role's rows of this experience, [t, ...], else NaN; collective.

        Args:
            order, part: results of `select`.
        """
        packing = self.pack(packer)
        if column.packing is packing:
            return column.values
        found = part._fetch_column(column, Holders(packing.holders.replica_of[order], packing.holders.ranks))
        self.num_bytes += 0 if part is self else found.num_bytes
        values = column.values.new_full((len(packing.batch.tokens), *column.values.shape[1:]), torch.nan)
        values[packing.rows(order[found.sequences])] = found.columns["values"]
        return values

    def rescore(self, rewards: np.ndarray, name: str, scores: np.ndarray) -> Experience:
        """Return the same samples, without columns, with new rewards and a further component, [num_rollouts] each."""
        payload = replace(self._payload, num_bytes=self.num_bytes)
        return Experience(self.headers.rescore(rewards, name, scores), self.prompts, payload, self._group)

    def add_baselines(self, greedy: Experience) -> None:
        """Set the baselines to the rewards of the greedy responses; NaN for prompts without one."""
        self.baselines = np.where(greedy.headers.rollouts.has_reward, greedy.rewards, np.nan)
        self.num_bytes += greedy.num_bytes

    def _fetch_branches(self, destination: Holders) -> dict[int, Branch]:
        first = Holders(self._holders.replica_of, self._holders.ranks[:, :1])
        fetches = [partial(self._fetch, source, destination) for source in (self._holders, first)]
        return fetch_branches(self._payload, self.headers, *fetches)

    def _bring(self, name: str, packing: Packing, key: Hashable) -> torch.Tensor:
        column: Column = self.columns[name]
        if column.packing is packing:
            return column.values
        if (name, key) not in self._copies:
            found = self._fetch_column(column, packing.holders)
            copy = column.values.new_zeros(len(packing.batch.tokens), *column.values.shape[1:])
            copy[packing.rows(found.sequences)] = found.columns["values"]
            self._copies[name, key] = copy
        return self._copies[name, key]

    def _fetch_column(self, column: Column, destination: Holders) -> Fetched:
        size = column.values.shape[1:]

        def read(_: str, sequences: np.ndarray) -> torch.Tensor:
            return column.values[column.packing.rows(sequences)].flatten()

        source, lengths = column.holders or column.packing.holders, self.headers.num_response_tokens * size.numel()
        found = self._fetch(source, destination, lengths, {"values": column.values.dtype}, read)
        return replace(found, columns={"values": found.columns["values"].view(-1, *size)})

    def _fetch(
        self, source: Holders, destination: Holders, lengths: np.ndarray, dtypes: Mapping[str, torch.dtype], read: Read
    ) -> Fetched:
        found = fetch(plan_fetch(self._group.rank(), source, destination), lengths, dtypes, read, self._group)
        self.num_bytes += found.num_bytes
        return found

    def _restore(self, index: int, branches: list[Branch], decode: Callable[[list[int]], str]) -> Rollout:
        row, turns = self.headers.rows[index], find_runs(branches)
        if not self._payload.has_episodes:
            turns = [Turn(0, turns[0].start, turns[-1].stop)]
        rollout = Rollout(
            self.prompts[row["group"]],
            int(row["sample_index"]),
            branches,
            turns,
            FINISH_REASONS[row["finish_reason"]],
            reward=float(row["reward"]),
            reward_components=self.headers.reported(index),
        )
        return replace(rollout, response=decode(rollout.answer_tokens.tolist()))


def replicate(
    rollouts: Sequence[tuple[int, Rollout]],
    prompts: Sequence[Prompt],
    group: dist.ProcessGroup,
    *,
    mask_truncated: bool = False,
    baselines: np.ndarray | None = None,
) -> Experience:
    """Build the experience of rollouts that exist on every rank: fine-tuning examples or recorded rollouts.

    `rollouts` are pairs (prompt index, rollout), sorted. `mask_truncated` excludes truncated responses from the loss.
    """
    headers = build_headers(rollouts, holder=0, mask_truncated=mask_truncated)
    has_kept = any(branch.kept is not None for _, rollout in rollouts for branch in rollout.branches)
    found = [branch.routes for _, rollout in rollouts for branch in rollout.branches if branch.routes is not None]
    route_shape = RouteShape.of(found[0]) if found else None
    branches, ranks = index_branches(rollouts, headers), np.arange(group.size())[None]
    payload = Payload(branches, ranks, has_kept=has_kept, route_shape=route_shape)
    return Experience(headers, prompts, payload, group, baselines=baselines)


@dataclass(frozen=True)
class Minibatch:
    """The part of an Experience that one optimizer step trains on."""

    samples: Experience
    index: int


def check_kind(value: Any, kind: type | tuple[type, ...], call: str, expected: str = "") -> None:
    """Refuse an argument of a primitive that is of another type (UserError)."""
    if not isinstance(value, kind):
        expected = expected or f"{getattr(kind, '__name__', kind)}, of policy.sample or policy.minibatches"
        hint = "docs/primitives.md shows the order of the calls"
        raise UserError(f"a {type(value).__name__}: {value!r:.80}", source=call, expected=expected, hint=hint)


def find_runs(branches: Sequence[Branch]) -> list[Turn]:
    """Return one turn per run of consecutive sampled tokens, branch by branch."""
    turns = []
    for index, branch in enumerate(branches):
        edges = np.flatnonzero(np.diff(branch.sampled, prepend=False, append=False))
        turns += [Turn(index, int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
    return turns


def measure_kl(headers: Headers, batch: TrainBatch, kl_type: str, group: dist.ProcessGroup) -> np.ndarray:
    """Compute the KL of each rollout, summed over its loss tokens, [num_rollouts]; collective, equal on every rank."""
    kl = _compute_kl(batch, kl_type).double()
    per_rollout = torch.zeros(len(headers.rollouts) + 1, dtype=torch.float64, device=kl.device)
    per_rollout.index_add_(0, find_rollouts(headers, batch), kl)  # padding (-1) is added to the last entry
    dist.all_reduce(per_rollout, group=group)
    return per_rollout[:-1].cpu().numpy()


def _compute_kl(batch: TrainBatch, kl_type: str) -> torch.Tensor:
    kl = compute_kl(batch.column("old_logprobs"), batch.column("ref_logprobs"), kl_type)
    return torch.where(batch.loss_mask, kl, 0.0)


def find_rollouts(headers: Headers, batch: TrainBatch) -> torch.Tensor:
    """Return the rollout index of each token, [t] int64; padding has the number of rollouts as index."""
    table = torch.from_numpy(np.append(headers["rollout"], len(headers.rollouts)).astype(np.int64))
    return table.to(batch.sequence_ids.device)[batch.sequence_ids]


def compute_advantages(
    samples: Experience,
    batch: TrainBatch,
    algorithm: AlgorithmConfig,
    group: dist.ProcessGroup,
    turn_rewards: torch.Tensor | None = None,
    turn_states: torch.Tensor | None = None,
    weights: Mapping[str, float] = {},
) -> estimation.Advantages:
    """Compute the advantages (with a critic, also the returns) of this rank's tokens; collective.

    Args:
        batch: with old log-probs, and reference log-probs and values if there are any.
        turn_rewards, turn_states: see `Packing`.
        weights: see `AdvantageInputs`.
    """
    headers = samples.headers
    rewards = samples.rewards
    kl, scores = None, rewards
    if samples.kl_per_rollout is not None and algorithm.kl_in == "reward":
        kl = _compute_kl(batch, algorithm.kl_type)
        scores = rewards - algorithm.kl_coef * samples.kl_per_rollout
    inputs = estimation.AdvantageInputs(
        scores=scores,
        group_sizes=headers.group_sizes,
        baselines=samples.baselines,
        token_rewards=estimation.compute_token_rewards(
            headers["reward"] - headers["earlier_reward"],
            kl,
            algorithm.kl_coef,
            batch.loss_mask,
            batch.sequence_ids,
            turn_rewards,
        ),
        values=batch.values,
        loss_mask=batch.loss_mask,
        sequence_ids=batch.sequence_ids,
        rollout_ids=find_rollouts(headers, batch),
        group=group,
        old_logprobs=batch.old_logprobs,
        sum_pi_squared=batch.sum_pi_squared,
        importance_weights=batch.importance_weights,
        components=dict(zip(headers.names, headers.rollouts.components.T, strict=True)),
        has_reward=headers.rollouts.has_reward,
        weights=weights,
        turn_rewards=turn_rewards,
        turn_states=turn_states,
    )
    found = estimation.compute_advantages(inputs, algorithm)
    if batch.teacher_logprobs is None:
        return found
    lesson = algorithm.distillation.coef * (batch.teacher_logprobs - batch.column("old_logprobs"))
    return replace(found, advantages=found.advantages + torch.where(batch.loss_mask, lesson, 0.0))


def sum_mismatch(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[dict[str, float], float]:
    """Sum this rank's terms of the mismatch metrics over its tokens in the loss.

    Returns:
        Sums, to be added over DP ranks for `finish_mismatch`, and the maximum of |old_logprobs - rollout_logprobs|.
    """
    d = (old_logprobs - rollout_logprobs)[loss_mask].double()
    w = d.exp()
    sums = {"abs": d.abs().sum(), "k3": (torch.expm1(d) - d).sum(), "w": w.sum(), "w2": w.square().sum()}
    maximum = float(d.abs().max()) if len(d) else 0.0
    return {**{k: float(v) for k, v in sums.items()}, "tokens": float(d.numel())}, maximum


def finish_mismatch(sums: dict[str, float], maximum: float) -> dict[str, float]:
    """Compute the metrics `mismatch/*` from the sums and the maximum over all ranks.

    With d = old_logprobs - rollout_logprobs and w = exp(d), k3 is the mean of w - 1 - d, an estimate of
    KL(rollout || trainer), and the effective sample size (sum w)^2 / (N sum w^2), 1 if all weights are equal.
    """
    tokens = max(sums["tokens"], 1.0)
    return {
        "mismatch/max": maximum,
        "mismatch/mean": sums["abs"] / tokens,
        "mismatch/k3": sums["k3"] / tokens,
        "mismatch/effective_sample_size": sums["w"] ** 2 / (tokens * sums["w2"]) if sums["w2"] else 1.0,
    }


def correct_mismatch(
    headers: Headers, batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Measure the mismatch between `old_logprobs` and the engine's log-probs; collective.

    Returns:
        Correcting importance weights [t] or `None`, and the metrics `mismatch/...`.
    """
    device = batch.tokens.device
    sums, maximum = sum_mismatch(batch.column("old_logprobs"), batch.rollout_logprobs, batch.loss_mask)
    sums = reduce_scalars(sums, dist.ReduceOp.SUM, group, device)
    maxima = reduce_scalars({"max": maximum}, dist.ReduceOp.MAX, group, device)
    metrics = finish_mismatch(sums, maxima["max"])
    if not has_importance_weights(algorithm):
        return None, metrics
    from megatron_rl.samples.corrections import weigh_tokens

    weights, further = weigh_tokens(headers, batch, find_rollouts(headers, batch), algorithm, group)
    return weights, metrics | further


def choose_tokens(batch: TrainBatch, algorithm: AlgorithmConfig, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Return the tokens that the loss clip_cov or kl_cov treats specially, `None` for other losses; collective."""
    if algorithm.policy_loss not in CHOOSES_TOKENS:
        return None
    from megatron_rl.algorithms import policy_losses

    return policy_losses.choose_tokens(loss_inputs(batch), algorithm, group)


def loss_inputs(batch: TrainBatch) -> PolicyLossInputs:
    """Build the inputs of the policy loss before the update."""
    old = batch.column("old_logprobs")
    given = (old, old, batch.column("advantages"), batch.loss_mask, batch.sequence_ids, batch.chosen)
    return PolicyLossInputs(*given, rollout_rows=batch.rollout_rows)


def describe_rollouts(headers: Headers) -> dict[str, float]:
    """Compute the reward and length metrics of one step, over its (rewarded) rollouts; `tokens/...` are sums."""
    rollouts = headers.rollouts
    lengths, prompts = headers.sum_per_rollout(headers.num_response_tokens), rollouts["num_prompt_tokens"]
    groups, everywhere = headers.split_rewarded(rollouts["reward"]), np.ones(len(rollouts), bool)
    components = {
        name: np.nan_to_num(rollouts.component(name))[everywhere if name == SERVICE_FAILURES else rollouts.has_reward]
        for name in sorted(headers.names)
    }
    return {
        "reward/mean": _mean(np.concatenate(groups)),
        **{f"reward/{name}": value for name, value in _spread(np.concatenate(groups)).items()},
        f"reward/{RESTATES}": 0.0,  # default, replaced below if a rollout has the component
        **{f"reward/{name}": _mean(values) for name, values in components.items()},
        "reward/uninformative_groups": float(np.mean([not len(rewards) or np.ptp(rewards) == 0 for rewards in groups])),
        "response/truncated": float(np.mean(rollouts["finish_reason"] == FINISH_REASONS.index("length"))),
        **{f"response/length_{name}": value for name, value in _spread(lengths, "mean", "min", "max").items()},
        **{f"prompt/length_{name}": value for name, value in _spread(prompts, "mean", "min", "max").items()},
        "tokens/prompt": float(prompts.sum()),
        "tokens/response": float(headers.num_response_tokens.sum()),
    }


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _spread(values: np.ndarray, *names: str) -> dict[str, float]:
    return {name: float(getattr(np, name)(values)) for name in names or ("std", "min", "max") if len(values)}


def describe_tokens(
    columns: Mapping[str, torch.Tensor | None], loss_mask: torch.Tensor, group: dist.ProcessGroup
) -> dict[str, float]:
    """Compute `<name>/mean`, `std`, `min` and `max` of columns over the tokens in the loss; collective.

    Args:
        columns: [t] of this rank by name; `None` is left out.
    """
    sums, ends, ops = {}, {}, dist.ReduceOp
    for name, values in columns.items():
        if values is not None:
            kept = values[loss_mask].double()
            powers = len(kept), *torch.stack([kept.sum(), kept @ kept]).tolist()
            sums |= {f"{name}/{power}": value for power, value in enumerate(powers)}
            low, high = torch.stack(kept.aminmax()).tolist() if len(kept) else (math.inf, -math.inf)
            ends |= {f"{name}/min": -low, f"{name}/max": high}
    sums, ends = (reduce_scalars(x, op, group, loss_mask.device) for x, op in ((sums, ops.SUM), (ends, ops.MAX)))
    found = {}
    for name in (name for name, values in columns.items() if values is not None and sums[f"{name}/0"]):
        count, total, squares = (sums[f"{name}/{power}"] for power in range(3))
        mean = total / count
        found |= {f"{name}/mean": mean, f"{name}/std": math.sqrt(max(squares / count - mean * mean, 0.0))}
        found |= {f"{name}/min": -ends[f"{name}/min"], f"{name}/max": ends[f"{name}/max"]}
    return found


def describe_staleness(headers: Headers, version: int, optimizer_steps: int) -> dict[str, float]:
    """Compute the staleness of the rollouts in steps of the main loop, from the first policy version of each.

    Args:
        optimizer_steps: optimizer steps per step of the main loop.
    """
    staleness = (version - headers.rollouts["first_version"]) / optimizer_steps
    return {"schedule/staleness_mean": float(staleness.mean()), "schedule/staleness_max": float(staleness.max())}


def describe_sources(headers: Headers, sources: Sequence[str]) -> dict[str, float]:
    """Compute the mean reward of each data source, if a step has more than one.

    Args:
        sources: [num_groups].
    """
    names, groups = np.array(sources), headers.split_rewarded(headers.rollouts["reward"])
    names, rewards = np.repeat(names, [len(group) for group in groups]), np.concatenate(groups)
    known = sorted(set(sources))
    return {f"reward/{name}/mean": _mean(rewards[names == name]) for name in known} if len(known) > 1 else {}


def describe_distributions(headers: Headers, batch: TrainBatch) -> dict[str, np.ndarray]:
    """Return distributions of one step, for histograms.

    Response length and reward cover all (rewarded) rollouts; advantage and log-prob gap (trainer's minus engine's)
    cover the loss tokens of this DP replica.
    """
    gap = batch.column("old_logprobs") - batch.rollout_logprobs
    return {
        "distribution/response_length": headers.sum_per_rollout(headers.num_response_tokens),
        "distribution/reward": headers.rollouts["reward"][headers.rollouts.has_reward],
        "distribution/advantage": batch.column("advantages")[batch.loss_mask].float().cpu().numpy(),
        "distribution/logprob_gap": gap[batch.loss_mask].float().cpu().numpy(),
    }


def describe_updates(batch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """Return `ratio`, `entropy`, `clipped` of each token's last update, [t] float32 (NaN: none); {} if unrecorded."""
    now = batch.update_logprobs
    if now is None:
        return {}
    if not len(now):  # the actor is on other ranks
        return dict.fromkeys(("ratio", "entropy", "clipped"), now)
    inputs = replace(loss_inputs(batch), logprobs=now)
    if algorithm.importance_sampling == "bypass":
        inputs = replace(inputs, old_logprobs=batch.rollout_logprobs)
    clipped = find_clipped(inputs, algorithm)
    return {
        "ratio": (now - inputs.old_logprobs).exp(),
        "entropy": batch.column("update_entropy"),
        "clipped": torch.where(now.isnan(), now, clipped.float()),
    }


def choose_logged(headers: Headers, num_groups: int, step: int) -> dict[int, dict[str, str]]:
    """Choose the rollouts of a step to log: whole groups, and the three best, the worst and the longest rollout.

    Args:
        num_groups: groups to log, spread over the batch and rotated by step; -1 for all, 0 logs nothing.

    Returns:
        Additional fields of each row by ascending rollout index: `logged_as` marks extremes, which are no fair sample.
    """
    total = len(headers.group_sizes)
    wanted = total if num_groups < 0 else min(num_groups, total)
    if not wanted:
        return {}
    lengths, rewards = headers.sum_per_rollout(headers.num_response_tokens), headers.rollouts["reward"]
    scored = np.flatnonzero(headers.rollouts.has_reward)
    best = scored[np.lexsort((headers.rollouts["sample_index"][scored], -rewards[scored]))][:NUM_BEST]
    extremes = dict.fromkeys(best.tolist(), "best")
    if len(scored):
        extremes[int(scored[rewards[scored].argmin()])] = "worst"
    extremes[int(lengths.argmax())] = "longest"
    found = {number: {"logged_as": name} for number, name in extremes.items()}
    groups = (np.arange(wanted) * total // wanted + step) % total
    found |= {number: {} for number in np.flatnonzero(np.isin(headers.rollouts["group"], groups)).tolist()}
    return dict(sorted(found.items()))


def rollout_row(rollout: Rollout, token_texts: TokenTexts, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Build the row of one rollout in rollouts/step_<N>.jsonl.

    Args:
        values: values of its loss tokens by name.
    """
    turns, branch = {}, rollout.branches[0]
    if len(rollout.branches) > 1 or branch.rewards is not None or not branch.sampled[branch.num_prompt_tokens :].all():
        from megatron_rl.samples.branches import describe_turns

        turns = describe_turns(rollout, find_runs(rollout.branches), token_texts)
    return text_row(rollout) | {
        "versions": rollout.versions.tolist(),
        "tokens": rollout.response_tokens.tolist(),
        "token_texts": token_texts(rollout.response_tokens.tolist()),
        **turns,
        "rollout_logprobs": as_numbers(rollout.rollout_logprobs),
        **token_fields(len(rollout.response_tokens), values),
    }


def text_rows(parts: Iterable[Experience], decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Return a `text_row` for each rollout of a validation set, on rank 0 only; collective."""
    found = (part.fetch_rollouts(range(len(part.rewards)), decode) for part in parts)
    return [text_row(rollout) for rollouts in found for rollout, _ in rollouts]


def text_row(rollout: Rollout) -> dict[str, Any]:
    """Build the row of one rollout without tokens, as in validation files."""
    return {
        **({"source": rollout.prompt.source} if rollout.prompt.source else {}),
        "prompt_id": rollout.prompt.prompt_id,
        "sample_index": rollout.sample_index,
        "prompt": rollout.prompt.text,
        "response": rollout.response,
        "num_tokens": len(rollout.response_tokens),
        "ground_truth": rollout.prompt.ground_truth,
        "reward": rollout.reward,
        "reward_components": rollout.reward_components,
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
    }
