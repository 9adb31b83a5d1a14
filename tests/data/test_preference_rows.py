# SPDX-License-Identifier: Apache-2.0
"""Preferences from rows of several forms; not covered: files and lengths, whose rules the prompt tests check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import write_chat_tokenizer

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.preference_rows import PreferenceSet, load_preferences
from megatron_rl.types import UserError

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("assistant", "no"))
)
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "texts": {"prompt": [USER], "chosen": "yes", "rejected": "no"},
    "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "JSON": {"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
}


def _load(directory: Path, rows: list[dict[str, Any]], is_paired: bool = True) -> PreferenceSet:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = write_chat_tokenizer(directory, "qwen2.5")
    config = DataConfig(train_files=[str(file)], train_batch_size=1, max_prompt_length=64, max_response_length=8)
    return load_preferences([str(file)], tokenizer, config, is_paired=is_paired)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_pair(form: str, tmp_path: Path) -> None:
    tokenizer = write_chat_tokenizer(tmp_path, "qwen2.5")
    (example,) = _load(tmp_path, [{**FORMS[form], "margin": 2, "weight": 0.5}]).examples
    assert example.prompt.text.endswith("hi<|im_end|>\n<|im_start|>assistant\n")
    assert [tokenizer.decode(response.response_tokens[:-1].tolist()) for response in example.responses] == ["yes", "no"]
    assert {int(response.response_tokens[-1]) for response in example.responses} == {tokenizer.eos_token_id}
    assert (example.margin, example.weight) == (2.0, 0.5)


def test_single_responses_and_pairs_as_two(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": False}, {"prompt": "a", "chosen": "c", "rejected": "d"}]
    found = _load(tmp_path, rows, is_paired=False)
    tokenizer = write_chat_tokenizer(tmp_path, "qwen2.5")
    texts = [tokenizer.decode(example.responses[0].response_tokens[:-1].tolist()) for example in found.examples]
    assert list(zip(texts, (example.is_chosen for example in found.examples), strict=True)) == [
        *(("b", False), ("c", True), ("d", False))
    ]
    assert [len(example.responses) for example in found.examples] == [1, 1, 1] and found.file_sizes == [3]


@pytest.mark.parametrize(
    ("row", "is_paired", "found"),
    [
        ({"prompt": "a", "chosen": "b"}, True, 'column "rejected" is missing'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, True, "the chosen response is the rejected one"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, True, 'column "margin" holds'),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": True}, True, 'column "weight" holds'),
        ({"prompt": "a", "completion": "b", "label": "good"}, False, 'column "label" holds'),
        ({"prompt": "a", "completion": "b"}, False, 'column "label" is missing'),
        ({"prompt": [USER], "chosen": [GOOD, USER], "rejected": "c"}, True, 'column "chosen" holds'),
        ({"prompt": "a", "chosen": "b" * 40, "rejected": "c"}, True, "tokens with its EOS"),
        ({"chosen": "b", "rejected": "c"}, True, 'column "prompt" is missing'),
    ],
)
def test_bad_rows(row: dict[str, Any], is_paired: bool, found: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=found) as error:
        _load(tmp_path, [row], is_paired)
    assert "rows.jsonl:1" in str(error.value)
