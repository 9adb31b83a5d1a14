# SPDX-License-Identifier: Apache-2.0
"""Sandboxes (`agents.sandbox`): where an episode's commands run, with limits of time, memory, processes and files.

A sandbox is a child process, with whose end everything in it ends: namespaces of this machine (`tools.cell`), the
client of a container, or nothing for a remote service. Files are read and written by commands in the sandbox, so no
path or link leads out of it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.agents.tools import cell
from megatron_rl.config.sections import SandboxConfig
from megatron_rl.types import UserError

_MOST_OUTPUT = 8000  # bytes that a caller gets unless it asks for more
_LARGEST_FILE = 64 << 20  # bytes
_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0  # beyond a command's limit, for the sandbox to say that it was reached
_LABEL = "megatron_rl.owner"


@dataclass(frozen=True)
class Result:
    """The end of a command.

    Attributes:
        output: of stdout and stderr; the middle is cut.
        code: exit code, negative for a signal; `None` if a limit ended the command.
        why: the limit, or that the sandbox has ended.
    """

    output: bytes
    code: int | None = 0
    why: str = ""

    def describe(self) -> str:
        """Return the output as text, with an error or a code that is not 0 at its end."""
        text = self.output.decode(errors="replace")
        end = f"error: {self.why}" if self.why else f"(exit code {self.code})" if self.code else ""
        return f"{text.rstrip()}\n{end}".lstrip() if end else text


class Sandbox:
    """Base of the kinds of sandboxes; a constructor does not wait until the sandbox is up."""

    process: subprocess.Popen[bytes] | None = None

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config

    def run(
        self, command: str, stdin: bytes = b"", seconds: float | None = None, most_bytes: int = _MOST_OUTPUT
    ) -> Result:
        """Run a shell command; processes that it leaves behind continue.

        Args:
            seconds: limit of time, at most and by default `agents.sandbox.seconds`.
            most_bytes: of the output.
        """
        limit = min(seconds or math.inf, self.config.seconds)
        try:
            return self._run(command, stdin, limit, most_bytes)
        except (OSError, EOFError, ValueError) as error:
            return Result(b"", None, f"the sandbox has ended: {type(error).__name__} {error}".rstrip())

    def write(self, path: str, data: bytes) -> None:
        """Write a file and the directories above it (OSError)."""
        place = shlex.quote(path)
        result = self.run(f'mkdir -p "$(dirname -- {place})" && cat > {place}', data)
        if result.code != 0:
            raise OSError(f"{path} in the sandbox: {result.describe()}")

    def read(self, path: str) -> bytes:
        """Read a file of at most 64 MiB (OSError)."""
        result = self.run(f"head -c {_LARGEST_FILE + 1} -- {shlex.quote(path)}", most_bytes=4 * _LARGEST_FILE)
        if result.code != 0:
            raise OSError(f"{path} in the sandbox: {result.describe()[-_MOST_OUTPUT:]}")
        if len(result.output) > _LARGEST_FILE:
            raise OSError(f"{path} in the sandbox: more than {_LARGEST_FILE} bytes")
        return result.output

    def listen(self, port: int) -> socket.socket | None:
        """Return a socket that listens to a port of the sandbox's own loopback interface, if it can."""
        return None

    def forget(self) -> None:
        """Close this process's end of a sandbox that belongs to another fork."""

    def kill(self) -> None:
        """End the sandbox with all that is in it, without waiting."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """End the sandbox and wait until it is gone."""
        self.forget()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process is not None:
                self.process.wait(_GRACE_SECONDS)
        self.kill()
        if self.process is not None:
            self.process.wait()

    def _run(self, command: str, stdin: bytes, seconds: float, most_bytes: int) -> Result:
        raise OSError("agents.sandbox.image = null: a task names its image")


class LocalSandbox(Sandbox):
    """Namespaces of this machine; those that the kernel does not allow are missing."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._connection, theirs = socket.socketpair()
        self._missing: dict[str, str] | None = None
        self._lock = threading.Lock()  # one command at a time
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", cell.__name__, str(theirs.fileno()), json.dumps(asdict(config))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={"PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def find_missing(self) -> dict[str, str]:
        """Wait until the sandbox is up; return its missing layers with reasons (EOFError, OSError)."""
        if self._missing is None:
            self._connection.settimeout(_START_SECONDS)
            self._missing = cell.receive(self._connection)[0]
        return self._missing

    def _run(self, command: str, stdin: bytes, seconds: float, most_bytes: int) -> Result:
        with self._lock:
            try:
                self.find_missing()
                self._connection.settimeout(seconds + _GRACE_SECONDS)
                cell.send(self._connection, {"command": command, "seconds": seconds, "most": most_bytes}, stdin)
                head, output = cell.receive(self._connection)
            except TimeoutError:
                self.forget()  # an answer that comes later is another command's
                raise
        return Result(output, head["code"], head["why"])

    def listen(self, port: int) -> socket.socket | None:
        """Return the socket, or `None` if the loopback interface is the machine's (EOFError, OSError)."""
        if self.find_missing() or self.config.network:
            return None
        with self._lock:
            cell.send(self._connection, {"port": port})
            found = socket.recv_fds(self._connection, 1, 1)[1]
        return socket.socket(fileno=found[0])

    def forget(self) -> None:
        """Close this process's end."""
        self._connection.close()

    def kill(self) -> None:
        """Kill the sandbox, and remove the directory of one without namespaces."""
        assert self.process is not None
        super().kill()
        shutil.rmtree(f"{cell.DIRECTORY}{self.process.pid}", ignore_errors=True)


