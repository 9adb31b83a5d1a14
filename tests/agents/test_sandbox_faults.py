# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted into a local sandbox: each is contained and gives its reason, and no process is left.

Each fault runs in several ways: as a command, from a script, from Python, behind a pipe, in a session of its own. Fork
bombs are planted only after a test that the limit of processes holds. Not covered: bugs of the kernel.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_rl.agents.sandbox import LocalSandbox
from megatron_rl.config.sections import SandboxConfig

CONFIG = SandboxConfig(kind="local", seconds=20.0, memory_mib=64, processes=16, disk_mib=8)


def python(code: str) -> str:
    """The command that runs a Python program."""
    return f"python3 -c {shlex.quote(code)}"


NO_SPACE, NO_FILE, NO_NETWORK = "No space left|File size limit", "No such file|nonexistent", "unreachable"
DENIED = "not permitted|denied|Read-only|superuser"
LATE = "error: stopped after 1 seconds"
# Kind -> (command, pattern of its result). {outside} is a directory of the run, {port} and {name} are sockets of the
# run, {pid} is a process of the run.
FAULTS = {
    "fork bomb": ("b() {{ b | b & }}; b; sleep 0.3", "Cannot fork|temporarily"),
    "fork bomb of Python": (python("import os\nwhile True: os.fork()"), "temporarily"),
    "thread bomb": (
        python("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=[9]).start()"),
        "can't start new thread",
    ),
    "bomb of sessions": ("while setsid sleep 9 & do :; done", "Cannot fork"),
    "endless output": ("yes", "stopped at 8 MiB of output"),
    "endless errors": ("yes >&2", "stopped at 8 MiB of output"),
    "endless line": ("cat /dev/zero", "stopped at 8 MiB of output"),
    "full disk": ("cat /dev/zero > zeros", NO_SPACE),
    "full shared memory": ("cat /dev/zero > /dev/shm/zeros", NO_SPACE),
    "full temporary directory": ("cat /dev/zero > /tmp/zeros", NO_SPACE),
    "many files": (python("for i in range(10**6): open(str(i), 'w')"), NO_SPACE),
    "sparse file": ("truncate -s 1G file", "File size limit|File too large"),
    "memory hog": (python("bytearray(1 << 30)"), "MemoryError"),
    "memory of many": (
        "for i in 1 2 3 4; do "
        + python("x = bytearray(b'1') * (30 << 20); import time; time.sleep(9)")
        + " & done; wait",
        "stopped at 64 MiB of memory",
    ),
    "shared memory hog": (
        python("import mmap, time; m = mmap.mmap(-1, 1 << 27); m.write(b'1' * (1 << 24) * 5); time.sleep(9)"),
        "stopped at 64 MiB of memory|MemoryError",
    ),
    "memory in a file": (python("import os; os.memfd_create('x')"), DENIED),
    "hanging": ("sleep 1000", LATE),
    "hanging read": ("mkfifo pipe; cat pipe", LATE),
    "busy loop": ("while :; do :; done", LATE),
    "deaf to signals": ("trap '' TERM INT HUP QUIT; sleep 1000; sleep 1000", LATE),
    "stopped": ("kill -STOP $$; sleep 1000", LATE),
    "read by path": ("cat {outside}/answers", NO_FILE),
    "read by relative path": ("cat ../../../../..{outside}/answers", NO_FILE),
    "read by link": ("ln -s {outside} link; cat link/answers", NO_FILE),
    "write by link": ("ln -s {outside}/answers link; echo x > link", NO_FILE),
    "write by path": ("echo x > {outside}/answers", NO_FILE),
    "write over the root of process 1": ("echo x > /proc/1/root{outside}/answers", f"{DENIED}|{NO_FILE}"),
    "write to the system": ("echo x > /usr/bin/env", DENIED),
    "modes of the system": ("chmod 777 /usr/bin/env", DENIED),
    "delete everything": ("rm -rf --no-preserve-root /usr /bin/ /lib/ {outside} /etc", DENIED),
    "hard link": ("ln /usr/bin/env env", "cross-device|Read-only"),
    "network": (python("import socket; socket.create_connection(('1.1.1.1', 80), 1)"), NO_NETWORK),
    "network of packets": (
        python("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53))"),
        NO_NETWORK,
    ),
    "name service": (python("import socket; socket.gethostbyname('example.com')"), "gaierror"),
    "port of the run": (python("import socket; socket.create_connection(('127.0.0.1', {port}), 1)"), "refused"),
    "socket of the run": (
        python("import socket; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + '{name}')"),
        "refused",
    ),
    "raw packets": (python("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"), DENIED),
    "socket of the hypervisor": (python("import socket; socket.socket(40, socket.SOCK_STREAM)"), DENIED),
    "zombies": (python("import os, time\nfor i in range(8): os.fork() or os._exit(0)\ntime.sleep(9)"), LATE),
    "daemon": (
        python("import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(99)\nprint('left')"),
        "left",
    ),
    "signal to the run": ("kill -9 {pid}", "No such process"),
    "signal to process 1": ("kill -9 1; kill -STOP 1; echo sent", "sent"),
    "signal to all": (python("import os, signal; os.kill(-1, signal.SIGKILL); print('sent')"), ""),
    "memory of process 1": ("head -c 1 /proc/1/mem", DENIED),
    "variables of process 1": ("cat /proc/1/environ", DENIED),
    "files of process 1": ("ls -l /proc/1/fd", DENIED),
    "trace of process 1": (
        python("import ctypes, os; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0)); open('/proc/1/mem')"),
        DENIED,
    ),
    "new namespaces": ("unshare -Ur id", DENIED),
    "mount": ("mount -t tmpfs none /tmp", DENIED),
    "device": ("mknod disk b 8 0", DENIED),
    "root again": (python("import os; os.setuid(0)"), "Invalid argument|" + DENIED),
    "higher limit": (python("import resource as r; r.setrlimit(r.RLIMIT_NPROC, (999, 999))"), "ValueError|" + DENIED),
    "settings of the kernel": ("echo 1 > /proc/sys/kernel/panic", DENIED),
    "many open files": (python("x = [open('/dev/null') for i in range(10**4)]"), "Too many open files"),
}
WAYS = {
    "command": "{}",
    "script": "cat > /tmp/s.sh <<'END'\n{}\nEND\nsh /tmp/s.sh",
    "Python": "cat > /tmp/s.sh <<'END'\n{}\nEND\npython3 -c 'import os; os.system(\"sh /tmp/s.sh\")'",
    "pipe": "cat > /tmp/s.sh <<'END'\n{}\nEND\nsh /tmp/s.sh 2>&1 | cat",
    "session": "cat > /tmp/s.sh <<'END'\n{}\nEND\nsetsid sh /tmp/s.sh & wait",
}
FAST = ("fork bomb", "endless output", "full disk", "memory hog", "hanging read", "read by link", "write by path")
FAST += ("network", "port of the run", "daemon", "signal to the run", "signal to process 1", "new namespaces")


