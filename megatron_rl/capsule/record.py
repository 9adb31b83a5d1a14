# SPDX-License-Identifier: Apache-2.0
"""The numbers of one step that a capsule stores, in order of computation and independent of layout.

A section is a table of parameters or a list of quantities. Token values are indexed by rollout and position in the
response, never by position in a packed batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from safetensors.numpy import save as to_safetensors

from megatron_rl.capsule.fingerprints import Fingerprints, fingerprint_optimizer, fingerprint_weights
from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.samples.experience import Experience
from megatron_rl.types import Rollout

# Sample columns, by the section that computes them.
_FORWARD = ("old_logprobs", "ref_logprobs", "values")
_ESTIMATE = ("importance_weights", "advantages", "returns")
_UPDATE = ("update_logprobs", "update_entropy")
_ESTIMATE_METRICS = ("kl/per_response", "kl/coef", "mismatch/", "estimator/")
_CRITIC_METRICS, _ACTOR_METRICS = ("value/",), ("policy/", "kl/mean", "loss/")

Index = Literal["token", "rollout", "group", "update", "step"]


@dataclass(frozen=True)
class Values:
    """One quantity.

    Attributes:
        index: owner of each element: a response token, rollout, group, optimizer step of a role, or the step.
        array: [k].
        lengths: tokens per rollout.
    """

    name: str
    index: Index
    array: np.ndarray
    lengths: np.ndarray | None = None

    def describe_place(self, position: int) -> str:
        """Describe an element's owner for a message."""
        if self.index == "token":
            assert self.lengths is not None, "tokens have them"
            ends = np.cumsum(self.lengths)
            rollout = int(np.searchsorted(ends, position, side="right"))
            return f"rollout {rollout}, token {position - int(ends[rollout] - self.lengths[rollout])}"
        return "" if self.index == "step" else f"{self.index} {position + (self.index == 'update')}"


@dataclass(frozen=True)
class Section:
    """Inputs or results of one part of the step.

    Attributes:
        is_input: must be bitwise equal in any layout.
        content: parameters, or quantities in order.
    """

    name: str
    is_input: bool
    content: Fingerprints | list[Values]


class StepObserver:
    """A collector of a step's sections; methods are collective.

    Args:
        roles: trained roles by name, with equal keys on every rank.
        group: all ranks.
    """

    def __init__(self, roles: Mapping[str, SavedRole], group: dist.ProcessGroup) -> None:
        self._roles, self._group = roles, group
        self._before: list[Section] = []

    def begin(self) -> None:
        """Record the parameters before the step."""
        self._before = self._take_parameters("before", True)

    def end(
        self, samples: Experience, decode: Callable[[list[int]], str], counted: Mapping[str, Sequence[float]]
    ) -> tuple[list[Rollout], list[Section]]:
        """Record the results after the step's last optimizer step.

        Args:
            decode: response tokens -> text.
            counted: metric -> its values in this step.

        Returns:
            On rank 0 the rollouts and all sections; on other ranks no rollouts and the parameter sections.
        """
        after = self._take_parameters("after", False)
        columns = {name: samples.columns[name] for name in (*_FORWARD, *_ESTIMATE, *_UPDATE) if name in samples.columns}
        found = samples.fetch_rollouts(range(len(samples.rewards)), decode, columns)
        if not found:
            return [], [*self._before, *after]
        lengths = np.array([len(next(iter(values.values()))) for _, values in found], np.int64)
        tokens = {name: Values(name, "token", np.concatenate([v[name] for _, v in found]), lengths) for name in columns}
        rollouts = [rollout for rollout, _ in found]

        def columns_of(names: Sequence[str]) -> list[Values]:
            return [tokens[name] for name in names if name in tokens]

        def metrics_of(prefixes: tuple[str, ...], index: Index) -> list[Values]:
            return [
                Values(name, index, np.array(values, np.float64))
                for name, values in counted.items()
                if name.startswith(prefixes)
            ]

        sections = [
            Section("rollouts", True, _describe_rollouts(samples, rollouts)),
            Section("forward", False, columns_of(_FORWARD)),
            Section("estimate", False, metrics_of(_ESTIMATE_METRICS, "step") + columns_of(_ESTIMATE)),
            Section("critic updates", False, metrics_of(_CRITIC_METRICS, "update")),
            Section("actor updates", False, metrics_of(_ACTOR_METRICS, "update") + columns_of(_UPDATE)),
        ]
        return rollouts, [*self._before, *(s for s in sections if s.content), *after]

    def _take_parameters(self, when: str, is_input: bool) -> list[Section]:
        found = []
        for name, role in self._roles.items():
            found.append(Section(f"{name} weights {when}", is_input, fingerprint_weights(role, self._group)))
            if is_input:
                found.append(Section(f"{name} optimizer {when}", is_input, fingerprint_optimizer(role, self._group)))
        return found


def _describe_rollouts(samples: Experience, rollouts: Sequence[Rollout]) -> list[Values]:
    headers = samples.headers.rollouts
    lengths = np.array([len(rollout.response_tokens) for rollout in rollouts], np.int64)
    found = [
        Values("group size", "group", headers.group_sizes.astype(np.int64)),
        Values(
            "prompt tokens",
            "token",
            np.concatenate([r.prompt.tokens for r in rollouts]),
            headers["num_prompt_tokens"].astype(np.int64),
        ),
        Values("response tokens", "token", np.concatenate([r.response_tokens for r in rollouts]), lengths),
        Values("rollout_logprobs", "token", np.concatenate([r.rollout_logprobs for r in rollouts]), lengths),
        Values("finish reason", "rollout", headers["finish_reason"].astype(np.int64)),
        *(
            Values(f"reward component {name}", "rollout", np.nan_to_num(headers.component(name)))
            for name in sorted(headers.names)
        ),
        Values("reward", "rollout", headers["reward"]),
    ]
    if samples.baselines is not None:
        found.append(Values("greedy baseline", "group", np.asarray(samples.baselines, np.float64)))
    return found


def encode_sections(sections: Sequence[Section]) -> tuple[list[dict[str, Any]], bytes]:
    """Return the sections' JSON part, and their arrays as safetensors bytes."""
    entries: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for number, section in enumerate(sections):
        entry: dict[str, Any] = {"name": section.name, "is_input": section.is_input}
        if isinstance(section.content, Fingerprints):
            entry["shapes"] = {name: list(shape) for name, shape in section.content.shapes.items()}
            for kind in ("bits", "sizes", "samples"):
                arrays[f"{number}.{kind}"] = getattr(section.content, kind)
        else:
            entry["values"] = [{"name": values.name, "index": values.index} for values in section.content]
            for place, values in enumerate(section.content):
                arrays[f"{number}.{place}"] = values.array
                if values.lengths is not None:
                    arrays[f"{number}.{place}.lengths"] = values.lengths
        entries.append(entry)
    return entries, to_safetensors({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def decode_sections(entries: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[Section]:
    """Invert `encode_sections`."""
    sections = []
    for number, entry in enumerate(entries):
        if "shapes" in entry:
            content: Fingerprints | list[Values] = Fingerprints(
                {name: tuple(shape) for name, shape in entry["shapes"].items()},
                *(arrays[f"{number}.{kind}"] for kind in ("bits", "sizes", "samples")),
            )
        else:
            content = [
                Values(item["name"], item["index"], arrays[key], arrays.get(f"{key}.lengths"))
                for item, key in ((item, f"{number}.{place}") for place, item in enumerate(entry["values"]))
            ]
        sections.append(Section(entry["name"], entry["is_input"], content))
    return sections
