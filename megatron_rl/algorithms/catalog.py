# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators, policy losses and loss aggregations by name, and what a run must provide for each.

The package's own are rows of the tables, plugins add theirs with the decorators. Nothing here imports torch: a dry
run reads the tables, and a formula of ours is imported when it is first called.

`options` of a decorator is a frozen dataclass: its fields become settings, `algorithm.options.<name>.<field>`, and the
function finds an instance in `inputs.options`. A field is declared as `alpha: float = 0.5`, or as
`alpha: float = option(0.5, "what it does", "unit")` with `option` of `megatron_rl.config.schema`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.config.options import OPTIONS, check_options
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.extension.registry import Deferred, add_entry, describe_place, find_entry

if TYPE_CHECKING:
    import numpy as np
    import torch

    from megatron_rl.algorithms.plugin_types import AdvantageInputs, Advantages, AggregationInputs, PolicyLossInputs

AdvantageEstimator = Callable[["AdvantageInputs", AlgorithmConfig], "torch.Tensor | Advantages"]
PolicyLoss = Callable[
    ["PolicyLossInputs", AlgorithmConfig],
    "tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]",
]
LossAggregation = Callable[["AggregationInputs"], "np.ndarray | tuple[np.ndarray, dict[str, float]]"]

_ESTIMATOR, _LOSS, _AGGREGATION = "algorithm.adv_estimator", "algorithm.policy_loss", "algorithm.loss_agg_mode"


@dataclass(frozen=True)
class RegisteredEstimator:
    """An estimator and what a run must provide for it.

    Attributes:
        estimate: the formula.
        needs_values: the values of a critic.
        needs_greedy_baseline: the reward of a greedy response to each prompt.
        needs_group: several responses to each prompt; with one, every advantage would be 0.
        needs_sum_pi_squared: the sum over the vocabulary of squared probabilities, for one more forward pass.
        needs_old_logprobs: `old_logprobs`, and the importance weights that are made of them, before the update: for one
            more forward pass where the first pass of the update would give them.
    """

    estimate: AdvantageEstimator
    needs_values: bool = False
    needs_greedy_baseline: bool = False
    needs_group: bool = False
    needs_sum_pi_squared: bool = False
    needs_old_logprobs: bool = True


def _formula(name: str, *, needs_old_logprobs: bool = False, **needs: bool) -> RegisteredEstimator:
    formula = Deferred("megatron_rl.algorithms.estimators", f"compute_{name}_advantages")
    return RegisteredEstimator(formula, needs_old_logprobs=needs_old_logprobs, **needs)


ADVANTAGE_ESTIMATORS: dict[str, RegisteredEstimator] = {
    **{name: _formula(name, needs_group=True) for name in ("grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg")},
    "optimal_token_baseline": _formula(
        "optimal_token_baseline", needs_group=True, needs_sum_pi_squared=True, needs_old_logprobs=True
    ),
    "remax": _formula("remax", needs_greedy_baseline=True),
    "reinforce_plus_plus_baseline": _formula("reinforce_plus_plus_baseline", needs_group=True),
    "reinforce_plus_plus": _formula("reinforce_plus_plus"),
    "gae": _formula("gae", needs_values=True),
    "distill": _formula("distill"),
}
CHOOSES_TOKENS = ("clip_cov", "kl_cov")  # policy losses that choose tokens out of the whole step, by `old_logprobs`
POLICY_LOSSES: dict[str, PolicyLoss] = {
    name: Deferred("megatron_rl.algorithms.policy_losses", f"compute_{name}_loss")
    for name in (
        *("ppo", "gspo", "geo_mean", "cispo", "sapo", "dppo_tv", "dppo_kl", "policy_gradient"),
        *CHOOSES_TOKENS,
    )
}
LOSS_AGGREGATIONS: dict[str, LossAggregation] = {
    name: Deferred("megatron_rl.algorithms.aggregation", f"weigh_{name.replace('-', '_')}")
    for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
}