@dataclass
class Outside:
    """Parts of the run that no fault may touch."""

    directory: Path
    listener: socket.socket
    abstract: socket.socket
    sleeper: subprocess.Popen[bytes]

    def fill(self, command: str) -> str:
        """Insert the parts into a fault."""
        port, name = self.listener.getsockname()[1], self.abstract.getsockname()[1:].decode()
        return command.format(outside=self.directory, port=port, name=name, pid=self.sleeper.pid)

    def check(self) -> None:
        """Assert that nothing is touched."""
        assert [path.name for path in self.directory.iterdir()] == ["answers"]
        assert (self.directory / "answers").read_text() == "the truth"
        assert self.sleeper.poll() is None and os.access("/usr/bin/env", os.X_OK)
        for listener in (self.listener, self.abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    directory = tmp_path_factory.mktemp("outside")
    (directory / "answers").write_text("the truth")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0megatron_rl_test_{os.getpid()}")
        abstract.listen()
        for one in (listener, abstract):
            one.setblocking(False)
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9999)"]) as sleeper:
            yield Outside(directory, listener, abstract, sleeper)
            sleeper.kill()


@pytest.fixture(scope="module")
def bounded() -> None:
    """Skip without namespaces; fail if the limit of processes does not hold for a few more than it allows."""
    box = LocalSandbox(CONFIG)
    if missing := box.find_missing():
        box.close()
        pytest.skip(str(missing))
    result = box.run("for i in $(seq 20); do sleep 1 & done; echo all")
    box.close()
    assert "Cannot fork" in result.describe() and "all" not in result.describe()


def end(box: LocalSandbox) -> None:
    """End a sandbox, and assert that none of its processes is left."""
    assert box.process is not None
    processes = [psutil.Process(box.process.pid), *psutil.Process(box.process.pid).children(recursive=True)]
    box.close()
    assert not psutil.wait_procs(processes, timeout=5)[1]


def plant(outside: Outside, kind: str, way: str = "command") -> None:
    """Run a fault in a sandbox of its own, and check that it is contained, has a reason, and leaves nothing."""
    command, pattern = FAULTS[kind]
    box, started = LocalSandbox(CONFIG), time.monotonic()
    result = box.run(WAYS[way].replace("{}", outside.fill(command)), seconds=1.0 if pattern == LATE else None)
    assert re.search(pattern, result.describe()), (kind, result)
    assert time.monotonic() - started < 60 and len(result.output) < 9000
    later = box.run("echo alive").describe()
    assert "alive" in later or "Cannot fork" in later, kind  # after a bomb, whose processes are in the background
    end(box)
    outside.check()


@pytest.mark.parametrize("kind", FAST)
def test_a_fault_is_contained_with_a_reason(outside: Outside, bounded: None, kind: str) -> None:
    plant(outside, kind)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_faults_are_contained_with_a_reason(outside: Outside, bounded: None, way: str) -> None:
    for kind in FAULTS:
        plant(outside, kind, way)


def test_there_are_more_than_two_hundred_faults() -> None:
    assert len(FAULTS) * len(WAYS) > 200
