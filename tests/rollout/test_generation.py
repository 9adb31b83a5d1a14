# SPDX-License-Identifier: Apache-2.0
"""Responses are reported as they finish, by real engines, and scored while others are still being generated.

tests/transfer/test_hybrid_engine.py compares the generated tokens with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from sample_rollouts import gather_rollouts

import megatron_rl.parallel  # noqa: F401 (before megatron.core)
from distributed import run_ranks
from megatron_rl.config.schema import (
    ActorConfig,
    DataConfig,
    HybridConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_rl.engines.protocol import SamplingConfig
from megatron_rl.observability.progress import PhaseTimers, RolloutProgress
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rewards.plan import build_reward_plan, open_scorer
from megatron_rl.rollout.episodes import SampleGroups
from megatron_rl.rollout.generation import RolloutGenerator
from megatron_rl.run.building import build_role, build_rollout
from megatron_rl.run.models import RoleInputs, resolve
from megatron_rl.types import Prompt, Rollout, UserError
from megatron_rl.weights.model_config import load_model_shape
from reward_samples import wait_for_file, write_function
from tiny_models import ENGINE_SIZES, save_tiny_model

GROUP_SIZE = 2
# A third of the vocabulary ends a response, so that responses differ in length.
SAMPLED = SamplingConfig(temperature=1.0, max_tokens=12, stop_token_ids=tuple(range(2, 517, 3)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streaming") / "model"
    save_tiny_model(path, "qwen2", **ENGINE_SIZES)
    return path


def make_prompts() -> list[Prompt]:
    """Five prompts, the last one again the first: an epoch boundary."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, rng.integers(3, 517, 3 + 4 * i).astype(np.int32), "", "") for i in range(4)]
    return [*prompts, prompts[0]]


def open_generator(path: Path, world_size: int, engine: str, rollout_tp: int) -> RolloutGenerator:
    config = RunConfig(
        model=ModelConfig(path=str(path), dtype="float32"),
        data=DataConfig(train_files=[], train_batch_size=5, max_prompt_length=80, max_response_length=12),
        actor=ActorConfig(),
        hybrid=HybridConfig(verify="off"),
        rollout=RolloutConfig(
            engine=engine,
            tensor_model_parallel_size=rollout_tp,
            n=GROUP_SIZE,
            max_num_seqs=16 if engine == "vllm" else 4,
        ),
    )
    process, layout = init_distributed(2), ParallelLayout(world_size)
    inputs = RoleInputs(resolve(config).roles["actor"], load_model_shape(path), layout)
    actor = build_role(config, inputs, build_groups(layout), total_optimizer_steps=1)
    hybrid, generator = build_rollout(config, actor, process, PhaseTimers(), RolloutProgress())
    hybrid.reshard()
    return generator


def describe(rollout: Rollout) -> tuple[Any, ...]:
    return (
        rollout.prompt.prompt_id,
        rollout.sample_index,
        rollout.response_tokens.tolist(),
        rollout.rollout_logprobs.tolist(),
        rollout.finish_reason,
        rollout.policy_version,
    )


def stream(rank: int, world_size: int, path: Path, engine: str, rollout_tp: int) -> dict[str, Any]:
    """Generate with and without a listener, and with whole groups on an engine."""
    generator = open_generator(path, world_size, engine, rollout_tp)
    told: list[Rollout] = []
    groups = SampleGroups(make_prompts(), GROUP_SIZE, SAMPLED, step=1)

    silent = gather_rollouts(generator.generate(groups))
    mine = generator.generate(groups, lambda rollout, step: told.append(rollout))
    rollouts = gather_rollouts(mine)
    by_groups = RolloutGenerator(
        generator._engine,
        generator._weights,
        generator._channel,
        config=generator._config.with_sections({"rollout": {"dispatch": "groups"}}),
        group=dist.group.WORLD,
        progress=RolloutProgress(),
    )
    mine_grouped = by_groups.generate(groups)
    result = {
        "grouped": [describe(r) for r in gather_rollouts(mine_grouped)],
        "held": sorted(mine),
        "held_grouped": sorted(mine_grouped),
        "silent": [describe(r) for r in silent],
        "told": [describe(r) for r in told],
        "result": [describe(r) for r in rollouts],
        "mine": [describe(r) for _, r in sorted(mine.items())] if rank % rollout_tp == 0 else [],
        "same_objects": {id(r) for r in told} <= {id(r) for r in mine.values()},
    }
    generator.close()
    return result


