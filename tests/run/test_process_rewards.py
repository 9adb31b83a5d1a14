# SPDX-License-Identifier: Apache-2.0
"""Process reward models: the numbers of transformers' token classification, in every layout, and rewards made of them.

TRL's PRM trainer, which version 1.16 no longer has, is token classification with the cross entropy of two labels; the
same here, but that a response ends with EOS in place of a last separator. Not covered: mixtures and ZeRO-3 with PP.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import write_chat_tokenizer
from preference_runs import LAYOUTS, keep_compared, learn, list_steps, read_weights
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import AutoModelForTokenClassification

from distributed import run_ranks
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.preference_rows import Preference, find_marker, load_preferences
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.run.loading import load_config
from megatron_rl.run.preference_inputs import plan_preferences
from megatron_rl.types import UserError
from rl_runs import overrides_for, read_records, train
from tiny_models import ENGINE_SIZES, save_tiny_model

PROCESS = ["preference.loss=process", "reward_model.step_separator='='", "actor.weight_decay=0"]


def _load(task: Path, directory: Path, rows: list[dict[str, Any]], separator: str = "=") -> list[Preference]:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train_files=[str(file)], train_batch_size=1, max_prompt_length=64, max_response_length=24)
    tokenizer = load_tokenizer(task / "model")
    found = load_preferences([str(file)], tokenizer, config, is_paired=False, step_separator=separator)
    return found.examples


def test_rows_in_steps(task: Path, tmp_path: Path) -> None:
    (example,) = _load(task, tmp_path, [{"prompt": "1+4=", "completions": ["5", "38"], "labels": [True, False]}])
    tokenizer, tokens = load_tokenizer(task / "model"), example.responses[0].branches[0].tokens
    assert tokenizer.decode(tokens.tolist()) == "1+4=5=38" and int(tokens[-1]) == tokenizer.eos_token_id
    assert [tokenizer.decode([int(tokens[end])]) for end in example.step_ends] == ["=", ""]
    assert example.step_ends.tolist() == [5, len(tokens) - 1] and example.step_labels.tolist() == [True, False]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"completions": ["5", "3"], "labels": [True]}, 'column "labels" holds'),
        ({"completions": ["5"], "labels": [0.5]}, 'column "labels" holds'),
        ({"completions": [], "labels": []}, 'column "labels" holds'),
        ({"completions": "5", "labels": [True]}, 'column "labels" holds'),
        ({"completions": ["5"]}, 'column "labels" is missing'),
        ({"completions": ["1" * 12, "2" * 12], "labels": [True, True]}, "tokens with its EOS"),
    ],
)
def test_bad_rows(row: dict[str, Any], found: str, task: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=found) as error:
        _load(task, tmp_path, [{"prompt": "1+4=", **row}])
    assert "rows.jsonl:1" in str(error.value)


def test_separators(task: Path, tmp_path: Path) -> None:
    """Tokens whose texts end with the separator end steps, special tokens of that name, too."""
    with pytest.raises(UserError, match="the text '3=' is 2 tokens, none of which ends with it"):
        _load(task, tmp_path, list_steps(task), "3=")
    with pytest.raises(UserError, match="without the text that separates steps"):
        config = ["model.path=x", "data.train_files=[x]", "data.train_batch_size=4", "preference.loss=process"]
        plan_preferences(load_config(None, config).config, 1)
    tokenizer = write_chat_tokenizer(tmp_path, "qwen2.5")
    for separator, ends, other in (("\n", "a\n", "\na"), ("<|im_end|>", "x<|im_end|>", "<|im_end|>x")):
        is_marker = find_marker(tokenizer, separator)
        assert is_marker(tokenizer.encode(ends)[-1]) and not is_marker(tokenizer.encode(other)[-1])


@pytest.fixture(scope="module")
def one_rank(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of three steps on one rank, whose model begins with a head of its own."""
    directory = tmp_path_factory.mktemp("process")
    vocab = json.loads((task / "model/config.json").read_text())["vocab_size"]
    sizes = {**ENGINE_SIZES, "vocab_size": vocab, "num_hidden_layers": 2, "num_labels": 1}
    save_tiny_model(directory / "model", "qwen2", **sizes)
    (directory / "model/tokenizer.model").write_bytes((task / "model/tokenizer.model").read_bytes())
    learn(directory, directory, list_steps(task), *PROCESS)
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_numbers_of_one_rank(layout: str, one_rank: Path, task: Path, tmp_path: Path) -> None:
    found = learn(one_rank, tmp_path, list_steps(task), *PROCESS, LAYOUTS[layout], world_size=2)
    expected = keep_compared(read_records(one_rank / "run"))
    for mine, theirs in zip(keep_compared(found), expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=2e-6)


