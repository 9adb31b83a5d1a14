# SPDX-License-Identifier: Apache-2.0
"""The task of three sources: deterministic bytes, right answers, and calls that the tool format reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.agents.tool_formats import find_tool_format, read_reply
from megatron_rl.agents.tools.finding import describe_tools
from megatron_rl.data.tokenizer import HuggingFaceTokenizer
from tools import make_mixture_task as tool

SMALL = ["--train", "40", "--validation", "6", "--error-rate", "0.5"]


def test_answers_are_right_and_demonstrations_call_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [tmp_path / name for name in ("first", "second")]
    assert [tool.main(["--out", str(task), *SMALL]) for task in tasks] == [0, 0]
    files = [{file.name: file.read_bytes() for file in task.rglob("*") if file.is_file()} for task in tasks]
    assert files[0] == files[1] and {*tool.FILES, "task.json", "model.safetensors"} <= files[0].keys()
    assert tool.main(["--out", str(tasks[0]), *SMALL]) == 0 and "nothing to do" in capsys.readouterr().out
    for name, sign in (("swaps", ","), ("products", "*")):
        rows = [json.loads(line) for line in files[0][f"{name}.jsonl"].splitlines()]
        assert len(rows) == 40
        for row in rows:
            left, right = row["prompt"][0]["content"].removeprefix("swap ").rstrip("=").split(sign)
            assert row["answer"] == (f"{right},{left}" if sign == "," else str(int(left) * int(right)))
    tokenizer = HuggingFaceTokenizer(tasks[0] / "model")
    tools = describe_tools(["calculator"])
    shown = [json.loads(line) for line in files[0]["demonstrations.jsonl"].splitlines()]
    calls = [row["response"] for row in shown if row["response"].startswith("<tool_call>")]
    assert len(shown) == 5 * 40 and 5 < len(calls) < 35
    tokens = tokenizer.encode_content(calls[0])
    assert find_tool_format(tokenizer, {}) == "hermes" and len(tokens) < 10
    _, (call,) = read_reply(tokenizer, "hermes", tokens, tools)
    assert call.name == "calculate" and set(call.arguments or {}) == {"expression"}
