# SPDX-License-Identifier: Apache-2.0
"""The actor: the policy in training."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.algorithms.losses import PolicyLossInputs, compute_policy_loss, compute_sft_loss
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.training.heads import LogprobHead
from megatron_rl.training.optimizer import Optimizer
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import RoleSetup
from megatron_rl.training.step import StepLoss
from megatron_rl.training.update import build_step, describe_ledgers, take_optimizer_step


class Actor:
    """A language model with an optimizer; building it is collective.

    Attributes:
        model, head, optimizer: its parts.
        step: how its microbatches run.
    """

    def __init__(self, setup: RoleSetup) -> None:
        config = setup.spec.layout
        assert isinstance(config, ActorConfig)
        self.model = PackedModel(setup)
        self.head = LogprobHead(self.model, setup.temperature, config.logprob_chunk_tokens)
        self.optimizer = Optimizer(self.model, config, setup.total_optimizer_steps)
        self.step = build_step(self.model, self.head, self.optimizer, config)
        self._kl_coef = torch.zeros((), device=self.model.device)
        self._policy_loss = StepLoss("policy", self._compute_policy_loss, self.model.device)
        self._sft_loss = StepLoss("sft", _compute_sft_loss, self.model.device)

    @property
    def policy_version(self) -> int:
        """Optimizer steps behind the weights."""
        return self.optimizer.steps

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs of the tokens in the loss, [t] float32, the same on every rank of the replica; 0 elsewhere."""
        return self.model.compute_forward(batch, self.head)

    def compute_sum_pi_squared(self, batch: TrainBatch) -> torch.Tensor:
        """Sum over the vocabulary of squared probabilities where the tokens in the loss came from; as above."""
        return self.model.compute_forward(batch, self.head.compute_sum_pi_squared)

    def update(self, minibatch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
        """One optimizer step of the policy loss; returns metrics, the same on every rank."""
        # The coefficient moves during a run: it is read from the device.
        self._kl_coef.fill_(algorithm.kl_coef)
        self._policy_loss.set_settings(replace(algorithm, kl_coef=0.0))
        totals, grad_norm, lr = take_optimizer_step(self.step, minibatch, self._policy_loss, "actor")
        tokens = max(totals["tokens"], 1.0)
        return {
            "policy/loss": totals["loss"],
            "policy/grad_norm": grad_norm,
            "policy/lr": lr,
            "policy/entropy": totals["entropy"] / tokens,
            "policy/clip_fraction": totals["clipped"] / tokens,
            "policy/ratio_max_deviation": totals["max/deviation"],
            "kl/mean": totals["kl"] / tokens,
            **{name: total / tokens for name, total in totals.items() if name.startswith("loss/")},
            **describe_ledgers(minibatch, totals),
        }

    def update_sft(self, minibatch: TrainBatch) -> dict[str, float]:
        """One optimizer step of the negative log-likelihood; returns metrics, the same on every rank."""
        totals, grad_norm, lr = take_optimizer_step(self.step, minibatch, self._sft_loss, "actor")
        return {"sft/loss": totals["loss"], "policy/grad_norm": grad_norm, "policy/lr": lr}

    def _compute_policy_loss(
        self, settings: AlgorithmConfig, microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if microbatch.update_logprobs is not None and microbatch.update_entropy is not None:
            microbatch.update_logprobs.copy_(logprobs.detach())
            microbatch.update_entropy.copy_(entropy.detach())
        assert microbatch.old_logprobs is not None and microbatch.advantages is not None
        inputs = PolicyLossInputs(
            logprobs, microbatch.old_logprobs, microbatch.advantages, microbatch.loss_mask, microbatch.sequence_ids,
            microbatch.chosen)
        return compute_policy_loss(
            inputs, entropy, microbatch.ref_logprobs, microbatch.importance_weights, microbatch.loss_weights,
            replace(settings, kl_coef=self._kl_coef))


def _compute_sft_loss(
    settings: None, microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return compute_sft_loss(logprobs, microbatch.loss_mask, microbatch.loss_weights)
