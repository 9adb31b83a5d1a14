# SPDX-License-Identifier: Apache-2.0
"""Registries of advantage estimators, policy losses and loss aggregations, with the requirements of each.

Plugins register their own with the decorators. Built-in formulas are imported at their first call: dry runs load no
torch.

`options` of a decorator is a frozen dataclass: its fields become settings `algorithm.options.<name>.<field>`, and the
function receives an instance as `inputs.options` (docs/extending.md).

With one optimizer step per pass over the samples, the first pass of the update runs before any weight changes, and
`old_logprobs` come from it unless something reads them earlier (`plan_old_logprobs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.algorithm import OPTIONS, SAMPLED
from megatron_rl.config.schema import AlgorithmConfig, RunConfig
from megatron_rl.extension.registry import Registry, describe_place
from megatron_rl.types import Deferred, UserError

# Of `AdvantageInputs`, `PolicyLossInputs` and `AggregationInputs`, whose modules import this one.
AdvantageEstimator = Callable[[Any, AlgorithmConfig], Any]
PolicyLoss = Callable[[Any, AlgorithmConfig], tuple[Any, ...]]
LossAggregation = Callable[[Any], Any]


@dataclass(frozen=True)
class RegisteredEstimator:
    """An estimator and its requirements; see `register_advantage_estimator`."""

    estimate: AdvantageEstimator
    needs_values: bool = False
    needs_greedy_baseline: bool = False
    needs_group: bool = False
    needs_sum_pi_squared: bool = False
    needs_old_logprobs: bool = True
    needs_turns: bool = True  # the turns' states of an episode


def _formula(
    name: str, module: str = "estimators", *, needs_old_logprobs: bool = False, needs_turns: bool = False, **needs: bool
) -> RegisteredEstimator:
    formula = Deferred(f"megatron_rl.algorithms.{module}", f"compute_{name}_advantages")
    return RegisteredEstimator(formula, needs_old_logprobs=needs_old_logprobs, needs_turns=needs_turns, **needs)


ADVANTAGE_ESTIMATORS: Registry[RegisteredEstimator] = Registry(
    "algorithm.adv_estimator",
    grpo=_formula("grpo", "advantages", needs_group=True),
    **{name: _formula(name, needs_group=True) for name in ("dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo")},
    **dict.fromkeys(
        ("optimal_token_baseline", "tir_optimal_token_baseline"),
        _formula("optimal_token_baseline", needs_group=True, needs_sum_pi_squared=True, needs_old_logprobs=True),
    ),
    **{name: _formula(name, "turn_estimators", needs_group=True, needs_turns=True) for name in ("gigpo", "grpo_turns")},
    remax=_formula("remax", needs_greedy_baseline=True),
    reinforce_plus_plus_baseline=_formula("reinforce_plus_plus_baseline", needs_group=True),
    reinforce_plus_plus=_formula("reinforce_plus_plus"),
    gae=_formula("gae", needs_values=True),
    distill=_formula("distill"),
)
_LOSSES = "gspo geo_mean cispo sapo dppo_tv dppo_kl dro policy_gradient clip_cov kl_cov"
CHOOSES_TOKENS = ("clip_cov", "kl_cov")  # policy losses that choose tokens of the whole step by `old_logprobs`
POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "algorithm.policy_loss",
    ppo=Deferred("megatron_rl.algorithms.losses", "compute_ppo_loss"),
    **{name: Deferred("megatron_rl.algorithms.policy_losses", f"compute_{name}_loss") for name in _LOSSES.split()},
)
LOSS_AGGREGATIONS: Registry[LossAggregation] = Registry(
    "algorithm.loss_agg_mode",
    **{
        name: Deferred("megatron_rl.algorithms.losses", f"weigh_{name.replace('-', '_')}")
        for name in ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
    },
)
PREFERENCE_LOSSES: Registry[Callable[..., Any]] = Registry(
    "preference.loss",
    **{
        name: Deferred("megatron_rl.algorithms.preference_losses", f"compute_{name}_loss")
        for name in ("dpo", "robust", "ipo", "simpo", "orpo", "bradley_terry", "kto", "process")
    },
)


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
    """Register `estimator(inputs, config)` as algorithm.adv_estimator = `name`; a decorator.

    The estimator returns advantages [t], or `Advantages` with returns for a critic and metrics.

    Args:
        needs_values: build a critic and provide `inputs.values`.
        needs_greedy_baseline: score a greedy response per prompt and provide `inputs.baselines`.
        needs_group: refuse rollout.n = 1, which would make every advantage 0.
        needs_sum_pi_squared: provide `inputs.sum_pi_squared`; costs a forward pass per step.
        needs_old_logprobs: provide `inputs.old_logprobs` and `inputs.importance_weights`; may cost a forward pass per
            step, so pass False if both are unused.

    Raises:
        UserError: the name is taken, or `options` is invalid.
    """

    def make_entry(estimator: AdvantageEstimator) -> RegisteredEstimator:
        return RegisteredEstimator(
            estimator, needs_values, needs_greedy_baseline, needs_group, needs_sum_pi_squared, needs_old_logprobs
        )

    return _register(ADVANTAGE_ESTIMATORS, name, options, make_entry)


def register_policy_loss(name: str, *, options: type | None = None) -> Callable[[PolicyLoss], PolicyLoss]:
    """Register `loss(inputs, config)` as algorithm.policy_loss = `name`; a decorator.

    The loss returns the token loss [t], a mask of clipped tokens [t] bool, and optionally metrics: a dict with fixed
    names of tensors [t], whose mean over the tokens in the loss is logged as `loss/<name>/<metric>`. At masked
    positions inputs are 0 and results are dropped. For CUDA graphs, the loss must not read values on the host
    (`.item()`, boolean indexing, `torch.unique`).

    Raises:
        UserError: the name is taken, or `options` is invalid.
    """
    return _register(POLICY_LOSSES, name, options)


def register_loss_aggregation(
    name: str, *, options: type | None = None
) -> Callable[[LossAggregation], LossAggregation]:
    """Register `aggregation(inputs)` as algorithm.loss_agg_mode = `name`; a decorator.

    The aggregation returns one token weight per response of a minibatch, [num_seqs], and optionally a dict of numbers,
    logged as `aggregation/<name>/<metric>`. It must be a pure function: every rank calls it.

    Raises:
        UserError: the name is taken, or `options` is invalid.
    """
    return _register(LOSS_AGGREGATIONS, name, options)


def register_preference_loss(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `loss(chosen, rejected, margins, config)`, see docs/preferences.md, as preference.loss; a decorator.

    Raises:
        UserError: the name is taken.
    """
    return _register(PREFERENCE_LOSSES, name, None)


