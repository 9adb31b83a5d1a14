# SPDX-License-Identifier: Apache-2.0
"""Data sets of the package reasoning-gym with their scorer: reasoning-gym:NAME?size=500&seed=1.

Rows contain text and a task's index, from which scoring regenerates the task. `level=3` makes tasks of one level of the
package's curriculum for the set; `levels=4` makes `size` tasks of each of the levels 0 to 3, with a column `level`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from typing import Any
from urllib.parse import parse_qsl, urlencode

from megatron_rl.extension.registry import GYM
from megatron_rl.types import UserError

_SOURCE = "data.train_files / data.validation_files"
_EXPECTED = f"{GYM}NAME?size=500&seed=1, further options as the data set has them"
QUESTION = "{question}\n\nWrite your final answer between <answer> and </answer>."


def read_reasoning_gym(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and columns of each task (UserError: the package, data set or option does not exist)."""
    name, options = split_options(file)
    if "levels" in options:
        if not isinstance(count := options.pop("levels"), int) or count < 1:
            hint = "levels=4 makes tasks of the levels 0 to 3"
            raise UserError(f"{file}: levels={count}", source=_SOURCE, expected="a number of levels", hint=hint)
        texts = {key: json.dumps(value) for key, value in options.items()}
        for level in range(count):
            for location, columns in read_reasoning_gym(f"{name}?{urlencode({**texts, 'level': level})}"):
                yield location, {**columns, "level": level}
        return
    tasks = _open(file)
    for index in range(len(tasks)):
        task = tasks[index]
        prompt = [{"role": "user", "content": QUESTION.format(question=task["question"].strip())}]
        answer = {"file": file, "index": index, "answer": str(task["answer"])}
        columns = {"prompt": prompt, "answer": answer, "data_source": file.partition("?")[0]}
        yield f"{file}:task {index}", columns


def score_reasoning_gym(response: str, ground_truth: Any) -> float:
    """Return the package's score, from 0 to 1.

    Args:
        response: its last <answer> is scored, or all text after </think>.
        ground_truth: `answer` column of `read_reasoning_gym`.
    """
    return score_answer(_open(ground_truth["file"]), ground_truth["index"], response)


def score_answer(tasks: Any, index: int, response: str) -> float:
    """Return the score of a response to a task."""
    said = response.rpartition("</think>")[2]
    if "<answer>" in said:
        said = said.rpartition("<answer>")[2].partition("</answer>")[0]
    try:
        return float(tasks.score_answer(said.strip(), tasks[index]))
    except Exception:  # the package's scorers parse arbitrary model output
        return 0.0


def identify(file: str) -> str:
    """Return a data set's name with options, and the package version."""
    return f"{file} {version('reasoning-gym')}"


def split_options(text: str) -> tuple[str, dict[str, Any]]:
    """Split "NAME?size=500&seed=1" into the name and its options, whose values are JSON or text."""
    name, _, query = text.partition("?")
    return name, {key: _read_value(value) for key, value in parse_qsl(query)}


def create_tasks(text: str, **more: Any) -> Any:
    """Create the data set "NAME?options" of the package; `more` overrides its options."""
    name, options = split_options(text)
    package, options = import_module("reasoning_gym"), options | more  # optional, and slow to import
    if "level" in options:
        curriculum = import_module("reasoning_gym.factory").create_curriculum(name)
        curriculum.set_global_level(options.pop("level"))
        options = vars(curriculum.generate_configuration(options))
    return package.create_dataset(name, **options)


@lru_cache
def _open(file: str) -> Any:
    name, options = split_options(file.removeprefix(GYM))
    try:
        return create_tasks(name, **{"size": 500, "seed": 1, **options})
    except ImportError as error:
        raise UserError(
            f"{file}: the package reasoning-gym is not installed",
            source=_SOURCE,
            expected=_EXPECTED,
            hint="pip install reasoning-gym",
        ) from error
    except Exception as error:  # the package validates options by assertions
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
