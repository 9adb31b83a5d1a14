# SPDX-License-Identifier: Apache-2.0
"""A common interface over sentencepiece and Hugging Face tokenizers, read from local files only.

Invariants: `encode` adds neither BOS nor EOS. `decode` skips special tokens and ids beyond the vocabulary, which a
model may pad. The text of a special token becomes that token in `encode`, but stays text in message contents. There is
always an EOS, which replaces a missing padding token.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentencepiece

from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.data.chats import Marks

_ACCEPTED = "a directory with tokenizer.json or tokenizer.model, or a sentencepiece .model file"


class SentencePieceTokenizer:
    """A sentencepiece model.

    Args:
        reads_marks: recognize special tokens in contents.

    Raises:
        UserError: the file is missing or broken, or the model defines no EOS.
    """

    def __init__(self, model_file: Path | str, *, reads_marks: bool = False) -> None:
        self.source = str(model_file)
        try:
            # Bytes, not a path: the library's error for a missing file does not name it.
            self._model = sentencepiece.SentencePieceProcessor(model_proto=Path(model_file).read_bytes())
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"sentencepiece cannot read the tokenizer: {error}",
                source=self.source,
                expected="a trained sentencepiece model",
                hint="check the path and the file",
            ) from error
        self.vocab_size: int = self._model.vocab_size()
        self.eos_token_id, self.pad_token_id = _require_eos(self._model.eos_id(), self._model.pad_id(), self.source)
        special = {i for i in range(self.vocab_size) if self._model.is_control(i)}
        self._special = special | {self.eos_token_id, self.pad_token_id}
        self._for_contents = self._model if reads_marks else _without_marks(self._model)

    def encode(self, text: str) -> list[int]:
        """See `HuggingFaceTokenizer.encode`."""
        return self._model.encode(text)

    def encode_content(self, text: str) -> list[int]:
        """See `HuggingFaceTokenizer.encode_content`."""
        return self._for_contents.encode(text)

    encode_rendered = encode_content  # the template has no special tokens

    def read_vocabulary(self) -> dict[str, int]:
        """See `HuggingFaceTokenizer.read_vocabulary`."""
        return {self._model.id_to_piece(i): i for i in range(self.vocab_size)}

    def decode(self, ids: Sequence[int], keep: Collection[str] = ()) -> str:
        """See `HuggingFaceTokenizer.decode`; special tokens have no text, so `keep` is ignored."""
        return self._model.decode([int(i) for i in ids if i not in self._special and 0 <= i < self.vocab_size])

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Write one "role: content" line per message, then "assistant: "; sentencepiece files have no template."""
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "

    render = apply_chat_template


