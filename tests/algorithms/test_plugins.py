# SPDX-License-Identifier: Apache-2.0
"""A user's estimator and loss from a file outside the package, and the errors of broken files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_rl.algorithms.catalog import POLICY_LOSSES
from megatron_rl.algorithms.losses import PolicyLossInputs, compute_policy_loss
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.extension.user_code import load_plugins
from megatron_rl.types import UserError

PLUGIN = """\
from __future__ import annotations
from dataclasses import dataclass
from megatron_rl.algorithms.advantages import register_advantage_estimator
from megatron_rl.algorithms.losses import register_policy_loss

@dataclass
class Scale:
    factor: float = 2.0

@register_advantage_estimator("best_of_group")
def compute_best_of_group(inputs, config):
    return inputs.expand([float(s == scores.max()) for scores in inputs.grouped_scores() for s in scores])

@register_policy_loss("doubled")
def compute_doubled_loss(inputs, config):
    return -Scale().factor * inputs.advantages * inputs.logprobs, inputs.advantages < 0
"""


pytestmark = pytest.mark.usefixtures("registry")


def write(directory: Path, code: str, name: str = "plugin.py") -> str:
    file = directory / name
    file.write_text(code)
    return str(file)


def test_an_estimator_and_a_loss_of_the_user(tmp_path: Path) -> None:
    """Registered from a file, found by the names in the config, and used like the built-in ones."""
    load_plugins([write(tmp_path, PLUGIN)])
    config = AlgorithmConfig(adv_estimator="best_of_group", policy_loss="doubled")
    ids, mask = torch.tensor([0, 0, 1, 1]), torch.tensor([False, True, False, True])
    inputs = AdvantageInputs(np.array([1.0, 3.0]), np.array([2]), None, torch.zeros(4), None, mask, ids, None)
    advantages = compute_advantages(inputs, config).advantages
    assert advantages.tolist() == [0.0, 0.0, 0.0, 1.0]
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    loss, metrics = compute_policy_loss(
        PolicyLossInputs(logprobs, logprobs.detach(), advantages, mask, ids),
        torch.zeros(4),
        None,
        None,
        torch.full((4,), 0.5) * mask,
        config,
    )
    loss.backward()
    assert loss.item() == 4.0 and logprobs.grad.tolist() == [0.0, 0.0, 0.0, -1.0] and float(metrics["clipped"]) == 0.0


def test_a_file_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is named in another way."""
    file = write(tmp_path, PLUGIN)
    monkeypatch.chdir(tmp_path)
    load_plugins([file, "plugin.py"])
    load_plugins([file])
    assert "doubled" in POLICY_LOSSES


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing.py does not exist"):
        load_plugins([str(tmp_path / "missing.py")])


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="plugin.txt is not a Python file"):
        load_plugins([write(tmp_path, PLUGIN, "plugin.txt")])


@pytest.mark.parametrize(
    ("code", "message", "line"),
    [
        ("x = 1\ndef f(:\n", "SyntaxError", 2),
        ("\n\nimport no_such_module\n", "ModuleNotFoundError", 3),
        ("def f():\n    return 1 / 0\n\nf()\n", "ZeroDivisionError: division by zero", 2),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3", 2),
    ],
)
def test_a_broken_file_is_named_with_the_line(tmp_path: Path, code: str, message: str, line: int) -> None:
    file = write(tmp_path, code)
    for _ in range(2):  # a second attempt does not find half a module
        with pytest.raises(UserError, match=f"raised {message}(.|\n)*algorithm.plugins, {file}:{line}\n"):
            load_plugins([file])


def test_two_files_with_the_same_name_are_refused(tmp_path: Path) -> None:
    first, second = write(tmp_path, PLUGIN), write(tmp_path, PLUGIN, "second.py")
    with pytest.raises(UserError, match=f'^"best_of_group" is registered already\n  source:   {second}:10\n'):
        load_plugins([first, second])
