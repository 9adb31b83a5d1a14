# SPDX-License-Identifier: Apache-2.0
"""Agent frameworks from PyPI, unchanged, through the endpoint of an episode.

    pip install "pydantic-ai-slim[openai]" openai-agents
    pytest -m slow tests/agents/test_frameworks.py

    python -m venv VENV; VENV/bin/pip install verifiers
    VERIFIERS_PYTHON=VENV/bin/python pytest -m slow tests/agents/test_frameworks.py

    pip install verifiers uv
    pytest -m slow tests/agents/test_frameworks.py -k taskset      # uv fetches packages at the first time

Frameworks that cannot be imported are skipped. Verifiers needs other package versions, hence its own interpreter. Not
covered: features beyond a tool call and its answer.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from scripted_policy import ScriptedPolicy

PYDANTIC_AI = """
from pydantic_ai import Agent

async def agent(task, base_url):
    player = Agent("openai-chat:policy")

    @player.tool_plain
    def calculate(expression: str) -> str:
        "Compute."
        return str(eval(expression))

    result = await player.run(task.messages[0]["content"])
    return float(result.output.strip() == "408")
"""
OPENAI_AGENTS = """
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

@function_tool
def calculate(expression: str) -> str:
    "Compute."
    return str(eval(expression))

async def agent(task, base_url):
    model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
    player = Agent(name="player", model=model, tools=[calculate])
    result = await Runner.run(player, task.messages[0]["content"])
    return float(result.final_output.strip() == "408")
"""
VERIFIERS = """
import os, subprocess

async def agent(task, base_url):
    command = [os.environ["VERIFIERS_PYTHON"], "-E", SCRIPT]  # without our PYTHONPATH
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return float(done.stdout.split()[-1])
"""
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward
    async def is_right(self, trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

class Sums(vf.Taskset[Sum]):
    def load(self):
        for i in range(4):
            yield Sum(Data(prompt=f"{i} + 1?", answer=str(i + 1)), self.config.task)

__all__ = ["Sums"]
"""
FRAMEWORKS = {"pydantic_ai": PYDANTIC_AI, "agents": OPENAI_AGENTS}
CALL = 'hello <tool_call>\n{"name": "calculate", "arguments": {"expression": "12*34"}}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.parametrize("package", FRAMEWORKS)
def test_a_framework_calls_a_tool_and_answers_in_one_branch(package, tmp_path):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # tests/agents is a namespace of that name
        pytest.skip(f"{package} is not installed")
    policy = ScriptedPolicy(tmp_path, FRAMEWORKS[package], turn_seconds=60.0)
    answer, rollout, requests, _ = policy.play("any", CALL, "408")
    policy.processes.close_all()
    assert (answer.finish_reason, answer.reward) == (None, 1.0), answer.failure
    (branch,) = rollout.branches  # the messages that the framework repeats match earlier turns
    assert branch.tokens[branch.sampled].tolist() == policy.spell(CALL) + policy.spell("408")
    observed = policy.tokenizer._tokenizer.decode(requests[1][rollout.turns[0].stop :])
    assert "<tool_response>\n408\n</tool_response>" in observed


@pytest.mark.slow
def test_an_episode_of_verifiers_in_an_interpreter_of_its_own(tmp_path):
    """Its server in between changes nothing that is sampled: one branch, and its reward."""
    interpreter = os.environ.get("VERIFIERS_PYTHON")
    if interpreter is None or subprocess.run([interpreter, "-c", "import verifiers.v1"]).returncode:
        pytest.skip("VERIFIERS_PYTHON names no interpreter that imports verifiers.v1")
    script = str(Path(__file__).with_name("verifiers_episode.py"))
    policy = ScriptedPolicy(tmp_path, VERIFIERS.replace("SCRIPT", repr(script)), turn_seconds=120.0)
    answer, rollout, _, _ = policy.play("any", "hello", "12")
    policy.processes.close_all()
    assert (answer.finish_reason, answer.reward) == (None, 1.0), answer.failure
    (branch,) = rollout.branches
    assert branch.tokens[branch.sampled].tolist() == policy.spell("hello") + policy.spell("12")


@pytest.mark.slow
def test_a_taskset_of_verifiers_by_its_name(tmp_path, monkeypatch):
    """Its prompt, not the row's, and its reward: 1 + 1 is 2, and not 3."""
    pytest.importorskip("verifiers.v1")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "plus_one.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path / "modules")  # for this process and the workers
    policy = ScriptedPolicy(tmp_path, "", turn_seconds=120.0, program="verifiers:plus-one")
    for reply, reward in (("2", 1.0), ("3", 0.0)):
        answer, rollout, requests, _ = policy.play("any", reply, extra_info={"task": 1})
        assert (answer.finish_reason, answer.reward) == (None, reward), answer.failure
        assert requests == [policy.encode([{"role": "user", "content": "1 + 1?"}])]
        (branch,) = rollout.branches
        assert branch.tokens[branch.sampled].tolist() == policy.spell(reply)
    policy.processes.close_all()
