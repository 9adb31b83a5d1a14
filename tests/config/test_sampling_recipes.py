# SPDX-License-Identifier: Apache-2.0
"""Sampling settings of other systems' recipes mean the same here as there.

The program reads verl's names; the others are rows of docs/migrating.md. Not covered: whether the other systems still
use these names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.fields import dump_yaml
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

MINIMAL = ["model.path=m", "data.train_files=[t.jsonl]", "data.train_batch_size=8"]
VERL = [
    "actor_rollout_ref.model.path=m",
    "data.train_files=[t.jsonl]",
    "data.train_batch_size=8",
]
PAGE = Path(__file__).resolve().parents[2] / "docs/migrating.md"
_OURS = {
    ("TRL", "top_k", "0"): -1,
    ("slime", "--eval-top-p", "0.7"): {"all": {"top_p": 0.7}},
}  # a value that is called otherwise

RECIPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dapo": (
        "verl",
        {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "val_kwargs.top_p": 0.7, "val_kwargs.top_k": -1},
        {"validation_sets": {"all": {"top_p": 0.7}}},
    ),
    "qwen3": (
        "verl",
        {
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 20,
            "val_kwargs.do_sample": True,
            "val_kwargs.temperature": 0.6,
            "val_kwargs.top_k": 20,
            "val_kwargs.n": 16,
        },
        {
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 20,
            "validation_temperature": 0.6,
            "validation_sets": {"all": {"top_k": 20}},
            "validation_n": 16,
        },
    ),
    "verl_top_k_off": ("verl", {"top_k": 0, "val_kwargs.top_k": 0, "repetition_penalty": 1.0}, {}),
    "slime_qwen3": (
        "slime",
        {
            "--rollout-temperature": 0.8,
            "--rollout-top-p": 0.9,
            "--rollout-top-k": 50,
            "--rollout-stop": ["</answer>"],
            "--rollout-stop-token-ids": [7, 9],
            "--n-samples-per-eval-prompt": 16,
            "--eval-temperature": 0.6,
            "--eval-top-p": 0.7,
        },
        {
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 50,
            "stop": ["</answer>", 7, 9],
            "validation_n": 16,
            "validation_temperature": 0.6,
            "validation_sets": {"all": {"top_p": 0.7}},
        },
    ),
    "openrlhf": (
        "OpenRLHF",
        {"--rollout.temperature": 1.0, "--top_p": 0.95, "--eval_temperature": 0.6},
        {"top_p": 0.95, "validation_temperature": 0.6},
    ),
    "trl": (
        "TRL",
        {"temperature": 0.9, "top_p": 0.95, "top_k": 0, "min_p": 0.05},
        {"temperature": 0.9, "top_p": 0.95, "min_p": 0.05},
    ),
}


def find_setting(system: str, name: str) -> str:
    """Return our name of another system's setting, by the page's table."""
    part = next(part for part in PAGE.read_text(encoding="utf-8").split("\n## ") if part.startswith(system))
    rows = [line.split("|")[1:3] for line in part.splitlines() if line.startswith("| ")]
    return next(ours.strip(" `") for theirs, ours in rows if name in re.findall(r"`([^`]+)`", theirs))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_its_meaning(name: str) -> None:
    """All settings of sampling, those that the recipe leaves out included."""
    system, theirs, expected = RECIPES[name]
    if system == "verl":
        loaded = load_config(
            None, [*VERL, *(f"actor_rollout_ref.rollout.{key}={value}" for key, value in theirs.items())]
        )
    else:
        ours: dict[str, Any] = {}
        for key, value in theirs.items():
            name, value = find_setting(system, key), _OURS.get((system, key, str(value)), value)
            ours[name] = [*ours.get(name, []), *value] if isinstance(value, list) else value
        loaded = load_config(None, [*MINIMAL, *(f"{key}={value}" for key, value in ours.items())])
    rollout = loaded.config.rollout
    defaults = dict(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        stop=[],
        validation_temperature=0.0,
        validation_sets={},
        validation_n=1,
    )
    assert {key: getattr(rollout, key) for key in defaults} == defaults | expected
    assert not any("rollout." in note for note in loaded.notes if not note.startswith("assumed: "))


@pytest.mark.parametrize(
    ("name", "reason"), [("presence_penalty", "which tokens came before"), ("bad_words", "it forbids tokens")]
)
def test_what_is_not_served_says_why(name: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [*MINIMAL, f"rollout.{name}=1"])
    assert caught.value.found == f"unknown setting 'rollout.{name}'" and reason in caught.value.hint


def test_nested_mappings_keep_their_shape(tmp_path: Path) -> None:
    """In a recipe, on the command line, and of both together; the written config reads back as it was."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "rollout:\n  validation_sets:\n    aime: {n: 32, temperature: 0.6}\n"
        "  engine_options: {additional_config: {a: {b: 1}}}\n"
    )
    overrides = ["rollout.validation_sets.aime.n=8", "rollout.validation_sets.math.top_p=0.9"]
    config = load_config(path, [*MINIMAL, *overrides]).config
    assert config.rollout.validation_sets == {"aime": {"n": 8, "temperature": 0.6}, "math": {"top_p": 0.9}}
    assert config.rollout.engine_options == {"additional_config": {"a": {"b": 1}}}
    drawn = config.rollout.for_validation("aime")
    assert (drawn.n, drawn.temperature, drawn.top_p, drawn.top_k) == (8, 0.6, 1.0, -1)
    assert config.rollout.for_validation("other").n == 1
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "again.yaml", []).config == config
