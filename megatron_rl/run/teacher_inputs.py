# SPDX-License-Identifier: Apache-2.0
"""What teachers and policy must have in common, and which prompts a teacher is asked about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.checkpoint.side_files import find_model_files
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.types import Prompt, UserError
from megatron_rl.weights.families import ModelShape


def check_vocabularies(config: RunConfig, role: RoleSpec, tokenizer: Tokenizer, sizes: Sequence[ModelShape]) -> None:
    """Refuse a teacher to which the policy's token ids mean something else.

    Args:
        config: of the run.
        role: of the teacher.
        tokenizer: of the policy.
        sizes: the policy's shape, and the teacher's.

    Raises:
        UserError: a token has another id, or the teacher has no logits for tokens whose distribution is compared.
    """
    theirs = load_tokenizer(find_model_files(Path(role.path))).read_vocabulary()
    differing = [token for token, index in tokenizer.read_vocabulary().items() if theirs.get(token) != index]
    if differing:
        raise UserError(
            f"{len(differing)} of the policy's tokens have other ids in the tokenizer of {role.title}, such as "
            f"{differing[0]!r}",
            source=f"{role.section}.path and model.path",
            expected="one vocabulary: a teacher scores the token ids that the policy has sampled",
            hint="choose a teacher of the policy's family",
        )
    student, teacher = sizes
    if config.algorithm.distillation.kind == "full" and teacher.vocab_size < student.vocab_size:
        raise UserError(
            f"{role.title} has {teacher.vocab_size} logits, the policy {student.vocab_size}",
            source=f"{role.section}.path and algorithm.distillation.kind",
            expected="a logit of the teacher for each of the policy's",
            hint="set algorithm.distillation.kind=top_k",
        )


def choose_teachers(config: RunConfig, prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """The prompts about which each teacher is asked, by the index of the prompt; every teacher is in it.

    Raises:
        UserError: a prompt that `algorithm.distillation.choose_by` gives no teacher.
    """
    column, everything = config.algorithm.distillation.choose_by, list(range(len(prompts)))
    if column is None:
        return dict.fromkeys(config.teachers, everything)
    teacher_of = {value: name for name, teacher in config.teachers.items() for value in teacher.values or [name]}
    found: dict[str, list[int]] = {name: [] for name in config.teachers}
    for index, prompt in enumerate(prompts):
        value = prompt.row.get(column, prompt.data_source if column == "data_source" else None)
        if value not in teacher_of:
            raise UserError(
                f"{column} = {value!r} of prompt_id {prompt.prompt_id} names no teacher",
                source="algorithm.distillation.choose_by and data.train_files",
                expected=f"one of {', '.join(teacher_of)}",
                hint="add the value to teachers.NAME.values, or remove the row",
            )
        found[teacher_of[value]].append(index)
    return found
