# SPDX-License-Identifier: Apache-2.0
"""The section `algorithm`: advantages, loss, KL, and plugins."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.config.sections import option

SAMPLED = "sampled"


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Learning from the teachers (section `teachers`)."""

    kind: Literal["sampled", "full", "top_k"] = option(
        SAMPLED,
        "sampled: the difference of log-probs of the sampled token is added to the advantage; full: the loss "
        "compares the whole distributions; top_k: the teacher's k likeliest tokens and all others as one.",
    )
    direction: Literal["reverse", "forward"] = option(
        "reverse", "full, top_k: KL(policy || teacher) (reverse) or KL(teacher || policy) (forward)."
    )
    coef: float = option(1.0, "Weight of the term; with adv_estimator distill it is the only one.", ge=0)
    k: int = option(64, "top_k: tokens of the teacher that are compared one by one.", "tokens", ge=1)
    choose_by: str | None = option(
        None, "Column of the data whose value chooses the teacher (teachers.NAME.values); null: all, by weight."
    )


@dataclass(frozen=True)
class ClipCovOptions:
    """The policy loss clip_cov."""

    ratio: float = option(0.0002, "Share of the tokens of a step that are chosen by their covariance.", gt=0, le=1)
    low: float = option(1.0, "Tokens with a covariance above it may be chosen.")
    high: float = option(5.0, "Tokens with a covariance below it may be chosen.", gt=0)


@dataclass(frozen=True)
class DroOptions:
    """The policy loss dro."""

    beta: float = option(1.0, "Weight of half the squared change of the log-prob.", gt=0)


@dataclass(frozen=True)
class GdpoOptions:
    """The estimator gdpo."""

    rewards: list[str] = option(
        [], "Components that are normalized, as in reward/NAME; none: reward.components, with the weights there."
    )
    weights: list[float] | None = option(None, "Weights of rewards; null: 1 each.")


@dataclass(frozen=True)
class GigpoOptions:
    """The estimator gigpo."""

    step_weight: float = option(1.0, "Weight of the advantage among turns in the same state; 0: grpo.", ge=0)


@dataclass(frozen=True)
class GrpoTurnsOptions:
    """The estimator grpo_turns."""

    baseline: Literal["turn", "group"] = option(
        "turn", "Baseline of a return: the mean of the group's returns at the same turn, or at any turn."
    )


@dataclass(frozen=True)
class KlCovOptions:
    """The policy loss kl_cov."""

    ratio: float = option(0.0002, "Share of the tokens of a step that are chosen by their covariance.", gt=0, le=1)
    coef: float = option(0.1, "Weight of |logprobs - old_logprobs| on the chosen tokens.", ge=0)


@dataclass(frozen=True)
class SapoOptions:
    """The policy loss sapo."""

    tau_pos: float = option(1.0, "Temperature of the gate for positive advantages.", gt=0)
    tau_neg: float = option(1.05, "Temperature of the gate for the others.", gt=0)


