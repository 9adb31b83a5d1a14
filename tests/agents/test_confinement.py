# SPDX-License-Identifier: Apache-2.0
"""Programs of the policy that try to get out of `run_python`, each by a way that Python's own checks do not see.

Each attack meets each layer that is enough against it, alone. A layer that the kernel lacks skips its tests, with the
kernel's reason. Not covered: other processors than x86-64, users other than root, bugs of the kernel.
"""

from __future__ import annotations

import os
import platform
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from _pytest.mark import ParameterSet

from megatron_rl.agents.tools import confinement
from megatron_rl.agents.tools.finding import describe_gaps, find_missing_layers, run_python

MISSING = find_missing_layers()
OPEN = os.O_WRONLY | os.O_CREAT
# Starts `confinement` with one of its layers.
ALONE = """
found = {{"__name__": "confinement", "__file__": {0!r}}}
exec(open({0!r}).read(), found)
for layers in (found["LAYERS"], found["LAYERS_INSIDE"]):
    for name in {{*layers}} - {{{1!r}}}:
        del layers[name]
found["main"]()
"""


def needs(layer: str) -> pytest.MarkDecorator:
    """Skip a test if the kernel lacks a layer of confinement."""
    return pytest.mark.skipif(layer in MISSING, reason=f"{layer}: {MISSING.get(layer)}")


def by_each_layer(attacks: dict[str, str], *layers: str) -> list[ParameterSet]:
    """List pairs of an attack and a layer of confinement that alone must stop it."""
    return [
        pytest.param(code, layer, marks=needs(layer), id=f"{name} {layer}")
        for name, code in attacks.items()
        for layer in layers
    ]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Leaves one layer to `run_python`."""

    def leave(layer: str) -> None:
        script = tmp_path_factory.mktemp("script") / "alone.py"
        script.write_text(ALONE.format(confinement.__file__, layer))
        monkeypatch.setattr("megatron_rl.agents.tools.finding.confinement", SimpleNamespace(__file__=str(script)))

    return leave


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of the run."""
    (tmp_path / "answers.jsonl").write_text('{"answer": "the truth"}\n')
    return tmp_path


WRITES = {
    "chdir": "import os; os.chdir({0!r}); open('written', 'w').write('x')",
    "dir_fd": "import os; os.open('written', {1}, dir_fd=os.open({0!r}, os.O_RDONLY | os.O_PATH))",
    "sqlite3": "import sqlite3; sqlite3.connect({0!r} + '/written').execute('create table a (b)')",
    "mkfifo": "import os; os.mkfifo({0!r} + '/written')",
    "mknod": "import os; os.mknod({0!r} + '/written')",
    "mkdir": "import ctypes; ctypes.CDLL(None).mkdir(b'{0}/written', 0o777)",
    "rename": "import ctypes; ctypes.CDLL(None).rename(b'{0}/answers.jsonl', b'{0}/written')",
    "truncate": "import ctypes; ctypes.CDLL(None).truncate(b'{0}/answers.jsonl', 0)",
}
CHMOD = {"chmod": "import ctypes; ctypes.CDLL(None).chmod(b'{0}/answers.jsonl', 0)"}  # which Landlock does not see


@pytest.mark.parametrize(
    ("code", "layer"), by_each_layer(WRITES, "landlock", "mounts") + by_each_layer(CHMOD, "mounts")
)
def test_nothing_is_written_outside_of_the_directory(
    outside: Path, only: Callable[[str], None], code: str, layer: str
) -> None:
    before = (outside / "answers.jsonl").stat()
    only(layer)
    run_python(code.format(str(outside), OPEN))
    assert os.listdir(outside) == ["answers.jsonl"]
    after = (outside / "answers.jsonl").stat()
    assert (after.st_size, after.st_mode) == (before.st_size, before.st_mode)


@needs("landlock")
def test_answers_cannot_be_read(outside: Path, only: Callable[[str], None]) -> None:
    only("landlock")
    said = run_python(f"print(open({str(outside)!r} + '/answers.jsonl').read())")
    assert "truth" not in said and "PermissionError" in said
    assert "PermissionError" in run_python(f"import os; print(os.listdir({str(outside)!r}))")


