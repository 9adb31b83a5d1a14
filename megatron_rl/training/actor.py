# SPDX-License-Identifier: Apache-2.0
"""The actor: the policy in training."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.algorithms.losses import compute_policy_loss, compute_sft_loss
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig, ModelConfig
from megatron_rl.data.batching import TrainBatch
from megatron_rl.parallel.collectives import broadcast_tensors, reduce_scalars
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.training.optimizer import build_trainable
from megatron_rl.training.policy import LossFunction, Policy
from megatron_rl.weights.families import ModelShape


class Actor(Policy):
    """Policy with DDP, optimizer and learning-rate schedule.

    Attributes:
        policy_version: optimizer steps taken.
    """

    def __init__(
        self, model: ModelConfig, config: ActorConfig, shape: ModelShape, groups: ParallelGroups,
        *, path: str | Path, temperature: float, seed: int, total_optimizer_steps: int,
    ) -> None:
        super().__init__(model, config, shape, groups, path=path, temperature=temperature, seed=seed)
        self.trainable = build_trainable(
            self.stages, self.config, groups, config, total_optimizer_steps=total_optimizer_steps)
        self.modules = list(self.trainable.modules)
        # DDP and the optimizer move parameters into contiguous buffers: take their final storage.
        self.params = {name: p.data for name, p in self.stages.named_parameters()}
        self.policy_version = 0

    def release_training_memory(self) -> None:
        """Give back what generation does not need; `update` takes it back."""
        self.trainable.release()

    def update(self, minibatch: TrainBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
        """One optimizer step of the policy loss; returns metrics, the same on every rank."""

        def loss_function(
            microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return compute_policy_loss(
                logprobs, entropy, microbatch.old_logprobs, microbatch.ref_logprobs, microbatch.advantages,
                microbatch.loss_mask, microbatch.loss_weights, algorithm)

        totals, grad_norm, lr = self._optimizer_step(minibatch, loss_function)
        tokens = max(totals["tokens"], 1.0)
        return {
            "policy/loss": totals["loss"],
            "policy/grad_norm": grad_norm,
            "policy/lr": lr,
            "policy/entropy": totals["entropy"] / tokens,
            "policy/clip_fraction": totals["clipped"] / tokens,
            "policy/ratio_max_deviation": totals["max/deviation"],
            "kl/mean": totals["kl"] / tokens,
        }

    def update_sft(self, minibatch: TrainBatch) -> dict[str, float]:
        """One optimizer step of the negative log-likelihood; returns metrics, the same on every rank."""

        def loss_function(
            microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return compute_sft_loss(logprobs, microbatch.loss_mask, microbatch.loss_weights)

        totals, grad_norm, lr = self._optimizer_step(minibatch, loss_function)
        return {"sft/loss": totals["loss"], "policy/grad_norm": grad_norm, "policy/lr": lr}

    def _optimizer_step(
        self, minibatch: TrainBatch, loss_function: LossFunction
    ) -> tuple[dict[str, float], float, float]:
        self.trainable.restore()
        self.trainable.zero_grad()
        per_microbatch = self.run_schedule(minibatch, loss_function)
        totals = self._reduce(per_microbatch, minibatch.tokens.device)
        if not torch.isfinite(torch.tensor(totals["loss"])):
            raise FloatingPointError(f"the loss of optimizer step {self.policy_version + 1} is {totals['loss']}")
        grad_norm, lr = self.trainable.step()
        self.policy_version += 1
        return totals, grad_norm, lr

    def _reduce(self, per_microbatch: list[dict[str, torch.Tensor]], device: torch.device) -> dict[str, float]:
        """Sums (or maxima, "max/...") over microbatches and DP ranks, known to every pipeline stage."""
        if self.groups.is_last_stage:
            stacked = {key: torch.stack([m[key] for m in per_microbatch]) for key in per_microbatch[0]}
            sums = {k: float(v.double().sum()) for k, v in stacked.items() if not k.startswith("max/")}
            highs = {k: float(v.max()) for k, v in stacked.items() if k.startswith("max/")}
            totals = reduce_scalars(sums, dist.ReduceOp.SUM, self.groups.dp_cp, device)
            totals |= reduce_scalars(highs, dist.ReduceOp.MAX, self.groups.dp_cp, device)
        else:
            totals = {}
        return self._share_from_last_stage(totals, device)

    def _share_from_last_stage(self, totals: dict[str, float], device: torch.device) -> dict[str, float]:
        if self.groups.pp.size() == 1:
            return totals
        keys = sorted(_METRIC_KEYS)
        values = [totals.get(key, float("nan")) for key in keys]
        flat = torch.tensor(values, dtype=torch.float64, device=device)
        broadcast_tensors([flat], self.groups.last_stage_rank, self.groups.pp)
        return dict(zip(keys, flat.tolist(), strict=True))


_METRIC_KEYS = ("loss", "kl", "entropy", "clipped", "tokens", "max/deviation")
