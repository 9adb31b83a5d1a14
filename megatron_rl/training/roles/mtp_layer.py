# SPDX-License-Identifier: Apache-2.0
"""The trained multi-token prediction (MTP) layer, which learns to draft the policy's samples.

No gradient flows back into the policy, whose steps are bitwise equal with and without the layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.algorithms.losses import compute_sft_loss
from megatron_rl.config.schema import ActorConfig
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.mtp import MtpInputs, MtpPackedModel, shift_targets
from megatron_rl.training.optimizer import Optimizer
from megatron_rl.training.setup import RoleSetup
from megatron_rl.training.step import StepLoss
from megatron_rl.training.token_heads import LogprobHead
from megatron_rl.training.update import OptimizerStep, build_step


class Mtp:
    """MTP layer with its optimizer, on the policy's last pipeline stage; construction is collective."""

    def __init__(self, setup: RoleSetup) -> None:
        section = setup.spec.settings
        assert isinstance(section, ActorConfig)
        config = replace(section, lr=section.mtp_lr, min_lr=min(section.min_lr, section.mtp_lr))
        self.model = MtpPackedModel(setup)
        head = LogprobHead(self.model, setup.temperature, config.logprob_chunk_tokens)
        self.optimizer = Optimizer(self.model, config, setup.total_optimizer_steps)
        self._update = OptimizerStep(build_step(self.model, head, self.optimizer, config), "mtp")
        self._loss = StepLoss("MTP", _compute_loss, self.model.device)

    def forward_backward(self, minibatch: TrainBatch, inputs: MtpInputs) -> None:
        """Compute the gradients of the negative log-likelihood of the tokens after the next."""
        self.model.take(inputs)
        self._update.forward_backward(shift_targets(minibatch, self.model.groups.dp), self._loss)

    def optim_step(self) -> dict[str, float]:
        """Update the weights and return metrics, equal on every rank of the layer."""
        result = self._update.optim_step()
        tokens = max(result.totals["tokens"], 1.0)
        return {
            "mtp/loss": result.totals["loss"],
            "mtp/acceptance": result.totals["accepted"] / tokens,
            "mtp/grad_norm": result.grad_norm,
        }


def _compute_loss(
    settings: None, microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, metrics = compute_sft_loss(logprobs, microbatch.loss_mask, microbatch.loss_weights)
    # The acceptance rate of drafts is the sum of min(p, q), i.e. the mean of min(1, q / p) over tokens sampled from p.
    accepted = (logprobs.detach() - microbatch.rollout_logprobs).clamp(max=0).exp()
    return loss, metrics | {"accepted": torch.where(microbatch.loss_mask, accepted, 0.0).sum()}
