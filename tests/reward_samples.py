# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a toy sum and reward functions on disk, for the tests of rewards."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_rl.rewards.scoring import score_math
from megatron_rl.types import Prompt, Rollout

SIGNATURE = "data_source, solution_str, ground_truth, extra_info"


def make_rollout(response: str = "82", truth: str = "82", prompt_id: int = 17, sample_index: int = 5) -> Rollout:
    """A rollout whose tokens are the bytes of the response; the response itself is decoded already."""
    prompt = Prompt(prompt_id, np.zeros(2, np.int32), "37+45=", truth, "sums", {"level": 3})
    rollout = Rollout.from_response(prompt, sample_index, np.asarray([*response.encode()], np.int32), None, "stop")
    return replace(rollout, response=response)


def math_equal(response: str, ground_truth: str | list[str]) -> float:
    """The score of `score_math`."""
    return score_math(response, ground_truth)["score"]


def decode(tokens: list[int]) -> str:
    """Inverse of the bytes of `make_rollout`."""
    return bytes(tokens).decode()


def write_function(
    directory: Path, body: str, name: str = "reward.py", imports: str = "import os, time", further: str = ""
) -> str:
    """Write a reward function `f` with that body, perhaps with further parameters, and return it as path.py:name."""
    lines = [imports, f"def f({SIGNATURE}{further}):", *(f"    {line}" for line in body.splitlines())]
    (directory / name).write_text("\n".join(lines) + "\n")
    return f"{directory / name}:f"


def wait_for_file(path: Path, seconds: float = 20.0) -> str:
    """The content of a file that another process writes in one go."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} was not written within {seconds} s"
        time.sleep(0.01)
    return path.read_text()


def wait_for_end(pid: int, seconds: float = 20.0) -> None:
    """Wait until there is no such process, or only its exit code."""
    deadline = time.monotonic() + seconds
    while _is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs after {seconds} s"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
