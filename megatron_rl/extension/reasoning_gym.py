# SPDX-License-Identifier: Apache-2.0
"""Tasks of the package reasoning-gym in place of a data file: reasoning-gym:NAME?size=500&seed=1. It scores them, too.

A task is made again from its number wherever it is scored, so that rows hold nothing but texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from typing import Any
from urllib.parse import parse_qsl

from megatron_rl.types import UserError

PREFIX = "reasoning-gym:"
_SOURCE = "data.train_files / data.validation_files"
_EXPECTED = f"{PREFIX}NAME?size=500&seed=1, further options as the data set has them"
_QUESTION = "{question}\n\nWrite your final answer between <answer> and </answer>."


def read_reasoning_gym(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a data set: location and columns.

    Raises:
        UserError: the package or the data set is not there, or an option is not one of its own.
    """
    tasks = _open(file)
    for index in range(len(tasks)):
        task = tasks[index]
        yield (
            f"{file}:task {index}",
            {
                "prompt": [{"role": "user", "content": _QUESTION.format(question=task["question"].strip())}],
                "answer": {"file": file, "index": index, "answer": str(task["answer"])},
                "data_source": file.partition("?")[0],
            },
        )


def score_reasoning_gym(response: str, ground_truth: Any) -> float:
    """The package's score of an answer, from 0 to 1.

    Args:
        response: the text in its last <answer> tags is the answer; without any, all behind the thoughts.
        ground_truth: as in the rows of `read_reasoning_gym`.
    """
    tasks = _open(ground_truth["file"])
    said = response.rpartition("</think>")[2]
    if "<answer>" in said:
        said = said.rpartition("<answer>")[2].partition("</answer>")[0]
    try:
        return float(tasks.score_answer(said.strip(), tasks[ground_truth["index"]]))
    except Exception:  # scorers of the package read what a policy happened to write
        return 0.0


def identify(file: str) -> str:
    """What a data set depends on: its name with the options, and the version of the package."""
    return f"{file} {version('reasoning-gym')}"


@lru_cache
def _open(file: str) -> Any:
    name, _, query = file.removeprefix(PREFIX).partition("?")
    options = {key: _read_value(value) for key, value in parse_qsl(query)}
    try:
        package = import_module("reasoning_gym")  # optional, and slow
        return package.create_dataset(name, **{"size": 500, "seed": 1, **options})
    except ImportError as error:
        raise UserError(
            f"{file}: the package reasoning-gym is not installed",
            source=_SOURCE,
            expected=_EXPECTED,
            hint="pip install reasoning-gym",
        ) from error
    except Exception as error:  # the package asserts what its options may be
        raise UserError(
            f"{file}: {type(error).__name__}: {error}",
            source=_SOURCE,
            expected=_EXPECTED,
            hint="python -c 'from reasoning_gym.factory import DATASETS; print(*DATASETS)' lists the names",
        ) from error


def _read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
