# SPDX-License-Identifier: Apache-2.0
"""A no-op CUDA device guard for a CPU build of torch; loaded before torch is imported.

The backward of fake CUDA tensors needs streams from a device guard, which a CPU build lacks. `cuda_guard.cpp` is
compiled once per torch version.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl.types import UserError

_SOURCE = Path(__file__).with_name("cuda_guard.cpp")


def load_guard() -> None:
    """Compile the guard if necessary, and register it.

    Raises:
        UserError: torch was built for CUDA, or there is no C++ compiler.
    """
    assert "torch" not in sys.modules, "torch looks for guards when it is imported"
    for library in (_find_torch() / "lib" / "libtorch_cpu.so", compile_guard()):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _find_torch() -> Path:
    spec, version = importlib.util.find_spec("torch"), importlib.metadata.version("torch")
    if spec is None or spec.origin is None or not version.endswith("+cpu"):
        raise UserError(
            f"torch {version}",
            source="the environment",
            expected="a build of torch for CPUs, such as requirements-cpu.txt installs",
            hint="rehearse on a machine without GPUs, or in an environment of its own",
        )
    return Path(spec.origin).parent


def compile_guard() -> Path:
    """Return the library; raises as `load_guard`."""
    torch, version = _find_torch(), importlib.metadata.version("torch")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron_rl"
    library = cache / f"cuda_guard-{version}-{digest}.so"
    if library.is_file():
        return library
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UserError(
            "no C++ compiler",
            source="the environment",
            expected="c++, g++ or clang++, which compiles 50 lines once",
            hint="apt-get install g++",
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        made, include = Path(directory) / "guard.so", torch / "include"
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
        subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(made)], check=True)
        made.rename(library)  # atomic: several processes may compile at once
    return library
