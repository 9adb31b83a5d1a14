# SPDX-License-Identifier: Apache-2.0
"""GRPO, PPO and their relatives: `Trainer.train` is the algorithm, the other methods are its steps.

Every rank runs the same program with all lengths and rewards; tokens stay on the ranks that generate them or train on
them (see `samples`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import torch

from megatron_rl.algorithms.losses import has_importance_weights, measure_for_target
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.observability.metrics import TokenTexts
from megatron_rl.run.session import Session
from megatron_rl.samples.experience import (
    Column,
    Experience,
    choose_logged,
    choose_tokens,
    compute_advantages,
    correct_mismatch,
    describe_distributions,
    describe_rollouts,
    describe_sources,
    describe_staleness,
    describe_updates,
    measure_kl,
    rollout_row,
)


class Trainer(Session):
    """One RL run; building it is collective.

    trainer = Trainer("models/Qwen2.5-0.5B-Instruct", "recipe.yaml")
    trainer.train()
    """

    def train(self) -> None:
        """Run the main loop (PPO, arXiv 1707.06347, algorithm 1; GRPO, arXiv 2402.03300, algorithm 1)."""
        with self.session():
            for step in self.steps():
                with self.policy.rollout_mode():  # weights move into the engines; afterwards, engines sleep
                    samples = self.policy.sample(step)
                self.checkpoints.safe_point()  # SIGTERM ends the run here, before the first update,
                for role in (self.reference, self.policy, self.critic):
                    if role:  # all get the tokens first, so that roles on different ranks compute concurrently
                        role.read(samples)
                if self.teachers:
                    self.teachers.score(samples)
                if self.reference:  # for the KL term
                    samples.ref_logprobs = self.reference.logprobs(samples)
                if self.critic:
                    samples.values = self.critic.values(samples)
                if self.inputs.spec.why_recompute or self.is_warmup(step):  # else the update's first pass does it
                    samples.old_logprobs = self.policy.logprobs(samples)
                    self.compare(samples)
                if self.inputs.spec.needs_sum_pi_squared:
                    samples.sum_pi_squared = self.policy.sum_pi_squared(samples)
                samples.advantages, samples.returns, samples.chosen = self.estimate(samples)
                if not self.policy.runs_ahead:  # or here, or after the step
                    self.checkpoints.safe_point()
                if self.critic:
                    self.critic.read(samples, "values", "returns")  # no wait for the policy's update later
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
                    self.adapt(step, samples)
                self.policy.run_ahead()  # dedicated engines generate until all training ranks are here
                self.describe(step, samples)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Token texts for the rollout log."""
        return TokenTexts(self.inputs.tokenizer.decode)

    def algorithm_now(self) -> AlgorithmConfig:
        """Return the algorithm settings with the current KL coefficient."""
        algorithm = self.config.algorithm
        return algorithm if self.kl is None else replace(algorithm, kl_coef=self.kl.coef)

    def is_warmup(self, step: int) -> bool:
        """Whether only the critic learns in this step."""
        return self.critic is not None and step <= self.config.trainer.critic_warmup

    def compare(self, samples: Experience) -> None:
        """Measure KL to the reference and mismatch with the engine, and set importance weights; collective."""
        batch, algorithm = self.policy.read(samples, "old_logprobs", "ref_logprobs"), self.algorithm_now()
        if not self.policy.is_here:
            samples.mismatch = {}
            if has_importance_weights(algorithm):
                samples.importance_weights = self.policy.as_column(samples, torch.empty_like(batch.loss_weights))
            return
        headers, group = samples.headers, self.policy.model.groups.dp
        version, steps = self.policy.role.policy_version, self.plan.optimizer_steps_per_step
        lags = (version - samples.pack(self.policy.packer).versions) // steps
        if self.config.rollout.bitwise:
            from megatron_rl.samples.corrections import check_bits

            check_bits(batch, lags == 0, group)  # tokens of the current policy version
        if self.config.actor.router_replay == "engine":
            from megatron_rl.samples.corrections import measure_stale_routes

            self.run.count({"moe/replayed_stale": measure_stale_routes(headers, batch, version, group)})
        if most := self.config.schedule.max_staleness:
            from megatron_rl.samples.corrections import measure_lags

            self.run.count(measure_lags(batch, lags, most, group))
            self.run.count(describe_staleness(headers, version, steps))
        if self.reference:
            samples.kl_per_rollout = kl = measure_kl(headers, batch, algorithm.kl_type, group)
            count = max(int(headers.rollouts.has_reward.sum()), 1)  # a rollout without a reward has no loss token
            self.run.count({"kl/per_response": float(kl.sum() / count), "kl/coef": algorithm.kl_coef})
        weights, samples.mismatch = correct_mismatch(headers, batch, algorithm, group)
        self.run.count(samples.mismatch)
        samples.importance_weights = self.policy.as_column(samples, weights)

    def estimate(self, samples: Experience) -> tuple[Column | None, ...]:
        """Return advantages, returns (with a critic), and tokens of clip_cov or kl_cov, else `None`; collective."""
        if self.teachers:
            self.run.count(self.teachers.teach(samples))
        read = "old_logprobs", "ref_logprobs", "values", "sum_pi_squared", "importance_weights", "teacher_logprobs"
        batch, algorithm = self.policy.read(samples, *read), self.algorithm_now()
        if not self.policy.is_here:
            nothing = self.policy.as_column(samples, torch.empty_like(batch.loss_weights))
            return nothing, nothing if self.critic else None, None
        group, turn_rewards = self.policy.model.groups.dp, samples.pack(self.policy.packer).turn_rewards
        found = compute_advantages(samples, batch, algorithm, group, turn_rewards)
        self.run.count({name: float(value) for name, value in found.metrics.items()})
        chosen = choose_tokens(replace(batch, advantages=found.advantages), algorithm, group)
        return tuple(self.policy.as_column(samples, values) for values in (found.advantages, found.returns, chosen))

    def adapt(self, step: int, samples: Experience) -> None:
        """Adapt the KL coefficient; every `reference.reset_every` steps, copy the policy into the reference."""
        if not self.policy.is_here:
            return
        headers, every = samples.headers, self.config.reference.reset_every
        if self.kl is not None and (counted := headers.rollouts.has_reward).any():
            tokens = headers.sum_per_rollout(headers.num_loss_tokens)
            measured = measure_for_target(samples.kl_per_rollout[counted], tokens[counted], self.config.algorithm)
            self.kl.update(measured, int(counted.sum()))
        if self.reference and every and step % every == 0:
            self.reference.role.become(self.policy.model)

    def describe(self, step: int, samples: Experience) -> None:
        """Add a step's metrics to the run's record and write some of its rollouts to the log; collective."""
        headers = samples.headers
        reasons = choose_logged(headers, self.config.trainer.log_rollouts, step)
        found = describe_rollouts(headers) | samples.metrics
        self.run.count(found | samples.pack(self.policy.packer).metrics)
        if step == 1:
            from megatron_rl.rewards.silence import explain_silence

            ends = [*{0, len(samples.rewards) - 1}]
            fetch = partial(samples.fetch_rollouts, ends, self.inputs.tokenizer.decode)
            self.run.announce(
                step, "no-signal", explain_silence(headers.rollouts, found, fetch, self.inputs.reward_plan)
            )
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