@pytest.mark.parametrize(
    ("engine", "rollout_tp", "num_told"), [("vllm", 1, [5, 5]), ("vllm", 2, [10, 0]), ("hf", 1, [10])]
)
def test_every_response_is_told_of_once(
    model: Path, vllm_imported: None, engine: str, rollout_tp: int, num_told: list[int]
) -> None:
    """On the first rank of its engine, as the object of the result, which is the same without a listener."""
    results = run_ranks(stream, len(num_told), model, engine, rollout_tp, timeout=120)
    assert len({len(tokens) for _, _, tokens, *_ in results[0]["result"]}) > 2, "lengths must differ"
    for result in results:
        assert result["result"] == result["silent"] == results[0]["result"] and len(result["result"]) == 10
        assert sorted(result["told"]) == sorted(result["mine"]) and result["same_objects"]
        assert_same_samples(result["grouped"], result["result"])
    assert [len(result["told"]) for result in results] == num_told
    if num_told == [5, 5]:
        assert results[0]["held_grouped"] == [0, 1, 4, 5, 8, 9] != results[0]["held"]
    if engine == "vllm":
        lengths = [len(tokens) for _, _, tokens, *_ in results[0]["told"]]
        assert results[0]["told"] != results[0]["mine"], "in the order in which they finish"
        assert lengths == sorted(lengths), "all start together: the shortest comes first"


def assert_same_samples(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    """Equal but for log-probs, which are rounded in another batch."""
    for (*one, logprobs, reason, version), (*other, other_logprobs, other_reason, other_version) in zip(
        found, expected, strict=True
    ):
        assert (one, reason, version) == (other, other_reason, other_version)
        assert logprobs == pytest.approx(other_logprobs, abs=1e-5)


def fail(rank: int, world_size: int, path: Path) -> tuple[str, int]:
    """A listener that fails on one rank only."""
    generator = open_generator(path, world_size, "vllm", 1)
    calls = []

    def listen(rollout: Rollout, step: int) -> None:
        calls.append(rollout)
        if rank == 1:
            raise UserError("cannot listen", source="here", expected="", hint="")

    try:
        generator.generate(SampleGroups(make_prompts(), 1, SAMPLED, step=1), listen)
    except UserError as error:
        return error.found, len(calls)
    finally:
        dist.barrier()
        generator.close()
    return "not raised", len(calls)


def test_error_of_a_listener_is_raised_on_every_rank(model: Path, vllm_imported: None) -> None:
    """After the generation, and the listener is not called again."""
    assert run_ranks(fail, 2, model, timeout=120) == [("cannot listen", 3), ("cannot listen", 1)]


def score_while_generating(
    rank: int, world_size: int, path: Path, engine: str, function: str, log: Path
) -> list[tuple[Any, ...]]:
    """The second response is held back until the worker has begun with the first."""
    generator = open_generator(path, world_size, engine, 1)
    config = RewardConfig(function=function, workers=1)
    scorer = open_scorer(build_reward_plan(config, 12), decode=lambda tokens: " ".join(map(str, tokens)))
    told: list[Rollout] = []

    def listen(rollout: Rollout, step: int) -> None:
        scorer.begin(rollout)
        told.append(rollout)
        if len(told) == 2:
            wait_for_file(log)

    generated = generator.generate(SampleGroups(make_prompts(), GROUP_SIZE, SAMPLED, step=1), listen)
    with log.open("a") as file:
        file.write("generated\n")
    rollouts = scorer.finish([rollout for _, rollout in sorted(generated.items())])
    scorer.close()
    generator.close()
    return [(r.response, r.reward, len(r.response_tokens)) for r in rollouts]


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_scoring_starts_before_generation_returns(
    model: Path, tmp_path: Path, vllm_imported: None, engine: str
) -> None:
    """Order of events, not time: a scorer that only started afterwards would never write the line waited for."""
    log = tmp_path / "log"
    function = write_function(
        tmp_path,
        f"with open({str(log)!r}, 'a') as file: file.write('scored\\n')\n"
        "time.sleep(0.05)\nreturn len(solution_str.split())",
    )
    rollouts = run_ranks(score_while_generating, 1, model, engine, function, log, timeout=120)[0]
    assert [reward for _, reward, _ in rollouts] == [length for _, _, length in rollouts]
    events = log.read_text().split()
    assert events.count("scored") == len(rollouts) == 10
    assert events[0] == "scored" and "generated" in events
