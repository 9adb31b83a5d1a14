# SPDX-License-Identifier: Apache-2.0
"""Conversations as examples of supervised fine-tuning: the tokens that are learned, and those they follow.

The identity of a conversation of one question and one reply is the pair of a prompt and a response. Not covered: the
templates of published models themselves, and conversations in parquet files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import write_chat_tokenizer

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.sft_examples import load_sft_examples
from megatron_rl.data.tokenizer import HuggingFaceTokenizer
from megatron_rl.types import Branch, Rollout, UserError

ASK = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
MORE = [{"role": "user", "content": "and 4?"}, {"role": "assistant", "content": "9"}]
THINKS = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n5"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, HuggingFaceTokenizer]:
    return {name: write_chat_tokenizer(tmp_path_factory.mktemp("chat"), name) for name in ("qwen2.5", "qwen3")}


def load(tmp_path: Path, tokenizer: Any, *rows: Any, **changes: Any) -> list[Rollout]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"max_prompt_length": 100, "max_response_length": 100} | changes
    cfg = DataConfig(train_files=[str(file)], train_batch_size=1, prompt_key="messages", **sizes)
    return load_sft_examples([str(file)], tokenizer, cfg).examples


def read(tokenizer: Any, branch: Branch, learned: bool | None = None) -> str:
    tokens = branch.tokens if learned is None else branch.tokens[branch.sampled == learned]
    return tokenizer._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def test_each_reply_is_learned_to_the_end_of_its_turn(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen2.5"]
    (rollout,) = load(tmp_path, tokenizer, {"messages": ASK + MORE})
    (branch,) = rollout.branches
    whole = tokenizer.render(ASK + MORE, add_generation_prompt=False)
    assert read(tokenizer, branch) == whole and branch.tokens.tolist() == tokenizer.encode(whole)
    assert read(tokenizer, branch, learned=True) == "5<|im_end|>\n9<|im_end|>\n"
    assert branch.num_prompt_tokens == len(rollout.prompt.tokens) == np.flatnonzero(branch.sampled)[0]


def test_one_reply_is_a_prompt_with_its_response(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen2.5"]
    rows = [{"messages": ASK}, {"messages": ASK[:1], "answer": "5"}]
    whole, pair = load(tmp_path, tokenizer, *rows)
    assert whole.prompt.tokens.tolist() == pair.prompt.tokens.tolist()
    end = tokenizer.encode("\n")
    assert whole.response_tokens.tolist() == [*tokenizer.encode("5<|im_end|>"), *end]
    assert pair.response_tokens.tolist() == [*tokenizer.encode("5"), tokenizer.eos_token_id]


def test_a_conversation_beside_a_response_is_refused(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    row = {"messages": ASK, "answer": "5", "response": None}
    with pytest.raises(UserError, match='a response in column "answer"'):
        load(tmp_path, tokenizers["qwen2.5"], row)
    assert len(load(tmp_path, tokenizers["qwen2.5"], row, answer_key="response")) == 1


def test_a_template_that_drops_reasoning_gives_a_branch_per_reply(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen3"]
    (rollout,) = load(tmp_path, tokenizer, {"messages": [ASK[0], THINKS, *MORE]})
    first, second = rollout.branches
    assert "hm" in read(tokenizer, first, learned=True) and "hm" not in read(tokenizer, second)
    context = tokenizer.render([ASK[0], THINKS, MORE[0]])
    assert read(tokenizer, second, learned=False) == context and second.num_prompt_tokens == len(
        tokenizer.encode(context)
    )
    assert rollout.prompt.tokens.tolist() == first.tokens[~first.sampled].tolist()


def test_long_conversations_are_refused_cut_or_dropped(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    tokenizer, row = tokenizers["qwen2.5"], {"messages": ASK + MORE}
    (whole,) = load(tmp_path, tokenizer, row)
    length = len(whole.branches[0].tokens)
    sizes = {"max_prompt_length": 1, "max_response_length": length - 4}
    with pytest.raises(UserError, match=f"the conversation has {length} tokens"):
        load(tmp_path, tokenizer, row, **sizes)
    (cut,) = load(tmp_path, tokenizer, row, overlong_prompts="truncate_right", **sizes)
    assert cut.branches[0].tokens.tolist() == whole.branches[0].tokens[: length - 3].tolist()
    assert np.array_equal(cut.branches[0].sampled, whole.branches[0].sampled[: length - 3])
    kept = load(tmp_path, tokenizer, row, {"messages": ASK}, overlong_prompts="drop", **sizes)
    assert [example.prompt.prompt_id for example in kept] == [1]


def test_what_no_template_can_write_is_refused(tmp_path: Path, tokenizers: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the assistant begins"):
        load(tmp_path, tokenizers["qwen2.5"], {"messages": ASK[1:]})
    with pytest.raises(UserError, match="list of chat messages"):
        load(tmp_path, tokenizers["qwen2.5"], {"messages": 3, "answer": 4})
