# SPDX-License-Identifier: Apache-2.0
"""The fake world of a rehearsed rank: absent peers, skipped file reads, a mesh of real numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._tools import fake_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.models import attention
from megatron_rl.parallel import groups as group_module
from megatron_rl.training import adapted_model as adapters
from megatron_rl.training import packed_model
from megatron_rl.training import router_replay as routing
from megatron_rl.transfer.executor import Certificate

assert fake_collectives, "registers what collectives make of fake tensors"


def _make_mesh(*args: Any, real: Any = DeviceMesh.from_group, **options: Any) -> DeviceMesh:
    """Build a mesh whose ranks are real numbers on the host."""
    with unset_fake_temporarily():
        return real(*args, **options)


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a job whose other ranks are absent."""
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
        patch.object(packed_model, "load_weights", nothing),
        patch.object(DeviceMesh, "from_group", _make_mesh),
        patch.object(routing, "describe_routing", lambda *counts: {}),  # reads values on the host
        patch.object(Certificate, "_raise_if_wrong", nothing),  # compares digests of values
        patch.object(
            attention,
            "choose_attention_backend",
            lambda device, dtype: "efficient" if dtype is torch.float32 else "torch-varlen",
        ),
    ):
        yield
    dist.destroy_process_group()
