# SPDX-License-Identifier: Apache-2.0
"""Compare verl's functions with ours for every estimator, loss, KL and reward that a recipe may select by a verl name.

    python tools/compare_verl.py CHECKOUT        # a checkout of verl; without one, skipped

Losses and KL are compared in value and gradient; relative differences up to 1e-6 count as equal. Rewards of random
texts are compared exactly; the difference is the share of texts. Intended differences are listed with the reason.
Exit code: 0, or 1 for any other difference.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_rl.algorithms.catalog import CHOOSES_TOKENS
from megatron_rl.algorithms.importance import Responses, compute_importance_weights, normalize_weights
from megatron_rl.algorithms.losses import (
    AdaptiveKL,
    PolicyLossInputs,
    aggregate,
    compute_kl,
    compute_policy_loss,
    measure_for_target,
)
from megatron_rl.algorithms.policy_losses import choose_tokens
from megatron_rl.compat.name_groups import AGGREGATIONS, ESTIMATORS, KL_TYPES, LOSS_MODES
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.rewards.public_sets import find_scorer
from megatron_rl.run.loading import load_config
from megatron_rl.training.roles.critic import compute_value_loss
from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools._verl_checkout import load_verl

TOLERANCE = 1e-6
_NUM_TEXTS = 6_000
_SEEDS = (0, 1, 2)
_GROUP_SIZES, _WIDTH = [4, 3, 5, 2], 12
_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
_NAMES = ("actor_rollout_ref.model.path=policy", "data.train_files=train.jsonl", "data.train_batch_size=4")
# Settings by verl's names. The token shares are chosen so that verl's selection of tokens is deterministic.
_LOSS_SETTINGS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05}
_COV_SETTINGS = {
    "clip_cov_ratio": 1.0,
    "clip_cov_lb": 0.05,
    "clip_cov_ub": 2.0,
    "kl_cov_ratio": 0.2,
    "ppo_kl_coef": 0.1,
    "dro_beta": 0.3,
}
_REWARD_WEIGHTS = {"accuracy": 1.0, "format": 0.3}  # of gdpo
# Differences that depend on what surrounds verl's function.
_ELSEWHERE = {
    ("estimator", "optimal_token_baseline"): "episodes: positions count the tokens of tools there, and only tokens in "
    "the loss here, as in tir_optimal_token_baseline",
    ("estimator", "grpo_passk"): "a group of one: an error in verl, advantage 0 here",
    ("loss", "seq-mean-token-sum-norm"): "without loss_scale_factor verl divides by the longest response of each micro "
    "batch, and data.max_response_length divides here; above both are equal",
    **dict.fromkeys(
        (("loss", "clip_cov"), ("loss", "kl_cov")),
        "tokens are chosen once a step from old_logprobs here, and again in each micro batch in verl; above both "
        "choose from the same log-probs",
    ),
    ("KL", "full"): "refused: needs both distributions; verl raises NotImplementedError",
}
# Data sources with different scorers, and what random responses and truths are made of.
DATA_SOURCES = ("openai/gsm8k", "HuggingFaceH4/MATH-500", "math_dapo", "searchR1_nq")
_MARKS = ("{}", "\\boxed{{{}}}", "Answer: {}", "#### {}", "<answer>{}</answer>")
_WORDS = (
    r"1 34 0.5 .5 \frac \frac12 \frac{1}{2} \sqrt \sqrt3 { } \boxed{ $ \fbox{ \text{and} \% \$ x= 1/2 , 1,000 dollars "
    r"\left( ^\circ \! \\ - \mbox{m} tfrac <answer> </answer> The"
)
_FRAGMENTS = (*_WORDS.split(), " ", "\n", "a ", "\\boxed ", "\\text{ cm}", "Answer: ", "#### ")
_NOT_IN_CHECKOUT = "this checkout has no such loss; the formula is the paper's"
_FLOAT32 = "verl sums squares in float32; its other form, grpo, is equal"
_ONE = "a group of one: verl keeps the reward itself, here there is nothing to compare with and the advantage is 0"


@dataclass(frozen=True)
class Row:
    """One comparison; `reason` explains an intended difference or a skip."""

    kind: str
    verl: str
    ours: str
    difference: float | None
    reason: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the difference is unintended."""
        return not self.reason and not (self.difference is not None and self.difference <= TOLERANCE)

    def cells(self) -> tuple[str, ...]:
        """Return the printed cells."""
        found = "-" if self.difference is None else f"{self.difference:.1e}"
        return self.kind, self.verl, self.ours, found, self.reason or ("DIFFERENT" if self.is_wrong else "equal")


