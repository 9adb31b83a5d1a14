# SPDX-License-Identifier: Apache-2.0
"""Rows and orders of prompts by functions of the user: names, digests, and what is refused.

Not covered: runs (`run/test_user_program.py` compares one with a run that reads the same rows from a file).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import ActorConfig, DataConfig, ModelConfig, RunConfig
from megatron_rl.data.chosen_order import find_order
from megatron_rl.data.prompts import PromptBatches, name_files
from megatron_rl.data.rows import read_rows
from megatron_rl.run.inputs import localize
from megatron_rl.types import Prompt, UserError

PROMPTS = [Prompt(i, np.zeros(1, np.int32), "", None, row={"level": -i}) for i in range(4)]
CODE = """
import numpy as np

def rows():
    return [{"prompt": str(i)} for i in range(3)]

def generate():
    yield from rows()

class Rows:
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return rows()[i]

def number(): return 5
def needs(split): return rows()
def fails(): return 1 / 0
def easy_first(prompts, epoch): return sorted(range(len(prompts)), key=lambda i: prompts[i].row["level"])
def later(prompts, epoch): return (i for i in np.random.default_rng(epoch).permutation(len(prompts)))
def random(prompts, epoch): return np.random.default_rng().permutation(len(prompts) * 10)[: len(prompts)] % len(prompts)
def few(prompts, epoch): return [0]
def beyond(prompts, epoch): return [0, 1, 2, 4]
def half(prompts, epoch): return [0.5] * 4
def none(prompts, epoch): pass
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


def make(**data: Any) -> RunConfig:
    data = {"train_files": ["a.jsonl"], "train_batch_size": 1, **data}
    return RunConfig(model=ModelConfig(path="m"), data=DataConfig(**data), actor=ActorConfig())


@pytest.mark.parametrize("name", ["rows", "generate", "Rows"])
def test_a_function_returns_rows(code: str, name: str) -> None:
    """Ranks compare the name with the digest; a run that reads its config again calls the function again."""
    config, notes = localize(make(train_files=[f"{code}:{name}"], validation_files=[f"{code}:{name}"]))
    (pinned,) = config.data.train_files
    assert pinned.startswith(f"object:{code}:{name}?") and config.data.validation_files == [pinned]
    assert notes[0] == f"data.train_files: {code}:{name} is {pinned}"
    assert [row.columns for row in read_rows([pinned])] == [{"prompt": str(i)} for i in range(3)]
    assert localize(config) == (config, []) and [*name_files([pinned])] == [name]

    from megatron_rl.data import passed_rows

    passed_rows._ROWS.clear()
    assert len([*read_rows([pinned])]) == 3
    passed_rows._ROWS.clear()
    Path(code).write_text(CODE.replace("range(3)", "range(1, 4)"))
    with pytest.raises(UserError, match="returns rows whose digest differs from the one"):
        list(read_rows([pinned]))


@pytest.mark.parametrize(
    "name, found",
    [
        ("number", "that is a int"),
        ("needs", "raised TypeError"),
        ("fails", r"raised ZeroDivisionError(.|\n)*mine.py:18"),
        ("absent", 'no function or class "absent"'),
    ],
)
def test_other_functions_for_rows_are_refused(code: str, name: str, found: str) -> None:
    with pytest.raises(UserError, match=found) as caught:
        localize(make(train_files=[f"{code}:{name}"]))
    assert f"data.train_files = {code}:{name}" in caught.value.source


def test_a_function_orders_the_prompts_of_each_epoch(code: str) -> None:
    batches = PromptBatches(PROMPTS, 2, find_order(f"{code}:easy_first", PROMPTS), 0)
    assert [prompt.prompt_id for _ in range(4) for prompt in next(batches)] == [3, 2, 1, 0] * 2
    config, notes = localize(make(shuffle=f"{code}:later"))
    pinned = config.data.shuffle
    assert (
        isinstance(pinned, str)
        and pinned.startswith(f"{code}:later?")
        and notes == [f"data.shuffle: {code}:later is {pinned}"]
    )
    drawn = PromptBatches(PROMPTS, 2, find_order(pinned, PROMPTS), 0)
    orders = [[prompt.prompt_id for _ in range(2) for prompt in next(drawn)] for _ in range(2)]
    assert orders == [np.random.default_rng(epoch).permutation(4).tolist() for epoch in range(2)]
    resumed = PromptBatches(PROMPTS, 2, find_order(pinned, PROMPTS), 0)
    resumed.load_state_dict({"epoch": 1, "offset": 2, "num_prompts": 4})
    assert [prompt.prompt_id for prompt in next(resumed)] == orders[1][2:]


@pytest.mark.parametrize(
    "name, found",
    [
        ("random", "other indices at a second call for epoch 0"),
        ("few", r"array\(\[0\]\)"),
        ("beyond", r"array\(\[0, 1, 2, 4\]\)"),
        ("half", "0.5"),
        ("none", "None"),
        ("rows", "raised TypeError"),
        ("latr", "did you mean later"),
        ("5", "names no function"),
    ],
)
def test_other_orders_are_refused(code: str, name: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        find_order(f"{code}:{name}", PROMPTS)(0)


def test_an_order_beside_weights_is_refused(code: str) -> None:
    config = make(shuffle=f"{code}:later", weights=[1.0])
    with pytest.raises(UserError, match="beside data.shuffle"):
        check_config(config)
    check_config(replace(config, data=replace(config.data, weights=None)))
