# SPDX-License-Identifier: Apache-2.0
"""verl's own functions, loaded from a checkout without installing verl or its dependencies.

The needed modules are imported unchanged; config and container classes, used only in annotations and `isinstance`, are
replaced by empty ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron_rl.types import UserError

_ENTRY = "verl/trainer/ppo/core_algos.py"
_PACKAGES = ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers")
_CLASSES = {
    "verl.protocol": ("DataProto",),
    "verl.trainer.config": ("AlgoConfig",),
    "verl.workers.config.actor": ("PolicyLossConfig",),
    "verl.trainer.config.algorithm": ("RolloutCorrectionConfig",),
}
_THIRD_PARTY = {"omegaconf": ("DictConfig",), "tensordict": ("TensorDict",)}


class ActorConfig(SimpleNamespace):
    """A stand-in for verl's actor config."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute, or the default."""
        return getattr(self, name, default)


def load_verl(checkout: Path) -> SimpleNamespace:
    """Load verl's `core` (losses, estimators, KL) and `correction` (importance weights), `score` and `ActorConfig`.

    Raises:
        UserError: no checkout of verl.
    """
    if not (checkout / _ENTRY).is_file():
        raise UserError(
            f"there is no {_ENTRY} in {checkout}",
            source="CHECKOUT",
            expected="a checkout of verl",
            hint="git clone https://github.com/volcengine/verl",
        )
    for name in _PACKAGES:
        package = _add_module(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
    missing = {name: classes for name, classes in _THIRD_PARTY.items() if importlib.util.find_spec(name) is None}
    for name, classes in {**_CLASSES, **missing}.items():
        vars(_add_module(name)).update({each: type(each, (), {}) for each in classes})
    _add_module("verl.workers.config").ActorConfig = ActorConfig
    groupwise = importlib.import_module("verl.utils.groupwise")
    vars(sys.modules["verl.utils"]).update(
        as_torch_index=groupwise.as_torch_index, group_mean_std=groupwise.group_mean_std
    )
    return SimpleNamespace(
        core=importlib.import_module("verl.trainer.ppo.core_algos"),
        correction=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"),
        score=importlib.import_module("verl.utils.reward_score").default_compute_score,
        ActorConfig=ActorConfig,
    )


def _add_module(name: str) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    return module
