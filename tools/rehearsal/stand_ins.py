# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for values that a GPU computes and the host reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megatron_rl.models import experts
from megatron_rl.planning.cluster import Job
from megatron_rl.training import packed_model
from megatron_rl.training.packed_model import HostMemory
from tools.rehearsal.ledger import Ledger


@contextmanager
def stand_ins(job: Job, ledger: Ledger, find_message: Callable[[], list[int]]) -> Iterator[None]:
    """Apply all stand-ins within the block.

    Args:
        find_message: returns the current message shape between stages.
    """
    with counted_experts(job, ledger), counted_loads(ledger), known_messages(ledger, find_message):
        yield


@contextmanager
def counted_experts(job: Job, ledger: Ledger) -> Iterator[None]:
    """Give experts equal token counts, which the host reads to exchange tokens or to multiply experts one by one."""
    if not job.shape.num_experts:
        yield
        return
    import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"].MoEAlltoAllTokenDispatcher
    real = dispatcher.preprocess

    def preprocess(this: Any, routing_map: torch.Tensor) -> Any:
        real(this, routing_map)
        ledger.note_wait("megatron/core/transformer/moe/token_dispatcher.py")
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

    def on_host(this: experts.RowCounts) -> list[int]:
        if this.is_on_device:
            ledger.note_wait("megatron_rl/models/experts.py")
        return [this.num_rows // this.num_experts] * this.num_experts

    with (
        patch.object(dispatcher, "preprocess", preprocess),
        patch.object(experts.RowCounts, "on_host", property(on_host)),
    ):
        yield


@contextmanager
def counted_loads(ledger: Ledger) -> Iterator[None]:
    """Report loads of host memory to the ledger within the block.

    The ledger cannot see them: a fake tensor moved to the host still claims to be on the device.
    """
    real = HostMemory.load

    def load(this: HostMemory, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ledger.note_copy("cpu to cuda", sum(copy.nbytes for copy in copies))
        return real(this, copies)

    with patch.object(HostMemory, "load", load):
        yield


@contextmanager
def known_messages(ledger: Ledger, find_message: Callable[[], list[int]]) -> Iterator[None]:
    """Replace, within the block, the exchange of message shapes between interleaved pipeline stages by known shapes."""

    def communicate(this: Any, to_next: Any, to_previous: Any, from_previous: bool, from_next: bool) -> Any:
        ledger.note_wait("megatron/core/pipeline_parallel/p2p_communication.py")
        return find_message() if from_previous else [0, 0, 0], find_message() if from_next else [0, 0, 0]

    with patch.object(packed_model.P2PCommunicator, "_communicate_shapes", communicate):
        yield
