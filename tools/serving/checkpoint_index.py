# SPDX-License-Identifier: Apache-2.0
"""List of a server's saved checkpoints, `checkpoints.json` in its directory, which the next server reads."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_rl.types import UserError
from tools.serving.request_checks import Lora
from tools.serving.wire import refuse

SCHEME = "tinker://"
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_SHOWN = (
    "checkpoint_id",
    "checkpoint_type",
    "time",
    "tinker_path",
    "size_bytes",
    "user_metadata",
    "expires_at",
    "public",
)


class UnknownError(UserError):
    """A name that does not exist for this owner (404)."""


def unknown(kind: str, name: Any) -> UnknownError:
    """Return the error for a name that does not exist for this owner."""
    hint = "a server that was started again has checkpoints only: load one into a new training client"
    return UnknownError(f"there is no {kind} {name!r:.200}", source=kind, expected="a name of this server", hint=hint)


def utc(seconds: float) -> str:
    """Return a time in ISO format."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


class CheckpointIndex:
    """Checkpoints by their path `tinker://RUN/KIND/NAME`; thread-safe.

    Attributes:
        entries: path -> the fields of the client's `Checkpoint`, and owner, run and expiry in seconds.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._file = directory, directory / "checkpoints.json"
        self._lock = threading.RLock()
        self.entries: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def directory_of(self, path: str) -> Path:
        """Return the directory of a checkpoint."""
        return self._directory / path.removeprefix(SCHEME).replace(":", "_")

    def find(self, owner: str, path: Any) -> dict[str, Any]:
        """Return the entry of an owner's checkpoint.

        Raises:
            UnknownError: it does not exist, has expired, or is another owner's.
        """
        entry = self.entries.get(str(path))
        if entry is None or entry["owner"] != owner or _is_over(entry):
            raise unknown("checkpoint", path)
        return entry

    def add(self, path: str, owner: str, base_model: str, run: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        """Add a checkpoint that was written.

        Args:
            run: `TrainedModel.describe`.
            request: with the checkpoint's own `user_metadata` and `ttl_seconds`.
        """
        run_id, kind, name = path.removeprefix(SCHEME).split("/")
        files = self.list_files(path)
        with self._lock:
            self.entries[path] = {
                "checkpoint_id": f"{kind}/{name}",
                "checkpoint_type": _TYPES[kind],
                "time": utc(time.time()),
                "tinker_path": path,
                "size_bytes": sum(file.stat().st_size for file in files.values()),
                "user_metadata": request.get("user_metadata"),
                "public": False,
                "owner": owner,
                "run": run_id,
                "run_metadata": dict(run["metadata"]),
                "lora": run["lora"],
                "base_model": base_model,
                **_expiry(request.get("ttl_seconds")),
            }
            self._write()

    def list_files(self, path: str) -> dict[str, Path]:
        """Return the files of a checkpoint by their names inside its directory."""
        directory = self.directory_of(path)
        return {str(file.relative_to(directory)): file for file in directory.rglob("*") if file.is_file()}

    def lora_of_run(self, owner: str, run: str) -> Lora | None:
        """Return the adapters in the last of a run's checkpoints."""
        entries = [one for one in [*self.entries.values()] if (one["owner"], one["run"]) == (owner, run)]
        return self.lora_of(entries[-1]) if entries else None

    def lora_of(self, entry: Mapping[str, Any]) -> Lora | None:
        """Return the adapters in a checkpoint."""
        lora = entry.get("lora")
        return lora and Lora(lora["rank"], lora["seed"], tuple(lora["modules"]))

    def limit(self, owner: str, path: str, ttl_seconds: float | None) -> None:
        """Set the time after which a checkpoint is deleted; `None` keeps it."""
        with self._lock:
            self.find(owner, path).update(_expiry(ttl_seconds))
            self._write()

    def remove(self, owner: str, path: str) -> None:
        """Delete a checkpoint."""
        with self._lock:
            self.find(owner, path)
            self._delete(path)

    def expire(self) -> None:
        """Delete the checkpoints whose time is over."""
        with self._lock:
            for path in [path for path, one in self.entries.items() if _is_over(one)]:
                self._delete(path)

    def list(self, owner: str, run: str | None = None) -> list[dict[str, Any]]:
        """Return the owner's entries as the client shows them, of one run or of all, the newest last."""
        with self._lock:
            found = [one for one in self.entries.values() if one["owner"] == owner and run in (None, one["run"])]
        return [{name: one[name] for name in _SHOWN} for one in found]

    def runs(self, owner: str) -> dict[str, dict[str, Any]]:
        """Return the metadata of each of the owner's runs with checkpoints."""
        with self._lock:
            return {one["run"]: one["run_metadata"] for one in self.entries.values() if one["owner"] == owner}

    def _delete(self, path: str) -> None:
        del self.entries[path]
        self._write()  # first, so that no entry without files is left
        shutil.rmtree(self.directory_of(path), ignore_errors=True)

    def _write(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self.entries, indent=1))
        os.replace(partial, self._file)


def find_encryption(request: Mapping[str, Any]) -> Callable[[Path], None]:
    """Return a function that encrypts the files of a directory for the request's age recipients, if it has some.

    Raises:
        UserError: the package pyrage is missing, or cannot read a recipient.
    """
    given = request.get("age_encryption_recipients")
    if not given:
        return lambda directory: None
    hint = (
        "pip install pyrage for the server, or save without recipients and download tinker://RUN/external_weights/NAME"
    )
    try:
        age: Any = import_module("pyrage")
    except ModuleNotFoundError:
        raise refuse(
            "files to encrypt, without the package pyrage", "age_encryption_recipients", "none", hint
        ) from None
    try:
        kinds = (age.ssh if str(one).startswith("ssh-") else age.x25519 for one in given)
        recipients = [kind.Recipient.from_str(str(one)) for kind, one in zip(kinds, given, strict=True)]
    except (age.RecipientError, TypeError) as error:
        raise refuse(f"a recipient that is none: {error}", "age_encryption_recipients", "age1... or ssh-...") from None

    def encrypt(directory: Path) -> None:
        for file in [file for file in directory.rglob("*") if file.is_file()]:
            file.with_name(file.name + ".age").write_bytes(age.encrypt(file.read_bytes(), recipients))
            file.unlink()

    return encrypt


def _is_over(entry: Mapping[str, Any]) -> bool:
    return entry["expires"] is not None and entry["expires"] < time.time()


def _expiry(ttl_seconds: float | None) -> dict[str, Any]:
    expires = None if ttl_seconds is None else time.time() + ttl_seconds
    return {"expires": expires, "expires_at": None if expires is None else utc(expires)}
