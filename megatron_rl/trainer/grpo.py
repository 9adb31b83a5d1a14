# SPDX-License-Identifier: Apache-2.0
"""GRPO, PPO and their relatives: `train` is the algorithm; what surrounds its steps comes below.

Every rank runs the same program. Rollouts, rewards and lengths are known to every rank; packed tensors
belong to a DP rank, and its TP and PP ranks hold the same ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms.advantages import Advantages
from megatron_rl.algorithms.kl import build_kl_controller, measure_for_target
from megatron_rl.capsule.recording import CapsuleRecorder
from megatron_rl.config.command_line import end_program_on_errors
from megatron_rl.config.loading import load_config
from megatron_rl.config.schema import AlgorithmConfig, RunConfig
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.engines.modes import describe_modes
from megatron_rl.experience.collected import Collected
from megatron_rl.experience.columns import gather_token_values, move_tokens
from megatron_rl.experience.describe import describe_distributions, describe_rollouts, rollout_row
from megatron_rl.experience.estimate import choose_tokens, compute_advantages, correct_mismatch, measure_kl
from megatron_rl.experience.pack import pack_rollouts
from megatron_rl.lifecycle.checkpoints import Checkpoints
from megatron_rl.lifecycle.opening import OpenedRun, open_run
from megatron_rl.observability.rollout_log import TokenTexts
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.collectives import init_distributed, memory_in_use, open_store
from megatron_rl.planning.admission import check_fits, find_cluster
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.roles.build import (
    actor_export,
    build_hybrid_engine,
    build_roles,
    group_timeout,
    launched_sizes,
    side_files,
)
from megatron_rl.roles.inputs import RlInputs, read_rl_inputs
from megatron_rl.roles.parts import NO_PARTS, Parts
from megatron_rl.roles.resolve import resolve
from megatron_rl.roles.reward_model import RewardModel
from megatron_rl.rollout.collector import Collector
from megatron_rl.training.fast_path import find_fast_paths, format_table
from megatron_rl.training.profiling import StepProfiler
from megatron_rl.training.step import check_step_mode
from megatron_rl.types import Rollout, UserError


class Trainer:
    """Roles, data and sinks of one run; building it is collective.

        trainer = Trainer.from_hf_config("models/Qwen2.5-0.5B-Instruct", "recipe.yaml")
        trainer.train()

    Args:
        config: the resolved config.
        inputs: from `read_rl_inputs`.
        recipe: names the default run directory.
        parts: that are given as objects.
    """

    def __init__(
        self, config: RunConfig, inputs: RlInputs, recipe: Path | None = None, parts: Parts = NO_PARTS,
    ) -> None:
        self.config, self.inputs, self.plan = config, inputs, inputs.plan
        self.process = init_distributed(group_timeout(config) / timedelta(minutes=1))
        opened = open_run(config, recipe, self.plan.total_steps)
        self.guard = opened.guard
        with self.guard.building():
            self._build(opened, parts)

    def _build(self, opened: OpenedRun, parts: Parts) -> None:
        """Everything that needs the process group and the run directory."""
        config, inputs, plan = self.config, self.inputs, self.plan
        self.run, timers = opened.run, opened.run.timers
        timers.memory_probe = partial(memory_in_use, self.process.device)
        self.profiler = StepProfiler(
            self.run.dir, steps=config.trainer.profile_steps, ranks=config.trainer.profile_ranks,
            rank=self.process.rank, device=self.process.device)
        timers.annotate = self.profiler.phase if self.profiler.is_used else None
        roles = build_roles(config, inputs, parts)
        actor, reference, critic = roles["actor"], roles.get("reference"), roles.get("critic")
        self.reward_model: RewardModel | None = roles.get("reward_model")
        self.hybrid = parts.rollouts or build_hybrid_engine(config, actor, self.process, timers)
        self.hybrid.progress = self.run.follow_rollouts(open_store("rollouts", dist.group.WORLD))
        self.actor = timers.watch(
            actor, compute_logprobs="old_logprobs", compute_sum_pi_squared="old_logprobs", update="update")
        self.reference = timers.watch(reference, compute_logprobs="ref_logprobs") if reference else None
        self.critic = timers.watch(critic, compute_values="values", update="update_critic") if critic else None
        self.kl = build_kl_controller(config.algorithm)
        self.prompts = PromptBatches(
            inputs.train.prompts, config.data.train_batch_size, config.data.shuffle, config.trainer.seed)
        self.token_texts = TokenTexts(inputs.tokenizer.decode)
        self.collector = parts.rollouts or Collector(
            hybrid=self.hybrid, prompts=self.prompts, reward_plan=inputs.reward_plan, config=config, plan=plan,
            scorer=Scorer(inputs.reward_plan, config.reward, inputs.tokenizer.decode),
            reward_model=parts.reward_model or (self.score_with_model if self.reward_model else None),
            stop_token_ids=inputs.stop_token_ids, timers=timers, group=dist.group.WORLD,
            needs_greedy_baseline=inputs.spec.needs_greedy_baseline)
        self.trained = {role.name: roles[role.name] for role in inputs.spec.trained}
        self.checkpoints = Checkpoints(
            config, opened, self.trained, {"prompts": self.prompts, "kl": self.kl, "hybrid": self.hybrid},
            side_files={role.name: side_files(config, role.path) for role in inputs.spec.trained},
            export=actor_export(config, actor.model), total_steps=plan.total_steps)
        self.capsule = CapsuleRecorder(config, plan, self.run, self.trained, self.checkpoints.save_into)

    def train(self) -> None:
        """The main loop (PPO, arXiv 1707.06347, algorithm 1; GRPO, arXiv 2402.03300, algorithm 1)."""
        with self.session():
            for step in self.steps():
                with self.hybrid.rollout_mode():  # weights: Megatron TP/PP/DP -> engine TP
                    collected = self.collector.collect(step)
                self.checkpoints.safe_point()  # SIGTERM ends the run here, before anything is learned,
                batch = self.pack(collected.rollouts, "actor")
                batch.old_logprobs = self.actor.compute_logprobs(batch)
                if self.inputs.spec.needs_sum_pi_squared:
                    batch.sum_pi_squared = self.actor.compute_sum_pi_squared(batch)
                if self.reference:
                    batch.ref_logprobs = self.reference.compute_logprobs(batch)  # for the KL term
                if self.critic:
                    critic_batch = self.pack_for_critic(collected.rollouts, batch)
                    critic_batch.values = self.critic.compute_values(critic_batch)
                    batch.values = self.from_critic(critic_batch.values, critic_batch, batch)
                algorithm = self.algorithm_now()
                estimate = self.estimate(collected, batch, algorithm)
                batch.advantages = estimate.advantages
                batch.chosen = choose_tokens(batch, algorithm, self.actor.model.groups.dp)  # for clip_cov and kl_cov
                self.checkpoints.safe_point()  # or here, or after the step
                if self.critic:
                    critic_batch.returns = self.from_actor(estimate.returns, batch, critic_batch)
                for _ in range(self.plan.ppo_epochs):
                    if self.critic:
                        for minibatch in critic_batch.minibatches():
                            self.run.count(self.critic.update(minibatch))
                    if not self.critic or step > self.config.trainer.critic_warmup:
                        for minibatch in batch.minibatches():
                            self.run.count(self.actor.update(minibatch, algorithm))
                self.describe(step, collected, batch)

    # How one comes about, and what surrounds the steps.

    @classmethod
    def from_hf_config(
        cls, model_path: str | Path, config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (),
        **parts: Any,
    ) -> Trainer:
        """What `launch/pretrain_grpo.py` builds, for a program of the user's own that torchrun starts.

        An error that the program lets through ends it as it ends the command line: one message in the job, and the
        exit codes of docs/checkpoints.md.

        Args:
            model_path: directory of the policy in HF format, or a checkpoint of this package.
            config: a recipe, or its settings as nested mappings.
            overrides: `section.key=value`, as on the command line.
            **parts: see `Parts`: reward, adv_estimator, policy_loss, engine, reward_model, actor, critic, reference.

        Raises:
            UserError: bad input; on every rank alike, before any process group exists.
        """
        end_program_on_errors()
        recipe = None if isinstance(config, Mapping) else Path(config)
        loaded = load_config(recipe or config, [*overrides, f"model.path={model_path}"])
        for note in loaded.notes:
            warnings.warn(note)
        return cls.from_config(loaded.config, recipe, Parts(**parts))

    @classmethod
    def from_config(cls, config: RunConfig, recipe: Path | None = None, parts: Parts = NO_PARTS) -> Trainer:
        """Check every input of a loaded config, then build the run.

        Raises:
            UserError: bad input, before any process group exists.
        """
        config, (world_size, ranks_per_node) = parts.enter(config), launched_sizes()
        cluster = find_cluster(world_size, ranks_per_node)
        if cluster is not None and config.trainer.check_memory:
            check_fits(config, resolve(config), cluster)
        inputs = read_rl_inputs(config, world_size, parts)
        for role in inputs.spec.trained:
            check_step_mode(role.layout, role.section)
        return cls(config, inputs, recipe, parts)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Say what runs; report an error (see `Guard`); afterwards, also after one, release and close everything."""
        try:
            with self.guard.reporting():
                self.introduce()
                yield
        except UserError:
            self.checkpoints.commit()  # it was raised on every rank alike: what is being written can be finished
            raise
        finally:
            self.close()

    def introduce(self) -> None:
        """Say once what runs, and what was found in the data."""
        say, train, config = self.run.log.info, self.inputs.train, self.config
        say("run directory: %s", self.run.dir)
        for note in self.inputs.notes:
            say("note: %s", note)
        say("algorithm: %s, %s loss", config.algorithm.adv_estimator, config.algorithm.policy_loss)
        say("actor: %s, %s, %s layers on %s", self.actor.model.groups.layout.describe(), config.model.dtype,
            self.actor.model.transformer_impl, self.process.device)
        for name, role in (("critic", self.critic), ("reward model", self.reward_model)):
            if role:
                say("%s: %s", name, role.model.groups.layout.describe())
        modes = describe_modes(config.rollout, self.process.device)
        say("rollout: %s, %d engine(s) of tp=%d%s", config.rollout.engine, self.plan.num_engines,
            self.plan.rollout_tp_size, modes and f"; {modes}")
        say("stop tokens: %s", ", ".join(map(str, self.inputs.stop_token_ids)))
        stats = self.hybrid.reshard_stats
        say("weights: transport %s; per switch %s bytes moved, %s copied inside a rank, %s aliased; verify %s",
            self.hybrid.transport, f"{stats.bytes_moved:,}", f"{stats.bytes_copied:,}", f"{stats.bytes_aliased:,}",
            config.hybrid.verify)
        say("prompts: %d (%d truncated, %d dropped)", len(train.prompts), train.num_truncated, train.num_dropped)
        for line in format_table(find_fast_paths(
                config.actor, config.model.dtype, config.model.transformer_impl, self.plan.dp_size)):
            say("  %s", line)
        for line in self.plan.formulas():
            say("  %s", line)

    def steps(self) -> Iterator[int]:
        """Count the steps; validate, save and record around them as the config says."""
        total, trainer, run = self.plan.total_steps, self.config.trainer, self.run
        resumed = self.checkpoints.start()
        if resumed is None and trainer.val_before_train and self.inputs.validation:
            self.validate()
            run.record(0)
            self.checkpoints.mark(0)
            self.checkpoints.safe_point()
        for step in range((resumed or 0) + 1, total + 1):
            run.timers.step = step
            with self.profiler.step(step), run.timers.phase("step"):
                self.capsule.begin(step)
                yield step
                is_best = False
                if self.inputs.validation and (step == total or trainer.test_freq and step % trainer.test_freq == 0):
                    is_best = run.is_best(self.validate(), trainer.best_metric)
                self.checkpoints.end_step(step, is_best)
            run.record(step)
            self.checkpoints.safe_point()
        self.checkpoints.finish()
        run.finish()

    def pack(self, rollouts: Sequence[Rollout], section: str) -> TrainBatch:
        """The packed batch on this rank of the role that a section of the config describes."""
        model, config = getattr(self, section).model, getattr(self.config, section)
        batch, metrics = pack_rollouts(rollouts, self.plan, self.config.algorithm, model, config, self.process.device)
        if section == "actor":
            self.run.count(metrics)
            if self.config.trainer.log_rollouts:
                batch.record_updates()
        return batch

    def pack_for_critic(self, rollouts: Sequence[Rollout], batch: TrainBatch) -> TrainBatch:
        """The critic's packed batch: the actor's own where both would be packed alike."""
        actor, critic = self.actor.model, self.critic.model
        is_alike = (
            actor.groups.layout == critic.groups.layout and actor.pad_multiple == critic.pad_multiple
            and actor.buckets == critic.buckets
            and self.config.actor.max_tokens_per_microbatch == self.config.critic.max_tokens_per_microbatch
            and self.config.actor.share_prompts == self.config.critic.share_prompts)
        return batch if is_alike else self.pack(rollouts, "critic")

    def from_critic(self, values: torch.Tensor, critic_batch: TrainBatch, batch: TrainBatch) -> torch.Tensor:
        """Token values from the critic's packing in the actor's; collective."""
        return move_tokens(values, critic_batch, batch, self.critic.model.groups.is_replica_leader, dist.group.WORLD)

    def from_actor(self, values: torch.Tensor, batch: TrainBatch, critic_batch: TrainBatch) -> torch.Tensor:
        """Token values from the actor's packing in the critic's; collective."""
        return move_tokens(values, batch, critic_batch, self.actor.model.groups.is_replica_leader, dist.group.WORLD)

    def score_with_model(self, rollouts: Sequence[Rollout]) -> list[float]:
        """The reward model's score of each rollout; collective."""
        batch = self.pack(rollouts, "reward_model")
        return self.reward_model.compute_scores(batch).tolist()

    def algorithm_now(self) -> AlgorithmConfig:
        """The algorithm with the KL controller's current coefficient."""
        return replace(self.config.algorithm, kl_coef=self.kl.coef)

    def estimate(self, collected: Collected, batch: TrainBatch, algorithm: AlgorithmConfig) -> Advantages:
        """Advantages and returns; measures the KL and the gap to the engine on the way; collective."""
        group, rollouts, kl = self.actor.model.groups.dp, collected.rollouts, None
        if batch.ref_logprobs is not None:
            kl, tokens = measure_kl(batch, len(rollouts), algorithm.kl_type, group)
            self.kl.update(measure_for_target(kl, tokens, algorithm), len(rollouts))
            self.run.count({"kl/per_response": float(kl.mean()), "kl/coef": algorithm.kl_coef})
        batch.importance_weights, mismatch = correct_mismatch(batch, algorithm, group)
        self.run.count(mismatch)
        estimate = compute_advantages(collected, batch, algorithm, kl, group)
        batch.returns = estimate.returns
        self.run.count(estimate.metrics)
        return estimate

    def validate(self) -> dict[str, float]:
        """Metrics of every validation set; collective."""
        with self.run.timers.phase("validation", swallow=True), self.hybrid.rollout_mode():
            metrics = self.collector.validate(self.inputs.validation)
        self.run.count(metrics)
        return metrics

    def describe(self, step: int, collected: Collected, batch: TrainBatch) -> None:
        """Count what a step was like, and write some of its rollouts; collective."""
        stats, limit = self.hybrid.reshard_stats, self.config.trainer.log_rollouts
        self.run.count(describe_rollouts(collected.groups) | collected.metrics)
        self.run.count({
            "reshard/bytes_moved": stats.bytes_moved,
            "reshard/bytes_copied": stats.bytes_copied,
            "reshard/bytes_aliased": stats.bytes_aliased,
            "reshard/verified_tensors": self.hybrid.verified_tensors,
        })
        rollouts = collected.rollouts if limit < 0 else collected.rollouts[:limit]
        values = gather_token_values(
            batch, len(rollouts), self.config.algorithm, self.actor.model.groups.is_last_stage_leader, dist.group.WORLD)
        self.run.write_histograms(step, partial(describe_distributions, collected.rollouts, batch))
        self.run.write_rollouts(
            step, (rollout_row(r, self.token_texts, found) for r, found in zip(rollouts, values, strict=True)))
        self.capsule.end(step, collected, batch)

    def close(self) -> None:
        """Release the engine, end reward workers and close the sinks (also after an error)."""
        self.checkpoints.close()
        self.collector.close()
        self.hybrid.close()
        self.run.close()
