# SPDX-License-Identifier: Apache-2.0
"""Environments behind an OpenEnv server.

The default tier has a server of ours that speaks the wire format of openenv 0.10; the slow tier plays the same on the
package's own server, which needs an interpreter of its own:

    python -m venv VENV; VENV/bin/pip install openenv
    OPENENV_PYTHON=VENV/bin/python pytest -m slow tests/agents/test_openenv.py

Not covered: observations of pictures, and servers that want to be logged in to.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fastapi
import pytest
import uvicorn
from chat_templates import write_chat_tokenizer

from megatron_rl.agents.adapters.openenv import OpenEnvironment
from megatron_rl.agents.environment import Done, Observation, Reply, Task, ToolCall, find_environment
from megatron_rl.config.schema import AgentsConfig, AlgorithmConfig, DataConfig, RewardConfig
from megatron_rl.rewards.plan import build_reward_plan
from megatron_rl.run.inputs import read_prompts
from megatron_rl.types import UserError

TASK = Task("", "", "", {"reset": {"plus": 1}}, {}, seed=3)
VISIT = {
    "name": "visit",
    "description": "Visit the desk.",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}
SCHEMAS = {
    "guess": {"properties": {"metadata": {"type": "object"}, "text": {"type": "string"}}, "required": ["text"]},
    "move": {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]},
    "desk": {"properties": {name: {} for name in ("metadata", "type", "tool_name", "arguments")}},
}


class Session:
    """One connection: the server's answer to each message."""

    def __init__(self, kind: str) -> None:
        self.kind, self.number, self.count = kind, 0, 0

    def answer(self, message: dict) -> dict:
        data = message["data"]
        if message["type"] == "reset":
            self.number = data["seed"] + data.get("plus", 0)
            return self.observe({} if self.kind == "desk" else {"hint": f"Say {self.number}."})
        if self.kind == "desk":
            return self.visit(data)
        if self.kind == "move":
            return self.observe({"legal": [[data["x"], data["y"]]], "hint": "No."})
        if data["text"] == "crash":
            return {"type": "error", "data": {"message": "lost the thread", "code": "EXECUTION_ERROR"}}
        is_right = data["text"] == str(self.number)
        return self.observe({"hint": "" if is_right else "No."}, 1.0 if is_right else 0.5, is_right)

    def visit(self, data: dict) -> dict:
        if not isinstance(data["arguments"], dict):
            errors = [{"msg": "Input should be a valid dictionary"}]
            return {"type": "error", "data": {"message": "Invalid", "code": "VALIDATION_ERROR", "errors": errors}}
        if data["tool_name"] != "visit":
            error = {"error_type": "tool_not_found", "message": f"Unknown tool: '{data['tool_name']}'"}
            return self.observe({"tool_name": data["tool_name"], "result": None, "error": error})
        self.count += 1
        text = f"{data['arguments']['name']} is visitor {self.count}"
        result = {"content": [{"type": "text", "text": text}], "is_error": False}
        return self.observe({"tool_name": "visit", "result": result, "error": None})

    def observe(self, fields: dict, reward: float | None = None, done: bool = False) -> dict:
        data = {"observation": {"metadata": {}, **fields}, "reward": reward, "done": done}
        return {"type": "observation", "data": data}


