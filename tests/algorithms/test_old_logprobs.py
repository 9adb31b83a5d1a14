# SPDX-License-Identifier: Apache-2.0
"""Settings that need `old_logprobs` before the update, as a table. Their effect in a run is in tests/run."""

from __future__ import annotations

import pytest

from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS, RegisteredEstimator, plan_old_logprobs
from megatron_rl.config.schema import RunConfig
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve
from megatron_rl.types import UserError

EPISODES = ["agents.environment=calculator"]


def make_config(*overrides: str) -> RunConfig:
    common = ["model.path=policy", "data.train_files=[x.jsonl]", "data.train_batch_size=8"]
    return load_config(None, [*common, *overrides]).config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.ppo_mini_batch_size=8", "actor.ppo_epochs=3"],
        ["algorithm.kl_coef=0.1", "algorithm.kl_target=0.1"],
        ["algorithm.adv_estimator=gae", "algorithm.kl_coef=0.1"],
        ["algorithm.importance_sampling=sequence-mask", "algorithm.reject_sequence_above=1.0"],
        ["algorithm.importance_sampling=bypass", "algorithm.importance_normalize=true"],
        ["algorithm.policy_loss=gspo", "algorithm.loss_agg_mode=seq-mean-token-mean"],
        ["algorithm.dynamic_sampling=true", "algorithm.mask_truncated=true"],
        [*EPISODES, "algorithm.importance_sampling=token-mask"],
        ["actor.step_mode=static", "rollout.bitwise=true", "model.dtype=float32"],
    ],
)
def test_the_first_pass_gives_them(overrides: list[str]) -> None:
    config = make_config(*overrides)
    assert plan_old_logprobs(config, ADVANTAGE_ESTIMATORS[config.algorithm.adv_estimator]) == ""
    assert resolve(config).why_recompute == ""
    assert resolve(config).num_scoring_passes == (config.algorithm.kl_coef > 0)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.old_logprobs=recompute"], "'recompute'"),
        (["actor.ppo_mini_batch_size=2"], "4 optimizer steps"),
        (["actor.ppo_mini_batch_size=4"], "2 optimizer steps"),
        (["algorithm.adv_estimator=optimal_token_baseline"], "'optimal_token_baseline' reads them"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "makes rewards of them"),
        (["algorithm.policy_loss=clip_cov"], "'clip_cov' chooses"),
        (["algorithm.policy_loss=kl_cov"], "'kl_cov' chooses"),
        (
            ["algorithm.importance_sampling=token-truncate", "algorithm.importance_normalize=true"],
            "a mean over the whole step",
        ),
        ([*EPISODES, "algorithm.importance_sampling=sequence-mask"], "'sequence-mask' weighs episodes"),
        ([*EPISODES, "algorithm.importance_sampling=product-truncate"], "'product-truncate' weighs episodes"),
        ([*EPISODES, "algorithm.reject_sequence_above=1.0"], "rejects episodes"),
    ],
)
def test_they_are_needed_before(overrides: list[str], reason: str) -> None:
    """The same refuses `bypass`, which leaves no `old_logprobs` to be read."""
    spec = resolve(make_config(*overrides))
    assert reason in spec.why_recompute and spec.num_scoring_passes == 1 + ("reference" in spec.roles)
    if "importance_sampling" not in str(overrides):
        with pytest.raises(UserError) as error:
            resolve(make_config(*overrides, "algorithm.importance_sampling=bypass"))
        assert reason in str(error.value)


def test_an_estimator_of_the_user_reads_them_unless_it_says_otherwise() -> None:
    config = make_config()
    assert "(needs_old_logprobs)" in plan_old_logprobs(
        config, RegisteredEstimator(lambda inputs, config: inputs.values)
    )
    modest = RegisteredEstimator(lambda inputs, config: inputs.values, needs_old_logprobs=False)
    assert plan_old_logprobs(config, modest) == ""
