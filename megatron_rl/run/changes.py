# SPDX-License-Identifier: Apache-2.0
"""Find changes since a checkpoint was written: settings, and files that the run depends on.

The reference of the KL term, the reward model, the base model of adapters, the data, and the user's reward functions
and plugins lie outside a checkpoint; digests show whether they have changed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.schema import RunConfig
from megatron_rl.data.pass_rates import list_pass_rate_files
from megatron_rl.extension.reasoning_gym import PREFIX, identify
from megatron_rl.types import UserError

Dependencies = dict[str, dict[str, str]]  # name -> {"source": paths, "digest": of their content}
_SAID_ONLY = ("validation_files", "program")  # all others change the training
_BLOCK, _MOST_BLOCKS = 64 << 10, 128


def find_dependencies(config: RunConfig) -> Dependencies:
    """Digest the files that a run depends on and its checkpoints do not contain.

    Data and code are read completely (about 1 GB/s), weights in samples (8 MiB per file): training changes all
    matrices, but an edit of a few numbers may go unnoticed.
    """
    algorithm, found = config.algorithm, {}
    if config.actor.lora.rank:
        found["model"] = _list_weights(config.model.path)
    if config.critic.lora.rank:
        found["critic"] = _list_weights(config.critic.path or config.model.path)
    if algorithm.kl_coef > 0:
        found["reference"] = _list_weights(config.reference.path or config.model.path)
    if config.reward_model.path:
        found["reward_model"] = _list_weights(config.reward_model.path)
    if config.teachers:
        found["teachers"] = [file for teacher in config.teachers.values() for file in _list_weights(teacher.path)]
    found["train_files"] = [Path(file) for file in config.data.train_files]
    if config.data.pass_rates is not None:
        found["train_files"] += list_pass_rate_files(config.data).values()
    found["validation_files"] = [Path(file) for file in config.data.validation_files]
    targets = [text.split(maxsplit=1)[-1] for text in config.reward.components] or [config.reward.function or ""]
    functions = {Path(target.rpartition(":")[0]) for target in targets if "://" not in target}
    functions = {path for path in functions if path.is_file()}  # rules have names, not files
    main = getattr(sys.modules["__main__"], "__file__", None)  # defines functions passed as objects
    program = {path for path in functions if main is not None and path.resolve() == Path(main).resolve()}
    found |= {"reward": sorted(functions - program), "program": sorted(program)}
    found["plugins"] = [Path(file) for file in algorithm.plugins]
    return {
        name: {
            "source": ", ".join(map(str, _shorten(files))),
            "digest": _digest(files, samples=name in ("model", "critic", "reference", "reward_model", "teachers")),
        }
        for name, files in found.items()
        if files
    }


def check_dependencies(saved: Dependencies, now: Dependencies, allowed: Iterable[str], checkpoint: Path) -> list[str]:
    """Return the accepted differences, one line each, between the dependencies of a run and of a checkpoint's run.

    Args:
        saved, now: from `find_dependencies`.
        allowed: `checkpoint.allow_changes`.
        checkpoint: for the error.

    Raises:
        UserError: a difference that changes the training.
    """
    lines = {
        name: f"{name}: {now[name]['source']} (digest {now[name]['digest'][:12]}), it was "
        f"{saved[name]['source']} (digest {saved[name]['digest'][:12]})"
        for name in now
        if name in saved and now[name]["digest"] != saved[name]["digest"]
    }
    refused = [name for name in lines if name not in (*_SAID_ONLY, *allowed)]
    if refused:
        raise UserError(
            f"the content of what the run depends on has changed: {'; '.join(lines[name] for name in refused)}",
            source=str(checkpoint),
            expected="what the run behind the checkpoint had",
            hint=f"restore it, or accept the new one by checkpoint.allow_changes=[{','.join(refused)}]",
        )
    return list(lines.values())


def _list_weights(path: str) -> list[Path]:
    return sorted(file for file in Path(path).iterdir() if file.suffix in (".safetensors", ".distcp"))


def _shorten(files: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(file.parent if file.suffix in (".safetensors", ".distcp") else file for file in files))


def _digest(files: Iterable[Path], *, samples: bool) -> str:
    whole = hashlib.blake2b(digest_size=20)
    for path in files:
        if str(path).startswith(PREFIX):
            whole.update(identify(str(path)).encode())
            continue
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole.update(size.to_bytes(8))
            if samples and size > _BLOCK * _MOST_BLOCKS:
                for block in range(_MOST_BLOCKS):
                    file.seek((size - _BLOCK) * block // (_MOST_BLOCKS - 1))
                    whole.update(file.read(_BLOCK))
            else:
                while content := file.read(1 << 20):
                    whole.update(content)
    return whole.hexdigest()


def describe_changes(before: str, now: str) -> list[str]:
    """Return the settings that differ between two resolved configs in YAML."""
    old, new = (_flatten(yaml.safe_load(text) or {}) for text in (before, now))
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
