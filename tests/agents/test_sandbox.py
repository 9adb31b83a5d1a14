# SPDX-License-Identifier: Apache-2.0
"""Sandboxes of episodes: their commands, pools, kinds, and ends.

Containers run where Docker does and has the image of DOCKER_IMAGE (with sh and timeout); elsewhere the command lines
are compared. Not covered: Podman's own behavior, and services other than the reference server.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_rl.agents.environment import Done, Observation, Reply, Task, ToolCall, find_environment
from megatron_rl.agents.episode import Answer, Setup, find_environments
from megatron_rl.agents.in_rank import EpisodeProcesses, EpisodesInRank
from megatron_rl.agents.sandbox import (
    ContainerSandbox,
    LocalSandbox,
    Sandbox,
    check_sandbox,
    is_orphaned,
    plan_command,
    plan_container,
    start_sandbox,
)
from megatron_rl.agents.tools import cell
from megatron_rl.config.sections import SandboxConfig
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.types import Prompt, UserError
from tools.make_toy_task import train_tokenizer
from tools.serve_sandboxes import SandboxServer

CONFIG = SandboxConfig(kind="local", seconds=5.0, memory_mib=64, processes=16, disk_mib=8, warm=1)
# Runs a Python file in which the kernel refuses new namespaces.
WITHOUT_NAMESPACES = """
import runpy, sys
from megatron_rl.agents.tools import confinement
confinement._filter_calls(confinement._refuse_calls(["unshare"])[1])
runpy.run_path(sys.argv[1])
"""


@pytest.fixture
def start() -> Iterator[Callable[..., LocalSandbox]]:
    """Starts local sandboxes, which end with the test."""
    boxes: list[LocalSandbox] = []

    def start(**limits: Any) -> LocalSandbox:
        boxes.append(LocalSandbox(replace(CONFIG, **limits)))
        return boxes[-1]

    yield start
    for box in boxes:
        box.close()


def family(box: Sandbox) -> list[psutil.Process]:
    """The processes of a sandbox."""
    assert box.process is not None
    root = psutil.Process(box.process.pid)
    return [root, *root.children(recursive=True)]


def test_a_command_has_output_code_and_input(start: Callable[..., LocalSandbox]) -> None:
    box = start()
    assert box.run("cat; echo error >&2", b"text ").describe() == "text error\n"
    assert box.run("exit 3").describe() == "(exit code 3)" and box.run("kill -9 $$").code == -9
    long = box.run("seq 100000", most_bytes=100).output
    assert long.startswith(b"1\n2\n") and long.endswith(b"\n100000\n") and b"(588895 bytes, cut)" in long


def test_files_and_programs_stay_until_the_end(start: Callable[..., LocalSandbox]) -> None:
    box = start()
    data = os.urandom(1 << 20)
    box.write("a b/it's/file", data)
    assert box.read("a b/it's/file") == data == box.read("/workspace/a b/it's/file")
    server = "python3 -m http.server 8000 --bind 127.0.0.1 >log 2>&1 &"
    get = "import urllib.request as r; print(len(r.urlopen('http://127.0.0.1:8000/a%20b/it%27s/file').read()))"
    assert box.run(f"{server} sleep 1").code == 0
    assert box.run(f'python3 -c "{get}"').describe() == f"{1 << 20}\n"
    with pytest.raises(OSError, match="cannot open '/etc/shadow'"):
        box.read("/etc/shadow")
    with pytest.raises(OSError, match="Read-only"):
        box.write("/usr/file", b"")


def test_a_link_leads_to_a_file_of_the_sandbox(start: Callable[..., LocalSandbox], tmp_path: Path) -> None:
    """The program inside makes links, and the run reads and writes by them."""
    (tmp_path / "answers").write_text("the truth")
    box = start()
    box.run(f"mkdir -p {tmp_path} && echo other > {tmp_path}/answers && ln -s {tmp_path}/answers link")
    assert box.read("link") == b"other\n"
    box.write("link", b"written")
    assert (tmp_path / "answers").read_text() == "the truth"


def test_a_limit_of_time_ends_what_runs_and_not_the_sandbox(start: Callable[..., LocalSandbox]) -> None:
    box = start()
    box.run("echo kept > file; sleep 99 &")
    result = box.run("sleep 99 & sleep 99", seconds=0.3)
    assert (result.code, result.why) == (None, "stopped after 0.3 seconds")
    assert len(family(box)) == 2 and box.run("cat file").describe() == "kept\n"  # itself and its process 1
    assert box.run("sleep 99", seconds=None if CONFIG.seconds < 6 else 5).why == "stopped after 5 seconds"


def test_sandboxes_do_not_see_each_other(start: Callable[..., LocalSandbox]) -> None:
    one, other = start(), start()
    one.run("echo x > /tmp/file; sleep 99 &")
    assert other.run("ls /tmp; ps -A -o comm= | grep sleep").output == b""
    assert one.run("id -u").output != other.run("id -u").output or os.getuid() != 0


def test_a_kill_of_either_process_ends_all(start: Callable[..., LocalSandbox]) -> None:
    for which in (0, 1):
        box = start()
        box.run("setsid sleep 99 & (setsid sleep 99 &)")
        processes = family(box)
        assert len(processes) == 4
        processes[which].kill()
        assert not psutil.wait_procs(processes[1:], timeout=5)[1]
        assert "the sandbox has ended" in box.run("echo").why


def test_an_end_in_the_middle_of_a_command(start: Callable[..., LocalSandbox]) -> None:
    box = start()
    thread = threading.Thread(target=box.run, args=["sleep 99"])
    thread.start()
    while len(family(box)) < 3:
        time.sleep(0.01)
    processes = family(box)
    box.kill()
    thread.join(timeout=5)
    assert not thread.is_alive() and not psutil.wait_procs(processes[1:], timeout=5)[1]


FALLBACK = """
import os, sys
from dataclasses import replace
from pathlib import Path
from megatron_rl.agents.sandbox import LocalSandbox, check_sandbox
from megatron_rl.agents.tools import cell
from megatron_rl.config.sections import SandboxConfig
config = SandboxConfig(kind="local", seconds=2.0, memory_mib=64, processes=16, disk_mib=8)
print(*check_sandbox(config), sep="\\n")
box = LocalSandbox(config)
for command in (
    "echo x > file; cat file; sleep 9 & setsid sleep 9 &",
    f"echo x > {os.getcwd()}/outside", f"cat {os.getcwd()}/answers", "kill -9 $PPID; echo sent",
    "python3 -c 'import socket; socket.socket()'",
    "sleep 9", "for i in $(seq 20); do sleep 9 & done" if os.getuid() == 0 else "echo Cannot fork",
):
    print(repr(box.run(command).describe()))
