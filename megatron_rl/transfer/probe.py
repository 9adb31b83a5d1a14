# SPDX-License-Identifier: Apache-2.0
"""Check that a rollout server uses the weights it received: the trainer scores its continuation of a fixed prompt.

The certificate only covers the files that a server loads. After every update the server's log-probs must equal the
trainer's up to arithmetic (`_BOUNDS`), and must have moved like the trainer's: with a small learning rate, log-probs of
stale weights stay within any such bound, but do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from megatron_rl.engines.protocol import EngineWeights, Probed, Sampled
from megatron_rl.parallel.collectives import failing_together, gather_objects
from megatron_rl.types import UserError

# (sequences, unscored leading tokens of each, temperature) -> log-probs of the scored tokens, on every rank; collective
Score = Callable[[Sequence[np.ndarray], Sequence[int], float], list[np.ndarray]]
# Largest mean log-prob distance of equal weights, and least movement of the trainer's log-probs to compare movements.
_BOUNDS = {"float32": (1e-3, 2e-5), "bfloat16": (0.3, 0.05)}
_HINT = (
    "a server that keeps its prefix cache, loads from another directory or leaves its packed weights as they are looks "
    "like this: see docs/servers.md"
)


class ProbedWeights:
    """Engine weights that are verified by probing the server; every rank of the job makes the same calls."""

    def __init__(
        self,
        engine: EngineWeights,
        probe: Callable[[], Probed | None],
        score: Score,
        dtype: str,
        group: dist.ProcessGroup,
    ) -> None:
        self._engine, self._probe, self._score, self._group = engine, probe, score, group
        self._bound, self._least = _BOUNDS[dtype]
        self._last: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # rank -> tokens, the server's, ours

    def end_weight_update(self) -> None:
        """Let the servers load the weights, and compare their log-probs with the trainer's; collective over the job.

        Raises:
            UserError: on every rank; a server failed too often, or has other weights.
        """
        with failing_together(self._group):
            self._engine.end_weight_update()
            probed = self._probe()
        found = {rank: one for rank, one in enumerate(gather_objects(probed, self._group)) if one is not None}
        sampled = {rank: self._score_all(one) for rank, one in found.items()}
        for rank, scores in sampled.items():
            self._compare(rank, [one for _, one in found[rank]], scores)

    def _score_all(self, probed: Probed) -> list[np.ndarray]:
        scores = []
        for request, one in probed:
            sequence = np.concatenate([request.tokens, one.tokens])
            scores += self._score([sequence], [len(request.tokens)], request.sampling.temperature or 1.0)
        return scores

    def _compare(self, rank: int, sampled: Sequence[Sampled], scores: Sequence[np.ndarray]) -> None:
        for one, score in zip(sampled, scores, strict=True):
            gap = float(np.abs(one.logprobs - score).mean())
            if not gap <= self._bound:
                raise UserError(
                    f"the server of rank {rank} has other weights than training: log-probs of {len(score)} tokens "
                    f"differ by {gap:.2g}",
                    source="rollout.engine, after an update of the weights",
                    expected=f"at most {self._bound} (mean)",
                    hint=_HINT,
                )
        greedy, score = sampled[0], scores[0]
        tokens, theirs, ours = self._last.get(rank, (greedy.tokens[:0], greedy.logprobs[:0], score[:0]))
        self._last[rank] = greedy.tokens, greedy.logprobs, score
        size = min(len(tokens), len(greedy.tokens))
        if not size or not np.array_equal(tokens[:size], greedy.tokens[:size]):
            return  # log-probs of other tokens: nothing to compare
        moved = score[:size].astype(np.float64) - ours[:size]
        follows = float(((greedy.logprobs[:size].astype(np.float64) - theirs[:size]) * moved).sum())
        if np.abs(moved).mean() > self._least and follows < 0.5 * float((moved**2).sum()):
            raise UserError(
                f"the server of rank {rank} has kept older weights: training's log-probs of {size} tokens have moved "
                f"by {np.abs(moved).mean():.2g} since the last update, the server's have not followed",
                source="rollout.engine, after an update of the weights",
                expected="log-probs that move as training's do",
                hint=_HINT,
            )
