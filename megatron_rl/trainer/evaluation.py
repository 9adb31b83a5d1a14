# SPDX-License-Identifier: Apache-2.0
"""Validation without training: the policy's weights, an engine, the rewards, and no optimizer.

The number of a set is the one that a run with these weights, seeds and settings writes: both ask the same collector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.checkpoint.directory import FoundWeights, find_weights
from megatron_rl.config.schema import AlgorithmConfig, CriticConfig, ReferenceConfig, RunConfig
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.experience.describe import rollout_row
from megatron_rl.experience.pack import pack_rollouts
from megatron_rl.observability.rollout_log import TokenTexts, write_rows
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.roles.build import build_hybrid_engine, build_roles, group_timeout
from megatron_rl.roles.inputs import RlInputs, read_rl_inputs
from megatron_rl.roles.parts import Parts
from megatron_rl.rollout.collector import Collector, describe_set
from megatron_rl.training.packed_model import PackedModel, RoleSetup
from megatron_rl.types import Rollout, RolloutGroup, UserError


class EvaluatedPolicy:
    """A policy that lends its weights to an engine as an actor does, and has no optimizer; building it is collective.

    Args:
        setup: that of an actor.
        policy_version: optimizer steps behind the weights.
    """

    def __init__(self, setup: RoleSetup, *, policy_version: int) -> None:
        self.model = PackedModel(replace(setup, spec=replace(setup.spec, trainable=False)))
        self.policy_version, self.optimizer = policy_version, self

    def release(self) -> None:
        """There is nothing that generation does not need."""


def without_training(config: RunConfig, world_size: int) -> RunConfig:
    """A config of the same model, rollouts, rewards and seeds in which nothing of training can be wrong.

    Raises:
        UserError: there is no validation file.
    """
    data, rollout = config.data, config.rollout
    if not data.validation_files:
        raise UserError("data.validation_files names no file", source="data.validation_files",
                        expected="a file to evaluate on", hint="give data.validation_files=[FILE.jsonl]")
    longest = data.max_prompt_length + data.max_response_length
    return replace(
        config, critic=CriticConfig(), reference=ReferenceConfig(),
        # An estimator that asks for nothing but the policy.
        algorithm=AlgorithmConfig(plugins=config.algorithm.plugins, adv_estimator="reinforce_plus_plus"),
        data=replace(data, train_files=data.validation_files, train_batch_size=1),
        rollout=replace(rollout, n=world_size),
        actor=replace(config.actor, ppo_mini_batch_size=None, step_mode="eager",
                      max_tokens_per_microbatch=max(longest, config.actor.max_tokens_per_microbatch)),
        trainer=replace(config.trainer, total_steps=1))


class Evaluation:
    """The policy in an engine, and what scores its responses; building it is collective.

    Args:
        config: from `without_training`.
        inputs: of that config.
        weights: what `config.model.path` names.
    """

    def __init__(self, config: RunConfig, inputs: RlInputs, weights: FoundWeights) -> None:
        self._config, self._inputs, self._weights = config, inputs, weights
        self._process, timers = init_distributed(group_timeout(config) / timedelta(minutes=1)), PhaseTimers()
        roles = build_roles(
            config, inputs, Parts(actor=partial(EvaluatedPolicy, policy_version=weights.policy_version)))
        self._reward_model = roles.get("reward_model")
        self._hybrid = build_hybrid_engine(config, roles["actor"], self._process, timers)
        decode = inputs.tokenizer.decode
        self._collector = Collector(
            hybrid=self._hybrid, prompts=PromptBatches(inputs.train.prompts, 1, False, config.trainer.seed),
            reward_plan=inputs.reward_plan, config=config, plan=inputs.plan,
            scorer=Scorer(inputs.reward_plan, config.reward, decode),
            reward_model=self._score if self._reward_model else None, stop_token_ids=inputs.stop_token_ids,
            timers=timers, group=dist.group.WORLD, needs_greedy_baseline=False)
        self._token_texts = TokenTexts(decode)

    def run(self, rollouts_dir: Path | None = None) -> dict[str, float]:
        """Metrics of every validation set, `validation/<set>/<metric>`; collective.

        Args:
            rollouts_dir: rank 0 writes all rollouts to `<rollouts_dir>/<set>/rollouts/step_<N>.jsonl`.

        Returns:
            What a run writes, and "prompts", the number of them, "truncated", the share of the responses cut at
            `data.max_response_length`, and pass@j for the powers of two below the number k of responses.
        """
        try:
            with self._hybrid.rollout_mode():
                found: dict[str, list[RolloutGroup]] = {}
                metrics = self._collector.validate(self._inputs.validation, found.__setitem__)
        finally:
            self._collector.close()
            self._hybrid.close()
        for name, groups in found.items():
            metrics |= {f"validation/{name}/{metric}": value for metric, value in describe_set(groups).items()}
            if rollouts_dir is not None and self._process.rank == 0:
                write_rows(rollouts_dir / name, self._weights.step, [
                    rollout_row(rollout, self._token_texts, {}) for group in groups for rollout in group.rollouts])
        return metrics

    def _score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The reward model's score of each rollout; collective."""
        batch, _ = pack_rollouts(rollouts, self._inputs.plan, self._config.algorithm, self._reward_model.model,
                                 self._config.reward_model, self._process.device)
        return self._reward_model.compute_scores(batch).tolist()


def evaluate(config: RunConfig, world_size: int, rollouts_dir: Path | None = None) -> dict[str, Any]:
    """Validate the model or the checkpoint that `model.path` names, in the actor's layout; collective.

    Args:
        config: a run's; what it says of training is not looked at.
        world_size: ranks.
        rollouts_dir: see `Evaluation.run`.

    Returns:
        What was evaluated and how, and "metrics"; the same on every rank.

    Raises:
        UserError: bad input; on every rank alike, before any process group exists.
    """
    weights = find_weights(config.model.path)
    config = without_training(replace(config, model=replace(config.model, path=str(weights.path))), world_size)
    inputs = read_rl_inputs(config, world_size)
    metrics: Mapping[str, float] = Evaluation(config, inputs, weights).run(rollouts_dir)
    return {
        "model": str(weights.path), "step": weights.step, "policy_version": weights.policy_version,
        "layout": inputs.roles["actor"].layout.describe(), "engine": config.rollout.engine,
        "engine_tp_size": config.rollout.tensor_model_parallel_size, "samples": config.rollout.validation_n,
        "temperature": config.rollout.validation_temperature, "seed": config.trainer.seed, "metrics": dict(metrics),
    }
