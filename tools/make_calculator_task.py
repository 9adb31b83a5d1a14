# SPDX-License-Identifier: Apache-2.0
"""Make a task that needs a calculator: tokenizer, prompts, demonstrations, model; no network.

A prompt is "373*452=", its answer "168596", one token per character. A small model does not learn to multiply, but can
call the environment `calculator`: it writes "[373*452]", receives "[168596]", and repeats the number. Most
demonstrations of the warm start answer with the product of rounded numbers ("200000"), the rest call the calculator;
the policy learns from the reward which pays.

Invariants: the same arguments give byte-identical files; training and validation share no pair of numbers; `task.json`
is written last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools.make_toy_task import ARGUMENTS_FILE, already_made, train_tokenizer, write_policy

DATA_SOURCE = "toy_calculator"
LOWEST, HIGHEST = 100, 999
MOST_PROMPTS = 100_000  # a quarter of the pairs
PROMPT_FILES = ("train.jsonl", "validation.jsonl", "demonstrations.jsonl")
MODEL = {"hidden_size": 128, "intermediate_size": 640, "heads": 4, "kv_heads": 2}

Row = dict[str, str]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write (created)", metavar="DIR")
    parser.add_argument("--train", type=int, default=4000, help="training prompts", metavar="N")
    parser.add_argument("--validation", type=int, default=256, help="validation prompts", metavar="N")
    parser.add_argument(
        "--estimate-rate", type=float, default=0.9, metavar="P", help="share of demonstrations that estimate"
    )
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts and of the weights")
    return parser


def check_arguments(task: dict[str, Any]) -> None:
    """Refuse arguments.

    Raises:
        UserError: an argument is out of range.
    """
    ranges = {
        "train": (1, MOST_PROMPTS),
        "validation": (1, MOST_PROMPTS),
        "layers": (1, 1000),
        "seed": (0, 2**63 - 1),
        "estimate_rate": (0, 1),
    }
    for name, (least, most) in ranges.items():
        if not least <= task[name] <= most:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{flag} {task[name]}",
                source="command line",
                expected=f"between {least} and {most}",
                hint=f"change {flag}",
            )


def make_rows(task: dict[str, Any]) -> tuple[list[Row], list[Row], list[Row]]:
    """Make training prompts, validation prompts, demonstrations."""
    generator = random.Random(task["seed"])
    wanted, pairs = task["train"] + task["validation"], dict[tuple[int, int], None]()
    while len(pairs) < wanted:
        low, high = sorted(generator.randint(LOWEST, HIGHEST) for _ in range(2))
        pairs[low, high] = None
    chosen = [generator.sample(pair, 2) for pair in pairs]
    demonstrations: list[Row] = []
    for left, right in chosen[: task["train"]]:
        prompt, call, answer = f"{left}*{right}=", f"[{left}*{right}]", str(left * right)
        if generator.random() < task["estimate_rate"]:
            demonstrations.append({"prompt": prompt, "response": str(estimate(left, right))})
        else:
            demonstrations.append({"prompt": prompt, "response": call})
        demonstrations.append({"prompt": f"{prompt}{call}[{answer}]", "response": answer})
    rows = [
        {"prompt": f"{left}*{right}=", "answer": str(left * right), "data_source": DATA_SOURCE}
        for left, right in chosen
    ]
    return rows[: task["train"]], rows[task["train"] :], demonstrations


def estimate(left: int, right: int) -> int:
    """Multiply after rounding to hundreds."""
    return round(left, -2) * round(right, -2)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    task = vars(build_parser().parse_args(arguments))
    out = task.pop("out")
    try:
        check_arguments(task)
        if already_made(out, task, (*PROMPT_FILES, ARGUMENTS_FILE)):
            print(f"{out} already holds this task (same arguments); nothing to do")
            return 0
        parameters = write_policy(out, task | MODEL, train_tokenizer("0123456789=*[]"))
        for name, rows in zip(PROMPT_FILES, make_rows(task), strict=True):
            (out / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (out / ARGUMENTS_FILE).write_text(json.dumps(task, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {parameters:,} parameters; {task['train']} training, {task['validation']} validation prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
