# SPDX-License-Identifier: Apache-2.0
"""Print what a run learned: scores of its validation responses, first and last, and answers to the same prompts.

    python tools/show_answers.py checkpoints/runs/RUN [--prompts 10]

A score is the share of responses with the full reward of a rule, with its 95 % interval (Wilson, 1927). A rule of
`reward.components` with weight 0 is a second opinion on the answers that the run did not learn from.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.observability.metrics import ROLLOUTS, VALIDATION
from megatron_rl.rewards.answers import RESTATES
from megatron_rl.rewards.scoring import COUNTS
from megatron_rl.run.command_line import end_program
from megatron_rl.types import UserError
from tools._arguments import Arguments

PROMPT_END = 100  # characters of a prompt that are printed

Row = dict[str, Any]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a run with validation")
    parser.add_argument("--prompts", type=int, default=10, metavar="N", help="prompts to print per set (default: 10)")
    return parser


def compute_interval(right: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share."""
    z, share = NormalDist().inv_cdf(0.975), right / total
    middle = share + z * z / (2 * total)
    spread = z * (share * (1 - share) / total + (z / (2 * total)) ** 2) ** 0.5
    return (middle - spread) / (1 + z * z / total), (middle + spread) / (1 + z * z / total)


def read_first_and_last(directory: Path) -> tuple[dict[int, list[Row]], list[str]]:
    """Return the rows of a validation set after its first and its last step, by step, and the names of the rules.

    Raises:
        UserError: fewer than two steps were validated, or they have other prompts.
    """
    files = sorted(directory.glob("step_*.jsonl"), key=lambda file: int(file.stem.removeprefix("step_")))
    steps = {
        int(file.stem.removeprefix("step_")): [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        for file in (files[:1] + files[-1:])
    }
    asked = {tuple((row["prompt_id"], row["sample_index"]) for row in rows) for rows in steps.values()}
    if len(steps) < 2 or len(asked) > 1:
        raise UserError(
            f"{directory} holds {len(files)} steps" if len(steps) < 2 else f"{directory}: other prompts at the end",
            source=str(directory),
            expected="the same validation prompts before and after training",
            hint="set trainer.test_freq, and validate before training (trainer.val_before_train)",
        )
    components = next(iter(steps.values()))[0]["reward_components"]
    return steps, ["reward", *sorted(components.keys() - {*COUNTS, RESTATES})]


def format_score(rows: list[Row], rule: str) -> str:
    """Return the share of rows with a full reward by a rule, with its interval."""
    scores = [row["reward"] if rule == "reward" else row["reward_components"].get(rule, 0.0) for row in rows]
    right = sum(score >= 1 for score in scores)
    low, high = compute_interval(right, len(rows))
    return f"{right / len(rows):.3f} [{low:.3f}, {high:.3f}]"


def describe_set(name: str, steps: dict[int, list[Row]], rules: list[str], num_prompts: int) -> str:
    """Return a table of scores, then prompts with their truth and the first and last response."""
    (first, before), (last, after) = steps.items()
    lines = [f"{name}, {len(before)} responses:", f"  {'':24} {f'step {first}':24} step {last}"]
    lines += [f"  {rule:24} {format_score(before, rule):24} {format_score(after, rule)}" for rule in rules]
    for old, new in [*zip(before, after, strict=True)][:num_prompts]:
        lines += ["", f"  prompt {_shorten(old['prompt'].strip())!r}", f"  truth  {old['ground_truth']!r}"]
        for label, row in (("before", old), ("after", new)):
            lines.append(f"  {label:6} {row['response']!r} (reward {row['reward']:.4g})")
    return "\n".join(lines)


def _shorten(prompt: str) -> str:
    """Return the end of a prompt; chat templates begin with long system messages."""
    return prompt if len(prompt) <= PROMPT_END else f"... {prompt[-PROMPT_END:]}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    try:
        directories = sorted((options.run_dir / VALIDATION).glob(f"*/{ROLLOUTS}"))
        if not directories:
            raise UserError(
                f"no validation responses in {options.run_dir}",
                source="command line",
                expected=f"{VALIDATION}/<set>/{ROLLOUTS}/step_N.jsonl",
                hint="set data.validation_files and trainer.test_freq",
            )
        for directory in directories:
            print(describe_set(directory.parent.name, *read_first_and_last(directory), options.prompts))
    except UserError as error:
        return end_program(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
