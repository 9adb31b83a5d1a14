# SPDX-License-Identifier: Apache-2.0
"""Scalings of rotary frequencies, as in config.json (`rope_type`); `models/rotary.py` has the formulas.

Scalings that change with sequence length are supported as far as trainer and engines agree: "longrope" up to the
context of pretraining (its short factors), "dynamic" never, as vLLM uses one base for all lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LinearScaling:
    """Division of all frequencies by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1.

    Frequencies with fewer than `low_freq_factor` turns in the context of pretraining are divided by `factor`, those
    above `high_freq_factor` turns are kept, and those in between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071).

    Frequencies with more than `beta_fast` turns in the context of pretraining are kept, those below `beta_slow` turns
    are divided by `factor`, and those in between are interpolated by index, from integer ends if `truncates`. Cosines
    and sines are multiplied by `attention_factor`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncates: bool


@dataclass(frozen=True)
class LongropeScaling:
    """Division of each frequency by its own factor (LongRoPE, arXiv 2402.13753), for short sequences.

    Cosines and sines are multiplied by `attention_factor`.
    """

    short_factor: tuple[float, ...]
    attention_factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongropeScaling


def compute_yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the growth of attention scores for a longer context: 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_type_of(rope: Mapping[str, Any]) -> str:
    """Return the type of scaling in config.json."""
    return rope.get("rope_type") or rope.get("type") or "default"


def read_rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[RopeScaling | None, int]:
    """Parse the scaling, and the number of positions it supports.

    Args:
        rope: `rope_parameters` or `rope_scaling` of config.json, accepted by `is_served`.

    Raises:
        KeyError: a number is missing.
    """
    kind, longest = rope_type_of(rope), config["max_position_embeddings"]
    if kind == "default":
        return None, longest
    scaling = _READERS[kind](rope, config)
    if isinstance(scaling, LongropeScaling):
        return scaling, min(longest, _read_original_length(rope, config))
    if isinstance(scaling, YarnScaling):  # if added by hand, the config still has the old length
        longest = max(longest, int(scaling.factor * scaling.original_max_position_embeddings))
    return scaling, longest


def _read_original_length(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return rope.get(name) or config.get(name) or config["max_position_embeddings"]


def _read_yarn(rope: Mapping[str, Any], config: Mapping[str, Any]) -> YarnScaling:
    factor, mscale, mscale_all_dim = float(rope["factor"]), rope.get("mscale"), rope.get("mscale_all_dim")
    attention_factor = rope.get("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = compute_yarn_mscale(factor, mscale) / compute_yarn_mscale(factor, mscale_all_dim)
    return YarnScaling(
        factor,
        _read_original_length(rope, config),
        float(compute_yarn_mscale(factor) if attention_factor is None else attention_factor),
        float(rope.get("beta_fast") or 32),
        float(rope.get("beta_slow") or 1),
        bool(rope.get("truncate", True)),
    )


def _read_longrope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> LongropeScaling:
    original = _read_original_length(rope, config)
    factor = config["max_position_embeddings"] / original
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongropeScaling(tuple(map(float, rope["short_factor"])), attention_factor)


_READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], RopeScaling]] = {
    "linear": lambda rope, config: LinearScaling(float(rope["factor"])),
    "llama3": lambda rope, config: Llama3Scaling(
        rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], _read_original_length(rope, config)
    ),
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "su": _read_longrope,  # its first name
}


def restore_rope_scaling(saved: Mapping[str, Any]) -> RopeScaling:
    """Restore a scaling from `dataclasses.asdict`."""
    for record in (LinearScaling, Llama3Scaling, YarnScaling, LongropeScaling):
        if {field.name for field in fields(record)} == saved.keys():
            values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
            return record(**values)
    raise AssertionError(f"no scaling has the numbers {sorted(saved)}")


def is_served(rope: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether trainer and engines agree on a scaling; longrope needs the factors that vLLM derives."""
    kind = rope_type_of(rope)
    if kind not in ("longrope", "su"):
        return kind == "default" or kind in _READERS
    expected = _read_longrope(rope, config)
    ratio = config["max_position_embeddings"] / _read_original_length(rope, config)
    return rope.get("factor") in (None, ratio) and rope.get("attention_factor") in (None, expected.attention_factor)
