# SPDX-License-Identifier: Apache-2.0
"""Runs whose update gives `old_logprobs` are those that compute them before, bit for bit, in any layout.

One step is two optimizer steps on all of its samples, with weights of the mismatch, a rejection and an adaptive KL
coefficient. Both passes have the same microbatches, so nothing differs. Not covered: GPUs, bfloat16.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import megatron_rl
import megatron_rl.run.grpo as trainer_module
from distributed import run_ranks
from golden_runs import GoldenRun, Recording, carry_out
from megatron_rl.run.loading import load_config
from megatron_rl.samples.experience import Experience, describe_updates
from megatron_rl.types import UserError
from rl_runs import layout_overrides, load_nested, overrides_for, read_log, train

COMMON = [
    "data.validation_files=[]",
    "actor.ppo_mini_batch_size=8",
    "actor.ppo_epochs=2",
    "algorithm.importance_sampling=sequence-truncate",
    "algorithm.importance_high=1.0",
    "algorithm.reject_sequence_above=0.5",
    "algorithm.kl_target=0.1",
    "algorithm.entropy_coef=0.01",
]
RUNS = {
    "one rank": (1, COMMON),
    "tp2 pp2": (4, [*COMMON, *layout_overrides(2, 2, 1)]),
    "cp2": (2, [*COMMON, "actor.context_parallel_size=2"]),
    "dp2 static": (2, [*COMMON, "actor.step_mode=static", "actor.max_tokens_per_microbatch=48"]),
    "stale samples": (1, [*COMMON, "schedule.max_staleness=1", "trainer.total_steps=3"]),
    "critic": (1, [*COMMON, "algorithm.adv_estimator=gae", "critic.lr=1e-3", "trainer.critic_warmup=1"]),
}


@pytest.fixture(scope="module")
def carry_out_once(
    task: Path, tmp_path_factory: pytest.TempPathFactory, vllm_imported: None
) -> Callable[[str], Recording]:
    """Runs without the forward pass, by name."""
    directory = tmp_path_factory.mktemp("without")

    @cache
    def once(name: str) -> Recording:
        world_size, settings = RUNS[name]
        return carry_out(GoldenRun(world_size, settings), task, directory / name)

    return once


SLOW = {"cp2", "tp2 pp2"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS])
def test_nothing_differs(name: str, carry_out_once: Callable[[str], Recording], task: Path, tmp_path: Path) -> None:
    """Metrics, columns of the rollouts and weights, to the last bit; only the time of the pass is not there."""
    world_size, settings = RUNS[name]
    found = carry_out(GoldenRun(world_size, [*settings, "algorithm.old_logprobs=recompute"]), task, tmp_path / "run")
    assert found == carry_out_once(name)
    metrics = found["metrics"]
    last = max(metrics["mismatch/max"])
    assert metrics["mismatch/max"][last] > 0 and metrics["policy/clip_fraction"][last] > 0
    assert 0 < metrics["mismatch/truncated_fraction"][last] < 1 and metrics["kl/coef"][last] != 0.01


@pytest.mark.parametrize("name", ["tp2 pp2", pytest.param("cp2", marks=pytest.mark.slow), "dp2 static"])
def test_layouts_agree(name: str, carry_out_once: Callable[[str], Recording]) -> None:
    mine, reference = carry_out_once(name)["metrics"], carry_out_once("one rank")["metrics"]
    for key in ("policy/loss", "policy/grad_norm", "kl/per_response", "kl/mean", "reward/mean", "policy/entropy"):
        assert mine[key] == pytest.approx(reference[key], abs=1e-4, rel=1e-4), key


def learn_from_another_engine(rank: int, world_size: int, task: Path, out: Path) -> None:
    """Primitives, with an engine whose log-probs are too small by 0.1."""
    recipe = load_nested(overrides_for(task, out, *COMMON, "rollout.engine=hf"))
    run = megatron_rl.load(task / "model", recipe)
    policy, algorithm = run.policy, replace(run.config.algorithm, importance_sampling="bypass")
    with policy.rollout_mode():
        samples = policy.sample(1)
    before = policy.logprobs(samples).values
    batch = policy.read(samples)
    batch.rollout_logprobs.copy_(torch.where(batch.loss_mask, before - 0.1, 0.0))
    samples.ref_logprobs = run.reference.logprobs(samples)
    samples.advantages = policy.expand(samples, samples.rewards - samples.rewards.mean())
    policy.forward_backward(next(policy.minibatches(samples)), algorithm)
    assert torch.equal(samples.old_logprobs.values, before), "those of the policy, not of the engine"
    assert policy.optim_step()["policy/ratio_max_deviation"] == pytest.approx(0.1, abs=1e-5)
    batch = policy.read(samples, "old_logprobs", "advantages", "update_logprobs", "update_entropy")
    ratio = describe_updates(batch, algorithm)["ratio"][batch.loss_mask]
    assert ratio.tolist() == pytest.approx([math.exp(0.1)] * len(ratio), abs=1e-5)
    policy.close()


def test_bypass_takes_the_engines(task: Path, tmp_path: Path) -> None:
    run_ranks(learn_from_another_engine, 1, task, tmp_path)


def learn_from_a_faulty_engine(rank: int, world_size: int, overrides: list[str]) -> None:
    """The whole program, with one log-prob of the engine that has another last bit."""
    trainer = trainer_module.Trainer.from_config(load_config(None, overrides).config)
    sample = trainer.policy.sample

    def sample_with_a_fault(step: int) -> Experience:
        samples = sample(step)
        batch = trainer.policy.read(samples)
        first = int(batch.loss_mask.nonzero()[0, 0])
        batch.rollout_logprobs[first] = torch.nextafter(batch.rollout_logprobs[first], torch.tensor(0.0))
        return samples

    models = [trainer.policy.model, trainer.critic.model]
    before = [value.clone() for model in models for value in model.params.values()]
    trainer.policy.sample = sample_with_a_fault
    with pytest.raises(UserError, match="1 tokens whose log-probs are others in the engine"):
        trainer.train()
    after = [value for model in models for value in model.params.values()]
    assert all(map(torch.equal, before, after))


def test_a_differing_bit_ends_the_run_before_anything_is_learned(task: Path, tmp_path: Path) -> None:
    extra = ["rollout.engine=hf", "rollout.bitwise=true", "algorithm.adv_estimator=gae", "critic.lr=1e-3"]
    run_ranks(learn_from_a_faulty_engine, 1, overrides_for(task, tmp_path / "run", *COMMON, *extra))


def test_the_forward_pass_is_taken_where_it_is_needed(task: Path, tmp_path: Path) -> None:
    """While only the critic learns there is no pass of the update; the log gives the reason for the extra pass."""
    settings = [*RUNS["critic"][1], "rollout.engine=hf"]
    for name, more, steps in (("warmup", [], [True, False]), ("early", ["algorithm.kl_in=reward"], [True, True])):
        run_dir = tmp_path / name
        assert run_ranks(train, 1, overrides_for(task, run_dir, *settings, *more)) == [None]
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert ["time/old_logprobs" in record for record in records] == steps
        said = "algorithm.kl_in = 'reward' makes rewards of them" in read_log(run_dir)
        assert said == (name == "early")
