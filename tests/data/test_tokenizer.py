# SPDX-License-Identifier: Apache-2.0
"""Both tokenizers behind one interface, made on the spot; no published tokenizer is read."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.data.tokenizer import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    find_stop_tokens,
    load_tokenizer,
)
from megatron_rl.types import UserError

ALPHABET = "0123456789+-="
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def write_sentencepiece(file: Path, **options: int) -> Path:
    model = io.BytesIO()
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([ALPHABET]),
        model_writer=model,
        model_type="char",
        minloglevel=2,
        vocab_size=len(ALPHABET) + sum(i >= 0 for i in ids.values()),
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        **ids,
    )
    file.write_bytes(model.getvalue())
    return file


def write_hugging_face(directory: Path, **special: str) -> Path:
    vocab = {text: i for i, text in enumerate(["<pad>", "<s>", "</s>", "<unk>", *ALPHABET])}
    rust = RustTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rust.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=rust, **special).save_pretrained(directory)
    return directory


@pytest.fixture(params=["sentencepiece", "hugging_face"])
def tokenizer(request, tmp_path):
    if request.param == "sentencepiece":
        return load_tokenizer(write_sentencepiece(tmp_path / "toy.model"))
    return load_tokenizer(
        write_hugging_face(tmp_path / "hf", pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    )


def test_round_trip_and_special_tokens(tokenizer):
    """Covers ASCII arithmetic only, not the normalization of published tokenizers."""
    ids = tokenizer.encode("37+45=82")
    assert len(ids) == 8
    assert tokenizer.decode([1, *ids, 2, 0, 0]) == "37+45=82"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size) == (2, 0, 17)


def test_ids_of_a_padded_model_vocabulary_have_no_text(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("7"), 17, 127]) == "7"


@pytest.mark.parametrize("files", [["tokenizer.json"], ["tokenizer.json", "tokenizer.model"], ["tokenizer.model"]])
def test_load_tokenizer_picks_by_files(tmp_path, files):
    write_hugging_face(tmp_path, eos_token="</s>", pad_token="<pad>")
    if "tokenizer.json" not in files:
        for file in tmp_path.iterdir():
            file.unlink()
    if "tokenizer.model" in files:
        write_sentencepiece(tmp_path / "tokenizer.model")
    expected = HuggingFaceTokenizer if "tokenizer.json" in files else SentencePieceTokenizer
    assert type(load_tokenizer(tmp_path)) is expected


def test_tokenizer_json_alone_takes_special_tokens_from_their_map(tmp_path):
    write_hugging_face(tmp_path, eos_token="</s>")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="no end-of-sequence"):
        load_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load_tokenizer(tmp_path).eos_token_id == 2


def test_padding_falls_back_to_eos(tmp_path):
    assert load_tokenizer(write_sentencepiece(tmp_path / "a.model", pad_id=-1)).pad_token_id == 2
    assert load_tokenizer(write_hugging_face(tmp_path / "hf", eos_token="</s>")).pad_token_id == 2


def test_chat_templates(tmp_path):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    plain = load_tokenizer(write_sentencepiece(tmp_path / "a.model"))
    assert plain.apply_chat_template(messages) == "system: add\nuser: 1+1\nassistant: "
    without = load_tokenizer(write_hugging_face(tmp_path / "hf", eos_token="</s>"))
    with pytest.raises(UserError, match="chat template failed"):
        without.apply_chat_template(messages)
    chat = load_tokenizer(write_hugging_face(tmp_path / "chat", eos_token="</s>", chat_template=TEMPLATE))
    assert chat.apply_chat_template(messages) == "<system>add<user>1+1<a>"
    assert chat.apply_chat_template(messages, add_generation_prompt=False) == "<system>add<user>1+1"
    assert plain.apply_chat_template(messages, enable_thinking=False) == plain.apply_chat_template(messages)


@pytest.mark.parametrize("files", [{}, {"weights.bin": b""}, {"tokenizer.json": b"{"}, {"tokenizer.model": b"garbage"}])
def test_unusable_directories_are_user_errors(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (2,)),
        ("{}", (2,)),
        ('{"eos_token_id": 2}', (2,)),
        ('{"eos_token_id": 5}', (2, 5)),
        ('{"eos_token_id": [16, 2, 5, 16]}', (2, 16, 5)),
        ('{"eos_token_id": 17}', "eos_token_id 17"),
        ('{"eos_token_id": ["</s>"]}', "eos_token_id '</s>'"),
        ('{"eos_token_id": true}', "eos_token_id True"),
        ("{", "not the JSON of a generation config"),
        ("[2]", "not the JSON of a generation config"),
    ],
)
def test_stop_tokens(tmp_path, text, expected):
    """The tokenizer's EOS is the first of them; the model has 17 tokens."""
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "a.model"))
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    if isinstance(expected, tuple):
        assert find_stop_tokens(tokenizer, tmp_path, 17) == expected
        return
    with pytest.raises(UserError, match="generation_config.json") as caught:
        find_stop_tokens(tokenizer, tmp_path, 17)
    assert expected in str(caught.value)


def test_missing_path_and_missing_tokens_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no end-of-sequence"):
        load_tokenizer(write_sentencepiece(tmp_path / "a.model", eos_id=-1))


def test_import_is_light():
    """The module must not import transformers or datasets; the import time is not measured."""
    code = (
        "import sys, megatron_rl.data.tokenizer, megatron_rl.data.prompts;"
        "sys.exit(bool({'transformers', 'datasets', 'torch'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
