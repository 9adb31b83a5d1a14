# SPDX-License-Identifier: Apache-2.0
"""Tools: how they are described, called and bounded; search by BM25; an MCP server of the package `mcp`.

Programs that try to get out of `run_python` are in test_confinement.py.
"""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
from chat_templates import write_chat_tokenizer

from megatron_rl.agents.environment import Done, Reply, ToolCall
from megatron_rl.agents.episode import Setup
from megatron_rl.agents.in_rank import EpisodeProcesses
from megatron_rl.agents.program import check_episodes
from megatron_rl.agents.tools.finding import Bm25, describe_tools, find_tools, run_python
from megatron_rl.agents.tools.tool import ToolEnvironment, describe_function
from megatron_rl.config.sections import AgentsConfig, DataConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.types import Prompt, UserError


def look(place: str, depth: int = 1, kind: Literal["near", "far"] = "near", names: list[str] | None = None) -> dict:
    """Look around.

    Describes the surroundings.
    """
    return {"place": place, "depth": depth, "names": names}


def test_a_function_is_described_by_its_signature():
    assert describe_function(look) == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look around.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "depth": {"type": "integer"},
                    "kind": {"type": "string", "enum": ["near", "far"]},
                    "names": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["place"],
            },
        },
    }


def test_results_are_one_message_for_each_call_and_errors_are_told_to_the_policy():
    environment = ToolEnvironment({"look": look, "shout": lambda: "x" * 10**5})
    calls = [ToolCall("look", {"place": "here"}), ToolCall("look", {}), ToolCall("jump", {}), ToolCall("", None)]
    observation = environment.step(Reply("", [*calls, ToolCall("shout", {})], "stop"))
    contents = [message["content"] for message in observation.messages]
    assert [message["role"] for message in observation.messages] == ["tool"] * 5
    assert json.loads(contents[0]) == {"place": "here", "depth": 1, "names": None}
    assert contents[1].startswith("error: TypeError") and "place" in contents[1]
    assert "there is no tool jump; there are look, shout" in contents[2]
    assert contents[3].startswith("error: a tool call is an object")
    assert len(contents[4]) < 8100 and contents[4].endswith("(100000 characters, cut)")
    assert environment.step(Reply("12", [], "stop")) == Done()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import numpy; print(numpy.arange(4).sum())", "6\n"),
        ("open('a.txt', 'w').write('kept'); print(open('a.txt').read())", "kept\n"),
        ("print(1)\n1/0", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "error: ended with code 3"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import subprocess; subprocess.run(['ls'])", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("open('../a.txt', 'w')", "PermissionError"),
        ("import os; os.remove('/tmp/none')", "PermissionError"),
        ("1/0", 'Traceback (most recent call last):\n  File "program.py", line 1, in <module>\nZeroDivisionError'),
        ("a b", '  File "program.py", line 1\n    a b\n'),
        ("a = bytearray(8 << 30)", "MemoryError"),
        (
            "import os; print({*os.environ} - {'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'})",
            "{'PYTHONUTF8'}",
        ),
    ],
)
def test_a_program_runs_within_bounds(code, expected):
    assert expected in run_python(code)


def test_a_program_that_hangs_or_shouts_is_cut(monkeypatch):
    shouted = run_python("print('first'); print('x' * 10**8)")
    assert shouted.startswith("first") and len(shouted) < 4100 and "bytes, cut" in shouted
    monkeypatch.setattr("megatron_rl.agents.tools.finding._SECONDS", 0.5)
    assert run_python("print('begun', flush=True)\nwhile True: pass") == "begun\nerror: stopped after 0.5 seconds"


TEXTS = ["The red house stands by the river.", "A blue house.", "The river is long and the river is cold.", "Nothing."]


def test_scores_are_those_of_the_formula():
    index = Bm25(TEXTS)
    words = [text.lower().rstrip(".").split() for text in TEXTS]
    mean = sum(map(len, words)) / 4

    def score(query, words_of):
        total = 0.0
        for word in query.split():
            times, found = words_of.count(word), sum(word in other for other in words)
            norm = times + 1.2 * (0.25 + 0.75 * len(words_of) / mean)
            total += math.log(1 + (4.5 - found) / (found + 0.5)) * times * 2.2 / norm
        return total

    for query in ("river", "house river", "the cold blue river", "nothing"):
        scores = [score(query, words_of) for words_of in words]
        expected = [place for place in np.argsort(-np.array(scores), kind="stable") if scores[place] > 0]
        assert index.find(query, 4) == expected
    assert index.find("unknown", 4) == [] and index.find("house", 1) == [1]


