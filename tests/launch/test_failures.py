# SPDX-License-Identifier: Apache-2.0
"""Every failure of a job is one message on the console with source and hint; tracebacks are in the logs.

Faults are planted by tests/faulty_program.py, mostly on rank 1 of 2 in the second step, in forks; the slow tier has all
of them under real torchrun. Not covered: GPUs (their
out-of-memory message is in tests/observability/test_failures.py), NCCL's errors, several nodes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from faulty_program import main

from launch_runs import ROOT, fork_ranks, run
from rl_runs import overrides_for

FAULTY = ROOT / "tests" / "faulty_program.py"
TORCHRUN_SAYS = re.compile(r'^Traceback \(most recent call last\):\n  File ".*torchrun"', re.M)


@dataclass(frozen=True)
class Failure:
    """A fault and its expected output.

    Attributes:
        fault: of tests/faulty_program.py.
        message: pattern of the message on the console, up to its hint.
        code: exit status of the ranks.
        traceback: last line of the traceback in the log of rank `rank`.
        settings: further overrides.
    """

    fault: str
    message: str
    code: int
    traceback: str
    rank: int = 1
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.fault


STALLED = (
    r"no progress in 4 s \(trainer.collective_timeout\): rank 0 waited for rank 1 in step 2, phase {phase}, .*\n"
    r" +rank 0: step 2, phase {phase}: waits in \w+ of ranks 0-1 for \d+ s \({where}.*\)\n"
    r" +rank 1: step 2, phase {phase}: is in no collective for \d+ s \(.*\)\n"
    r"(    +\w+ #\d+ of ranks 0,1, begun .*\n)+"
    r"  source:   the watchdog of rank 0\n"
    r"  expected: .*\n  hint:     the stacks of all threads of rank N are in .*/logs/rank<N>.log"
)
FAILURES = [
    Failure(
        "lose_a_logprob",
        r"a response of (\d+) tokens with \d+ log-probs\n"
        r"  source:   rollout engine 1 \(HuggingFaceEngine, rank 1\), prompt_id \d+, sample \d\n"
        r"  expected: one log-prob per sampled token, both \[s\]\n  hint:     an engine of your own must .*\n"
        r"  where:    rank 1, step 2, phase rollout$",
        2,
        "megatron_rl.types.UserError: a response of",
    ),
    Failure(
        "api_none",  # a user's script, and a reward function that raises
        r"the reward function raised ZeroDivisionError: division by zero\n  rollout:  prompt_id 7, sample_index \d,"
        r" .*\n  response: .*\n  ground truth: '17'\n  source:   .*/reward.py:5\n  expected: a finite number per .*\n"
        r"  hint:     make the function return that .*\n  where:    rank \d, step \d, phase reward$",
        2,
        "megatron_rl.types.UserError: the reward function raised",
        settings=("reward.function={task}/reward.py:broken",),
    ),
    Failure(
        "spoil_an_advantage",
        r"the loss of optimizer step 3 is nan \(the weights are as before\)\n"
        r"  source:   actor, microbatches \d of DP rank \d, advantages of 1 responses are not finite: "
        r"prompt_id \d+, sample 1\n  expected: .*\n  hint:     look at the rewards in rollouts/, .*\n"
        r"  where:    step 2, phase update$",
        2,
        "megatron_rl.types.UserError: the loss of optimizer step 3",
    ),
    Failure(
        "run_out_of_memory_in_update",
        r"out of memory: 131072.00 GiB asked for \(\d+.\d\d GiB in use by this rank, .* left on the host\)\n"
        r"  source:   rank 1, step 2, phase update, .*faulty_program.py:\d+ in <lambda>, called from "
        r"megatron_rl/training/roles/actor.py:\d+ in forward_backward\n  expected: .*\n"
        r"  hint:     lower actor.max_tokens_per_microbatch or ",
        1,
        "RuntimeError: [enforce fail at alloc_cpu.cpp",
    ),
    Failure(
        "vanish",
        r"rank 1 left the job, or is stopped, and gives no sign of life; last seen: rank 1 in step \d.*\n"
        r"  source:   rank 0, step 2, phase rollout: .*\n  expected: .*\n"
        r"  hint:     look at the end of .*/logs/rank1.log, and for the OOM killer in dmesg; .*--max-restarts",
        1,
        "RuntimeError: ",
        rank=0,
    ),
    Failure(
        "sleep_in_reward",
        STALLED.format(phase="reward", where="collector.py"),
        70,
        "tests/faulty_program.py",
        settings=("trainer.collective_timeout=4",),
    ),
    Failure(
        "sleep_in_reshard",
        STALLED.format(phase="reshard", where="executor.py"),
        70,
        "tests/faulty_program.py",
        settings=("trainer.collective_timeout=4",),
    ),
]
MORE_FAILURES = [
    Failure(
        "vanish_first",  # rank 1 speaks for it
        r"rank 0 left the job, or is stopped, and gives no sign of life; .*\n  source:   rank 1, step 2, .*\n"
        r"  expected: .*\n  hint:     look at the end of .*/logs/rank0.log",
        1,
        "RuntimeError: ",
    ),
    Failure(
        "run_out_of_memory_at_start",
        r"out of memory: 131072.00 GiB asked for .*\n  source:   rank 1, before the first step, .*, called from "
        r"megatron_rl/engines/build.py:\d+ in build_engine\n  expected: .*\n"
        r"  hint:     lower rollout.gpu_memory_utilization, ",
        1,
        "RuntimeError: [enforce fail at alloc_cpu.cpp",
    ),
    Failure(
        "raise_something",
        r"KeyError: 'no such key'\n  source:   rank 1, step 2, .*faulty_program.py:\d+ in <lambda>, called from "
        r"megatron_rl/rollout/collector.py:\d+ in generate\n  expected: .*\n"
        r"  hint:     the traceback is in .*/logs/rank1.log; ",
        1,
        "KeyError: 'no such key'",
    ),
    Failure(
        "run_out_of_memory_in_sft",
        r"out of memory: .*\n  source:   rank 1, step 2, phase update, .*\n  expected: .*\n  hint:     lower actor",
        1,
        "RuntimeError: [enforce fail at alloc_cpu.cpp",
    ),
]


def list_settings(failure: Failure, task: Path, tmp_path: Path) -> list[str]:
    return overrides_for(
        task,
        tmp_path / "run",
        "rollout.engine=hf",
        "trainer.total_steps=3",
        "trainer.save_freq=null",
        "data.validation_files=[]",
        *(setting.format(task=task) for setting in failure.settings),
    )


def launch(failure: Failure, task: Path, tmp_path: Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Ranks of the program with the fault, under torchrun."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    return run([*torchrun, str(FAULTY), failure.fault, *list_settings(failure, task, tmp_path)])


def fork(failure: Failure, task: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run the program with the fault on forks of this process."""
    return fork_ranks(partial(main, failure.fault, list_settings(failure, task, tmp_path)), 2, tmp_path)


