# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that let CUDA wheels be imported without an NVIDIA driver.

vLLM's libraries resolve all their libcuda.so.1 functions at load time; the stand-in's return CUDA_ERROR_NO_DEVICE.
vLLM's platform detection gets an H100. flash-attn and Transformer Engine lack their kernels, which take an hour to
compile.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from megatron_rl.types import UserError

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_NAME = re.compile(rb"(?<=\0)cu[A-Z][A-Za-z0-9_]*(?=\0)")


def stand_in_for_driver() -> int:
    """Load a stand-in for libcuda.so.1 if there is no driver. Must run before vLLM is imported.

    Returns:
        Number of functions in the stand-in; 0 if the driver is installed.

    Raises:
        UserError: there is no C compiler.
    """
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return 0
    except OSError:
        names = _list_functions()
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UserError(
            "no C compiler",
            source="the environment",
            expected="cc, gcc or clang, which compiles the stand-in for the driver",
            hint="apt-get install gcc",
        )
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "driver.c", Path(directory) / "libcuda.so.1"
        source.write_text("".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names))
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # later loads by this name resolve to it
    return len(names)


def stand_in_for_kernels() -> list[str]:
    """Make flash-attn and Transformer Engine importable without kernels; return the libraries that lack them."""
    missing = []
    if _is_there("flash_attn") and not _is_there("flash_attn_2_cuda"):
        sys.modules["flash_attn_2_cuda"] = MagicMock()
        missing.append("flash-attn")
    if _is_there("transformer_engine") and not _is_there("transformer_engine_torch"):
        common: Any = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None
        sys.modules["transformer_engine_torch"] = MagicMock()
        missing.append("Transformer Engine")
    return missing


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def choose_cuda_platform() -> None:
    """Make vLLM modules that are imported later detect an H100."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as Ray does before devices are assigned; otherwise vLLM disables Triton
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    interface: Any = importlib.import_module("vllm.platforms.interface")

    class AbsentGpu(cuda.CudaPlatform):
        """A CUDA platform that reports an H100."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            """Return capability 9.0."""
            return interface.DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            """Return the device name."""
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            """Return the memory in bytes."""
            return 80 << 30

    platforms: Any = importlib.import_module("vllm.platforms")
    platforms._current_platform = AbsentGpu()


def _list_functions() -> list[str]:
    """List names in vLLM's shared libraries that look like CUDA driver functions."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    libraries = Path(spec.origin).parent.rglob("*.so")
    found = {name.decode() for library in libraries for name in _NAME.findall(library.read_bytes())}
    return sorted(found)
