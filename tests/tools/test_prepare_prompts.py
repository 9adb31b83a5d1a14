# SPDX-License-Identifier: Apache-2.0
"""GSM8K and MATH out of the forms in which they are published, read back by the loader that training uses.

The rows are hand-written in the published schemas; the data sets themselves are not here.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompts import load_prompts
from reward_samples import math_equal

ROOT = Path(__file__).resolve().parents[2]
GSM8K = [
    {
        "question": "Ann has 1,000 apples and buys 250. How many?",
        "answer": "1000 + 250 = <<1000+250=1250>>1250\n#### 1,250",
    },
    {"question": "Half of 7?", "answer": "7 / 2 = 3.5\n#### 3.5"},
]
MATH = {
    "algebra/1.json": {
        "problem": "Solve $2x=1$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "So $x=\\boxed{\\frac{1}{2}}$.",
    },
    "number_theory/7.json": {
        "problem": "Write 1000 with a comma.",
        "level": "Level 2",
        "type": "Number Theory",
        "solution": "It is $\\boxed{1,\\!000}$.",
    },
}


class Letters:
    """A tokenizer with a token per character; the chat template names the roles."""

    vocab_size, eos_token_id = 1 << 21, 0

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], **options: str) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    encode_content = encode_rendered = encode
    render = apply_chat_template


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("tools.prepare_prompts")


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list:
    config = DataConfig(train_files=[str(path)], train_batch_size=1, max_prompt_length=500)
    return load_prompts([str(path)], Letters(), config).prompts


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_gsm8k_is_read_back_by_training(tool: ModuleType, tmp_path: Path, form: str) -> None:
    """Published as JSONL and as the hub's parquet; written as verl's parquet and as JSONL."""
    write_jsonl(tmp_path / "in/train.jsonl", GSM8K)
    (tmp_path / "in/main").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GSM8K[:1]), tmp_path / "in/main/test-00000-of-00001.parquet")
    assert (
        tool.main(
            ["--dataset", "gsm8k", "--input", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--format", form]
        )
        == 0
    )
    train, test = (read(tmp_path / f"out/{split}.{form}") for split in ("train", "test"))
    assert [p.ground_truth for p in train] == ["1250", "3.5"] and len(test) == 1
    assert (
        train[0].text == f"<user>{GSM8K[0]['question']} Let's think step by step and output the final answer "
        'after "####".'
    )
    assert train[0].data_source == "openai/gsm8k"
    assert train[1].extra_info["index"] == 1 and train[1].extra_info["answer"] == GSM8K[1]["answer"]
    assert math_equal("It is\n#### 1250", train[0].ground_truth) == 1.0


def test_math_of_one_file_per_problem(tool: ModuleType, tmp_path: Path) -> None:
    for name, problem in MATH.items():
        write_jsonl(tmp_path / "in/train" / name, [problem])
    assert (
        tool.main(
            [
                "--dataset",
                "math",
                "--input",
                str(tmp_path / "in"),
                "--out",
                str(tmp_path / "out"),
                "--splits",
                "train",
                "--instruction",
                "",
            ]
        )
        == 0
    )
    prompts = read(tmp_path / "out/train.parquet")
    assert [p.ground_truth for p in prompts] == ["\\frac{1}{2}", "1,\\!000"]
    assert [p.text for p in prompts] == [f"<user>{p['problem']}" for p in MATH.values()]
    assert prompts[1].extra_info["type"] == "Number Theory"
    assert math_equal("\\boxed{0.5}", prompts[0].ground_truth) == 1.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "?", "answer": "no idea"}], "train.jsonl:1"),
        ([GSM8K[0], {"question": "?"}], 'column "answer" is missing'),
        (None, "holds no split 'train'"),
    ],
)
def test_bad_input_is_one_clear_error(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict] | None, message: str
) -> None:
    (tmp_path / "in").mkdir()
    if rows:
        write_jsonl(tmp_path / "in/train.jsonl", rows)
    assert tool.main(["--dataset", "gsm8k", "--input", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and "hint:" in error
    assert not (tmp_path / "out").exists()


def test_two_forms_of_one_split_are_refused(tool: ModuleType, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", GSM8K)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GSM8K), tmp_path / "train.parquet")
    with pytest.raises(tool.UserError, match="several times"):
        tool.find_files(tmp_path, "train")
