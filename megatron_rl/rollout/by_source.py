# SPDX-License-Identifier: Apache-2.0
"""Rollouts of several sources of prompts (`data.sources`) in one step: sampling, scoring and metrics by source.

A prompt has the name of its source. Everything that depends on it is looked up by this name, so that a source in a
mixture is treated as in a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.protocol import SamplingConfig
from megatron_rl.rewards.plan import open_scorer
from megatron_rl.rewards.scoring import RESERVED, RewardPlan
from megatron_rl.samples.experience import describe_rollouts
from megatron_rl.samples.table import Headers
from megatron_rl.types import Prompt, Rollout, UserError


@dataclass(frozen=True)
class MixedSampling(SamplingConfig):
    """Sampling parameters of the run, and of each of its sources."""

    by_source: Mapping[str, SamplingConfig] = field(default_factory=dict)

    def for_source(self, source: str) -> SamplingConfig:
        """Return the parameters for prompts of a source (UserError if the run has no such source)."""
        if source not in self.by_source:
            raise UserError(
                f"a prompt of the source {source!r}",
                source="policy.sample(prompts)",
                expected=f"prompts of {', '.join(self.by_source)}, the sources in data.sources",
                hint="take them from the run's inputs, or set Prompt.source",
            )
        return self.by_source[source]


def mix_sampling(config: RunConfig, find: Callable[[RunConfig], SamplingConfig]) -> MixedSampling:
    """Return the sampling parameters that `find` returns for the config of the run and of each of its sources."""
    by_source = {name: find(one) for name, one in config.by_source.items()}
    return MixedSampling(**vars(find(config)), by_source=by_source)


class MixedScorer:
    """The local reward sources of one rank for each source of prompts, as `rewards.scoring.Scorer`.

    Args:
        plans: by source of prompts; equal ones are one object, and share workers and clients.
        decode: response tokens -> text.
    """

    def __init__(self, plans: Mapping[str, RewardPlan], decode: Callable[[Sequence[int]], str]) -> None:
        opened = {id(plan): open_scorer(plan, decode) for plan in plans.values()}
        self._of = {name: opened[id(plan)] for name, plan in plans.items()}
        self._opened = [*opened.values()]
        self.is_concurrent = any(scorer.is_concurrent for scorer in self._opened)
        self.takes_groups = any(scorer.takes_groups for scorer in self._opened)

    def begin(self, rollout: Rollout, step: int = 0) -> None:
        """Begin to score a rollout by the reward of its source."""
        self._of[rollout.prompt.source].begin(rollout, step)

    def finish(
        self, rollouts: Sequence[Rollout], step: int | Sequence[int] = 0, count: Callable[[], None] = lambda: None
    ) -> list[Rollout]:
        """Return this rank's rollouts with response and reward; see `Scorer.finish`."""
        steps, found = np.broadcast_to(step, len(rollouts)).tolist(), dict[int, Rollout]()
        for scorer in self._opened:
            mine = [i for i, rollout in enumerate(rollouts) if self._of[rollout.prompt.source] is scorer]
            scored = scorer.finish([rollouts[i] for i in mine], [steps[i] for i in mine], count)
            found |= zip(mine, scored, strict=True)
        return [found[i] for i in range(len(rollouts))]

    def close(self) -> None:
        """End workers, requests, and processes left behind by reward functions."""
        for scorer in self._opened:
            scorer.close()


def describe_mixture(
    headers: Headers, prompts: Sequence[Prompt], plans: Mapping[str, RewardPlan], step: int
) -> dict[str, float]:
    """Compute the metrics of a step that depend on sources: `sources/<source>/...`, components and weights.

    A component is averaged over the rollouts of the sources that report it, and not over all as in `describe_rollouts`.
    Weights that follow schedules are named by source if sources have rewards of their own.

    Args:
        plans: by source.
    """
    sources = np.array([prompt.source for prompt in prompts])
    names, metrics = sorted({*sources.tolist()}), dict[str, float]()
    is_shared = len({*map(id, plans.values())}) == 1
    for name, plan in plans.items():
        weights = plan.describe_weights(step)
        metrics |= weights if is_shared else {f"sources/{name}/{key}": weight for key, weight in weights.items()}
    reported = dict[str, list[np.ndarray]]()  # values of each component, by source
    for name in names if len(names) > 1 else ():
        part, _ = headers.select_groups(np.flatnonzero(sources == name).tolist())
        known = [not np.isnan(column).all() for column in part.components.T]
        own = tuple(one for one, is_known in zip(part.names, known, strict=True) if is_known)
        found = describe_rollouts(Headers(part.rows, own, part.components[:, known]))
        metrics |= {
            f"sources/{name}/prompts": len(part.group_sizes),
            f"sources/{name}/reward": found.pop("reward/mean"),
            f"sources/{name}/truncated": found["response/truncated"],
            f"sources/{name}/response_tokens": found["tokens/response"] / len(part.rollouts),
            f"sources/{name}/failed": float(part.rollouts.has_failed.mean()),
        }
        metrics |= {f"sources/{name}/{key}": value for key, value in found.items() if key.startswith("reward/")}
        rollouts = part.rollouts
        for one in own:
            if one not in RESERVED:
                reported.setdefault(one, []).append(np.nan_to_num(rollouts.component(one))[rollouts.has_reward])
    whole = {name: np.concatenate(values) for name, values in reported.items()}
    return metrics | {f"reward/{name}": float(values.mean()) for name, values in whole.items() if len(values)}
