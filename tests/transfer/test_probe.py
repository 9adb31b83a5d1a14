# SPDX-License-Identifier: Apache-2.0
"""Findings of a server's probe: with a trainer and a server that are two tables of log-probs.

Not covered: a real server (tests/engines/test_served.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.engines.protocol import Request, Sampled, SamplingConfig
from megatron_rl.engines.wrappers import AbsentEngine
from megatron_rl.transfer.probe import ProbedWeights
from megatron_rl.types import UserError

TOKENS = np.array([5, 6, 7], np.int32)


class Weights(AbsentEngine):
    """A server's weights: a number that its log-probs are less by."""

    def __init__(self, loads: Callable[[float], float], rank: int = 0) -> None:
        super().__init__({}, {})
        self._loads, self._rank, self.given, self.held, self.tokens = loads, rank, 0.0, 0.0, TOKENS

    def end_weight_update(self) -> None:
        """Load the given weights, or this server's version of them."""
        self.held = self._loads(self.given)

    def probe(self) -> list[tuple[Request, Sampled]] | None:
        """Return log-probs under the loaded weights."""
        logprobs = np.full(len(self.tokens), -1.0 - self.held, np.float32)
        requests = [
            Request(key, np.arange(4, dtype=np.int32), 1, SamplingConfig(temperature, 3, ()))
            for key, temperature in enumerate((0.0, 0.5))
        ]
        responses = [(one, Sampled(one.key, self.tokens, logprobs, "length")) for one in requests]
        return responses if self._rank == 0 else None


def probed(weights: Weights, asked: list[Any] | None = None, dtype: str = "float32") -> ProbedWeights:
    """Probe with a trainer that has the given weights."""

    def score(sequences: Sequence[np.ndarray], skip: Sequence[int], temperature: float) -> list[np.ndarray]:
        if asked is not None:
            asked.append(([s.tolist() for s in sequences], list(skip), temperature))
        return [np.full(len(s) - n, -1.0 - weights.given, np.float32) for s, n in zip(sequences, skip, strict=True)]

    group = dist.group.WORLD
    assert group is not None
    return ProbedWeights(weights, weights.probe, score, dtype, group)


def update(loads: Callable[[float], float], given: Sequence[float], dtype: str = "float32") -> str:
    """The message of the update that fails, and its number; empty if none does."""

    def work(rank: int, world_size: int) -> str:
        weights = Weights(loads, rank)
        engine = probed(weights, dtype=dtype)
        for number, value in enumerate(given):
            weights.given = value
            try:
                engine.end_weight_update()
            except UserError as error:
                return f"update {number}: {error.found}"
        return ""

    found = run_ranks(work, 2)
    assert found[0] == found[1], "every rank says the same"
    return found[0]


def test_server_that_follows_passes() -> None:
    """Also with the arithmetic of another program, and if nothing moves."""
    assert update(lambda given: given + 4e-6, [0.0, 1e-4, 1e-4, 0.3, -2.0]) == ""


def test_first_update_that_is_not_loaded_is_found() -> None:
    found = update(lambda given: given + 0.02, [0.0])
    assert found == (
        "update 0: the server of rank 0 has other weights than training: log-probs of 3 tokens differ by 0.02"
    )


def test_stale_weights_within_the_bound_are_found_by_their_standstill() -> None:
    """A step of a small learning rate: 1e-4 is a tenth of the bound on equal weights."""
    assert "update 1: the server of rank 0 has kept older weights" in update(lambda given: 0.0, [0.0, 1e-4])
    assert update(lambda given: 0.0, [0.0, 1e-5]) == "", "less than what the arithmetic differs by tells nothing"
    assert "update 2: the server" in update(lambda given: 0.0, [0.0, 1e-5, 4e-5])


def test_bounds_are_those_of_the_dtype() -> None:
    assert update(lambda given: given + 0.2, [0.0, 0.1], "bfloat16") == ""
    assert "kept older weights" in update(lambda given: 0.0, [0.0, 0.1], "bfloat16")


def test_log_probs_that_are_none_are_refused() -> None:
    assert "differ by nan" in update(lambda given: float("nan"), [0.0])


def test_tokens_that_change_have_moved() -> None:
    """Log-probs of other tokens cannot be compared with the last ones."""

    def work(rank: int, world_size: int) -> None:
        weights = Weights(lambda given: 0.0)
        engine = probed(weights)
        engine.end_weight_update()
        weights.given, weights.tokens = 1e-4, TOKENS + 1
        engine.end_weight_update()

    run_ranks(work, 1)


def test_what_is_scored() -> None:
    """The prompt with each answer, at the temperature it was drawn with; greedy is the distribution itself."""

    def work(rank: int, world_size: int) -> list[Any]:
        asked: list[Any] = []
        probed(Weights(lambda given: given), asked).end_weight_update()
        return asked

    sequence = [0, 1, 2, 3, 5, 6, 7]
    assert run_ranks(work, 1) == [[([sequence], [4], 1.0), ([sequence], [4], 0.5)]]


def test_error_of_one_server_is_raised_on_every_rank() -> None:
    def work(rank: int, world_size: int) -> str:
        def fail(given: float) -> float:
            if rank == 1:
                raise UserError("it does not start", source="a", expected="b", hint="c")
            return given

        with pytest.raises(UserError) as caught:
            probed(Weights(fail, rank)).end_weight_update()
        return caught.value.found

    assert run_ranks(work, 2) == ["it does not start"] * 2
