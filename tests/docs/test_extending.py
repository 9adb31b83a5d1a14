# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/extending.md, as they stand there, in one run of the whole program.

Not covered: an engine with a layout of its own (tests/transfer/test_hybrid_engine.py has vLLM's), and the model
family (tests/weights).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from registries import restored_registries

from distributed import run_ranks
from megatron_rl.algorithms.advantages import AdvantageInputs
from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from megatron_rl.algorithms.losses import PolicyLossInputs, aggregate
from megatron_rl.config.algorithm import OPTIONS
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.extension.user_code import load_plugins
from megatron_rl.rewards.functions import load_reward_function
from rl_runs import make_task, overrides_for, train

PAGE = Path(__file__).resolve().parents[2] / "docs/extending.md"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the page's files; the first line of each block is its name."""
    directory = tmp_path_factory.mktemp("examples")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for name, code in blocks:
        (directory / name).write_text(code)
    assert [name for name, _ in blocks] == [
        "my_reward.py",
        "my_estimator.py",
        "my_loss.py",
        "my_aggregation.py",
        "my_engine.py",
    ]
    with restored_registries():
        yield directory


def test_reward(examples: Path) -> None:
    score = load_reward_function(f"{examples}/my_reward.py:score")
    for text, expected in (("it is 7, no, 12", 1.0), ("12 or 7", 0.1), ("twelve", 0.0)):
        found = score(data_source="", solution_str=text, ground_truth="12", extra_info={})
        assert found["score"] == pytest.approx(expected) and found["has_number"] == float(expected > 0)


def test_estimator_loss_and_aggregation(examples: Path) -> None:
    """The median of a group is its baseline; the loss has the policy gradient at ratio 1, and bends beyond."""
    load_plugins([f"{examples}/my_{name}.py" for name in ("estimator", "loss", "aggregation")])
    mask = torch.tensor([False, True, True, True, True])
    inputs = AdvantageInputs(
        scores=np.array([0.0, 0.0, 1.0]),
        group_sizes=np.array([3]),
        baselines=None,
        token_rewards=torch.zeros(5),
        values=None,
        loss_mask=mask,
        sequence_ids=torch.tensor([0, 0, 1, 2, 2]),
        group=None,
    )
    for quantile, baseline in ((0.5, 0.0), (0.75, 0.5)):
        options = OPTIONS["quantile"](quantile)
        found = ADVANTAGE_ESTIMATORS["quantile"].estimate(replace(inputs, options=options), AlgorithmConfig())
        rest = 1.0 - baseline
        assert found.advantages.tolist() == [0, -baseline, -baseline, rest, rest]
        assert found.metrics == {"baseline": baseline}
    with pytest.raises(ValueError, match="not between 0 and 1"):
        OPTIONS["quantile"](1.5)

    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    tokens = PolicyLossInputs(
        logprobs, torch.tensor([-1.0, -2.0]), torch.tensor([2.0, 2.0]), torch.ones(2).bool(), torch.zeros(2).long()
    )
    tokens = replace(tokens, options=OPTIONS["soft_clip"]())
    loss, is_clipped, metrics = POLICY_LOSSES["soft_clip"](tokens, AlgorithmConfig())
    assert metrics["rising"].tolist() == [False, True]
    loss.sum().backward()
    assert loss[0] == -2.0 and -2.4 <= loss[1] < -2.39 and is_clipped.tolist() == [False, True]
    assert logprobs.grad[0] == -2.0 and -0.01 < logprobs.grad[1] < 0

    found = aggregate("root_length", [4, 0, 16], 16)
    assert found.weights.tolist() == [1 / 6, 0.0, 1 / 12] and found.metrics == {"largest": 1 / 3}


def test_all_of_them_train_together(examples: Path, tmp_path: Path) -> None:
    """One rank, two steps, as the page's last command does: the engine gets certified weights, and its log-probs are
    the trainer's; every metric has the name that the page gives it, and config.yaml has the options.
    """
    make_task(tmp_path)
    command = PAGE.read_text(encoding="utf-8").partition("## All of them together")[2].partition("```\n")[0]
    arguments = shlex.split(command.partition("RECIPE.yaml")[2].replace("\\\n", " "))
    overrides = [
        *(argument.replace("my_", f"{examples}/my_") for argument in arguments),
        "hybrid.verify=full",
        "checkpoint.contents=[optimizer]",
        "trainer.save_freq=null",
        "data.max_response_length=4",
        "data.validation_files=[]",
    ]
    assert run_ranks(train, 1, overrides_for(tmp_path, tmp_path / "run", *overrides)) == [None]
    first, second = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for record in (first, second):
        assert record["mismatch/max"] < 1e-4 and record["reshard/verified_tensors"] > 10
        assert record["reward/has_number"] >= record["reward/mean"] > 0
        assert -0.1 <= record["estimator/quantile/baseline"] <= record["reward/mean"] + 0.5
        assert record["loss/soft_clip/ratio"] > 0 and 0 <= record["loss/soft_clip/rising"] <= 1
        assert 1 / 16 / 2 <= record["aggregation/root_length/largest"] <= 1 / 16
        assert record["ledger/policy/denominator"] == 1
    assert first["policy/ratio_max_deviation"] < 1e-5
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["algorithm"]["options"] == {
        "quantile": {"quantile": 0.25},
        "soft_clip": {"width": 0.1},
    }
