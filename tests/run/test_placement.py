# SPDX-License-Identifier: Apache-2.0
"""Roles on ranks of their own: the numbers of roles on all ranks, and work at the same time.

Runs of the whole program on gloo. Not covered: GPUs, and roles that share some of their ranks only.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from distributed import run_ranks
from golden_runs import compare, make_golden_task, observe
from megatron_rl.run.grpo import Trainer
from megatron_rl.run.inputs import Parts
from megatron_rl.run.loading import load_config
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.roles.actor import Actor
from megatron_rl.training.roles.critic import Critic
from rl_runs import leave_out_curves, overrides_for, read_records, train

# Bitwise: the log-probs of a response do not depend on its engine, nor on its batch.
PPO = [
    "data.validation_files=[]",
    "rollout.engine=hf",
    "rollout.bitwise=true",
    "actor.pipeline_model_parallel_size=2",
    "critic.tensor_model_parallel_size=2",
    "critic.sequence_parallel=true",
    "critic.max_tokens_per_microbatch=96",
    "critic.lr=1e-3",
    "algorithm.adv_estimator=gae",
    "algorithm.gae_lambda=0.95",
    "algorithm.kl_in=reward",
    "algorithm.kl_target=0.01",
    "algorithm.kl_horizon=64",
    "hybrid.verify=full",
    "trainer.log_rollouts=-1",
]
# Bytes between ranks are not a result.
TRAFFIC = ("metrics: reshard/bytes_", "metrics: samples/bytes_per_rank.")


@pytest.fixture(scope="module")
def golden_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden")
    make_golden_task(directory)
    return directory


def place(**ranks: str) -> list[str]:
    """Overrides of the section."""
    return [f"placement.{role}={text}" for role, text in ranks.items()]


def run(task: Path, run_dir: Path, legs: list[tuple[int, list[str]]]) -> None:
    """Run legs with the given numbers of ranks and further settings; each but the last ends after a step."""
    model = [
        f"reward_model.path={task}/reward_model",
        "reward_model.max_tokens_per_microbatch=64",
        f"reward_model.further.second={{path: {task}/reward_model, tensor_model_parallel_size: 2, offload: true}}",
        f"reward.components=[1.5 model, 0.5 {task}/reward.py:score, 0.5 model:second]",
    ]
    for step, (world_size, settings) in enumerate(legs, 1):
        steps = 3 if step == len(legs) else step
        overrides = overrides_for(task, run_dir, *PPO, *model, *settings, f"trainer.total_steps={steps}")
        assert run_ranks(train, world_size, overrides, timeout=170) == [None] * world_size


def test_the_numbers_of_roles_on_all_ranks(golden_task: Path, tmp_path: Path) -> None:
    """Metrics, rollouts, weights and states of three steps, in one run that is resumed in other placements."""
    run(golden_task, tmp_path / "together", [(2, [])])
    legs = [
        (4, place(actor="0-1", critic="2-3", reference="2-3", reward_model="0-1", rollout="0-1")),
        (2, []),
        (6, place(actor="0-1", critic="2-3", reference="4-5", reward_model="2-3", rollout="3-5")),
    ]
    legs[2][1].append("hybrid.transport=buckets")
    run(golden_task, tmp_path / "apart", legs)
    found = compare(observe(tmp_path / "together"), observe(tmp_path / "apart"))
    assert found.is_exact and min(found.counts[part] for part in ("metrics", "rollouts", "weights")) > 80
    assert not [line for line in found.differences if not line.startswith(TRAFFIC)]
    # A role on other ranks is timed there.
    last = json.loads((tmp_path / "apart/metrics.jsonl").read_text().splitlines()[-1])
    assert last["time/update_critic"] > 0 < last["time/values"] and last["memory/ref_logprobs"] > 0


class _MeetingActor(Actor):
    def forward_backward(self, minibatch: TrainBatch, loss: object) -> None:
        """Not before the critic has begun with the same minibatch."""
        _meet("actor", "critic")
        super().forward_backward(minibatch, loss)  # pyright: ignore[reportArgumentType]


class _MeetingCritic(Critic):
    def forward_backward(self, minibatch: TrainBatch) -> None:
        """Not before the actor has."""
        _meet("critic", "actor")
        super().forward_backward(minibatch)


def _meet(role: str, other: str) -> None:
    """Leave a note for each minibatch, and wait for the other role's."""
    mine, others = Path(os.environ["NOTES"], role), Path(os.environ["NOTES"], other)
    with mine.open("a") as file:
        file.write(".")
    deadline = time.monotonic() + 60
    while not others.exists() or others.stat().st_size < mine.stat().st_size:
        assert time.monotonic() < deadline, f"the {role} works, and the {other} waits for it"
        time.sleep(0.01)


def _train_meeting(rank: int, world_size: int, overrides: list[str], notes: Path) -> None:
    leave_out_curves()
    os.environ.update(WORLD_SIZE=str(world_size), NOTES=str(notes))
    config = load_config(None, overrides).config
    Trainer.from_config(config, parts=Parts(actor=_MeetingActor, critic=_MeetingCritic)).train()


def test_roles_on_different_ranks_work_at_the_same_time(task: Path, tmp_path: Path) -> None:
    """Actor and critic wait for each other in each of two minibatches: one after the other they would wait forever."""
    settings = [
        "data.validation_files=[]",
        "rollout.engine=hf",
        "critic.max_tokens_per_microbatch=128",
        "algorithm.adv_estimator=gae",
        "algorithm.kl_coef=0",
        "trainer.total_steps=1",
        *place(actor="0", critic="1"),
    ]
    run_ranks(_train_meeting, 2, overrides_for(task, tmp_path / "run", *settings), tmp_path, timeout=120)
    assert [(tmp_path / role).read_text() for role in ("actor", "critic")] == ["..", ".."]


@pytest.mark.slow
def test_vllm_on_ranks_of_its_own(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """An engine of two ranks without connections to others.

    The same numbers as on the actor's ranks, to the last bit.
    """
    settings = ["data.validation_files=[]", "rollout.tensor_model_parallel_size=2", "algorithm.kl_coef=0"]
    for name, world_size, ranks in (
        ("together", 2, []),
        ("apart", 4, place(actor="1/2", rollout="1/2")),
        ("aside", 3, place(actor="0", rollout="1-2")),  # not in the middle of the job's ranks
    ):
        overrides = overrides_for(task, tmp_path / name, *settings, *ranks)
        assert run_ranks(train, world_size, overrides, timeout=120) == [None] * world_size
    found = compare(observe(tmp_path / "together"), observe(tmp_path / "apart"))
    assert found.is_exact and not [line for line in found.differences if not line.startswith(TRAFFIC)]
    assert all(record["mismatch/max"] < 1e-4 for record in read_records(tmp_path / "aside"))
