# SPDX-License-Identifier: Apache-2.0
"""GRPO, PPO and their relatives: `Trainer.train` is the algorithm; then its steps; then a run around them.

Every rank runs the same program with all lengths and rewards; tokens stay on the ranks that generate them or train on
them (see `samples`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from megatron_rl.algorithms.losses import AdaptiveKL, has_importance_weights, measure_for_target
from megatron_rl.config.schema import AlgorithmConfig, RunConfig
from megatron_rl.extension.registry import OBJECT
from megatron_rl.observability.metrics import TokenTexts
from megatron_rl.observability.progress import StepProfiler
from megatron_rl.parallel.collectives import Process, gather_objects, init_distributed, memory_in_use, open_store, world
from megatron_rl.planning.role_layouts import find_gpu_memory
from megatron_rl.run.building import (
    RunSinks,
    check_agreement,
    group_timeout,
    launched_sizes,
    list_engines,
    order_kernels,
    place_roles,
)
from megatron_rl.run.checkpoints import Checkpoints
from megatron_rl.run.guard import wait_for_debugger
from megatron_rl.run.inputs import NO_PARTS, Parts, RlInputs, localize, read_rl_inputs
from megatron_rl.run.models import check_graphs, resolve
from megatron_rl.run.opening import OpenedRun, open_run
from megatron_rl.run.primitives import Primitives, build_primitives
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
    describe_tokens,
    describe_updates,
    measure_kl,
    rollout_row,
    text_rows,
)
from megatron_rl.types import BadStep, UserError

if TYPE_CHECKING:
    from megatron_rl.capsule.recorder import CapsuleRecorder
    from megatron_rl.rollout.bad_steps import SilentSteps


class Trainer:
    """One RL run: roles, data and outputs (logs, metrics); building it is collective.

        trainer = Trainer("models/Qwen2.5-0.5B-Instruct", "recipe.yaml")
        trainer.train()

    An uncaught error is printed once in the job, and ends it with an exit code of docs/checkpoints.md.

    Args:
        model: directory of the policy in HF format, or a checkpoint of this package.
        config: a recipe, or its settings as nested mappings.
        overrides: `section.key=value`, as on the command line.
        **passed: see `Parts`; `data` and `validation` (see `pass_rows`) instead of files; or the arguments of TRL.

    Raises:
        UserError: bad input; on every rank alike, before any process group exists.
    """

    has_ended = False

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
                samples.advantages, samples.returns, samples.chosen = self.estimate(samples, step)
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

    def estimate(self, samples: Experience, step: int) -> tuple[Column | None, ...]:
        """Return advantages, returns (with a critic), and tokens of clip_cov or kl_cov, else `None`; collective."""
        if self.teachers:
            self.run.count(self.teachers.teach(samples))
        read = "old_logprobs", "ref_logprobs", "values", "sum_pi_squared", "importance_weights", "teacher_logprobs"
        batch, algorithm = self.policy.read(samples, *read), self.algorithm_now()
        if not self.policy.is_here:
            nothing = self.policy.as_column(samples, torch.empty_like(batch.loss_weights))
            return nothing, nothing if self.critic else None, None
        group, packing = self.policy.model.groups.dp, samples.pack(self.policy.packer)
        turns, plans = (packing.turn_rewards, packing.turn_states), self.inputs.reward_plans.values()
        weights = next(iter(plans)).weights_at(step)  # gdpo takes them, whose sources have one reward
        found = compute_advantages(samples, batch, algorithm, group, *turns, weights)
        self.run.count({name: float(value) for name, value in found.metrics.items()})
        described = {"advantages": found.advantages, "returns": found.returns, "values": batch.values}
        self.run.count(describe_tokens(described, batch.loss_mask, group))
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
        if self.config.data.sources:
            from megatron_rl.rollout.by_source import describe_mixture

            found |= describe_mixture(headers, samples.prompts, self.inputs.reward_plans, step)
        else:
            found |= self.inputs.reward_plans[""].describe_weights(step)
        if self.silence:
            self.silence.add(found["reward/uninformative_groups"] == 1)
        self.run.count(found | samples.pack(self.policy.packer).metrics)
        if step == 1:
            from megatron_rl.rewards.silence import explain_silence

            ends = [*{0, len(samples.rewards) - 1}]
            fetch = partial(samples.fetch_rollouts, ends, self.inputs.tokenizer.decode)
            self.run.announce(
                step, "no-signal", explain_silence(headers.rollouts, found, fetch, self.inputs.reward_plans)
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

    def __init__(self, model: Any = None, config: Any = None, overrides: Sequence[str] = (), **passed: Any) -> None:
        prepared = model if isinstance(model, Prepared) else prepare(model, config, overrides, passed)
        self.config, self.inputs, self.plan = prepared.config, prepared.inputs, prepared.inputs.plan
        self.process = prepared.join()
        assert self.plan.total_steps is not None, "the data was read"
        self.total_steps = self.plan.total_steps
        opened = open_run(self.config, prepared.recipe, self.total_steps)
        self.guard = opened.guard
        with self.guard.building():
            self._build(opened, prepared.parts)

    def _build(self, opened: OpenedRun, parts: Parts) -> None:
        config, trainer, inputs = self.config, self.config.trainer, self.inputs
        self.run, timers = opened.run, opened.run.timers
        self.profiler = StepProfiler(
            self.run.dir,
            steps=trainer.profile_steps,
            ranks=trainer.profile_ranks,
            rank=self.process.rank,
            device=self.process.device,
        )
        timers.attach(
            partial(memory_in_use, self.process.device), self.profiler.phase if self.profiler.is_used else None
        )
        progress = self.run.follow_rollouts(open_store("rollouts", world()))
        sinks = RunSinks(timers, progress, self.run.dir / "schedule", self.run.starting)
        place_roles(
            self.run,
            inputs.roles,
            list_engines(config, inputs),
            self.process,
            self.plan.rollouts_per_step,
            self.plan.optimizer_steps_per_step,
            self.plan.ppo_epochs,
        )
        if config.schedule.elastic and self.run.page is not None:
            from megatron_rl.engines.elastic.front import list_members

            self.run.page.follow_engines(partial(list_members, self.run.dir))
        self.primitives = made = build_primitives(config, inputs, parts, self.process, sinks)
        self.policy, self.reference, self.critic = made.policy, made.reference, made.critic
        self.teachers = made.teachers
        self.kl: AdaptiveKL | None = None
        if (target := config.algorithm.kl_target) is not None:
            self.kl = AdaptiveKL(config.algorithm.kl_coef, target, config.algorithm.kl_horizon)
        self.silence: SilentSteps | None = None
        if trainer.max_silent_steps is not None:
            from megatron_rl.rollout.bad_steps import SilentSteps

            self.silence = SilentSteps(trainer.max_silent_steps)
        further = {name: part for name, part in (("kl", self.kl), ("silence", self.silence)) if part is not None}
        self.trained = made.trained
        self.checkpoints = Checkpoints(
            config,
            opened,
            replace(made.state, parts={**made.state.parts, **further}),
            export=self.policy.export,
            total_steps=self.total_steps,
        )
        self.capsule: CapsuleRecorder | None = None
        if trainer.capture_step:
            from megatron_rl.capsule.recorder import CapsuleRecorder

            self.capsule = CapsuleRecorder(
                config, self.plan, self.run, self.trained, self.checkpoints.save_into, inputs.tokenizer.decode
            )

    @classmethod
    def from_hf_config(cls, model_path: Any, config: Any, overrides: Sequence[str] = (), **passed: Any) -> Self:
        """Build a run as `cls(...)` does; an older name."""
        return cls(model_path, config, overrides, **passed)

    @classmethod
    def from_config(cls, config: RunConfig, recipe: Path | None = None, parts: Parts = NO_PARTS) -> Self:
        """Check every input of a loaded config (UserError before any process group exists), then build the run."""
        return cls(check(config, recipe, parts))

    @contextmanager
    def session(self) -> Iterator[None]:
        """Log a description of the run and report errors (see `Guard`); close everything at the end."""
        if self.has_ended:
            raise UserError(
                "the loop of a trainer that has ended",
                source="train()",
                expected="a trainer of one run, whose engine and files are closed at its end",
                hint="make the Trainer again; with the same trainer.run_dir it resumes",
            )
        try:
            with self.guard.reporting():
                self.run.log.info("run directory: %s", self.run.dir)
                from megatron_rl.run.summary import describe_run, explain_run

                for note in self.inputs.notes:
                    self.run.log.info("note: %s", note)
                rows = describe_run(self.config, self.inputs, self.primitives, self.process.device)
                self.run.describe(rows, explain_run(self.config, self.inputs), self.config.flags.explain)
                try:
                    yield
                except BadStep as error:
                    if error.metrics:  # else the step has its record
                        self.run.count(error.metrics)
                        self.run.record(self.run.timers.step)
                    raise
        except UserError:
            self.checkpoints.commit()  # every rank raised it: a save in progress can be finished
            raise
        finally:
            self.close()

    def steps(self) -> Iterator[int]:
        """Yield the number of each remaining step; after each, validate and save if due, and record its metrics."""
        total, trainer, run = self.total_steps, self.config.trainer, self.run
        resumed = self.checkpoints.start()
        if not total:
            self.validate(resumed or 0)
            run.record(resumed or 0)
            run.finish()
            return
        if resumed is None and trainer.val_before_train and self.inputs.validation:
            self.validate(0)
            run.record(0)
            self.checkpoints.mark(0)
            self.checkpoints.safe_point()
        for step in range((resumed or 0) + 1, total + 1):
            run.timers.begin_step(step)
            with self.profiler.step(step), run.timers.phase("step"):
                if self.capsule:
                    self.capsule.begin(step)
                yield step
                is_best = False
                if self.inputs.validation and (step == total or trainer.test_freq and step % trainer.test_freq == 0):
                    is_best = run.is_best(self.validate(step), trainer.best_metric)
                self.checkpoints.end_step(step, is_best)
            run.record(step)
            if self.silence:
                self.silence.check(step)
            self.checkpoints.safe_point()
        self.checkpoints.finish()
        run.finish()

    def validate(self, step: int) -> dict[str, float]:
        """Return validation metrics and write responses; collective."""
        found: dict[str, list[Any]] = {}
        with self.run.timers.phase("validation", swallow=True):
            with self.policy.rollout_mode():
                metrics = self.policy.validate(self.inputs.validation, found.__setitem__)
        for name, parts in found.items():
            self.run.write_validation(step, name, text_rows(parts, self.inputs.tokenizer.decode))
        self.run.count(metrics)
        return metrics

    def count_elsewhere(self) -> None:
        """Add the metrics and times of roles on other ranks to rank 0's record; collective."""
        leaders = {role.layout.first_rank for role in self.inputs.roles.values()} - {0}
        if leaders:
            mine = (dict(self.run.series), self.run.timers.seen()) if self.process.rank in leaders else None
            for found in gather_objects(mine, world()):
                if found is not None:
                    self.run.complete(*found)

    def close(self) -> None:
        """Release the engine, end reward workers and close logs and metrics."""
        self.has_ended = True
        self.guard.close()
        self.policy.close()
        self.run.close()


