# SPDX-License-Identifier: Apache-2.0
"""Parts of a run that are passed as Python objects instead of by name in the config.

An object that is looked up by name is registered, and the config is set to its name, so that config.yaml describes the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithms.catalog import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageEstimator,
    PolicyLoss,
    RegisteredEstimator,
)
from megatron_rl.config.checks import check_config
from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.protocol import EngineMaker
from megatron_rl.extension.engines import ENGINES, RegisteredEngine
from megatron_rl.extension.registry import enter_object, name_of
from megatron_rl.rewards.scoring import RewardFunction, check_reward_function, file_of
from megatron_rl.types import Rollout, UserError

if TYPE_CHECKING:  # a dry run imports no torch
    from megatron_rl.planning.cluster import Cluster
    from megatron_rl.training.setup import RoleSetup


@dataclass(frozen=True)
class Parts:
    """User objects; `None` leaves the choice to the config.

    Attributes:
        reward: verl's signature `(data_source, solution_str, ground_truth, extra_info)`, a number or a dict with
            "score"; called in the rank.
        adv_estimator: `(AdvantageInputs, AlgorithmConfig)` -> advantages [t]; a `RegisteredEstimator` if it needs a
            critic's values or greedy responses.
        policy_loss: `(PolicyLossInputs, AlgorithmConfig)` -> token loss [t] and a clip mask [t].
        engine: see `EngineMaker` in `engines.protocol`; a `RegisteredEngine` if it supports more than plain sampling.
        reward_model: all rollouts of a step -> one score each, called on every rank with the same result; the reward,
            or added to the sum of `reward.components`.
        rollouts: replaces engine, generation and rewards (see `capsule.rollouts.RecordedRollouts`).
        choose_layout: for `layout.mode` auto: config, roles, cluster and recipe -> the config with a layout, and a line
            on each choice; `tools.planning.automatic.choose_layout`.
        actor, critic, reference: `RoleSetup` -> the role, such as a subclass of `Actor`, `Critic`, `Reference`.
    """

    reward: RewardFunction | None = None
    adv_estimator: AdvantageEstimator | RegisteredEstimator | None = None
    policy_loss: PolicyLoss | None = None
    engine: EngineMaker | RegisteredEngine | None = None
    reward_model: Callable[[Sequence[Rollout]], Sequence[float]] | None = None
    rollouts: Any = None
    choose_layout: Callable[[RunConfig, RunSpec, Cluster, Path | None], tuple[RunConfig, list[str]]] | None = None
    actor: Callable[[RoleSetup], Any] | None = None
    critic: Callable[[RoleSetup], Any] | None = None
    reference: Callable[[RoleSetup], Any] | None = None

    @property
    def roles(self) -> dict[str, Callable[[RoleSetup], Any]]:
        """Passed role classes by name."""
        given = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        return {name: make for name, make in given.items() if make is not None}

    def enter(self, config: RunConfig) -> RunConfig:
        """Register the objects that are looked up by name, and return the config with their names.

        Raises:
            UserError: a name is taken, the engine does not support a setting, the reward has a wrong signature, or the
                config names other rewards.
        """
        algorithm, rollout, reward = config.algorithm, config.rollout, config.reward
        if self.adv_estimator is not None:
            entry = self.adv_estimator
            if not isinstance(entry, RegisteredEstimator):
                entry = RegisteredEstimator(entry)
            name = enter_object(ADVANTAGE_ESTIMATORS, entry, entry.estimate, "algorithm.adv_estimator")
            algorithm = replace(algorithm, adv_estimator=name)
        if self.policy_loss is not None:
            name = enter_object(POLICY_LOSSES, self.policy_loss, self.policy_loss, "algorithm.policy_loss")
            algorithm = replace(algorithm, policy_loss=name)
        if self.engine is not None:
            entry = self.engine if isinstance(self.engine, RegisteredEngine) else RegisteredEngine(self.engine)
            rollout = replace(rollout, engine=enter_object(ENGINES, entry, entry.make, "rollout.engine"))
            check_config(replace(config, rollout=rollout))
        if self.reward is not None:
            self._check_reward(config)
            reward = replace(reward, function=f"{file_of(self.reward)}:{name_of(self.reward)}")
        return replace(config, algorithm=algorithm, rollout=rollout, reward=reward)

    def _check_reward(self, config: RunConfig) -> None:
        check_reward_function(self.reward, name_of(self.reward), "the reward that was passed")
        for leaf in ("components", "workers"):
            if getattr(config.reward, leaf):
                raise UserError(
                    f"reward.{leaf} = {getattr(config.reward, leaf)!r} beside a reward that was passed as an object",
                    source=f"reward.{leaf}",
                    expected="one of the two",
                    hint="name the function in the config as path.py:name, or remove the setting",
                )


NO_PARTS = Parts()
