# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators and policy losses by name, and what a run must provide for each.

The package's own are rows of the two tables, plugins add theirs with the decorators. Nothing here imports torch: a dry
run reads the tables, and a formula of ours is imported when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.extension.registry import Deferred, add_entry, find_entry

if TYPE_CHECKING:
    import torch

    from megatron_rl.algorithms.advantages import AdvantageInputs, Advantages
    from megatron_rl.algorithms.losses import PolicyLossInputs

AdvantageEstimator = Callable[["AdvantageInputs", AlgorithmConfig], "torch.Tensor | Advantages"]
PolicyLoss = Callable[["PolicyLossInputs", AlgorithmConfig], "tuple[torch.Tensor, torch.Tensor]"]

_ESTIMATOR, _LOSS = "algorithm.adv_estimator", "algorithm.policy_loss"


@dataclass(frozen=True)
class RegisteredEstimator:
    """An estimator and what a run must provide for it.

    Attributes:
        estimate: the formula.
        needs_values: the values of a critic.
        needs_greedy_baseline: the reward of a greedy response to each prompt.
        needs_group: several responses to each prompt; with one, every advantage would be 0.
        needs_sum_pi_squared: the sum over the vocabulary of squared probabilities, for one more forward pass.
    """

    estimate: AdvantageEstimator
    needs_values: bool = False
    needs_greedy_baseline: bool = False
    needs_group: bool = False
    needs_sum_pi_squared: bool = False


def _formula(name: str) -> Deferred:
    return Deferred("megatron_rl.algorithms.estimators", f"compute_{name}_advantages")


def _loss(name: str, module: str = "policy_losses") -> Deferred:
    return Deferred(f"megatron_rl.algorithms.{module}", f"compute_{name}_loss")


ADVANTAGE_ESTIMATORS: dict[str, RegisteredEstimator] = {
    "grpo": RegisteredEstimator(_formula("grpo"), needs_group=True),
    "dr_grpo": RegisteredEstimator(_formula("dr_grpo"), needs_group=True),
    "grpo_passk": RegisteredEstimator(_formula("grpo_passk"), needs_group=True),
    "rloo": RegisteredEstimator(_formula("rloo"), needs_group=True),
    "opo": RegisteredEstimator(_formula("opo"), needs_group=True),
    "gpg": RegisteredEstimator(_formula("gpg"), needs_group=True),
    "optimal_token_baseline": RegisteredEstimator(
        _formula("optimal_token_baseline"), needs_group=True, needs_sum_pi_squared=True),
    "remax": RegisteredEstimator(_formula("remax"), needs_greedy_baseline=True),
    "reinforce_plus_plus_baseline": RegisteredEstimator(_formula("reinforce_plus_plus_baseline"), needs_group=True),
    "reinforce_plus_plus": RegisteredEstimator(_formula("reinforce_plus_plus")),
    "gae": RegisteredEstimator(_formula("gae"), needs_values=True),
}
POLICY_LOSSES: dict[str, PolicyLoss] = {
    **{name: _loss(name) for name in (
        "ppo", "gspo", "geo_mean", "cispo", "sapo", "dppo_tv", "dppo_kl", "policy_gradient")},
    **{name: _loss(name, "covariance") for name in ("clip_cov", "kl_cov")},
}


def register_advantage_estimator(
    name: str, *, needs_values: bool = False, needs_greedy_baseline: bool = False, needs_group: bool = False,
    needs_sum_pi_squared: bool = False,
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorator: make `estimator(inputs, config)` known as algorithm.adv_estimator = `name`.

    Args:
        name: what the config says; must be new.
        needs_values: a critic is built and `inputs.values` is there.
        needs_greedy_baseline: a greedy response to each prompt is scored and `inputs.baselines` is there.
        needs_group: rollout.n = 1 is refused.
        needs_sum_pi_squared: `inputs.sum_pi_squared` is there, for one more forward pass of the policy per step.

    Raises:
        UserError: the name is taken.
    """

    def register(estimator: AdvantageEstimator) -> AdvantageEstimator:
        entry = RegisteredEstimator(
            estimator, needs_values, needs_greedy_baseline, needs_group, needs_sum_pi_squared)
        add_entry(ADVANTAGE_ESTIMATORS, name, entry, estimator, _ESTIMATOR)
        return estimator

    return register


def find_advantage_estimator(name: str) -> RegisteredEstimator:
    """The estimator of a name; UserError naming the known ones if there is none."""
    return find_entry(ADVANTAGE_ESTIMATORS, name, _ESTIMATOR)


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: make `loss(inputs, config)` known as algorithm.policy_loss = `name`.

    The loss returns the token loss [t] and where it is clipped [t] bool. At masked positions all of its inputs
    are 0 and its results are dropped. To run inside a CUDA graph it must not look at values (`.item()`, boolean
    indexing, `torch.unique`).

    Raises:
        UserError: the name is taken.
    """

    def register(loss: PolicyLoss) -> PolicyLoss:
        add_entry(POLICY_LOSSES, name, loss, loss, _LOSS)
        return loss

    return register


def find_policy_loss(name: str) -> PolicyLoss:
    """The policy loss of a name; UserError naming the known ones if there is none."""
    return find_entry(POLICY_LOSSES, name, _LOSS)
