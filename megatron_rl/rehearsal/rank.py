# SPDX-License-Identifier: Apache-2.0
"""One rank of a job, rehearsed: its real roles are built and step on fake tensors, beside ranks that do not exist.

The roles take the branches that they take on a GPU. Collectives have shapes and no partners, tensors have no values:
responses are as long as the config allows, microbatches are full, every second expert is chosen alike. A rehearsed
step has as many microbatches as bring a pipeline to its peak, not all of a real one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.models import attention_backends
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel import groups as group_module
from megatron_rl.parallel.groups import ParallelGroups, build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Job
from megatron_rl.rehearsal.batches import find_share_in_loss, pack_full
from megatron_rl.rehearsal.fake_nf4 import fake_nf4
from megatron_rl.rehearsal.ledger import Ledger, Phase
from megatron_rl.rehearsal.report import compare_rank
from megatron_rl.roles.build import build_role
from megatron_rl.roles.models import RoleInputs
from megatron_rl.roles.reference import BaseOfActor
from megatron_rl.training import adapters
from megatron_rl.training.step import StepLoss

assert fake_collectives, "registers what collectives make of fake tensors"
_GROUPS = ("tp", "cp", "pp", "dp", "dp_cp", "ep", "expt_dp", "tp_cp", "tp_ep", "tp_pp", "tp_ep_pp", "embd")


class Rehearsal:
    """The roles of one rank.

    Args:
        job: what is rehearsed.
        rank: of its world.

    Attributes:
        ledger: of its operations.
        phases, seconds: by name, as they came (of a processor); those of the first step are called "first ...".
        rows: tokens of a step on one rank, by role.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._share_in_loss = 0.0  # of the tokens of a microbatch, in this phase
        self.ledger = Ledger(self._count_true)
        self.phases: dict[str, Phase] = {}
        self.seconds: dict[str, float] = {}
        self.rows: dict[str, float] = {}
        self._groups: dict[ParallelLayout, ParallelGroups] = {}
        self._roles: dict[str, Any] = {}

    def run(self) -> None:
        """All phases, in the order of a run: build, a step that makes the optimizers' states, and a measured one."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with (
            _fake_world(self._rank, self._job.cluster.world_size),
            fake,
            fake_nf4(),
            self.ledger.watching(),
            self._counted_experts(),
        ):
            with self._phase("build"):
                self._build()
            self._step("first ")
            self._step("")

    def _count_true(self, mask: torch.Tensor) -> int:
        """Tokens in the loss [t], or of experts [experts, t]."""
        if mask.dim() == 1:
            return int(mask.numel() * self._share_in_loss)
        return mask.numel() * self._job.shape.experts_per_token // self._job.shape.num_experts

    @contextmanager
    def _counted_experts(self) -> Iterator[None]:
        """Experts get equal numbers of tokens: the counts that a GPU computes and the host reads in every layer."""
        if not self._job.shape.num_experts:
            yield
            return
        import_module("megatron.core.transformer.moe.token_dispatcher")
        dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"].MoEAlltoAllTokenDispatcher
        real = dispatcher.preprocess

        def preprocess(this: Any, routing_map: torch.Tensor) -> Any:
            real(this, routing_map)
            self.ledger.note_wait("megatron/core/transformer/moe/token_dispatcher.py")
            each, rest = divmod(len(routing_map) * this.config.moe_router_topk, this.num_experts)
            assert not rest, "a microbatch's choices divide by the experts"
            local, ranks = this.num_local_experts, this.tp_size * this.ep_size
            if ranks > 1:
                this.input_splits = this.output_splits = np.full(this.ep_size, each * local)
                this.output_splits_tp = np.full(this.tp_size, each * local * this.ep_size)
            this.num_global_tokens_per_local_expert = np.full((ranks, local), each)
            chunks = np.arange(this.num_experts * this.tp_size)  # constants on the host
            this.sort_input_by_local_experts = chunks.reshape(-1, local).T.ravel()
            this.restore_output_by_local_experts = chunks.reshape(local, -1).T.ravel()
            return np.full(local, each * ranks)

        with patch.object(dispatcher, "preprocess", preprocess):
            yield

    @contextmanager
    def _phase(self, name: str, role: str | None = None) -> Iterator[None]:
        if role is not None:
            self._share_in_loss = find_share_in_loss(self._job, self._job.spec.roles[role])
        begun = time.process_time()
        self.ledger.begin()
        yield
        self.phases[name] = self.ledger.end()
        self.seconds[name] = time.process_time() - begun

    def _build(self) -> None:
        for name, spec in self._job.spec.roles.items():
            layout = self._job.layout_of(spec)
            if self._rank not in layout.ranks:
                continue
            if spec.shares:
                self._roles[name] = BaseOfActor(self._roles[spec.shares])
                continue
            if layout not in self._groups:
                self._groups[layout] = build_groups(layout)
                for group in _GROUPS:
                    found = getattr(self._groups[layout].collection, group, None)
                    if found is not None:
                        self.ledger.name_group(found, group)
            inputs = RoleInputs(spec, self._job.shape_of(spec), layout)
            self._roles[name] = build_role(self._job.config, inputs, self._groups[layout], 100)

    def _step(self, prefix: str) -> None:
        for name, role in self._roles.items():
            if self._job.spec.roles[name].trainable:
                role.optimizer.release()  # as before a rollout
        batches = {
            name: pack_full(self._job, self._job.spec.roles[name], role.model) for name, role in self._roles.items()
        }
        self.rows = {name: float(len(batch.tokens)) for name, batch in batches.items()}
        for name, phase in (("actor", "log-probs"), ("reference", "reference"), ("critic", "values")):
            if name in self._roles:
                with self._phase(prefix + phase, name), torch.no_grad():
                    compute = (
                        self._roles[name].compute_values if name == "critic" else self._roles[name].compute_logprobs
                    )
                    compute(batches[name])
        if "reward_model" in self._roles:
            with self._phase(prefix + "rewards", "reward_model"), torch.no_grad():
                self._roles["reward_model"].model.compute_forward(
                    batches["reward_model"], self._roles["reward_model"].head
                )
        trained = [name for name in self._roles if self._job.spec.roles[name].trainable]
        for name in trained:
            self._roles[name].optimizer.restore()  # as it is from a step's second minibatch on
        for name in trained:
            with self._phase(f"{prefix}{name} update", name):
                self._update(name, batches[name])

    def _update(self, name: str, batch: TrainBatch) -> None:
        room = torch.zeros(len(batch.tokens), device=batch.tokens.device)
        columns = ["old_logprobs", "ref_logprobs", "advantages"] if name == "actor" else ["values", "returns"]
        batch = replace(batch, **dict.fromkeys(columns, room))
        role, loss = self._roles[name], (self._job.config.algorithm,) if name == "actor" else ()
        found = [room[: batch.slices[0].stop]] * (2 if name == "actor" else 1)

        def share_names(loss: StepLoss, group: dist.ProcessGroup, source: int) -> None:
            """What the last stage would tell the others: what the loss of a microbatch is called."""
            if not loss.metric_names:
                loss(batch.microbatches()[0], *found)

        with patch.object(StepLoss, "share_names", share_names):
            role.forward_backward(next(batch.minibatches()), *loss)
            role.optim_step()


@contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A job of so many ranks, of which this process is one and the others are not there."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    def gather(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * len(found)

    def nothing(*args: Any, **options: Any) -> None:
        pass

    with (
        patch.object(dist, "all_gather_object", gather),
        patch.object(dist, "broadcast_object_list", nothing),
        patch.object(group_module, "align_group_names", nothing),
        patch.object(adapters, "load_weights", nothing),
        patch.object(
            attention_backends,
            "choose_attention_backend",
            lambda device, dtype: "efficient" if dtype is torch.float32 else "torch-varlen",
        ),
    ):
        yield
    dist.destroy_process_group()


def rehearse_rank(job: Job, rank: int) -> dict[str, Any]:
    """The report of one rank (`report.py`); in a process of its own, whose torch pretends to have GPUs."""
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
    return compare_rank(job, rank, phases, rehearsal.rows) | {"seconds": time.process_time() - begun}
