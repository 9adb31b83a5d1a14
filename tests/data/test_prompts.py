# SPDX-License-Identifier: Apache-2.0
"""Prompts from JSONL and parquet in both schemas, every error a file can cause, and the order of batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompts import load_prompts, name_files
from megatron_rl.data.sft_examples import load_sft_examples
from megatron_rl.types import UserError


class LetterTokenizer:
    """One token per character: its code point; EOS is 0."""

    eos_token_id, pad_token_id, vocab_size = 0, 0, 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids) -> str:
        return "".join(chr(i) for i in ids if i)

    def apply_chat_template(self, messages: list[dict[str, Any]], mark: str = "|") -> str:
        return mark.join(f"{m['role']}>{m['content']}" for m in messages) + mark

    def encode_content(self, text: str) -> list[int]:
        return self.encode(text)

    encode_rendered = encode_content

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.apply_chat_template(messages, **options)


class PairTokenizer(LetterTokenizer):
    """Two letters to a token, counted from the start of a text: a cut changes all tokens behind it."""

    def encode(self, text: str) -> list[int]:
        return [ord(text[i]) << 8 | ord((text + "\0")[i + 1]) for i in range(0, len(text), 2)]

    def decode(self, ids) -> str:
        return "".join(chr(i >> 8) + chr(i & 255) for i in ids).replace("\0", "")

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<a>"


TOKENIZER = LetterTokenizer()
ROOT = Path(__file__).resolve().parents[2]


def config(**changes: Any) -> DataConfig:
    return DataConfig(train_files=["unused"], train_batch_size=1, **changes)


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


VERL_ROW = {
    "prompt": [{"role": "user", "content": "1+1"}],
    "data_source": "sums",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_both_schemas_in_both_formats(tmp_path, suffix):
    plain = write(tmp_path / f"plain.{suffix}", [{"prompt": "1+2=", "answer": 3}, {"prompt": "2+2=", "answer": 4}])
    verl = write(tmp_path / f"verl.{suffix}", [VERL_ROW])
    loaded = load_prompts([plain, verl], TOKENIZER, config())
    first, _, third = loaded.prompts
    assert [p.prompt_id for p in loaded.prompts] == [0, 1, 2]
    assert (first.text, first.ground_truth, first.data_source, first.extra_info) == ("1+2=", "3", "default", {})
    assert first.tokens.dtype == np.int32 and first.tokens.tolist() == [ord(c) for c in "1+2="]
    assert (third.text, third.ground_truth, third.data_source) == ("user>1+1|", "2", "sums")
    assert third.extra_info == {"ability": "math", "index": 7}
    assert (loaded.num_truncated, loaded.num_dropped) == (0, 0)


def test_columns_are_named_by_the_config_and_jsonl_rows_may_differ(tmp_path):
    rows = [{"q": "a", "a": "007", "extra_info": {"x": 1}}, {"q": "b", "a": 7, "extra_info": {"y": ["1", 2]}, "lv": 5}]
    file = tmp_path / "f.jsonl"
    text = "\n\n".join(json.dumps(row) for row in rows)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())  # with a byte order mark, a blank line, no final newline
    prompts = load_prompts([str(file)], TOKENIZER, config(prompt_key="q", answer_key="a")).prompts
    assert [p.ground_truth for p in prompts] == ["007", "7"]
    assert [p.extra_info for p in prompts] == [{"x": 1}, {"y": ["1", 2], "lv": 5}]


def test_line_separators_inside_a_string_do_not_break_lines(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_bytes('{"prompt": "a\u2028b", "answer": "c"}\r\n'.encode())
    assert load_prompts([str(file)], TOKENIZER, config()).prompts[0].text == "a\u2028b"


BAD_LINES = {
    "not json": ('{"prompt": "x", ', "not valid JSON"),
    "not utf-8": (b'{"prompt": "\xff"}', "not valid JSON"),
    "not an object": ("[1, 2]", "list, not an object"),
    "no prompt": ('{"answer": "1"}', 'column "prompt" is missing'),
    "no answer": ('{"prompt": "x"}', 'column "answer" is missing'),
    "null answer": ('{"prompt": "x", "answer": null}', 'column "answer" is null'),
    "number as prompt": ('{"prompt": 5, "answer": "1"}', 'column "prompt" holds 5'),
    "empty prompt": ('{"prompt": "", "answer": "1"}', "no tokens"),
    "bool as answer": ('{"prompt": "x", "answer": true}', 'column "answer" holds True'),
    "NaN as answer": ('{"prompt": "x", "answer": NaN}', 'column "answer" holds nan'),
    "no messages": ('{"prompt": [], "answer": "1"}', 'column "prompt" holds'),
    "bad message": ('{"prompt": [{"role": "user"}], "answer": "1"}', 'column "prompt" holds'),
    "message of text": ('{"prompt": ["hi"], "answer": "1"}', 'column "prompt" holds'),
    "bad extra_info": ('{"prompt": "x", "answer": "1", "extra_info": "y"}', 'column "extra_info" holds'),
    "bad reward_model": ('{"prompt": "x", "reward_model": "2"}', 'column "reward_model" holds'),
    "half a character in a prompt": ('{"prompt": "a\\ud83d", "answer": "1"}', 'column "prompt" holds \\ud83d, half'),
    "half a character in a message": (
        '{"prompt": [{"role": "user", "content": "\\uDE00x"}], "answer": "1"}',
        'column "prompt" holds \\ude00, half',
    ),
    "half a character in an answer": ('{"prompt": "x", "answer": "\\ud800"}', 'column "answer" holds \\ud800, half'),
    "half a character in a data source": (
        '{"prompt": "x", "answer": "1", "data_source": "\\ud800"}',
        'column "data_source" holds \\ud800, half',
    ),
    "half a character in a ground truth": (
        '{"prompt": "x", "reward_model": {"ground_truth": "\\ud800"}}',
        'column "reward_model" holds \\ud800, half',
    ),
    "half a character in a name": (
        '{"prompt": "x", "answer": "1", "\\udfff": 2}',
        'column "\\udfff" holds \\udfff, half',
    ),
    "bad ground truth": ('{"prompt": "x", "reward_model": {"ground_truth": false}}', "reward_model.ground_truth"),
    "image as part": ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}', "'image'"),
    "bad data_source": ('{"prompt": "x", "answer": "1", "data_source": 3}', 'column "data_source" holds 3'),
}


@pytest.mark.parametrize("line, message", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_bad_lines_are_named_by_file_and_line(tmp_path, line, message):
    file = tmp_path / "f.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    file.write_bytes(b'{"prompt": "good", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(UserError) as caught:
        load_prompts([str(file)], TOKENIZER, config())
    assert caught.value.source == f"{file}:3"
    assert message in caught.value.found


def test_whole_characters_may_be_written_as_escapes(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_text('{"prompt": "\\ud83d\\ude00 \\\\ud800", "answer": "1"}\n')
    assert load_prompts([str(file)], TOKENIZER, config()).prompts[0].text == "\N{GRINNING FACE} \\ud800"


def test_offending_text_is_shown_but_shortened(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_text("oops " * 1000)
    with pytest.raises(UserError, match="oops oops") as caught:
        load_prompts([str(file)], TOKENIZER, config())
    assert "(4999 characters)" in caught.value.found and len(caught.value.found) < 300


def test_bad_parquet_rows_and_files(tmp_path):
    """Covers a null and a file that is not parquet, not every kind of corruption."""
    file = write(tmp_path / "f.parquet", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}])
    with pytest.raises(UserError) as caught:
        load_prompts([file], TOKENIZER, config())
    assert caught.value.source == f"{file}:row 2"
    (tmp_path / "broken.parquet").write_text("not parquet")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        load_prompts([str(tmp_path / "broken.parquet")], TOKENIZER, config())


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.jsonl", None, "does not exist"),
        ("empty.jsonl", "", "no rows"),
        ("blank.jsonl", "\n \n", "no rows"),
        ("data.csv", "prompt,answer\n", 'extension ".csv"'),
        ("folder.jsonl/x", "", "is not a file"),
    ],
)
def test_unusable_files(tmp_path, name, content, message):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if content is not None:
        file.write_text(content)
    path = file.parent if name.startswith("folder") else file
    with pytest.raises(UserError, match=message):
        load_prompts([str(path)], TOKENIZER, config())


def test_no_files_at_all():
    with pytest.raises(UserError, match="no data files"):
        load_prompts([], TOKENIZER, config())


def test_parquet_leaves_home_alone(tmp_path):
    """In a process of its own, because `datasets` looks for its cache when it is first imported."""
    file = write(tmp_path / "f.parquet", [{"prompt": "a", "answer": "1"}])
    home = tmp_path / "home"
    home.mkdir()
    code = f"from megatron_rl.data.rows import read_rows; print([r.columns for r in read_rows([{file!r}])])"
    environment = {"HOME": str(home), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[{'prompt': 'a', 'answer': '1'}]\n", "")  # no progress bars either
    assert list(home.rglob("*")) == [] and sorted(tmp_path.iterdir()) == [Path(file), home]


def overlong_file(tmp_path: Path) -> str:
    rows = [{"prompt": text, "answer": "1"} for text in ("abcdef", "abc", "uvwxyz", "xyz")]
    return write(tmp_path / "f.jsonl", rows)


@pytest.mark.parametrize(
    "policy, texts, ids, truncated, dropped",
    [
        ("truncate", ["def", "abc", "xyz", "xyz"], [0, 1, 2, 3], 2, 0),
        ("truncate_right", ["abc", "abc", "uvw", "xyz"], [0, 1, 2, 3], 2, 0),
        ("truncate_middle", ["aef", "abc", "uyz", "xyz"], [0, 1, 2, 3], 2, 0),
        ("drop", ["abc", "xyz"], [1, 3], 0, 2),
    ],
)
def test_overlong_prompts_are_counted_and_ids_stay(tmp_path, policy, texts, ids, truncated, dropped):
    loaded = load_prompts([overlong_file(tmp_path)], TOKENIZER, config(max_prompt_length=3, overlong_prompts=policy))
    assert [p.text for p in loaded.prompts] == texts
    assert [TOKENIZER.decode(p.tokens) for p in loaded.prompts] == texts
    assert [p.prompt_id for p in loaded.prompts] == ids
    assert (loaded.num_truncated, loaded.num_dropped) == (truncated, dropped)


@pytest.mark.parametrize(
    "policy, question", [("truncate", "456789"), ("truncate_right", "012345"), ("truncate_middle", "012789")]
)
def test_a_chat_keeps_its_template_when_it_is_cut(tmp_path, policy, question):
    """The longest message is cut; the template's opening, the other messages and the generation prompt stay."""
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "0123456789"}]
    file = write(tmp_path / "f.jsonl", [{"prompt": messages, "answer": "1"}])
    limit = len("system>add|user>|") + 6
    (prompt,) = load_prompts([file], TOKENIZER, config(max_prompt_length=limit, overlong_prompts=policy)).prompts
    assert prompt.text == TOKENIZER.decode(prompt.tokens) == f"system>add|user>{question}|"
    (prompt,) = load_prompts([file], TOKENIZER, config(max_prompt_length=limit - 5, overlong_prompts=policy)).prompts
    assert len(prompt.tokens) in (limit - 5, limit - 6) and len(prompt.text.rpartition(">")[2]) == 3
    with pytest.raises(UserError, match="the chat template alone has 14 tokens") as caught:
        load_prompts([file], TOKENIZER, config(max_prompt_length=13, overlong_prompts=policy))
    assert caught.value.source == f"{file}:1"