SERVER = """
from mcp.server import MCPServer
server, count = MCPServer("desk"), 0

@server.tool()
def visit(name: str) -> str:
    "Visit the desk."
    global count
    count += 1
    return f"{name} is visitor {count}"

server.run("stdio")
"""


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tools")
    (directory / "server.py").write_text(SERVER)
    (directory / "corpus.jsonl").write_text("".join(json.dumps({"text": text, "title": "T"}) + "\n" for text in TEXTS))
    (directory / "own.py").write_text("def double(number: int) -> int:\n    'Twice.'\n    return 2 * number\n")
    return [
        "calculator",
        "python",
        f"search:{directory / 'corpus.jsonl'}",
        f"{directory / 'own.py'}:double",
        f"mcp:{sys.executable} {directory / 'server.py'}",
    ]


def test_all_kinds_of_tools_answer_in_an_episode_and_the_prompt_shows_them(names, tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path, "qwen2.5")
    specs = describe_tools(names)
    assert [spec["function"]["name"] for spec in specs] == ["calculate", "run_python", "search", "double", "visit"]
    assert specs[4]["function"]["parameters"]["required"] == ["name"]
    row = {"prompt": [{"role": "user", "content": "hello"}], "answer": "12"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    config = DataConfig(train_files=[], train_batch_size=1, max_prompt_length=4096, max_response_length=8)
    found = load_prompts([str(tmp_path / "train.jsonl")], tokenizer, config, tools=specs)
    (prompt,) = found.prompts
    assert prompt.tools == specs and '"name": "visit"' in prompt.text

    setup = Setup(None, str(tmp_path), {}, (tokenizer.eos_token_id,), False, 8, 1, tools=tuple(names))
    processes = EpisodeProcesses(setup, 60.0)
    calls = [
        ("calculate", {"expression": "12*34"}),
        ("run_python", {"code": "print(5)"}),
        ("search", {"query": "blue", "num_results": 1}),
        ("double", {"number": 4}),
        ("visit", {"name": "Ada"}),
        ("visit", {"name": "Bob"}),
    ]
    said = "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls)
    reply = tokenizer.encode(said)
    shown = []
    for key in range(2):  # each episode has a server of its own
        processes.open(key, prompt)
        processes.wait()
        processes.send_reply(key, reply, [0.0] * len(reply), "stop")
        answer = processes.wait()[key]
        assert not answer.failure
        shown.append(tokenizer.decode(answer.tail.tokens))
        processes.send_reply(key, [], [], "stop")
        assert processes.wait()[key].tail is None
        processes.close(key)
    processes.close_all()
    assert shown[0] == shown[1]
    results = [part.partition("</tool_response>")[0].strip() for part in shown[0].split("<tool_response>")[1:]]
    assert results == ["408", "5", "[1] T\nA blue house.", "8", "Ada is visitor 1", "Bob is visitor 2"]


def test_what_is_not_there_is_named(names, tmp_path):
    (tmp_path / "double.py").write_text("def double(number: int): ...\n")
    for wrong, message in (
        (["chess"], "names no tool"),
        ([f"search:{tmp_path / 'none.jsonl'}"], "no such corpus"),
        ([names[3], f"{tmp_path / 'double.py'}:double"], 'two tools have the name "double"'),
        (["mcp:false"], "does not list its tools"),
    ):
        with pytest.raises(UserError, match=message):
            find_tools(wrong)


def test_a_template_or_a_prompt_that_cannot_show_tools_is_refused(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path, "qwen2.5")
    agents = AgentsConfig(tools=["calculator"], history="keep")
    config = SimpleNamespace(agents=agents, data=SimpleNamespace(apply_chat_template_kwargs={}))

    def check(messages, text):
        prompt = Prompt(0, np.array([1], np.int32), text, "", messages=messages)
        return check_episodes(config, tokenizer, SimpleNamespace(prompts=[prompt]))

    question = [{"role": "user", "content": "hello"}]
    with pytest.raises(UserError, match="plain text, which shows no tools"):
        check(None, "hello")
    with pytest.raises(UserError, match="the chat template does not show tools"):
        check(question, tokenizer.apply_chat_template(question))
    assert check(question, tokenizer.apply_chat_template(question, tools=describe_tools(["calculator"]))) == []
