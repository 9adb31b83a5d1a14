# SPDX-License-Identifier: Apache-2.0
"""Local sandbox: a process that builds a root directory and namespaces, and runs commands in them.

    python -P -m megatron_rl.agents.tools.cell FILE_DESCRIPTOR '{"memory_mib": 512, ...}'

The first message on the socket maps missing layers to reasons; then each message is a command, and gets one answer, or
a port of the loopback interface, and gets a socket that listens to it. At the end of the connection all processes end,
and the files with them: they are in a tmpfs of the namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl.agents.tools.confinement import call, confine_shell, limit

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_NETWORK = 0x20000, 0x40000000
_NEW_ALL = _NEW_MOUNTS | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000  # host name, IPC, users, processes
_MS_NO_SUID, _MS_NO_DEV, _MS_BIND, _MS_RECURSIVE, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _READ_ONLY_NO_SUID = 442, struct.pack("QQQQ", 0b11, 0, 0, 0)
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MNT_DETACH, _PR_DEATH_SIGNAL, _PR_DUMPABLE, _PR_SUBREAPER = 2, 1, 4, 36
_SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_SHOWN += ("/etc/passwd", "/etc/group", "/etc/ssl/certs", "/etc/mime.types")
_SHOWN_ONLINE = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FIRST_USER = 0x70000000  # number of a user without files and other processes; the sandbox's process id is added
_MOST_FILES = 256  # open in a process
_SLICE = 0.05  # seconds between two checks of the limits
_LARGEST = 1 << 28  # bytes of a message
DIRECTORY = "/tmp/megatron_rl_cell_"  # and the process id: of a sandbox without namespaces


def send(connection: socket.socket, head: dict[str, Any], body: bytes = b"") -> None:
    """Send a message: a JSON object and bytes."""
    text = json.dumps(head).encode()
    connection.sendall(struct.pack("!II", len(text), len(body)) + text + body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receive a message (EOFError at the end of the connection)."""
    sizes = struct.unpack("!II", _read(connection, 8))
    if max(sizes) > _LARGEST:
        raise EOFError
    return json.loads(_read(connection, sizes[0])), _read(connection, sizes[1])


