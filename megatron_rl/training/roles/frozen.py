# SPDX-License-Identifier: Apache-2.0
"""Roles that do not learn on this rank: reference, teachers, reward model, and the stand-in for a role of other ranks.

Also policies that score a few sequences outside of a step's samples. Teachers serve on-policy distillation (Agarwal et
al., arXiv 2306.13649). docs/distillation.md has the kinds; kind sampled estimates per token as Thinking Machines does
("On-policy distillation", 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.algorithm import DistillationConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.chosen_order import choose_teachers
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.models.stages import local_values
from megatron_rl.parallel.collectives import reduce_scalars, share_object, world
from megatron_rl.rewards.scoring import LARGEST, SourceSpec, refuse_reward
from megatron_rl.samples.batch import Packer, Padding, TrainBatch, build_train_batch
from megatron_rl.samples.experience import Experience
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.training.packed_model import LogprobHead, PackedModel, compute_scores
from megatron_rl.training.roles.actor import Actor, ActorOnSamples, LanguageModel, RoleOnSamples
from megatron_rl.training.setup import LaidOutModel, RoleSetup
from megatron_rl.types import Branch, Rollout, UserError


class BaseOfActor(LanguageModel):
    """Reference policy made of the actor's base weights, without adapters."""

    def __init__(self, actor: Actor) -> None:
        self.model, self.head = actor.model, actor.head

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Compute log-probs like `Reference`, with adapters disabled."""
        from megatron_rl.models.lora_linears import without_adapters

        with without_adapters(self.model.stages):
            return super().compute_logprobs(batch)


class NoOptimizer:
    """Stand-in for an optimizer, so that training checkpoints can contain a frozen model."""

    is_stub_optimizer, steps, kind = True, 0, "adam"

    @property
    def megatron(self) -> Any:
        """Stub optimizer without parameters."""
        return self

    scheduler = megatron

    def state_dict(self) -> dict[str, Any]:
        """Return an empty schedule state."""
        return {}

    def moments(self, main: torch.Tensor) -> tuple[str, ...]:
        """Return no state names."""
        return ()

    def resume(self, steps: int, schedule: Mapping[str, Any]) -> None:
        """Do nothing."""


class Reference(LanguageModel):
    """Frozen language model, or layer that drafts for the engines; construction is collective."""

    def __init__(self, setup: RoleSetup) -> None:
        self.model = PackedModel(setup)
        self.head = LogprobHead(self.model, setup.temperature, setup.chunk_tokens)
        self.optimizer = NoOptimizer()

    @torch.no_grad()
    def become(self, policy: PackedModel) -> None:
        """Copy the weights of a policy in the same layout (ProRL, arXiv 2505.24864)."""
        for mine, theirs in zip(self.model.stages.parameters(), policy.stages.parameters(), strict=True):
            local_values(mine).copy_(local_values(theirs))


class Teacher(Reference):
    """Frozen language model to distill from; construction is collective."""

    def compute_top_k(self, k: int, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
        """Compute ids and log-probs of the k most likely of the first `vocab_size` tokens, [t, 2, k + 1].

        The last entry stands for all other tokens. 0 outside of the loss; equal on every rank of the replica.
        """
        return self.model.compute_forward(batch, partial(self.head.compute_top_k, k, vocab_size), 2, k + 1)

    def compute_hidden(self, batch: TrainBatch) -> torch.Tensor:
        """Return the hidden states that predict the tokens in the loss, [t, h] float32; 0 elsewhere."""
        return self.model.compute_forward(batch, self.head.select_hidden, self.model.shape.hidden_size)


class RewardModel:
    """Frozen model with a score head; construction is collective."""

    def __init__(self, setup: RoleSetup) -> None:
        self.model = PackedModel(setup)
        self.head = partial(compute_scores, self.model)

    def compute_scores(self, batch: TrainBatch, marks: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the score at the last token of every sequence, [num_rollouts] float32 on every rank; collective.

        transformers instead scores the last token that is not `pad_token_id`: the same, unless a sequence ends in that
        token.

        Args:
            batch: this DP rank's share; over all DP ranks, each of the rollouts 0, 1, ... appears once.
            marks: [t] bool, ends of steps: return the lowest score at these and at the last token.
        """
        scores, group = self.model.compute_forward(batch, self.head), self.model.groups.dp
        ends = torch.cat([piece.start + piece.cu_seqlens[1:].long() - 1 for piece in batch.slices])
        if marks is not None:
            ends = torch.cat([ends, marks.nonzero()[:, 0]])
        ids = batch.sequence_ids[ends]
        ends, ids = ends[ids >= 0], ids[ids >= 0]
        count = batch.sequence_ids.max() + 1
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        table = torch.zeros(int(count), dtype=torch.float32, device=scores.device)
        table = table.scatter_reduce(0, ids, scores[ends], "amin", include_self=False)
        dist.all_reduce(table, group=group)
        return table


