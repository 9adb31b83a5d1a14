# SPDX-License-Identifier: Apache-2.0
"""The actor, which is the trained policy, and roles for the main loop.

Roles for the main loop pack samples, run a role, and store its results as columns. All ranks make the same calls; ranks
that a role does not use only exchange columns, so roles on disjoint ranks run concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.algorithms.catalog import find_early_reader_of_loss
from megatron_rl.algorithms.losses import PolicyLossInputs, compute_policy_loss, has_importance_weights
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig, TrainedConfig
from megatron_rl.parallel.collectives import broadcast_tensors, share_object
from megatron_rl.samples.batch import Packer, TrainBatch
from megatron_rl.samples.experience import Column, Experience, Minibatch, check_kind
from megatron_rl.samples.table import Holders
from megatron_rl.training.optimizer import EagerStep, Optimizer, OptimizerStep, StepLoss, describe_ledgers
from megatron_rl.training.packed_model import Head, LogprobHead, PackedModel
from megatron_rl.training.setup import RoleSetup
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.training.given_losses import LossFunction


def build_step(model: PackedModel, head: Head, optimizer: Optimizer, config: TrainedConfig) -> EagerStep:
    """Build the microbatch runner for the configured `step_mode`."""
    if config.step_mode == "eager":
        return EagerStep(model, head, optimizer)
    from megatron_rl.training.cuda_graph import GraphStep, StageGraphStep, StaticStep

    if config.step_mode == "static":
        return StaticStep(model, head, optimizer)
    kind = StageGraphStep if model.layout.pp_size > 1 else GraphStep
    return kind(model, head, optimizer, config.graph_memory_gib)


class LanguageModel:
    """Language model that scores tokens: actor, reference and teachers."""

    model: PackedModel
    head: LogprobHead

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Compute log-probs [t] float32, 0 outside of the loss, on every rank of the replica."""
        return self.model.compute_forward(batch, self.head)


