# SPDX-License-Identifier: Apache-2.0
"""Commands of a server on every rank: rank 0 broadcasts each one, and all ranks call the same primitives.

Several models share one policy: each has its trained weights, optimizer states and unfinished gradients, which are
exchanged in place when a command is for another model than the last one. Weights of samplers are kept on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.engines.protocol import derive_seed
from megatron_rl.parallel.collectives import raise_together, world
from megatron_rl.run.primitives import Primitives
from megatron_rl.training.datums import Datum
from tools.serving.parking import copy_state, copy_weights, put_state, put_weights, reset_optimizer
from tools.serving.request_checks import SampleJob, write_samples
from tools.serving.server_state import BASE
from tools.serving.wire import write_outputs


class ServedPolicy:
    """The policy of a server, in which models and samplers alternate; construction and `run` are collective.

    Attributes:
        model: the model whose state the policy has; `None` for the base model's.
    """

    def __init__(self, run: Primitives) -> None:
        self._policy = run.policy
        self.model: str | None = None
        self._parked: dict[str, Any] = {}  # models whose state is not in the policy
        self._initial = copy_state(run.policy)
        self._versions: dict[str, Any] = {BASE: copy_weights(run.policy.model)}
        self._held: str | None = None  # the version that the model has until `_sleep`
        self._in_engine: str | None = None  # the version that the engines have, while they are awake
        self._awake = ExitStack()

    def run(self, kind: str, payload: Any) -> Any:
        """Run a command and return its result; an error that one rank alone has is raised on all."""
        error, result = None, None
        try:
            result = getattr(self, f"_{kind}")(**payload)
        except Exception as caught:
            error = caught
        raise_together(error, world())
        return result

    def close(self) -> None:
        """Release the engines."""
        self._awake.close()
        self._policy.close()

    def _idle(self) -> None:
        pass

    def _exchange(self, model: str | None) -> None:
        """Put a model's state into the policy; `None` and a new model get the base model's."""
        self._sleep()
        if model == self.model:
            return
        if self.model is not None:
            self._parked[self.model] = copy_state(self._policy)
        self.model = None  # until the other's state is complete
        put_state(self._policy, self._parked.get(model or "", self._initial))
        self._parked.pop(model or "", None)
        self.model = model

    def _sleep(self) -> None:
        self._awake.close()
        self._in_engine = self._held = None

    def _create(self, model: str, directory: str | None, with_optimizer: bool = False) -> int:
        self._exchange(model)
        return self._load(model, directory, with_optimizer) if directory else 0

    def _load(self, model: str, directory: str, with_optimizer: bool) -> int:
        self._exchange(model)
        self._policy.load(directory)
        if not with_optimizer:
            reset_optimizer(self._policy)
        return self._policy.role.policy_version

    def _forward_backward(self, model: str, backward: bool = True, **given: Any) -> bytes:
        self._exchange(model)
        return write_outputs(*self._policy.forward_backward_datums(**given, backward=backward))

    def _forward(self, **given: Any) -> bytes:
        return self._forward_backward(**given, backward=False)

    def _optim_step(self, model: str, settings: dict[str, Any]) -> dict[str, float]:
        self._exchange(model)
        return {f"{name}:mean": value for name, value in self._policy.optim_step(**settings).items()}

    def _drop_gradients(self, model: str) -> None:
        self._exchange(model)
        self._policy.role.optimizer.has_gradients = False

    def _save(self, model: str, directory: str) -> int:
        self._exchange(model)
        self._policy.save(directory, steps := self._policy.role.policy_version)
        return steps

    def _snapshot(self, model: str, version: str | None) -> None:
        self._exchange(model)
        if version is not None:
            self._versions[version] = copy_weights(self._policy.model)

    def _drop(self, names: Sequence[str]) -> None:
        self._sleep()
        for name in names:
            self._versions.pop(name, None)
            self._parked.pop(name, None)
            if name == self.model:
                self.model = None
                put_state(self._policy, self._initial)

    def _sample(self, version: str, directory: str | None, jobs: Sequence[SampleJob]) -> list[bytes]:
        """Sample from a version of the weights, which stays in the engines until the next command of another kind."""
        scored = iter(self._score_targets(version, directory, jobs))
        if self._in_engine != version:
            self._wake(version, directory)
        requests = [
            replace(job.request, seed=derive_seed(job.request.seed, 0, 0, index))
            for job in jobs
            for index in range(job.num_samples)
        ]
        found = iter(self._policy.sample_requests(requests))
        return [
            write_samples(job, [next(found) for _ in range(job.num_samples)], next(scored) if job.targets else None)
            for job in jobs
        ]

    def _score_targets(self, version: str, directory: str | None, jobs: Sequence[SampleJob]) -> list[np.ndarray]:
        """Compute the log-probs of given tokens along prompts with the model, as engines have those of sampled ones."""
        datums = []
        for job in jobs:
            if job.targets:
                _, targets = job.read_targets()
                datums.append(Datum(job.request.tokens[:-1], np.maximum(targets, 0)))
        if not datums:
            return []
        self._sleep()
        self._hold(version, directory)
        return self._policy.forward_backward_datums(datums, "cross_entropy", backward=False)[0]

    def _wake(self, version: str, directory: str | None) -> None:
        """Transfer a version of the weights to the engines."""
        if self._held != version:
            self._sleep()
            self._hold(version, directory)
        self._awake.enter_context(self._policy.rollout_mode())
        self._in_engine = version

    def _hold(self, version: str, directory: str | None) -> None:
        """Put a version of the weights into the model until `_sleep`.

        It stays there while the engines are awake, as their parameters may be the model's own.
        """
        if version in self._parked:
            self._exchange(version)
        if version != self.model:
            if version not in self._versions:
                self._versions[version] = self._read_version(directory)
            mine, model = copy_weights(self._policy.model), self._policy.model
            self._awake.callback(put_weights, model, mine)
            put_weights(model, self._versions[version])
        self._held = version

    def _read_version(self, directory: str | None) -> Any:
        """Return the weights of a checkpoint, with the policy's state as before."""
        state = copy_state(self._policy)
        try:
            self._policy.load(str(directory))
            return copy_weights(self._policy.model)
        finally:
            put_state(self._policy, state)
