# SPDX-License-Identifier: Apache-2.0
"""Sandbox for the policy's programs; a standard-library script, started by the tool `python`.

    python -I -B confinement.py DIRECTORY SECONDS    runs the program on stdin
    python -I -B confinement.py DIRECTORY            prints "layer: reason" for each layer that the kernel lacks

The program runs in DIRECTORY and is killed after SECONDS of wall-clock time. docs/agents.md lists the operations that
each layer denies; a layer that the kernel lacks is left out.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

_LIMITS = {"AS": 2 << 30, "FSIZE": 16 << 20, "NOFILE": 64, "CORE": 0}
_ROOM = b"size=64m,nr_inodes=1000"
_MOST_THREADS = 64
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom")

_NEW_MOUNTS, _NEW_IPC, _NEW_USERS, _NEW_PIDS, _NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_READ_ONLY, _MS_NO_SUID, _MS_NO_DEV, _MS_RECURSIVE, _MS_PRIVATE = 1, 2, 4, 0x4000, 0x40000
_PR_PARENT_DEATH_SIGNAL, _PR_SECCOMP, _PR_NO_NEW_PRIVILEGES = 1, 22, 38
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK = 442, 444
_LANDLOCK_RIGHTS = (13, 14, 15, 15, 16)  # number of rights in ABI versions 1 to 5
_READ, _OF_A_FILE, _NOT_HERE = 0b1100, 0xC007, 0b101001000001  # read; of files; execute, devices, sockets

# System call numbers on x86-64 and on 64-bit ARM; `None` if the architecture lacks the call.
_REFUSED = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "socket": (41, 198),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "io_uring_setup": (425, 425),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "userfaultfd": (323, 282), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274), "kcmp": (312, 272),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "syslog": (103, 116), "process_mrelease": (448, 448),
}  # fmt: skip
_OF_ITSELF = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261), "sched_setaffinity": (203, 122)}
_OF_THE_KERNEL = ("io_uring_setup", "memfd_create", "memfd_secret", "shmget", "msgget", "mq_open", "mount", "unshare")
_OF_THE_KERNEL += ("setns", "bpf", "perf_event_open", "keyctl", "add_key", "request_key", "userfaultfd", "syslog")
_CLONE, _CLONE3, _CLONE_THREAD, _CLONE_NEW = (56, 220), (435, 435), 0x10000, 0x7E020000
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
_ERROR, _EPERM, _ENOSYS = 0x50000, 1, 38
_REFUSE, _PASS, _FIRST = (_RETURN, 0, 0, _ERROR | _EPERM), (_RETURN, 0, 0, 0x7FFF0000), (_LOAD, 0, 0, _FIRST_ARGUMENT)

_LIBC = ctypes.CDLL(None, use_errno=True)


def call(function: Callable[..., int], *arguments: Any) -> int:
    """Call a function of libc (OSError)."""
    result = function(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def limit(name: str, value: int) -> None:
    """Lower a resource limit to `value`; a limit that is already lower stays."""
    which = getattr(resource, f"RLIMIT_{name}")
    known = resource.getrlimit(which)[1]
    value = value if known == resource.RLIM_INFINITY else min(value, known)
    resource.setrlimit(which, (value, value))


def _enter_namespaces(directory: str) -> None:
    """Enter new user, process, network and IPC namespaces; the next fork becomes process 1.

    The user namespace permits the others without root.
    """
    identities = {"uid_map": f"{os.getuid()} {os.getuid()} 1", "gid_map": f"{os.getgid()} {os.getgid()} 1"}
    call(_LIBC.unshare, _NEW_USERS | _NEW_PIDS | _NEW_NETWORK | _NEW_IPC)
    for name, text in {"setgroups": "deny", **identities}.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    limit("NPROC", _MOST_THREADS)  # counted per user namespace


def _enter_mounts(directory: str) -> None:
    call(_LIBC.unshare, _NEW_MOUNTS)
    call(_LIBC.mount, None, b"/", None, _MS_RECURSIVE | _MS_PRIVATE, None)
    read_only = struct.pack("QQQQ", _MS_READ_ONLY, 0, 0, 0)
    call(_LIBC.syscall, _SYS_MOUNT_SETATTR, -100, b"/", 0x8000, read_only, len(read_only))  # recursive
    flags = _MS_NO_SUID | _MS_NO_DEV
    call(_LIBC.mount, b"none", b"/proc", b"tmpfs", flags | _MS_READ_ONLY, None)
    call(_LIBC.mount, b"none", directory.encode(), b"tmpfs", flags, _ROOM)
    os.chdir(directory)


def _enter_landlock(directory: str, read: int = _READ, not_here: int = _NOT_HERE) -> None:
    version = call(_LIBC.syscall, _SYS_LANDLOCK, None, 0, 1)
    rights = (1 << _LANDLOCK_RIGHTS[min(version, 5) - 1]) - 1
    handled = struct.pack("QQQ", rights, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call(_LIBC.syscall, _SYS_LANDLOCK, handled, len(handled), 0)
    here = dict.fromkeys([*_READABLE, sys.prefix, sys.base_prefix], read)
    for path, allowed in {**here, "/dev/null": _READ | 0b10, ".": rights & ~not_here}.items():
        if os.path.exists(path):
            place = os.open(path, os.O_PATH)
            allowed &= rights if os.path.isdir(path) else rights & _OF_A_FILE
            call(_LIBC.syscall, _SYS_LANDLOCK + 1, ruleset, 1, struct.pack("=Qi", allowed, place), 0)
            os.close(place)
    call(_LIBC.prctl, _PR_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(_LIBC.syscall, _SYS_LANDLOCK + 2, ruleset, 0)
    os.close(ruleset)
    if version < 6:
        raise OSError(0, f"Landlock {version} is there, without what 6 has (Linux 6.12): truncation, TCP, signals")


def _enter_seccomp(directory: str) -> None:
    which, program = _refuse_calls([*_REFUSED])
    program += [(_IF_EQUAL, 0, 4, _CLONE[which]), _FIRST, (_IF_ANY_BIT, 1, 0, _CLONE_THREAD), _REFUSE, _PASS]
    for name, numbers in _OF_ITSELF.items():
        other = os.getpid() if "kill" in name else 0  # 0 means the process itself, or its group
        program += [(_IF_EQUAL, 0, 5, numbers[which]), _FIRST, (_IF_EQUAL, 2, 0, os.getpid())]
        program += [(_IF_EQUAL, 1, 0, other), _REFUSE, _PASS]
    _filter_calls(program)


def _refuse_calls(names: Collection[str]) -> tuple[int, list[tuple[int, int, int, int]]]:
    """Return the column of this architecture in the tables of calls, and the start of a filter that refuses calls."""
    if os.uname().machine not in _AUDIT_ARCHITECTURES:
        raise OSError(0, f"no filter for {os.uname().machine}")
    which = [*_AUDIT_ARCHITECTURES].index(os.uname().machine)
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[os.uname().machine]), _REFUSE]
    program += [(_LOAD, 0, 0, _NUMBER), (_IF_AT_LEAST, 0, 1, 0x40000000), _REFUSE]  # the x32 ABI of x86-64
    for number in (_REFUSED[name][which] for name in names):
        program += [(_IF_EQUAL, 0, 1, number), _REFUSE] if number is not None else []
    program += [(_IF_EQUAL, 0, 1, _CLONE3[which]), (_RETURN, 0, 0, _ERROR | _ENOSYS)]  # libc falls back to clone
    return which, program


def _filter_calls(program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in [*program, _PASS]))
    call(_LIBC.prctl, _PR_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(_LIBC.prctl, _PR_SECCOMP, 2, struct.pack("HP", len(program) + 1, ctypes.addressof(code)), 0, 0)


def confine_shell(directory: str | None, has_sockets: bool) -> None:
    """Confine this process and the programs that it will start: capabilities, namespaces, memory outside of processes.

    Args:
        directory: the current directory, outside of which nothing is written and only the system is read; `None` if
            the root directory is the sandbox's own.
        has_sockets: allow sockets, of Unix and of the Internet.
    """
    drop_capabilities()
    if directory is not None:
        _enter_landlock(directory, _READ | 1, _NOT_HERE & ~1)
    families = (1, 2, 10, 16) if has_sockets else ()
    which, program = _refuse_calls(_OF_THE_KERNEL)
    program += [(_IF_EQUAL, 0, 4, _CLONE[which]), _FIRST, (_IF_ANY_BIT, 0, 1, _CLONE_NEW), _REFUSE, _PASS]
    program += [(_IF_EQUAL, 0, len(families) + 2, _REFUSED["socket"][which]), _FIRST]
    program += [(_IF_EQUAL, len(families) - i, 0, family) for i, family in enumerate(families)]
    _filter_calls([*program, _REFUSE, _PASS])


def drop_capabilities() -> None:
    """Drop all capabilities: root keeps only its file ownership."""
    call(_LIBC.capset, struct.pack("Ii", 0x20080522, 0), bytes(24))


# Entered before the fork of the program's process, and inside it.
LAYERS = {"namespaces": _enter_namespaces, "mounts": _enter_mounts}
LAYERS_INSIDE = {"landlock": _enter_landlock, "seccomp": _enter_seccomp}


def _enter(layers: Mapping[str, Callable[[str], None]], directory: str) -> dict[str, str]:
    missing = {}
    for name, enter in layers.items():
        try:
            enter(directory)
        except OSError as error:
            missing[name] = error.strerror
    return missing


def _make_guard(directory: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that confines Python's file writes to the directory, without help of the kernel."""
    changes = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")

    realpath, fsdecode = os.path.realpath, os.fsdecode

    def is_elsewhere(path: Any) -> bool:
        return isinstance(path, str | bytes) and not f"{realpath(fsdecode(path))}/".startswith(f"{directory}/")

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        changing = (writes and arguments[0] != os.devnull) or event.startswith(changes)
        if changing and any(map(is_elsewhere, arguments[:2])):
            raise PermissionError("only files in the working directory are written")

    return guard


