# SPDX-License-Identifier: Apache-2.0
"""Learning from preferences: DPO and its relatives, KTO, and reward models; fine-tuning's loop with another loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.algorithms.preference_losses import describe_margins
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.preference_rows import Preference
from megatron_rl.parallel.collectives import world
from megatron_rl.run.building import build_role
from megatron_rl.run.inputs import SftInputs
from megatron_rl.run.opening import OpenedRun
from megatron_rl.run.preference_inputs import PreferenceInputs, read_preference_inputs, with_reference
from megatron_rl.run.sft import SftTrainer, train_sft
from megatron_rl.samples.experience import Experience, replicate
from megatron_rl.samples.pack import Packer
from megatron_rl.training.roles.actor import PolicyOnSamples
from megatron_rl.training.roles.frozen import BaseOfActor
from megatron_rl.training.roles.score_learner import PreferenceLoss, ScoreLearner, score_responses
from megatron_rl.training.setup import RoleSetup
from megatron_rl.types import Rollout


class PreferenceTrainer(SftTrainer):
    """Trained model, reference, data and outputs of one run; building it is collective."""

    def _build(self, opened: OpenedRun, inputs: SftInputs) -> None:
        assert isinstance(inputs, PreferenceInputs)
        super()._build(opened, inputs)
        self.validation, self.reference = inputs.validation, None
        role, model = inputs.reference, self.actor.role
        if role is not None:
            shared = role.spec.shares is not None
            frozen = BaseOfActor(model) if shared else build_role(self.config, role, self.groups, self.total_steps)
            watched = self.run.timers.watch(frozen, compute_logprobs="ref_logprobs")
            self.reference = PolicyOnSamples(watched, self.packer)

    def find_class(self, inputs: SftInputs) -> Callable[[RoleSetup], Any] | None:
        """Return the class of a reward model; `None` for the actor's."""
        return ScoreLearner if inputs.actor.spec.head == "score" else None

    def make_packer(self, actor: Any) -> Packer:
        """Return the packer, which keeps pairs together."""
        config = self.config
        return Packer(actor.model, config.actor, self.plan, config.algorithm, self.process.device, whole_prompts=True)

    def update(self, examples: Sequence[Preference]) -> Experience:
        """Take one optimizer step on a batch of preferences, and return them packed; collective."""
        preference = self.config.preference
        samples = self._pack(examples)
        if self.reference:
            samples.ref_logprobs = self.reference.logprobs(samples)
        lengths = [len(r.response_tokens) for e in examples if e.is_chosen for r in e.responses[:1]]
        loss = PreferenceLoss(
            preference,
            np.array([example.is_chosen for example in examples]),
            np.array([example.margin for example in examples]),
            np.array([example.weight for example in examples]),
            num_chosen_tokens=sum(lengths),
            baseline=0.0 if preference.is_paired else self._measure_baseline(examples),
            scores=self.actor.model.shape.has_score_head,
        )
        (minibatch,) = self.actor.minibatches(samples)
        self.actor.forward_backward(minibatch, loss)
        per_example = samples.headers.num_loss_tokens.sum() / len(examples)  # metrics of a loss are means per token
        self.run.count(
            {
                name: value * per_example if name.startswith("preference/") and name != "preference/loss" else value
                for name, value in self.actor.optim_step().items()
            }
        )
        return samples

    def validate(self, step: int) -> bool | None:
        """Measure validation sets; return whether the result is the best so far, `None` if nothing was due."""
        trainer = self.config.trainer
        if step == 0:
            is_due = trainer.val_before_train
        else:
            is_due = step == self.total_steps or bool(trainer.test_freq and step % trainer.test_freq == 0)
        if not is_due or not self.validation:
            return None
        metrics = {}
        with self.run.timers.phase("validation"):
            for name, part in self.validation.items():
                found = self._validate_set(part.examples)
                metrics |= {f"validation/{name}/{metric}": value for metric, value in found.items()}
        self.run.count(metrics)
        return step > 0 and self.run.is_best(metrics, trainer.best_metric)

    def _validate_set(self, examples: Sequence[Preference]) -> dict[str, float]:
        size = self.config.data.train_batch_size
        rewards = np.concatenate([self._reward(examples[i : i + size]) for i in range(0, len(examples), size)])
        if self.config.preference.is_paired:
            return describe_margins(rewards[0::2] - rewards[1::2])
        chosen = np.array([example.is_chosen for example in examples])
        return {"accuracy": float(((rewards > 0) == chosen).mean())}

    def _reward(self, examples: Sequence[Preference]) -> np.ndarray:
        """Return the implicit reward, or score, of each response, [n]; collective."""
        loss, samples = self.config.preference, self._pack(examples)
        rewards = self._measure_log_ratios(samples)
        if loss.loss in ("simpo", "orpo", "ipo"):
            rewards = rewards / samples.headers.num_loss_tokens
        return rewards if loss.loss == "bradley_terry" else loss.beta * rewards

    def _measure_log_ratios(self, samples: Experience) -> np.ndarray:
        batch, count = self.actor.read(samples), len(samples.headers)
        found = score_responses(self.actor.role, batch, count)
        return found - score_responses(self.reference.role, batch, count) if self.reference else found

    def _measure_baseline(self, examples: Sequence[Preference]) -> float:
        """Return z of KTO: the mean log-ratio of each response after the next example's prompt, at least 0."""
        others = [
            replace(
                example,
                responses=[Rollout.from_response(example.prompt, 0, other.responses[0].response_tokens, None, "stop")],
            )
            for example, other in zip(examples, [examples[-1], *examples[:-1]], strict=True)
        ]
        return max(float(self._measure_log_ratios(self._pack(others)).mean()), 0.0)

    def _pack(self, examples: Sequence[Preference]) -> Experience:
        rollouts = [(i, response) for i, example in enumerate(examples) for response in example.responses]
        return replicate(rollouts, [example.prompt for example in examples], world())


def train_preferences(config: RunConfig, recipe: Path | None) -> None:
    """Run preference learning from a loaded config (UserError if it is bad, Preempted after a stop signal)."""
    config = replace(config, algorithm=with_reference(config))
    train_sft(config, recipe, read_preference_inputs, PreferenceTrainer)
