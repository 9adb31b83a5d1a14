# SPDX-License-Identifier: Apache-2.0
"""Decides whether `old_logprobs` come from the first pass of the update or need a forward pass of their own.

With one optimizer step per pass over the samples, the first pass runs before any weight changes. Reusing it saves a
quarter of a step's matrix products (2 of 8 operations per weight and token).
"""

from __future__ import annotations

from megatron_rl.algorithms.catalog import CHOOSES_TOKENS, RegisteredEstimator
from megatron_rl.config.algorithm import SAMPLED
from megatron_rl.config.schema import AlgorithmConfig, RunConfig
from megatron_rl.types import UserError


def plan_old_logprobs(config: RunConfig, estimator: RegisteredEstimator) -> str:
    """Return the reason why `old_logprobs` need their own pass, in words, or "".

    Raises:
        UserError: `importance_sampling` is bypass, but there is such a reason.
    """
    reader = _find_early_reader(config, estimator)
    if reader and config.algorithm.importance_sampling == "bypass":
        raise UserError(
            f"algorithm.importance_sampling = 'bypass', and {reader}",
            source="algorithm.importance_sampling",
            expected="one optimizer step for each pass over the samples, and nothing that reads old_logprobs before",
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
    return find_early_reader_of_loss(algorithm, minibatches, has_branches=config.agents.has_episodes)


def find_early_reader_of_loss(algorithm: AlgorithmConfig, minibatches: int, *, has_branches: bool) -> str:
    """Return the reason why a policy loss needs `old_logprobs` before its first pass, in words, or "".

    Args:
        minibatches: optimizer steps per epoch.
    """
    if minibatches > 1:
        return f"an epoch has {minibatches} optimizer steps, and all but the first have changed weights"
    if algorithm.policy_loss in CHOOSES_TOKENS:
        return f"algorithm.policy_loss = {algorithm.policy_loss!r} chooses tokens of the whole step by them"
    if algorithm.importance_normalize and algorithm.importance_sampling not in ("none", "bypass"):
        return "algorithm.importance_normalize divides by a mean over the whole step"
    if has_branches and algorithm.importance_sampling.startswith(("sequence", "product")):
        return (
            f"algorithm.importance_sampling = {algorithm.importance_sampling!r} weighs episodes with all their branches"
        )
    if has_branches and algorithm.reject_sequence_above is not None:
        return "algorithm.reject_sequence_above rejects episodes with all their branches"
    return ""
