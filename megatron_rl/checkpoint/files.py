# SPDX-License-Identifier: Apache-2.0
"""Atomic and durable files, and copies of a model's side files: digests while writing, fsync, and readable errors.

`sha256sum -c SHA256SUMS` checks a checkpoint without this package.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.types import UserError
from megatron_rl.weights.model_config import read_json, take_text_config
from megatron_rl.weights.shard_box import fill_in_order

DIGESTS_FILE = "SHA256SUMS"


@dataclass(frozen=True)
class FileRecord:
    """A finished file: path, size in bytes, and SHA-256 as hexadecimal digits."""

    path: Path
    num_bytes: int
    digest: str


class HashingFile:
    """A new file, hashed while written and durable once closed; every method raises OSError if it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_bytes, self.error = path, 0, None
        self._file, self._hash = open(path, "wb"), hashlib.sha256()  # noqa: SIM115  closed by `close`

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes; an error is also kept in `error`, because torch.save replaces it by another one."""
        try:
            self._file.write(content)
        except OSError as error:
            self.error = error
            raise
        self._hash.update(content)
        size = memoryview(content).nbytes
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """Flush buffers."""
        self._file.flush()

    def close(self) -> FileRecord:
        """Flush to disk and return the record."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return FileRecord(self.path, self.num_bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close after a failure, ignoring unwritten data."""
        with contextlib.suppress(OSError):
            self._file.close()


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a small file durably."""
    file = HashingFile(path)
    file.write(content)
    return file.close()


def sync(path: Path) -> None:
    """Make a file's content, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(partial: Path, directory: Path) -> None:
    """Rename a finished directory into place; an existing one is deleted only afterwards."""
    for path in (partial, *partial.rglob("*")):
        sync(path)
    replaced = directory.with_name(directory.name + ".replaced")
    if directory.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(directory, replaced)
    try:
        os.replace(partial, directory)
    except OSError:
        if replaced.exists():
            os.replace(replaced, directory)
        raise
    sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def read_digests(directory: Path) -> dict[str, str]:
    """Return the digests in a directory's SHA256SUMS: relative path -> SHA-256 (UserError: missing or unreadable)."""
    try:
        lines = (directory / DIGESTS_FILE).read_text(encoding="utf-8").splitlines()
        pairs = [line.split("  ", 1) for line in lines]
        return {path: digest for digest, path in pairs}
    except (OSError, ValueError) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(
            f"{directory / DIGESTS_FILE} {what}",
            source=str(directory),
            expected="a finished checkpoint",
            hint="it was never finished; take another one",
        ) from None


def find_damage(
    directory: Path, digests: Mapping[str, str], sizes: Mapping[str, int], *, reads_all: bool = True
) -> list[str]:
    """Describe the damage to the files of a directory, one line each.

    Args:
        digests: relative path -> SHA-256, of the files to check.
        sizes: relative path -> bytes, if recorded.
        reads_all: compare digests, not only sizes.
    """
    problems = []
    for path, digest in digests.items():
        try:
            size = (directory / path).stat().st_size
            if size != sizes.get(path, size):
                problems.append(f"{path} has {size:,} bytes, {sizes[path]:,} were written")
                continue
            if not reads_all:
                continue
            with open(directory / path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            problems.append(f"{path} is missing")
            continue
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        if found != digest:
            problems.append(
                f"{path} has another content than was written (SHA-256 {found[:12]}..., {digest[:12]}... expected)"
            )
    return problems


def explain_os_error(error: OSError, directory: Path, num_bytes: int | None = None) -> UserError:
    """Convert the error of a write to a `UserError`."""
    where, wanted = str(error.filename or directory), f"; {num_bytes:,} bytes were to be written" if num_bytes else ""
    found = f"it cannot be written: {error.strerror or error}"
    expected, hint = "a working disk", "see the log of the file system"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        home = next(path for path in (directory, *directory.parents) if path.exists())
        found = f"the disk is full or a file would be too large: {error.strerror}{wanted}, "
        found += f"{shutil.disk_usage(home).free:,} are free"
        expected = "room for the checkpoint"
        hint = "delete old checkpoints (checkpoint.keep_last does it), or raise the quota"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        expected, hint = "a directory that this user may write to", "change its permissions or choose another place"
    return UserError(found, source=where, expected=expected, hint=f"{hint}; nothing old was touched")


def explain_write_error(error: Exception, directory: Path) -> UserError:
    """Convert the error of a write, possibly wrapped by safetensors, to a `UserError`."""
    if isinstance(error, UserError):
        return error
    code = re.search(r"\(os error (\d+)\)", str(error))
    if code is not None:
        return explain_os_error(OSError(int(code[1]), os.strerror(int(code[1])), str(directory)), directory)
    return explain_os_error(error if isinstance(error, OSError) else OSError(str(error)), directory)


@dataclass(frozen=True)
class Unit:
    """One output file and the logical tensors in it."""

    file: str
    tensors: tuple[str, ...]
    num_bytes: int


def split_units(sizes: Mapping[str, int], max_bytes: int, name_file: Callable[[int, int], str]) -> list[Unit]:
    """Distribute tensors over files in order.

    Args:
        sizes: tensor -> bytes.
        max_bytes: limit per file; a larger tensor gets a file of its own.
        name_file: (index from 0, number of files) -> name.
    """
    batches = fill_in_order(sizes, max_bytes)
    return [
        Unit(name_file(index, len(batches)), tuple(batch), sum(sizes[name] for name in batch))
        for index, batch in enumerate(batches)
    ]


CONFIG_DIR, MTP_ROLE = "config", "mtp"  # directory of side files: config, tokenizer, generation settings
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
    """Map names to paths of the side files of `model`, in HF or Megatron format; `tokenizer`: a directory or file."""
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
    """Refuse a tokenizer that differs from that in `saved`, a checkpoint's `config/`, in token ids (UserError)."""
    for name in _DEFINE_IDS:
        if name in files and (saved / name).is_file() and files[name].read_bytes() != (saved / name).read_bytes():
            raise UserError(
                f"the checkpoint was trained with another vocabulary: its {name} differs from {files[name]}",
                source=str(saved / name),
                expected="the tokenizer of the run that is resumed",
                hint="point model.tokenizer at the old tokenizer, or start a new run",
            )
