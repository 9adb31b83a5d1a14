# SPDX-License-Identifier: Apache-2.0
"""Primitives of a training loop: `Trainer.train` uses them, and so does a loop of your own (docs/primitives.md).

Every call is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.checkpoint.directory import find_step
from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.checkpoint.saving import save_now
from megatron_rl.config.fields import dump_yaml
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import PromptSet
from megatron_rl.engines.build import import_library
from megatron_rl.engines.protocol import Sampled
from megatron_rl.parallel.collectives import Process, world
from megatron_rl.rollout.episodes import SampleGroups
from megatron_rl.run.building import RolloutMembers, RunSinks, build_roles, build_rollout_members
from megatron_rl.run.checkpoints import TrainingState, actor_export, side_files
from megatron_rl.run.inputs import Parts, RlInputs
from megatron_rl.samples.batch import Packer
from megatron_rl.samples.experience import Column, Experience, check_kind, find_rollouts
from megatron_rl.training.roles.actor import ActorOnSamples, PolicyOnSamples
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.training.roles.critic import CriticOnSamples
    from megatron_rl.training.roles.frozen import TeachersOnSamples


class Policy(ActorOnSamples):
    """The policy: a model in training, and its copies in rollout engines; methods are collective."""

    def __init__(
        self,
        role: Any,
        packer: Packer,
        sampling: RolloutMembers,
        state: TrainingState,
        config: RunConfig,
        given: RlInputs,
    ) -> None:
        super().__init__(role, packer)
        self.hybrid, self._collector, self._state, self._config = sampling.hybrid, sampling.collector, state, config
        self._tokenizer, mtp = given.tokenizer, self.role.mtp
        self._export = actor_export(config, self.model, None if mtp is None else mtp.model)
        self._generates, self._recipe = False, dump_yaml(config)

    @contextmanager
    def rollout_mode(self) -> Iterator[None]:
        """Copy the actor's weights into the engines for a `with` block; then engines on the actor's ranks sleep."""
        with self.hybrid.rollout_mode():
            self._generates = True
            try:
                yield
            finally:
                self._generates = False

    def _check_mode(self, call: str) -> None:
        if not self._generates:
            raise UserError(
                f"policy.{call} outside rollout mode",
                source=f"policy.{call}",
                expected="engines with the current weights",
                hint=f"with policy.rollout_mode(): policy.{call}(...)",
            )

    def sample(
        self, step: int, prompts: Sequence[Any] | None = None, n: int | None = None, temperature: float | None = None
    ) -> Experience:
        """Generate and score responses; only inside a `rollout_mode` block.

        Args:
            step: part of every response's seed: equal steps give equal responses for equal weights.
            prompts: `Prompt`s, texts, messages or token ids, the same on every rank; by default the next
                `data.train_batch_size`, with dynamic sampling and greedy responses if needed.
            n, temperature: override `rollout`'s for given prompts; `logprobs` keeps `rollout.temperature`.

        Raises:
            UserError: a prompt is too long, a reward failed, or no `rollout_mode` is open; on every rank.
        """
        self._check_mode("sample")
        check_kind(step, int, "policy.sample(step)", "a whole number")
        if prompts is None and n is None and temperature is None:
            return self._collector.collect(step)
        from megatron_rl.data.chats import read_given_prompts

        limit, sampling = self._config.data.max_prompt_length, self._collector.sampling_by_source
        prompts = read_given_prompts(prompts, self._tokenizer, limit, n, temperature)
        n = self._config.rollout.n if n is None else n
        return self._collector.generate(SampleGroups(prompts, n, sampling(temperature), step))

    def sample_requests(self, requests: Sequence[Any]) -> list[Sampled]:
        """Return responses to `engines.token_requests.TokenRequest`s, the same on every rank, in `rollout_mode`."""
        self._check_mode("sample_requests")
        from megatron_rl.engines.token_requests import build_requests

        default, size = self._collector.sampling(), self.model.shape.vocab_size
        return self._collector.generator.answer(build_requests(requests, self._config, default, self._tokenizer, size))

    @property
    def runs_ahead(self) -> bool:
        """Whether engines on ranks of their own generate while the policy trains (docs/schedules.md)."""
        return self._collector.runs_ahead

    def run_ahead(self) -> None:
        """On ranks of engines only, generate until all training ranks call this; once per step, after its updates."""
        if self.runs_ahead:
            self._collector.run_ahead()

    def validate(
        self, validation: Mapping[str, PromptSet], on_set: Callable[[str, list[Experience]], None] | None = None
    ) -> dict[str, float]:
        """Return `validation/<set>/<metric>`; only in `rollout_mode`. `on_set` receives a set's name and samples."""
        self._check_mode("validate")
        check_kind(validation, Mapping, "policy.validate(validation)", "run.inputs.validation")
        return self._collector.validate(validation, on_set)

    def expand(self, samples: Experience, values: Sequence[float] | np.ndarray) -> Column:
        """Repeat a value per rollout, [num_rollouts], for each of its tokens in the loss; other tokens get 0."""
        check_kind(samples, Experience, "policy.expand(samples, values)")
        table = torch.zeros(())
        with suppress(TypeError, ValueError, RuntimeError):  # no numbers
            table = torch.as_tensor(values, dtype=torch.float32)
        if table.shape != (count := len(samples.headers.rollouts),):
            raise UserError(
                f"values of shape {list(table.shape)} for {count} rollouts: {values!r:.80}",
                source="policy.expand",
                expected="one number per rollout, in their order",
                hint="compute them from samples.rewards",
            )
        batch = self.read(samples)
        table = torch.nn.functional.pad(table.to(batch.tokens.device), (0, 1))
        rollouts = find_rollouts(samples.headers, batch)
        return Column(torch.where(batch.loss_mask, table[rollouts], 0.0), samples.pack(self.packer))

    def save(self, directory: str | Path, step: int) -> Path:
        """Write `<directory>/step_<N>`, a checkpoint that `load`, a run (`checkpoint.resume`) and the tools read.

        Raises:
            UserError: it cannot be written; on every rank.
        """
        check_kind(directory, (str, Path), "policy.save(directory, step)", "a directory")
        check_kind(step, int, "policy.save(directory, step)", "a whole number")
        state = self._state
        content = state.content(step, self._recipe)
        outcome = save_now(Path(directory), content, state.roles, world(), state.rank_state())
        if outcome.error is not None:
            raise outcome.error
        return outcome.directory

    def load(self, directory: str | Path) -> int:
        """Load a checkpoint of `save` or a run, from any parallel layout, and return its step.

        Args:
            directory: `step_<N>`, or a directory whose latest checkpoint is loaded.

        Raises:
            UserError: the checkpoint is incomplete, or of another model; on every rank, with nothing changed.
        """
        check_kind(directory, (str, Path), "policy.load(directory)", "a directory")
        from megatron_rl.checkpoint.resuming import load_training_state

        state, found = self._state, find_step(Path(directory))
        resumed = load_training_state(found, state.roles, side_files=state.side_files, group=world())
        state.restore(resumed, world())
        return resumed.step

    def export(self, directory: str | Path) -> None:
        """Write the weights in Hugging Face format, with tokenizer and config of `model.path`."""
        check_kind(directory, (str, Path), "policy.export(directory)", "a directory")
        self._export(Path(directory))

    def describe_reshard(self) -> dict[str, float]:
        """Return metrics of the last transfer of weights from the actor to the engines."""
        stats = self.hybrid.reshard_stats
        return {
            "reshard/bytes_moved": stats.bytes_moved,
            "reshard/bytes_copied": stats.bytes_copied,
            "reshard/bytes_aliased": stats.bytes_aliased,
            "reshard/verified_tensors": self.hybrid.verified_tensors,
        }

    def close(self) -> None:
        """Release the engines and the reward workers."""
        self._collector.close()