class HuggingFaceTokenizer:
    """A tokenizer in Hugging Face format, read by transformers without network access.

    Args:
        directory: with tokenizer.json and usually tokenizer_config.json.
        reads_marks: recognize special tokens in contents.

    Raises:
        UserError: the files are missing or broken, or define no EOS token.
    """

    def __init__(self, directory: Path | str, *, reads_marks: bool = False) -> None:
        self.source = str(directory)
        self._tokenizer = _read_hugging_face(Path(directory))
        self.vocab_size: int = len(self._tokenizer)
        self.eos_token_id, self.pad_token_id = _require_eos(
            self._tokenizer.eos_token_id, self._tokenizer.pad_token_id, self.source
        )
        self._reads_marks = reads_marks

    @cached_property
    def _marks(self) -> Marks | None:
        """The marks of a fast tokenizer, which contents keep as text; `None` if they are read there."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or self._reads_marks:
            return None
        from megatron_rl.data.chats import Marks

        return Marks(backend)

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens; special tokens in the text are recognized."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_content(self, text: str) -> list[int]:
        """Encode the content of a message: the text of a special token stays text."""
        return self.encode_rendered(self._guard(text))

    def encode_rendered(self, text: str) -> list[int]:
        """Encode a result of `render`, or a part of one."""
        return self._marks.encode(text) if self._marks is not None and self._marks.guards(text) else self.encode(text)

    def read_vocabulary(self) -> dict[str, int]:
        """Return token -> id for all tokens."""
        return self._tokenizer.get_vocab()

    def decode(self, ids: Sequence[int], keep: Collection[str] = ()) -> str:
        """Return the text of `ids` without special tokens, except those in `keep`."""
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        if keep:
            known = [i for i in known if i not in self._special or self._special[i] in keep]
        return self._tokenizer.decode(known, skip_special_tokens=not keep, clean_up_tokenization_spaces=False)

    @cached_property
    def _special(self) -> dict[int, str]:
        return {i: token.content for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Render a conversation by the tokenizer's template, up to the start of the assistant's reply.

        Raises:
            UserError: there is no template, or it rejects these messages.
        """
        try:
            return self._tokenizer.apply_chat_template(
                messages, **{"tokenize": False, "add_generation_prompt": True, **options}
            )
        except Exception as error:  # jinja raises whatever the template's author chose
            raise UserError(
                f"the chat template failed: {_first_line(error)}",
                source=self.source,
                expected="a tokenizer with a chat template that accepts these messages",
                hint="use a chat tokenizer, or prompts that are plain text",
            ) from error

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Apply the chat template; guard characters keep special tokens in contents text in `encode_rendered`."""
        given = {name: self._guard(options[name]) for name in ("tools", "documents") if name in options}
        return self.apply_chat_template(self._guard(messages), **(options | given))

    def _guard(self, value: Any) -> Any:
        if self._marks is None and not self._reads_marks:
            raise UserError(
                "the tokenizer is a slow one, which has no way to keep the text of special tokens in messages as text",
                source=self.source,
                expected="a tokenizer with tokenizer.json, which is a fast one",
                hint="convert it with transformers, or trust all messages and set data.special_tokens_in_contents=true",
            )
        return value if self._marks is None else self._marks.guard(value)


Tokenizer = SentencePieceTokenizer | HuggingFaceTokenizer


def load_tokenizer(path: Path, *, reads_marks: bool = False) -> Tokenizer:
    """Load the tokenizer at `path` (UserError if there is none, or it cannot be read).

    Args:
        path: a directory with tokenizer.json or tokenizer_config.json (Hugging Face) or only tokenizer.model
            (sentencepiece), or a .model file.
        reads_marks: `data.special_tokens_in_contents`.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".model":
        return SentencePieceTokenizer(path, reads_marks=reads_marks)
    if (path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file():
        return HuggingFaceTokenizer(path, reads_marks=reads_marks)
    if (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer(path / "tokenizer.model", reads_marks=reads_marks)
    found = "no such file or directory" if not path.exists() else "no tokenizer there"
    raise UserError(
        f"{path}: {found}",
        source="model.tokenizer (default: model.path)",
        expected=_ACCEPTED,
        hint="set model.tokenizer",
    )


def find_stop_tokens(
    tokenizer: Tokenizer, model: Path, vocab_size: int, further: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the token ids that end a response: EOS, those in the model's generation_config.json, and `further`.

    Args:
        further: the token ids of `rollout.stop`.

    Raises:
        UserError: the file cannot be read, or an id is not in the vocabulary.
    """
    file = model / "generation_config.json"
    try:
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"not the JSON of a generation config: {_first_line(error)}",
            source=str(file),
            expected="an object",
            hint="copy it from the model again, or delete it",
        ) from error
    ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
    for names, source, hint in (
        (ids, str(file), "the file belongs to another model: copy it again, or delete it"),
        (further, "rollout.stop", "look them up in the tokenizer of this model"),
    ):
        for found in names:
            if type(found) is not int or not 0 <= found < vocab_size:
                raise UserError(
                    f"eos_token_id {found!r}" if names is ids else f"token id {found!r}",
                    source=source,
                    expected=f"token ids from 0 to {vocab_size - 1}",
                    hint=hint,
                )
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *ids, *further]))


def check_stop_strings(strings: Sequence[str], tokenizer: Tokenizer) -> None:
    """Refuse stop strings that cannot occur in a response: empty, or special tokens (UserError)."""
    for string in strings:
        if not string or string not in tokenizer.decode(tokenizer.encode(string)):
            raise UserError(
                f"the text {string!r} never is in a response: its tokens are {tokenizer.encode(string)}",
                source="rollout.stop",
                expected="a text that the tokenizer writes and reads",
                hint="special tokens have no text: give its id, a number, in rollout.stop",
            )


def _without_marks(model: sentencepiece.SentencePieceProcessor) -> sentencepiece.SentencePieceProcessor:
    """Return the model with marks such as <|im_start|> (see `is_mark`) disabled, so that they are encoded as text."""
    from megatron_rl.data.chats import is_mark

    if not any(is_mark(model.id_to_piece(i), is_special=False) for i in range(model.vocab_size())):
        return model
    messages: Any = import_module("sentencepiece.sentencepiece_model_pb2")
    proto = messages.ModelProto.FromString(model.serialized_model_proto())
    for piece in proto.pieces:
        if piece.type == piece.USER_DEFINED and is_mark(piece.piece, is_special=False):
            piece.type = piece.UNUSED
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def _read_hugging_face(directory: Path) -> Any:
    import transformers  # a slow import, not needed with sentencepiece

    try:
        if (directory / "tokenizer_config.json").is_file():
            return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        file = directory / "special_tokens_map.json"
        entries = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        texts = {name: value["content"] if isinstance(value, dict) else value for name, value in entries.items()}
        special = {name: texts[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if name in texts}
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **special)
    except Exception as error:  # tokenizers raises bare Exception on a broken file
        raise UserError(
            f"transformers cannot read the tokenizer: {_first_line(error)}",
            source=str(directory),
            expected=_ACCEPTED,
            hint="check the files, or copy them from the model again",
        ) from error


def _require_eos(eos: int | None, pad: int | None, source: str) -> tuple[int, int]:
    """Return the ids of EOS and padding; EOS replaces an undefined padding (`None` or -1).

    Raises:
        UserError: EOS is undefined.
    """
    if eos is None or eos < 0:
        raise UserError(
            "the tokenizer defines no end-of-sequence token",
            source=source,
            expected="an EOS token, which ends a response",
            hint="add eos_token to tokenizer_config.json, or train sentencepiece with eos_id",
        )
    return eos, eos if pad is None or pad < 0 else pad


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