@dataclass(frozen=True)
class Prepared:
    """A run whose inputs were read and checked."""

    config: RunConfig
    inputs: RlInputs
    recipe: Path | None  # file whose name the default run directory gets
    parts: Parts
    chosen: list[str]  # one line per layout setting that was chosen automatically, and per commit of the hub

    def join(self) -> Process:
        """Start the process group; refuse ranks with other layouts, hub commits or objects (UserError); collective."""
        process = init_distributed(group_timeout(self.config) / timedelta(minutes=1))
        data, model = self.config.data, self.config.model.path
        files = [model, *data.train_files, *data.validation_files]
        check_agreement(self.chosen + [name for name in files if OBJECT in name])
        return process


def prepare(model: Any, config: Any, overrides: Sequence[str], passed: Mapping[str, Any]) -> Prepared:
    """Read, load and check what a user's own program passes."""
    from megatron_rl.run.user_program import read_program

    return check(*read_program(model, config, overrides, passed))


def check(config: RunConfig, recipe: Path | None, parts: Parts) -> Prepared:
    """Read and check inputs (UserError on every rank alike); the rank to debug then waits for its debugger."""
    if parts != NO_PARTS:
        from megatron_rl.run.user_program import enter_parts

        config = enter_parts(parts, config)
    order_kernels(config)
    config, commits = localize(config)
    world_size, ranks_per_node = launched_sizes()
    memory, cluster, chosen = find_gpu_memory(), None, []
    if memory is not None:
        from megatron_rl.planning.cluster import find_cluster

        cluster = find_cluster(world_size, ranks_per_node, memory)
    if config.layout.mode != "given":
        if parts.choose_layout is None:
            from megatron_rl.run.user_program import refuse_auto

            raise refuse_auto()
        from megatron_rl.planning.cluster import find_cluster

        here = cluster or find_cluster(world_size, ranks_per_node, None)
        config, chosen = parts.choose_layout(config, resolve(config), here, recipe)
    if cluster is not None and config.trainer.check_memory:
        from megatron_rl.planning.admission import check_fits

        check_fits(config, resolve(config), cluster)
    inputs = read_rl_inputs(config, world_size, parts)
    check_graphs(config, inputs.roles.values())
    config, chosen = wait_for_debugger(config, world_size), [*commits, *chosen]
    return Prepared(config, replace(inputs, notes=[*chosen, *inputs.notes]), recipe, parts, chosen)


def load(model: Any = None, config: Any = None, overrides: Sequence[str] = (), **passed: Any) -> Primitives:
    """Build the primitives for a loop of your own; collective.

    Unlike a `Trainer`, it has no run directory and no watchdog. Without torchrun, the process is a job of one rank. For
    the arguments and errors, see `Trainer`.
    """
    prepared = prepare(model, config, overrides, passed)
    return build_primitives(prepared.config, prepared.inputs, prepared.parts, prepared.join(), RunSinks())
