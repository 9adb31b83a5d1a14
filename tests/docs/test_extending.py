# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/extending.md, as they stand there, in one run of the whole program.

Not covered: an engine with a layout of its own (tests/weight_sync/test_hybrid_engine.py has vLLM's), and the model
family (tests/weights).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from distributed import run_ranks
from megatron_rl.algorithms.advantages import AdvantageInputs
from megatron_rl.algorithms.catalog import find_advantage_estimator, find_policy_loss
from megatron_rl.algorithms.losses import PolicyLossInputs
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.extension.plugins import load_plugins
from megatron_rl.rewards.functions import load_reward_function
from rl_runs import make_task, overrides_for, train

PAGE = Path(__file__).resolve().parents[2] / "docs/extending.md"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the page's files; the first line of each block is its name."""
    directory = tmp_path_factory.mktemp("examples")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for name, code in blocks:
        (directory / name).write_text(code)
    assert [name for name, _ in blocks] == ["my_reward.py", "my_estimator.py", "my_loss.py", "my_engine.py"]
    return directory


def test_reward(examples: Path) -> None:
    score = load_reward_function(f"{examples}/my_reward.py:score")
    for text, expected in (("it is 7, no, 12", 1.0), ("12 or 7", 0.1), ("twelve", 0.0)):
        found = score(data_source="", solution_str=text, ground_truth="12", extra_info={})
        assert found["score"] == pytest.approx(expected) and found["has_number"] == float(expected > 0)


def test_estimator_and_loss(examples: Path) -> None:
    """The median of a group is its baseline; the loss has the policy gradient at ratio 1, and bends beyond."""
    load_plugins([f"{examples}/my_estimator.py", f"{examples}/my_loss.py"])
    mask = torch.tensor([False, True, True, True, True])
    inputs = AdvantageInputs(
        scores=np.array([0.0, 0.0, 1.0]), group_sizes=np.array([3]), baselines=None, token_rewards=torch.zeros(5),
        values=None, loss_mask=mask, sequence_ids=torch.tensor([0, 0, 1, 2, 2]), group=None)
    assert find_advantage_estimator("median").estimate(inputs, AlgorithmConfig()).tolist() == [0, 0, 0, 1, 1]

    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    tokens = PolicyLossInputs(
        logprobs, torch.tensor([-1.0, -2.0]), torch.tensor([2.0, 2.0]), torch.ones(2).bool(), torch.zeros(2).long())
    loss, is_clipped = find_policy_loss("soft_clip")(tokens, AlgorithmConfig(clip_eps_high=0.2))
    loss.sum().backward()
    assert loss[0] == -2.0 and -2.4 <= loss[1] < -2.39 and is_clipped.tolist() == [False, True]
    assert logprobs.grad[0] == -2.0 and -0.01 < logprobs.grad[1] < 0


def test_all_of_them_train_together(examples: Path, tmp_path: Path) -> None:
    """One rank, two steps: the engine gets certified weights, and its log-probs are the trainer's."""
    make_task(tmp_path)
    overrides = [
        f"algorithm.plugins=[{examples}/my_estimator.py, {examples}/my_loss.py, {examples}/my_engine.py]",
        "algorithm.adv_estimator=median", "algorithm.policy_loss=soft_clip", "rollout.engine=plain",
        f"reward.function={examples}/my_reward.py:score", "hybrid.verify=full", "checkpoint.save_huggingface=false",
        "trainer.save_final=false", "data.max_response_length=4", "data.validation_files=[]"]
    assert run_ranks(train, 1, overrides_for(tmp_path, tmp_path / "run", *overrides)) == [None]
    first, second = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for record in (first, second):
        assert record["mismatch/max"] < 1e-4 and record["reshard/verified_tensors"] > 10
        assert record["reward/has_number"] >= record["reward/mean"] > 0
    assert first["policy/ratio_max_deviation"] < 1e-5