@dataclass(frozen=True)
class Primitives:
    """The objects of a training loop; a role that the config does not have is `None`.

    Attributes:
        inputs: with the batch arithmetic `plan` and the policy's `tokenizer`.
        reward_models: samples -> scores, [num_rollouts], by the names in the metrics `reward/NAME`.
        trained: roles with an optimizer by name; stand-ins on ranks without the role.
    """

    config: RunConfig
    inputs: RlInputs
    policy: Policy
    reference: PolicyOnSamples | None
    critic: CriticOnSamples | None
    reward_models: dict[str, Callable[[Experience], Any]]
    state: TrainingState
    trained: dict[str, SavedRole]
    teachers: TeachersOnSamples | None = None


def build_primitives(
    config: RunConfig, inputs: RlInputs, parts: Parts, process: Process, sinks: RunSinks
) -> Primitives:
    """Build the roles, the engines and the training state; collective."""
    spec, timers, is_elsewhere = inputs.spec, sinks.timers, parts.rollouts or config.schedule.elastic
    if not is_elsewhere and process.rank in config.placement.ranks_of("rollout", process.world_size):
        import_library(config.rollout.engine, process.device)
    roles = build_roles(config, inputs, parts, sinks.starting)
    reference, critic = roles.get("reference"), roles.get("critic")
    sampling = build_rollout_members(config, inputs, roles, process, sinks, parts)
    packers = {
        name: Packer(roles[name].model, spec.roles[name].settings, inputs.plan, config.algorithm, process.device)
        for name in spec.roles
    }
    saved = [role.spec for role in inputs.roles.values() if role.spec.trainable or role.spec.is_reset]
    held = {role.name: SavedRole(roles[role.name].model.trained, roles[role.name].optimizer) for role in saved}
    state = TrainingState(
        {name: role for name, role in held.items() if roles[name].model.dp_rank is not None},
        {"prompts": sampling.prompts, "hybrid": sampling.hybrid}
        | ({"stream": sampling.stream} if sampling.stream is not None else {}),
        {role.name: side_files(config, role.path) for role in saved},
        sampling.stream,
    )
    actor = timers.watch(
        roles["actor"],
        compute_logprobs="old_logprobs",
        compute_sum_pi_squared="old_logprobs",
        forward_backward="update",
        optim_step="update",
    )
    policy = Policy(actor, packers["actor"], sampling, state, config, inputs)
    teachers = {
        name: timers.watch(
            roles[role.name], compute_logprobs="teachers", compute_top_k="teachers", compute_hidden="teachers"
        )
        for name, role in spec.teachers.items()
    }
    asked = None
    if teachers:
        from megatron_rl.training.roles.frozen import TeachersOnSamples

        asked = TeachersOnSamples(teachers, {name: packers[f"teachers.{name}"] for name in teachers}, policy, config)
    learned = None
    if critic:
        from megatron_rl.training.roles.critic import CriticOnSamples

        names = dict(compute_values="values", forward_backward="update_critic", optim_step="update_critic")
        learned = CriticOnSamples(timers.watch(critic, **names), packers["critic"])
    return Primitives(
        config=config,
        inputs=inputs,
        policy=policy,
        teachers=asked,
        reference=reference
        and PolicyOnSamples(timers.watch(reference, compute_logprobs="ref_logprobs"), packers["reference"]),
        critic=learned,
        reward_models={source.name: model for source, model in sampling.reward_models.items()},
        state=state,
        trained={role.name: held[role.name] for role in spec.trained},
    )
