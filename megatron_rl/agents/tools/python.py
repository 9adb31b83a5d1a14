# SPDX-License-Identifier: Apache-2.0
"""The tool `run_python`: runs a program in a separate interpreter, sandboxed by `confinement`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from megatron_rl.agents.tools import confinement

_SECONDS = 10
_LONGEST_OUTPUT = 4000  # bytes; longer output keeps its first and last half


def find_missing_layers() -> dict[str, str]:
    """Return layer of `confinement` -> reason why the kernel or the container does not allow it."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-I", "-B", confinement.__file__, directory]
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    return dict(line.split(": ", 1) for line in said.splitlines())


def run_python(code: str) -> str:
    """Run a Python program. Print what you want to see."""
    directory = tempfile.mkdtemp(prefix="megatron_rl_python_")
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.run(
                [sys.executable, "-I", "-B", confinement.__file__, directory, str(_SECONDS)],
                input=code.encode(),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUTF8": "1"},
                start_new_session=True,
                check=False,
            )
        finally:
            subprocess.run(["rm", "-rf", directory], check=False)  # shutil fails on very deep directories
        length = output.seek(0, os.SEEK_END)
        output.seek(0)
        text = output.read(_LONGEST_OUTPUT // 2)
        if length > _LONGEST_OUTPUT:
            text += f"\n({length} bytes, cut)\n".encode()
            output.seek(length - _LONGEST_OUTPUT // 2)
        text += output.read(_LONGEST_OUTPUT)
    end = f"error: ended with code {process.returncode}" if process.returncode and not text else ""
    return text.decode(errors="replace") + end
