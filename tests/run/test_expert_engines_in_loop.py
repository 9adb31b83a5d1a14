# SPDX-License-Identifier: Apache-2.0
"""GRPO on a mixture whose engines have whole experts per rank, or data parallel parts: the numbers of other engines.

Two ranks, vLLM, float32, EP2 in training. With data parallel parts also where they have different amounts of work:
validation of few prompts, episodes of several turns, and interruptions. Not covered: GPUs, and engines on several
nodes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sabotage import read_rollouts

from distributed import run_ranks
from rl_runs import overrides_for, read_records, train
from tiny_models import engine_sizes, save_tiny_model
from tools._runner_on_cpu import use_gpu_modes

ENGINES = {
    "tp1": [],
    "ep2": ["rollout.tensor_model_parallel_size=2", "rollout.expert_parallel_size=2"],
    "dp2": ["rollout.data_parallel_size=2", "rollout.expert_parallel_size=2"],
}
EARLY = "rollout.engine_options.async_scheduling=true"
ENGINES["dp2, early"] = [*ENGINES["dp2"], EARLY]
NUMBERS = ("reward/mean", "policy/loss", "policy/grad_norm", "kl/per_response", "validation/validation/reward")
ENVIRONMENT = """
from megatron_rl.agents.environment import Done, Observation

class Echo:
    def reset(self, task):
        return Observation([])

    def step(self, reply):
        return Observation([{"role": "tool", "content": "12="}], reward=0.25 * ("1" in reply.text))
"""
EPISODES = ["agents.max_turns=3", "data.max_response_length=24", "actor.max_tokens_per_microbatch=256"]
STALE = ["schedule.max_staleness=1", "schedule.steps_per_update=2", "algorithm.importance_sampling=token-truncate"]


@pytest.fixture(scope="module")
def mixture(task: Path, tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Path:
    """A model of four experts per layer with the task's tokenizer."""
    directory = tmp_path_factory.mktemp("mixture")
    vocab_size = json.loads((task / "model/config.json").read_text())["vocab_size"]
    sizes = engine_sizes("qwen3_moe") | dict(vocab_size=vocab_size, num_hidden_layers=2)
    save_tiny_model(directory / "model", "qwen3_moe", **sizes)
    shutil.copy(task / "tokenizer.model", directory / "model")
    (directory / "environment.py").write_text(ENVIRONMENT)
    return directory


def train_in_mode(rank: int, world_size: int, overrides: list[str]) -> None:
    """Run GRPO; with `EARLY`, plan vLLM's next step during this one, as on a GPU, although on a CPU."""
    if EARLY in overrides:
        use_gpu_modes("v1")
    train(rank, world_size, overrides)


def run(
    task: Path, mixture: Path, run_dir: Path, *extra: str, world_size: int = 2
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The records and the rollouts of a run that replays the engine's routes."""
    settings = [f"model.path={mixture}/model", "actor.expert_model_parallel_size=2", "trainer.log_rollouts=-1"]
    settings += [
        "actor.router_replay=engine",
        "data.validation_limit=3",
        "trainer.test_freq=2",
        "rollout.dispatch=samples",
    ]
    overrides = overrides_for(task, run_dir, *settings, *extra)
    assert run_ranks(train_in_mode, world_size, overrides, timeout=170) == [None] * world_size
    return read_records(run_dir), read_rollouts(run_dir)


def tokens_of(rollouts: dict[str, bytes]) -> dict[str, list[list[int]]]:
    """The tokens of each file's rollouts."""
    return {name: [json.loads(line)["tokens"] for line in text.splitlines()] for name, text in rollouts.items()}


@pytest.fixture(scope="module")
def plain(task: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, bytes]]:
    """The run with two engines of one rank."""
    return run(task, mixture, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize("engine", ["ep2", "dp2", "dp2, early"])
def test_engines_of_whole_experts_learn_what_others_learn(
    task: Path, mixture: Path, tmp_path: Path, plain: tuple[list[Any], dict[str, bytes]], engine: str
) -> None:
    """The same tokens, and numbers within the bound of other layouts."""
    records, rollouts = run(task, mixture, tmp_path / "run", *ENGINES[engine])
    assert tokens_of(rollouts) == tokens_of(plain[1])
    assert len(records) == len(plain[0]) > 2
    for mine, reference in zip(records, plain[0], strict=True):
        for key in (key for key in NUMBERS if key in reference):
            assert mine[key] == pytest.approx(reference[key], abs=1e-4, rel=1e-4), key
        assert mine.get("mismatch/max", 0) < 1e-4 and mine.get("moe/agreement", 1) == reference.get("moe/agreement", 1)


@pytest.mark.slow
def test_ranks_that_split_the_tokens_of_a_forward_report_all_routes(
    task: Path, mixture: Path, tmp_path: Path, plain: tuple[list[Any], dict[str, bytes]]
) -> None:
    """TP2 x DP2: the tokens of a part are routed on its two ranks by halves."""
    sizes = [*ENGINES["ep2"], "rollout.data_parallel_size=2", "rollout.expert_parallel_size=4"]
    records, rollouts = run(task, mixture, tmp_path / "run", *sizes, world_size=4)
    assert tokens_of(rollouts) == tokens_of(plain[1])
    pairs = [(one, other) for one, other in zip(records, plain[0], strict=True) if "moe/agreement" in other]
    assert len(pairs) == 2 and all(one["mismatch/max"] < 1e-4 for one, _ in pairs)
    assert all(one["moe/agreement"] == pytest.approx(other["moe/agreement"], abs=1e-3) for one, other in pairs)


@pytest.mark.slow
def test_sizes_of_1_change_nothing(task: Path, mixture: Path, tmp_path: Path, plain: tuple[Any, Any]) -> None:
    sizes = ["rollout.expert_parallel_size=1", "rollout.data_parallel_size=1"]
    assert run(task, mixture, tmp_path / "run", *sizes) == plain


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dp2", "dp2, early"])
def test_parts_of_an_engine_play_the_episodes_of_engines(
    task: Path, mixture: Path, tmp_path: Path, engine: str
) -> None:
    """Turns of an episode come at any time to any part; a part without one takes part in the steps of others."""
    player = [*EPISODES, f"agents.environment={mixture}/environment.py:Echo", "trainer.total_steps=1"]
    (two, expected), (one, found) = (
        run(task, mixture, tmp_path / name, *player, *ENGINES[name]) for name in ("tp1", engine)
    )
    assert tokens_of(found) == tokens_of(expected)
    assert one[-1]["agents/turns"] == two[-1]["agents/turns"] > 1
    assert one[-1]["policy/grad_norm"] == pytest.approx(two[-1]["policy/grad_norm"], rel=1e-4, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dp2", "dp2, early"])
def test_interrupted_responses_go_on_in_their_part(task: Path, mixture: Path, tmp_path: Path, engine: str) -> None:
    """Steps end while responses run; current tokens have the trainer's log-probs. The same run repeats."""
    settings = [*STALE, *ENGINES[engine], "rollout.max_num_seqs=3", "trainer.total_steps=3"]
    records, rollouts = run(task, mixture, tmp_path / "run", *settings)
    steps = [record for record in records if "schedule/staleness_max" in record]
    assert len(steps) == 3 and any(record["schedule/carried"] > 0 for record in steps)
    assert all(record["schedule/staleness_max"] <= 1 and record["mismatch/lag0"] < 1e-4 for record in steps)
    assert run(task, mixture, tmp_path / "again", *settings) == (records, rollouts)
