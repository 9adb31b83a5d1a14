# SPDX-License-Identifier: Apache-2.0
"""Rehearsal of one rank: real roles run on fake tensors, beside absent ranks, through their GPU branches.

Collectives have shapes and no peers. Responses have the maximum length, microbatches are full, experts are balanced. A
step has only enough microbatches to reach a pipeline's peak.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.planning.cluster import Job
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.optimizer import StepLoss
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.transfer.hybrid_engine import HybridEngine
from tools.rehearsal import fake_cuda
from tools.rehearsal.batches import find_share_in_loss, pack_full
from tools.rehearsal.building import build_rehearsed, find_teacher
from tools.rehearsal.fake_nf4 import fake_nf4
from tools.rehearsal.fake_world import fake_world
from tools.rehearsal.ledger import Ledger, Phase
from tools.rehearsal.report import Found, compare_rank, name_scoring
from tools.rehearsal.scoring import make_lessons, score, take_pieces
from tools.rehearsal.stand_ins import stand_ins
from tools.rehearsal.switching import build_switch, can_switch


class Rehearsal:
    """The rehearsal of one rank.

    Attributes:
        phases: in order; the first step's are named "first ...".
        seconds: processor time by phase.
        rows: a role's tokens per step.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._share_in_loss = 0.0  # share of a microbatch's tokens, in this phase
        self._message: list[int] = []  # shape of the messages between stages, in this phase
        self.ledger = Ledger(self._count_true)
        self.phases: dict[str, Phase] = {}
        self.seconds: dict[str, float] = {}
        self.rows: dict[str, float] = {}
        self._roles: dict[str, Any] = {}
        self._hybrid: HybridEngine | None = None

    def run(self) -> None:
        """Build, run a step that creates optimizer states, run a measured step, save."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        fake_cuda.PINNED.clear()
        with (
            fake_world(self._rank, self._job.cluster.world_size),
            fake,
            fake_nf4(),
            self.ledger.watching(),
            stand_ins(self._job, self.ledger, lambda: self._message),
        ):
            with self._phase("build"):
                self._roles = build_rehearsed(self._job, self._rank, self.ledger)
            with self._phase("engine"):
                self._hybrid = self._build_switch()
            self._step("first ")
            self._step("")
            with self._phase("save"):
                take_pieces(self._job, self._roles, self._rank)

    def _count_true(self, mask: torch.Tensor) -> int:
        """Count the loss tokens of a mask [t], or the routed tokens of a mask [experts, t]."""
        if mask.dim() == 1:
            return int(mask.numel() * self._share_in_loss)
        return mask.numel() * self._job.shape.experts_per_token // self._job.shape.num_experts

    @contextmanager
    def _phase(self, name: str, role: str | None = None) -> Iterator[None]:
        if role is not None:
            self._share_in_loss = find_share_in_loss(self._job, self._job.spec.roles[role])
        begun = time.process_time()
        self.ledger.begin()
        yield
        self.phases[name] = self.ledger.end()
        self.seconds[name] = time.process_time() - begun

    def _build_switch(self) -> HybridEngine | None:
        if not can_switch(self._job) or "actor" not in self._roles:
            return None
        return build_switch(self._job, self._roles["actor"], self._rank, self.ledger)

    def _step(self, prefix: str) -> None:
        trained = [name for name in self._roles if self._job.spec.roles[name].trainable]
        with self._phase(prefix + "release"):  # as in a run, before a rollout
            for name in trained:
                self._roles[name].optimizer.release()
        if self._hybrid is not None:
            with self._phase(prefix + "switch"), self._hybrid.rollout_mode():
                pass
        batches = {
            name: pack_full(self._job, self._job.spec.roles[name], role.model) for name, role in self._roles.items()
        }
        self.rows = {name: float(len(batch.tokens)) for name, batch in batches.items()}
        for name, role in self._roles.items():
            with self._phase(prefix + name_scoring(self._job.spec.roles[name]), name), torch.no_grad():
                self._message = find_message(role.model, batches[name])
                score(self._job, name, role, batches[name])
        with self._phase(prefix + "restore"):  # the state from the second minibatch on
            for name in trained:
                self._roles[name].optimizer.restore()
        for name in trained:
            with self._phase(f"{prefix}{name} update", name):
                self._message = find_message(self._roles[name].model, batches[name])
                self._update(name, batches[name])

    def _update(self, name: str, batch: TrainBatch) -> None:
        room = torch.zeros(len(batch.tokens), device=batch.tokens.device)
        columns = ["old_logprobs", "ref_logprobs", "advantages"] if name == "actor" else ["values", "returns"]
        batch = replace(batch, **dict.fromkeys(columns, room))
        if name == "actor" and self._job.spec.teachers:
            batch = replace(batch, **make_lessons(self._job, len(batch.tokens), room.device))
        role, loss = self._roles[name], (self._job.config.algorithm,) if name == "actor" else ()
        heads = 1 if name != "actor" else 3 if find_teacher(self._job) else 2
        found = [room[: batch.slices[0].stop]] * heads

        def share_names(loss: StepLoss, group: dist.ProcessGroup, source: int) -> None:
            """Compute the metric names, which the last stage would send."""
            if not loss.metric_names:
                loss(batch.microbatches()[0], *found)

        with patch.object(StepLoss, "share_names", share_names):
            role.forward_backward(next(batch.minibatches()), *loss)
            role.optim_step()


def find_message(model: PackedModel, batch: TrainBatch) -> list[int]:
    """Return the shape of hidden states between stages, the same for all full microbatches."""
    return [model.count_rows(batch.microbatches()[0].num_computed), 1, model.shape.hidden_size]


def rehearse_rank(job: Job, rank: int) -> dict[str, Any]:
    """Return one rank's report (`report.py`); requires a process with a fake `torch.cuda`."""
    begun, rehearsal = time.process_time(), Rehearsal(job, rank)
    rehearsal.run()
    phases = {
        name: vars(phase)
        | {"seconds": rehearsal.seconds[name]}
        | {
            "traffic": [
                {"operation": key[0], "group": key[1], "calls": calls, "bytes": size, "sent": sent}
                for key, (calls, size, sent) in phase.traffic.items()
            ]
        }
        for name, phase in rehearsal.phases.items()
    }
    found = Found(phases, rehearsal.rows, sum(fake_cuda.PINNED.values()))
    return compare_rank(job, rank, found) | {"seconds": time.process_time() - begun}
