# SPDX-License-Identifier: Apache-2.0
"""Side files of a model: config, tokenizer and generation settings, in `config/` of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.files import FileRecord, write_file
from megatron_rl.types import UserError
from megatron_rl.weights.config_checks import read_json
from megatron_rl.weights.model_config import take_text_config

CONFIG_DIR, MTP_ROLE = "config", "mtp"
TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_MODEL_FILES = ("config.json", "generation_config.json")
_DEFINE_IDS = ("tokenizer.model", "tokenizer.json", "vocab.json", "merges.txt")  # token -> id


def find_model_files(model: str | Path) -> Path:
    """Return the directory of a model's config and tokenizer: `config/` in a Megatron checkpoint, else `model`."""
    inner = Path(model) / CONFIG_DIR
    return inner if (inner / "config.json").is_file() else Path(model)


def find_mtp_weights(model: Path) -> Path:
    """Return the directory of a model's MTP layer: `mtp/` next to the actor in a checkpoint, else `model`."""
    beside = model.with_name(MTP_ROLE)
    return beside if model.name == "actor" and (beside / ".metadata").is_file() else model


def list_side_files(model: Path, tokenizer: Path | None = None) -> dict[str, Path]:
    """Map names to paths of a model's side files.

    Args:
        model: directory in HF format, or a Megatron checkpoint.
        tokenizer: a directory or sentencepiece file; `model` by default.
    """
    model = find_model_files(model).absolute()  # a user's function may change the working directory
    tokenizer = tokenizer and tokenizer.absolute()
    found = {name: model / name for name in _MODEL_FILES}
    if tokenizer is not None and tokenizer.is_file():
        found["tokenizer.model"] = tokenizer
    else:
        found |= {name: (tokenizer or model) / name for name in TOKENIZER_FILES}
    return {name: path for name, path in found.items() if path.is_file()}


def read_config(file: Path) -> dict[str, Any]:
    """Return the text section of config.json, or the whole config of a text-only model."""
    return take_text_config(read_json(file, "take the file from the model again"))


def copy_side_files(files: Mapping[str, Path], directory: Path) -> list[FileRecord]:
    """Copy files into `directory`, creating it if necessary."""
    directory.mkdir(exist_ok=True)
    return [write_file(directory / name, path.read_bytes()) for name, path in sorted(files.items())]


def check_vocabulary(saved: Path, files: Mapping[str, Path]) -> None:
    """Check that the tokenizer in `saved`, a checkpoint's `config/`, equals the one in use.

    Raises:
        UserError: a file that defines token ids differs.
    """
    for name in _DEFINE_IDS:
        if name in files and (saved / name).is_file() and files[name].read_bytes() != (saved / name).read_bytes():
            raise UserError(
                f"the checkpoint was trained with another vocabulary: its {name} differs from {files[name]}",
                source=str(saved / name),
                expected="the tokenizer of the run that is resumed",
                hint="point model.tokenizer at the old tokenizer, or start a new run",
            )
