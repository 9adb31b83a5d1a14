# SPDX-License-Identifier: Apache-2.0
"""Real worker processes: their results, and user functions that hang, die or raise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.rewards.functions import WorkerPool, compute_score, load_reward_function
from megatron_rl.rewards.scoring import Score
from megatron_rl.types import UserError
from reward_samples import make_rollout, wait_for_end, wait_for_file, write_function

ROOT = Path(__file__).resolve().parents[2]
SETTING = "reward.function"


@contextmanager
def open_pool(
    *functions: str, num_workers: int = 1, timeout: float = 20.0, secrets: Sequence[str] = ()
) -> Iterator[WorkerPool]:
    pool = WorkerPool([(name, SETTING) for name in functions], num_workers, timeout, secrets=secrets)
    try:
        yield pool
    finally:
        pool.close()


def test_scores_are_those_of_the_rank_in_order(tmp_path):
    function = write_function(tmp_path, "return {'score': len(solution_str), 'level': extra_info['level']}")
    samples = [make_rollout("x" * n, sample_index=n) for n in range(12)]
    expected = [compute_score(load_reward_function(function), sample) for sample in samples]
    with open_pool("format", function, num_workers=3) as pool:
        futures = [pool.submit(1, sample) for sample in samples]
        marked = pool.submit(0, make_rollout("#### 1"))
        assert [future.result() for future in futures] == expected
        assert marked.result() == Score(1.0)


def test_worker_imports_the_file_and_little_else(tmp_path):
    body = (
        "heavy = ('torch', 'vllm', 'megatron.core', 'transformers', 'requests', 'math_verify')\n"
        "return {'score': sum(name in sys.modules for name in heavy), 'stdin': len(sys.stdin.read()),\n"
        "        'main_thread': threading.current_thread() is threading.main_thread()}"
    )
    with open_pool(write_function(tmp_path, body, imports="import sys, threading")) as pool:
        assert pool.submit(0, make_rollout()).result() == Score(0.0, {"stdin": 0.0, "main_thread": 1.0})


def test_hanging_function_is_killed_and_named(tmp_path):
    """With the processes that it has started; the next sample gets a new worker."""
    pids = tmp_path / "pids"
    function = write_function(
        tmp_path,
        "if solution_str != 'stay':\n    return 0.5\nchild = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(1000)",
        imports="import os, subprocess, time",
    )
    with open_pool(function, timeout=0.7) as pool:
        hanging, fine = pool.submit(0, make_rollout("stay")), pool.submit(0, make_rollout("go", sample_index=6))
        with pytest.raises(UserError, match=r"not done after 0\.7 s") as caught:
            hanging.result()
        assert "prompt_id 17, sample_index 5" in str(caught.value) and "'stay'" in str(caught.value)
        assert caught.value.source == f"reward.function = {function}"
        assert fine.result() == Score(0.5)
        for pid in pids.read_text().split():
            wait_for_end(int(pid))


@pytest.mark.parametrize(
    "body, message",
    [
        ("threading.Thread(target=os._exit, args=[3]).start(); time.sleep(100)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    ],
)
def test_dying_worker_is_named(tmp_path, body, message):
    function = write_function(tmp_path, body, imports="import os, threading, time")
    with open_pool(function) as pool, pytest.raises(UserError, match=message) as caught:
        pool.submit(0, make_rollout()).result()
    assert "ended its process" in str(caught.value) and "prompt_id 17, sample_index 5" in str(caught.value)


def test_exception_names_rollout_and_line_as_in_the_rank(tmp_path):
    function = write_function(tmp_path, "return 1 / len(solution_str[2:])")
    with pytest.raises(UserError) as here:
        compute_score(load_reward_function(function), make_rollout())
    with open_pool(function) as pool, pytest.raises(UserError) as there:
        pool.submit(0, make_rollout()).result()
    assert str(there.value) == str(here.value) and there.value.source == f"{tmp_path / 'reward.py'}:3"


def test_file_that_loads_in_the_rank_only(tmp_path):
    name = write_function(tmp_path, "return 1", imports=f"import os\nif os.getpid() != {os.getpid()}: raise OSError(7)")
    load_reward_function(name)
    with open_pool(name) as pool, pytest.raises(UserError, match="importing the file raised OSError: 7"):
        pool.submit(0, make_rollout()).result()


def test_file_that_ends_the_process_on_import(tmp_path):
    """Also by os._exit, which is refused in the importing thread."""
    for end, message in (
        ("os._exit(5)", r"raised ProcessExit: os\._exit\(5\)"),
        ("os.kill(os.getpid(), 9)", "did not start: EOFError, killed by SIGKILL"),
    ):
        with open_pool(write_function(tmp_path, "return 1", imports=f"import os\n{end}")) as pool:
            with pytest.raises(UserError, match=message):
                pool.submit(0, make_rollout()).result()


def test_workers_do_not_inherit_secrets(tmp_path, monkeypatch):
    names = ("WANDB_API_KEY", "HF_TOKEN", "MY_PASSWORD", "OPENAI_API_KEY", "TOKENIZERS_PARALLELISM", "KEYBOARD")
    for name in names:
        monkeypatch.setenv(name, "1")
    function = write_function(tmp_path, f"return {{'score': 1, **{{n: 1 for n in {names} if n in os.environ}}}}")
    with open_pool(function, secrets=["OPENAI_API_KEY"]) as pool:
        assert pool.submit(0, make_rollout()).result().components.keys() == {
            "OPENAI_API_KEY",
            "TOKENIZERS_PARALLELISM",
            "KEYBOARD",
        }


def test_close_ends_idle_and_busy_workers(tmp_path):
    function = write_function(
        tmp_path,
        f"open({str(tmp_path)!r} + '/' + solution_str, 'w').write(str(os.getpid()))\n"
        "time.sleep(1000 * (solution_str == 'busy'))\nreturn 1",
    )
    pool = WorkerPool([(function, SETTING)], 2, 1000.0)
    pool.submit(0, make_rollout("busy"))
    wait_for_file(tmp_path / "busy")
    pool.submit(0, make_rollout("idle")).result()
    queued = [pool.submit(0, make_rollout("busy")) for _ in range(3)]
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 10
    assert queued[-1].cancelled()
    for name in ("busy", "idle"):
        wait_for_end(int((tmp_path / name).read_text()))


def test_workers_end_with_a_killed_rank(tmp_path):
    """Even in the middle of a function, as nobody is left who could kill them."""
    function = write_function(
        tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    )
    code = (
        "from megatron_rl.rewards.functions import WorkerPool\nfrom reward_samples import make_rollout\n"
        f"WorkerPool([({function!r}, 'reward.function')], 1, 1000.0).submit(0, make_rollout()).result()"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    )
    try:
        pid = int(wait_for_file(tmp_path / "pid"))
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    wait_for_end(pid)


def _score_between_collectives(rank: int, world_size: int, function: str) -> tuple[list[float], float]:
    total = torch.ones(1)
    dist.all_reduce(total)  # gloo's threads are there when the workers start
    with open_pool(function, num_workers=2) as pool:
        futures = [pool.submit(0, make_rollout("x" * (4 * rank + n))) for n in range(4)]
        dist.all_reduce(total)
        return [future.result().value for future in futures], float(total)


def test_beside_process_groups(tmp_path):
    """Ranks with gloo's threads; vLLM and CUDA in the rank are not covered here."""
    function = write_function(tmp_path, "return len(solution_str)")
    results = run_ranks(_score_between_collectives, 2, function)
    assert results == [([0.0, 1.0, 2.0, 3.0], 4.0), ([4.0, 5.0, 6.0, 7.0], 4.0)]
