# SPDX-License-Identifier: Apache-2.0
"""Tasks in Harbor's format: `harbor:DIRECTORY`, with a directory for each task (https://harborframework.com/docs/tasks).

    instruction.md             the prompt
    task.toml                  [environment] docker_image, [verifier] timeout_sec
    environment/Dockerfile     is built if task.toml names no image
    tests/test.sh              writes /logs/verifier/reward.txt, or reward.json

A row's `extra_info.task` is the name of its task. The policy calls `bash` in the task's container; the reply without a
call ends the episode, and then the tests are copied there and run.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from megatron_rl.agents.environment import Done, Environment, Observation, Reply, Task
from megatron_rl.agents.sandbox import Sandbox, start_sandbox
from megatron_rl.agents.tools.finding import bash, run_in
from megatron_rl.agents.tools.tool import ToolEnvironment, describe_function
from megatron_rl.types import UserError

_LOGS = "/logs/verifier"
_LOCAL_LINES = ("FROM ", "WORKDIR ", "#")


class HarborEnvironment:
    """An episode on one task, in a sandbox of the task's image."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def reset(self, task: Task) -> Observation:
        """Start the task's sandbox (RuntimeError if there is no image)."""
        assert task.sandbox is not None  # the configuration was checked
        self._directory /= str(task.extra_info["task"])
        self._settings: dict[str, Any] = tomllib.loads((self._directory / "task.toml").read_text())
        self._box = self._open(task.sandbox)
        self._shell = ToolEnvironment({"bash": partial(run_in, self._box)})
        return Observation([])

    def step(self, reply: Reply) -> Observation | Done:
        """Run the reply's commands, or the tests after a reply without any."""
        found = self._shell.step(reply)
        return self._verify() if isinstance(found, Done) else Observation(found.messages, 0.0)

    def _open(self, given: Sandbox) -> Sandbox:
        config, place = given.config, self._directory / "environment"
        image = self._settings.get("environment", {}).get("docker_image")
        if config.kind == "local":
            lines = (place / "Dockerfile").read_text().splitlines() if (place / "Dockerfile").exists() else []
            if further := [line for line in lines if line.strip() and not line.startswith(_LOCAL_LINES)]:
                raise RuntimeError(f"agents.sandbox.kind = local builds no image, and the task's has: {further[0]}")
            return given
        if image is None and config.kind not in ("docker", "podman"):
            raise RuntimeError(f"{self._directory}/task.toml names no docker_image, which the service needs")
        return start_sandbox(config, image or _build(config.kind or "", place))

    def _verify(self) -> Done:
        """Run the task's tests and return their reward (RuntimeError if they write none)."""
        box, tests = self._box, self._directory / "tests"
        box.run(f"rm -rf /tests {_LOGS}; mkdir -p /tests {_LOGS}")  # the policy may have made them
        for path in sorted(path for path in tests.rglob("*") if path.is_file()):
            box.write(f"/tests/{path.relative_to(tests)}", path.read_bytes())
        limit = self._settings.get("verifier", {}).get("timeout_sec")
        result = box.run(f"bash /tests/test.sh > {_LOGS}/test-stdout.txt 2>&1", seconds=limit)
        said = box.run(f"cd {_LOGS} && (cat reward.json 2>/dev/null || cat reward.txt)").output
        try:
            found = json.loads(said)
            if not isinstance(found, dict):
                return Done(float(found))
            values = {name: float(value) for name, value in found.items()}
            return Done(values["reward"], values)
        except (ValueError, TypeError, KeyError) as error:
            log = box.run(f"tail -c 1000 {_LOGS}/test-stdout.txt").describe()
            raise RuntimeError(f"the task's tests wrote no reward: {result.describe()} {log}") from error


def _build(program: str, place: Path) -> str:
    """Return the name of the image of a directory with a Dockerfile; build it if there is none (RuntimeError)."""
    digest = blake2b(digest_size=10)
    for path in sorted(path for path in place.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(place)}\0".encode() + path.read_bytes() + b"\0")
    name = f"megatron_rl_task:{digest.hexdigest()}"
    if subprocess.run([program, "image", "inspect", name], capture_output=True, check=False).returncode:
        built = subprocess.run(
            [program, "build", "--tag", name, str(place)], capture_output=True, text=True, check=False
        )
        if built.returncode:
            raise RuntimeError(f"{place}: {built.stderr[-1000:]}")
    return name


def list_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield a row of a data file for each task."""
    for path in sorted(directory.glob("*/task.toml")):
        prompt = [{"role": "user", "content": (path.parent / "instruction.md").read_text()}]
        yield {"prompt": prompt, "answer": "", "data_source": "harbor", "extra_info": {"task": path.parent.name}}


@dataclass(frozen=True)
class _Tasks:
    """A factory for the environments of a directory's tasks."""

    directory: Path
    tools: list[dict[str, Any]] = field(default_factory=lambda: [describe_function(bash)])

    def __call__(self) -> Environment:
        return HarborEnvironment(self.directory)


def find_tasks(kind: str, directory: str) -> Callable[[], Environment]:
    """Return the environment factory of a directory of tasks (UserError if there are none)."""
    if not directory or not next(Path(directory).glob("*/task.toml"), None):
        raise UserError(
            f"{directory or 'no directory'}: there is no task",
            source=f"agents.environment = {kind}:{directory}",
            expected="a directory of tasks in Harbor's format, each with task.toml, instruction.md and tests/test.sh",
            hint="see docs/agents.md",
        )
    return _Tasks(Path(directory).resolve())
