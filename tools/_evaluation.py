# SPDX-License-Identifier: Apache-2.0
"""Validate a model without training.

A run with the same weights, seeds and settings has the same metrics: both use the same collector.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.schema import AlgorithmConfig, CriticConfig, PlacementConfig, ReferenceConfig, RunConfig
from megatron_rl.data.rows import read_rows
from megatron_rl.observability.metrics import TokenTexts, write_rows
from megatron_rl.parallel.collectives import init_distributed, world
from megatron_rl.rewards.answers import CORRECT_FROM, estimate_pass_at_k
from megatron_rl.rewards.scoring import OVERLONG
from megatron_rl.rollout.collector import correctness_of
from megatron_rl.run.building import RunSinks, build_roles, build_rollout_members, check_agreement, group_timeout
from megatron_rl.run.inputs import Parts, localize, read_rl_inputs
from megatron_rl.run.mixed_inputs import list_validation
from megatron_rl.samples.experience import Experience, rollout_row
from megatron_rl.samples.table import FINISH_REASONS, Headers, join_headers
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import RoleSetup
from megatron_rl.types import UserError, has_reward
from tools._weights import find_weights


class EvaluatedPolicy:
    """A policy without an optimizer whose weights an engine shares; building it is collective."""

    def __init__(self, setup: RoleSetup, *, policy_version: int) -> None:
        self.model = PackedModel(replace(setup, spec=replace(setup.spec, trainable=False)))
        self.policy_version, self.optimizer = policy_version, self

    def release(self) -> None:
        """Do nothing: generation needs all its memory."""


def without_training(config: RunConfig, world_size: int) -> RunConfig:
    """Return the config with training settings that evaluation needs (UserError if there is no validation file)."""
    data, rollout = config.data, config.rollout
    if not data.validation_files:
        raise UserError(
            "data.validation_files names no file",
            source="data.validation_files",
            expected="a file to evaluate on",
            hint="give data.validation_files=[FILE.jsonl]",
        )
    longest = data.max_prompt_length + data.max_response_length
    sources = {
        name: replace(source, files=source.validation_files)
        for name, source in data.sources.items()
        if source.validation_files
    }
    return replace(
        config,
        critic=CriticConfig(),
        placement=PlacementConfig(),
        reference=ReferenceConfig(),
        # An estimator that needs only the policy.
        algorithm=AlgorithmConfig(plugins=config.algorithm.plugins, adv_estimator="reinforce_plus_plus"),
        data=replace(data, sources=sources, train_files=data.validation_files, weights=None, train_batch_size=1),
        rollout=replace(rollout, n=world_size),
        actor=replace(
            config.actor,
            ppo_mini_batch_size=None,
            step_mode="eager",
            max_tokens_per_microbatch=max(longest, config.actor.max_tokens_per_microbatch),
        ),
        trainer=replace(config.trainer, total_steps=1),
    )


def describe_set(headers: Headers, group_size: int) -> dict[str, float]:
    """Compute metrics of an evaluation set beyond `compute_validation_metrics`.

    Returns:
        "prompts", their number; "truncated", the share of truncated responses; pass@j for powers of two below
        `group_size`.
    """
    rewards = correctness_of(headers).reshape(-1, group_size)
    sizes = [2**power for power in range(group_size.bit_length()) if 2**power < group_size]
    return {
        "prompts": float(len(rewards)),
        "truncated": float(np.mean(headers["finish_reason"] == FINISH_REASONS.index("length"))),
        **{f"pass@{size}": estimate_pass_at_k(rewards, size) for size in sizes},
    }


def write_chosen(path: Path, file: str, rollouts: Sequence[Mapping[str, Any]], low: float, high: float) -> None:
    """Write the rows of a prompt file with a pass rate from `low` to `high`, the share of rewards of 0.5 or more.

    Args:
        rollouts: rows of the log; a response without a reward, of a failed episode or service, does not count, and
            the overlong penalty is no part of the reward.
    """
    correct: dict[int, list[bool]] = {}
    for row in rollouts:
        components = row["reward_components"]
        if has_reward(row["finish_reason"], components):
            is_correct = row["reward"] - components.get(OVERLONG, 0.0) >= CORRECT_FROM
            correct.setdefault(row["prompt_id"], []).append(is_correct)
    rates = {prompt: sum(found) / len(found) for prompt, found in correct.items()}
    chosen = [row.columns for row in read_rows([file]) if low <= rates.get(row.index, -1.0) <= high]
    path.write_text("".join(f"{json.dumps(row, default=str)}\n" for row in chosen), encoding="utf-8")


def evaluate(
    config: RunConfig, world_size: int, rollouts_dir: Path | None = None, choose: Sequence[float] | None = None
) -> dict[str, Any]:
    """Validate the model or the checkpoint at `model.path`, in the actor's layout; collective.

    Args:
        config: its training settings are ignored.
        rollouts_dir: rank 0 writes all rollouts to `<rollouts_dir>/<set>/rollouts/step_<N>.jsonl`.
        choose: range of pass rates; rank 0 writes the rows of such prompts to `<rollouts_dir>/<set>/chosen.jsonl`.

    Returns:
        Model, step, layout, engine, sampling and "metrics", on every rank: `validation/<set>/<metric>` as of a run,
        and per set the number of "prompts", the share of responses "truncated" at `data.max_response_length`, and
        pass@j for powers of two below the number of responses.

    Raises:
        UserError: bad input; on every rank alike, before any process group exists.
    """
    config, commits = localize(config)
    weights = find_weights(config.model.path)
    config = without_training(replace(config, model=replace(config.model, path=str(weights.path))), world_size)
    inputs = read_rl_inputs(config, world_size)
    process, decode = init_distributed(group_timeout(config) / timedelta(minutes=1)), inputs.tokenizer.decode
    check_agreement(commits)
    actor = partial(EvaluatedPolicy, policy_version=weights.policy_version)
    roles = build_roles(config, inputs, Parts(actor=actor))
    members = build_rollout_members(config, inputs, roles, process, RunSinks())
    sets: dict[str, list[Experience]] = {}
    files = list_validation(config)
    try:
        with members.hybrid.rollout_mode():
            metrics = members.collector.validate(inputs.validation, sets.__setitem__)
    finally:
        members.collector.close()
    for name, parts in sets.items():
        headers = join_headers([part.headers for part in parts]).rollouts
        described = describe_set(headers, config.rollout.for_validation(name).n)
        metrics |= {f"validation/{name}/{metric}": value for metric, value in described.items()}
        if rollouts_dir is not None:
            texts, rows = TokenTexts(decode), []
            for part in parts:
                found = part.fetch_rollouts(range(len(part.rewards)), decode)
                rows += [rollout_row(rollout, texts, values) for rollout, values in found]
            if world().rank() == 0:
                write_rows(rollouts_dir / name, weights.step, rows)
                if choose is not None:
                    write_chosen(rollouts_dir / name / "chosen.jsonl", files[name], rows, *choose)
    engine_layout = config.actor if inputs.plan.engine_is_actor else config.rollout
    return {
        "model": str(weights.path),
        "step": weights.step,
        "policy_version": weights.policy_version,
        "layout": inputs.roles["actor"].layout.describe(),
        "engine": config.rollout.engine,
        "engine_tp_size": engine_layout.tensor_model_parallel_size,
        "samples": config.rollout.validation_n,
        "temperature": config.rollout.validation_temperature,
        "seed": config.trainer.seed,
        "metrics": metrics,
    }
