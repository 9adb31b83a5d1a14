# SPDX-License-Identifier: Apache-2.0
"""The real program with one fault planted in it: `torchrun ... tests/faulty_program.py FAULT key=value ...`.

Started by tests/launch/test_failures.py. FAULT is a function of this file; "api_" before it starts the program as a
user's script would. Faults strike rank 1 in the second step, or while the engine is built.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

import megatron_rl  # noqa: E402
from launch import pretrain_grpo, pretrain_sft  # noqa: E402
from megatron_rl.engines.local.transformers import HuggingFaceEngine  # noqa: E402
from megatron_rl.rewards.scoring import Scorer  # noqa: E402
from megatron_rl.rollout.generation import RolloutGenerator  # noqa: E402
from megatron_rl.run.command_line import leave, run_command  # noqa: E402
from megatron_rl.run.grpo import Trainer  # noqa: E402
from megatron_rl.run.inputs import plan_rl, read_rl_inputs  # noqa: E402
from megatron_rl.training.roles.actor import Actor  # noqa: E402
from megatron_rl.transfer.executor import Resharder  # noqa: E402

TOO_MUCH = 1 << 47  # bytes; more than the address space of a process


def strike(cls: type, method: str, fault: Callable[..., Any], *, call: int = 2, rank: int = 1) -> None:
    """Replace the result of the n-th call of a method on one rank by that of `fault(original, *args)`."""
    real, calls = getattr(cls, method), [0]

    def struck(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and os.environ["RANK"] == str(rank):
            return fault(lambda: real(*args, **kwargs), *args)
        return real(*args, **kwargs)

    setattr(cls, method, struck)


def none() -> None:
    """Change nothing; the settings cause the fault."""


def fill_the_disk() -> None:
    """No file takes a byte from here on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def sleep_in_reward() -> None:
    strike(Scorer, "finish", lambda *_: time.sleep(600))


def sleep_in_reshard() -> None:
    strike(Resharder, "run", lambda *_: time.sleep(600))


def lose_a_logprob() -> None:
    def shorten(step: Callable[[], list[Any]], *_: Any) -> list[Any]:
        found = step()
        return [*found[:5], replace(found[5], logprobs=found[5].logprobs[:-1]), *found[6:]]

    strike(HuggingFaceEngine, "step", shorten)


def spoil_an_advantage() -> None:
    real, calls = Trainer.estimate, [0]

    def estimate(self: Trainer, samples: Any, step: int) -> Any:
        calls[0] += 1
        advantages, *others = real(self, samples, step)
        if calls[0] == 2:
            advantages.values[advantages.packing.batch.sequence_ids == 5] = float("nan")
        return advantages, *others

    Trainer.estimate = estimate


def run_out_of_memory_in_update() -> None:
    strike(Actor, "forward_backward", lambda *_: torch.empty(TOO_MUCH, dtype=torch.uint8), call=3)


def run_out_of_memory_in_sft() -> None:
    strike(Actor, "forward_backward", lambda *_: torch.empty(TOO_MUCH, dtype=torch.uint8))


def run_out_of_memory_at_start() -> None:
    strike(HuggingFaceEngine, "__init__", lambda *_: torch.empty(TOO_MUCH, dtype=torch.uint8), call=1)


def raise_something() -> None:
    strike(RolloutGenerator, "generate", lambda *_: {}["no such key"])


def vanish() -> None:
    strike(HuggingFaceEngine, "step", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def vanish_first() -> None:
    strike(HuggingFaceEngine, "step", lambda *_: os.kill(os.getpid(), signal.SIGKILL), rank=0)


def main(fault: str, arguments: list[str]) -> int:
    """Plant the fault and run."""
    globals()[fault.removeprefix("api_")]()
    if fault.startswith("api_"):
        model = next(word for word in arguments if word.startswith("model.path=")).partition("=")[2]
        megatron_rl.Trainer.from_hf_config(model, {}, arguments).train()
        return 0
    program = pretrain_sft if "sft" in fault else pretrain_grpo
    return run_command(
        arguments,
        name=program.__name__,
        description="",
        build_plan=plan_rl,
        read_inputs=read_rl_inputs,
        run=program.train,
    )


if __name__ == "__main__":
    leave(main(sys.argv[1], sys.argv[2:]))
