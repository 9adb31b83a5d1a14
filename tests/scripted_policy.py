# SPDX-License-Identifier: Apache-2.0
"""A policy with scripted replies, for programs that call the endpoint of an episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from chat_templates import write_chat_tokenizer

from megatron_rl.agents.episode import Answer, Setup
from megatron_rl.agents.in_rank import EpisodeProcesses
from megatron_rl.rollout.episodes import Recording
from megatron_rl.types import Prompt, Rollout

QUESTION = [{"role": "user", "content": "hello"}]


class ScriptedPolicy:
    """Replaces the rank: a policy that writes its scripted replies letter by letter.

    Args:
        directory: for its own files.
        programs: Python source with a function `agent(task, base_url)`.
        turn_seconds: `agents.turn_timeout_seconds`.
        template: of the chats.
        program: instead of `agent` in `programs`.
    """

    def __init__(
        self,
        directory: Path,
        programs: str,
        turn_seconds: float = 5.0,
        template: str = "qwen2.5",
        program: str | None = None,
    ) -> None:
        self.directory, self.tokenizer = directory, write_chat_tokenizer(directory, template)
        (directory / "programs.py").write_text(programs)
        setup = Setup(
            None,
            str(directory),
            {},
            (self.tokenizer.eos_token_id,),
            False,
            max_turns=4,
            run_seed=1,
            program=program or f"{directory / 'programs.py'}:agent",
            temperature=0.5,
            context_length=128,
        )
        self.processes = EpisodeProcesses(setup, turn_seconds)

    def encode(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Tokens of a chat."""
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages, **options))

    def spell(self, text: str, closed: bool = True) -> list[int]:
        """A reply letter by letter, closed by EOS."""
        letters = [token for letter in text for token in self.tokenizer.encode(letter)]
        return letters + [self.tokenizer.eos_token_id] * closed

    def play(self, kind: str, *replies: str, **columns: Any) -> tuple[Answer, Rollout, list[list[int]], Any]:
        """Play an episode; return its last answer, its rollout, its requests, and the program's output file."""
        out = self.directory / f"{kind}.json"
        prompt = Prompt(
            0,
            np.array(self.encode(QUESTION), np.int32),
            "",
            "",
            row={"kind": kind, "out": str(out)},
            messages=QUESTION,
            **columns,
        )
        processes, recording = self.processes, Recording(prompt, 0)
        requests: list[list[int]] = []
        processes.open(0, prompt)
        while (answer := processes.wait()[0]).tail is not None:
            assert answer.tail.is_fork
            requests.append(answer.tail.tokens)
            recording.record_request(np.array(requests[-1], np.int32))
            reply = self.spell(replies[(len(requests) - 1) % len(replies)] if replies else "answer")
            is_cut = answer.max_tokens is not None and answer.max_tokens < len(reply)
            reply = reply[: answer.max_tokens]
            recording.reply(np.array(reply, np.int32), -np.arange(len(reply), dtype=np.float32), 1)
            processes.send_reply(0, reply, [-float(i) for i in range(len(reply))], "length" if is_cut else "stop")
        processes.close(0)
        rollout = recording.finish(answer.finish_reason or "stop")
        return answer, rollout, requests, json.loads(out.read_text()) if out.exists() else None