def test_a_chat_with_merged_tokens_fits_when_it_is_cut(tmp_path):
    """As with a real tokenizer, a cut changes the tokens around it; every limit down to the template."""
    tokenizer = PairTokenizer()
    messages = [{"role": "user", "content": "to be or not to be, that is the question: " * 5}]
    file, bare = write(tmp_path / "f.jsonl", [{"prompt": messages, "answer": "1"}]), "<user><a>"
    for policy in ("truncate", "truncate_right", "truncate_middle"):
        for limit in range(len(tokenizer.encode(bare)) + 1, 60):
            cfg = config(max_prompt_length=limit, overlong_prompts=policy)
            (prompt,) = load_prompts([file], tokenizer, cfg).prompts
            assert limit - 3 <= len(prompt.tokens) <= limit
            assert prompt.text.startswith("<user>") and prompt.text.endswith("<a>")


def test_parts_of_a_message_and_options_of_the_template(tmp_path):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    file = write(tmp_path / "f.parquet", [{"prompt": [{"role": "user", "content": parts}], "answer": "2"}])
    (prompt,) = load_prompts([file], TOKENIZER, config(apply_chat_template_kwargs={"mark": "#"})).prompts
    assert prompt.text == "user>1+1=#"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_messages_as_json_text_are_messages(tmp_path, suffix):
    """Other texts that begin with a bracket are prompts as they stand."""
    messages = [{"role": "user", "content": "1+1="}]
    texts = [json.dumps(messages), " " + json.dumps(messages), "[1]", "[]", '[{"content": "1"}]', '[{"role"']
    file = write(tmp_path / f"f.{suffix}", [{"prompt": text, "answer": "2"} for text in texts])
    prompts = load_prompts([file], TOKENIZER, config()).prompts
    assert [prompt.text for prompt in prompts] == ["user>1+1=|", "user>1+1=|", *texts[2:]]
    assert [prompt.messages is None for prompt in prompts] == [False, False, True, True, True, True]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_may_have_options_of_its_own(tmp_path, suffix):
    """They precede the run's options, and rewards do not receive them."""
    rows = [
        {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2", "chat_template_kwargs": options}
        for options in ({"mark": "?"}, {"mark": None}, None)
    ]
    file = write(tmp_path / f"f.{suffix}", rows)
    prompts = load_prompts([file], TOKENIZER, config(apply_chat_template_kwargs={"mark": "#"})).prompts
    assert [prompt.text[-1] for prompt in prompts] == ["?", "#", "#"]
    assert not any("chat_template_kwargs" in prompt.extra_info for prompt in prompts)
    write(tmp_path / "g.jsonl", [rows[0] | {"chat_template_kwargs": "no"}])
    with pytest.raises(UserError, match="chat_template_kwargs"):
        load_prompts([str(tmp_path / "g.jsonl")], TOKENIZER, config())


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("truth", [["1", "one"], {"target": ["1"]}])
def test_ground_truths_may_be_lists_and_dicts(tmp_path, suffix, truth):
    rows = [{"prompt": "x", "reward_model": {"style": "rule", "ground_truth": truth}}]
    (prompt,) = load_prompts([write(tmp_path / f"f.{suffix}", rows)], TOKENIZER, config()).prompts
    assert prompt.ground_truth == truth and prompt.row == {"reward_model": rows[0]["reward_model"]}
    rows = [{"prompt": "x", "answer": truth}]
    assert load_prompts([write(tmp_path / f"g.{suffix}", rows)], TOKENIZER, config()).prompts[0].ground_truth == truth


def test_overlong_prompt_is_an_error_by_default(tmp_path):
    file = overlong_file(tmp_path)
    with pytest.raises(UserError, match="6 tokens") as caught:
        load_prompts([file], TOKENIZER, config(max_prompt_length=3))
    assert caught.value.source == f"{file}:1" and "3 tokens" in caught.value.expected
    with pytest.raises(UserError, match="all 4 are longer"):
        load_prompts([file], TOKENIZER, config(max_prompt_length=2, overlong_prompts="drop"))


def test_limit_counts_the_prompts_that_are_kept(tmp_path):
    cfg = config(max_prompt_length=3, overlong_prompts="drop")
    assert [p.prompt_id for p in load_prompts([overlong_file(tmp_path)], TOKENIZER, cfg, limit=2).prompts] == [1, 3]
    assert [p.prompt_id for p in load_prompts([overlong_file(tmp_path)], TOKENIZER, cfg, limit=1).prompts] == [1]


def test_sft_examples(tmp_path):
    file = write(
        tmp_path / "f.jsonl",
        [{"prompt": "1+1=", "answer": 2, "solution": "two"}, {"prompt": "9+9=", "answer": 18, "solution": "x"}],
    )
    examples = load_sft_examples([file], TOKENIZER, config()).examples
    assert [TOKENIZER.decode(e.prompt.tokens) for e in examples] == ["1+1=", "9+9="]
    assert examples[1].response_tokens.tolist() == [ord("1"), ord("8"), 0]
    assert examples[1].response_tokens.dtype == np.int32
    named = load_sft_examples([file], TOKENIZER, config(answer_key="solution", max_response_length=4)).examples
    assert named[0].response_tokens.tolist() == [*b"two", 0]
    with pytest.raises(UserError, match="4 tokens with its EOS"):
        load_sft_examples([file], TOKENIZER, config(answer_key="solution", max_response_length=3))


def test_sft_counts_overlong_prompts(tmp_path):
    cfg = config(max_prompt_length=3, overlong_prompts="drop")
    loaded = load_sft_examples([overlong_file(tmp_path)], TOKENIZER, cfg)
    assert (len(loaded.examples), loaded.num_truncated, loaded.num_dropped) == (2, 0, 2)


def test_files_of_one_name_are_told_apart_by_their_directories() -> None:
    """Every file is there under a name of its own, as short as that allows."""
    assert name_files(["a/val.jsonl", "test.parquet"]) == {"val": "a/val.jsonl", "test": "test.parquet"}
    files = ["data/gsm8k/test.parquet", "data/math/test.parquet", "data/aime.jsonl"]
    assert list(name_files(files)) == ["gsm8k-test", "math-test", "data-aime"]
    assert list(name_files(["test.parquet", "math/test.parquet"])) == ["test", "math-test"]
    same = ["a/val.jsonl", "a/val.parquet"]
    assert name_files(same) == {file: file for file in same}
    assert name_files([]) == {}


def test_rows_of_verls_multi_turn_files_tell_environments_what_they_hold(tmp_path: Path) -> None:
    """The columns that its tools and interactions read; parquet fills columns of other rows with null."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "agent_name": "tool_agent",
            "prompt": [{"role": "user", "content": "1+2="}],
            "reward_model": {"style": "rule", "ground_truth": "3"},
            "extra_info": {
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "3"}}},
                "interaction_kwargs": {"name": "gsm8k", "query": "1+2=", "ground_truth": "3"},
            },
        }
    ]
    found = load_prompts([write(tmp_path / "train.parquet", rows)], TOKENIZER, config(max_prompt_length=64))
    (prompt,) = found.prompts
    assert prompt.ground_truth == "3" and prompt.row["agent_name"] == "tool_agent"
    assert prompt.extra_info["tools_kwargs"]["calc_gsm8k_reward"]["create_kwargs"] == {"ground_truth": "3"}
    assert prompt.extra_info["interaction_kwargs"]["name"] == "gsm8k"