class ContainerSandbox(Sandbox):
    """A container of Docker or Podman. It ends with its client, which holds the container's stdin open."""

    def __init__(self, config: SandboxConfig, is_task: bool = False) -> None:
        super().__init__(config)
        self._name, self._is_up = f"megatron_rl_{uuid.uuid4().hex[:16]}", False
        self.process = subprocess.Popen(
            plan_container(config, self._name, _describe_owner(os.getpid()), is_task),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _run(self, command: str, stdin: bytes, seconds: float, most_bytes: int) -> Result:
        self._await_start()
        whole = max(math.ceil(seconds), 1)  # busybox knows no fractions
        words = plan_command(self.config, self._name, command, whole)
        started, kept, why = time.monotonic(), cell.Kept(most_bytes), ""
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as client:
            assert client.stdin is not None and client.stdout is not None
            with contextlib.suppress(BrokenPipeError), client.stdin:
                client.stdin.write(stdin)
            while data := _read_until(client.stdout.fileno(), started + whole + _GRACE_SECONDS):
                kept.add(data)
                if kept.size > self.config.disk_mib << 20:
                    why = f"stopped at {self.config.disk_mib} MiB of output"
                    break
            if why or data is None:
                client.kill()
        if why or data is None or client.returncode == 137 and time.monotonic() - started >= whole - 0.5:
            return Result(kept.join(), None, why or f"stopped after {whole} seconds")
        if client.returncode == 137:
            return Result(kept.join(), None, f"killed by a signal, or at {self.config.memory_mib} MiB of memory")
        return Result(kept.join(), client.returncode)

    def _await_start(self) -> None:
        process = self.process
        assert process is not None and process.stdout is not None
        if not self._is_up:
            said, deadline = b"", time.monotonic() + _START_SECONDS
            while not said.endswith(b"up\n"):
                if not (data := _read_until(process.stdout.fileno(), deadline)):
                    raise EOFError(said.decode(errors="replace").strip() or f"no start within {_START_SECONDS:g} s")
                said += data
            self._is_up = True
        elif _read_until(process.stdout.fileno(), 0.0) is not None:
            raise EOFError("its first process was killed")

    def forget(self) -> None:
        """Close this process's ends of the pipes."""
        assert self.process is not None
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _read_until(descriptor: int, deadline: float) -> bytes | None:
    """Read what is there: bytes, none at the end, or `None` at the deadline."""
    is_ready = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))[0]
    return os.read(descriptor, 1 << 16) if is_ready else None


def plan_container(config: SandboxConfig, name: str, owner: str, is_task: bool = False) -> list[str]:
    """Return the command that starts a container and holds it.

    Args:
        owner: label by which a later run finds a container whose run is gone.
        is_task: keep the image's directories writable and its capabilities, as images of tasks expect; then only the
            size of each file is limited.
    """
    size = f"size={config.disk_mib}m,mode=1777"
    closed = ["--read-only", "--cap-drop", "ALL", "--tmpfs", f"/workspace:exec,{size}", "--tmpfs", f"/tmp:exec,{size}"]
    return [
        config.kind or "",
        *("run", "--interactive", "--rm", "--init", "--name", name, "--label", f"{_LABEL}={owner}"),
        *("--network", "host" if config.network else "none"),
        *("--memory", f"{config.memory_mib}m", "--memory-swap", f"{config.memory_mib}m"),
        *("--pids-limit", str(config.processes + 2)),  # of the container itself
        *("--ulimit", f"fsize={config.disk_mib << 20}", "--ulimit", "core=0", "--ulimit", "nofile=1024"),
        *("--security-opt", "no-new-privileges"),
        *([] if is_task else [*closed, "--workdir", "/workspace", "--env", "HOME=/workspace"]),
        *("--entrypoint", "sh", config.image or "", "-c", "echo up; exec cat >/dev/null"),
    ]


def plan_command(config: SandboxConfig, name: str, command: str, seconds: int) -> list[str]:
    """Return the command that runs a shell command in a container; a time limit kills its process group."""
    return [
        *(config.kind or "", "exec", "--interactive", name),
        *("timeout", "-s", "KILL", str(seconds), "sh", "-c", command),
    ]


def _describe_owner(pid: int) -> str:
    """Return a name of a process on this machine: host, start of the host, process id and its start."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}:{boot}:{pid}:{started}"


def is_orphaned(owner: str) -> bool:
    """Return whether the owner in a container's label was a process of this machine that is gone."""
    host, _, rest = owner.partition(":")
    try:
        return host == socket.gethostname() and _describe_owner(int(rest.split(":")[1])) != owner
    except (OSError, IndexError, ValueError):
        return host == socket.gethostname()


