# SPDX-License-Identifier: Apache-2.0
"""Downloads models and data sets of the Hugging Face hub into its cache, and reads data sets from there.

Models, tokenizers and adapters are OWNER/NAME[@REVISION], data sets hub:OWNER/NAME[/CONFIG][@REVISION]:SPLIT.
huggingface_hub decides on cache, offline mode and credentials by its own variables (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN).
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import psutil

from megatron_rl.config.fields import redact
from megatron_rl.extension.registry import HUB
from megatron_rl.types import UserError

_SIDE_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
_DATASET = re.compile(rf"{HUB}([\w.-]+/[\w.-]+)(/[^/@:]+)?(@[^:]+)?:(.+)")
_SOURCE = "data.train_files / data.validation_files"


def fetch_model(name: str, setting: str) -> Path:
    """Return the directory of a model, tokenizer or adapters (UserError if it cannot be downloaded).

    Args:
        setting: that holds the name; a tokenizer has no weights.
    """
    repository, _, revision = name.partition("@")
    files = _SIDE_FILES if setting == "model.tokenizer" else [*_SIDE_FILES, "*.safetensors"]
    return _fetch(repository, revision, "model", setting, allow_patterns=files, ignore_patterns=["*/*"])


def pin_dataset(name: str, setting: str) -> str:
    """Return the name of a data set with the commit of its repository, or with a digest of its rows (UserError).

    Its repository is downloaded, or the function of that name called.
    """
    if not name.startswith(HUB):
        from megatron_rl.data.passed_rows import pin_function

        return pin_function(name, setting)
    repository, config, revision, split = _split(name)
    commit = _fetch(repository, revision, "dataset", setting).name
    return f"{HUB}{repository}{config and '/' + config}@{commit}:{split}"


def read_dataset(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and columns of each row (UserError: no such data set, config or split)."""
    import datasets  # a slow import

    repository, config, revision, split = _split(name)
    directory = _fetch(repository, revision, "dataset", _SOURCE)
    # The library locks a file in its cache even when streaming; separate directories keep ranks apart.
    with tempfile.TemporaryDirectory(prefix="megatron_rl_datasets_") as cache_dir:
        try:
            stream = datasets.load_dataset(
                str(directory), config or None, split=split, streaming=True, cache_dir=cache_dir
            )
            for number, columns in enumerate(stream, start=1):
                yield f"{name}:row {number}", cast(dict[str, Any], columns)
        except Exception as error:  # the library raises many types
            raise UserError(
                f"{name}: {_shorten(error)}",
                source=_SOURCE,
                expected="a config and a split of the data set",
                hint="its page on the hub lists both; without /CONFIG it is the default one",
            ) from error


def name_dataset(name: str) -> tuple[str, ...]:
    """Return the parts that name a data set in metrics, the most significant last; no revision."""
    repository, config, _, split = _split(name)
    return (*repository.split("/"), *([config] if config else []), split)


def _split(name: str) -> tuple[str, str, str, str]:
    found = _DATASET.fullmatch(name)
    if found is None:
        raise UserError(
            f"{name!r} is no data set's name",
            source=_SOURCE,
            expected=f"{HUB}OWNER/NAME[/CONFIG][@REVISION]:SPLIT",
            hint=f"for example {HUB}openai/gsm8k/main:train",
        )
    repository, config, revision, split = (part or "" for part in found.groups())
    return repository, config.removeprefix("/"), revision.removeprefix("@"), split


def _fetch(repository: str, revision: str, kind: str, setting: str, **patterns: Any) -> Path:
    """Return the directory of a repository's commit in the cache; download what is absent (UserError).

    Of the processes that run at a time, one asks the hub and leaves its answer beside the cache.
    """
    import huggingface_hub  # a slow import, not needed for local files
    from huggingface_hub import constants

    question = repr((constants.ENDPOINT, constants.HF_HUB_CACHE, repository, revision, kind, patterns))
    answer = Path(constants.HF_HUB_CACHE).with_name("megatron_rl") / hashlib.sha256(question.encode()).hexdigest()
    try:
        with _wait_for_others():
            if answer.is_file() and answer.stat().st_mtime > psutil.Process().create_time():
                return Path(answer.read_text())
            found = huggingface_hub.snapshot_download(repository, repo_type=kind, revision=revision or None, **patterns)
            with suppress(OSError):  # the cache may be read-only
                answer.parent.mkdir(exist_ok=True)
                answer.write_text(found)
            return Path(found)
    except Exception as error:  # of many types: the library's, its HTTP client's and the disk's
        version = f" --revision {revision}" if revision else ""
        download = f"hf download {repository}{version}"
        by_hand = f"{download} --local-dir DIR, and set {setting}=DIR"
        if kind == "dataset":
            by_hand = f"{download} --repo-type dataset --local-dir DIR, and list its files in the setting"
        raise UserError(
            f"{repository}{revision and '@' + revision} is neither a local path nor a {kind} that the hub or its cache "
            f"gives: {_shorten(error)}",
            source=setting,
            expected=f"a local path, or the name of a {kind} of the hub, which is reached or in the cache (HF_HOME)",
            hint=f"correct the path or name; where the hub is reached: {by_hand}; if access is limited: hf auth login",
        ) from error


@contextmanager
def _wait_for_others() -> Iterator[None]:
    """Let one process of a user and host download at a time; one that waited shows no progress bars."""
    import filelock
    from huggingface_hub.utils import disable_progress_bars

    lock = filelock.FileLock(Path(tempfile.gettempdir(), f"megatron_rl_hub_{os.getuid()}.lock"))
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        disable_progress_bars()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _shorten(error: Exception) -> str:
    return redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
