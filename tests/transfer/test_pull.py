# SPDX-License-Identifier: Apache-2.0
"""Mapping a peer's parameters on CPU. CUDA IPC is the same road with torch's own recipes; it needs GPUs.

Of those recipes only the change of device is tested here.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from distributed import run_ranks
from megatron_rl.transfer.transports import export_params, map_params, missing_shared_memory, move_recipe


def make_params() -> dict[str, torch.Tensor]:
    """Two views of one buffer, one of them with strides, and a tensor of its own."""
    buffer = torch.arange(60, dtype=torch.float32)
    return {"a": buffer[:20].view(4, 5), "b": buffer[20:].view(5, 8)[:, 2:5], "c": torch.ones(3, dtype=torch.bfloat16)}


def test_sharing_moves_storage_in_place() -> None:
    """Every view follows, values stay, and a second export describes the same memory."""
    params = make_params()
    parameter = torch.nn.Parameter(params["a"])
    first = export_params(params)
    assert len(first.storages) == 2
    assert parameter.data_ptr() == params["a"].data_ptr() and parameter.is_shared()
    assert torch.equal(params["b"], torch.arange(20.0, 60.0).view(5, 8)[:, 2:5])
    inodes = [os.stat(path).st_ino for path, _ in first.storages]
    assert [os.stat(path).st_ino for path, _ in export_params(params).storages] == inodes
    assert missing_shared_memory(params, ranks_per_node=10**6) == 0, "shared already: nothing more is needed"


def test_peers_see_writes_and_leave_nothing_behind() -> None:
    """Rank 1 reads rank 0's writes after the mapping; /dev/shm has no new entry meanwhile."""
    before = set(os.listdir("/dev/shm"))

    def work(rank: int, world_size: int) -> list[list[float]] | None:
        params = make_params()
        exports = [None, None]
        dist.all_gather_object(exports, export_params(params))
        mapped = map_params(exports[1 - rank], torch.device("cpu"))
        params["b"].fill_(float(rank + 5))
        params["c"].fill_(float(rank))
        dist.barrier()
        seen = [mapped[name].float().unique().tolist() for name in ("b", "c")]
        assert torch.equal(mapped["a"], torch.arange(20.0).view(4, 5))
        assert set(os.listdir("/dev/shm")) <= before
        dist.barrier()
        return seen

    assert run_ranks(work, 2, timeout=60) == [[[6.0], [1.0]], [[5.0], [0.0]]]


def test_gpu_memory_is_mapped_on_the_own_device() -> None:
    """On the peer's, every rank would have a CUDA context on every GPU of the node."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    of_peer = tuple(3 if name == "storage_device" else f"{name} of the peer" for name in names)
    moved = move_recipe(rebuild_cuda_tensor, of_peer, torch.device("cuda", 1))
    assert dict(zip(names, moved, strict=True)) == dict(zip(names, of_peer, strict=True)) | {"storage_device": 1}


def test_too_little_shared_memory_is_noticed_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with 64 MiB: writing would kill the process."""

    class Small:
        f_bavail, f_frsize = 16, 1 << 20

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    params = {"w": torch.zeros(8 << 20, dtype=torch.uint8)}
    assert missing_shared_memory(params, ranks_per_node=2) == (16 << 20) + (64 << 20) - (16 << 20)
    assert Path("/dev/shm").is_dir()
