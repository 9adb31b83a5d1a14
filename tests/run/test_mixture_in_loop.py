# SPDX-License-Identifier: Apache-2.0
"""Several sources of prompts in the whole program: one is the plain run, three share every step and resume bitwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import write_chat_tokenizer

from distributed import run_ranks
from rl_runs import overrides_for, read_records, train
from tiny_models import ENGINE_SIZES, save_tiny_model

PROGRAM = """
import openai

def agent(task, base_url):
    openai.OpenAI().chat.completions.create(model="policy", messages=list(task.messages))
"""


def read_weights(run: Path, step: int) -> bytes:
    return next((run / f"checkpoints/step_{step}/huggingface").glob("*.safetensors")).read_bytes()


def strip(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the bytes of samples, which depend on the ranks that scored them."""
    return [{k: v for k, v in record.items() if k != "samples/bytes_per_rank"} for record in records]


@pytest.mark.slow
def test_one_source_is_the_plain_run_bit_for_bit(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    source = {"name": "validation", "files": [f"{task}/train.jsonl"], "max_response_length": 8}
    source |= {"validation_files": [f"{task}/validation.jsonl"], "reward": {"function": f"{task}/reward.py:score"}}
    plain = overrides_for(task, tmp_path / "plain")
    mixed = [one for one in overrides_for(task, tmp_path / "mixed") if "_files=" not in one]
    mixed += ["reward.function=math", f"data.sources={json.dumps([source])}"]
    for command in (plain, mixed):
        assert run_ranks(train, 1, command) == [None]
    assert strip(read_records(tmp_path / "mixed")) == strip(read_records(tmp_path / "plain"))
    assert read_weights(tmp_path / "mixed", 2) == read_weights(tmp_path / "plain", 2)
    rows = [
        [json.loads(line) for line in (tmp_path / run / "rollouts/step_2.jsonl").read_text().splitlines()]
        for run in ("mixed", "plain")
    ]
    assert all(row.pop("source") == "validation" for row in rows[0]) and rows[0] == rows[1]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats for prompts, a tokenizer with a template, a model for it, a reward and a program."""
    directory = tmp_path_factory.mktemp("mixture")
    tokenizer = write_chat_tokenizer(directory / "model", "qwen2.5")
    for name in ("a", "b", "c"):
        rows = [{"prompt": [{"role": "user", "content": f"{name}{n}"}], "answer": f"{n}"} for n in range(8)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ENGINE_SIZES | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "max_position_embeddings": 1024}
    save_tiny_model(directory / "model", "qwen2", **sizes, vocab_size=tokenizer.vocab_size, num_hidden_layers=2)
    (directory / "program.py").write_text(PROGRAM)
    (directory / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str) % 5, 'letters': len(solution_str)}\n"
    )
    return directory


def overrides_of_three(chats: Path, run: Path, *extra: str) -> list[str]:
    sources = [
        {"name": "rule", "files": [f"{chats}/a.jsonl"], "weight": 2, "max_response_length": 6, "top_k": 50},
        {"name": "tools", "files": [f"{chats}/b.jsonl"], "weight": 1, "tools": ["calculator"], "system_prompt": "Hi."},
        {"name": "asked", "files": [f"{chats}/c.jsonl"], "weight": 1, "program": f"{chats}/program.py:agent"},
    ]
    sources[0]["validation_files"] = sources[1]["validation_files"] = [f"{chats}/a.jsonl"]
    return [
        *(one for one in overrides_for(chats, run) if "_files=" not in one),
        f"data.sources={json.dumps(sources)}",
        "data.max_prompt_length=480",
        "data.max_response_length=16",
        "data.validation_limit=2",
        "actor.max_tokens_per_microbatch=1024",
        "trainer.log_rollouts=-1",
        "trainer.save_freq=1",
        *extra,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "kind"), [(0, "off"), (1, "off"), (0, "window")])
def test_three_kinds_of_prompts_share_every_step_and_resume_bitwise(
    chats: Path, tmp_path: Path, vllm_imported: None, staleness: int, kind: str
) -> None:
    """Also where a curriculum draws the prompts of each source."""
    settings = [f"data.curriculum.kind={kind}", "data.curriculum.explore=0"]
    extra = [f"schedule.max_staleness={staleness}", "schedule.updates=drain"] if staleness else []
    extra += ["algorithm.importance_sampling=token-truncate"] if staleness else []
    for run, steps in (("whole", 3), ("parts", 1), ("parts", 3)):
        command = overrides_of_three(chats, tmp_path / run, f"trainer.total_steps={steps}", *settings, *extra)
        assert run_ranks(train, 2, command) == [None, None]
    whole, parts = read_records(tmp_path / "whole"), read_records(tmp_path / "parts")
    for record in whole[1:]:
        assert [record[f"sources/{name}/prompts"] for name in ("rule", "tools", "asked")] == [4, 2, 2]
        assert record["agents/failed"] == 0.0 and record["sources/rule/response_tokens"] <= 6
        assert record["sources/asked/reward/letters"] > 0 and record["agents/turns"] >= 1
    assert {key.split("/")[1] for key in whole[0] if key.startswith("validation/")} == {"rule", "tools"}
    assert kind == "off" or sum(record["curriculum/passed_over"] for record in whole[1:]) > 0
    rows = [json.loads(line) for line in (tmp_path / "whole/rollouts/step_2.jsonl").read_text().splitlines()]
    assert {row["source"] for row in rows} == {"rule", "tools", "asked"}
    assert all(("Hi." in row["prompt"]) == (row["source"] == "tools") == ("calculate" in row["prompt"]) for row in rows)
    assert strip(parts)[-1] == strip(whole)[-1]
    assert read_weights(tmp_path / "parts", 3) == read_weights(tmp_path / "whole", 3)
