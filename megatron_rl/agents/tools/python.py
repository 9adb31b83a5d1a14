# SPDX-License-Identifier: Apache-2.0
"""The tool `run_python`: a program of the policy in an interpreter of its own.

Limits of memory, time and output keep an honest program from harm, and so does a hook that refuses sockets, other
processes and writing outside of its own directory. They are a guard rail and no security boundary: who wants to gets
around them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

_SECONDS = 10
_MEMORY_BYTES = 2 << 30
_FILE_BYTES = 16 << 20
_LONGEST_OUTPUT = 4000  # bytes: the first and the last

# Runs inside of the new interpreter, before the program.
_GUARD = f"""
import os, resource, sys
most = dict(CPU={_SECONDS}, AS={_MEMORY_BYTES}, FSIZE={_FILE_BYTES}, NOFILE=64, CORE=0)
for limit, value in most.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))

def _guard():
    here, join, real = os.getcwd() + os.sep, os.path.join, os.path.realpath
    refused = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.kill", "pty.",
               "syslog.")
    changes = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
               "os.chown", "os.utime", "shutil.")

    def is_outside(path):
        return isinstance(path, (str, bytes)) and not real(join(here, os.fsdecode(path))).startswith(here)

    def hook(event, arguments):
        if event.startswith(refused) and event != "socket.gethostname":
            raise PermissionError(event + " is not allowed here")
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        writes = event == "open" and (arguments[2] or 0) & writing
        if (writes and arguments[0] != os.devnull or event.startswith(changes)) and any(map(is_outside, arguments[:2])):
            raise PermissionError("files outside of the working directory are not written")

    sys.addaudithook(hook)

_program = compile(sys.stdin.read(), "program.py", "exec")
_guard()
exec(_program, {{"__name__": "__main__"}})
"""


def run_python(code: str) -> str:
    """Run a Python program. Print what you want to see."""
    with tempfile.TemporaryDirectory(prefix="megatron_rl_python_") as directory, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUTF8": "1"},
            start_new_session=True,
        )
        end = ""
        try:
            process.communicate(code.encode(), timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            end = f"error: stopped after {_SECONDS} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        length = output.seek(0, os.SEEK_END)
        output.seek(0)
        text = output.read(_LONGEST_OUTPUT // 2)
        if length > _LONGEST_OUTPUT:
            text += f"\n({length} bytes, cut)\n".encode()
            output.seek(length - _LONGEST_OUTPUT // 2)
        text += output.read(_LONGEST_OUTPUT)
    if process.returncode and not end and not text:
        end = f"error: ended with code {process.returncode}"
    return text.decode(errors="replace") + end
