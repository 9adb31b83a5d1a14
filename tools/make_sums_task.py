# SPDX-License-Identifier: Apache-2.0
"""Make chat prompts with sums, differences or products of two numbers, for a small instruct model.

    python tools/make_sums_task.py --out checkpoints/smollm2

Writes train.jsonl and validation.jsonl: all ordered pairs of numbers from 2 to --largest, shuffled by the seed.
The same arguments give byte-identical files, which share no prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.run.command_line import end_program
from megatron_rl.types import UserError
from tools._arguments import Arguments

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SMALLEST = 2


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write (created)")
    parser.add_argument("--operation", choices=OPERATIONS, default="+", help="operation to ask for (default: +)")
    parser.add_argument("--largest", type=int, default=30, metavar="N", help="largest operand (default: 30)")
    parser.add_argument("--validation", type=int, default=128, metavar="N", help="validation prompts (default: 128)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the order (default: 1)")
    return parser


def make_rows(operation: str, largest: int, seed: int) -> list[dict[str, object]]:
    """Make one row per ordered pair of operands, in random order."""
    rows = []
    for left, right in itertools.product(range(SMALLEST, largest + 1), repeat=2):
        question = f"What is {left} {operation} {right}? Reply with the number only."
        answer = str(OPERATIONS[operation](left, right))
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": answer, "data_source": "sums"})
    random.Random(seed).shuffle(rows)
    return rows


def run(options: argparse.Namespace) -> None:
    """Write the files.

    Raises:
        UserError: the validation prompts would leave none for training.
    """
    rows = make_rows(options.operation, options.largest, options.seed)
    if not 0 < options.validation < len(rows):
        raise UserError(
            f"--validation {options.validation} of {len(rows)} prompts",
            source="command line",
            expected="at least one prompt for validation and one for training",
            hint="change --validation, or raise --largest",
        )
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("validation", rows[: options.validation]), ("train", rows[options.validation :])):
        file = options.out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{file}: {len(part)} prompts")


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    try:
        run(options)
    except UserError as error:
        return end_program(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
