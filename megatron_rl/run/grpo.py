# SPDX-License-Identifier: Apache-2.0
"""GRPO, PPO and their relatives: `train` is the algorithm, and what its lines mean comes below.

Every rank runs the same program. What decides (lengths, rewards) is known to every rank; tokens are where they were
generated and where they are trained on (see `samples`). What surrounds the steps is in `session.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from megatron_rl.algorithms.kl import measure_for_target
from megatron_rl.algorithms.mismatch import has_importance_weights
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.observability.rollout_log import TokenTexts
from megatron_rl.run.session import Session
from megatron_rl.samples.describe import (
    choose_logged,
    describe_distributions,
    describe_rollouts,
    describe_sources,
    describe_staleness,
    describe_updates,
    rollout_row,
)
from megatron_rl.samples.estimate import (
    check_bits,
    choose_tokens,
    compute_advantages,
    correct_mismatch,
    measure_kl,
    measure_lags,
    measure_stale_routes,
)
from megatron_rl.samples.experience import Column, Experience


class Trainer(Session):
    """One run; building it is collective.

    trainer = Trainer.from_hf_config("models/Qwen2.5-0.5B-Instruct", "recipe.yaml")
    trainer.train()
    """

    def train(self) -> None:
        """The main loop (PPO, arXiv 1707.06347, algorithm 1; GRPO, arXiv 2402.03300, algorithm 1)."""
        with self.session():
            for step in self.steps():
                samples = self.policy.sample(step)
                self.checkpoints.safe_point()  # SIGTERM ends the run here, before anything is learned,
                self.fetch_tokens(samples)
                if self.teachers:
                    self.teachers.score(samples)
                if self.reference:  # for the KL term
                    samples.ref_logprobs = self.reference.logprobs(samples)
                if self.critic:
                    samples.values = self.critic.values(samples)
                if self.recomputes(step):  # else the first pass of the update gives them
                    samples.old_logprobs = self.policy.logprobs(samples)
                    self.compare(samples)
                if self.inputs.spec.needs_sum_pi_squared:
                    samples.sum_pi_squared = self.policy.sum_pi_squared(samples)
                samples.advantages, samples.returns = self.estimate(samples)
                samples.chosen = self.choose_tokens(samples)  # for clip_cov and kl_cov
                if not self.policy.runs_ahead:  # or here, or after the step
                    self.checkpoints.safe_point()
                if self.critic:
                    self.critic.read(samples, "values", "returns")  # so that it does not wait for the policy's update
                for minibatch in self.policy.minibatches(samples, self.plan.ppo_epochs):
                    if not self.is_warmup(step):
                        self.policy.forward_backward(minibatch, self.algorithm_now())
                        if samples.mismatch is None:
                            self.compare(samples)
                        self.run.count(self.policy.optim_step())
                    if self.critic:
                        self.critic.forward_backward(minibatch)
                        self.run.count(self.critic.optim_step())
                if self.reference:
                    self.adapt_kl(samples)
                    self.reset_reference(step)
                self.policy.run_ahead()  # engines on ranks of their own generate up to here
                self.describe(step, samples)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """What shows tokens one by one."""
        return TokenTexts(self.inputs.tokenizer.decode)

    def fetch_tokens(self, samples: Experience) -> None:
        """Bring the tokens to all roles before one computes: those on different ranks then do at the same time."""
        for role in (self.reference, self.policy, self.critic):
            if role:
                role.read(samples)

    def algorithm_now(self) -> AlgorithmConfig:
        """The algorithm with the KL controller's current coefficient."""
        return replace(self.config.algorithm, kl_coef=self.kl.coef)

    def is_warmup(self, step: int) -> bool:
        """Whether only the critic learns in this step."""
        return self.critic is not None and step <= self.config.trainer.critic_warmup

    def recomputes(self, step: int) -> bool:
        """Whether `old_logprobs` take a forward pass of their own."""
        return bool(self.inputs.spec.why_recompute) or self.is_warmup(step)

    def compare(self, samples: Experience) -> None:
        """Compare the policy with its engine and with the reference, before a weight changes; collective."""
        self.compare_by_age(samples)
        if self.reference:
            samples.kl_per_rollout = self.measure_kl(samples)
        samples.importance_weights = self.correct_mismatch(samples)

    def compare_by_age(self, samples: Experience) -> None:
        """The gap to the engine by the age of its weights; in bitwise mode the current ones leave none; collective."""
        batch, version = self.policy.read(samples, "old_logprobs"), self.policy.role.policy_version
        if not self.policy.is_here:
            return
        steps, group = self.plan.optimizer_steps_per_step, self.policy.model.groups.dp
        lags = (version - samples.pack(self.policy.packer).versions) // steps
        if self.config.rollout.bitwise:
            check_bits(batch, lags == 0, group)
        if self.config.actor.router_replay == "engine":
            self.run.count({"moe/replayed_stale": measure_stale_routes(samples.headers, batch, version, group)})
        if most := self.config.schedule.max_staleness:
            self.run.count(measure_lags(batch, lags, most, group))
            self.run.count(describe_staleness(samples.headers, version, steps))

    def measure_kl(self, samples: Experience) -> np.ndarray | None:
        """KL to the reference of each rollout, summed over its tokens in the loss, on the actor's ranks; collective."""
        batch, algorithm = self.policy.read(samples, "old_logprobs", "ref_logprobs"), self.algorithm_now()
        if not self.policy.is_here:
            return None
        kl = measure_kl(samples.headers, batch, algorithm.kl_type, self.policy.model.groups.dp)
        count = max(int(samples.headers.rollouts.has_reward.sum()), 1)  # the others have no token in the loss
        self.run.count({"kl/per_response": float(kl.sum() / count), "kl/coef": algorithm.kl_coef})
        return kl

    def adapt_kl(self, samples: Experience) -> None:
        """Let the KL controller react to this step's KL: the next step has another coefficient."""
        headers = samples.headers
        counted = headers.rollouts.has_reward
        if not self.policy.is_here or not counted.any():
            return
        tokens = headers.sum_per_rollout(headers.num_loss_tokens)
        measured = measure_for_target(samples.kl_per_rollout[counted], tokens[counted], self.config.algorithm)
        self.kl.update(measured, int(counted.sum()))

    def reset_reference(self, step: int) -> None:
        """Let the policy become the reference where it is time to."""
        every = self.config.reference.reset_every
        if self.reference and every and step % every == 0 and self.policy.is_here:
            self.reference.role.become(self.policy.model)

    def correct_mismatch(self, samples: Experience) -> Column | None:
        """Weights that correct for the gap between actor and engine, where the config asks for them; collective."""
        batch = self.policy.read(samples, "old_logprobs")
        if not self.policy.is_here:
            samples.mismatch = {}
            weighs = has_importance_weights(self.config.algorithm)
            return self.policy.as_column(samples, torch.empty_like(batch.loss_weights)) if weighs else None
        group = self.policy.model.groups.dp
        weights, samples.mismatch = correct_mismatch(samples.headers, batch, self.config.algorithm, group)
        self.run.count(samples.mismatch)
        return self.policy.as_column(samples, weights)

    def estimate(self, samples: Experience) -> tuple[Column, Column | None]:
        """Advantages, and returns where there is a critic; collective."""
        if self.teachers:
            self.run.count(self.teachers.teach(samples))
        batch = self.policy.read(
            samples,
            "old_logprobs",
            "ref_logprobs",
            "values",
            "sum_pi_squared",
            "importance_weights",
            "teacher_logprobs",
        )
        if not self.policy.is_here:
            nothing = Column(torch.empty_like(batch.loss_weights), samples.pack(self.policy.packer))
            return nothing, nothing if self.critic else None
        turn_rewards = samples.pack(self.policy.packer).turn_rewards
        found = compute_advantages(samples, batch, self.algorithm_now(), self.policy.model.groups.dp, turn_rewards)
        self.run.count({name: float(value) for name, value in found.metrics.items()})
        return Column(found.advantages, samples.pack(self.policy.packer)), self.policy.as_column(samples, found.returns)

    def choose_tokens(self, samples: Experience) -> Column | None:
        """The tokens that the policy loss treats in another way, where it does that; collective."""
        batch = self.policy.read(samples, "old_logprobs", "advantages")
        if not self.policy.is_here:
            return None
        return self.policy.as_column(samples, choose_tokens(batch, self.algorithm_now(), self.policy.model.groups.dp))

    def describe(self, step: int, samples: Experience) -> None:
        """Count what a step was like, and write some of its rollouts; collective."""
        headers = samples.headers
        reasons = choose_logged(headers, self.config.trainer.log_rollouts, step)
        self.run.count(describe_rollouts(headers) | samples.metrics | self.policy.describe_packing(samples))
        self.run.count(describe_sources(headers, [prompt.data_source for prompt in samples.prompts]))
        self.run.count(self.policy.describe_reshard() | samples.measure_bytes())
        batch = self.policy.read(samples, "old_logprobs", "advantages", "values", "update_logprobs", "update_entropy")
        columns = {
            name: samples.columns[name] for name in ("old_logprobs", "advantages", "values") if name in samples.columns
        }
        columns |= {
            name: self.policy.as_update(samples, values)
            for name, values in (describe_updates(batch, self.config.algorithm) if reasons else {}).items()
        }
        logged = samples.fetch_rollouts([*reasons], self.inputs.tokenizer.decode, columns)
        self.run.write_histograms(step, partial(describe_distributions, headers, batch))
        rows = (rollout_row(r, self.token_texts, found) for r, found in logged)
        self.run.write_rollouts(step, (row | why for row, why in zip(rows, reasons.values())))
        self.count_elsewhere()
        if self.capsule:
            self.capsule.end(step, samples)
