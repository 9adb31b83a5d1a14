# SPDX-License-Identifier: Apache-2.0
"""Commands of a server on every rank: rank 0 broadcasts each one, and all ranks call the same primitives.

Several models share one policy: each has its trained weights, optimizer states and unfinished gradients, which are
exchanged in place when a command is for another model than the last one. Weights of samplers are kept on the host;
adapters (`hybrid.lora: adapter`), by the engines, which have several versions in slots and sample from them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.protocol import derive_seed
from megatron_rl.parallel.collectives import raise_together, world
from megatron_rl.run.checkpoints import actor_export
from megatron_rl.run.primitives import Primitives
from megatron_rl.training.datums import Datum
from tools.serving.parking import (
    copy_state,
    copy_weights,
    put_state,
    put_weights,
    read_export,
    reset_optimizer,
    start_adapters,
)
from tools.serving.request_checks import Lora, SampleJob, Saved, write_samples
from tools.serving.server_state import BASE
from tools.serving.wire import write_outputs


def count_versions(config: RunConfig) -> int:
    """Return how many versions of the weights the engines sample from together; 0 if they have one at a time."""
    has_slots = config.hybrid.lora == "adapter" and config.rollout.supports("vllm_modes")
    return config.rollout.engine_options.get("max_loras", 1) - 1 if has_slots else 0


class ServedPolicy:
    """The policy of a server, in which models and samplers alternate; construction and `run` are collective.

    Attributes:
        model: the model whose state the policy has; `None` for the base model's.
    """

    def __init__(self, run: Primitives) -> None:
        self._policy, self._config = run.policy, run.config
        self.model: str | None = None
        self._parked: dict[str, Any] = {}  # models whose state is not in the policy
        self._initial = copy_state(run.policy)
        self._versions: dict[str, Any] = {BASE: copy_weights(run.policy.model)}
        self._present: set[str] = set()  # snapshots that equal the present weights of `model`
        self._held: str | None = None  # the version that the model has until `_sleep`
        self._in_engine: str | None = None  # the version that the engines have, while they are awake
        self._awake = ExitStack()
        self._num_slots = count_versions(run.config)
        self._kept: dict[str, str] = {}  # version -> the engines' name of it, if they keep it
        self._updates = Counter[str]()  # of each model's weights

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
        self._present.clear()
        put_state(self._policy, self._parked.get(model or "", self._initial))
        self._parked.pop(model or "", None)
        self.model = model

    def _sleep(self) -> None:
        self._awake.close()
        self._in_engine = self._held = None

    def _create(self, model: str, saved: Saved | None, lora: Lora | None = None, with_optimizer: bool = False) -> int:
        self._exchange(model)
        self._present.clear()
        if saved is not None:
            return self._load(model, saved, with_optimizer)
        if lora is not None and self._config.actor.lora.path is None:
            start_adapters(self._policy, lora)
            self._scale(lora.rank)
        return 0

    def _load(self, model: str, saved: Saved, with_optimizer: bool) -> int:
        self._exchange(model)
        self._read(saved)
        if not with_optimizer:
            reset_optimizer(self._policy)
        self._change(model)
        return self._policy.role.policy_version

    def _read(self, saved: Saved) -> None:
        self._present.clear()
        if saved.is_export:
            read_export(self._policy, saved.directory)
        else:
            self._policy.load(saved.directory)
        self._scale(saved.rank)

    def _scale(self, rank: int | None) -> None:
        """Set the factor of the adapters' product to that of a rank."""
        if rank is not None and self._policy.model.adapters is not None:
            scale = replace(self._config.actor.lora, rank=rank).scale
            self._policy.model.adapters.live_scale.fill_(scale)

    def _change(self, model: str) -> None:
        self._present.clear()
        self._updates[model] += 1
        self._forget(model)

    def _forget(self, version: str) -> None:
        self._versions.pop(version, None)
        self._present.discard(version)
        if (name := self._kept.pop(version, None)) and (slots := getattr(self._policy.hybrid.engine, "slots", None)):
            slots.drop(name)

    def _forward_backward(self, model: str, backward: bool = True, **given: Any) -> bytes:
        self._exchange(model)
        if backward:
            self._present.clear()  # counts of experts' tokens, for one
        return write_outputs(*self._policy.forward_backward_datums(**given, backward=backward))

    def _forward(self, **given: Any) -> bytes:
        return self._forward_backward(**given, backward=False)

    def _optim_step(self, model: str, settings: dict[str, Any]) -> dict[str, float]:
        self._exchange(model)
        self._change(model)
        return {f"{name}:mean": value for name, value in self._policy.optim_step(**settings).items()}

    def _drop_gradients(self, model: str) -> None:
        self._exchange(model)
        self._policy.role.optimizer.has_gradients = False

    def _save(self, model: str, directory: str) -> int:
        self._exchange(model)
        self._policy.save(directory, steps := self._policy.role.policy_version)
        return steps

    def _export(self, model: str, directory: str, rank: int | None) -> None:
        """Write weights in Hugging Face's format, or adapters of a rank in PEFT's."""
        self._exchange(model)
        config, actor = self._config, self._config.actor
        if rank is not None:
            config = replace(config, actor=replace(actor, lora=replace(actor.lora, rank=rank)))
        Path(directory).parent.mkdir(parents=True, exist_ok=True)
        actor_export(config, self._policy.model)(Path(directory))

    def _snapshot(self, model: str, version: str | None) -> None:
        self._exchange(model)
        if version is not None:
            same = next(iter(self._present), None)
            self._versions[version] = copy_weights(self._policy.model) if same is None else self._versions[same]
            self._present.add(version)

    def _drop(self, names: Sequence[str]) -> None:
        self._sleep()
        for name in names:
            self._forget(name)
            self._parked.pop(name, None)
            if name == self.model:
                self.model = None
                self._present.clear()
                put_state(self._policy, self._initial)

    def _sample(self, jobs: Sequence[SampleJob]) -> list[bytes]:
        """Sample; the versions of the weights stay in the engines until the next command of another kind."""
        found: dict[int, bytes] = {}
        scored = self._score_targets(jobs)
        saved = {job.version: job.saved for job in jobs}
        versions, at_once = [*saved], max(self._num_slots, 1)
        for start in range(0, len(versions), at_once):
            some = versions[start : start + at_once]
            for version in some:
                self._offer(version, saved[version])
            turn = [(index, job) for index, job in enumerate(jobs) if job.version in some]
            requests = [
                replace(
                    job.request, seed=derive_seed(job.request.seed, 0, 0, index), version=self._kept.get(job.version)
                )
                for _, job in turn
                for index in range(job.num_samples)
            ]
            results = iter(self._policy.sample_requests(requests))
            for at, job in turn:
                found[at] = write_samples(job, [next(results) for _ in range(job.num_samples)], scored.get(at))
        return [found[index] for index in range(len(jobs))]

    def _offer(self, version: str, saved: Saved | None) -> None:
        """Make a version of the weights the one that the engines have, or one of those that they keep."""
        if version in self._kept:
            if self._in_engine is None:
                self._wake(None)
            return
        if self._in_engine != version:
            self._wake(version, saved)
        if self._num_slots:
            self._kept[version] = name = f"{version}@{self._updates[version]}"
            if slots := getattr(self._policy.hybrid.engine, "slots", None):  # not on ranks without an engine
                slots.keep(name)

    def _score_targets(self, jobs: Sequence[SampleJob]) -> dict[int, np.ndarray]:
        """Compute the log-probs of given tokens along prompts in a forward pass of the model."""
        by_version: dict[str, list[int]] = {}
        for index, job in enumerate(jobs):
            if job.targets:
                by_version.setdefault(job.version, []).append(index)
        scored: dict[int, np.ndarray] = {}
        for version, indices in by_version.items():
            asked = [jobs[index] for index in indices]
            datums = [Datum(job.request.tokens[:-1], np.maximum(job.read_targets()[1], 0)) for job in asked]
            self._sleep()
            self._hold(version, asked[0].saved)
            found = self._policy.forward_backward_datums(datums, "cross_entropy", backward=False)[0]
            scored |= zip(indices, found, strict=True)
        return scored

    def _wake(self, version: str | None, saved: Saved | None = None) -> None:
        """Transfer a version of the weights to the engines; `None`: those that the model has."""
        is_other = version is not None and self._held != version
        if is_other or self._in_engine is not None:
            self._sleep()
        if version is not None and is_other:
            self._hold(version, saved)
        self._awake.enter_context(self._policy.rollout_mode())
        self._in_engine = version or ""

    def _hold(self, version: str, saved: Saved | None) -> None:
        """Put a version of the weights into the model until `_sleep`.

        It stays there while the engines are awake, as their parameters may be the model's own.
        """
        if version in self._parked:
            self._exchange(version)
        if version != self.model and version not in self._present:
            if version not in self._versions:
                assert saved is not None, "a snapshot is kept until it is dropped"
                self._versions[version] = self._read_version(saved)
            mine, model = copy_weights(self._policy.model), self._policy.model
            self._awake.callback(put_weights, model, mine)
            put_weights(model, self._versions[version])
        self._held = version

    def _read_version(self, saved: Saved) -> Any:
        """Return the weights of a checkpoint, with the policy's state as before."""
        state = copy_state(self._policy)
        try:
            self._read(saved)
            return copy_weights(self._policy.model)
        finally:
            put_state(self._policy, state)
