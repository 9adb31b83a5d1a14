# SPDX-License-Identifier: Apache-2.0
"""Divergence between the policy's and a teacher's token distributions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_rl.checkpoint.pieces import load_weights
from megatron_rl.models.stages import HiddenStatesModel
from megatron_rl.parallel.chunked_divergence import compute_linear_divergence, compute_linear_logprobs_of
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.parallel.vocab_parallel import OutputSoftmax
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import LearnedTeacher
from megatron_rl.weights.megatron_layout import megatron_placements


class TeacherDivergence:
    """Divergence of the policy from the teacher outputs in a microbatch.

    For kind full the policy's last stage holds the teacher's output weights, so that only the teacher's hidden states
    are transferred.
    """

    def __init__(self, model: PackedModel, teacher: LearnedTeacher) -> None:
        self._direction, self._weight = teacher.config.direction, None
        self._softcap = teacher.shape.logit_softcap
        if teacher.config.kind != "full" or not model.groups.is_last_stage:
            return
        tp_size, shape = model.layout.tp_size, replace(teacher.shape, vocab_size=model.shape.vocab_size)
        source = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
        table = megatron_placements(shape, ParallelLayout(tp_size, tp_size=tp_size), model.groups.at.tp)
        boxes = [box for box in table if box.hf_name == source]
        stage = model.stages[-1]
        assert isinstance(stage, HiddenStatesModel), "it is a language model"
        size = len(stage.output_weight), shape.hidden_size
        self._weight = torch.zeros(size, dtype=model.dtype, device=model.device)
        load_weights(Path(teacher.path), teacher.shape, boxes, {boxes[0].param: self._weight})

    def __call__(
        self,
        states: torch.Tensor,
        weight: torch.Tensor,
        softmax: OutputSoftmax,
        microbatch: TrainBatch,
        places: torch.Tensor,
    ) -> torch.Tensor | None:
        """Compute divergences [n], differentiable, from policy states [n, h] of the tokens `places`, then of padding.

        Returns:
            `None` if the microbatch has no teacher outputs.
        """
        if microbatch.teacher_top_k is not None:
            ids, logprobs = _take(microbatch.teacher_top_k, places, len(states)).unbind(1)
            found = compute_linear_logprobs_of(states, weight, ids[:, :-1].long(), softmax)
            return compute_top_k_divergence(found, logprobs, self._direction)
        if microbatch.teacher_hidden is None:
            return None
        assert self._weight is not None, "it is read for kind full"
        theirs = _take(microbatch.teacher_hidden, places, len(states)).to(self._weight.dtype)
        return compute_linear_divergence(states, weight, theirs, self._weight, self._direction, softmax, self._softcap)


def compute_top_k_divergence(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, direction: str) -> torch.Tensor:
    """Compute KL over the teacher's k likeliest tokens and "any other token", [n].

        reverse: sum_i p_i log(p_i / q_i)        forward: sum_i q_i log(q_i / p_i)        i = 1 .. k + 1

    Args:
        logprobs, teacher_logprobs: [n, k + 1] of n tokens; the last column is any other token.
        direction: "reverse" (p is the policy) or "forward".
    """
    p, q = (teacher_logprobs, logprobs) if direction == "forward" else (logprobs, teacher_logprobs)
    return (p.exp() * (p - q)).sum(-1)


def _take(values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Return rows `places` of `values`, zero-padded to `count` rows; a place past the end gives an arbitrary row."""
    found = values[places.clamp(max=len(values) - 1)]
    return F.pad(found, [0, 0] * (found.dim() - 1) + [0, count - len(found)])
