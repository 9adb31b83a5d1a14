# SPDX-License-Identifier: Apache-2.0
"""`${...}` references between settings, and forms that are refused instead of being read as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

BASE = "model: {path: policy}\ndata: {train_files: train.jsonl, train_batch_size: 8, max_prompt_length: 100}\n"


def load(tmp_path: Path, text: str, *overrides: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE + text)
    return load_config(path, overrides).config


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${data.train_batch_size}", 8),
        ("${.n}", 6),
        ("${..data.max_prompt_length}", 100),
        ("${oc.select:data.train_batch_size,5}", 8),
        ("${oc.select:data.absent,5}", 5),
        ("${oc.select:data.absent,${oc.select:data.gone,${data.train_batch_size}}}", 8),
        ("${oc.select:rollout.n,${oc.select:data.gone,null}}", 6),
        ("${.validation_n}", 6),
    ],
)
def test_a_reference_has_the_value_and_its_type(tmp_path: Path, value: str, expected: int) -> None:
    """`max_num_seqs` stands for any setting that takes a number; `validation_n` is a step on the way."""
    text = f'rollout: {{n: 6, validation_n: "${{.n}}", max_num_seqs: "{value}"}}'
    assert load(tmp_path, text + "\n").rollout.max_num_seqs == expected


def test_references_inside_text(tmp_path: Path) -> None:
    text = "trainer: {run_dir: 'runs/${model.path}-${data.train_batch_size}'}\n"
    assert load(tmp_path, text).trainer.run_dir == "runs/policy-8"


def test_the_command_line_is_referred_to(tmp_path: Path) -> None:
    text = 'rollout: {max_num_seqs: "${data.train_batch_size}"}\n'
    assert load(tmp_path, text, "data.train_batch_size=16").rollout.max_num_seqs == 16
    assert load(tmp_path, "", "rollout.max_num_seqs=${data.train_batch_size}").rollout.max_num_seqs == 8


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('rollout: {n: "${.max_num_seqs}", max_num_seqs: "${.n}"}', "rollout.n refers to itself: rollout.n -> "),
        ('rollout: {n: "${data.absent}"}', "a name that is not given"),
        ('rollout: {n: "${oc.env:HOME}"}', "contains an interpolation"),
        ('rollout: {n: "${data.${model.path}}"}', "contains an interpolation"),
    ],
)
def test_what_cannot_be_resolved_is_refused(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text + "\n")
    assert found in caught.value.found
    assert caught.value.source.endswith("recipe.yaml:3")
