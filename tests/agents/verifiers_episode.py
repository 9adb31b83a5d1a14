# SPDX-License-Identifier: Apache-2.0
"""An episode of verifiers 0.4 in its own interpreter: `python verifiers_episode.py`; prints the reward.

OPENAI_BASE_URL and OPENAI_API_KEY give the endpoint. A custom harness runs inside the process; the harnesses of the
package install programs first.
"""

from __future__ import annotations

import asyncio
import os

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.runtimes import ProgramResult


class TwoTurnsConfig(vf.HarnessConfig):
    """No settings."""


class TwoTurns(vf.Harness[TwoTurnsConfig]):
    """Sends a message, replies "result", and sends another one."""

    APPENDS_SYSTEM_PROMPT, SUPPORTS_MCP, SUPPORTS_RESUME = True, False, True
    EXECUTES_CODE, NEEDS_CONTAINER = False, False

    async def setup(self, runtime):
        """Nothing is installed."""

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        """Through the package's own server, which forwards to the endpoint."""
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": "result"})
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["TwoTurns"]


class Data(vf.TaskData):
    """A question and its answer."""

    answer: str


class Question(vf.Task[Data]):
    """Rewards a last reply with the answer in it."""

    @vf.reward
    async def is_right(self, trace) -> float:
        """1 or 0."""
        return float(self.data.answer in (trace.last_reply or ""))


async def main() -> None:
    """Run one episode."""
    config = AgentConfig(
        model="policy",
        client=EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
        harness=TwoTurnsConfig(id="verifiers_episode"),
        runtime=vf.SubprocessConfig(),
    )
    async with vf.make_agent(config) as agent:
        trace = await agent.run(Question(Data(idx=0, prompt="hello", answer="12")))
    if trace.last_error:
        raise RuntimeError(trace.last_error.message)
    print(trace.reward)


if __name__ == "__main__":
    asyncio.run(main())