def _read(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(size - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


class Kept:
    """The first and the last half of a stream, `most` bytes together."""

    def __init__(self, most: int) -> None:
        self._half, self.size, self._head, self._tail = most // 2, 0, b"", b""

    def add(self, data: bytes) -> None:
        """Append to the stream."""
        self.size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-self._half :]

    def join(self) -> bytes:
        """Return both halves, with a note between them if some bytes are missing."""
        is_cut = self.size > len(self._head) + len(self._tail)
        return self._head + (f"\n({self.size} bytes, cut)\n".encode() if is_cut else b"") + self._tail


def _enter_namespaces(has_network: bool) -> None:
    user, group = os.getuid(), os.getgid()
    call(_LIBC.unshare, _NEW_ALL | (0 if has_network else _NEW_NETWORK))
    for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
        Path("/proc/self", name).write_text(text)


def _leave_root(user: int) -> None:
    """Become another user, because limits of processes do not bind root."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    call(_LIBC.prctl, _PR_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root


def _build_root(limits: dict[str, Any], user: int) -> None:
    """Make a tmpfs the root directory, with the system's programs and libraries in it, read-only."""
    root = "/tmp"  # any directory would do: it is hidden in this namespace only
    call(_LIBC.mount, None, b"/", None, _MS_RECURSIVE | _MS_PRIVATE, None)
    size = f"size={limits['disk_mib']}m,nr_inodes={64 * limits['disk_mib'] + 1000},mode=755,uid={user},gid={user}"
    call(_LIBC.mount, b"none", root.encode(), b"tmpfs", _MS_NO_SUID | _MS_NO_DEV, size.encode())
    for name in ("proc", "dev", "dev/shm", "etc", "tmp", "workspace", "old"):
        os.mkdir(f"{root}/{name}")
        os.chmod(f"{root}/{name}", 0o1777 if name in ("dev/shm", "tmp", "workspace") else 0o755)
    for path in (*_SHOWN, *(_SHOWN_ONLINE if limits["network"] else ())):
        if os.path.islink(path) and path.count("/") == 1:  # /bin may be a link to usr/bin
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            _show(os.path.realpath(path), root + path)
            attributes = _READ_ONLY_NO_SUID, len(_READ_ONLY_NO_SUID)
            call(_LIBC.syscall, _SYS_MOUNT_SETATTR, -100, f"{root}{path}".encode(), 0x8000, *attributes)
    for name in _DEVICES:
        _show(f"/dev/{name}", f"{root}/dev/{name}")
    for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
    _show("/proc", f"{root}/proc")  # until the namespace's own hides it
    call(_LIBC.syscall, _SYS_PIVOT_ROOT[os.uname().machine], root.encode(), f"{root}/old".encode())
    os.chdir("/")
    call(_LIBC.umount2, b"/old", _MNT_DETACH)
    os.rmdir("/old")


def _show(path: str, place: str) -> None:
    """Bind a file or directory of the host to a place below the new root."""
    os.makedirs(place if os.path.isdir(path) else os.path.dirname(place), exist_ok=True)
    if not os.path.isdir(path):
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    call(_LIBC.mount, path.encode(), place.encode(), None, _MS_BIND | _MS_RECURSIVE, None)


def _enter(limits: dict[str, Any]) -> str:
    """Enter the sandbox; the next fork is its process 1. Return why there are no namespaces, if so."""
    is_root, user = os.getuid() == 0, _FIRST_USER + os.getpid()
    try:
        if is_root:
            call(_LIBC.unshare, _NEW_MOUNTS)
        else:
            _enter_namespaces(limits["network"])
        _build_root(limits, user if is_root else os.getuid())
    except (OSError, KeyError) as error:
        directory = f"{DIRECTORY}{os.getpid()}"
        os.mkdir(directory, 0o700)
        os.chdir(directory)
        if is_root:
            with contextlib.suppress(OSError):
                os.chown(directory, user, user)
                _leave_root(user)
        return str(error)
    if is_root:
        _leave_root(user)
        _enter_namespaces(limits["network"])
    os.chdir("/workspace")
    return ""


def _enter_first_process(limits: dict[str, Any]) -> None:
    """Finish the namespaces from their process 1."""
    call(_LIBC.mount, b"proc", b"/proc", b"proc", _MS_NO_SUID | _MS_NO_DEV, None)
    call(_LIBC.prctl, _PR_DUMPABLE, 0, 0, 0, 0)  # hides this process's memory from the others
    if not limits["network"]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            fcntl.ioctl(one, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # raises the loopback interface


class Cell:
    """Runs one command at a time, and ends all processes at a limit.

    Args:
        directory: see `confine_shell`.
    """

    def __init__(self, connection: socket.socket, limits: dict[str, Any], directory: str | None) -> None:
        self._connection, self._limits, self._directory = connection, limits, directory
        self._pipes: set[int] = set()  # of earlier commands, whose processes may still write

    def serve(self) -> None:
        """Run commands until the connection ends (EOFError)."""
        while True:
            while not select.select([self._connection], [], [], _SLICE)[0]:
                self._reap()
                self._drain()
                if self._find_excess_memory():
                    self.kill_all()
            head, body = receive(self._connection)
            if "port" in head:
                with socket.create_server(("127.0.0.1", head["port"])) as listener:
                    socket.send_fds(self._connection, [b"!"], [listener.fileno()])
            else:
                send(self._connection, *self._run(head, body))

    def _run(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        source, sink = os.pipe()
        given = os.memfd_create("input")
        with open(given, "wb", closefd=False) as file:
            file.write(body)
        os.lseek(given, 0, os.SEEK_SET)
        child = os.fork()
        if not child:
            self._become(head["command"], given, sink)
        os.close(given)
        os.close(sink)
        os.set_blocking(source, False)
        kept, code, why, seconds = Kept(head["most"]), None, "", head["seconds"]
        deadline, waiter = time.monotonic() + seconds, os.pidfd_open(child)
        while code is None and not why:
            if self._connection in select.select([waiter, source, self._connection], [], [], _SLICE)[0]:
                raise EOFError  # nobody waits for the answer
            self._collect(source, kept)
            self._drain()
            code = self._reap(child)
            if code is None and time.monotonic() > deadline:
                why = f"stopped after {seconds:g} seconds"
            elif code is None and kept.size > self._limits["disk_mib"] << 20:
                why = f"stopped at {self._limits['disk_mib']} MiB of output"
            else:
                why = self._find_excess_memory()
        if why:
            self.kill_all()
        os.close(waiter)
        self._collect(source, kept)
        self._pipes.add(source)
        return {"code": code, "why": why}, kept.join()

    def _find_excess_memory(self) -> str:
        most, found = self._limits["memory_mib"], 0
        for pid in _list_descendants():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
                    if line.startswith((b"RssAnon:", b"RssShmem:")):
                        found += int(line.split()[1])
        return f"stopped at {most} MiB of memory" if found > most << 10 else ""

    def _become(self, command: str, given: int, sink: int) -> NoReturn:
        """Turn this process, a fork, into the command."""
        try:
            os.setsid()
            for place, descriptor in enumerate((given, sink, sink)):
                os.dup2(descriptor, place)
            limits = self._limits
            sizes = {"DATA": limits["memory_mib"] << 20, "FSIZE": limits["disk_mib"] << 20, "NOFILE": _MOST_FILES}
            if self._directory is None or os.getuid() >= _FIRST_USER:  # no other processes count
                sizes["NPROC"] = limits["processes"] + 2  # the sandbox's own
            for name, size in {**sizes, "CORE": 0, "MSGQUEUE": 0}.items():
                limit(name, size)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(number, signal.SIG_DFL)
            here = os.getcwd()
            environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin", "HOME": here}
            environment |= {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            environment["TMPDIR"] = "/tmp" if self._directory is None else here
            confine_shell(self._directory, has_sockets=self._directory is None or limits["network"])
            os.execve("/bin/sh", ["sh", "-c", command], environment)
        except BaseException as error:
            os.write(2, f"the sandbox cannot start the command: {error}".encode())
            os._exit(126)

    def _collect(self, source: int, kept: Kept) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                kept.add(os.read(source, 1 << 16))

    def _drain(self) -> None:
        """Drop later output, so that programs in the background neither block nor end."""
        for pipe in [*self._pipes]:
            with contextlib.suppress(BlockingIOError):
                if not os.read(pipe, 1 << 16):
                    self._pipes.discard(pipe)
                    os.close(pipe)

    def _reap(self, child: int = 0) -> int | None:
        """Reap ended processes; return the child's code if it is one of them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                found = os.waitstatus_to_exitcode(ended[1]) if ended[0] == child else found
        return found

    def kill_all(self) -> None:
        """Kill and reap all other processes of the sandbox."""
        while others := _list_descendants():
            if os.getpid() == 1:
                os.kill(-1, signal.SIGKILL)
            for pid in others:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.001)


def _list_descendants() -> list[int]:
    """List the processes below this one; it becomes the parent of orphans."""
    found, parents = [], [os.getpid()]
    while parents:
        children = []
        for parent in parents:
            with contextlib.suppress(OSError):  # of a process that has ended
                for thread in os.listdir(f"/proc/{parent}/task"):
                    children += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
        found, parents = found + children, children
    return found


def main() -> None:
    """Serve the sandbox on a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection, limits = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    directory = f"{DIRECTORY}{os.getpid()}"
    missing = _enter(limits)
    if child := os.fork():
        connection.close()
        os.waitpid(child, 0)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)
    call(_LIBC.prctl, _PR_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    call(_LIBC.prctl, _PR_SUBREAPER, 1, 0, 0, 0)
    if not missing:
        _enter_first_process(limits)
    cell = Cell(connection, limits, directory if missing else None)
    with contextlib.suppress(EOFError, ConnectionError):
        send(connection, {"namespaces": missing} if missing else {})
        cell.serve()
    cell.kill_all()
    os._exit(0)


if __name__ == "__main__":
    main()