box.close()
print(list(Path("/tmp").glob(f"{Path(cell.DIRECTORY).name}{box.process.pid}")))
"""


def test_a_sandbox_without_namespaces_is_noted_and_keeps_the_other_layers(tmp_path: Path) -> None:
    (tmp_path / "answers").write_text("the truth")
    for name, text in {"run.py": FALLBACK, "refuse.py": WITHOUT_NAMESPACES}.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "refuse.py", "run.py"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    general, notes, written, outside, secret, signaled, network, late, many, left = done.stdout.splitlines()
    assert "shares the kernel" in general and "runs without namespaces" in notes and "not permitted" in notes
    assert written == repr("x\n") and "denied" in outside and "denied" in secret and "the truth" not in secret
    assert "sent" in signaled and "PermissionError" in network and "fork" in many and "stopped after 2" in late
    assert left == "[]" and sorted(os.listdir(tmp_path)) == ["answers", "refuse.py", "run.py"]


ENVIRONMENT = """
import os
from megatron_rl.agents.environment import Done, Observation

class Shell:
    def reset(self, task):
        self.task, self.box = task, task.sandbox
        return Observation([])

    def step(self, reply):
        if self.task.row["kind"] == "hangs":
            self.box.run("setsid sleep 4322 & sleep 4322")
        found = self.box.run("cat file; echo x > file; sleep 4322 & hostname >/dev/null; id -u").describe()
        return Done(float("No such file" in found), {"user": int(found.split()[-1])})
