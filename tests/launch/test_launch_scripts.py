# SPDX-License-Identifier: Apache-2.0
"""The commands that the launch scripts start, with stand-ins on PATH that record their calls.

Covers: arguments, environment, a SLURM-style environment, requeueing on a signal, and that no script kills by name.
Not covered: SLURM, Apptainer, Docker and ROCm themselves. test_same_metrics.py shows that the same main runs to equal
metrics under torchrun, this SLURM environment and Ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "launch/recipes/toy_arithmetic.yaml"
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch")])
# Writes its name, arguments and the interesting part of the environment as one JSON line.
RECORDER = f"""#!{sys.executable}
import json, os, sys
keep = ("NNODES", "NPROC", "MASTER_ADDR", "MASTER_PORT", "RUN_DIR", "JOB_ID", "HIP_VISIBLE_DEVICES", "PYTHON_BIN",
        "OMP_NUM_THREADS", "NCCL_DEBUG")
with open(os.environ["RECORD"], "a") as file:
    seen = {{name: os.environ.get(name) for name in keep}}
    file.write(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], seen]) + "\\n")
if os.path.basename(sys.argv[0]) == "scontrol" and sys.argv[1] == "show":
    print("node07\\nnode08")
if os.path.basename(sys.argv[0]) == "srun" and os.environ.get("SRUN_SAYS"):
    sys.exit(print(os.environ["SRUN_SAYS"], file=sys.stderr) or 1)
if os.path.basename(sys.argv[0]) == "srun" and os.environ.get("SRUN_SECONDS"):
    import signal, time
    signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(1.0), sys.exit(75)))
    time.sleep(float(os.environ["SRUN_SECONDS"]))
