# SPDX-License-Identifier: Apache-2.0
"""Many episodes whose environments hang, crash, print and end themselves, on an engine of two ranks.

The engine is scripted: its samples follow from the seed of a request. Not covered: agents behind an endpoint, which can
also send two requests or leave in the middle of a reply.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.agents.episode import Setup
from megatron_rl.agents.in_rank import EpisodeProcesses
from megatron_rl.config.schema import ActorConfig, DataConfig, ModelConfig, RunConfig
from megatron_rl.config.sections import AgentsConfig
from megatron_rl.engines.build import BuiltEngine
from megatron_rl.engines.protocol import Request, Sampled, SamplingConfig
from megatron_rl.observability.progress import RolloutProgress
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rollout.episodes import SampleGroups
from megatron_rl.rollout.generation import RolloutGenerator, open_channel
from megatron_rl.types import Prompt
from tools.make_toy_task import train_tokenizer

ENVIRONMENT = """
import os, subprocess, time
from megatron_rl.agents.environment import Done, Observation

class Odd:
    def reset(self, task):
        self.kind, self.pids = task.row["kind"], task.row["pids"]
        self.note(os.getpid())
        if self.kind == "hangs at first":
            time.sleep(1000)
        if self.kind == "raises":
            raise RuntimeError("no game today")
        return Observation([])

    def step(self, reply):
        if self.kind == "hangs":
            self.note(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
            time.sleep(1000)
        if self.kind == "exits":
            os._exit(3)
        if self.kind == "is killed":
            os.kill(os.getpid(), 9)
        if self.kind == "shouts":
            for _ in range(100):
                os.write(1, b"x" * (1 << 20))
        if self.kind == "starts others":
            self.note(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
        if self.kind == "returns nothing":
            return None
        if self.kind == "never ends":
            return Observation([{"role": "tool", "content": "12="}], reward=0.5)
        return Done(1.0)

    def note(self, pid):
        with open(self.pids, "a") as file:
            file.write(f"{pid}\\n")
"""
REASONS = {
    "ends": "stop",
    "shouts": "stop",
    "starts others": "stop",
    "never ends": "turns",
    "hangs at first": "timeout",
    "hangs": "timeout",
    "raises": "error",
    "exits": "error",
    "is killed": "error",
    "returns nothing": "error",
}
GROUP, TURNS = 4, 3


class SeededEngine:
    """Answers every request after some steps; as each rank of an engine would."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[Request, int]] = {}

    def add(self, requests: Sequence[Request]) -> None:
        self._running |= {r.key: (r, 1 + r.seed % 3) for r in requests}

    def step(self) -> list[Sampled]:
        self._running = {key: (request, left - 1) for key, (request, left) in self._running.items()}
        return [self._end(key) for key, (_, left) in list(self._running.items()) if not left]

    def _end(self, key: int) -> Sampled:
        request, _ = self._running.pop(key)
        tokens = np.random.default_rng(request.seed).integers(4, 14, 1 + request.seed % 5).astype(np.int32)
        return Sampled(key, tokens, np.full(len(tokens), -1.0, np.float32), "stop")

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        return [self._end(key) for key in keys]

    def has_requests(self) -> bool:
        return bool(self._running)

    def tokens_in_flight(self) -> int:
        return 0

    def close(self) -> None:
        pass


def make_prompts(seed: int, count: int, directory: Path) -> list[Prompt]:
    """Make prompts, each with a kind of environment; all kinds occur."""
    choice = random.Random(seed)
    kinds = [*REASONS, *choice.choices([*REASONS], k=count - len(REASONS))]
    choice.shuffle(kinds)
    tokens = np.array([4, 5], np.int32)
    return [
        Prompt(i, tokens, "12", "", row={"kind": kind, "pids": str(directory / "pids")}) for i, kind in enumerate(kinds)
    ]


def soak(rank: int, world_size: int, directory: Path, seeds: Sequence[int], count: int, seconds: float) -> list[Any]:
    """Return this rank's rollouts of each seed (prompt, sample, tokens), their endings and their rewards."""
    engines, engine = EngineRanks.consecutive(range(world_size), world_size), SeededEngine()
    weights: Any = SimpleNamespace(policy_version=0, shape=SimpleNamespace(vocab_size=16))
    setup = Setup(f"{directory / 'odd.py'}:Odd", str(directory / "tokenizer.model"), {}, (), False, TURNS, 1)
    processes = EpisodeProcesses(setup, seconds)
    generator = RolloutGenerator(
        BuiltEngine(engine, engine, "scripted", engines),  # type: ignore[arg-type]
        weights,
        open_channel(engines, rank),
        config=RunConfig(
            model=ModelConfig(path=""),
            data=DataConfig(train_files=[], train_batch_size=1),
            actor=ActorConfig(),
            agents=AgentsConfig(environment=setup.environment),
        ),
        group=dist.group.WORLD,  # type: ignore[arg-type]
        progress=RolloutProgress(),
        processes=processes,
    )
    found: list[Any] = []
    sampling = SamplingConfig(temperature=1.0, max_tokens=40, stop_token_ids=())
    told: list[int] = []  # steps
    for seed in seeds:
        prompts = make_prompts(seed, count, directory)
        rollouts = generator.generate(
            SampleGroups(prompts, GROUP, sampling, step=seed), lambda rollout, step: told.append(step)
        )
        found.append(
            (
                {key: rollout.response_tokens.tolist() for key, rollout in sorted(rollouts.items())},
                {key: (rollout.finish_reason, rollout.reward) for key, rollout in sorted(rollouts.items())},
                generator.metrics,
                told.count(seed),
            )
        )
    generator.close()
    return found


def check(directory: Path, seeds: Sequence[int], num_prompts: int, seconds: float) -> None:
    """Check that groups are whole on both ranks, each episode has a reason for its end, and no process is left."""
    (directory / "odd.py").write_text(ENVIRONMENT)
    (directory / "tokenizer.model").write_bytes(train_tokenizer("0123456789=+"))
    first, second = run_ranks(soak, 2, directory, seeds, num_prompts, seconds, timeout=60 + 20 * len(seeds) * seconds)
    total = num_prompts * GROUP
    for seed, mine, other in zip(seeds, first, second, strict=True):
        tokens, ends, metrics, num_told = mine
        assert tokens == other[0] and metrics == other[2]
        assert [*tokens] == [*range(total)] and (num_told, other[3]) == (total, 0)
        kinds = [prompt.row["kind"] for prompt in make_prompts(seed, num_prompts, directory)]
        for key, (reason, reward) in ends.items():
            kind = kinds[key // GROUP]
            assert reason == REASONS[kind], kind
            assert reward == {"stop": 1.0, "turns": 0.5 * TURNS}.get(reason, 0.0)
        reasons = [REASONS[kind] for kind in kinds]
        assert metrics["agents/timeouts"] == GROUP * reasons.count("timeout")
        assert metrics["agents/errors"] == GROUP * reasons.count("error")
    pids = [int(line) for line in (directory / "pids").read_text().split()]
    assert len(pids) > total * len(seeds)  # some started others
    assert not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_environments_of_every_kind_end_and_leave_nothing(tmp_path: Path) -> None:
    check(tmp_path, [1], len(REASONS), seconds=2.0)


@pytest.mark.slow
def test_a_hundred_episodes_with_each_of_ten_seeds(tmp_path: Path) -> None:
    check(tmp_path, range(10), 25, seconds=3.0)
