# SPDX-License-Identifier: Apache-2.0
"""GRPO: `train` is the algorithm; what surrounds its steps comes below.

Every rank runs the same program. Rollouts, rewards and lengths are known to every rank; packed tensors
belong to a DP rank, and its TP and PP ranks hold the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.loading import LoadedConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.batching import TrainBatch
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.experience import (
    compute_advantages,
    describe_rollouts,
    measure_mismatch,
    pack_groups,
    rollout_row,
    rollouts_of,
    score_groups,
)
from megatron_rl.parallel.collectives import init_distributed, memory_in_use
from megatron_rl.parallel.groups import build_groups
from megatron_rl.roles import (
    GrpoInputs,
    build_actor,
    build_hybrid_engine,
    build_reference,
    launched_world_size,
    open_run,
    read_grpo_inputs,
    save_actor,
)
from megatron_rl.rollout.sampling import SamplingConfig
from megatron_rl.types import RolloutGroup


class GrpoTrainer:
    """Roles, data and sinks of one GRPO run; building it is collective.

    Args:
        config: the resolved config.
        inputs: from `read_grpo_inputs`.
        plan: batch arithmetic for this world size and these prompts.
        recipe: names the default run directory.
    """

    def __init__(self, config: RunConfig, inputs: GrpoInputs, plan: BatchPlan, recipe: Path | None = None) -> None:
        self.config, self.inputs, self.plan = config, inputs, plan
        self.process = init_distributed(config.trainer.timeout_minutes)
        self.run = open_run(config, recipe, plan.total_steps)
        timers = self.run.timers
        timers.memory_probe = partial(memory_in_use, self.process.device)
        groups = build_groups(inputs.model.layout, timedelta(minutes=config.trainer.timeout_minutes))
        actor = build_actor(config, inputs.model, groups, plan.total_optimizer_steps)
        reference = build_reference(config, inputs.model, groups)
        self.hybrid = build_hybrid_engine(config, inputs.model, actor, self.process, timers)
        self.actor = timers.watch(actor, compute_logprobs="old_logprobs", update="update")
        self.reference = timers.watch(reference, compute_logprobs="ref_logprobs") if reference else None
        self.prompts = PromptBatches(
            inputs.train.prompts, config.data.train_batch_size, config.data.shuffle, config.trainer.seed)

    def train(self) -> None:
        """The main loop (GRPO, arXiv 2402.03300, algorithm 1)."""
        algorithm, sampling = self.config.algorithm, self.sampling(self.config.rollout.temperature)
        for step in self.steps():
            with self.hybrid.rollout_mode():  # weights: Megatron TP/PP/DP -> engine TP
                groups = self.hybrid.generate(
                    next(self.prompts), group_size=self.plan.group_size, sampling=sampling, step=step)
            self.score(groups)
            batch = self.pack(groups)
            batch.old_logprobs = self.actor.compute_logprobs(batch)
            if self.reference:
                batch.ref_logprobs = self.reference.compute_logprobs(batch)  # for the KL term
            batch.advantages = compute_advantages(groups, batch, algorithm)
            for _ in range(self.plan.ppo_epochs):
                for minibatch in batch.minibatches():
                    self.run.count(self.actor.update(minibatch, algorithm))
            self.describe(step, groups, batch)

    # What surrounds the steps.

    def introduce(self) -> None:
        """Say once what runs, and what was found in the data."""
        say, train = self.run.log.info, self.inputs.train
        say("run directory: %s", self.run.dir)
        say("actor: %s, %s, %s layers on %s", self.inputs.model.layout.describe(), self.config.model.dtype,
            self.actor.transformer_impl, self.process.device)
        say("rollout: %s, %d engine(s) of tp=%d", self.config.rollout.engine, self.plan.num_engines,
            self.plan.rollout_tp_size)
        stats = self.hybrid.reshard_stats
        say("weights: transport %s; per switch %s bytes moved, %s copied inside a rank, %s aliased; verify %s",
            self.hybrid.transport, f"{stats.bytes_moved:,}", f"{stats.bytes_copied:,}", f"{stats.bytes_aliased:,}",
            self.config.hybrid.verify)
        say("prompts: %d (%d truncated, %d dropped)", len(train.prompts), train.num_truncated, train.num_dropped)
        for line in self.plan.formulas():
            say("  %s", line)

    def steps(self) -> Iterator[int]:
        """Count the steps; validate, save and record around them as the config says."""
        total = self.plan.total_steps
        if self.config.trainer.val_before_train and self.inputs.validation:
            self.validate()
            self.run.record(0)
        for step in range(1, total + 1):
            with self.run.timers.phase("step"):
                yield step
                if self._is_due(step, self.config.trainer.test_freq, at_end=True) and self.inputs.validation:
                    self.validate()
                if self._is_due(step, self.config.trainer.save_freq, at_end=self.config.trainer.save_final):
                    self.save(step)
            self.run.record(step)
        self.run.finish()

    def _is_due(self, step: int, frequency: int, *, at_end: bool) -> bool:
        return bool(frequency and step % frequency == 0) or (at_end and step == self.plan.total_steps)

    def sampling(self, temperature: float) -> SamplingConfig:
        """The sampling contract at a temperature."""
        stop = (self.inputs.model.tokenizer.eos_token_id,)
        return SamplingConfig(temperature, self.config.data.max_response_length, stop)

    def score(self, groups: list[RolloutGroup]) -> None:
        """Fill in response texts and rewards; collective."""
        with self.run.timers.phase("reward"):
            score_groups(
                groups, self.inputs.reward_function, self.inputs.model.tokenizer.decode, dist.group.WORLD)

    def pack(self, groups: list[RolloutGroup]) -> TrainBatch:
        """This rank's packed batch."""
        batch, metrics = pack_groups(groups, self.plan, self.config.algorithm, self.actor, self.process.device)
        self.run.count(metrics)
        return batch

    def validate(self) -> None:
        """Accuracy on every validation set: the mean reward of one response per prompt; collective."""
        sampling = self.sampling(self.config.rollout.validation_temperature)
        with self.run.timers.phase("validation", swallow=True), self.hybrid.rollout_mode():
            for name, prompt_set in self.inputs.validation.items():
                rewards: list[float] = []
                size = self.config.data.validation_batch_size or len(prompt_set.prompts)
                for first in range(0, len(prompt_set.prompts), size):
                    groups = self.hybrid.generate(
                        prompt_set.prompts[first : first + size], group_size=1, sampling=sampling, step=0)
                    self.score(groups)
                    rewards += [rollout.reward for rollout in rollouts_of(groups)]
                self.run.count({f"validation/{name}/accuracy": float(np.mean(rewards))})

    def save(self, step: int) -> None:
        """Write the policy in HF format; collective."""
        with self.run.timers.phase("save", swallow=True):
            save_actor(self.run.checkpoint_dir(step) / "huggingface", self.config, self.actor)
            self.run.point_latest_at(step)

    def describe(self, step: int, groups: list[RolloutGroup], batch: TrainBatch) -> None:
        """Count what a step was like, and write some of its rollouts; collective."""
        stats, limit = self.hybrid.reshard_stats, self.config.trainer.log_rollouts
        self.run.count(describe_rollouts(groups))
        self.run.count(measure_mismatch(batch, self.actor.groups.dp_cp))
        self.run.count({
            "kl/coef": self.config.algorithm.kl_coef,
            "reshard/bytes_moved": stats.bytes_moved,
            "reshard/bytes_copied": stats.bytes_copied,
            "reshard/bytes_aliased": stats.bytes_aliased,
            "reshard/verified_tensors": self.hybrid.verified_tensors,
        })
        rollouts = rollouts_of(groups)
        self.run.write_rollouts(step, [rollout_row(r) for r in (rollouts if limit < 0 else rollouts[:limit])])

    def close(self) -> None:
        """Release the engine and close the sinks (also after an error)."""
        self.hybrid.close()
        self.run.close()


def train_grpo(loaded: LoadedConfig, recipe: Path | None) -> None:
    """Run GRPO from a loaded config: check every input, build the roles, train.

    Raises:
        UserError: bad input, before any process group exists; or a failing reward function.
    """
    config, world_size = loaded.config, launched_world_size()
    inputs = read_grpo_inputs(config, world_size)
    plan = BatchPlan.build(config, world_size, len(inputs.train.prompts))
    trainer = GrpoTrainer(config, inputs, plan, recipe)
    try:
        trainer.introduce()
        trainer.train()
    finally:
        trainer.close()