# Name of an estimator, loss or aggregation -> the dataclass of its options.
OPTIONS: dict[str, type] = {
    "clip_cov": ClipCovOptions, "dro": DroOptions, "gdpo": GdpoOptions, "gigpo": GigpoOptions,
    "grpo_turns": GrpoTurnsOptions, "kl_cov": KlCovOptions, "sapo": SapoOptions,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages, loss, KL."""

    plugins: list[str] = option(
        [], "Your Python files: estimators, losses, aggregations, engines; their settings: algorithm.options.NAME.KEY."
    )
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # NAME -> dataclass
    adv_estimator: str = option(
        "grpo",
        "gae, grpo, dr_grpo, grpo_passk, grpo_turns, gigpo, rloo, opo, gpg, gdpo, optimal_token_baseline, "
        "tir_optimal_token_baseline, "
        "reinforce_plus_plus, reinforce_plus_plus_baseline, remax, distill (teachers alone), or a plugin's.",
    )
    norm_adv_by_std: bool = option(True, "grpo*, gdpo, gigpo: divide by the standard deviation (else: Dr. GRPO).")
    gamma: float = option(1.0, "Discount per token (gae, reinforce_plus_plus) or turn (gigpo, grpo_turns).", ge=0, le=1)
    gae_lambda: float = option(1.0, "Lambda of generalized advantage estimation.", ge=0, le=1)
    policy_loss: str = option(
        "ppo",
        "ppo (ratio per token), gspo (per sequence), geo_mean (GMPO, likewise), cispo, sapo, dppo_tv, dppo_kl, "
        "clip_cov, kl_cov, dro, policy_gradient, or a plugin's.",
    )
    ratio_by: Literal["branch", "rollout"] = option(
        "branch", "gspo, geo_mean: the sequence is a branch, or a rollout; its branches then share a microbatch."
    )
    clip_eps_low: float = option(
        0.2,
        "The ratio is clipped below at 1 - this (geo_mean: its logarithm at -this; dppo: largest divergence).",
        gt=0,
    )
    clip_eps_high: float = option(
        0.2, "The ratio is clipped above at 1 + this (geo_mean: its logarithm at this; dppo: largest divergence).", gt=0
    )
    dual_clip: float | None = option(
        None,
        "Negative advantages: largest loss per token, times |advantage| (ppo, gspo); dppo: the largest ratio; "
        "null: off.",
        gt=1,
        wrong="would clip every negative advantage",
        hint="3.0 is the value of the paper",
    )
    loss_agg_mode: str = option(
        "token-mean",
        "Denominator: token-mean, token-sum, seq-mean-token-mean, seq-mean-token-sum, constant, a plugin's.",
    )
    loss_scale_factor: float | None = option(
        None, "loss_agg_mode constant: length in the denominator; default: data.max_response_length.", "tokens", gt=0
    )
    kl_coef: float = option(
        0.0, "Weight of the KL term; 0: no reference model is built.", ge=0, hint="0 switches the KL term off"
    )
    kl_type: Literal["k1", "k2", "k3", "abs"] = option(
        "k3", "KL estimator (Schulman), or the absolute difference of log-probs (abs)."
    )
    kl_in: Literal["loss", "reward"] = option("loss", "Where the KL term enters: the loss, or each token's reward.")
    kl_target: float | None = option(
        None, "KL that an adaptive controller approaches by moving kl_coef; null: kl_coef is fixed.", "nats", gt=0
    )
    kl_target_per: Literal["response", "token"] = option(
        "response", "kl_target is the KL of a response, or of a token (as verl's)."
    )
    kl_horizon: float = option(10000.0, "Responses over which the controller acts.", "responses", gt=0)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus (full vocabulary).", ge=0)
    mask_truncated: bool = option(False, "Responses cut at max_response_length enter no loss (DAPO).")
    dynamic_sampling: bool | str = option(
        False,
        "Resample until data.train_batch_size groups have responses that differ in the reward without the overlong "
        "penalty (true; DAPO), with it ('reward'), or in a number of that name that the reward function reports.",
    )
    max_sampling_rounds: int = option(
        10,
        "dynamic_sampling: most rounds of data.train_batch_size prompts in a step; then groups without a signal "
        "fill the batch.",
        "rounds",
        ge=1,
    )
    old_logprobs: Literal["auto", "recompute"] = option(
        "auto",
        "Log-probs before the update: from its first pass where that is one optimizer step and nothing reads them "
        "before (auto), or always from a forward pass (recompute).",
    )
    importance_sampling: Literal[
        "none",
        "token-truncate",
        "token-mask",
        "sequence-truncate",
        "sequence-mask",
        "product-truncate",
        "product-mask",
        "bypass",
    ] = option(
        "none",
        "Correction of the gap between engine and trainer: weight exp(old_logprobs - rollout_logprobs) per token, "
        "or per importance_by (sequence: geometric mean, product: product of its tokens), truncated at "
        "importance_high, or masked unless within [importance_low, importance_high]. bypass: no weights; the policy "
        "loss takes rollout_logprobs as old_logprobs.",
    )
    importance_by: Literal["rollout", "branch"] = option(
        "rollout", "Modes sequence and product, reject_sequence_above: the sequence is a rollout, or one branch of it."
    )
    importance_normalize: bool = option(
        False, "Divide the weights by their mean over the step's tokens (sequence, product: responses)."
    )
    importance_low: float = option(0.5, "Weights below it are masked (mask modes).", ge=0)
    importance_high: float = option(2.0, "Weights above it are truncated or masked.", gt=0)
    distillation: DistillationConfig = DistillationConfig()
    reject_sequence_above: float | None = option(
        None,
        "Rollouts with a larger |old_logprobs - rollout_logprobs| at a token get no policy gradient; null: off.",
        gt=0,
    )


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Learning from preferences (launch/pretrain_preference.py; docs/preferences.md)."""

    loss: str = option(
        "dpo",
        "Pairs: dpo, robust, ipo, simpo, orpo; single responses with a label: kto; a reward model from pairs: "
        "bradley_terry, from steps: process; or a plugin's.",
    )
    beta: float = option(
        0.1, "Weight of the log-ratios to the reference; simpo: of the mean log-probs, orpo: of the odds ratio.", gt=0
    )
    label_smoothing: float = option(
        0.0, "Share of labels that are wrong (dpo, simpo, bradley_terry: smoothing; robust: correction).", ge=0, lt=0.5
    )
    simpo_gamma: float = option(0.5, "simpo: least margin of the rewards.", ge=0)
    nll_coef: float | None = option(
        None, "Weight of the mean negative log-prob of the chosen responses' tokens; null: 1 for orpo, else 0.", ge=0
    )
    center_coef: float = option(0.0, "bradley_terry: weight of (chosen + rejected score)^2.", ge=0)
    kto_weights: list[float] = option([1.0, 1.0], "kto: weights of desirable and undesirable responses.")
    reference_logprobs: str | None = option(None, "File (.npz) of the reference's log-probs, written before step 1.")

    @property
    def is_paired(self) -> bool:
        """Whether the loss compares two responses."""
        return self.loss not in ("kto", "process")
