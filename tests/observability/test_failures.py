# SPDX-License-Identifier: Apache-2.0
"""Explanations of exceptions; messages of libraries that a CPU machine cannot raise are quoted.

Not covered: that the console shows a message once (tests/launch/test_failures.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.observability.failures import Position, Scene, explain, is_lost_peer, is_out_of_memory
from megatron_rl.types import UserError

SCENE = Scene(3, 7, "update", Path("run/logs/rank3.log"))
CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 3.06 GiB is "
    "free. Including non-PyTorch memory, this process has 136.65 GiB memory in use. Of the allocated memory 134.25 GiB "
    "is allocated by PyTorch"
)
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error, NCCL version 2.27"


def raised(error: Exception) -> Exception:
    """Return the error with a traceback."""
    try:
        raise error
    except Exception as caught:
        return caught


def test_gpu_memory() -> None:
    found = explain(raised(torch.OutOfMemoryError(CUDA)), SCENE)
    assert found.found == (
        "out of memory: 20.00 GiB asked for (GPU 0 has a total capacity of 139.72 GiB of which 3.06 GiB is free, "
        "136.65 GiB in use by this rank)"
    )
    assert found.source.startswith("rank 3, step 7, phase update, ") and "in raised" in found.source
    assert found.hint.startswith("lower actor.max_tokens_per_microbatch or actor.logprob_chunk_tokens")


@pytest.mark.parametrize(
    ("phase", "hint"),
    [
        ("rollout", "rollout.gpu_memory_utilization"),
        ("reshard", "hybrid.bucket_bytes"),
        ("save", "async_save=false"),
        ("update_critic", "critic.max_tokens_per_microbatch"),
        (None, "actor.max_tokens_per_microbatch"),
    ],
)
def test_the_hint_is_of_the_phase(phase: str | None, hint: str) -> None:
    assert hint in explain(raised(MemoryError()), Scene(0, 1, phase, Path("x"))).hint


def test_host_memory() -> None:
    """Real errors of torch and numpy."""
    for allocate, size in (
        (lambda: torch.empty(1 << 50, dtype=torch.uint8), "1048576.00 GiB"),
        (lambda: np.empty(1 << 55, np.uint8), "32.0 PiB"),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        found = explain(caught.value, SCENE)
        assert found.found.startswith(f"out of memory: {size} asked for (") and "left on the host" in found.found


def test_a_lost_peer() -> None:
    lost = Position(1, 6, "rollout", 9, None, None, "engine.py:3 in generate", 2.0, 5)
    found = explain(
        raised(RuntimeError("[/a/pair.cc:5] Connection closed by peer [::1]:4. This is typically caused")),
        SCENE,
        lambda: [lost],
    )
    assert found.found == (
        "rank 1 left the job, or is stopped, and gives no sign of life; "
        "last seen: rank 1 in step 6, phase rollout (engine.py:3 in generate)"
    )
    assert found.source == "rank 3, step 7, phase update: Connection closed by peer [::1]:4."
    assert "run/logs/rank1.log" in found.hint and "dmesg" in found.hint
    assert explain(RuntimeError("Socket closed"), SCENE).found == "RuntimeError: Socket closed", "all ranks are there"
    assert is_lost_peer(torch.distributed.DistBackendError(NCCL)) and is_lost_peer(RuntimeError(NCCL))


def test_a_full_disk() -> None:
    with pytest.raises(OSError) as caught, open("/dev/full", "w") as file:
        file.write("x")
    found = explain(caught.value, SCENE)
    assert found.found == "the disk is full: [Errno 28] No space left on device"
    assert found.source.startswith("rank 3, step 7, phase update, ") and "resume" in found.hint


def test_anything_else_names_its_place() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        Position.decode("not json")
    found = explain(caught.value, SCENE)
    assert found.found == "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert "decoder.py:" in found.source and "called from megatron_rl/observability/failures.py:" in found.source
    assert "run/logs/rank3.log" in found.hint
    for error in (caught.value, ValueError("x"), ConnectionRefusedError("Connection refused")):
        assert not is_out_of_memory(error) and not is_lost_peer(error)


def test_an_error_of_the_users_stays() -> None:
    error = UserError("a", source="b", expected="c", hint="d")
    assert explain(error, SCENE) is error


def test_the_scene_knows_where_an_error_came_from() -> None:
    """`raise_together` marks the rank, `PhaseTimers` the phase; an error of all ranks has no rank."""
    error = RuntimeError("x")
    error.raised_on, error.left_phase = 5, "reward"
    scene = Scene.of(error, 2, 4, Path("logs/rank2.log"))
    assert (str(scene), scene.log_file.name) == ("rank 5, step 4, phase reward", "rank5.log")
    user_error = UserError("a", source="b", expected="c", hint="d")
    assert str(Scene.of(user_error, 2, 0, Path("logs/rank2.log"))) == "before the first step"
