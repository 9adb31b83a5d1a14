# SPDX-License-Identifier: Apache-2.0
"""Copies of weights that a server makes for its samplers, with a policy that only counts.

Not covered: the values, which `test_server.py` compares with a model of its own.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.engines.token_requests import TokenRequest
from tools.serving import served_policy
from tools.serving.request_checks import SampleJob
from tools.serving.served_policy import ServedPolicy


class Weights:
    """A policy whose weights are a number."""

    def __init__(self) -> None:
        self.model = self.role = self.hybrid = self.engine = self
        self.value, self.adapters, self.slots = 0, None, None
        self.moves: list[str] = []
        self.sampled: list[int] = []

    def rollout_mode(self) -> Any:
        return nullcontext()

    def sample_requests(self, requests: Any) -> list[Any]:
        self.sampled.append(self.value)
        return [None] * len(requests)

    def optim_step(self, **settings: Any) -> dict[str, float]:
        self.value += 1
        return {}


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
    policy = Weights()

    def copy(model: Weights) -> int:
        policy.moves.append("copy")
        return policy.value

    def put(model: Weights, value: int) -> None:
        policy.moves.append("put")
        policy.value = value

    for name in ("copy_state", "copy_weights"):
        monkeypatch.setattr(served_policy, name, copy)
    for name in ("put_state", "put_weights"):
        monkeypatch.setattr(served_policy, name, put)
    monkeypatch.setattr(served_policy, "count_versions", lambda config: 0)
    monkeypatch.setattr(served_policy, "write_samples", lambda *given: b"")
    monkeypatch.setattr(served_policy, "raise_together", lambda *given: None)
    monkeypatch.setattr(served_policy, "world", lambda: None)
    return policy


def sample(served: ServedPolicy, version: str) -> None:
    served.run("sample", {"jobs": [SampleJob(TokenRequest(np.array([1]), 1, seed=0), 1, 0, version=version)]})


def test_a_sampler_of_the_present_weights_exchanges_nothing(weights: Weights) -> None:
    served = ServedPolicy(SimpleNamespace(policy=weights, config=None))  # pyright: ignore[reportArgumentType]
    served.run("create", {"model": "a", "saved": None})
    weights.moves.clear()
    for version in ("first", "second"):
        served.run("snapshot", {"model": "a", "version": version})
        sample(served, version)
    assert weights.moves == ["copy"]  # which both share
    served.run("optim_step", {"model": "a", "settings": {}})
    served.run("snapshot", {"model": "a", "version": "third"})
    for version in ("third", "first", "a", "second", "third"):
        sample(served, version)
    assert weights.sampled == [0, 0, 1, 0, 1, 0, 1]
    served.run("optim_step", {"model": "a", "settings": {}})
    assert weights.value == 2  # the sampler's were put back


def test_another_models_weights_are_not_taken_for_a_snapshot(weights: Weights) -> None:
    served = ServedPolicy(SimpleNamespace(policy=weights, config=None))  # pyright: ignore[reportArgumentType]
    served.run("create", {"model": "a", "saved": None})
    served.run("optim_step", {"model": "a", "settings": {}})
    served.run("snapshot", {"model": "a", "version": "of a"})
    served.run("create", {"model": "b", "saved": None})
    served.run("snapshot", {"model": "b", "version": "of b"})
    for version in ("of a", "of b", "a", "b"):
        sample(served, version)
    assert weights.sampled == [1, 0, 1, 0]
    served.run("drop", {"names": ["b", "of b"]})
    sample(served, "of a")
    assert weights.sampled[-1] == 1