def reap_sandboxes(config: SandboxConfig) -> int:
    """Remove what killed runs have left on this machine, and return the number of these sandboxes (OSError)."""
    left = [path for path in Path("/tmp").glob(f"{Path(cell.DIRECTORY).name}*") if not _is_alive(path)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    names: list[str] = []
    if _is_container(config):
        form = '{{.Names}} {{.Label "' + _LABEL + '"}}'
        words = [config.kind or "", "ps", "--all", "--filter", f"label={_LABEL}", "--format", form]
        said = subprocess.run(words, capture_output=True, text=True, check=False)
        if said.returncode:
            raise OSError(said.stderr.strip())
        names = [line.split()[0] for line in said.stdout.splitlines() if is_orphaned(line.partition(" ")[2])]
    if names:
        subprocess.run([config.kind or "", "rm", "--force", *names], capture_output=True, check=False)
    return len(left) + len(names)


def _is_alive(directory: Path) -> bool:
    return Path("/proc", directory.name.rpartition("_")[2]).exists()


class RemoteSandbox(Sandbox):
    """A sandbox of an HTTP service (docs/agents.md has the protocol), begun at its first command."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._root, self._is_up = f"{(config.kind or '').rstrip('/')}/sandboxes", False
        self._name = uuid.uuid4().hex  # chosen here, so that the process that ends the sandbox has it, too

    def _run(self, command: str, stdin: bytes, seconds: float, most_bytes: int) -> Result:
        if not self._is_up:
            limits = {name: value for name, value in asdict(self.config).items() if name not in ("kind", "warm")}
            _exchange("POST", self._root, {"id": self._name, **limits}, _START_SECONDS)
            self._is_up = True
        body = {"command": command, "stdin": base64.b64encode(stdin).decode(), "seconds": seconds, "most": most_bytes}
        found = _exchange("POST", f"{self._root}/{self._name}/run", body, seconds + _GRACE_SECONDS)
        return Result(base64.b64decode(found["output"]), found["code"], found["why"])

    def kill(self) -> None:
        """Request the end of the sandbox; the service also ends one that is not used."""
        with contextlib.suppress(OSError, ValueError):
            _exchange("DELETE", f"{self._root}/{self._name}", {}, _GRACE_SECONDS)


def _exchange(method: str, url: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return json.loads(answer.read())


def start_sandbox(config: SandboxConfig, task_image: str | None = None) -> Sandbox:
    """Start a sandbox of the configured kind, and do not wait for it.

    Args:
        task_image: replaces `agents.sandbox.image`; see `plan_container`.
    """
    if config.kind == "local":
        return LocalSandbox(config)
    if task_image is not None:
        config = replace(config, image=task_image)
    if not _is_container(config):
        return RemoteSandbox(config)
    return Sandbox(config) if config.image is None else ContainerSandbox(config, task_image is not None)


class Pool:
    """Sandboxes that are started ahead, each for one episode: a used one may hold files and processes of its user."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._warm: deque[Sandbox] = deque()
        self._fill()

    def take(self) -> Sandbox:
        """Return a sandbox, and start another in its place."""
        found = self._warm.popleft() if self._warm else start_sandbox(self._config)
        self._fill()
        return found

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(self._warm)

    def _fill(self) -> None:
        while len(self._warm) < self._config.warm:
            self._warm.append(start_sandbox(self._config))


def check_sandbox(config: SandboxConfig) -> list[str]:
    """Remove the sandboxes of killed runs and start one; return notes on its gaps (UserError)."""
    try:
        number = reap_sandboxes(config)
        box = start_sandbox(config)
    except OSError as error:
        raise _refuse(config, str(error)) from error
    notes = [f"agents.sandbox: removed {number} sandboxes of runs that were killed"] if number else []
    if _is_container(config) and config.image is None:  # each task names its own
        return notes
    result = box.run("echo $((6 * 7))")
    missing = box.find_missing() if isinstance(box, LocalSandbox) and not result.why else {}
    box.close()
    if result.output.strip() != b"42":
        raise _refuse(config, result.describe())
    if config.kind == "local":
        notes.append("agents.sandbox = local shares the kernel of this machine: a bug of the kernel opens it")
    return notes + [f"agents.sandbox = local runs without {name} ({why}): {_OPEN}" for name, why in missing.items()]


_OPEN = "the machine's processes are visible, files are limited in size only, and programs may leave processes behind"
_OPEN += " until the episode ends"


def _is_container(config: SandboxConfig) -> bool:
    return config.kind in ("docker", "podman")


def _refuse(config: SandboxConfig, found: str) -> UserError:
    return UserError(
        f"no sandbox starts: {found[-500:]}",
        source=f"agents.sandbox.kind = {config.kind}, image = {config.image}",
        expected="local, docker or podman with an image that has sh and timeout, or the URL of a service",
        hint="try it by hand: docker run --rm IMAGE timeout 1 sh -c true",
    )