def register_advantage_estimator(
    name: str,
    *,
    needs_values: bool = False,
    needs_greedy_baseline: bool = False,
    needs_group: bool = False,
    needs_sum_pi_squared: bool = False,
    needs_old_logprobs: bool = True,
    options: type | None = None,
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorator: make `estimator(inputs, config)` known as algorithm.adv_estimator = `name`.

    The estimator returns advantages [t], or `Advantages`, which has returns for a critic and metrics as well.

    Args:
        name: what the config says; must be new.
        needs_values: a critic is built and `inputs.values` is there.
        needs_greedy_baseline: a greedy response to each prompt is scored and `inputs.baselines` is there.
        needs_group: rollout.n = 1 is refused.
        needs_sum_pi_squared: `inputs.sum_pi_squared` is there, for one more forward pass of the policy per step.
        needs_old_logprobs: `inputs.old_logprobs` and `inputs.importance_weights` are there; say False where the
            estimator reads neither, and the first pass of the update gives them without a forward pass of their own.
        options: frozen dataclass of its settings; `inputs.options` is an instance.

    Raises:
        UserError: the name is taken, or `options` cannot be settings.
    """

    def make_entry(estimator: AdvantageEstimator) -> RegisteredEstimator:
        return RegisteredEstimator(
            estimator, needs_values, needs_greedy_baseline, needs_group, needs_sum_pi_squared, needs_old_logprobs
        )

    return _register(ADVANTAGE_ESTIMATORS, name, _ESTIMATOR, options, make_entry)


def find_advantage_estimator(name: str) -> RegisteredEstimator:
    """The estimator of a name; UserError naming the known ones if there is none."""
    return find_entry(ADVANTAGE_ESTIMATORS, name, _ESTIMATOR)


def register_policy_loss(name: str, *, options: type | None = None) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: make `loss(inputs, config)` known as algorithm.policy_loss = `name`.

    The loss returns the token loss [t] and where it is clipped [t] bool, and may return metrics as a third: a dict,
    always with the same names, of tensors [t] whose mean over the tokens in the loss is logged as
    `loss/<name>/<metric>`. At masked positions all of its inputs are 0 and its results are dropped. To run inside a
    CUDA graph it must not look at values (`.item()`, boolean indexing, `torch.unique`).

    Args:
        name: what the config says; must be new.
        options: frozen dataclass of its settings; `inputs.options` is an instance.

    Raises:
        UserError: the name is taken, or `options` cannot be settings.
    """
    return _register(POLICY_LOSSES, name, _LOSS, options)


def find_policy_loss(name: str) -> PolicyLoss:
    """The policy loss of a name; UserError naming the known ones if there is none."""
    return find_entry(POLICY_LOSSES, name, _LOSS)


def register_loss_aggregation(
    name: str, *, options: type | None = None
) -> Callable[[LossAggregation], LossAggregation]:
    """Decorator: make `aggregation(inputs)` known as algorithm.loss_agg_mode = `name`.

    The aggregation returns the weight of each token of each response of a minibatch, [num_seqs]: the loss is the sum of
    `weight * token loss`. It may return metrics as well, a dict of numbers that are logged as
    `aggregation/<name>/<metric>`. It must be a function of its inputs alone: every rank computes it for the whole
    minibatch, and the ledger once more.

    Args:
        name: what the config says; must be new.
        options: frozen dataclass of its settings; `inputs.options` is an instance.

    Raises:
        UserError: the name is taken, or `options` cannot be settings.
    """
    return _register(LOSS_AGGREGATIONS, name, _AGGREGATION, options)


def find_loss_aggregation(name: str) -> LossAggregation:
    """The aggregation of a name; UserError naming the known ones if there is none."""
    return find_entry(LOSS_AGGREGATIONS, name, _AGGREGATION)


def _register(
    table: dict[str, Any],
    name: str,
    setting: str,
    options: type | None,
    make_entry: Callable[[Any], Any] = lambda function: function,
) -> Callable[[Any], Any]:
    """The decorator that enters a function, and its options, under a name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if options is not None:
            check_options(name, options, describe_place(function))
        add_entry(table, name, make_entry(function), function, setting)
        if options is not None:
            OPTIONS[name] = options
        return function

    return register
