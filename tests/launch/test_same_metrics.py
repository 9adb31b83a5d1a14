# SPDX-License-Identifier: Apache-2.0
"""The same main, started in every supported way, computes the same three steps to the last bit.

Each test launches four real processes with vLLM in them. Ray is used if it is installed (it is not a requirement). The
two hosts are network namespaces with addresses and host names of their own: messages go through sockets, and only ranks
of one host read each other's memory. Not covered: a SLURM daemon (srun and scontrol are stand-ins that start the two
tasks of the job here), machines that share no kernel, GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from distributed import find_free_port
from launch_runs import ROOT, STEPS, assert_succeeded, environment, run, write_recipe
from namespaces import Host, can_make_hosts, two_hosts
from rl_runs import read_records

pytestmark = pytest.mark.slow

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
options = sys.argv[1:sys.argv.index("bash")]
[count] = [int(word.partition("=")[2]) for word in options if word.startswith("--ntasks=")]
command = sys.argv[sys.argv.index("bash"):]
started = [subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)}})
           for i in range(count)]
sys.exit(max(abs(process.wait()) for process in started))
"""
SCONTROL = f"#!{sys.executable}\nprint('127.0.0.1\\n127.0.0.1')\n"


@pytest.fixture(scope="module")
def recipe(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(task, tmp_path_factory.mktemp("recipe") / "sums.yaml")


@pytest.fixture(scope="module")
def reference(recipe: Path) -> list[dict]:
    """The metrics of the run by torchrun on one node."""
    run_dir = recipe.parent / "torchrun"
    assert_succeeded(run(["bash", "launch/train_single_node.sh", str(recipe)], NPROC="4", RUN_DIR=str(run_dir)))
    records = read_records(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["policy/grad_norm"] > 0 for record in records)
    return records


def test_slurm(recipe: Path, reference: list[dict], tmp_path: Path) -> None:
    """sbatch's file, two tasks of two ranks, one rendezvous."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    result = run(
        ["bash", "launch/slurm.sbatch", str(recipe)],
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_ID="4711",
        SLURM_JOB_NAME="sums",
        SLURM_JOB_NODELIST="node[07-08]",
        SLURM_JOB_NUM_NODES="2",
        SLURM_GPUS_ON_NODE="2",
        SLURM_SUBMIT_DIR=str(ROOT),
        NPROC="2",
        MASTER_PORT=str(find_free_port()),
        RUN_DIR=str(tmp_path / "run"),
    )
    assert_succeeded(result)
    assert read_records(tmp_path / "run") == reference


def test_ray(recipe: Path, reference: list[dict], tmp_path: Path) -> None:
    """Ray Train on a local Ray: four workers on this machine's cores."""
    pytest.importorskip("ray.train.torch")
    result = run(
        [
            sys.executable,
            "launch/ray_train.py",
            str(recipe),
            "--num-workers",
            "4",
            "--cpus-per-worker",
            "0.1",
            f"trainer.run_dir={tmp_path}/run",
        ]
    )
    assert_succeeded(result)
    assert read_records(tmp_path / "run") == reference


@contextmanager
def train_on(
    hosts: Sequence[Host], recipe: Path, run_dir: Path, *overrides: str, restarts: int = 0
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The same command on every host, two ranks each; their output goes to files beside the run directory."""
    processes = []
    try:
        for host in hosts:
            with output_of(run_dir, host).open("w") as file:
                processes.append(
                    subprocess.Popen(
                        host.command("bash", "launch/train_multi_node.sh", str(recipe), *overrides),
                        cwd=ROOT,
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                        env=environment(
                            NNODES="2",
                            NPROC="2",
                            MASTER_ADDR=hosts[0].address,
                            LOCAL_ADDR=host.address,
                            GLOO_SOCKET_IFNAME=host.interface,
                            RUN_DIR=str(run_dir),
                            MAX_RESTARTS=str(restarts),
                            RDZV_CONF=f"is_host={int(host is hosts[0])}",
                            GRACE_SECONDS="20",
                        ),
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def output_of(run_dir: Path, host: Host) -> Path:
    """Return the output directory of a host of `train_on`."""
    return run_dir.with_name(f"{run_dir.name}-{host.interface[-1]}.out")


def wait_for(is_true: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.2)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = can_make_hosts()
    if reason:
        pytest.skip(reason)
    with two_hosts() as pair:
        yield pair


def test_two_hosts(hosts: tuple[Host, Host], recipe: Path, reference: list[dict], tmp_path: Path) -> None:
    """One agent on each; weights are pulled from the peer on the same host and come in buckets from the other one."""
    with train_on(hosts, recipe, tmp_path / "run") as processes:
        wait_for(lambda: False, processes, 300)
        outputs = [output_of(tmp_path / "run", host).read_text() for host in hosts]
        assert [process.poll() for process in processes] == [0, 0], outputs
    assert "transport pull+buckets" in outputs[0]
    assert read_records(tmp_path / "run") == reference


def test_a_cut_cable(hosts: tuple[Host, Host], recipe: Path, reference: list[dict], tmp_path: Path) -> None:
    """The link is lost after the first step: one error names waiting and missing ranks. Later, the run continues."""
    run_dir, metrics = tmp_path / "run", tmp_path / "run/metrics.jsonl"
    overrides = ("trainer.collective_timeout=15", "trainer.save_freq=1", "checkpoint.contents=[optimizer]")
    with train_on(hosts, recipe, run_dir, *overrides, restarts=2) as processes:
        wait_for(lambda: (run_dir / "checkpoints/step_1/SHA256SUMS").exists(), processes, 240)
        hosts[0].set_link("down")
        first = output_of(run_dir, hosts[0])
        wait_for(lambda: "no progress in 15 s" in first.read_text(), processes, 120)
        hosts[0].set_link("up")
        wait_for(lambda: False, processes, 300)
        outputs = [output_of(run_dir, host).read_text() for host in hosts]
        codes = [process.poll() for process in processes]
    assert outputs[0].count("no progress in 15 s (trainer.collective_timeout)") == 1, outputs[0][-4000:]
    assert codes == [0, 0], "\n".join(text[-3000:] for text in outputs)
    assert metrics.read_text().count("\n") == STEPS and read_records(run_dir) == reference
