# SPDX-License-Identifier: Apache-2.0
"""The actor: the policy in training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.algorithms.losses import PolicyLossInputs, compute_policy_loss, compute_sft_loss
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig, ModelConfig
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.training.policy import Policy
from megatron_rl.training.step import StepLoss
from megatron_rl.training.trainable import TrainedModel, describe_ledgers
from megatron_rl.weights.families import ModelShape


class Actor(TrainedModel, Policy):
    """Policy with DDP, optimizer and learning-rate schedule."""

    role = "actor"

    def __init__(
        self, model: ModelConfig, config: ActorConfig, shape: ModelShape, groups: ParallelGroups,
        *, path: str | Path, temperature: float, seed: int, total_optimizer_steps: int,
    ) -> None:
        super().__init__(model, config, shape, groups, path=path, temperature=temperature, seed=seed)
        self.add_optimizer(config, total_optimizer_steps)
        self._algorithm: AlgorithmConfig | None = None  # of the update that is under way
        self._kl_coef = torch.zeros((), device=self.trainable.device)
        self._policy_loss = StepLoss("policy", self._compute_policy_loss)
        self._sft_loss = StepLoss("sft", _compute_sft_loss)

    @property
    def policy_version(self) -> int:
        """Optimizer steps behind the weights."""
        return self.optimizer_steps

    def update(self, minibatch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
        """One optimizer step of the policy loss; returns metrics, the same on every rank."""
        # The coefficient moves during a run: it is read from the device.
        self._kl_coef.fill_(algorithm.kl_coef)
        self._algorithm = replace(algorithm, kl_coef=self._kl_coef)
        self._policy_loss.settings = replace(algorithm, kl_coef=0.0)
        totals, grad_norm, lr = self.take_optimizer_step(minibatch, self._policy_loss)
        tokens = max(totals["tokens"], 1.0)
        return {
            "policy/loss": totals["loss"],
            "policy/grad_norm": grad_norm,
            "policy/lr": lr,
            "policy/entropy": totals["entropy"] / tokens,
            "policy/clip_fraction": totals["clipped"] / tokens,
            "policy/ratio_max_deviation": totals["max/deviation"],
            "kl/mean": totals["kl"] / tokens,
            **describe_ledgers(minibatch, totals),
        }

    def update_sft(self, minibatch: TrainBatch) -> dict[str, float]:
        """One optimizer step of the negative log-likelihood; returns metrics, the same on every rank."""
        totals, grad_norm, lr = self.take_optimizer_step(minibatch, self._sft_loss)
        return {"sft/loss": totals["loss"], "policy/grad_norm": grad_norm, "policy/lr": lr}

    def _compute_policy_loss(
        self, microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if microbatch.update_logprobs is not None:
            microbatch.update_logprobs.copy_(logprobs.detach())
            microbatch.update_entropy.copy_(entropy.detach())
        inputs = PolicyLossInputs(
            logprobs, microbatch.old_logprobs, microbatch.advantages, microbatch.loss_mask, microbatch.sequence_ids,
            microbatch.chosen)
        return compute_policy_loss(
            inputs, entropy, microbatch.ref_logprobs, microbatch.importance_weights, microbatch.loss_weights,
            self._algorithm)


def _compute_sft_loss(
    microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return compute_sft_loss(logprobs, microbatch.loss_mask, microbatch.loss_weights)
