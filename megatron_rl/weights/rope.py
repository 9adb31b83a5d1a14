# SPDX-License-Identifier: Apache-2.0
"""Scalings of rotary frequencies, as in config.json (`rope_type`).

Scalings that change with sequence length are supported as far as trainer and engines agree: "longrope" up to the
context of pretraining (its short factors), "dynamic" never, as vLLM uses one base for all lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_rl.weights.family import FAMILIES, rope_type_of

if TYPE_CHECKING:
    import torch


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


@dataclass(frozen=True)
class ProportionalScaling:
    """Rotation of the first `share` of channel pairs, with the frequencies that they have if all rotate (Gemma 4)."""

    share: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongropeScaling | ProportionalScaling


def compute_yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the growth of attention scores for a longer context: 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def scale_frequencies(periods: torch.Tensor, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Return the scaled frequencies [d/2] in float32, and the factor of all cosines and sines.

    Args:
        periods: [d/2] float32, theta^(2i/d).
    """
    import torch

    match scaling:
        case LinearScaling():
            return 1.0 / periods / scaling.factor, 1.0
        case Llama3Scaling():
            turns = scaling.original_max_position_embeddings * (1.0 / periods) / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            kept = kept.clamp(0, 1)
            return 1.0 / periods * (kept + (1 - kept) / scaling.factor), 1.0
        case YarnScaling():
            first, last = (
                len(periods)
                * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi))
                / math.log(theta)
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncates:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * len(periods) - 1)
            numbers = torch.arange(len(periods), dtype=torch.float32, device=periods.device)
            divided = ((numbers - first) / ((last - first) or 0.001)).clamp(0, 1)
            return 1.0 / (scaling.factor * periods) * divided + 1.0 / periods * (1 - divided), scaling.attention_factor
        case LongropeScaling():
            factors = torch.tensor(scaling.short_factor, dtype=torch.float32, device=periods.device)
            return 1.0 / (factors * periods), scaling.attention_factor
        case ProportionalScaling():
            frequencies = 1.0 / periods
            frequencies[int(scaling.share * len(periods)) :] = 0.0  # an angle of 0 does not change a bit
            return frequencies, 1.0


def list_conditions(scaling: RopeScaling, rotated: int) -> dict[str, bool]:
    """Return the conditions of a scaling for `rotated` channels, in words, and whether each holds."""
    if isinstance(scaling, Llama3Scaling):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return {f"low_freq_factor = {low} and high_freq_factor = {high}": low < high}
    if isinstance(scaling, LongropeScaling):
        count = len(scaling.short_factor)
        return {f"{count} numbers in short_factor for {rotated} channels": 2 * count == rotated}
    return {}


def read_rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[RopeScaling, int]:
    """Parse the scaling, and the number of positions it supports.

    Args:
        rope: `rope_parameters` or `rope_scaling` of config.json, accepted by `is_served`.

    Raises:
        KeyError: a number is missing.
    """
    longest = config["max_position_embeddings"]
    scaling = _READERS[rope_type_of(rope)](rope, config)
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
    "proportional": lambda rope, config: ProportionalScaling(float(rope.get("partial_rotary_factor") or 1.0)),
}


def restore_rope_scaling(saved: Mapping[str, Any]) -> RopeScaling:
    """Restore a scaling from `dataclasses.asdict`."""
    for record in (LinearScaling, Llama3Scaling, YarnScaling, LongropeScaling, ProportionalScaling):
        if {field.name for field in fields(record)} == saved.keys():
            values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
            return record(**values)
    raise AssertionError(f"no scaling has the numbers {sorted(saved)}")


def is_served(rope: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether trainer and engines agree on a scaling; longrope needs the factors that vLLM derives.

    Args:
        rope: `rope_parameters` or `rope_scaling` of config.json, with a type.
    """
    kind = rope_type_of(rope)
    if kind == "proportional":  # vLLM ignores its factor
        return FAMILIES[str(config["model_type"])].has_full_heads and rope.get("factor") in (None, 1.0)
    if kind not in ("longrope", "su"):
        return kind in _READERS
    expected = _read_longrope(rope, config)
    ratio = config["max_position_embeddings"] / _read_original_length(rope, config)
    return rope.get("factor") in (None, ratio) and rope.get("attention_factor") in (None, expected.attention_factor)
