# SPDX-License-Identifier: Apache-2.0
"""Parsing of model shapes and layouts: `--source tp=8,pp=8,dp=16 --destination tp=8`."""

from __future__ import annotations

import json
import math
from pathlib import Path

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.model_config import load_model_shape, model_shape_from_config
from megatron_rl.weights.support import check_rollout_layout, check_training_layout

TRAINING_SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
ENGINE_SIZES = ("tp", "ep", "dp")


def parse_sizes(text: str, flag: str, known: tuple[str, ...]) -> dict[str, int]:
    """Parse `tp=2,pp=2` into `{"tp": 2, "pp": 2}`.

    Raises:
        UserError: an unreadable part.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in known or name in sizes or not value.isdecimal() or int(value) < 1:
            raise UserError(
                f"cannot read {part.strip()!r} in {flag} {text}",
                source="command line",
                expected=f"sizes of at least 1, each once, of {', '.join(known)}",
                hint=f"{flag} tp=8,dp=2, for example",
            )
        sizes[name] = int(value)
    return sizes


def read_training_layout(text: str, flag: str, num_ranks: int | None = None) -> ParallelLayout:
    """Parse Megatron's layout.

    Args:
        flag: option name for errors.
        num_ranks: ranks of the job, of which dp is the remainder; if `None`, dp comes from `text` (default 1).

    Raises:
        UserError: unreadable, or not for this number of ranks.
    """
    sizes = parse_sizes(text, flag, TRAINING_SIZES)
    dp = sizes.pop("dp", 1 if num_ranks is None else None)
    taken = math.prod(sizes.get(name, 1) for name in ("tp", "pp", "cp")) * (dp or 1)
    if num_ranks is not None and dp is not None and taken != num_ranks:
        raise UserError(
            f"{flag} {text} takes {taken} ranks, there are {num_ranks}",
            source="command line",
            expected=f"tp * pp * cp * dp = {num_ranks}",
            hint="leave dp out: it is the rest",
        )
    return ParallelLayout(num_ranks or taken, **{f"{name}_size": size for name, size in sizes.items()})


def read_engine_sizes(text: str, flag: str, num_ranks: int, known: tuple[str, ...] = ENGINE_SIZES) -> tuple[int, int]:
    """Parse an engine's TP and EP size; with EP, its ranks have whole experts, and a multiple of TP are in an engine.

    Raises:
        UserError: unreadable, or engines do not fill the ranks.
    """
    sizes = parse_sizes(text, flag, known)
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    if ep > 1 and ep % tp:
        raise UserError(
            f"{flag} {text} gives whole experts to some ranks of an engine only",
            source="command line",
            expected="ep of 1, or of all ranks of an engine, a multiple of tp",
            hint=f"{flag} tp={tp},ep={2 * tp}, for example",
        )
    width = max(tp, ep)
    if num_ranks % width or sizes.get("dp", num_ranks // width) * width != num_ranks:
        raise UserError(
            f"{flag} {text} does not fill the {num_ranks} ranks of the training layout",
            source="command line",
            expected=f"{'ep' if ep > 1 else 'tp'} * dp = {num_ranks}",
            hint="leave dp out: it is the rest",
        )
    return tp, ep


def read_layouts(
    shape: ModelShape,
    source: str,
    destination: str,
    num_ranks: int | None = None,
    engine_sizes: tuple[str, ...] = ENGINE_SIZES,
) -> tuple[ParallelLayout, int, int]:
    """Parse and check --source and --destination; return training layout, engine TP size and engine EP size.

    Args:
        num_ranks: ranks of the job; derived from `source` if `None`.
        engine_sizes: those that `destination` may name.
    """
    layout = read_training_layout(source, "--source", num_ranks)
    check_training_layout(shape, layout)
    rollout_tp, rollout_ep = read_engine_sizes(destination, "--destination", layout.world_size, engine_sizes)
    check_rollout_layout(shape, rollout_tp, rollout_ep)
    return layout, rollout_tp, rollout_ep


def read_shape(path: Path) -> ModelShape:
    """Read a model directory or config.json.

    Raises:
        UserError: unreadable or unsupported.
    """
    if path.is_dir():
        return load_model_shape(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"cannot read {path}: {error}",
            source="--hf-config",
            expected="a model directory or its config.json",
            hint="check for a typo",
        ) from None
    if not isinstance(config, dict):
        raise UserError(
            f"{path} holds a {type(config).__name__}",
            source="--hf-config",
            expected="a JSON object",
            hint="pass the config.json of the model",
        )
    return model_shape_from_config(config, source=str(path))
