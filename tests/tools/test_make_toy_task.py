# SPDX-License-Identifier: Apache-2.0
"""The toy task: deterministic bytes, disjoint operands, right answers, a model that transformers loads."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_toy_task.py"
SMALL = ["--train", "60", "--validation", "12", "--max-operand", "9", "--layers", "1", "--operations=+-"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("tools.make_toy_task")


@pytest.fixture(scope="module")
def task(tool, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "new" / "task"
    assert tool.main(["--out", str(out), *SMALL]) == 0
    return out


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def read(task: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (task / f"{name}.jsonl").read_text().splitlines()]


def test_two_runs_write_the_same_bytes(tool, task, tmp_path):
    """On one machine with one set of library versions; other versions may initialize otherwise."""
    torch.rand(7)  # the state of the global generator must not matter
    assert tool.main(["--out", str(tmp_path), *SMALL]) == 0
    assert contents(tmp_path) == contents(task)
    assert set(tool.FILES) <= set(contents(task))


def test_seed_changes_prompts_and_weights(tool, task, tmp_path):
    assert tool.main(["--out", str(tmp_path), *SMALL, "--seed", "2"]) == 0
    changed = {name for name, data in contents(tmp_path).items() if data != contents(task)[name]}
    assert changed == {
        "task.json",
        "train.jsonl",
        "validation.jsonl",
        "train_mixed.jsonl",
        "validation_mixed.jsonl",
        "preferences.jsonl",
        "preferences_validation.jsonl",
        "model/model.safetensors",
    }


def test_preferences_prefer_answers(task):
    """Training pairs have every prompt without operands of validation; held-out pairs have the validation prompts."""
    learned, held_out = read(task, "preferences"), read(task, "preferences_validation")
    for pair in learned + held_out:
        assert pair["chosen"] == str(eval(pair["prompt"][:-1])) != pair["rejected"] != ""
    operands = [{frozenset(re.findall(r"\d+", pair["prompt"])) for pair in pairs} for pairs in (learned, held_out)]
    assert not operands[0] & operands[1] and len(operands[0] | operands[1]) == 55
    assert {pair["prompt"] for pair in held_out} == {row["prompt"] for row in read(task, "validation")}
    assert {pair["prompt"] for pair in learned} > {row["prompt"] for row in read(task, "train")}
    assert len(held_out) > 2 * 12


def test_rows_are_right_and_disjoint(task):
    train, validation = read(task, "train"), read(task, "validation")
    assert (len(train), len(validation)) == (60, 12)
    pairs: list[set[frozenset[int]]] = []
    for rows in (train, validation):
        assert len({row["prompt"] for row in rows}) == len(rows)
        pairs.append(set())
        for row in rows:
            left, operation, right = re.fullmatch(r"(\d)([+-])(\d)=", row["prompt"]).groups()
            result = int(left) + int(right) if operation == "+" else int(left) - int(right)
            assert row["answer"] == str(result) and result >= 0
            pairs[-1].add(frozenset((int(left), int(right))))
    assert not pairs[0] & pairs[1]
    assert {row["prompt"][1] for row in train} == {"+", "-"}


@pytest.mark.parametrize(
    ("prompt", "slip"),
    [("37+45=", "72"), ("82+93=", "75"), ("5+99=", "94"), ("10+20=", "30"), ("42-17=", "35"), ("55-55=", "0")],
)
def test_forgotten_carries(tool, prompt, slip):
    assert tool.forget_carries(prompt) == slip


@pytest.mark.parametrize(("rate", "right"), [(0.0, 1.0), (1.0, None)])
def test_demonstrations_slip_as_often_as_asked(tool, task, rate, right):
    """At the two ends; validation rows have no demonstration."""
    arguments = json.loads((task / "task.json").read_text()) | {"slip_rate": rate}
    train, validation, _ = tool.make_prompts(arguments)
    for row in train:
        assert row["demonstration"] == (row["answer"] if right else tool.forget_carries(row["prompt"]))
    assert all("demonstration" not in row for row in validation)


def test_mixed_prompts_are_the_same_and_long_ones(task):
    """0.4 of them long: two digits instead of one; nothing of the validation in the training."""
    pairs: list[set[frozenset[str]]] = []
    for name, long_count in (("train", 40), ("validation", 8)):
        mixed, short = read(task, f"{name}_mixed"), {row["prompt"]: row["answer"] for row in read(task, name)}
        assert len({row["prompt"] for row in mixed}) == len(mixed) == len(short) + long_count
        assert {row["prompt"]: row["answer"] for row in mixed if len(row["prompt"]) == 4} == short
        pairs.append(set())
        for row in mixed:
            assert row.keys() == {"prompt", "answer", "data_source"}
            left, operation, right = re.fullmatch(r"(\d+)([+-])(\d+)=", row["prompt"]).groups()
            assert len(left) == len(right) == (1 if row["prompt"] in short else 2)
            result = int(left) + int(right) if operation == "+" else int(left) - int(right)
            assert row["answer"] == str(result) and result >= 0
            pairs[-1].add(frozenset((left, right)))
    assert not pairs[0] & pairs[1]


def test_no_long_prompts(tool, task):
    arguments = json.loads((task / "task.json").read_text()) | {"long_share": 0.0}
    rows = [[{"prompt": "1+1=", "answer": "2"}], [{"prompt": "1+2=", "answer": "3"}]]
    assert tool.mix_in_long_prompts(arguments, *rows) == tuple(rows)


def test_package_reads_the_task(task):
    tokenizer = load_tokenizer(task / "model")
    cfg = DataConfig(train_files=[], train_batch_size=1)
    prompts = load_prompts([str(task / "train.jsonl")], tokenizer, cfg).prompts
    for prompt in prompts:
        assert len(prompt.tokens) == len(prompt.text) == 4 and tokenizer.decode(prompt.tokens) == prompt.text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.vocab_size == 17 and prompts[0].data_source == "toy_arithmetic"


def test_model_loads_and_has_the_promised_shape(task):
    """One forward pass on fresh weights; whether the model can learn the task is not tested here."""
    model = AutoModelForCausalLM.from_pretrained(task / "model", local_files_only=True)
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (
        17,
        128,
        640,
        1,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings) == (4, 2, 256)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.rms_norm_eps) == (1, 2, 0, 1e-6)
    assert config.rope_parameters["rope_theta"] == 10000.0 and config.tie_word_embeddings
    assert model.dtype == torch.float32 and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.q_proj.bias.abs().min() > 0
    assert model(torch.tensor([[4, 5, 6]])).logits.shape == (1, 3, 17)


def test_default_model_has_a_million_parameters(tool, tmp_path):
    options = vars(tool.build_parser().parse_args(["--out", "x"])) | {"intermediate_size": 640}
    assert tool.write_model(tmp_path, options, vocab_size=17) == 1_184_000


def test_same_arguments_again_change_nothing(tool, task, capsys):
    before = contents(task)
    assert tool.main(["--out", str(task), *SMALL]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert contents(task) == before


@pytest.mark.parametrize(
    "prepare, message",
    [
        (lambda out: (out / "notes.txt").write_text("mine"), "holds no complete task"),
        (lambda out: (out / "task.json").write_text('{"seed": 9}'), "holds no complete task"),
    ],
)
def test_other_contents_are_not_overwritten_without_force(tool, tmp_path, capsys, prepare, message):
    prepare(tmp_path)
    assert tool.main(["--out", str(tmp_path), *SMALL]) == 2
    assert message in capsys.readouterr().err
    assert tool.main(["--out", str(tmp_path), *SMALL, "--force"]) == 0
    assert tool.main(["--out", str(tmp_path), *SMALL]) == 0


def test_other_arguments_are_refused_and_named(tool, task, capsys):
    assert tool.main(["--out", str(task), *SMALL, "--train", "59"]) == 2
    assert "train 60 (now 59)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--train", "0"], "--train 0"),
        (["--validation", "-1"], "--validation -1"),
        (["--operations", "*"], "--operations"),
        (["--operations", "++"], "--operations"),
        (["--operations="], "--operations"),
        (["--seed", "-1"], "--seed -1"),
        (["--long-share", "1.0"], "--long-share 1.0"),
        (["--heads", "6"], "multiple of 4"),
        (["--kv-heads", "3"], "divisor"),
        (["--hidden-size", "130"], "128 or 256"),
        (["--max-operand", "9"], "there are"),
        (["--out", str(TOOL)], "is a file"),
    ],
)
def test_bad_arguments(tool, tmp_path, capsys, arguments, message):
    assert tool.main(["--out", str(tmp_path / "task"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "task").exists()


@pytest.mark.parametrize("operations, prompts", [("+", r"\d\+\d="), ("-", r"\d-\d=")])
def test_single_operations(tool, operations, prompts):
    task = {"train": 20, "validation": 5, "seed": 1, "max_operand": 9, "operations": operations, "slip_rate": 0.5}
    for rows in tool.make_prompts(task):
        assert all(re.fullmatch(prompts, row["prompt"]) for row in rows)
    assert len(tool.train_tokenizer("0123456789=" + operations)) > 0


def test_runs_as_a_program_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, TOOL, "--out", "task", "--train", "x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        "--max-operand"
        in subprocess.run(
            [sys.executable, TOOL, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
    )
