# SPDX-License-Identifier: Apache-2.0
"""Learning from preferences: DPO and its relatives, KTO, and reward models; fine-tuning's loop with another loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.algorithms.preference_losses import describe_margins
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.preference_rows import Preference
from megatron_rl.observability.metrics import TokenTexts
from megatron_rl.parallel.collectives import world
from megatron_rl.run.building import build_role
from megatron_rl.run.inputs import SftInputs
from megatron_rl.run.opening import OpenedRun
from megatron_rl.run.preference_inputs import REWARD_MODELS, PreferenceInputs, read_preference_inputs, with_reference
from megatron_rl.run.reference_sums import ReferenceSums, describe_reference, digest_responses, read_sums
from megatron_rl.run.sft import SftTrainer, train_sft
from megatron_rl.samples.batch import Packer
from megatron_rl.samples.experience import Experience, replicate, text_row
from megatron_rl.training.roles.frozen import BaseOfActor
from megatron_rl.training.roles.score_learner import PreferenceLoss, ProcessLoss, ScoreLearner, score_responses
from megatron_rl.training.setup import RoleSetup
from megatron_rl.types import Rollout


class PreferenceTrainer(SftTrainer):
    """Trained model, reference, data and outputs of one run; building it is collective."""

    def _build(self, opened: OpenedRun, inputs: SftInputs) -> None:
        assert isinstance(inputs, PreferenceInputs)
        self.inputs, self.reference, self.sums, file = inputs, None, None, self.config.preference.reference_logprobs
        if file is not None:
            self.about = describe_reference(self.config, inputs, opened.dependencies)
            self.sums = read_sums(Path(file), self.about, inputs)
            self.run.log.info("log-probs of the reference: %s", f"{file}, to be written" if self.sums is None else file)
        super()._build(opened, inputs)
        role, model = inputs.reference, self.actor.role
        if role is not None and self.sums is None:
            shared = role.spec.shares is not None
            frozen = BaseOfActor(model) if shared else build_role(self.config, role, self.groups, self.total_steps)
            self.reference = self.run.timers.watch(frozen, compute_logprobs="ref_logprobs")

    def find_class(self, inputs: SftInputs) -> Callable[[RoleSetup], Any] | None:
        """Return the class of a reward model; `None` for the actor's."""
        return ScoreLearner if inputs.actor.spec.head == "score" else None

    def make_packer(self, actor: Any) -> Packer:
        """Return the packer, which keeps pairs together."""
        config = self.config
        return Packer(actor.model, config.actor, self.plan, config.algorithm, self.process.device, whole_prompts=True)

    def train(self) -> None:
        """Write the file of the reference's log-probs, if it is to be written, and train."""
        file = self.config.preference.reference_logprobs
        if file is not None and self.sums is None:
            self.sums, self.reference = self._score_rows(), None
            self.sums.write(Path(file), self.about)
        super().train()

    def _score_rows(self) -> ReferenceSums:
        """Score all rows with the reference, in the batches of the first epoch and of validation; collective.

        The last bits of log-probs depend on the other sequences of a batch.
        """
        data, size, keys, sums = self.inputs.data.examples, self.config.data.train_batch_size, [], []
        epoch: list[Any] = [self.examples.prompt(position) for position in range(-(-len(data) // size) * size)]
        seen = set(map(id, epoch))
        left = [example for example in data if id(example) not in seen]
        for part in (epoch, left, *(part.examples for part in self.inputs.validation.values())):
            for examples in self._split(part):
                keys.append(digest_responses(examples))
                sums.append(self._score_reference(examples, self._pack(examples)))
        return ReferenceSums(np.concatenate(keys), np.concatenate(sums))

    def update(self, examples: Sequence[Preference]) -> Experience:
        """Take one optimizer step on a batch of preferences, and return them packed; collective."""
        samples, steps = self._pack(examples), self._find_steps(examples)
        count = len(examples) if steps is None else len(steps.labels)
        (minibatch,) = self.actor.minibatches(samples)
        self.actor.forward_backward(minibatch, self._make_loss(examples, samples) if steps is None else steps)
        tokens = samples.headers.num_loss_tokens.sum()  # metrics of a loss are means per token
        self.run.count(
            {
                name: value * tokens / count if name.startswith("preference/") and name != "preference/loss" else value
                for name, value in self.actor.optim_step().items()
            }
        )
        return samples

    def _make_loss(self, examples: Sequence[Preference], samples: Experience) -> PreferenceLoss:
        preference = self.config.preference
        lengths = [len(r.response_tokens) for e in examples if e.is_chosen for r in e.responses[:1]]
        return PreferenceLoss(
            preference,
            np.array([example.is_chosen for example in examples]),
            np.array([example.margin for example in examples]),
            np.array([example.weight for example in examples]),
            num_chosen_tokens=sum(lengths),
            references=self._score_reference(examples, samples),
            baseline=0.0 if preference.is_paired else self._measure_baseline(examples),
            scores=self.actor.model.shape.has_score_head,
        )

    def _find_steps(self, examples: Sequence[Preference]) -> ProcessLoss | None:
        loss = self.config.preference.loss
        return ProcessLoss(self.config.preference, examples) if loss == "process" else None

    def validate(self, step: int) -> bool | None:
        """Measure validation sets; return whether the result is the best so far, `None` if nothing was due."""
        trainer = self.config.trainer
        if step == 0:
            is_due = trainer.val_before_train
        else:
            is_due = step == self.total_steps or bool(trainer.test_freq and step % trainer.test_freq == 0)
        if not is_due or not self.inputs.validation:
            return None
        metrics = {}
        with self.run.timers.phase("validation"):
            for name, part in self.inputs.validation.items():
                rewards = np.concatenate([self._reward(examples) for examples in self._split(part.examples)])
                found = describe_margins(_find_margins(part.examples, rewards))
                metrics |= {f"validation/{name}/{metric}": value for metric, value in found.items()}
                rows = _describe_rows(part.examples, rewards.tolist(), self.inputs.tokenizer.decode)
                self.run.write_validation(step, name, rows, is_shown=True)
        self.run.count(metrics)
        return step > 0 and self.run.is_best(metrics, trainer.best_metric)

    def _split(self, examples: Sequence[Preference]) -> list[Sequence[Preference]]:
        size = self.config.data.train_batch_size
        return [examples[i : i + size] for i in range(0, len(examples), size)]

    def _reward(self, examples: Sequence[Preference]) -> np.ndarray:
        """Return the implicit reward, or score, of each response (of each step: process), [n]; collective."""
        loss, samples = self.config.preference, self._pack(examples)
        rewards = self._measure_log_ratios(examples, samples)
        if loss.loss in ("simpo", "orpo", "ipo"):
            rewards = rewards / samples.headers.num_loss_tokens
        return rewards if loss.loss in REWARD_MODELS else loss.beta * rewards

    def _measure_log_ratios(self, examples: Sequence[Preference], samples: Experience) -> np.ndarray:
        batch, steps = self.actor.read(samples), self._find_steps(examples)
        found = score_responses(self.actor.role, batch, len(samples.headers), steps)
        reference = self._score_reference(examples, samples)
        return found if reference is None else found - reference

    def _score_reference(self, examples: Sequence[Preference], samples: Experience) -> np.ndarray | None:
        if self.sums is not None:
            return self.sums.find(examples)
        if self.reference is None:
            return None
        return score_responses(self.reference, self.actor.read(samples), len(samples.headers))

    def _measure_baseline(self, examples: Sequence[Preference]) -> float:
        """Return z of KTO: the mean log-ratio of each response after the next example's prompt, at least 0."""
        others = [
            replace(
                example,
                responses=[Rollout.from_response(example.prompt, 0, other.responses[0].response_tokens, None, "stop")],
            )
            for example, other in zip(examples, [examples[-1], *examples[:-1]], strict=True)
        ]
        return max(float(self._measure_log_ratios(others, self._pack(others)).mean()), 0.0)

    def _pack(self, examples: Sequence[Preference]) -> Experience:
        rollouts = [(i, response) for i, example in enumerate(examples) for response in example.responses]
        return replicate(rollouts, [example.prompt for example in examples], world())


def _find_margins(examples: Sequence[Preference], rewards: np.ndarray) -> np.ndarray:
    """Return the chosen reward minus the rejected one; of single responses and steps, the reward with its label's sign.

    Args:
        rewards: of each response, or of each step.
    """
    if len(examples[0].responses) == 2:
        return rewards[0::2] - rewards[1::2]
    labels = [example.step_labels if len(example.step_labels) else [example.is_chosen] for example in examples]
    return np.where(np.concatenate(labels), rewards, -rewards)


def _describe_rows(
    examples: Sequence[Preference], rewards: Sequence[float], decode: Callable[[list[int]], str]
) -> Iterator[dict[str, Any]]:
    """Yield the log row of each response; steps are turns, whose rewards are their scores."""
    token_texts, left = TokenTexts(decode), iter(rewards)
    for example in examples:
        found = list(islice(left, len(example.step_ends) or len(example.responses)))
        for i, rollout in enumerate(example.responses):
            tokens = rollout.response_tokens.tolist()
            row = text_row(replace(rollout, response=decode(tokens), reward=found[i]))
            if len(example.step_ends):
                starts = [0, *(example.step_ends[:-1] + 1 - len(example.prompt.tokens)).tolist()]
                turns = [{"branch": 0, "start": start, "reward": x} for start, x in zip(starts, found, strict=True)]
                yield row | {"reward": min(found), "token_texts": token_texts(tokens), "turns": turns}
                continue
            margin = {"margin": found[0] - found[1]} if len(found) == 2 else {}
            label = "chosen" if example.is_chosen and i == 0 else "rejected"
            yield row | {"label": label, "reward_components": margin}


def train_preferences(config: RunConfig, recipe: Path | None) -> None:
    """Run preference learning from a loaded config (UserError if it is bad, Preempted after a stop signal)."""
    config = replace(config, algorithm=with_reference(config))
    train_sft(config, recipe, read_preference_inputs, PreferenceTrainer)
