# SPDX-License-Identifier: Apache-2.0
"""Prompts, demonstrations and pairs of bench_real_recipes.py; the same arguments give the same files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.extension.reasoning_gym import create_tasks

ROOT = Path(__file__).resolve().parents[2]
VALIDATION_PROMPTS = 128
CALCULATOR_PROMPTS = 1128  # products of two numbers up to LARGEST_FACTOR, of which 128 validate
LARGEST_FACTOR = 99
# A dialog that shows a call of the environment `calculator`, before each question.
CALL = (
    {"role": "user", "content": "What is 12 * 34?"},
    {"role": "assistant", "content": "[12*34]"},
    {"role": "tool", "content": "[408]"},
    {"role": "assistant", "content": "408"},
)

# Task of reasoning-gym -> questions in its form, answered with their steps, before each question.
EXAMPLES = {
    "aiw": [
        (
            "Anna has 2 sisters and she also has 3 brothers. How many sisters does Anna's brother have?",
            "Anna and her 2 sisters: 2 + 1 = 3. The answer is 3.",
        )
    ],
    "gsm_symbolic": [
        (
            "Anna has 3 bags with 4 apples each. She eats 2 apples. How many apples does she have left?",
            "3 * 4 = 12 apples. 12 - 2 = 10 apples. The answer is 10.",
        ),
        (
            "Ben is 12 years old. His sister is 5 years younger. How old are they together?",
            "12 - 5 = 7 years. 12 + 7 = 19 years. The answer is 19.",
        ),
    ],
}
GYM_TASKS, TRAINING_QUESTIONS, LONGEST_QUESTION = 4000, 640, 200  # made, kept, characters

Row = dict[str, Any]


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows as lines of JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(file: Path) -> list[Row]:
    """Read lines of JSON."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def make_sums(directory: Path, operation: str, largest: int) -> None:
    """Make train.jsonl and validation.jsonl with tools/make_sums_task.py."""
    command = [sys.executable, "tools/make_sums_task.py", "--out", str(directory), f"--operation={operation}"]
    command += ["--largest", str(largest), "--validation", str(VALIDATION_PROMPTS)]
    subprocess.run(command, cwd=ROOT, check=True)


def make_calculator(directory: Path) -> None:
    """Make products of larger numbers, each after a dialog that calls the calculator."""
    make_sums(directory, "*", LARGEST_FACTOR)
    for name, most in (("train", CALCULATOR_PROMPTS - VALIDATION_PROMPTS), ("validation", VALIDATION_PROMPTS)):
        rows = read_rows(directory / f"{name}.jsonl")[:most]
        for row in rows:
            question = row["prompt"][0]["content"].removesuffix(" Reply with the number only.")
            row["prompt"] = [*CALL, {"role": "user", "content": question}]
        write_rows(directory / f"{name}.jsonl", rows)


def make_words(directory: Path, name: str) -> None:
    """Make different, short questions of a task of reasoning-gym, each after examples with their steps."""
    tasks = create_tasks(f"{name}?size={GYM_TASKS}&seed=1")
    examples = [part for asked, said in EXAMPLES[name] for part in ({"role": "user", "content": asked}, *reply(said))]
    found: dict[str, Row] = {}
    for number in range(GYM_TASKS):
        question, _, _ = tasks[number]["question"].partition(" Give the result")
        prompt = [*examples, {"role": "user", "content": question}]
        if len(question) <= LONGEST_QUESTION:
            found[question] = {"prompt": prompt, "answer": str(tasks[number]["answer"]), "data_source": name}
    rows = list(found.values())[: VALIDATION_PROMPTS + TRAINING_QUESTIONS]
    write_rows(directory / "validation.jsonl", rows[:VALIDATION_PROMPTS])
    write_rows(directory / "train.jsonl", rows[VALIDATION_PROMPTS:])


def write_demonstrations(prompts: Path, count: int, file: Path) -> None:
    """Write demonstrations "11 + 30 = 41" of the first prompts of a file of sums."""
    rows = read_rows(prompts)[:count]
    for row in rows:
        question = row["prompt"][0]["content"].removeprefix("What is ").partition("?")[0]
        row["response"] = f"{question} = {row['answer']}"
    write_rows(file, rows)


def write_pairs(prompts: Path, rollouts: Iterable[Mapping[str, Any]], seed: int, file: Path) -> int:
    """Write pairs of a right and a wrong response that a model gave to the same prompt; return their number.

    Args:
        rollouts: the responses, with `prompt_id` as the row of `prompts`; truncated ones are left out, and each right
            response is used once.
    """
    answers: dict[int, tuple[list[str], list[str]]] = {}
    for rollout in rollouts:
        if rollout["finish_reason"] == "stop":
            wrong_and_right = answers.setdefault(rollout["prompt_id"], ([], []))
            wrong_and_right[rollout["reward"] >= 1].append(rollout["response"])
    rows, generator = read_rows(prompts), random.Random(seed)
    pairs = [
        {"prompt": rows[number]["prompt"], "chosen": reply(right), "rejected": reply(wrong)}
        for number, (all_wrong, all_right) in sorted(answers.items())
        for wrong, right in zip(all_wrong, all_right, strict=False)
    ]
    generator.shuffle(pairs)
    write_rows(file, pairs)
    return len(pairs)


def reply(text: str) -> list[dict[str, str]]:
    """Return a response as the reply of a conversation."""
    return [{"role": "assistant", "content": text}]


TASKS: dict[str, Callable[[Path], None]] = {
    "products": lambda directory: make_sums(directory, "*", 20),
    "differences": lambda directory: make_sums(directory, "-", 30),
    "calculator": make_calculator,
    "aiw": lambda directory: make_words(directory, "aiw"),
    "gsm_symbolic": lambda directory: make_words(directory, "gsm_symbolic"),
}
