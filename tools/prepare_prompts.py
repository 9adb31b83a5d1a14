# SPDX-License-Identifier: Apache-2.0
"""Convert local files of GSM8K or MATH to prompts in verl's schema; nothing is downloaded.

    python tools/prepare_prompts.py --dataset math --input DIR --out data/math --format jsonl

DIR contains the published splits: train.jsonl and test.jsonl, parquet files (train.parquet, or
[main/|data/]train-00000-of-00001.parquet), or one JSON file per problem in train/ and test/ (MATH). The final answer
follows the solution's last "####" or is in its last \\boxed{}; a row without one is an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.data.rows import Row, read_rows
from megatron_rl.rewards.answers import extract_answer
from megatron_rl.types import UserError
from tools._arguments import Arguments


@dataclass(frozen=True)
class Dataset:
    """Column names and instruction of a data set.

    Attributes:
        data_source: verl's name, which may select the reward.
        instruction: appended to each question.
        strips_commas: remove thousands separators from answers.
    """

    data_source: str
    question: str
    solution: str
    instruction: str
    strips_commas: bool = False


DATASETS = {
    "gsm8k": Dataset(
        "openai/gsm8k",
        "question",
        "answer",
        'Let\'s think step by step and output the final answer after "####".',
        strips_commas=True,
    ),
    "math": Dataset(
        "DigitalLearningGmbH/MATH-lighteval",
        "problem",
        "solution",
        "Let's think step by step and output the final answer within \\boxed{}.",
    ),
}


def find_files(directory: Path, split: str) -> list[Path]:
    """Return a split's files, sorted.

    Raises:
        UserError: files of several kinds.
    """
    kinds = [sorted(directory.glob(pattern)) for pattern in (f"{split}.jsonl", f"{split}/**/*.json")]
    kinds.append(
        sorted(
            path
            for pattern in (
                f"{split}.parquet",
                f"{split}-*.parquet",
                f"main/{split}-*.parquet",
                f"data/{split}-*.parquet",
            )
            for path in directory.glob(pattern)
        )
    )
    found = [files for files in kinds if files]
    if len(found) > 1:
        raise UserError(
            f"{directory} holds the split {split} several times: " + ", ".join(str(f[0]) for f in found),
            source="--input",
            expected="one form of each split",
            hint="move the others away",
        )
    return found[0] if found else []


def read_split(files: list[Path]) -> Iterator[Row]:
    """Yield rows of JSONL, parquet, or single JSON objects.

    Raises:
        UserError: an unreadable file.
    """
    if files[0].suffix != ".json":
        yield from read_rows([str(file) for file in files])
        return
    for index, file in enumerate(files):
        try:
            columns = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot read {file}: {error}",
                source=str(file),
                expected="one JSON object",
                hint="correct or remove this file",
            ) from None
        yield Row(index, index, str(file), columns)


def build_prompt(row: Row, dataset: Dataset, split: str, instruction: str) -> dict[str, Any]:
    """Build a row of verl's schema.

    Raises:
        UserError: a missing column or final answer.
    """
    question, solution = row.scalar_text(dataset.question), row.scalar_text(dataset.solution)
    answer = extract_answer(solution)
    if not answer:
        raise UserError(
            "the solution names no final answer",
            source=row.location,
            expected='"#### ANSWER" or \\boxed{ANSWER}',
            hint="correct or remove this row",
        )
    further = {
        name: value
        for name, value in row.columns.items()
        if name not in (dataset.question, dataset.solution) and isinstance(value, str | int | float)
    }
    return {
        "data_source": dataset.data_source,
        "prompt": [{"role": "user", "content": f"{question} {instruction}".strip()}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.replace(",", "") if dataset.strips_commas else answer},
        "extra_info": {"split": split, "index": row.index, "question": question, "answer": solution} | further,
    }


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write JSONL or parquet, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return
    import pyarrow  # not needed for JSONL
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--dataset", choices=DATASETS, required=True)
    parser.add_argument("--input", type=Path, required=True, metavar="DIR", help="directory with the published files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write (created)")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--splits", nargs="+", default=["train", "test"], help="names of the splits (train test)")
    parser.add_argument("--instruction", help="text after each question (default: the data set's usual one)")
    options = parser.parse_args(arguments)
    dataset = DATASETS[options.dataset]
    instruction = dataset.instruction if options.instruction is None else options.instruction
    try:
        for split in options.splits:
            files = find_files(options.input, split)
            if not files:
                raise UserError(
                    f"{options.input} holds no split {split!r}",
                    source="--input",
                    expected=f"{split}.jsonl, {split}.parquet, {split}-*.parquet, or {split}/**/*.json",
                    hint="see --help for the forms; name other splits with --splits",
                )
            rows = [build_prompt(row, dataset, split, instruction) for row in read_split(files)]
            path = options.out / f"{split}.{options.format}"
            write_rows(rows, path)
            print(f"{path}: {len(rows)} prompts from {len(files)} file{'s' * (len(files) > 1)}")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