LOOKS = {name: f"open('/proc/{{0}}/{name}', 'rb')" for name in ("environ", "cmdline", "mem", "maps")}
LOOKS |= {"fd": "import os; os.listdir('/proc/{0}/fd')"}


@pytest.mark.parametrize(("code", "layer"), by_each_layer(LOOKS, "landlock", "mounts"))
def test_processes_of_the_run_cannot_be_looked_at(only: Callable[[str], None], code: str, layer: str) -> None:
    """Their variables hold keys, their memory the answers."""
    only(layer)
    said = run_python(f"{code.format(os.getpid())}\nprint('seen')")
    assert "Error" in said and "seen" not in said


OF_ALL = {"kill": "libc.kill({0}, 0)", "ptrace": "libc.ptrace(0x4206, {0}, 0, 0)"}
OF_PIDS = {
    "prlimit": "libc.prlimit({0}, 7, None, ctypes.create_string_buffer(16))",
    "setpriority": "libc.setpriority(0, {0}, 19)",
    "pidfd_open": "libc.syscall(434, {0}, 0)",
}
OF_SECCOMP = {
    "socket": "libc.socket(2, 1, 0)",
    "unshare": "libc.unshare(0x10000000)",
    "memfd_create": "libc.memfd_create(b'x', 0)",
    "shmget": "libc.shmget(0, 4096, 0o1600)",
    "fork": "libc.fork()",
    "clone": "libc.syscall(56, 17, 0, 0, 0, 0)",
}
OF_ROOT = {"chroot": "libc.chroot(b'.')"}  # of which no capability is left
EXECVE = {"execve": "libc.execl(b'/bin/true', b'true', None)"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls are those of x86-64")
@pytest.mark.parametrize(
    ("code", "layer"),
    by_each_layer(OF_ALL, "namespaces", "landlock", "seccomp")
    + by_each_layer(OF_PIDS, "namespaces", "seccomp")
    + by_each_layer(EXECVE, "landlock", "seccomp")
    + by_each_layer(OF_ROOT, "namespaces", "seccomp")
    + by_each_layer(OF_SECCOMP, "seccomp"),
)
def test_calls_of_the_kernel_are_refused(only: Callable[[str], None], code: str, layer: str) -> None:
    only(layer)
    said = run_python(f"import ctypes; libc = ctypes.CDLL(None); print({code.format(os.getpid())}, flush=True)")
    assert said == "-1\n"


@pytest.mark.parametrize("layer", [pytest.param(layer, marks=needs(layer)) for layer in ("namespaces", "seccomp")])
def test_the_network_is_not_there(only: Callable[[str], None], layer: str) -> None:
    """A datagram to a service of this machine, sent without Python's sockets."""
    only(layer)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as service:
        service.bind(("127.0.0.1", 0))
        service.settimeout(0.3)
        port = service.getsockname()[1]
        run_python(
            "import ctypes, struct; libc = ctypes.CDLL(None)\n"
            f"address = struct.pack('=H', 2) + struct.pack('>H', {port}) + bytes([127, 0, 0, 1]) + bytes(8)\n"
            "print(libc.sendto(libc.socket(2, 2, 0), b'x', 1, 0, address, 16))"
        )
        with pytest.raises(TimeoutError):
            service.recv(1)


@needs("seccomp")
def test_a_socket_that_is_a_file_is_not_reached(tmp_path: Path) -> None:
    """As Docker's is; neither namespaces nor Landlock see it."""
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(tmp_path / "service"))
        service.listen()
        service.settimeout(0.3)
        run_python(
            "import ctypes, struct; libc = ctypes.CDLL(None)\n"
            f"address = struct.pack('=H', 1) + {str(tmp_path / 'service')!r}.encode() + bytes(1)\n"
            "print(libc.connect(libc.socket(1, 1, 0), address, len(address)))"
        )
        with pytest.raises(TimeoutError):
            service.accept()


def list_survivors() -> list[psutil.Process]:
    """Processes with the name that `SURVIVE` gives."""
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == "survivor"]