def build_app(kind: str) -> fastapi.FastAPI:
    """A server with place for one session."""
    app, is_taken = fastapi.FastAPI(), []

    @app.get("/schema")
    def schema() -> dict:
        return {"action": SCHEMAS[kind], "observation": {}, "state": {}}

    @app.post("/step")
    def step(body: dict) -> dict:
        assert body == {"action": {"type": "list_tools"}}
        return {"observation": {"tools": [VISIT]}, "reward": None, "done": False}

    async def talk(socket: fastapi.WebSocket) -> None:
        await socket.accept()
        if is_taken:
            full = {"message": "Server at capacity: 1/1 sessions active.", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": full})
            await socket.close()
            return
        session = Session(kind)
        is_taken.append(session)
        with contextlib.suppress(fastapi.WebSocketDisconnect):
            while True:
                await socket.send_json(session.answer(await socket.receive_json()))
        is_taken.clear()

    app.add_api_websocket_route("/ws", talk)
    return app


@contextlib.contextmanager
def serve_ours(kind: str) -> Iterator[str]:
    """The URL of a server of ours."""
    server = uvicorn.Server(uvicorn.Config(build_app(kind), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join()


@contextlib.contextmanager
def serve_theirs(kind: str) -> Iterator[str]:
    """The URL of a server of the package."""
    script = str(Path(__file__).with_name("openenv_server.py"))
    command = [os.environ["OPENENV_PYTHON"], "-E", script, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        for _ in range(300):
            with contextlib.suppress(UserError):
                find_environment(f"openenv:{url}")
                break
            time.sleep(0.1)
        yield url
        process.kill()


@pytest.fixture(
    params=[pytest.param(serve_ours, id="ours"), pytest.param(serve_theirs, id="theirs", marks=pytest.mark.slow)]
)
def serve(request):
    if request.param is serve_theirs:
        interpreter = os.environ.get("OPENENV_PYTHON")
        if interpreter is None or subprocess.run([interpreter, "-c", "import openenv"]).returncode:
            pytest.skip("OPENENV_PYTHON names no interpreter that imports openenv")
    return request.param


def say(environment, text, *calls):
    return environment.step(Reply(text, list(calls), "stop"))


def see(text, reward=None):
    return Observation([{"role": "user", "content": text}], reward)


def test_a_reply_is_the_action_and_its_reward_that_of_the_turn(serve):
    with serve("guess") as url:
        environment = find_environment(f"openenv:{url}/")()
        assert environment.reset(TASK) == see("Say 4.")  # the seed plus the row's offset
        assert say(environment, "5") == see("No.", 0.5)
        with pytest.raises(RuntimeError, match="at capacity.*: lower agents.episodes_in_flight"):
            find_environment(f"openenv:{url}")().reset(TASK)
        assert say(environment, "4") == Done(1.0)
        with pytest.raises(RuntimeError, match="lost the thread"):
            say(environment, "crash")


def test_tool_calls_are_steps_and_a_reply_without_any_ends_the_episode(serve):
    with serve("desk") as url:
        make_environment = find_environment(f"openenv:{url}")
        (tool,) = make_environment.tools
        assert tool["function"]["name"] == "visit" and tool["function"]["parameters"]["required"] == ["name"]
        environment = make_environment()
        assert environment.reset(TASK) == Observation([])
        calls = [ToolCall("visit", {"name": name}) for name in ("Ada", "Bob")]
        found = say(environment, "", *calls, ToolCall("jump", {}), ToolCall("", None))
        assert [message["role"] for message in found.messages] == ["tool"] * 4 and found.reward is None
        texts = [message["content"] for message in found.messages]
        assert texts[:2] == ["Ada is visitor 1", "Bob is visitor 2"]
        assert texts[2].startswith("error: ") and "jump" in texts[2]
        assert texts[3] == "error: Input should be a valid dictionary"
        assert say(environment, "Done.") == Done()


def test_an_action_of_several_fields_is_a_reply_of_json():
    with serve_ours("move") as url:
        environment = find_environment(f"openenv:{url}")()
        environment.reset(TASK)
        assert say(environment, '{"x": 1, "y": 2}') == see('{"legal": [[1, 2]], "hint": "No."}')
        for wrong in ("right", "[1, 2]"):
            (message,) = say(environment, wrong).messages
            assert message["content"].startswith("error: the reply must be a JSON object with x, y")


def test_a_class_of_ones_own_reads_replies_and_writes_observations_in_its_way():
    class Polite(OpenEnvironment):
        def read_action(self, reply):
            return {"text": reply.text.split()[-1]}

        def write_observation(self, observation):
            return f"Please: {observation['hint']}"

    with serve_ours("guess") as url:
        environment = Polite(url)
        assert environment.reset(TASK) == see("Please: Say 4.")
        assert say(environment, "I say 4") == Done(1.0)


def test_what_the_server_offers_is_shown_to_the_policy(tmp_path):
    row = {"prompt": [{"role": "user", "content": "hello"}], "answer": "12"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(
        train_files=[str(tmp_path / "train.jsonl")], train_batch_size=1, max_prompt_length=512, max_response_length=8
    )
    with serve_ours("desk") as url:
        agents = AgentsConfig(environment=f"openenv:{url}")
        config = SimpleNamespace(data=data, agents=agents, algorithm=AlgorithmConfig(), teachers={})
        plan = build_reward_plan(RewardConfig(function="exact"), 8)
        train, _, _ = read_prompts(config, write_chat_tokenizer(tmp_path, "qwen2.5"), plan)
    assert '"name": "visit"' in train.prompts[0].text


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(UserError, match="the OpenEnv server does not answer: URLError"):
        find_environment("openenv:http://127.0.0.1:9")
