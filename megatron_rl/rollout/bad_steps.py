# SPDX-License-Identifier: Apache-2.0
"""Steps with nothing to learn from, which end the run: failed episodes or rewards, and groups of equal rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.samples.experience import Experience, describe_rollouts
from megatron_rl.samples.table import join_headers
from megatron_rl.types import BadStep

_RESUME = "start the same command again to resume from the newest checkpoint"


def explain_failures(
    counts: tuple[int, int, int],
    what: str,
    most: float,
    said: Sequence[str],
    parts: Sequence[Experience],
    others: Mapping[str, float],
) -> BadStep:
    """Build the error about samples of which too many have failed.

    Args:
        counts: failed episodes, responses whose reward service failed, and all.
        what: names the samples.
        most: `trainer.max_failed_share`.
        said: the last failure on each rank, "" on a rank without one.
        parts: samples of a training step, described in the error's metrics beside `others`.
    """
    episodes, services, total = counts
    if episodes > most * total:
        found = f"{episodes} of {total} episodes of {what} failed; the last one"
    elif services > most * total:
        found = f"the reward service failed on {services} of {total} responses of {what}; the last time"
    else:
        found = f"{episodes} of {total} episodes of {what} failed, and the reward service on all others; the last time"
    metrics = dict(others)
    if parts:
        metrics |= describe_rollouts(join_headers([part.headers for part in parts]))
        metrics |= {name: value for part in parts for name, value in part.metrics.items()}
        metrics |= {"agents/failed": episodes / total} if episodes else {}
    last = next((text.rstrip() for text in said if text), "before the run was resumed")
    return BadStep(
        f"{found}:\n{last}",
        source=f"trainer.max_failed_share = {most:g}",
        expected="a smaller share, as nothing is learned from what failed",
        hint=f"correct the cause and {_RESUME}; trainer.max_failed_share=1 continues without it",
        metrics=metrics,
    )


class SilentSteps:
    """Number of the last steps in a row whose groups all have equal rewards; part of a checkpoint."""

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0

    def add(self, is_silent: bool) -> None:
        """Count a step."""
        self._count = self._count + 1 if is_silent else 0

    def check(self, step: int) -> None:
        """Raise BadStep, on every rank alike, if the last steps were silent; `step` is the last of them."""
        if self._count >= self._most:
            raise BadStep(
                f"in {self._count} step(s) up to step {step} the responses to each prompt had equal rewards, which "
                "teach nothing",
                source=f"trainer.max_silent_steps = {self._most}",
                expected="a prompt whose responses have different rewards",
                hint="look at rollouts/ and docs/health.md#no-signal: the task is solved or too hard, or the reward "
                f"reads nothing; then {_RESUME}, with trainer.max_silent_steps=null to continue",
            )

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the number of steps."""
        self._count = state["count"]