def score_sequences(
    policy: PackedModel, sequences: Sequence[np.ndarray], skip: Sequence[int], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Compute log-probs of the tokens from `skip` on; every DP replica scores all sequences. Collective.

    Args:
        sequences: [s] int32 each.
        skip: unscored leading tokens per sequence.
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


class RewardModelOnSamples(RoleOnSamples):
    """Reward model that works on a step's samples."""

    def __init__(self, role: Any, packer: Packer, tokenizer: Tokenizer) -> None:
        super().__init__(role, packer)
        self._is_marker = None
        if (separator := getattr(packer.config, "step_separator", None)) is not None:
            from megatron_rl.data.preference_rows import find_marker

            self._is_marker = find_marker(tokenizer, separator)

    def _find_marks(self, samples: Experience, batch: TrainBatch) -> torch.Tensor | None:
        if self._is_marker is None:
            return None
        markers = [token for token in batch.tokens.unique().tolist() if self._is_marker(token)]
        starts = torch.tensor(samples.headers["num_prompt_tokens"], device=batch.tokens.device)[batch.sequence_ids]
        return torch.isin(batch.tokens, starts.new_tensor(markers)) & (batch.position_ids >= starts)

    def __call__(self, samples: Experience) -> np.ndarray:
        """Return the score of each rollout, [num_rollouts] float64, equal on every rank."""
        batch, layout = self.read(samples), self.packer.model.layout
        scores = None
        if self.is_here:
            scores = self.role.compute_scores(batch, self._find_marks(samples, batch)).double().cpu().numpy()
        if layout.world_size < world().size():
            scores = share_object(scores, world(), layout.first_rank)
        assert scores is not None
        return scores[np.append(samples.headers.first_of_rollout[1:], len(samples.headers)) - 1]


def add_model_scores(
    source: SourceSpec,
    rewards: np.ndarray,
    scores: np.ndarray,
    titles: Sequence[str],
    others: Mapping[str, np.ndarray] = {},
    steps: int | np.ndarray = 0,
) -> np.ndarray:
    """Add a reward model's weighted scores to rewards.

    Args:
        rewards, scores: [num_rollouts] float64.
        titles: names of the rollouts, for errors.
        others: scores of the sources without a model, by name, for conditions.
        steps: of each rollout, for weights that follow a schedule.

    Raises:
        UserError: a score is missing or not finite, or a sum is too large.
    """
    if scores.shape != rewards.shape:
        raise UserError(
            f"the reward source {source.target} gave {list(scores.shape)} scores to {len(rewards)} rollouts",
            source="the reward model",
            expected=f"{len(rewards)} numbers",
            hint="return one score per rollout, in their order",
        )
    if not np.isfinite(scores).all():
        index = int(np.isfinite(scores).argmin())
        raise UserError(
            f"the reward source {source.target} gave {scores[index]} to {titles[index]}",
            source="the checkpoint in the section reward_model",
            expected="a finite score",
            hint="check the checkpoint with transformers",
        )
    counted, weights = source.weigh(scores, others, steps)
    sums = rewards + weights * counted
    worst = int(np.abs(sums).argmax())
    if not abs(sums[worst]) <= LARGEST:
        raise refuse_reward(float(sums[worst]), titles[worst])
    return sums


def score_by_models(
    models: Mapping[SourceSpec, Callable[[Experience], Sequence[float] | np.ndarray]],
    samples: Experience,
    steps: Sequence[int],
) -> Experience:
    """Add the scores of reward models, equal on every rank, to the rewards of samples; collective.

    Args:
        steps: step of each prompt, for weights that follow a schedule.
    """
    found = {source: np.asarray(score(samples), np.float64) for source, score in models.items()}
    for source, scores in found.items():
        rollouts = samples.headers.rollouts
        others = {name: rollouts.component(name) for name in rollouts.names}
        when = np.array(steps)[rollouts["group"]]
        rewards = add_model_scores(source, samples.rewards, scores, rollouts.list_titles(), others, when)
        samples = samples.rescore(rewards, source.name, source.weigh(scores, others, when)[0])
    return samples


def score_all_rollouts(
    score: Callable[[Sequence[Rollout]], Sequence[float]], decode: Callable[[list[int]], str], samples: Experience
) -> Sequence[float]:
    """Apply a scoring function to all rollouts on every rank; collective."""
    rollouts = samples.fetch_rollouts(range(len(samples.rewards)), decode, on_all=True)
    return score([rollout for rollout, _ in rollouts])


class AbsentRole:
    """Stand-in for a role on a rank outside of it, without weights.

    Its methods are called nonetheless: hang reports compare how far each rank has come.
    """

    policy_version = -1  # no weights

    def __init__(self, model: LaidOutModel) -> None:
        self.model, self.optimizer = model, self
        self.mtp: AbsentRole | None = None

    def release(self) -> None:
        """Do nothing."""

    def attach_mtp(self, mtp: AbsentRole, list_inputs: object) -> None:
        """Set the stand-in for the policy's MTP layer."""
        self.mtp = mtp

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Return an empty tensor, [0] float32."""
        return torch.empty_like(batch.loss_weights)

    compute_sum_pi_squared = compute_values = compute_logprobs

    def compute_top_k(self, k: int, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
        """Return an empty tensor, [0, 2, k + 1]."""
        return batch.loss_weights.new_empty(0, 2, k + 1)

    def compute_hidden(self, batch: TrainBatch) -> torch.Tensor:
        """Return an empty tensor, [0, h]."""
        return batch.loss_weights.new_empty(0, self.model.shape.hidden_size)

    def forward_backward(self, minibatch: TrainBatch, loss: Any = None) -> None:
        """Do nothing."""

    def optim_step(self, **given: Any) -> dict[str, float]:
        """Return no metrics."""
        return {}


class TeachersOnSamples:
    """All teachers of a run; the methods are collective over all ranks."""

    def __init__(
        self, teachers: Mapping[str, Any], packers: Mapping[str, Packer], policy: ActorOnSamples, config: RunConfig
    ) -> None:
        self._policy, self._config = policy, config
        self._teachers = {name: RoleOnSamples(role, packers[name]) for name, role in teachers.items()}

    def score(self, samples: Experience) -> None:
        """Run each teacher on the samples chosen for it; `teach` later passes the results to the policy."""
        chosen = choose_teachers(self._config, samples.prompts)
        parts = {name: samples.select(groups) for name, groups in chosen.items() if groups}
        for name, (part, _) in parts.items():
            self._teachers[name].read(part)  # send tokens to all teachers before one computes
        given = self._config.algorithm.distillation, self._policy.model.shape.vocab_size
        lessons = {}  # by teacher: its output, the index of each sequence of its part among all sequences, and the part
        for name, (part, order) in parts.items():
            teacher = self._teachers[name]
            lessons[name] = teacher.compute(partial(ask_teacher, teacher.role, *given), part), order, part
        samples.lessons = lessons

    def teach(self, samples: Experience) -> dict[str, float]:
        """Transfer the teachers' outputs to the policy, as a column of the samples.

        Returns:
            `distill/kl`, the policy's mean log-prob minus the teachers', also per teacher if there are several;
            empty outside of the policy's ranks, and for kinds full and top_k, where the update measures it.
        """
        policy, distillation = self._policy, self._config.algorithm.distillation
        found = {name: samples.take(*lesson, packer=policy.packer) for name, lesson in samples.lessons.items()}
        parts = list(found.values())
        if distillation.kind != "sampled":  # each token has one teacher
            column = policy.as_column(samples, _lay_together(parts).nan_to_num(0.0))
            if distillation.kind == "full":
                samples.teacher_hidden = column
            else:
                samples.teacher_top_k = column
            return {}
        weights = [self._config.teachers[name].weight for name in found]
        mixed = _mix_logprobs(parts, weights) if distillation.choose_by is None else _lay_together(parts)
        samples.teacher_logprobs = policy.as_column(samples, mixed)
        batch = policy.read(samples, "old_logprobs", "teacher_logprobs")
        if not policy.is_here:
            return {}
        each = found if len(self._teachers) > 1 else {}
        return _measure_divergences({**each, "kl": batch.column("teacher_logprobs")}, batch, policy.model.groups.dp)


@torch.no_grad()
def _mix_logprobs(logprobs: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean of several teachers' log-probs [t], bitwise equal to the first if all are equal."""
    # The reverse divergence to it is, up to a constant, the weighted mean of the divergences to the teachers.
    mixed = first = logprobs[0]
    for others, weight in zip(logprobs[1:], weights[1:], strict=True):
        mixed = mixed + weight / sum(weights) * (others - first)
    return mixed


@torch.no_grad()
def _measure_divergences(
    teacher_logprobs: Mapping[str, torch.Tensor], batch: TrainBatch, group: dist.ProcessGroup
) -> dict[str, float]:
    """Return `distill/<name>`, the policy's mean log-prob minus the teacher's ([t], NaN if unscored); collective."""
    sums = {}
    for name, logprobs in teacher_logprobs.items():
        counted = batch.loss_mask & ~logprobs.isnan()
        sums[f"{name}/sum"] = float((batch.column("old_logprobs") - logprobs)[counted].double().sum())
        sums[f"{name}/count"] = float(counted.sum())
    sums = reduce_scalars(sums, dist.ReduceOp.SUM, group, batch.tokens.device)
    counted = [name for name in teacher_logprobs if sums[f"{name}/count"]]
    return {f"distill/{name}": sums[f"{name}/sum"] / sums[f"{name}/count"] for name in counted}


def ask_teacher(role: Any, distillation: DistillationConfig, vocab_size: int, batch: TrainBatch) -> torch.Tensor:
    """Run a teacher, and return hidden states, top k or log-probs, by the configured kind of distillation."""
    if distillation.kind == "full":
        return role.compute_hidden(batch)
    if distillation.kind == "top_k":
        common = min(vocab_size, role.model.shape.vocab_size)
        return role.compute_top_k(min(distillation.k, common), common, batch)
    return role.compute_logprobs(batch)


def _lay_together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Merge tensors [t, ...] that have values at disjoint tokens and NaN elsewhere."""
    whole = parts[0]
    for part in parts[1:]:
        whole = torch.where(whole.isnan(), part, whole)
    return whole