def _register(
    table: Registry[Any],
    name: str,
    options: type | None,
    make_entry: Callable[[Any], Any] = lambda function: function,
) -> Callable[[Any], Any]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if options is not None:
            from megatron_rl.config.plugin_options import check_options

            check_options(name, options, describe_place(function))
        table.add(name, make_entry(function), function)
        if options is not None:
            OPTIONS[name] = options
        return function

    return register


def plan_old_logprobs(config: RunConfig, estimator: RegisteredEstimator) -> str:
    """Return the reason, in words, why `old_logprobs` need a forward pass of their own before the update.

    Returns:
        "" if the first pass of the update can provide them.

    Raises:
        UserError: `importance_sampling` is bypass, but there is such a reason.
    """
    reader = _find_early_reader(config, estimator)
    if reader and config.algorithm.importance_sampling == "bypass":
        raise UserError(
            f"algorithm.importance_sampling = 'bypass', and {reader}",
            source="algorithm.importance_sampling",
            expected="one optimizer step for each pass: there is no bypass where something reads old_logprobs before",
            hint="set algorithm.importance_sampling=token-truncate, which corrects by weights of its own",
        )
    return reader


def _find_early_reader(config: RunConfig, estimator: RegisteredEstimator) -> str:
    algorithm, batch = config.algorithm, config.data.train_batch_size
    minibatches = batch // (config.actor.ppo_mini_batch_size or batch)
    if algorithm.old_logprobs == "recompute":
        return "algorithm.old_logprobs = 'recompute' asks for a forward pass of their own"
    if config.actor.router_replay == "trainer":
        return "actor.router_replay = 'trainer' replays what a forward pass of their own chooses"
    if estimator.needs_old_logprobs:
        return f"algorithm.adv_estimator = {algorithm.adv_estimator!r} reads them (needs_old_logprobs)"
    if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
        return "algorithm.kl_in = 'reward' makes rewards of them"
    if config.teachers and algorithm.distillation.kind == SAMPLED:
        return "algorithm.distillation makes advantages of them"
    return find_early_reader_of_loss(algorithm, minibatches, has_branches=config.has_episodes)


def find_early_reader_of_loss(algorithm: AlgorithmConfig, minibatches: int, *, has_branches: bool) -> str:
    """Return the reason why the loss needs `old_logprobs` before the update's first pass can provide them; "" if none.

    Args:
        minibatches: optimizer steps per epoch.
        has_branches: an episode may have several sequences, in different microbatches.
    """
    if minibatches > 1:
        return f"an epoch has {minibatches} optimizer steps, and all but the first have changed weights"
    if algorithm.policy_loss in CHOOSES_TOKENS:
        return f"algorithm.policy_loss = {algorithm.policy_loss!r} chooses tokens of the whole step by them"
    if algorithm.importance_normalize and algorithm.importance_sampling not in ("none", "bypass"):
        return "algorithm.importance_normalize divides by a mean over the whole step"
    has_branches = has_branches and algorithm.importance_by == "rollout"
    if has_branches and algorithm.importance_sampling.startswith(("sequence", "product")):
        return (
            f"algorithm.importance_sampling = {algorithm.importance_sampling!r} weighs episodes with all their branches"
        )
    if has_branches and algorithm.reject_sequence_above is not None:
        return "algorithm.reject_sequence_above rejects episodes with all their branches"
    return ""