class Actor(LanguageModel):
    """Language model with an optimizer; construction is collective.

    Attributes:
        mtp: MTP layer, or its stand-in on other stages; `None` if it is not trained.
    """

    def __init__(self, setup: RoleSetup) -> None:
        config = setup.spec.settings
        assert isinstance(config, ActorConfig)
        self.model = PackedModel(setup)
        divergence = None
        if setup.teacher is not None:
            from megatron_rl.training.teacher_divergence import TeacherDivergence

            divergence = TeacherDivergence(self.model, setup.teacher)
        self.head = LogprobHead(self.model, setup.temperature, setup.chunk_tokens, divergence)
        self.optimizer = Optimizer(self.model, config, setup.total_optimizer_steps)
        self.mtp: Any = None
        self._hidden: list[torch.Tensor] = []  # by microbatch, for the MTP layer
        head = self._keep_hidden if config.mtp_lr else self.head
        self.step = build_step(self.model, head, self.optimizer, config)
        self.update = OptimizerStep(self.step, "actor")
        self._router_bias_rate = config.router_bias_rate
        self._kl_coef = torch.zeros((), device=self.model.device)
        self._is_first_pass = torch.zeros((), dtype=torch.bool, device=self.model.device)
        self._policy_loss = StepLoss("policy", self._compute_policy_loss, self.model.device)
        self._given_loss: StepLoss | None = None

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps in the weights."""
        return self.optimizer.steps

    def attach_mtp(self, mtp: Any, list_inputs: Callable[..., Any]) -> None:
        """Train the given MTP layer from now on; `list_inputs`: of `roles.mtp`."""
        self.mtp, self._list_mtp_inputs = mtp, list_inputs

    def _keep_hidden(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor, ...]:
        self._hidden.append(hidden.detach())
        return self.head(hidden, microbatch)

    def record_routes(self, batch: TrainBatch) -> TrainBatch:
        """Add a buffer for expert choices to the batch, if the model has experts."""
        routing = self.model.routing
        return batch if routing is None else replace(batch, routes_used=routing.make_room(batch))

    def compute_sum_pi_squared(self, batch: TrainBatch) -> torch.Tensor:
        """Compute the sum over the vocabulary of squared probabilities, [t] float32."""
        return self.model.compute_forward(batch, self.head.compute_sum_pi_squared)

    def forward_backward(self, minibatch: TrainBatch, loss: AlgorithmConfig | LossFunction | StepLoss) -> None:
        """Add the gradients of a loss over a minibatch, summed over microbatches and DP replicas.

        Args:
            minibatch: without `old_logprobs` the policy loss uses its own detached log-probs and the importance weights
                that follow from them.
            loss: policy loss of an algorithm, or a function; see `LossFunction`.
        """
        if isinstance(loss, AlgorithmConfig):
            self._kl_coef.fill_(loss.kl_coef)  # may change during a run, so it is a device tensor
            self._is_first_pass.fill_(minibatch.old_logprobs is None)
            if minibatch.old_logprobs is None:  # placeholders: a captured graph's inputs must exist in each step
                others = minibatch.rollout_logprobs
                weights = others if has_importance_weights(loss) else None
                minibatch = replace(minibatch, old_logprobs=others, importance_weights=weights)
            step_loss, settings = self._policy_loss, replace(loss, kl_coef=0.0)
        elif isinstance(loss, StepLoss):
            step_loss, settings = loss, loss.settings
        else:
            if self._given_loss is None:
                from megatron_rl.training.given_losses import compute_given_loss

                self._given_loss = StepLoss("given", compute_given_loss, self.model.device)
            step_loss, settings = self._given_loss, loss
        if self.model.routing is not None:
            minibatch = replace(minibatch, flipped=torch.zeros_like(minibatch.loss_mask))
        step_loss.set_settings(settings)
        self.update.forward_backward(minibatch, step_loss)
        hidden, self._hidden = self._hidden, []
        if self.mtp is not None:
            self.mtp.forward_backward(minibatch, self._list_mtp_inputs(self.model, hidden, minibatch))

    def optim_step(self, **given: Any) -> dict[str, float]:
        """Update the weights and return metrics, equal on every rank; without gradients, do nothing and return none.

        Metrics of a user-defined loss are means per token, as `<function name>/<metric>`.
        """
        result = self.update.optim_step(**given)
        if result is None:
            return {}
        routing = self.model.routing
        stages, rate = self.model.stages, self._router_bias_rate
        beside = {} if routing is None else routing.finish([one.minibatch for one in result.passes], stages, rate)
        if self.mtp is not None:
            groups = self.model.groups
            beside |= share_object(self.mtp.optim_step(), groups.pp, groups.last_stage_rank)
        totals, tokens = result.totals, max(result.totals["tokens"], 1.0)
        if result.loss is not self._policy_loss:
            from megatron_rl.training.given_losses import describe_given_loss

            return {**describe_given_loss(result), **beside}
        return {
            "policy/loss": totals["loss"],
            "policy/grad_norm": result.grad_norm,
            "policy/lr": result.lr,
            "policy/entropy": totals["entropy"] / tokens,
            "policy/clip_fraction": totals["clipped"] / tokens,
            "policy/clip_fraction_low": totals["clipped_low"] / tokens,
            "policy/clip_fraction_high": (totals["clipped"] - totals["clipped_low"]) / tokens,
            "policy/ratio_max_deviation": totals["max/deviation"],
            "kl/mean": totals["kl"] / tokens,
            **({"distill/kl": totals["divergence"] / tokens} if "divergence" in totals else {}),
            **{name: total / tokens for name, total in totals.items() if name.startswith("loss/")},
            **describe_ledgers(result),
            **beside,
            **({} if result.adapter_norm is None else {"lora/norm": result.adapter_norm}),
        }

    def _compute_policy_loss(
        self,
        settings: AlgorithmConfig,
        microbatch: TrainBatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        divergence: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if microbatch.update_logprobs is not None and microbatch.update_entropy is not None:
            microbatch.update_logprobs.copy_(logprobs.detach())
            microbatch.update_entropy.copy_(entropy.detach())
        old_logprobs = torch.where(self._is_first_pass, logprobs.detach(), microbatch.column("old_logprobs"))
        weights = microbatch.importance_weights
        if weights is not None and has_importance_weights(settings):
            from megatron_rl.algorithms.importance import Responses, compute_importance_weights

            responses = Responses.of_sequences(microbatch.sequence_ids)  # weighted ones have one branch
            own, _ = compute_importance_weights(
                old_logprobs, microbatch.rollout_logprobs, microbatch.loss_mask, responses, settings
            )
            weights = torch.where(self._is_first_pass, own, weights)
        inputs = PolicyLossInputs(
            logprobs,
            microbatch.rollout_logprobs if settings.importance_sampling == "bypass" else old_logprobs,
            microbatch.column("advantages"),
            microbatch.loss_mask,
            microbatch.sequence_ids,
            microbatch.chosen,
            rollout_rows=microbatch.rollout_rows,
        )
        config = replace(settings, kl_coef=self._kl_coef)
        return compute_policy_loss(
            inputs, entropy, microbatch.ref_logprobs, weights, microbatch.loss_weights, config, divergence
        )


_READ_BY_UPDATE = (
    *("old_logprobs", "ref_logprobs", "advantages", "importance_weights", "chosen"),
    *("teacher_top_k", "teacher_hidden", "update_logprobs", "update_entropy"),
)


class RoleOnSamples:
    """Role that works on a step's samples; methods that take samples are collective over all ranks.

    Attributes:
        model: with weights only on the role's ranks.
        is_here: whether this rank belongs to the role.
    """

    def __init__(self, role: Any, packer: Packer) -> None:
        self.role, self.packer, self.is_here = role, packer, packer.model.dp_rank is not None
        self.model: PackedModel = role.model

    def read(self, samples: Experience, *names: str) -> TrainBatch:
        """Return this rank's share of the samples, with the named columns that exist."""
        return samples.read(self.packer, names)

    def minibatches(self, samples: Experience, epochs: int = 1) -> Iterator[Minibatch]:
        """Yield one minibatch per optimizer step, over `epochs` passes."""
        check_kind(samples, Experience, "policy.minibatches(samples, epochs)")
        check_kind(epochs, int, "policy.minibatches(samples, epochs)", "a whole number")
        for _ in range(epochs):
            for index in range(len(samples.pack(self.packer).batch.minibatch_sizes)):
                yield Minibatch(samples, index)

    def as_column(self, samples: Experience, values: torch.Tensor | None) -> Column | None:
        """Wrap values [t] of the role's batch as a column; `None` stays `None`."""
        return None if values is None else Column(values, samples.pack(self.packer))

    def compute(self, function: Callable[[TrainBatch], torch.Tensor], samples: Experience) -> Column:
        """Apply a function to the role's batch; return a column."""
        check_kind(samples, Experience, "logprobs(samples), values(samples)")
        return Column(function(self.read(samples)), samples.pack(self.packer))

    def optim_step(self, **given: Any) -> dict[str, float]:
        """Update the weights of a trained role; return metrics, equal on the role's ranks; none without gradients.

        Args:
            given: lr, betas, eps, weight_decay, grad_clip_norm of this step, instead of the config's.
        """
        if given:
            from megatron_rl.training.datums import check_step_settings

            check_step_settings(given, self.packer.config)
        return self.role.optim_step(**given)

    def _read_minibatch(self, minibatch: Minibatch, names: Sequence[str]) -> TrainBatch:
        """Return this rank's share of a minibatch; empty outside of the role."""
        batch = self.read(minibatch.samples, *names)
        return batch.minibatch(minibatch.index) if self.is_here else batch


