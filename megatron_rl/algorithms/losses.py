# SPDX-License-Identifier: Apache-2.0
"""The policy's total loss: policy-gradient term, KL, entropy and distillation, with metrics; PPO's policy loss.

Also KL(policy || reference) per token (J. Schulman, "Approximating KL Divergence", 2020), and its adaptive coefficient.

All shapes depend on t only, as CUDA graphs require; this includes sums per packed sequence.

`loss_weights` hold global denominators: sums over microbatches and DP ranks give the optimizer step's loss, whatever
they are. An aggregation gives each sequence one weight; a sequence without tokens in the loss still counts in
`num_seqs`. The ledger of an optimizer step compares the denominators expected from the response lengths with those that
the losses counted. A mismatch reveals a token that was dropped, repeated, or divided by a local count.

A policy loss returns the loss of each token, and whether its gradient is clipped; `policy_losses.py` has the further
ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megatron_rl.algorithms.catalog import (  # noqa: F401  plugins import the decorators from here
    LOSS_AGGREGATIONS,
    POLICY_LOSSES,
    register_loss_aggregation,
    register_policy_loss,
)
from megatron_rl.config.algorithm import OPTIONS
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.types import LossLedger, UserError

MAX_LOG_RATIO = 20.0  # bound of exponentiated log-ratios: e^20 = 4.9e8 does not overflow float32, even squared


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss for one microbatch, [t] each; sequences (branches of rollouts) are contiguous and whole.

    Attributes:
        logprobs: of the current policy, differentiable.
        old_logprobs: of the policy before the update.
        sequence_ids: int64; -1 on padding.
        chosen: bool, tokens picked by `choose_tokens`, or `None`.
        rollout_rows: int64, rows since the first row of the token's rollout, whose branches are one sequence of the
            loss then; `None`: each sequence is.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    chosen: torch.Tensor | None = None
    options: Any = None
    rollout_rows: torch.Tensor | None = None


def number_segments(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Number the runs of equal ids consecutively from 0, [t] int64; padding is a run of its own."""
    return sequence_ids.diff(prepend=sequence_ids[:1]).ne(0).cumsum(0)


