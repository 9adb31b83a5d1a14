# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: RL's actor with next-token loss on the responses; produces the policy RL starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.config.schema import RunConfig
from megatron_rl.parallel.collectives import init_distributed, world
from megatron_rl.parallel.groups import build_groups
from megatron_rl.run.building import (
    build_role,
    check_agreement,
    group_timeout,
    launched_sizes,
    order_kernels,
    order_prompts,
    place_roles,
)
from megatron_rl.run.checkpoints import Checkpoints, TrainingState, actor_export, side_files
from megatron_rl.run.guard import wait_for_debugger
from megatron_rl.run.inputs import SftInputs, localize, read_sft_inputs
from megatron_rl.run.models import check_graphs
from megatron_rl.run.opening import OpenedRun, open_run
from megatron_rl.samples.batch import Packer
from megatron_rl.samples.experience import Experience, replicate
from megatron_rl.training.given_losses import sft
from megatron_rl.training.roles.actor import ActorOnSamples
from megatron_rl.training.setup import RoleSetup
from megatron_rl.types import UserError


class SftTrainer:
    """Actor, data and outputs (logs, metrics) of one SFT run; building it is collective."""

    def __init__(self, config: RunConfig, inputs: SftInputs, recipe: Path | None, commits: list[str]) -> None:
        self.config, self.plan = config, inputs.plan
        self.process = init_distributed(group_timeout(config) / timedelta(minutes=1))
        check_agreement(commits)
        assert self.plan.total_steps is not None, "the data was read"
        self.total_steps = self.plan.total_steps
        opened = open_run(config, recipe, self.total_steps)
        self.run, self.guard = opened.run, opened.guard
        with self.guard.building():
            self._build(opened, inputs)

    def _build(self, opened: OpenedRun, inputs: SftInputs) -> None:
        config = self.config
        self.groups = build_groups(inputs.actor.layout, group_timeout(config))
        place_roles(self.run, {"actor": inputs.actor}, None, self.process, self.plan.rollouts_per_minibatch)
        actor = build_role(config, inputs.actor, self.groups, self.total_steps, self.find_class(inputs))
        self.packer = self.make_packer(actor)
        watched = self.run.timers.watch(actor, forward_backward="update", optim_step="update")
        self.actor = ActorOnSamples(watched, self.packer)
        self.examples = order_prompts(config, inputs.data, inputs.data.examples)
        self.checkpoints = Checkpoints(
            config,
            opened,
            TrainingState(
                {"actor": SavedRole(actor.model.trained, actor.optimizer)},
                {"prompts": self.examples},
                {"actor": side_files(config, config.model.path)},
            ),
            export=actor_export(config, actor.model),
            total_steps=self.total_steps,
        )

    def find_class(self, inputs: SftInputs) -> Callable[[RoleSetup], Any] | None:
        """Return the class of the trained role; `None` for the actor's."""
        return None

    def make_packer(self, actor: Any) -> Packer:
        """Return the packer of the trained role's examples, each of which has a prompt of its own."""
        layout = replace(self.config.actor, share_prompts=False)
        return Packer(actor.model, layout, self.plan, self.config.algorithm, self.process.device)

    def train(self) -> None:
        """Take one optimizer step per batch, and save checkpoints."""
        resumed = self.checkpoints.start()
        if resumed is None and self.validate(0) is not None:
            self.run.record(0)
        for step in range((resumed or 0) + 1, self.total_steps + 1):
            self.run.timers.begin_step(step)
            with self.run.timers.phase("step"):
                samples = self.update(next(self.examples))
                headers = samples.headers
                self.run.count(
                    samples.pack(self.packer).metrics
                    | {
                        "tokens/prompt": int(headers["num_prompt_tokens"].sum()),
                        "tokens/response": int(headers.num_response_tokens.sum()),
                    }
                )
                self.checkpoints.end_step(step, bool(self.validate(step)))
            self.run.record(step)
            self.checkpoints.safe_point()
        self.checkpoints.finish()
        self.run.finish()

    def update(self, examples: Sequence[Any]) -> Experience:
        """Take one optimizer step on a batch of examples, and return them packed; collective."""
        samples = replicate(list(enumerate(examples)), [e.prompt for e in examples], world())
        for minibatch in self.actor.minibatches(samples):
            self.actor.forward_backward(minibatch, sft)
            self.run.count(self.actor.optim_step())
        return samples

    def validate(self, step: int) -> bool | None:
        """Measure validation sets; return whether the result is the best so far, `None` if nothing was due."""
        return None


def train_sft(
    config: RunConfig,
    recipe: Path | None,
    read_inputs: Callable[[RunConfig, int], SftInputs] = read_sft_inputs,
    make: type[SftTrainer] = SftTrainer,
) -> None:
    """Run SFT from a loaded config (UserError if it is bad, Preempted after a stop signal)."""
    order_kernels(config)
    config, commits = localize(config)
    inputs = read_inputs(config, launched_sizes()[0])
    check_graphs(config, [inputs.actor])
    config = wait_for_debugger(config, launched_sizes()[0])
    trainer = make(config, inputs, recipe, commits)
    try:
        with trainer.guard.reporting():
            say, data = trainer.run.log.info, inputs.data
            say("run directory: %s", trainer.run.dir)
            for line in commits:
                say("%s", line)
            actor, made = inputs.actor, trainer.actor.model.transformer_impl
            rows = [
                ("model", f"{config.model.path}, {config.model.dtype}, {made} layers on {trainer.process.device}"),
                ("actor", actor.layout.describe()),
                (
                    "examples",
                    f"{len(data.examples)} ({data.num_truncated} prompts truncated, {data.num_dropped} dropped)",
                ),
                ("steps", f"{trainer.total_steps} of {config.data.train_batch_size} examples"),
            ]
            trainer.run.describe(rows, trainer.plan.formulas(), config.flags.explain)
            trainer.train()
    except UserError:
        trainer.checkpoints.commit()  # it was raised on every rank alike
        raise
    finally:
        trainer.guard.close()
        trainer.run.close()