"""


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    directory = tmp_path_factory.mktemp("environment")
    (directory / "shell.py").write_text(ENVIRONMENT)
    (directory / "tokenizer.model").write_bytes(train_tokenizer("0123456789=+"))
    tokenizer = str(directory / "tokenizer.model")
    return Setup(f"{directory / 'shell.py'}:Shell", tokenizer, {}, (2,), False, 3, run_seed=1, sandbox=CONFIG)


def play(episodes: Any, kind: str, key: int = 0) -> Answer:
    """Return the last answer of an episode of one reply."""
    episodes.open(key, Prompt(0, np.array([4, 5], np.int32), "12", "", row={"kind": kind}))
    assert episodes.wait()[key].tail is not None
    episodes.send_reply(key, [4, 5, 6], [0.0] * 3, "stop")
    answer = episodes.wait()[key]
    episodes.close(key)
    return answer


def cells() -> list[int]:
    """Process ids of sandboxes that run below this process."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if one.status() != "zombie" and cell.__name__ in " ".join(one.cmdline()):
                found.append(one.pid)
    return found


def await_end(number: int = 0) -> None:
    """Wait until that many processes of sandboxes run: two for each, the second of which the first one forks."""
    deadline = time.monotonic() + 20
    while len(cells()) != number and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(cells()) == number


def test_each_episode_has_a_sandbox_of_its_own_and_the_pool_stays_warm(setup: Setup) -> None:
    processes = EpisodeProcesses(setup, 20.0)
    answers = [play(processes, "ends", key) for key in range(3)]
    assert [answer.reward for answer in answers] == [1.0, 1.0, 1.0]  # no file of an earlier episode
    assert len({answer.components["user"] for answer in answers}) == (3 if os.getuid() == 0 else 1)
    await_end(2)  # of a warm sandbox
    processes.close_all()
    assert not cells()


PROGRAM = """
import os
from megatron_rl.agents.environment import Done

def agent(task, base_url):
    code = "import json, sys, urllib.request as r\\n"
    code += "body = json.dumps({'model': 'policy', 'prompt': '12'}).encode()\\n"
    code += "head = {'Authorization': f'Bearer {sys.argv[2]}', 'Content-Type': 'application/json'}\\n"
    code += "found = r.urlopen(r.Request(sys.argv[1] + '/completions', body, head), timeout=9)\\n"
    code += "print(json.loads(found.read())['choices'][0]['text'])\\n"
    task.sandbox.write("agent.py", code.encode())
    found = task.sandbox.run(f"python3 agent.py {base_url} {os.environ['OPENAI_API_KEY']}").describe()
    others = task.sandbox.run("python3 agent.py http://127.0.0.1:" + task.row["kind"] + " key").describe()
    if "refused" not in others:
        raise ValueError(others)
    return Done(1.0, {"said": int(found)})
"""