def sum_per_segment(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Give every token the sum over its segment, [t] float64, because a GPU adds in arbitrary order."""
    sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    return sums.index_add(0, segments, values.double())[segments]


def mark_first(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Mark the first token of each run of equal ids, [t] bool."""
    return sequence_ids.diff(prepend=sequence_ids[:1] - 1).ne(0)


def find_options(config: AlgorithmConfig, name: str) -> Any:
    """Return the options of a registered function, their defaults if the config has none; `None` if it takes none."""
    if name in config.options or name not in OPTIONS:
        return config.options.get(name)
    return OPTIONS[name]()  # a config that was not read from settings


_SETTING = "algorithm.policy_loss"


def compute_policy_loss(
    inputs: PolicyLossInputs,
    entropy: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    importance_weights: torch.Tensor | None,
    loss_weights: torch.Tensor,
    config: AlgorithmConfig,
    divergence: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the configured policy loss with its KL, entropy and distillation terms.

        loss = sum_t w_t (importance_t policy_t + kl_coef KL_t - entropy_coef H_t + distillation.coef D_t)

    Args:
        inputs: values at masked positions are ignored.
        entropy, divergence: [t], differentiable; divergence from a teacher, or `None`.
        ref_logprobs: [t], or `None`; the KL term also needs `kl_in` = "loss".
        importance_weights: [t] from `compute_importance_weights`, or `None`.
        loss_weights: [t], 0 at masked positions.

    Returns:
        The loss (scalar), and metrics: weighted sums "loss", "policy", "kl_term", "entropy_term", "weights"; unweighted
        sums "kl", "entropy", "clipped", "clipped_low" (of ratios below 1), "tokens", "divergence" (if any) and
        "loss/<name>/<metric>"; the maximum "max/deviation" of |logprobs - old_logprobs|.

    Raises:
        UserError: unknown policy loss, or a plugin's result is not [t] tensors.
    """
    mask, tokens = inputs.loss_mask, _blank_masked(inputs)

    def weighted_sum(per_token: torch.Tensor) -> torch.Tensor:
        return (loss_weights * torch.where(mask, per_token, 0.0)).sum()

    token_loss, is_clipped, reported = _call_policy_loss(tokens, config)
    policy = weighted_sum(token_loss if importance_weights is None else token_loss * importance_weights)
    kl = nothing = torch.zeros_like(policy)
    if ref_logprobs is not None:
        kl = compute_kl(tokens.logprobs, torch.where(mask, ref_logprobs, 0.0), config.kl_type)
    kl_term = config.kl_coef * weighted_sum(kl) if config.kl_in == "loss" else nothing
    entropy_term = -config.entropy_coef * weighted_sum(entropy) if config.entropy_coef else nothing
    loss = policy + kl_term + entropy_term
    if divergence is not None:
        loss = loss + config.distillation.coef * weighted_sum(divergence)
        reported["divergence"] = torch.where(mask, divergence.detach(), 0.0).sum()
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "policy": policy.detach(),
            "kl_term": kl_term.detach(),
            "entropy_term": entropy_term.detach(),
            "kl": kl.detach().sum(),
            "entropy": torch.where(mask, entropy, 0.0).sum(),
            "clipped": (mask & is_clipped).sum().float(),
            "clipped_low": (mask & is_clipped & (tokens.logprobs < tokens.old_logprobs)).sum().float(),
            "tokens": mask.sum().float(),
            "weights": weighted_sum(torch.ones_like(loss_weights)),
            "max/deviation": (tokens.logprobs - tokens.old_logprobs).abs().max(),
        }
    return loss, metrics | reported


@torch.no_grad()
def find_clipped(inputs: PolicyLossInputs, config: AlgorithmConfig) -> torch.Tensor:
    """Return the tokens that the policy loss clips: [t] bool, False at masked positions."""
    _, is_clipped, _ = _call_policy_loss(_blank_masked(inputs), config)
    return inputs.loss_mask & is_clipped


def _blank_masked(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Zero the inputs at masked positions, so that garbage reaches neither a formula nor its gradient."""
    logprobs, old_logprobs, advantages = (
        torch.where(inputs.loss_mask, x, 0.0) for x in (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
    )
    return replace(inputs, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)


def _call_policy_loss(
    inputs: PolicyLossInputs, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Call the configured policy loss and check its results: token losses, clipped mask, sums of metrics."""
    name, shape = config.policy_loss, list(inputs.loss_mask.shape)
    found = POLICY_LOSSES[name](replace(inputs, options=find_options(config, name)), config)
    parts: list[Any] = list(found) if isinstance(found, tuple) else [found]
    metrics = parts.pop() if len(parts) == 3 and isinstance(parts[2], dict) else {}
    if (
        len(parts) == 2
        and all(isinstance(part, torch.Tensor) and list(part.shape) == shape for part in (*parts, *metrics.values()))
        and parts[1].dtype == torch.bool
    ):
        sums = {
            f"loss/{name}/{metric}": torch.where(inputs.loss_mask, values.detach().float(), 0.0).sum()
            for metric, values in metrics.items()
        }
        return parts[0], parts[1], sums
    words = [*map(_describe, parts), *(f"{metric}: {_describe(values)}" for metric, values in metrics.items())]
    raise UserError(
        f'the policy loss "{name}" returned {", ".join(words) or "nothing"}',
        source=_SETTING,
        expected=f"a tuple of two tensors {shape}: the loss of each token, and whether it is clipped (bool); a third "
        "may be a dict of metrics, tensors of this shape",
        hint="return the loss of each token, not their mean: algorithm.loss_agg_mode aggregates it",
    )


def _describe(part: Any) -> str:
    is_tensor = isinstance(part, torch.Tensor)
    return f"{list(part.shape)} {part.dtype}".replace("torch.", "") if is_tensor else type(part).__name__


def compute_ppo_loss(inputs: PolicyLossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the clipped surrogate per token (PPO, arXiv 1707.06347, eq. 7).

        ratio_t = exp(logprobs_t - old_logprobs_t)
        loss_t = -min(ratio_t A_t, clip(ratio_t, 1 - eps_low, 1 + eps_high) A_t)

    Unequal bounds are clip-higher (DAPO, arXiv 2503.14476, eq. 10); `dual_clip` also bounds the loss of negative
    advantages (arXiv 1912.09729).
    """
    return clip_surrogate(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config, config.dual_clip)


def clip_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig, dual_clip: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute PPO's clipped surrogate with optional dual clip, and whether the clip removes the gradient."""
    ratio = bounded_ratio(log_ratio)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.clip_eps_low, 1.0 + config.clip_eps_high) * advantages
    is_clipped, token_loss = clipped > unclipped, torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        is_negative, highest = advantages < 0, -dual_clip * advantages
        is_clipped = is_clipped | (is_negative & (highest < token_loss))
        token_loss = torch.where(is_negative, torch.minimum(token_loss, highest), token_loss)
    return token_loss, is_clipped


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp of the log-ratio bounded to +-20: beyond, gradients would overflow to inf * 0 = nan."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


_MAX_ERROR = 0.2


def compute_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Estimate the KL divergence per token, [t], with log r = ref_logprobs - logprobs.

        k1 = -log r            unbiased, high variance
        k2 = (log r)^2 / 2     biased, low variance
        k3 = r - 1 - log r     unbiased, low variance, never negative
        abs = |log r|          a distance, no estimate of the divergence

    Beyond log r = 20, k3 continues along its tangent in r, to avoid overflow.
    """
    log_ratio = ref_logprobs - logprobs
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return 0.5 * log_ratio.square()
    if kl_type == "k3":
        bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
        return torch.expm1(bounded) + bounded.exp() * (log_ratio - bounded) - log_ratio
    if kl_type == "abs":
        return log_ratio.abs()
    raise ValueError(f"unknown kl_type {kl_type!r}")


class AdaptiveKL:
    """Proportional controller in log space (Ziegler et al., arXiv 1909.08593).

    error = clip(KL / target - 1, -0.2, 0.2)               KL in nats
    coef <- coef (1 + gain error)                          gain = min(num_responses / horizon, 1)
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, measured_kl: float, num_responses: int) -> None:
        """Raise the coefficient if the KL is above the target, lower it if below."""
        error = min(max(measured_kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        self.coef *= 1.0 + error * min(num_responses / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return the current coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient; an empty state changes nothing."""
        self.coef = state.get("coef", self.coef)


def measure_for_target(kl: np.ndarray, tokens: np.ndarray, config: AlgorithmConfig) -> float:
    """Return the KL to compare with `kl_target`: the mean over responses of each response's KL.

    With `kl_target_per` "token", a response's KL is divided by its number of loss tokens.

    Args:
        kl: [num_rollouts], summed over loss tokens.
        tokens: [num_rollouts], number of loss tokens.
    """
    return float(np.mean(kl / np.maximum(tokens, 1) if config.kl_target_per == "token" else kl))


def has_importance_weights(config: AlgorithmConfig) -> bool:
    """Return whether the config demands importance weights or the rejection of responses."""
    return config.importance_sampling not in ("none", "bypass") or config.reject_sequence_above is not None


@dataclass(frozen=True)
class AggregationInputs:
    """Inputs of an aggregation, over all ranks of one minibatch."""

    lengths: np.ndarray  # [num_seqs] float64, tokens in the loss of each rollout; 0 if fully masked
    max_response_length: int | float  # `algorithm.loss_scale_factor`, or `data.max_response_length`
    options: Any = None


@dataclass(frozen=True)
class SequenceWeights:
    """Output of an aggregation."""

    weights: np.ndarray  # [num_seqs] float64 weight of each token of a sequence; 0 without tokens in the loss
    metrics: Mapping[str, float] = field(default_factory=dict)


def weigh_token_mean(inputs: AggregationInputs) -> np.ndarray:
    """Return 1 / sum_j len_j (DAPO, arXiv 2503.14476)."""
    return np.full(len(inputs.lengths), 1.0 / max(inputs.lengths.sum(), 1.0))


def weigh_token_sum(inputs: AggregationInputs) -> np.ndarray:
    """Return 1."""
    return np.ones(len(inputs.lengths))


def weigh_seq_mean_token_mean(inputs: AggregationInputs) -> np.ndarray:
    """Return 1 / (num_seqs * len_i) (GRPO, arXiv 2402.03300)."""
    return 1.0 / (len(inputs.lengths) * np.maximum(inputs.lengths, 1.0))


def weigh_seq_mean_token_sum(inputs: AggregationInputs) -> np.ndarray:
    """Return 1 / num_seqs."""
    return np.full(len(inputs.lengths), 1.0 / len(inputs.lengths))


def weigh_constant(inputs: AggregationInputs) -> np.ndarray:
    """Return 1 / (num_seqs * max_response_length) (Dr. GRPO, arXiv 2503.20783)."""
    return np.full(len(inputs.lengths), 1.0 / (len(inputs.lengths) * inputs.max_response_length))


def aggregate(
    mode: str, response_lengths: Sequence[int] | np.ndarray, max_response_length: int | float, options: Any = None
) -> SequenceWeights:
    """Compute the token weight of each sequence of one minibatch.

    Args:
        response_lengths: tokens in the loss per sequence of the global minibatch.
        max_response_length: the constant of mode "constant".

    Raises:
        UserError: unknown mode, or a plugin's weights are not finite or not one per sequence.
    """
    lengths = np.asarray(response_lengths, np.float64)
    found = LOSS_AGGREGATIONS[mode](AggregationInputs(lengths, max_response_length, options))
    weights, metrics = found if isinstance(found, tuple) else (found, {})
    weights = np.asarray(weights)
    if weights.shape != lengths.shape or not (weights.dtype.kind in "fiu" and np.isfinite(weights).all()):
        raise UserError(
            f'the aggregation "{mode}" returned {weights.dtype} {list(weights.shape)}: {weights}',
            source="algorithm.loss_agg_mode",
            expected=f"a finite weight for each of {len(lengths)} sequences",
            hint="return one number per entry of inputs.lengths, and divide by no length that may be 0",
        )
    return SequenceWeights(
        np.where(lengths > 0, weights.astype(np.float64), 0.0), {name: float(value) for name, value in metrics.items()}
    )


_WEIGHT_TOLERANCE = 1e-4  # weights are summed in float32
_TERMS = {"policy": "policy", "kl": "kl_term", "entropy": "entropy_term"}


class LedgerError(RuntimeError):
    """Error of a loss that was not aggregated over the whole minibatch: a bug."""


def build_ledger(
    mode: str, response_lengths_in_loss: Sequence[int], max_response_length: int | float, options: Any = None
) -> LossLedger:
    """Compute the counts and the weight sum that the losses of one minibatch must match.

    A fully masked response (length 0) still counts as a sequence. Modes from plugins have denominator 1.

    Args:
        response_lengths_in_loss: tokens in the loss per response of the global minibatch.
        max_response_length: the constant of mode "constant".
    """
    lengths = np.asarray(response_lengths_in_loss, np.int64)
    found = aggregate(mode, lengths, max_response_length, options)
    num_tokens, num_sequences = int(lengths.sum()), len(lengths)
    denominators = {
        "token-mean": max(num_tokens, 1),
        "seq-mean-token-mean": num_sequences,
        "seq-mean-token-sum": num_sequences,
        "constant": num_sequences * max_response_length,
    }
    metrics = {f"aggregation/{mode}/{name}": value for name, value in found.metrics.items()}
    return LossLedger(
        mode, num_tokens, num_sequences, float(denominators.get(mode, 1.0)), float(found.weights @ lengths), metrics
    )


def check_ledger(ledger: LossLedger, tokens: float, weight_sum: float) -> None:
    """Compare the tokens and weights that the losses of all microbatches and ranks counted with the ledger.

    Raises:
        LedgerError: token counts differ, or weight sums differ by more than 1e-4 (relative).
    """
    same_weights = math.isclose(weight_sum, ledger.weight_sum, rel_tol=_WEIGHT_TOLERANCE, abs_tol=1e-12)
    if tokens != ledger.num_tokens or not same_weights:
        raise LedgerError(
            f"loss_agg_mode {ledger.mode}: the minibatch has {ledger.num_tokens} tokens in the loss in "
            f"{ledger.num_sequences} sequences and loss weights that sum to {ledger.weight_sum:.8g}, but the losses of "
            f"all microbatches and ranks counted {tokens:.15g} tokens and weights that sum to {weight_sum:.8g}"
        )


def is_ledger_met(ledger: LossLedger, tokens: torch.Tensor, weight_sum: torch.Tensor) -> torch.Tensor:
    """Return whether `check_ledger` would pass, as a 0-d bool tensor, without a device sync."""
    largest = weight_sum.abs().clamp(min=abs(ledger.weight_sum))
    same_weights = (weight_sum - ledger.weight_sum).abs() <= (_WEIGHT_TOLERANCE * largest).clamp(min=1e-12)
    return (tokens == ledger.num_tokens) & same_weights


def ledger_metrics(ledger: LossLedger, totals: Mapping[str, float]) -> dict[str, float]:
    """Return numerator and denominator of each loss term, named "ledger/<term>/...", and the aggregation's metrics.

    Args:
        totals: metrics of `compute_policy_loss` or `compute_value_loss`, summed over microbatches and ranks.
    """
    metrics = dict(ledger.metrics)
    for term, key in (_TERMS if "policy" in totals else {"value": "loss"}).items():
        metrics[f"ledger/{term}/numerator"] = totals[key] * ledger.denominator
        metrics[f"ledger/{term}/denominator"] = ledger.denominator
    return metrics
