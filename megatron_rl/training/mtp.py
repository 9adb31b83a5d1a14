# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: the layer behind a model's last, over the hidden states and tokens of its own pass.

Row i of a sequence is given the hidden state of token i and the embedding of token i + 1, and predicts token i + 2
(DeepSeek-V3, arXiv 2412.19437, section 2.2). A sequence ends with a row that has no token behind it: attention is
causal, so nothing sees that row, and it predicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_rl.models.packed_sequences import PackedSequences
from megatron_rl.models.stages import HiddenStatesModel, MtpModel
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.packed_model import Head, PackedModel
from megatron_rl.training.setup import RoleSetup
from megatron_rl.types import LossLedger

_OF_ROWS = ("tokens", "position_ids", "sequence_ids", "rollout_logprobs")  # columns that stay as they are


class MtpInputs(NamedTuple):
    """What the layer works with; nothing on other stages than the last.

    Attributes:
        hidden: of each microbatch, [t/cp, 1, h], or [t/cp/tp, 1, h] under TP-SP.
        embedded: the same of the tokens that follow these.
        output_weight: [v/tp, h] of the model.
    """

    hidden: Sequence[torch.Tensor]
    embedded: Sequence[torch.Tensor]
    output_weight: torch.Tensor | None


class MtpPackedModel(PackedModel):
    """The layer on the ranks of its model's last pipeline stage."""

    def __init__(self, setup: RoleSetup) -> None:
        super().__init__(setup)
        self._inputs: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())

    def take(self, inputs: MtpInputs) -> None:
        """What the next pass works with."""
        (stage,) = self.stages
        assert isinstance(stage, MtpModel) and inputs.output_weight is not None, "it is on the model's last stage"
        self._inputs = zip(inputs.hidden, inputs.embedded, strict=True)
        stage.lend(inputs.output_weight)

    def call_stage(self, module: torch.nn.Module, microbatch: TrainBatch, packed: PackedSequences) -> torch.Tensor:
        """The output of `module` for the next of the inputs, which are `microbatch`'s."""
        hidden, embedded = next(self._inputs)
        return module(hidden, embedded, packed)


class HiddenStatesKept:
    """A head that keeps what it is given: the hidden states of each microbatch, without their gradient."""

    def __init__(self, head: Head) -> None:
        self._head, self._kept = head, list[torch.Tensor]()

    def __call__(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor, ...]:
        """What the head gives."""
        self._kept.append(hidden.detach())
        return self._head(hidden, microbatch)

    def pop(self) -> list[torch.Tensor]:
        """What was kept since the last call, in the order of the microbatches."""
        kept, self._kept = self._kept, []
        return kept


def list_inputs(model: PackedModel, hidden: Sequence[torch.Tensor], minibatch: TrainBatch) -> MtpInputs:
    """What the layer behind a model works with; collective over its pipeline.

    Args:
        model: that has just run the minibatch.
        hidden: of its last stage, by microbatch.
        minibatch: of this rank.
    """
    embedded, stage = _embed_successors(model, minibatch.microbatches()), model.stages[-1]
    if not model.groups.is_last_stage:
        return MtpInputs((), (), None)
    assert isinstance(stage, HiddenStatesModel)
    return MtpInputs(hidden, embedded, stage.output_weight)


@torch.no_grad()
def _embed_successors(model: PackedModel, microbatches: Iterable[TrainBatch]) -> list[torch.Tensor]:
    """On the last stage the embeddings of each row's next token; the first stage has the weights."""
    groups, found = model.groups, []
    for microbatch in microbatches:
        embedded = torch.empty(0)
        if groups.at.pp == 0:
            mine = model.own_rows(microbatch)
            tokens = find_successors(microbatch.tokens, microbatch.predecessors)
            embedding = model.stages[0].get_submodule("embedding")
            embedded = embedding(tokens[None, mine], microbatch.position_ids[None, mine])
            if not groups.is_last_stage:
                dist.send(embedded.contiguous(), group=groups.pp, group_dst=groups.pp.size() - 1)
        elif groups.is_last_stage:
            size = model.count_rows(microbatch.num_computed), 1, model.shape.hidden_size
            embedded = torch.empty(size, dtype=model.dtype, device=model.device)
            dist.recv(embedded, group=groups.pp, group_src=0)
        if groups.is_last_stage:
            found.append(embedded)
    return found


def find_successors(tokens: torch.Tensor, predecessors: torch.Tensor) -> torch.Tensor:
    """The token behind each of a microbatch in its sequence, [t]; 0 behind the last one."""
    rows = torch.arange(len(tokens) - 1, device=tokens.device)
    return torch.cat([torch.where(predecessors[1:] == rows, tokens[1:], 0), tokens.new_zeros(1)])


def shift_targets(minibatch: TrainBatch, group: dist.ProcessGroup) -> TrainBatch:
    """The minibatch as the layer learns from it; collective over the data parallel ranks.

    A token is predicted by the row two before it. The loss is the mean over all tokens of the policy's loss that have
    such a row.

    Args:
        minibatch: of this rank, whose sequences share no rows.
        group: its data parallel ranks.
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
