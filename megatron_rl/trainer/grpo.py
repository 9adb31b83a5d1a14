# SPDX-License-Identifier: Apache-2.0
"""GRPO, PPO and their relatives: `train` is the algorithm; what surrounds its steps comes below.

Every rank runs the same program. What decides (lengths, rewards) is known to every rank; tokens are where they were
generated and where they are trained on (see `experience`).
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

import numpy as np

from megatron_rl.algorithms.kl import build_kl_controller, measure_for_target
from megatron_rl.capsule.recording import CapsuleRecorder
from megatron_rl.config.command_line import end_program_on_errors
from megatron_rl.config.loading import load_config
from megatron_rl.config.schema import AlgorithmConfig, RunConfig
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.engines.modes import describe_modes
from megatron_rl.experience.describe import describe_distributions, describe_rollouts, describe_updates, rollout_row
from megatron_rl.experience.estimate import choose_tokens, compute_advantages, correct_mismatch, measure_kl
from megatron_rl.experience.experience import Column, Experience
from megatron_rl.experience.pack import Packer
from megatron_rl.lifecycle.checkpoints import Checkpoints
from megatron_rl.lifecycle.opening import OpenedRun, open_run
from megatron_rl.observability.rollout_log import TokenTexts
from megatron_rl.parallel.collectives import init_distributed, memory_in_use, open_store, world
from megatron_rl.planning.admission import check_fits, find_cluster
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.roles.build import build_roles, group_timeout, launched_sizes
from megatron_rl.roles.engine import build_rollout
from megatron_rl.roles.export import actor_export, side_files
from megatron_rl.roles.inputs import RlInputs, read_rl_inputs
from megatron_rl.roles.on_samples import (
    ActorOnSamples,
    CriticOnSamples,
    PolicyOnSamples,
    RewardModelOnSamples,
    score_all_rollouts,
)
from megatron_rl.roles.parts import NO_PARTS, Parts
from megatron_rl.roles.resolve import resolve
from megatron_rl.rollout.collector import Collector, RewardSources
from megatron_rl.training.fast_path import find_fast_paths, format_table
from megatron_rl.training.profiling import StepProfiler
from megatron_rl.training.step import check_step_mode
from megatron_rl.types import UserError


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
        assert self.plan.total_steps is not None, "the data was read"
        self.total_steps = self.plan.total_steps
        opened = open_run(config, recipe, self.total_steps)
        self.guard = opened.guard
        with self.guard.building():
            self._build(opened, parts)

    def _build(self, opened: OpenedRun, parts: Parts) -> None:
        """Everything that needs the process group and the run directory."""
        config, inputs, plan = self.config, self.inputs, self.plan
        self.run, timers = opened.run, opened.run.timers
        self.profiler = StepProfiler(
            self.run.dir, steps=config.trainer.profile_steps, ranks=config.trainer.profile_ranks,
            rank=self.process.rank, device=self.process.device)
        timers.attach(
            partial(memory_in_use, self.process.device), self.profiler.phase if self.profiler.is_used else None)
        roles = build_roles(config, inputs, parts)
        actor, reference, critic, spec = roles["actor"], roles.get("reference"), roles.get("critic"), inputs.spec
        packers = {name: Packer(role.model, spec.roles[name].layout, plan, config.algorithm, self.process.device)
                   for name, role in roles.items()}
        self.actor = ActorOnSamples(
            timers.watch(
                actor, compute_logprobs="old_logprobs", compute_sum_pi_squared="old_logprobs", update="update"),
            packers["actor"], records_updates=config.trainer.log_rollouts != 0)
        self.reference = reference and PolicyOnSamples(
            timers.watch(reference, compute_logprobs="ref_logprobs"), packers["reference"])
        self.critic = critic and CriticOnSamples(
            timers.watch(critic, compute_values="values", update="update_critic"), packers["critic"])
        self.reward_model = None
        if "reward_model" in roles:
            self.reward_model = RewardModelOnSamples(roles["reward_model"], packers["reward_model"])
        self.kl = build_kl_controller(config.algorithm)
        self.prompts = PromptBatches(
            inputs.train.prompts, config.data.train_batch_size, config.data.shuffle, config.trainer.seed)
        decode = inputs.tokenizer.decode
        self.token_texts = TokenTexts(decode)
        score = partial(score_all_rollouts, parts.reward_model, decode) if parts.reward_model else self.reward_model
        if parts.rollouts:
            self.hybrid = self.collector = parts.rollouts
        else:
            progress = self.run.follow_rollouts(open_store("rollouts", world()))
            self.hybrid, generator = build_rollout(config, actor, self.process, timers, progress)
            rewards = RewardSources(
                inputs.reward_plan, Scorer(inputs.reward_plan, config.reward, decode), score,
                spec.needs_greedy_baseline)
            self.collector = Collector(
                generator=generator, prompts=self.prompts, rewards=rewards, config=config,
                stop_token_ids=inputs.stop_token_ids, timers=timers, group=world())
        self.trained = {role.name: roles[role.name] for role in spec.trained}
        self.checkpoints = Checkpoints(
            config, opened, self.trained, {"prompts": self.prompts, "kl": self.kl, "hybrid": self.hybrid},
            side_files={role.name: side_files(config, role.path) for role in spec.trained},
            export=actor_export(config, actor.model), total_steps=self.total_steps)
        self.capsule = CapsuleRecorder(config, plan, self.run, self.trained, self.checkpoints.save_into, decode)

    def train(self) -> None:
        """The main loop (PPO, arXiv 1707.06347, algorithm 1; GRPO, arXiv 2402.03300, algorithm 1)."""
        with self.session():
            for step in self.steps():
                with self.hybrid.rollout_mode():  # the engines take the actor's weights
                    samples = self.collector.collect(step)
                self.checkpoints.safe_point()  # SIGTERM ends the run here, before anything is learned,
                samples.old_logprobs = self.actor.compute_logprobs(samples)
                if self.inputs.spec.needs_sum_pi_squared:
                    samples.sum_pi_squared = self.actor.compute_sum_pi_squared(samples)
                if self.reference:  # for the KL term
                    samples.ref_logprobs = self.reference.compute_logprobs(samples)
                    samples.kl_per_rollout = self.measure_kl(samples)
                if self.critic:
                    samples.values = self.critic.compute_values(samples)
                samples.importance_weights = self.correct_mismatch(samples)
                samples.advantages, samples.returns = self.estimate(samples)
                samples.chosen = self.choose_tokens(samples)  # for clip_cov and kl_cov
                self.checkpoints.safe_point()  # or here, or after the step
                for minibatch in samples.minibatches(self.plan.rollouts_per_minibatch, self.plan.ppo_epochs):
                    if self.critic:
                        self.run.count(self.critic.update(minibatch))
                    if not self.critic or step > self.config.trainer.critic_warmup:
                        self.run.count(self.actor.update(minibatch, self.algorithm_now()))
                if self.reference:
                    self.adapt_kl(samples)
                self.describe(step, samples)

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
        source = config if isinstance(config, Mapping) else Path(config)
        loaded = load_config(source, [*overrides, f"model.path={model_path}"])
        for note in loaded.notes:
            warnings.warn(note)
        recipe = source if isinstance(source, Path) else None
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
            check_step_mode(role.training, role.section)
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
        total, trainer, run = self.total_steps, self.config.trainer, self.run
        resumed = self.checkpoints.start()
        if trainer.val_only:
            self.validate()
            run.record(resumed or 0)
            run.finish()
            return
        if resumed is None and trainer.val_before_train and self.inputs.validation:
            self.validate()
            run.record(0)
            self.checkpoints.mark(0)
            self.checkpoints.safe_point()
        for step in range((resumed or 0) + 1, total + 1):
            run.timers.begin_step(step)
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

    def algorithm_now(self) -> AlgorithmConfig:
        """The algorithm with the KL controller's current coefficient."""
        return replace(self.config.algorithm, kl_coef=self.kl.coef)

    def measure_kl(self, samples: Experience) -> np.ndarray:
        """KL to the reference of each rollout, summed over its tokens in the loss; collective."""
        batch, algorithm = self.actor.read(samples, "old_logprobs", "ref_logprobs"), self.algorithm_now()
        kl = measure_kl(samples.headers, batch, algorithm.kl_type, self.actor.model.groups.dp)
        self.run.count({"kl/per_response": float(kl.mean()), "kl/coef": algorithm.kl_coef})
        return kl

    def adapt_kl(self, samples: Experience) -> None:
        """Let the KL controller react to this step's KL: the next step has another coefficient."""
        headers = samples.headers
        tokens = headers.sum_per_rollout(headers.num_loss_tokens)
        measured = measure_for_target(samples.kl_per_rollout, tokens, self.config.algorithm)
        self.kl.update(measured, len(headers.rollouts))

    def correct_mismatch(self, samples: Experience) -> Column | None:
        """Weights that correct for the gap between actor and engine, where the config asks for them; collective."""
        batch = self.actor.read(samples, "old_logprobs")
        weights, metrics = correct_mismatch(batch, self.config.algorithm, self.actor.model.groups.dp)
        self.run.count(metrics)
        return self.actor.as_column(samples, weights)

    def estimate(self, samples: Experience) -> tuple[Column, Column | None]:
        """Advantages, and returns where there is a critic; collective."""
        batch = self.actor.read(
            samples, "old_logprobs", "ref_logprobs", "values", "sum_pi_squared", "importance_weights")
        found = compute_advantages(samples, batch, self.algorithm_now(), self.actor.model.groups.dp)
        self.run.count({name: float(value) for name, value in found.metrics.items()})
        return Column(found.advantages, samples.pack(self.actor.packer)), self.actor.as_column(samples, found.returns)

    def choose_tokens(self, samples: Experience) -> Column | None:
        """The tokens that the policy loss treats in another way, where it does that; collective."""
        batch = self.actor.read(samples, "old_logprobs", "advantages")
        return self.actor.as_column(samples, choose_tokens(batch, self.algorithm_now(), self.actor.model.groups.dp))

    def validate(self) -> dict[str, float]:
        """Metrics of every validation set; collective."""
        with self.run.timers.phase("validation", swallow=True), self.hybrid.rollout_mode():
            metrics = self.collector.validate(self.inputs.validation)
        self.run.count(metrics)
        return metrics

    def describe(self, step: int, samples: Experience) -> None:
        """Count what a step was like, and write some of its rollouts; collective."""
        stats, limit, headers = self.hybrid.reshard_stats, self.config.trainer.log_rollouts, samples.headers
        self.run.count(describe_rollouts(headers) | samples.metrics | self.actor.describe_packing(samples))
        self.run.count({
            "reshard/bytes_moved": stats.bytes_moved,
            "reshard/bytes_copied": stats.bytes_copied,
            "reshard/bytes_aliased": stats.bytes_aliased,
            "reshard/verified_tensors": self.hybrid.verified_tensors,
        })
        self.run.count(samples.measure_bytes())
        batch = self.actor.read(samples, "old_logprobs", "advantages", "values", "update_logprobs", "update_entropy")
        columns = {name: samples.columns[name] for name in ("old_logprobs", "advantages", "values")
                   if name in samples.columns}
        columns |= {name: self.actor.as_update(samples, values)
                    for name, values in describe_updates(batch, self.config.algorithm).items()}
        logged = samples.fetch_rollouts(
            len(headers) if limit < 0 else limit, self.inputs.tokenizer.decode, columns)
        self.run.write_histograms(step, partial(describe_distributions, headers, batch))
        self.run.write_rollouts(step, (rollout_row(r, self.token_texts, found) for r, found in logged))
        self.capsule.end(step, samples)

    def close(self) -> None:
        """Release the engine, end reward workers and close the sinks (also after an error)."""
        self.checkpoints.close()
        self.collector.close()
        self.run.close()
