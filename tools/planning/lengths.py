# SPDX-License-Identifier: Apache-2.0
"""Response lengths: measured or lognormal, correlated within a prompt.

A length is the quantile at Phi(z), z = sqrt(r) s + sqrt(1 - r) e, with one normal s per prompt and one e per response
(a Gaussian copula); r is the correlation within a prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from megatron_rl.types import UserError

CORRELATION = 0.5  # default
_NUM_QUANTILES = 8192
_EXPECTED = "FILE (a length per line, rollouts/step_<N>.jsonl, or a directory with them) or lognormal:MEDIAN,SIGMA[,R]"


@dataclass(frozen=True)
class LengthModel:
    """A distribution of lengths.

    Attributes:
        values: [n] ascending quantiles, tokens.
        correlation: within a prompt, in [0, 1).
    """

    values: np.ndarray = field(repr=False)
    correlation: float
    source: str

    def draw(self, seed: int, first: int, num_prompts: int, group_size: int, longest: int) -> np.ndarray:
        """Draw lengths [num_prompts, group_size] for prompts of a stream.

        Args:
            first: index of the first prompt, a multiple of `num_prompts`.
            longest: maximum length.
        """
        rng = np.random.default_rng([seed, first])
        shared, own = rng.standard_normal((num_prompts, 1)), rng.standard_normal((num_prompts, group_size))
        z = np.sqrt(self.correlation) * shared + np.sqrt(1 - self.correlation) * own
        places = (_normal_cdf(z) * len(self.values)).astype(int)
        return np.minimum(self.values[np.minimum(places, len(self.values) - 1)], longest)

    def mean(self, longest: int) -> float:
        """Return the mean."""
        return float(np.minimum(self.values, longest).mean())

    def describe(self, longest: int) -> str:
        """Format one line."""
        cut = np.minimum(self.values, longest)
        return (
            f"{self.source}, correlation {self.correlation:.2f} inside of a prompt: mean {cut.mean():.0f}, median "
            f"{np.median(cut):.0f}, {np.mean(self.values >= longest):.1%} at the limit of {longest} tokens"
        )


def read_lengths(text: str) -> LengthModel:
    """Parse `--lengths`.

    Raises:
        UserError: no file of lengths, or invalid parameters.
    """
    if text.startswith("lognormal:"):
        return _read_lognormal(text)
    path = Path(text)
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = sorted(folder.rglob("step_*.jsonl")) if path.is_dir() else [path]
    try:
        lines = list(chain.from_iterable(file.read_text(encoding="utf-8").split("\n") for file in files))
        rows = [row for row in map(json.loads, filter(str.strip, lines)) if not _is_extreme(row)]
    except (OSError, ValueError) as error:
        raise _refuse(text, f"cannot be read: {error}") from None
    lengths = np.array([_length(text, row) for row in rows], dtype=int)
    if not len(lengths):
        raise _refuse(text, "holds no lengths")
    correlation = _measure_correlation([_group(row) for row in rows], lengths)
    return LengthModel(np.sort(lengths), CORRELATION if correlation is None else correlation, text)


def make_lognormal(median: float, sigma: float, correlation: float = CORRELATION) -> LengthModel:
    """Build a lognormal distribution of at least 1 token."""
    steps = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    z = np.array([NormalDist().inv_cdf(float(step)) for step in steps])
    values = np.maximum(1, np.rint(median * np.exp(sigma * z))).astype(int)
    return LengthModel(values, correlation, f"lognormal with median {median:g}, sigma {sigma:g}")


def _read_lognormal(text: str) -> LengthModel:
    parts = text.removeprefix("lognormal:").split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise _refuse(text, "is no list of numbers") from None
    if len(numbers) not in (2, 3) or numbers[0] < 1 or numbers[1] < 0 or not 0 <= sum(numbers[2:]) < 1:
        raise _refuse(text, "is not MEDIAN >= 1, SIGMA >= 0, 0 <= R < 1")
    return make_lognormal(*numbers)


def _is_extreme(row: Any) -> bool:
    """Whether a rollout was logged for its extreme length or reward, a biased sample."""
    return isinstance(row, dict) and "logged_as" in row


def _length(text: str, row: Any) -> int:
    """Return the length of a line, a number or a rollout."""
    length = row
    if isinstance(row, dict):
        length = len(row["tokens"]) if isinstance(row.get("tokens"), list) else row.get("num_tokens")
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise _refuse(text, f"has a line that is neither a length nor a rollout: {str(row)[:60]}")
    return max(1, length)


def _group(row: Any) -> tuple[int, int] | None:
    """Return the key of a rollout's group."""
    return (row.get("prompt_id", -1), row.get("policy_version", -1)) if isinstance(row, dict) else None


def _measure_correlation(groups: list[tuple[int, int] | None], lengths: np.ndarray) -> float | None:
    """Return the mean product of paired normal scores, if there are pairs."""
    ranks = np.argsort(np.argsort(lengths, kind="stable"), kind="stable")
    scores = [NormalDist().inv_cdf((int(rank) + 0.5) / len(lengths)) for rank in ranks]
    members: dict[tuple[int, int], list[float]] = {}
    for group, score in zip(groups, scores, strict=True):
        if group is not None:
            members.setdefault(group, []).append(score)
    pairs = sum(len(found) * (len(found) - 1) for found in members.values())
    if not pairs:
        return None
    products = sum(sum(found) ** 2 - sum(score * score for score in found) for found in members.values())
    return float(np.clip(products / pairs / np.mean(np.square(scores)), 0.0, 0.99))


def _normal_cdf(z: np.ndarray) -> np.ndarray:
    return np.vectorize(NormalDist().cdf, otypes=[float])(z)


def _refuse(text: str, what: str) -> UserError:
    return UserError(
        f"--lengths {text} {what}",
        source="--lengths",
        expected=_EXPECTED,
        hint="for instance --lengths lognormal:2000,1.0,0.5: R is the correlation inside of a prompt",
    )