class Batch:
    """Random responses, padded for verl and packed for ours after a prompt token."""

    def __init__(self, seed: int, group_sizes: list[int] | None = None, *, with_holes: bool = False) -> None:
        self.group_sizes = np.array(group_sizes or _GROUP_SIZES)
        self._random, size = torch.Generator().manual_seed(seed), int(self.group_sizes.sum())
        lengths = torch.randint(1, _WIDTH + 1, (size,), generator=self._random)
        lengths[0] = _WIDTH
        self.lengths, self.mask = lengths, torch.arange(_WIDTH) < lengths[:, None]
        self.index = np.repeat(np.arange(len(self.group_sizes)), self.group_sizes)
        self.old = -self.draw().abs() - 0.05
        self.new, self.ref, self.rollout = (-(self.old + scale * self.draw()).abs() for scale in (0.6, 0.3, 0.3))
        self.advantages = self.draw()[:, :1].expand(-1, _WIDTH) * self.mask
        self.scores = torch.randint(0, 3, (size,), generator=self._random).double() / 2
        self.baselines = torch.randint(0, 3, (size,), generator=self._random).double()[self.index]
        last = torch.arange(_WIDTH) == lengths[:, None] - 1
        self.components = {name: self.scores if i else self.draw()[:, 0] for i, name in enumerate(_REWARD_WEIGHTS)}
        if with_holes:  # tokens of tools between a policy's own
            self.mask &= (self.draw() > -0.5) | last
        self.outcome = torch.where(last, self.scores[:, None], 0.0)
        self.rewards = (self.outcome - 0.05 * self.draw()) * self.mask
        self.values, self.squares = self.draw() * self.mask, self.old.exp().square() + 0.1

    def draw(self) -> torch.Tensor:
        """Draw padded normal numbers."""
        return torch.randn(int(self.group_sizes.sum()), _WIDTH, generator=self._random, dtype=torch.float64)

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """[b, w] -> [t], NaN at prompts."""
        return torch.cat(
            [
                torch.cat([row.new_full((1,), torch.nan), row[:n]])
                for row, n in zip(padded, self.lengths.tolist(), strict=True)
            ]
        )

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the values of the tokens in the loss, [t] -> [tokens], in verl's order."""
        return packed[self.packed_mask]

    @property
    def packed_mask(self) -> torch.Tensor:
        """[t] bool, False at prompts."""
        return self.pack(self.mask.double()) == 1

    @property
    def sequence_ids(self) -> torch.Tensor:
        """[t] int64."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths + 1)

    def loss_inputs(self, logprobs: torch.Tensor, chosen: torch.Tensor | None = None) -> PolicyLossInputs:
        """Pack policy loss inputs."""
        return PolicyLossInputs(
            logprobs, self.pack(self.old), self.pack(self.advantages), self.packed_mask, self.sequence_ids, chosen
        )


def read_settings(*overrides: str) -> AlgorithmConfig:
    """Translate verl overrides to our settings."""
    return load_config(None, [*_NAMES, *overrides]).config.algorithm


def measure(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest number (at least 1)."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / max(float(expected.abs().max()), 1.0))


def compare_estimators(verl: SimpleNamespace) -> Iterator[Row]:
    """Compare advantages and returns."""
    for name, _ in ESTIMATORS:
        config = read_settings(
            f"algorithm.adv_estimator={name}",
            "algorithm.gamma=0.95",
            "algorithm.lam=0.9",
            f"algorithm.gdpo_reward_keys=[{','.join(_REWARD_WEIGHTS)}]",
            f"algorithm.gdpo_reward_weights={list(_REWARD_WEIGHTS.values())}",
        )
        ours = config.adv_estimator
        worst = max(_compare_advantages(verl, name, config, Batch(seed)) for seed in _SEEDS)
        yield Row("estimator", name, ours, worst, _FLOAT32 if name == "grpo_vectorized" else "")
        if name in ("gae", "reinforce_plus_plus", "tir_optimal_token_baseline"):
            worst = max(_compare_advantages(verl, name, config, Batch(seed, with_holes=True)) for seed in _SEEDS)
            yield Row("estimator", f"{name}, episodes", ours, worst)
        if name in ("grpo", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline", "optimal_token_baseline"):
            yield Row("estimator", name, ours, _compare_advantages(verl, name, config, Batch(0, [1, 4, 1])), _ONE)
        if name == "remax":
            worst = _compare_advantages(verl, name, config, Batch(0), with_kl=True)
            yield Row(
                "estimator",
                name,
                ours,
                worst,
                "KL in the reward: each token gets what follows it in verl, all of the response's here",
            )


def _compare_advantages(
    verl: SimpleNamespace, name: str, config: AlgorithmConfig, batch: Batch, with_kl: bool = False
) -> float:
    rewards = batch.outcome if name == "remax" and not with_kl else batch.rewards
    given: dict[str, Any] = {"token_level_rewards": rewards.clone(), "response_mask": batch.mask.double()}
    if name == "gae":
        given |= {"values": batch.values, "gamma": config.gamma, "lam": config.gae_lambda}
    elif name.endswith("optimal_token_baseline"):
        given |= {"index": batch.index, "old_log_probs": batch.old, "sum_pi_squared": batch.squares}
    else:
        settings = verl.ActorConfig(
            gamma=config.gamma,
            norm_adv_by_std_in_grpo=config.norm_adv_by_std,
            gdpo_reward_keys=list(_REWARD_WEIGHTS),
            gdpo_reward_weights=list(_REWARD_WEIGHTS.values()),
        )
        given |= {"config": settings, "index": batch.index}
        if name == "remax":
            given["reward_baselines"] = batch.baselines
        if name == "gdpo":
            attended = torch.cat([torch.ones(len(batch.mask), 1, dtype=torch.bool), batch.mask], dim=1)
            given["batch"] = {"prompts": attended[:, :1], "attention_mask": attended}
            given["non_tensor_batch"] = batch.components
    expected, expected_returns = verl.core.get_adv_estimator_fn(name)(**given)
    found = compute_advantages(
        AdvantageInputs(
            scores=rewards.sum(1).numpy(),
            group_sizes=batch.group_sizes,
            baselines=batch.baselines[np.cumsum(batch.group_sizes) - 1].numpy(),
            token_rewards=batch.pack(rewards),
            values=batch.pack(batch.values),
            loss_mask=batch.packed_mask,
            sequence_ids=batch.sequence_ids,
            group=dist.group.WORLD,
            old_logprobs=batch.pack(batch.old),
            sum_pi_squared=batch.pack(batch.squares),
            components={name: values.numpy() for name, values in batch.components.items()},
        ),
        config,
    )
    worst = measure(batch.unpack(found.advantages), expected[batch.mask])
    if found.returns is not None:
        worst = max(worst, measure(batch.unpack(found.returns), expected_returns[batch.mask]))
    return worst


def compare_losses(verl: SimpleNamespace) -> Iterator[Row]:
    """Compare every loss mode under every aggregation."""
    for name, ours in LOSS_MODES.items():
        if name not in verl.core.POLICY_LOSS_REGISTRY:
            yield Row("loss", name, ours, None, _NOT_IN_CHECKOUT)
            continue
        for aggregation, _ in AGGREGATIONS:
            config = read_settings(
                f"{_ACTOR}.policy_loss.loss_mode={name}",
                f"{_ACTOR}.loss_agg_mode={aggregation}",
                *(f"{_ACTOR}.{key}={value}" for key, value in _LOSS_SETTINGS.items()),
                *(f"{_ACTOR}.policy_loss.{key}={value}" for key, value in _COV_SETTINGS.items()),
            )
            worst = max(_compare_loss(verl, name, aggregation, config, Batch(seed)) for seed in _SEEDS)
            yield Row("loss", f"{name}, {aggregation}", f"{ours}, {config.loss_agg_mode}", worst)
    yield Row(
        "loss",
        "vanilla without clip_ratio_c",
        f"dual_clip={read_settings().dual_clip}",
        abs((read_settings().dual_clip or 0.0) - 3.0),
    )


def _compare_loss(verl: SimpleNamespace, name: str, aggregation: str, config: AlgorithmConfig, batch: Batch) -> float:
    theirs = batch.new.clone().requires_grad_()
    settings = verl.ActorConfig(
        clip_ratio=0.2, global_batch_info={}, policy_loss=verl.ActorConfig(**_COV_SETTINGS), **_LOSS_SETTINGS
    )
    expected, _ = verl.core.get_policy_loss_fn(name)(
        old_log_prob=batch.old,
        log_prob=theirs,
        advantages=batch.advantages,
        response_mask=batch.mask.double(),
        loss_agg_mode=aggregation,
        config=settings,
    )
    expected.backward()
    ours = batch.pack(batch.new).requires_grad_()
    new = batch.pack(batch.new)
    inputs = PolicyLossInputs(new, new, batch.pack(batch.advantages), batch.packed_mask, batch.sequence_ids)
    chosen = choose_tokens(inputs, config, dist.group.WORLD) if config.policy_loss in CHOOSES_TOKENS else None
    assert chosen is None or 0 < chosen.sum() < batch.packed_mask.sum(), "the comparison needs both kinds of tokens"
    weights = aggregate(config.loss_agg_mode, batch.lengths.tolist(), _WIDTH).weights
    loss, _ = compute_policy_loss(
        batch.loss_inputs(ours, chosen),
        torch.zeros_like(ours),
        None,
        None,
        torch.from_numpy(weights)[batch.sequence_ids] * batch.packed_mask,
        config,
    )
    loss.backward()
    return max(measure(loss, expected), measure(batch.unpack(ours.grad), theirs.grad[batch.mask]))


def compare_kl(verl: SimpleNamespace) -> Iterator[Row]:
    """Compare KL estimators and the adaptive coefficient."""
    for name, ours in KL_TYPES.items():
        for seed, scale, reason in ((0, 1.0, ""), (1, 30.0, "beyond 10 verl cuts k3 and its gradient off")):
            if reason and ours != "k3":
                continue
            batch, found = Batch(seed), []
            for function in (
                lambda p, q, kl=name: verl.core.kl_penalty(p, q, kl),
                lambda p, q, kl=ours: compute_kl(p, q, kl),
            ):
                logprobs = (batch.ref + scale * (batch.old - batch.ref)).requires_grad_()
                value = function(logprobs, batch.ref)
                value.sum().backward()
                found.append((value, logprobs.grad))
            (theirs, their_gradient), (mine, my_gradient) = found
            yield Row("KL", name, ours, max(measure(mine, theirs), measure(my_gradient, their_gradient)), reason)
    config = read_settings(
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.05",
        "algorithm.kl_ctrl.kl_coef=0.2",
    )
    theirs = verl.core.AdaptiveKLController(0.2, 0.05, config.kl_horizon)
    ours = AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
    for seed in range(20):
        batch = Batch(seed)
        kl = compute_kl(batch.old, batch.ref, "k3") * batch.mask
        theirs.update(float((kl.sum(1) / batch.lengths).mean()), len(kl))
        ours.update(measure_for_target(kl.sum(1).numpy(), batch.lengths.numpy(), config), len(kl))
    yield Row("KL", "kl_ctrl.type=adaptive", "kl_target per token", abs(ours.coef - theirs.value))


def compare_the_rest(verl: SimpleNamespace) -> Iterator[Row]:
    """Compare importance weights and value loss."""
    for level in ("token", "sequence"):
        for is_normalized in (False, True):
            config = read_settings(
                f"{_CORRECTION}.rollout_is={level}",
                f"{_CORRECTION}.rollout_is_threshold=1.5",
                f"{_CORRECTION}.rollout_is_batch_normalize={is_normalized}",
            )
            worst = 0.0
            for batch in map(Batch, _SEEDS):
                expected, _ = verl.correction.compute_rollout_correction_weights(
                    batch.old - batch.rollout, batch.mask.double(), level, 1.5, is_normalized
                )
                responses = Responses.of_sequences(batch.sequence_ids)
                found, sums = compute_importance_weights(
                    batch.pack(batch.old), batch.pack(batch.rollout), batch.packed_mask, responses, config
                )
                sums = {name: float(value) for name, value in sums.items()}
                found = normalize_weights(found, sums) if config.importance_normalize else found
                worst = max(worst, measure(batch.unpack(found), expected[batch.mask]))
            yield Row(
                "importance", f"rollout_is={level}" + ", normalized" * is_normalized, config.importance_sampling, worst
            )
    worst = 0.0
    for batch in map(Batch, _SEEDS):
        expected, _ = verl.core.compute_value_loss(batch.new, batch.ref, batch.old, batch.mask.double(), 0.2)
        weights = batch.packed_mask / batch.packed_mask.sum()
        values = [batch.pack(padded) for padded in (batch.new, batch.old, batch.ref)]
        found, _ = compute_value_loss(*values, batch.packed_mask, weights, 0.2)
        worst = max(worst, measure(found, expected))
    yield Row("critic", "value loss, cliprange_value", "value_clip", worst)
    for (kind, name), reason in _ELSEWHERE.items():
        yield Row(kind, name, "-", None, reason)


def draw_texts(count: int) -> Iterator[tuple[str, str]]:
    """Draw random responses, marked or not, and their ground truths."""
    draw = random.Random(0)
    for _ in range(count):
        truth = "".join(draw.choices(_FRAGMENTS, k=draw.randrange(1, 4)))
        before, after = ("".join(draw.choices(_FRAGMENTS, k=draw.randrange(3))) for _ in range(2))
        yield before + draw.choice(_MARKS).format(truth if draw.random() < 0.7 else before) + after, truth


def compare_rewards(verl: SimpleNamespace) -> Iterator[Row]:
    """Compare the scores of each public data set."""
    for source in DATA_SOURCES:
        differing, score = 0, find_scorer(source)
        for response, text in draw_texts(_NUM_TEXTS):
            truth: Any = {"target": [text, "34"]} if source.startswith("searchR1") else text
            with contextlib.redirect_stdout(io.StringIO()):
                theirs = verl.score(source, response, truth)
            ours = score(response, truth)
            pairs = [(ours[key], theirs[key]) for key in ours] if isinstance(ours, dict) else [(ours, theirs)]
            differing += any(mine != other for mine, other in pairs)
        yield Row("reward", source, "by_data_source", differing / _NUM_TEXTS)


COMPARISONS: tuple[Callable[[SimpleNamespace], Iterator[Row]], ...] = (
    compare_estimators,
    compare_losses,
    compare_kl,
    compare_rewards,
    compare_the_rest,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Arguments(description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", help="directory of a checkout of verl")
    options = parser.parse_args(arguments)
    if options.checkout is None:
        print("skipped: no checkout of verl was given")
        return 0
    try:
        verl = load_verl(options.checkout)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [row for compare in COMPARISONS for row in compare(verl)]
    dist.destroy_process_group()
    table = [("", "verl", "here", "difference", "result"), *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(4)]
    for *cells, result in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), result, sep="  ")
    wrong = sum(row.is_wrong for row in rows)
    print(f"{len(rows)} comparisons, {wrong} different without a reason")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
