# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic of supervised fine-tuning and of preferences, which have one trained role and no rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.batch_plan import (
    check_data_size,
    check_longest_sequence,
    check_ranks,
    count_steps,
)
from megatron_rl.config.checked import CheckedConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.types import UserError


@dataclass(frozen=True)
class SftPlan:
    """Batch arithmetic of fine-tuning; `total_steps` is None until the data is read.

    A batch is one minibatch, in which every response counts as a rollout.
    """

    world_size: int
    dp_size: int
    train_batch_size: int
    max_tokens_per_microbatch: int
    longest_sequence: int
    max_response_length: int
    num_examples: int | None
    total_steps: int | None
    responses_per_example: int = 1  # 2 for pairs

    @classmethod
    def build(
        cls, cfg: RunConfig, world_size: int, num_examples: int | None = None, responses_per_example: int = 1
    ) -> SftPlan:
        """Derive the plan; refuse sizes that do not divide or exceed the data (UserError)."""
        _check_settings(cfg, responses_per_example == 2)
        dp_size = check_ranks(cfg.actor, range(world_size))
        check_longest_sequence(cfg.data, cfg.actor, "actor")
        if responses_per_example == 2:
            _check_longest_pair(cfg)
        check_data_size(cfg, num_examples)
        return cls(
            world_size=world_size,
            dp_size=dp_size,
            train_batch_size=cfg.data.train_batch_size,
            max_tokens_per_microbatch=cfg.actor.max_tokens_per_microbatch,
            longest_sequence=cfg.data.max_prompt_length + cfg.data.max_response_length,
            max_response_length=cfg.data.max_response_length,
            num_examples=num_examples,
            total_steps=count_steps(cfg, num_examples),
            responses_per_example=responses_per_example,
        )

    @property
    def rollouts_per_minibatch(self) -> int:
        """Responses per optimizer step."""
        return self.train_batch_size * self.responses_per_example

    def formulas(self) -> list[str]:
        """Return each derived number with its formula."""
        batch = self.train_batch_size
        lines = [
            f"dp_size = world_size / (tp * pp * cp) = {self.dp_size}",
            f"examples per optimizer step = train_batch_size = {batch}, in microbatches of at most "
            f"{self.max_tokens_per_microbatch} tokens per DP rank",
        ]
        if self.num_examples is not None and self.total_steps is not None:
            lines.append(
                f"epochs = total_steps * train_batch_size / examples = {self.total_steps} * {batch} / "
                f"{self.num_examples} = {self.total_steps * batch / self.num_examples:.2f}"
            )
        return lines


def _check_settings(cfg: RunConfig, is_paired: bool) -> None:
    checked, here = CheckedConfig(cfg), "in supervised fine-tuning"
    why = "validates, and supervised fine-tuning has no validation"
    checked.require(
        cfg.trainer.total_steps != 0, "trainer.total_steps", why, expected="steps", hint="use tools/evaluate.py"
    )
    checked.allow("actor.mtp_lr", 0, f"{here}: the layer learns from responses that the policy samples", "leave it out")
    checked.allow(
        "layout.mode", "given", f"{here}, which the planner does not cover", "give the section actor a layout"
    )
    checked.allow("trainer.max_silent_steps", None, f"{here}, which has no groups of responses", "leave it out")
    checked.allow("data.curriculum.kind", "off", f"{here}, which has no rollouts", "leave it out")
    for role in cfg.placement.placed[:1]:
        why = f"{here}, which has one role"
        checked.allow(f"placement.{role.partition('.')[0]}", None, why, "remove the section placement")
    if is_paired and cfg.actor.share_prompts == "tree":
        checked.allow("actor.share_prompts", True, "with pairs, which share a prompt only", "leave it out")
    checked.mistakes.raise_all()


def _check_longest_pair(cfg: RunConfig) -> None:
    prompts, budget = (1 if cfg.actor.share_prompts else 2), cfg.actor.max_tokens_per_microbatch
    longest = prompts * cfg.data.max_prompt_length + 2 * cfg.data.max_response_length
    if longest > budget:
        raise UserError(
            f"a pair may have {prompts} * data.max_prompt_length + 2 * data.max_response_length = {longest} tokens",
            source="actor.max_tokens_per_microbatch",
            expected=f"at most actor.max_tokens_per_microbatch = {budget}: both responses are in one microbatch",
            hint=f"set actor.max_tokens_per_microbatch={longest}",
        )