def check(failure: Failure, result: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    """Check the one message, without our traceback, the exit code, and the traceback in the log."""
    ours = TORCHRUN_SAYS.split(result.stderr)[0]
    assert len(re.findall(rf"^error: {failure.message}", ours, re.M)) == 1, result.stderr[-6000:]
    everything = result.stdout + ours
    for word in ("error:", "  source: ", "  expected: ", "  hint: "):
        assert len(re.findall(f"^{word}", everything, re.M)) == 1, everything[-6000:]
    assert "Traceback" not in everything and result.returncode != 0
    codes = {int(code) for code in re.findall(r"exitcode  : (-?\d+)", result.stderr)}
    assert failure.code in codes and codes <= {failure.code, -15, -9}, result.stderr[-3000:]
    log = (tmp_path / f"run/logs/rank{failure.rank}.log").read_text()
    assert failure.traceback in log, log[-6000:]


@pytest.mark.parametrize("failure", [found for found in FAILURES if found.fault != "sleep_in_reward"], ids=str)
def test_a_failure_is_one_message(failure: Failure, task: Path, tmp_path: Path) -> None:
    """A user's script ends by the interpreter's own exception hook, which forks do not reach."""
    start = launch if failure.fault.startswith("api_") else fork
    check(failure, start(failure, task, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure", [failure for failure in FAILURES if "api" not in str(failure)] + MORE_FAILURES, ids=str
)
def test_a_failure_is_one_message_under_torchrun(failure: Failure, task: Path, tmp_path: Path) -> None:
    check(failure, launch(failure, task, tmp_path), tmp_path)


@pytest.mark.slow
def test_a_full_disk_is_one_error_at_the_start(task: Path, tmp_path: Path) -> None:
    """Before any model is built, and without the log's own error about its file."""
    result = launch(Failure("fill_the_disk", "", 2, ""), task, tmp_path, ranks=1)  # with its output in pipes
    ours = TORCHRUN_SAYS.split(result.stderr)[0]
    message = (
        r"^error: cannot write the run directory: \[Errno 27\] File too large\n"
        r"  source:   trainer.run_dir \(command line\)\n"
        r"  expected: .*\n  hint:     free some space there, .*$"
    )
    assert len(re.findall(message, ours, re.M)) == 1, ours
    assert ours.count("error:") == 1 and "Traceback" not in ours and "Logging error" not in ours
    assert re.fullmatch(r"megatron_rl .*: command line, 1 rank\(s\); reading model and data\n", result.stdout)
    assert set(re.findall(r"exitcode  : (-?\d+)", result.stderr)) <= {"2", "-15"}
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.stat().st_size]