def test_a_program_in_a_sandbox_without_network_reaches_its_endpoint_and_nothing_else(
    setup: Setup, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    limits = replace(CONFIG, memory_mib=256, disk_mib=16)
    setup = replace(setup, environment=None, program=f"{tmp_path}/program.py:agent", sandbox=limits)
    processes = EpisodeProcesses(setup, 60.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        answer = play(processes, f"{other.getsockname()[1]}")
    said = int(load_tokenizer(Path(setup.tokenizer)).decode([4, 5, 6]))
    assert answer.failure == "" and answer.components == {"said": said}
    processes.close_all()
    assert not cells()


def test_an_episode_that_is_late_ends_with_its_sandbox(setup: Setup) -> None:
    processes = EpisodeProcesses(replace(setup, sandbox=replace(CONFIG, seconds=60.0, warm=0)), 2.0)
    answer = play(processes, "hangs")
    assert answer.finish_reason == "timeout"
    await_end()
    processes.close_all()


def test_a_debugged_rank_has_sandboxes_too(setup: Setup) -> None:
    episodes = EpisodesInRank(setup)
    assert play(episodes, "ends").reward == 1.0
    assert not cells()


KILLED = """
import pickle, sys, time
from megatron_rl.agents.in_rank import EpisodeProcesses
setup, prompt = pickle.load(open(sys.argv[1], "rb"))
processes = EpisodeProcesses(setup, 99.0)
processes.open(0, prompt)
processes.wait()
processes.send_reply(0, [4, 5, 6], [0.0] * 3, "stop")
print("running", flush=True)
time.sleep(99)
"""


def test_a_run_that_is_killed_leaves_no_process(setup: Setup, tmp_path: Path) -> None:
    import pickle

    prompt = Prompt(0, np.array([4, 5], np.int32), "12", "", row={"kind": "hangs"})
    (tmp_path / "job").write_bytes(pickle.dumps((replace(setup, sandbox=replace(CONFIG, seconds=60.0)), prompt)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", KILLED, str(tmp_path / "job")]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, start_new_session=True) as run:
        assert run.stdout is not None and run.stdout.readline() == b"running\n"
        root, deadline = psutil.Process(run.pid), time.monotonic() + 20
        while time.monotonic() < deadline:
            processes = root.children(recursive=True)
            if sum("sleep" in one.name() for one in processes) == 2:
                break
            time.sleep(0.05)
        assert len(processes) > 6
        run.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(processes, timeout=15)[1]


def task_of(box: Sandbox, **extra: Any) -> Task:
    return Task("", "", "", extra, {}, 1, sandbox=box)


def test_tools_run_in_the_sandbox(start: Callable[..., LocalSandbox]) -> None:
    setup = Setup(None, "", {}, (), False, 4, 1, tools=("python", "bash"), sandbox=CONFIG)
    environment = find_environments(setup)()
    environment.reset(task_of(start()))
    calls = [
        ToolCall("bash", {"command": "echo 7 > number"}),
        ToolCall("run_python", {"code": "print(open('number').read())"}),
    ]
    answer = environment.step(Reply("", [*calls, ToolCall("bash", {"command": "exit 4"})], "stop"))
    assert isinstance(answer, Observation)
    assert [message["content"] for message in answer.messages] == ["", "7\n\n", "(exit code 4)"]


def test_the_python_tool_without_a_sandbox_is_confined_as_ever() -> None:
    environment = find_environments(Setup(None, "", {}, (), False, 4, 1, tools=("python",)))()
    environment.reset(Task("", "", "", {}, {}, 1))
    answer = environment.step(Reply("", [ToolCall("run_python", {"code": "import os; os.fork()"})], "stop"))
    assert isinstance(answer, Observation) and "PermissionError" in answer.messages[0]["content"]


@pytest.fixture
def harbor(tmp_path: Path) -> Path:
    """A directory with a task: to write the number 42 into a file."""
    task = tmp_path / "tasks" / "number"
    for name, text in {
        "instruction.md": "Write 42 into the file number.\n",
        "task.toml": "[verifier]\ntimeout_sec = 5.0\n",
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /workspace\n",
        "tests/test.sh": 'echo tested; [ "$(cat /workspace/number)" = "$(cat /tests/data/right)" ]\n'
        "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
        "tests/data/right": "42\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return tmp_path / "tasks"


@pytest.mark.parametrize(("command", "reward"), [("echo 42 > number", 1.0), ("echo 41 > number", 0.0)])
def test_a_harbor_task(start: Callable[..., LocalSandbox], harbor: Path, command: str, reward: float) -> None:
    factory: Any = find_environment(f"harbor:{harbor}")
    assert [tool["function"]["name"] for tool in factory.tools] == ["bash"]
    environment = factory()
    environment.reset(task_of(start(), task="number"))
    cheat = "mkdir -p /logs/verifier /tests; echo 9 > /logs/verifier/reward.json; echo > /tests/test.sh"
    calls = [ToolCall("bash", {"command": cheat}), ToolCall("bash", {"command": command})]
    answer = environment.step(Reply("", calls, "stop"))
    assert isinstance(answer, Observation) and answer.reward == 0.0 and len(answer.messages) == 2
    assert environment.step(Reply("done", [], "stop")) == Done(reward)


def test_harbor_rewards_by_name_and_what_is_missing(start: Callable[..., LocalSandbox], harbor: Path) -> None:
    test = harbor / "number" / "tests" / "test.sh"
    factory = find_environment(f"harbor:{harbor}")

    def verify() -> Done | Observation:
        environment = factory()
        environment.reset(task_of(start(), task="number"))
        return environment.step(Reply("done", [], "stop"))

    test.write_text("""echo '{"reward": 0.75, "style": 1}' > /logs/verifier/reward.json""")
    assert verify() == Done(0.75, {"reward": 0.75, "style": 1.0})
    test.write_text("echo no compiler; exit 2")
    with pytest.raises(RuntimeError, match=r"exit code 2\) no compiler"):
        verify()
    (harbor / "number" / "environment" / "Dockerfile").write_text("FROM debian:12\nRUN apt-get install gcc\n")
    with pytest.raises(RuntimeError, match="builds no image, and the task's has: RUN apt-get"):
        verify()
    with pytest.raises(UserError, match="there is no task"):
        find_environment("harbor:nowhere")


def test_a_service(setup: Setup) -> None:
    """The reference server: commands, files, limits, and ends after no use and with the episode."""
    server = SandboxServer(("127.0.0.1", 0), CONFIG, idle_seconds=2.0)
    threading.Thread(target=server.serve_forever, args=[0.1], daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    box = start_sandbox(SandboxConfig(kind=url, seconds=2.0, memory_mib=64, disk_mib=8))
    assert check_sandbox(box.config) == []
    box.write("file", b"\0\1")
    assert box.read("file") == b"\0\1" and box.run("exit 3").code == 3
    assert box.run("sleep 9", seconds=0.2).why == "stopped after 0.2 seconds"
    assert "No space left" in box.run("cat /dev/zero > /dev/shm/x; cat /dev/zero > y").describe()
    await_end()
    assert "404" in box.run("echo").why
    box = start_sandbox(box.config)
    assert box.run("echo 1").output == b"1\n"
    box.close()
    await_end()
    processes = EpisodeProcesses(replace(setup, sandbox=box.config), 20.0)
    assert play(processes, "ends").reward == 1.0
    await_end()
    processes.close_all()
    server.shutdown()
    server.server_close()


HELD = ["sh", "image:1", "-c", "echo up; exec cat >/dev/null"]


def test_the_command_line_of_a_container() -> None:
    config = SandboxConfig(kind="docker", image="image:1", memory_mib=512, processes=30, disk_mib=100)
    words = plan_container(config, "name", "owner")
    assert words[:3] == ["docker", "run", "--interactive"] and words[-4:] == HELD and words[-5] == "--entrypoint"
    options = {name: value for name, value in zip(words, words[1:]) if name.startswith("--")}
    assert options | {"--tmpfs": "", "--ulimit": ""} == {
        "--interactive": "--rm",
        "--rm": "--init",
        "--init": "--name",
        "--name": "name",
        "--label": "megatron_rl.owner=owner",
        "--network": "none",
        "--memory": "512m",
        "--memory-swap": "512m",
        "--pids-limit": "32",
        "--ulimit": "",
        "--security-opt": "no-new-privileges",
        "--read-only": "--cap-drop",
        "--cap-drop": "ALL",
        "--tmpfs": "",
        "--workdir": "/workspace",
        "--env": "HOME=/workspace",
        "--entrypoint": "sh",
    }
    assert {"fsize=104857600", "/workspace:exec,size=100m,mode=1777", "/tmp:exec,size=100m,mode=1777"} <= {*words}


@pytest.mark.parametrize(
    ("fields", "is_task", "there", "absent"),
    [
        ({"network": True}, False, {"host"}, {"none"}),
        ({}, True, {"no-new-privileges", "none", "256m"}, {"--read-only", "--cap-drop", "--tmpfs", "--workdir"}),
        ({"kind": "podman"}, False, {"podman", "--read-only"}, {"docker"}),
    ],
)
def test_variants_of_the_command_line(fields: dict[str, Any], is_task: bool, there: set[str], absent: set[str]) -> None:
    config = replace(SandboxConfig(kind="docker", image="image:1", memory_mib=256), **fields)
    words = {*plan_container(config, "name", "owner", is_task)}
    assert there <= words and not absent & words


def test_a_command_in_a_container_cannot_become_an_option() -> None:
    words = plan_command(SandboxConfig(kind="podman", image="i"), "name", "--privileged; echo", 3)
    assert words == [
        "podman",
        "exec",
        "--interactive",
        "name",
        "timeout",
        "-s",
        "KILL",
        "3",
        "sh",
        "-c",
        "--privileged; echo",
    ]


def test_a_program_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sandbox starts: .*No such file or directory: 'podman'"):
        check_sandbox(SandboxConfig(kind="podman"))


def test_owners_of_containers() -> None:
    from megatron_rl.agents.sandbox import _describe_owner

    mine = _describe_owner(os.getpid())
    host, boot, pid, started = mine.split(":")
    assert not is_orphaned(mine) and not is_orphaned(f"other{mine}")
    for gone in (f"{host}:{boot}:{pid}:1", f"{host}:00000000:{pid}:{started}", f"{host}:{boot}:4194999:1", host):
        assert is_orphaned(gone)


IMAGE = os.environ.get("DOCKER_IMAGE")


@pytest.mark.slow
@pytest.mark.skipif(
    IMAGE is None or shutil.which("docker") is None, reason="DOCKER_IMAGE names no image, or docker is not installed"
)
def test_a_container_of_docker() -> None:
    """Limits, files, a kill of the client, and the removal of a container whose run is gone."""
    config = SandboxConfig(kind="docker", image=IMAGE, seconds=2.0, memory_mib=64, processes=16, disk_mib=8)
    assert check_sandbox(config) == [] == check_sandbox(replace(config, image=None)), "tasks may name their images"
    box = start_sandbox(config)
    assert isinstance(box, ContainerSandbox)
    box.write("file", b"\0\1")
    assert box.read("/workspace/file") == b"\0\1" and box.run("exit 3").code == 3
    for command, pattern in {
        "sleep 9": "stopped after 2 seconds",
        "yes": "stopped at 8 MiB of output",
        "cat /dev/zero > /workspace/zeros": "No space left",
        "cat /dev/zero > /dev/shm/zeros": "exit code 153|File size limit",
        "echo x > /etc/x": "Read-only",
        "tail /dev/zero": "killed by a signal, or at 64 MiB of memory",
        "nc -w 1 1.1.1.1 80": "unreachable",
        "for i in $(seq 30); do sleep 3 & done": "fork",
        "kill -9 -1": "killed by a signal|^$",  # busybox's timeout has become the shell, which is not killed
    }.items():
        found = box.run(command).describe()
        assert re.search(pattern, found), (command, found)
    time.sleep(1.0)
    assert "the sandbox has ended" in box.run("echo").why
    box.close()
    box = start_sandbox(config)
    assert box.run("echo 1").output == b"1\n"
    box.kill()
    words = ["docker", "ps", "--all", "--quiet", "--filter", "label=megatron_rl.owner"]
    deadline = time.monotonic() + 10
    while (left := subprocess.run(words, capture_output=True, text=True).stdout) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    gone = plan_container(config, "megatron_rl_gone", f"{os.uname().nodename}:0:1:1")
    subprocess.run([*gone[:2], "--detach", *gone[2:]], check=True, capture_output=True)
    assert check_sandbox(config) == ["agents.sandbox: removed 1 sandboxes of runs that were killed"]
    assert not subprocess.run(words, capture_output=True, text=True).stdout
