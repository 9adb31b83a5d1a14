# SPDX-License-Identifier: Apache-2.0
"""The trained multi-token prediction (MTP) layer, which learns to draft the policy's samples.

Row i of a sequence combines the hidden state of token i with the embedding of token i + 1 and predicts token i + 2
(DeepSeek-V3, arXiv 2412.19437, section 2.2). The last row predicts nothing and, as attention is causal, affects no
other. No gradient flows back into the policy, whose steps are bitwise equal with and without the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch
import torch.distributed as dist

from megatron_rl.config.schema import ActorConfig
from megatron_rl.models.attention import PackedSequences
from megatron_rl.models.other_stages import MtpModel
from megatron_rl.models.stages import HiddenStatesModel
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.given_losses import compute_sft_loss
from megatron_rl.training.optimizer import Optimizer, OptimizerStep, StepLoss
from megatron_rl.training.packed_model import LogprobHead, PackedModel
from megatron_rl.training.roles.actor import build_step
from megatron_rl.training.setup import RoleSetup
from megatron_rl.types import LossLedger

_OF_ROWS = ("tokens", "position_ids", "sequence_ids", "rollout_logprobs")  # columns that `shift_targets` keeps


# Of each microbatch, hidden states and the next tokens' embeddings, [t/cp, 1, h] each or [t/cp/tp, 1, h] (SP);
# the model's output layer [v/tp, h]. Empty on all but the last stage.
MtpInputs = tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]


class MtpPackedModel(PackedModel):
    """MTP layer on the ranks of the last pipeline stage."""

    def __init__(self, setup: RoleSetup) -> None:
        super().__init__(setup)
        self._inputs: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())

    def take(self, inputs: MtpInputs) -> None:
        """Set the inputs of the next pass."""
        (stage,), (pairs, output_weight) = self.stages, inputs
        assert isinstance(stage, MtpModel) and output_weight is not None, "it is on the model's last stage"
        self._inputs = iter(pairs)
        stage.lend(output_weight)

    def call_stage(self, module: torch.nn.Module, microbatch: TrainBatch, packed: PackedSequences) -> torch.Tensor:
        """Return the output of `module` for the next inputs."""
        hidden, embedded = next(self._inputs)
        return module(hidden, embedded, packed)


@torch.no_grad()
def list_inputs(
    model: PackedModel, hidden: Sequence[torch.Tensor], minibatch: TrainBatch, *, as_drafted: bool = False
) -> MtpInputs:
    """Collect the inputs of the MTP layer; the first stage sends embeddings. Collective over the model's pipeline.

    Args:
        as_drafted: replace the embedding in the first row of each sequence by zeros, as vLLM does when it drafts.
    """
    groups, found = model.groups, []
    for microbatch in minibatch.microbatches():
        embedded = torch.empty(0)
        if groups.at.pp == 0:
            mine = model.own_rows(microbatch)
            tokens = find_successors(microbatch.tokens, microbatch.predecessors)
            embedding = model.stages[0].get_submodule("embedding")
            positions = microbatch.position_ids[mine]
            embedded = embedding(tokens[None, mine], positions[None])
            if as_drafted:  # under sequence parallelism, a TP rank has its part of these rows
                at_tp = groups.at.tp if len(embedded) < len(positions) else 0
                is_first = positions[at_tp * len(embedded) : (at_tp + 1) * len(embedded)] == 0
                embedded = embedded.masked_fill(is_first[:, None, None], 0)
            if not groups.is_last_stage:
                dist.send(embedded.contiguous(), group=groups.pp, group_dst=groups.pp.size() - 1)
        elif groups.is_last_stage:
            size = model.count_rows(microbatch.num_computed), 1, model.shape.hidden_size
            embedded = torch.empty(size, dtype=model.dtype, device=model.device)
            dist.recv(embedded, group=groups.pp, group_src=0)
        if groups.is_last_stage:
            found.append(embedded)
    if not groups.is_last_stage:
        return [], None
    stage = model.stages[-1]
    assert isinstance(stage, HiddenStatesModel)
    return list(zip(hidden, found, strict=True)), stage.output_weight


def find_successors(tokens: torch.Tensor, predecessors: torch.Tensor) -> torch.Tensor:
    """Return the token after each token of a sequence, [t]; 0 after the last one."""
    rows = torch.arange(len(tokens) - 1, device=tokens.device)
    return torch.cat([torch.where(predecessors[1:] == rows, tokens[1:], 0), tokens.new_zeros(1)])


def shift_targets(minibatch: TrainBatch, group: dist.ProcessGroup) -> TrainBatch:
    """Return the minibatch with the MTP layer's targets and loss weights; collective over DP.

    The loss is the mean over tokens in the policy's loss from the third token of each sequence on.

    Args:
        minibatch: must not share rows between sequences.
    """
    starts = [torch.full_like(minibatch.tokens[s.start : s.stop], s.start) for s in minibatch.slices]
    offsets = torch.cat(starts)
    before = minibatch.predecessors + offsets
    mask = minibatch.loss_mask & (minibatch.position_ids >= 2)
    count = mask.sum()
    dist.all_reduce(count, group=group)
    total = int(count)
    nothing = {
        item.name: None
        for item in fields(minibatch)
        if item.name not in _OF_ROWS and isinstance(getattr(minibatch, item.name), torch.Tensor)
    }
    shown = dict(
        predecessors=before[before] - offsets,
        loss_mask=mask,
        loss_weights=mask.float() / max(total, 1),
        kept=None,
        ledgers=[LossLedger("token-mean", total, 0, max(total, 1), float(total > 0))],
    )
    return replace(minibatch, **{**nothing, **shown})


class Mtp:
    """MTP layer with its optimizer, on the policy's last pipeline stage; construction is collective."""

    def __init__(self, setup: RoleSetup) -> None:
        section = setup.spec.settings
        assert isinstance(section, ActorConfig)
        config = replace(section, lr=section.mtp_lr, min_lr=min(section.min_lr, section.mtp_lr))
        self.model = MtpPackedModel(setup)
        head = LogprobHead(self.model, setup.temperature, setup.chunk_tokens)
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
        assert result is not None, "the policy has gradients"
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
