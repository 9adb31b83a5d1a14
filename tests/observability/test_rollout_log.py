# SPDX-License-Identifier: Apache-2.0
"""Texts of single tokens of real tokenizers, and per-token values of a row.

Not covered: the origin of the values (tests/samples/test_experience.py) and whole runs (tests/run/test_trainer.py).
"""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_rl.capsule.recorder import write_rollouts
from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.metrics import TokenTexts, as_numbers, token_fields
from megatron_rl.observability.progress import LOGGER_NAME, close_rank_log
from megatron_rl.observability.run import Run
from megatron_rl.samples.table import build_headers
from megatron_rl.types import Prompt, Rollout
from tools.replay.recording import read_rollouts
from tools.viewer.rollout_page import write_page


def test_characters_of_several_tokens_stand_at_the_last() -> None:
    """A tokenizer with one token per byte; a character that is cut off stays broken and affects no other."""
    vocab = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts_of = TokenTexts(tokenizer.decode)
    ids = tokenizer.encode("a b\u00e9\u20ac\N{GRINNING FACE}.").ids
    assert texts_of(ids) == ["a", " ", "b", "", "\u00e9", "", "", "\u20ac", "", "", "", "\N{GRINNING FACE}", "."]
    euro = tokenizer.encode("\u20ac").ids
    assert texts_of([*euro[:2], ids[0], *euro[:1]]) == ["", "\ufffd", "a", "\ufffd"]
    garbage = texts_of(euro[:1] * 20)
    assert len(garbage) == 20 and set("".join(garbage)) == {"\ufffd"}
    assert texts_of([]) == []


def test_spaces_and_special_tokens_of_sentencepiece() -> None:
    """Tokens keep the leading space that decoding them alone would drop; the EOS token has no text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two two one two"] * 9),
        model_writer=model,
        vocab_size=12,
        minloglevel=2,
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = tokenizer.encode("two one two")
    texts = TokenTexts(lambda found: tokenizer.decode([i for i in found if i != 2]))([*ids, 2])
    assert "".join(texts) == " two one two" and texts[-1] == "" and len(texts) == len(ids) + 1


def test_values_are_aligned_to_the_end_and_fit_into_json() -> None:
    """Tokens outside the loss and NaN become null; a name without any number is left out."""
    values = {
        "advantages": np.float32([0.5, -1.23456789]),
        "ratio": np.float32([np.nan, np.inf]),
        "entropy": np.float32([np.nan, 1.5]),
        "values": np.zeros(0, np.float32),
    }
    fields = token_fields(3, values)
    assert fields == {"advantages": [None, 0.5, -1.234568], "entropy": [None, None, 1.5]}
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert as_numbers(np.float32([1e-4, -2]), 3) == [0.0, -2.0]


HALF = "1\ud83d2"  # a lone surrogate


def test_half_a_character_in_a_response_does_not_end_a_run(tmp_path: Path) -> None:
    """rollouts/ and every display of rollouts keep it; Weights & Biases receives numbers only."""
    run = Run(tmp_path / "run", "", 1, ObservabilityConfig(histograms_every=1, status_port=0), 0)
    run.start(None)
    row = {"prompt_id": 0, "sample_index": 0, "reward": 1.0, "reward_components": {}} | dict.fromkeys(
        ("prompt", "response", "ground_truth", "data_source", "finish_reason"), HALF
    )
    run.write_rollouts(1, [row])
    page = next(sink for sink in run._sinks if hasattr(sink, "url"))
    with urlopen(f"{page.url}status.json", timeout=10) as answer:
        assert json.load(answer)["samples"]["rows"][0]["response"] == HALF
    logging.getLogger(f"{LOGGER_NAME}.rewards").warning("of %s", HALF)
    run.close()
    close_rank_log(logging.getLogger(LOGGER_NAME))
    assert json.loads((run.dir / "rollouts/step_1.jsonl").read_bytes()) == row
    assert write_page([run.dir], tmp_path / "page.html").num_rollouts == 1
    assert "of 1\\ud83d2" in run.log_file.read_text()


def test_half_a_character_in_a_capsule(tmp_path: Path) -> None:
    prompt = Prompt(0, np.zeros(1, np.int32), HALF, HALF, HALF)
    rollout = replace(Rollout.from_response(prompt, 0, np.zeros(1, np.int32), None, "stop"), response=HALF, reward=1.0)
    samples = SimpleNamespace(headers=build_headers([(0, rollout)], holder=0), baselines=None)
    write_rollouts(tmp_path / "rollouts.jsonl", [rollout], samples)
    [(group, found)] = read_rollouts(tmp_path / "rollouts.jsonl").rollouts
    assert (group, found.prompt.text, found.prompt.ground_truth, found.response) == (0, HALF, HALF, HALF)