def _supervise(child: int, seconds: float) -> NoReturn:
    """Wait for the program, kill it at the time limit, and exit with its code (0 if killed)."""
    deadline, is_late = time.monotonic() + seconds, False
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        is_late = signal.sigtimedwait({signal.SIGCHLD}, max(deadline - time.monotonic(), 0)) is None
        if is_late:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            os.write(1, f"error: stopped after {seconds:g} seconds".encode())
            break
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(0 if is_late else code if code >= 0 else 128 - code)


def main() -> None:
    """Run the program on stdin in the sandbox, or list the layers that are missing."""
    directory = os.path.realpath(sys.argv[1])
    missing = _enter(LAYERS, directory)
    if len(sys.argv) == 2:
        missing |= _enter(LAYERS_INSIDE, directory)
        sys.stdout.writelines(f"{name}: {reason}\n" for name, reason in missing.items())
        return
    source, seconds = sys.stdin.read(), float(sys.argv[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    call(_LIBC.prctl, _PR_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if child := os.fork():
        _supervise(child, seconds)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    call(_LIBC.prctl, _PR_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    drop_capabilities()
    _enter(LAYERS_INSIDE, directory)
    for name, value in {"CPU": math.ceil(seconds), **_LIMITS}.items():
        limit(name, value)
    sys.excepthook = _show_error
    program = compile(source, "program.py", "exec")
    sys.argv[:] = ["program.py"]
    sys.addaudithook(_make_guard(directory))
    exec(program, {"__name__": "__main__"})


def _show_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print a traceback without this module's frames."""
    trace = trace.tb_next.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main()