class PolicyOnSamples(RoleOnSamples):
    """Role that scores tokens: reference and actor."""

    def logprobs(self, samples: Experience) -> Column:
        """Compute log-probs of the tokens in the loss; 0 elsewhere."""
        return self.compute(self.role.compute_logprobs, samples)


class ActorOnSamples(PolicyOnSamples):
    """Trained policy that works on a step's samples."""

    def __init__(self, role: Any, packer: Packer) -> None:
        super().__init__(role, packer)
        # `logprobs` records the chosen experts, which updates replay.
        self.records_routes = getattr(packer.config, "router_replay", "off") == "trainer"
        self._datum_passes: Any = None
        layout = packer.model.layout
        self._last_stage = np.array([[layout.rank(dp=dp, pp=layout.pp_size - 1)] for dp in range(layout.dp_size)])

    def read(self, samples: Experience, *names: str) -> TrainBatch:
        """Return this rank's share of the samples, with the expert choices to replay, if there are any."""
        packing = samples.pack(self.packer)
        if samples.replayed_routes is None and packing.routes is not None:
            samples.replayed_routes = Column(packing.routes, packing)
        return super().read(samples, *names, "replayed_routes")

    def logprobs(self, samples: Experience) -> Column:
        """Compute log-probs of the tokens in the loss, and record expert choices if updates replay them."""
        if not (self.records_routes and self.is_here and samples.replayed_routes is None):
            return super().logprobs(samples)
        batch = self.role.record_routes(self.read(samples))
        found = self.as_column(samples, self.role.compute_logprobs(batch))
        samples.replayed_routes = self.as_column(samples, batch.routes_used)
        assert found is not None
        return found

    def sum_pi_squared(self, samples: Experience) -> Column:
        """Compute the sum over the vocabulary of squared probabilities."""
        return self.compute(self.role.compute_sum_pi_squared, samples)

    def as_update(self, samples: Experience, values: torch.Tensor) -> Column:
        """Wrap values [t], valid on the last pipeline stage only, as a column."""
        packing = samples.pack(self.packer)
        return Column(values, packing, Holders(packing.holders.replica_of, self._last_stage))

    def forward_backward(self, minibatch: Minibatch, loss: AlgorithmConfig | LossFunction) -> None:
        """Add the gradients of a policy loss, or of a function (see `given_losses.LossFunction`), over a minibatch.

        A policy loss also records its log-probs and entropies, and `old_logprobs` if they are missing.

        Raises:
            UserError: `old_logprobs` are missing and needed before the first pass; on every rank.
        """
        check_kind(minibatch, Minibatch, "forward_backward(minibatch, loss)")
        check_kind(loss, AlgorithmConfig if not callable(loss) else object, "forward_backward(minibatch, loss)")
        samples = minibatch.samples
        if isinstance(loss, AlgorithmConfig):
            self._make_room(samples, loss)
        self.role.forward_backward(self._read_minibatch(minibatch, _READ_BY_UPDATE), loss)
        if isinstance(loss, AlgorithmConfig) and samples.old_logprobs is None:
            seen = samples.update_logprobs.values.clone()
            if self.is_here:
                groups = self.model.groups
                broadcast_tensors([seen], groups.last_stage_rank, groups.pp)
            samples.old_logprobs = self.as_column(samples, seen)

    def forward_backward_datums(
        self, datums: Sequence[Any], loss: Any, config: Mapping[str, float] | None = None, *, backward: bool = True
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Add the gradients of a summed loss over `training.datums.Datum`s, equal on all ranks.

        Args:
            loss: "cross_entropy" or another name of `algorithms.summed_losses`, or a `training.datums.DatumLoss`.
            config: settings of the loss.
            backward: whether there are gradients; else they stay as before.

        Returns:
            The log-probs of each datum's targets, and the sums "loss:sum" and "tokens:sum"; on every rank.
        """
        if self._datum_passes is None:
            from megatron_rl.training.datums import DatumPasses

            self._datum_passes = DatumPasses(self.role, self.packer)
        return self._datum_passes.run(datums, loss, config or {}, backward=backward)

    def _make_room(self, samples: Experience, loss: AlgorithmConfig) -> None:
        """Allocate columns that the last stage fills during an update."""
        batch = self.read(samples)
        if samples.old_logprobs is None:
            has_branches = len(samples.headers) > len(samples.headers.rollouts)
            if reader := find_early_reader_of_loss(loss, len(batch.minibatch_sizes), has_branches=has_branches):
                raise UserError(
                    f"an update of samples without old_logprobs, and {reader}",
                    source="samples.old_logprobs",
                    expected="the log-probs of the policy before the update",
                    hint="set samples.old_logprobs = policy.logprobs(samples)",
                )
        if samples.update_logprobs is None:
            nothing = torch.full_like(batch.rollout_logprobs, torch.nan)
            samples.update_logprobs = self.as_update(samples, nothing)
            samples.update_entropy = self.as_update(samples, nothing.clone())