"""
SIGNALS = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout", "150"]
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "megatron_rl",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_SUBMIT_DIR": str(ROOT),
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """PATH with stand-ins first; they write to `RECORD`."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("torchrun", "srun", "scontrol", "apptainer"):
        (directory / name).write_text(RECORDER)
        (directory / name).chmod(0o755)
    (directory / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # a link loses its packages
    (directory / "python").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMP_NUM", "NCCL"))}
    return clean | {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "PYTHON_BIN": str(directory),
        "RECORD": str(tmp_path / "record"),
    }


def run(script: str, *arguments: str, environment: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"launch/{script}", *arguments],
        cwd=ROOT,
        env=environment | more,
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(environment: dict[str, str]) -> list[tuple[str, list[str], dict[str, str]]]:
    return [tuple(json.loads(line)) for line in Path(environment["RECORD"]).read_text().splitlines()]


def test_single_node(environment: dict[str, str]) -> None:
    result = run(
        "train_single_node.sh",
        RECIPE,
        "actor.lr=2e-6",
        environment=environment,
        NPROC="4",
        RUN_DIR="runs/a",
        MODEL_PATH="/models/m",
    )
    assert result.returncode == 0, result.stderr
    [(name, arguments, seen)] = calls(environment)
    assert (name, seen["OMP_NUM_THREADS"]) == ("torchrun", "1")
    assert arguments == [
        *SIGNALS,
        "--standalone",
        "--nproc-per-node",
        "4",
        "launch/pretrain_grpo.py",
        RECIPE,
        "model.path=/models/m",
        "trainer.run_dir=runs/a",
        "actor.lr=2e-6",
    ]


def test_multi_node(environment: dict[str, str]) -> None:
    """The same command on every node: nothing in it depends on which node it is."""
    result = run(
        "train_multi_node.sh",
        RECIPE,
        "--sequence-parallel",
        environment=environment,
        NPROC="8",
        NNODES="2",
        MASTER_ADDR="node07",
        RUN_DIR="/shared/runs/a",
        RDZV_CONF="join_timeout=60",
        LOCAL_ADDR="10.0.0.1",
    )
    assert result.returncode == 0, result.stderr
    [(_, arguments, _)] = calls(environment)
    assert arguments == [
        *SIGNALS,
        "--nnodes",
        "2",
        "--nproc-per-node",
        "8",
        "--max-restarts",
        "3",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "node07:29400",
        "--rdzv-id",
        "a",
        "--rdzv-conf",
        "join_timeout=60",
        "--local-addr",
        "10.0.0.1",
        "launch/pretrain_grpo.py",
        RECIPE,
        "trainer.run_dir=/shared/runs/a",
        "checkpoint.resume=auto",
        "--sequence-parallel",
    ]


def test_a_node_of_engines(environment: dict[str, str], tmp_path: Path) -> None:
    """The same script and values with another role start engines by launch/engine.sh, again after a failure."""
    values = {"NNODES": "2", "MASTER_ADDR": "node07", "RUN_DIR": "/shared/runs/a", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    fails = (
        f'[ "$2" != launch/engine.py ] || {{ [ -e {tmp_path}/failed ] && exit 0; touch {tmp_path}/failed; exit 1; }}'
    )
    torchrun = tmp_path / "bin/torchrun"
    torchrun.write_text(f"#!/bin/sh\necho $CUDA_VISIBLE_DEVICES $* >> $RECORD\nshift 6\n{fails}\n")
    result = run("train_multi_node.sh", RECIPE, environment=environment, **values, ROLE="engine", TP="2")
    assert result.returncode == 0, result.stderr
    command = (
        "--standalone --nproc-per-node 2 --signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 60 launch/engine.py"
    )
    started = Path(environment["RECORD"]).read_text().splitlines()
    assert {f"{gpus} {command} /shared/runs/a --patience 600" for gpus in ("0,1", "2,3")} == {*started}
    assert len(started) >= 2
    wrong = run("train_multi_node.sh", RECIPE, environment=environment, **values, ROLE="actor")
    assert wrong.returncode == 2 and "ROLE is actor" in wrong.stderr
    wrong = run("train_multi_node.sh", environment=environment, ROLE="engine")
    assert wrong.returncode == 2 and "RUN_DIR is not set" in wrong.stderr


@pytest.mark.parametrize(
    ("script", "more", "message"),
    [
        ("train_single_node.sh", {"NPROC": "0"}, "torch sees no GPU"),
        ("train_multi_node.sh", {"NPROC": "1", "NNODES": "2", "RUN_DIR": "a"}, "MASTER_ADDR is not set"),
    ],
)
def test_what_is_missing_is_said(environment: dict[str, str], script: str, more: dict[str, str], message: str) -> None:
    result = run(script, RECIPE, environment=environment, **more)
    assert result.returncode == 2 and message in result.stderr
    assert run(script, "absent.yaml", environment=environment, **more).returncode == 2
    assert run(script, environment=environment, **more).returncode == 2
    assert not Path(environment["RECORD"]).exists()


def test_dry_run_starts_nothing(environment: dict[str, str]) -> None:
    """The plan is for all ranks of all nodes; there is no such model, so the run would not start."""
    result = run(
        "train_multi_node.sh",
        RECIPE,
        "--dry-run",
        "model.path=absent",
        environment=environment,
        NPROC="8",
        NNODES="4",
        MASTER_ADDR="node07",
        RUN_DIR="/shared/runs/a",
    )
    assert result.returncode == 2 and "there is no directory absent" in result.stderr
    assert "num_engines = world_size / engine_ranks = 32 / 1 = 32" in result.stdout
    assert not Path(environment["RECORD"]).exists()


def test_slurm(environment: dict[str, str]) -> None:
    """First node of the job, a port of its own, a run directory that a requeued job finds again."""
    result = run("slurm.sbatch", RECIPE, "actor.lr=2e-6", environment=environment, **SLURM)
    assert result.returncode == 0, result.stderr
    (_, listing, _), (name, arguments, seen) = calls(environment)
    assert listing == ["show", "hostnames", "node[07-08]"] and name == "srun"
    assert arguments == [
        "--kill-on-bad-exit=1",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--label",
        "bash",
        "launch/train_multi_node.sh",
        RECIPE,
        "actor.lr=2e-6",
    ]
    expected = {
        "NNODES": "2",
        "NPROC": "8",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": "24711",
        "JOB_ID": "4711-0",
        "RUN_DIR": "checkpoints/runs/megatron_rl-4711",
        "NCCL_DEBUG": "WARN",
    }
    assert expected.items() <= seen.items()
    run("slurm.sbatch", RECIPE, environment=environment, **SLURM, SLURM_RESTART_COUNT="1")
    again = calls(environment)[-1][2]
    assert (again["RUN_DIR"], again["JOB_ID"]) == (expected["RUN_DIR"], "4711-1")


@pytest.mark.parametrize("status", [0, 1])
def test_slurm_with_nodes_of_engines(environment: dict[str, str], tmp_path: Path, status: int) -> None:
    """The last nodes have a step of their own, which a lost node does not end; it ends with the run's."""
    srun = tmp_path / "bin/srun"
    srun.write_text(
        f"#!/bin/bash\necho ${{ROLE:-train}} $NNODES $* >> $RECORD\n"
        f"trap 'echo terminated >> $RECORD; exit 0' TERM\n"
        f"[[ ${{ROLE:-}} == engine ]] || {{ sleep 1; exit {status}; }}\nsleep 3 & wait\n"
    )
    more = SLURM | {"SLURM_JOB_NUM_NODES": "6", "ENGINE_NODES": "2"}
    result = run("slurm.sbatch", RECIPE, "schedule.elastic=true", environment=environment, **more)
    assert result.returncode == status, result.stderr
    lines = [line for line in Path(environment["RECORD"]).read_text().splitlines() if not line.startswith("[")]
    script = "bash launch/train_multi_node.sh"
    assert sorted(lines) == sorted(
        [
            "engine 4 --no-kill --kill-on-bad-exit=0 --nodes=2 --relative=4 --ntasks=2 --ntasks-per-node=1 --label "
            f"{script}",
            "train 4 --kill-on-bad-exit=1 --ntasks=4 --ntasks-per-node=1 --label --nodes=4 "
            f"{script} {RECIPE} schedule.elastic=true",
            *(["terminated"] if status else []),
        ]
    )


def test_slurm_on_amd(environment: dict[str, str]) -> None:
    result = run("slurm_rocm.sbatch", RECIPE, environment=environment, **SLURM, IMAGE="rl.sif", BIND="/models")
    assert result.returncode == 0, result.stderr
    name, arguments, seen = calls(environment)[-1]
    assert name == "srun" and seen["HIP_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert arguments[4:] == [
        "env",
        "--unset=ROCR_VISIBLE_DEVICES",
        "apptainer",
        "exec",
        "--rocm",
        "--bind",
        str(ROOT),
        "--pwd",
        str(ROOT),
        "--bind",
        "/models",
        "rl.sif",
        "bash",
        "launch/train_multi_node.sh",
        RECIPE,
    ]


def test_slurm_requeues_on_the_signal_and_keeps_waiting(environment: dict[str, str]) -> None:
    """USR1 comes three minutes before the time limit; the step receives it, saves and requests a requeue."""
    process = subprocess.Popen(
        ["bash", "launch/slurm.sbatch", RECIPE],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env=environment | SLURM | {"SRUN_SECONDS": "20"},
    )
    record, deadline = Path(environment["RECORD"]), time.monotonic() + 30
    while not (record.exists() and '"srun"' in record.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # until the stand-in has its handler
    process.send_signal(signal.SIGUSR1)
    start = time.monotonic()
    assert process.wait(timeout=30) == 0
    assert time.monotonic() - start > 0.5, "it must wait for the step after the signal"
    assert calls(environment)[-1][:2] == ("scontrol", ["requeue", "4711"])


@pytest.mark.parametrize(
    ("signal_name", "saves", "expected"),
    [("TERM", "stopped.json", 75), ("USR1", "stopped.json", 75), ("TERM", "saved.json", 0), ("TERM", None, 1)],
)
def test_the_exit_code_after_a_signal(signal_name: str, saves: str | None, expected: int, tmp_path: Path) -> None:
    """A launcher that exits with 1 in any case; stopped.json, or a server's saved.json, shows that ranks have saved."""
    save = f"touch {tmp_path}/{saves}" if saves else ":"
    launcher = (
        f"trap 'sleep 0.3; {save}; exit 1' {signal_name}; touch {tmp_path}/ready; while true; do sleep 0.05; done"
    )
    for name in ("stopped.json", "saved.json"):
        (tmp_path / name).touch()  # of an earlier run: means nothing
    process = subprocess.Popen(["bash", "launch/supervise.sh", tmp_path, "bash", "-c", launcher], cwd=ROOT)
    deadline = time.monotonic() + 20
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(getattr(signal, f"SIG{signal_name}"))
    assert process.wait(timeout=20) == expected


@pytest.mark.parametrize("place", ["recipe", "arguments", "variable"])
def test_a_server_that_saved_after_a_signal_ends_well(place: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Wherever its run directory is named; torchrun exits with 1 after a signal."""
    run_dir, recipe, ready = tmp_path / "served", tmp_path / "recipe.yaml", tmp_path / "ready"
    section = f"trainer: {{run_dir: {run_dir}}}" if place == "recipe" else ""
    recipe.write_text(f"model: {{path: m}}\ndata: {{train_files: [a], train_batch_size: 2}}\n{section}\n")
    stop = f"mkdir {run_dir}; touch {run_dir}/saved.json; exit 1"
    launcher = f"#!/bin/bash\ntrap '{stop}' TERM\ntouch {ready}\nwhile true; do sleep 0.05; done\n"
    Path(environment["PYTHON_BIN"], "torchrun").write_text(launcher)
    arguments = ["--trainer.run_dir", str(run_dir)] if place == "arguments" else []
    more = {"NPROC": "1"} | ({"RUN_DIR": str(run_dir)} if place == "variable" else {})
    command = ["bash", "launch/serve.sh", str(recipe), "serve.port=0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment | more)
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


ERROR = """error: unknown key actor.learning_rate
  source:   command line
    and one more line
  expected: a setting
  hint:     did you mean actor.lr"""
TORCHRUN = """E1122 05:30:18.602000 11692 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2)
Traceback (most recent call last):
  File "/x/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  rank      : 0 (local_rank: 0)"""
BARE = """error: \nTraceback (most recent call last):\n  File "x", line 1\n\nDuring handling:\nKeyError: 'x'"""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (f"{ERROR}\n{TORCHRUN}", ERROR),
        (
            f"error: of the first attempt\n  source: x\n{TORCHRUN}\nnote: again\n{ERROR}\nlibrary: bye\n{TORCHRUN}",
            ERROR,
        ),
        (f"{BARE}\n{TORCHRUN}", BARE),
        (f"error on rank 3: {ERROR[7:]}\n{TORCHRUN}", f"error on rank 3: {ERROR[7:]}"),
        ("W1122 nothing of ours", None),
    ],
)
def test_the_error_is_said_again_at_the_end(said: str, expected: str | None, tmp_path: Path) -> None:
    """After a failure, not after success or before a restart; the full output is kept."""
    (tmp_path / "said").write_text(f"{said}\n")
    again = f"\nThe run ended with this error:\n{expected}\n" if expected else ""

    stopped = f"touch {tmp_path}/stopped.json; exit 1"
    for command, code, more in (("exit 1", 1, again), ("true", 0, ""), (stopped, 75, "")):
        done = subprocess.run(
            ["bash", "launch/supervise.sh", tmp_path, "bash", "-c", f"cat {tmp_path}/said >&2; {command}"],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr, done.stdout) == (code, f"{said}\n{more}", "")
    assert {path.name for path in tmp_path.iterdir()} == {"said", "stopped.json"}, "the copy is gone"


def test_slurm_says_the_error_again(environment: dict[str, str]) -> None:
    """Labels of srun distinguish the lines of several nodes."""
    lines = [f"0: {line}\n1: noise\n" for line in f"{ERROR}\n{TORCHRUN}".splitlines()]
    result = run("slurm.sbatch", RECIPE, environment=environment, **SLURM, SRUN_SAYS="".join(lines))
    assert result.returncode == 1 and result.stderr.endswith(f"\nThe run ended with this error:\n{ERROR}\n")


@pytest.mark.parametrize("name", ["quickstart", "quickstart_real", "train_single_node", "train_multi_node"])
def test_help_is_the_head_of_the_script(name: str, environment: dict[str, str]) -> None:
    """It starts nothing, not even the set-up."""
    script = ROOT / f"launch/{name}.sh"
    done = subprocess.run(["bash", script, "--help"], env=environment, capture_output=True, text=True, timeout=30)
    head = script.read_text().partition("\nset ")[0].splitlines()[2:]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in head]
    assert not Path(environment["RECORD"]).exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    """Syntax, strict mode, licence; nothing is killed by name. shellcheck is run by hand: it is not a requirement."""
    text = script.read_text()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert text.startswith("#!/usr/bin/env bash\n# SPDX-License-Identifier: Apache-2.0\n")
    assert "set -euo pipefail" in text
    assert not any(word in text for word in ("pkill", "killall", "pgrep"))


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_dockerfiles_copy_what_exists(name: str) -> None:
    lines = (ROOT / f"launch/docker/Dockerfile.{name}").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied and all((ROOT / path).exists() for path in copied)


def test_ray_is_asked_for_by_name(environment: dict[str, str]) -> None:
    """Without Ray the launcher names the package to install, and a dry run needs none."""
    code = (
        f"import sys, runpy; sys.modules['ray'] = None; sys.argv = ['x', {RECIPE!r}, '--num-workers', '8', "
        "*sys.argv[1:]]; runpy.run_path('launch/ray_train.py', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and 'pip install "ray[train]"' in result.stderr
    result = subprocess.run(
        [sys.executable, "-c", code, "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "8 / 1 = 8" in result.stdout and "ray" not in result.stderr