def test_three_updates_are_those_of_token_classification(one_rank: Path, task: Path, tmp_path: Path) -> None:
    """Losses, gradient norms and weights; and the loss of two labels whose logits differ by the score."""
    model = AutoModelForTokenClassification.from_pretrained(one_rank / "model", num_labels=1, dtype=torch.float32)
    assert not model.score.bias.any()
    model.score.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    examples = _load(task, tmp_path, list_steps(task))
    records = [record for record in read_records(one_rank / "run") if record["step"]]
    order = np.random.default_rng([1, 0]).permutation(len(examples))
    for step, record in enumerate(records):
        scores, labels = [], []
        for index in order[5 * step : 5 * step + 5]:
            tokens = torch.from_numpy(examples[index].responses[0].branches[0].tokens).long()[None]
            scores.append(model(tokens).logits[0, examples[index].step_ends, 0])
            labels.append(torch.from_numpy(examples[index].step_labels))
        logits, wanted = torch.cat(scores), torch.cat(labels)
        loss = binary_cross_entropy_with_logits(logits, wanted.float())
        two = cross_entropy(torch.stack([torch.zeros_like(logits), logits], -1), wanted.long())
        assert loss.item() == pytest.approx(two.item(), rel=1e-6)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert record["preference/loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert record["policy/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert record["preference/accuracy"] == pytest.approx(float(((logits > 0) == wanted).float().mean()))
        optimizer.step()
    weights, theirs = read_weights(one_rank), model.state_dict()
    # Adam's step is lr * g / (|g| + eps): the rounding of a small gradient is divided by itself; at worst a sign flips.
    assert max(float((value - theirs[name]).abs().max()) for name, value in weights.items()) < 5e-5
    exported = next((one_rank / "run/checkpoints").glob("step_3/huggingface"))
    again = AutoModelForTokenClassification.from_pretrained(exported, dtype=torch.float32)
    assert again.config.num_labels == 1 and torch.equal(again.score.weight, weights["score.weight"])
    assert records[-1]["validation/rows/accuracy"] > 0.5


def test_steps_are_in_the_viewer(one_rank: Path, task: Path) -> None:
    """Each step is a turn whose reward is its score; the response has the lowest of them."""
    rows = [json.loads(line) for line in (one_rank / "run/validation/rows/rollouts/step_3.jsonl").open()]
    for row, given in zip(rows, list_steps(task), strict=True):
        starts = [*(turn["start"] for turn in row["turns"]), len(row["token_texts"])]
        texts = ["".join(row["token_texts"][a:b]) for a, b in zip(starts, starts[1:], strict=False)]
        assert texts == [f"{step}=" for step in given["completions"][:-1]] + given["completions"][-1:]
        assert row["reward"] == min(turn["reward"] for turn in row["turns"])


def test_rewards_of_steps_in_grpo(one_rank: Path, task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """A response's reward is its lowest score at a separator or at its end; without separators, the plain score."""
    found = {}
    path = next((one_rank / "run/checkpoints").glob("step_3/huggingface"))
    for name, separator in (("plain", "null"), ("steps", "'='")):
        extra = [
            *(f"reward_model.path={path}", f"reward_model.step_separator={separator}", "trainer.total_steps=1"),
            *("reward.components=[1.0 model]", "trainer.log_rollouts=-1", "reward_model.max_tokens_per_microbatch=64"),
        ]
        assert run_ranks(train, 2, overrides_for(task, tmp_path / name, *extra), timeout=200) == [None, None]
        rows = [json.loads(line) for line in (tmp_path / name / "rollouts/step_1.jsonl").open()]
        found[name] = {(row["prompt_id"], tuple(row["tokens"])): row for row in rows}
    assert found["plain"].keys() == found["steps"].keys()
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32), load_tokenizer(path)
    separator, num_lower = tokenizer.encode("=")[-1], 0
    for key, row in found["steps"].items():
        prompt = tokenizer.encode(row["prompt"])
        scores = model(torch.tensor([[*prompt, *row["tokens"]]])).logits[0, len(prompt) :, 0].tolist()
        marks = [i for i, token in enumerate(row["tokens"]) if token == separator or i == len(scores) - 1]
        assert row["reward"] == pytest.approx(min(scores[i] for i in marks), abs=1e-5)
        assert found["plain"][key]["reward"] == pytest.approx(scores[-1], abs=1e-5)
        if len(marks) == 1:
            assert row["reward"] == found["plain"][key]["reward"]
        num_lower += row["reward"] < found["plain"][key]["reward"]
    assert 0 < num_lower < len(found["steps"])
