# SPDX-License-Identifier: Apache-2.0
"""CUDA wheels where there is no driver: stand-ins for what is missing, so that they can be imported.

vLLM's libraries need every function of libcuda.so.1 that they call when they are loaded. The stand-in has those
functions, and each of them says that there is no device, so nothing can be computed with it. vLLM looks for a GPU to
choose its platform; it is told that there is an H100. flash-attn and Transformer Engine have functions in Python over
kernels that take an hour to compile; the functions do not need them to be imported.
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
    """Load a library in the place of the driver's, unless there is one; to be called before vLLM is imported.

    Returns:
        How many functions it has; 0 where the driver is here.

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
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # what asks for this name from now on gets it
    return len(names)


def stand_in_for_kernels() -> list[str]:
    """Have flash-attn and Transformer Engine imported without their kernels where these were not compiled.

    Returns:
        Whose kernels are missing.
    """
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
    """Have vLLM's modules see an H100 from now on; they ask when they are imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as Ray does before there are devices: else vLLM leaves out Triton
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    interface: Any = importlib.import_module("vllm.platforms.interface")

    class AbsentGpu(cuda.CudaPlatform):
        """What is asked of the driver."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            """Of an H100."""
            return interface.DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            """Its name."""
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            """Its memory."""
            return 80 << 30

    platforms: Any = importlib.import_module("vllm.platforms")
    platforms._current_platform = AbsentGpu()


def _list_functions() -> list[str]:
    """Names in vLLM's libraries that look like the driver's."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    libraries = Path(spec.origin).parent.rglob("*.so")
    found = {name.decode() for library in libraries for name in _NAME.findall(library.read_bytes())}
    return sorted(found)
