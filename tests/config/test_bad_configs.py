# SPDX-License-Identifier: Apache-2.0
"""Configs that are refused: each mistake of a recipe is reported, in one error.

`bad_configs.json` has a row for each: settings, the refused one, and words of its error. Not covered: checks that need
the world size (test_batch_plan.py) or files (tests/run).
"""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import pytest

from megatron_rl.config import checks
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

ROWS: list[tuple[list[str], str, str]] = json.loads(Path(__file__).with_name("bad_configs.json").read_text())
MINIMAL = {"model.path": "policy", "data.train_files": "train.jsonl", "data.train_batch_size": "8"}
# Mistake, or None, of each line of a recipe.
RECIPE = """\
model:
  path: policy
  dtype: float16                         # 1
data:
  train_files: [train.jsonl]
  validation_files: [v.jsonl, ./v.jsonl]  # 2
  train_batch_size: 8
actor:
  tensor_model_parallel_sise: 2          # 3
  lr: fast                               # 4
  min_lr: 1                              # is above any rate, but actor.lr is not known
  lr_decay_style: linear
  step_mode: graph
  recompute_granularity: offload         # 5
rollout:
  n: 0                                   # 6
  top_p: 1.5                             # 7
rolout: {n: 8}                           # 8
trainer:
  max_failed_share: 2                    # 9
checkpoint:
  allow_changes: [modle]                 # 10
"""


def _refusals(recipe: Path | None, overrides: list[str]) -> list[UserError]:
    with pytest.raises(UserError) as caught:
        load_config(recipe, overrides)
    return list(getattr(caught.value, "errors", [caught.value]))


def test_rules_of_features_apply_whenever_they_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `feature_checks.py` applied to every config, each bad one has the same mistakes."""
    overrides = [[f"{key}={value}" for key, value in MINIMAL.items()] + given for given, _, _ in ROWS]
    before = [[str(error) for error in _refusals(None, given)] for given in overrides]
    monkeypatch.setattr(checks, "_UNUSED", None)
    assert [[str(error) for error in _refusals(None, given)] for given in overrides] == before


def test_each_bad_config_is_refused_for_its_setting(tmp_path: Path) -> None:
    """From a recipe, with the line, if a recipe can contain it; the other rows are about the command line."""
    assert len(ROWS) > 200
    path, wrong = tmp_path / "recipe.yaml", []
    for given, name, words in ROWS:
        pairs = [text.partition("=")[::2] for text in given]
        if all(key and value and key[0] != "-" and value != "[a" for key, value in pairs):
            settings = {**MINIMAL, **dict(pairs)}
            path.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
            place = f"{path}:{list(settings).index(name) + 1}" if name in settings else ""
            errors = _refusals(path, [])
        else:
            errors, place = _refusals(None, [f"{key}={value}" for key, value in MINIMAL.items()] + given), ""
        if not any(name in e.found and words in e.found and place in e.source for e in errors):
            wrong.append((given, name, words, [str(error) for error in errors]))
        assert all(error.source and error.expected and error.hint for error in errors)
    assert not wrong


def test_all_mistakes_of_a_recipe_are_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    errors = _refusals(path, [])
    lines = [
        number for number, line in enumerate(RECIPE.splitlines(), 1) if line.rstrip()[-1].isdigit() and "# " in line
    ]
    assert len(lines) == 10
    assert sorted(error.source.rpartition(f"{path}:")[2].rstrip(")") for error in errors) == sorted(map(str, lines))


def test_mistakes_that_come_together_are_reported_together() -> None:
    """One may hide another only if a rule of the one reads a value that the other has: few do."""
    rng, planted, reported = random.Random(1), 0, 0
    rows = [row for row in ROWS if not row[0][0].startswith("--")]
    for _ in range(60):
        chosen: dict[str, tuple[list[str], str, str]] = {}
        for row in rng.sample(rows, 8):
            names = [text.partition("=")[0] for text in row[0]]
            if not chosen.keys() & set(names):
                chosen |= dict.fromkeys(names, row)
        given = [text for row in {id(row): row for row in chosen.values()}.values() for text in row[0]]
        errors = _refusals(None, [f"{key}={value}" for key, value in MINIMAL.items()] + given)
        for _, name, words in {id(row): row for row in chosen.values()}.values():
            planted += 1
            reported += any(name in error.found and words in error.found for error in errors)
    assert planted > 400 and reported > 0.95 * planted


def test_the_text_numbers_the_mistakes_and_one_alone_has_no_number(tmp_path: Path) -> None:
    given = [f"{key}={value}" for key, value in MINIMAL.items()]
    with pytest.raises(UserError) as caught:
        load_config(None, [*given, "rollout.n=0", "actor.lr=-1", "stray", "--no-such-flag", "3", "trainer.sead=1"])
    text = str(caught.value)
    assert [text.count(f"\n{number}. ") for number in range(1, 7)] == [1, 1, 1, 1, 1, 0]
    assert text.startswith("5 mistakes") and text.count("source:") == text.count("hint:") == 5
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    with pytest.raises(UserError) as caught:
        load_config(None, [*given, "rollout.n=0"])
    assert str(caught.value).startswith("rollout.n = 0 is too small\n  source:")


def test_what_is_missing_or_repeated_stands_beside_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: policy}\nactor: {lr: 1, lr: 2}\ndata: {weights: [], train_files: 3}\ncritic.lr: x\n")
    found = [error.found for error in _refusals(path, [])]
    assert [text for text in found if "'actor.lr' stands twice" in text]
    assert [text for text in found if text.startswith("data.train_files = 3 (int) is not accepted")]
    assert [text for text in found if text == "data.train_batch_size is missing"]
    assert len(found) == 4, "data.weights cannot be judged: the files that they belong to were refused"
