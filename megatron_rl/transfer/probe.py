# SPDX-License-Identifier: Apache-2.0
"""Does a server have the weights that it was given? After every update it continues a fixed prompt, and training scores
what it says.

The certificate ends at the files that a server reads: what it does with them shows in its log-probs only. Two things
must hold. They equal the trainer's, up to the arithmetic (`_BOUNDS`). And they have moved since the last update as
the trainer's have: with a small learning rate the log-probs of older weights are within any such bound, but they stay
where they were, to the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch.distributed as dist

from megatron_rl.engines.protocol import EngineWeights, Probed, Sampled
from megatron_rl.parallel.collectives import gather_objects, raise_together
from megatron_rl.types import UserError
from megatron_rl.weights.shard_box import ShardBox

# (sequences, tokens of each that are not scored, temperature) -> log-probs of the others, on every rank; collective
Score = Callable[[Sequence[np.ndarray], Sequence[int], float], list[np.ndarray]]
# Mean distance of the log-probs of equal weights; and how far the trainer's must move for a comparison of movements.
_BOUNDS = {"float32": (1e-3, 2e-5), "bfloat16": (0.3, 0.05)}
_HINT = (
    "a server that keeps its prefix cache, loads from another directory or leaves its packed weights as they are looks "
    "like this: see docs/servers.md"
)


class ProbedWeights:
    """The weights of a server, which are not believed in; the same calls on every rank of the job.

    Args:
        engine: of this rank, or what stands for it.
        probe: asks it; None on ranks that do not speak with a server.
        score: the trainer's log-probs.
        dtype: of the weights.
        group: all ranks.
    """

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
        self.params, self.shared_params = engine.params, engine.shared_params
        self.padded_params = engine.padded_params

    def shard_key(self, rank: int) -> Hashable:
        """The engine's."""
        return self._engine.shard_key(rank)

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """The engine's."""
        return self._engine.placements(rank)

    def begin_weight_update(self) -> None:
        """The engine's."""
        self._engine.begin_weight_update()

    def sleep(self) -> None:
        """The engine's."""
        self._engine.sleep()

    def end_weight_update(self) -> None:
        """Let the servers load the weights, and compare what they say with the trainer; collective over the job.

        Raises:
            UserError: a server has failed too often, or has other weights; on every rank.
        """
        error, probed = None, None
        try:
            self._engine.end_weight_update()
            probed = self._probe()
        except UserError as caught:
            error = caught
        raise_together(error, self._group)
        found = {rank: one for rank, one in enumerate(gather_objects(probed, self._group)) if one is not None}
        sampled = {rank: self._score_all(one) for rank, one in found.items()}
        for rank, scores in sampled.items():
            self._compare(rank, found[rank].sampled, scores)

    def _score_all(self, probed: Probed) -> list[np.ndarray]:
        skip = [len(probed.prompt)]
        return [
            self._score([np.concatenate([probed.prompt, one.tokens])], skip, temperature or 1.0)[0]
            for one, temperature in zip(probed.sampled, probed.temperatures, strict=True)
        ]

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
        self._compare_movements(rank, sampled[0], scores[0])

    def _compare_movements(self, rank: int, greedy: Sampled, score: np.ndarray) -> None:
        """The most likely tokens stay the same where weights change little; where they do not, the server has moved."""
        tokens, theirs, ours = self._last.get(rank, (greedy.tokens[:0], greedy.logprobs[:0], score[:0]))
        self._last[rank] = greedy.tokens, greedy.logprobs, score
        size = min(len(tokens), len(greedy.tokens))
        if not size or not np.array_equal(tokens[:size], greedy.tokens[:size]):
            return
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
