# SPDX-License-Identifier: Apache-2.0
"""Setups of roles without a run: the fields that `build_role` takes from a config, given by a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import LayoutConfig, ModelConfig
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.setup import RoleSetup
from megatron_rl.weights.families import SCORE_HEAD
from megatron_rl.weights.model_config import load_model_shape

_KINDS: dict[str, dict[str, Any]] = {
    "actor": dict(section="actor", head="logprob", trainable=True),
    "reference": dict(section="actor", head="logprob"),
    "critic": dict(section="critic", head="value", trainable=True, may_lack=(SCORE_HEAD,)),
    "reward_model": dict(section="reward_model", head="score"),
}


def make_setup(
    role: str,
    path: Path,
    layout: LayoutConfig,
    groups: ParallelGroups,
    *,
    dtype: str = "float32",
    spec: dict[str, Any] | None = None,
    **options: Any,
) -> RoleSetup:
    """Return the setup of a role whose weights and shape are in `path`.

    Args:
        role: "actor", "reference", "critic" or "reward_model".
        layout: section of the role.
        spec: other fields of the `RoleSpec`, such as another path of the weights.
        options: further fields of `RoleSetup`.
    """
    kind = RoleSpec(name=role, path=str(path), settings=layout, **_KINDS[role])
    shape = options.pop("shape", None) or load_model_shape(path, head="lm" if kind.head == "logprob" else "score")
    return RoleSetup(
        spec=replace(kind, **(spec or {})),
        model=ModelConfig(path=str(path), dtype=dtype),
        shape=shape,
        groups=groups,
        **dict(seed=1) | options,
    )


def take_step(role: Any, minibatch: TrainBatch, *loss: Any) -> dict[str, float]:
    """One optimizer step of a role; of an actor's with its loss."""
    role.forward_backward(minibatch, *loss)
    return role.optim_step()