SURVIVE = """
import ctypes, os, time
first = os.getpid()
libc = ctypes.CDLL(None)
libc.prctl(1, 0, 0, 0, 0)  # survives its parent
libc.setsid()
for _ in range(3):
    libc.fork()
    libc.setsid()
libc.prctl(15, b"survivor", 0, 0, 0)
{0}
"""


LASTS = {"forks": "if os.getpid() != first: time.sleep(60)", "all": "time.sleep(60)"}


@pytest.mark.parametrize(("last", "layer"), by_each_layer(LASTS, "namespaces", "seccomp"))
def test_nothing_survives_the_call(
    only: Callable[[str], None], last: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither forks nor the program itself, in sessions of their own."""
    only(layer)
    monkeypatch.setattr("megatron_rl.agents.tools.finding._SECONDS", 1)
    begun = time.monotonic()
    run_python(SURVIVE.format(last))
    try:
        assert time.monotonic() - begun < 8
        deadline = time.monotonic() + 3
        while list_survivors() and time.monotonic() < deadline:  # a killed process takes a moment
            time.sleep(0.05)
        assert not list_survivors()
    finally:
        for process in list_survivors():
            process.kill()


@needs("mounts")
def test_bytes_of_the_directory_are_bounded() -> None:
    said = run_python(
        "count = 0\ntry:\n  while count < 320:\n    open(f'{count}', 'wb').write(bytes(1 << 20))\n    count += 1\n"
        "except OSError as error: print(error.strerror)\nprint(count)"
    )
    assert said.startswith("No space left on device") and 50 < int(said.split()[-1]) <= 64


@needs("mounts")
def test_the_number_of_files_is_bounded() -> None:
    said = run_python(
        "import os\ncount = 0\ntry:\n  while count < 20000:\n    os.mknod(f'{count}')\n    count += 1\n"
        "except OSError as error: print(error.strerror)\nprint(count)"
    )
    assert said.startswith("No space left on device") and 500 < int(said.split()[-1]) <= 1000


@pytest.mark.parametrize("layer", ["seccomp", "mounts"])
def test_what_is_hard_to_remove_is_removed(
    only: Callable[[str], None], layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of directories is deeper than recursion and longer than a path may be."""
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    only(layer)
    said = run_python(
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nprint(os.getcwd(), flush=True)\n"
        "for _ in range(3000):\n    if libc.mkdir(b'd' * 30, 0o777) or libc.chdir(b'd' * 30): break"
    )
    assert said.startswith("/") and not os.path.lexists(said.strip())


def test_an_honest_program_has_what_it_needs() -> None:
    said = run_python(
        "import threading, sqlite3, tempfile, time, random, shutil, numpy\n"
        "found = []\nthreads = [threading.Thread(target=found.append, args=(i,)) for i in range(4)]\n"
        "for thread in threads: thread.start()\nfor thread in threads: thread.join()\n"
        "sqlite3.connect('a.db').execute('create table a (b)')\nopen('b', 'w').write('x')\nshutil.copy('b', 'c')\n"
        "with tempfile.NamedTemporaryFile(dir='.') as file: file.write(b'x')\n"
        "print(sorted(found), random.SystemRandom().random() < 1, time.localtime().tm_year > 2000)\n"
        "print(numpy.linalg.inv(numpy.eye(2)).tolist())"
    )
    assert said == "[0, 1, 2, 3] True True\n[[1.0, 0.0], [0.0, 1.0]]\n"


def test_a_thread_that_calls_the_tool_gets_its_result() -> None:
    """The program is tied to the life of the thread that has started it."""
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(run_python("print(1)"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["1\n", "1\n"]


@needs("seccomp")
def test_a_layer_that_is_not_there_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a kernel without seccomp for this processor, for which a changed script stands."""
    script = tmp_path / "confinement.py"
    script.write_text(Path(confinement.__file__).read_text().replace('"x86_64": ', '"other": '))
    monkeypatch.setattr(confinement, "__file__", str(script))
    reasons = {**MISSING, "seccomp": f"no filter for {platform.machine()}"}
    expected = [f"the tool python runs without its layer {layer}: {reason}" for layer, reason in reasons.items()]
    assert describe_gaps(["calculator", "python"]) == expected
    assert describe_gaps(["calculator"]) == []
    assert run_python("print(1)") == "1\n"
