# SPDX-License-Identifier: Apache-2.0
"""ParallelLayout: rank <-> (pp, dp, cp, tp) coordinates, pure arithmetic.

Rank order is Megatron's ("tp-cp-ep-dp-pp"): tp runs fastest, pp slowest. Ranks are ranks of the job; a role's
coordinates count from its first rank. EP divides cp x dp, or tp x cp x dp if expert tensor parallel size is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_rl.types import UserError


@dataclass(frozen=True)
class Coordinates:
    """A rank's position in a layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ExpertCoordinates:
    """A rank's position in the layout of expert layers; `dp` counts replicas of an expert."""

    tp: int
    ep: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions of one role (actor, critic, ...)."""

    world_size: int  # ranks of the role, not of the job
    tp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1  # model chunks per pipeline stage; 1 means no interleaving
    cp_size: int = 1
    ep_size: int = 1
    first_rank: int = 0  # first of the role's consecutive ranks
    etp_size: int | None = None  # tensor parallel size of experts, 1 or `tp_size` (also if `None`)
    chunk_layers: tuple[int | None, ...] = ()  # of the model's chunks in order; `None`: an equal share of the rest
    shard_size: int | None = None  # CP and DP ranks that hold the parameters together under ZeRO-3; all if `None`

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk_layers", tuple(self.chunk_layers))  # a list in the manifest of a checkpoint
        model = self.tp_size * self.pp_size * self.cp_size
        sizes = (self.world_size, self.tp_size, self.pp_size, self.cp_size, self.vpp_size, self.ep_size)
        if min(sizes) < 1 or self.world_size % model:
            raise UserError(
                f"world_size {self.world_size} is not a multiple of tp * pp * cp = "
                f"{self.tp_size} * {self.pp_size} * {self.cp_size} = {model}",
                source="actor.*_model_parallel_size and the number of ranks that torchrun started",
                expected="world_size = tp * pp * cp * dp with a whole dp >= 1",
                hint=f"start {max(1, self.world_size // max(model, 1)) * model} ranks or change the sizes",
            )
        if self.expert_tp_size not in (1, self.tp_size):
            raise UserError(
                f"expert_tensor_parallel_size {self.expert_tp_size} with tensor_model_parallel_size {self.tp_size}",
                source="actor.expert_tensor_parallel_size",
                expected=f"1 or {self.tp_size}",
                hint="leave actor.expert_tensor_parallel_size out: it is the tensor parallel size then",
            )
        ranks, dims = self.stage_size // self.expert_tp_size, "cp * dp" if self._splits_experts else "tp * cp * dp"
        if ranks % self.ep_size:
            raise UserError(
                f"expert_model_parallel_size {self.ep_size} does not divide {dims} = {ranks}",
                source="actor.expert_model_parallel_size",
                expected=f"a divisor of {dims}",
                hint="expert parallelism takes its ranks from the context and data parallel ranks, and from the tensor "
                "parallel ranks with actor.expert_tensor_parallel_size = 1",
            )

    @cached_property
    def ranks(self) -> range:
        """The ranks of the role."""
        return range(self.first_rank, self.first_rank + self.world_size)

    @cached_property
    def dp_size(self) -> int:
        """Data parallel size, derived from the other sizes."""
        return self.world_size // (self.tp_size * self.pp_size * self.cp_size)

    @property
    def last_stage(self) -> ParallelLayout:
        """The last pipeline stage as a layout without pipeline parallelism."""
        first = self.first_rank + self.world_size - self.stage_size
        return replace(self, world_size=self.stage_size, pp_size=1, vpp_size=1, first_rank=first, chunk_layers=())

    @property
    def is_split(self) -> bool:
        """True if ranks hold parts of the model or of sequences."""
        return self.tp_size * self.pp_size * self.vpp_size * self.cp_size * self.ep_size > 1

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tp_size * self.cp_size * self.dp_size

    @property
    def expert_tp_size(self) -> int:
        """Tensor parallel size of experts."""
        return self.etp_size or self.tp_size

    @property
    def _splits_experts(self) -> bool:
        return self.expert_tp_size == self.tp_size

    @property
    def expert_replicas(self) -> int:
        """Number of ranks of a stage with the same shard of the same experts."""
        return self.stage_size // (self.expert_tp_size * self.ep_size)

    @property
    def shard_sizes(self) -> tuple[int, int]:
        """Numbers of ranks that together hold dense parameters, and an expert, under ZeRO-3."""
        replicas = self.cp_size * self.dp_size
        size = self.shard_size or replicas
        return size, max(1, self.expert_replicas * size // replicas)

    @property
    def has_expert_replicas(self) -> bool:
        """Whether replicas of experts and of dense layers are on different ranks."""
        return self.ep_size > 1 or not self._splits_experts

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank` (ValueError if it is not one of `ranks`)."""
        rest, tp = divmod(self.ranks.index(rank), self.tp_size)
        rest, cp = divmod(rest, self.cp_size)
        pp, dp = divmod(rest, self.dp_size)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the job's rank at these coordinates."""
        return self.first_rank + tp + self.tp_size * (cp + self.cp_size * (dp + self.dp_size * pp))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Return the coordinates of `rank` in expert layers (ValueError if it is not one of `ranks`)."""
        pp, place = divmod(self.ranks.index(rank), self.stage_size)
        rest, tp = divmod(place, self.expert_tp_size)
        dp, ep = divmod(rest, self.ep_size)
        return ExpertCoordinates(tp=tp, ep=ep, dp=dp, pp=pp)

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks of the group of `rank` along `axes` (of "tp", "cp", "dp", "pp"), ascending."""
        return self._spread(rank, axes, dict(tp=self.tp_size, cp=self.cp_size, dp=self.dp_size, pp=self.pp_size))

    def expert_group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks of an expert group along `axes` (of "tp", "ep", "dp", "pp"), ascending."""
        sizes = dict(tp=self.expert_tp_size, ep=self.ep_size, dp=self.expert_replicas, pp=self.pp_size)
        return self._spread(rank, axes, sizes)

    def _spread(self, rank: int, axes: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
        """Return all ranks that differ from `rank` only in `axes`; `sizes` starts with the fastest axis."""
        ranks, stride = [rank], 1
        for axis, size in sizes.items():
            if axis in axes:
                at = (rank - self.first_rank) // stride % size
                ranks = [other + (step - at) * stride for step in range(size) for other in ranks]
            stride *= size
        return ranks

    def model_copies(self) -> EngineRanks:
        """Return one rollout engine per copy of the model: the TP x EP x PP ranks that together hold it."""
        found: dict[int, tuple[int, ...]] = {}
        for rank in self.ranks:
            if rank not in found:
                ranks = tuple(self.expert_group_of(rank, "tp", "ep", "pp"))
                found |= dict.fromkeys(ranks, ranks)
        return EngineRanks(tuple(dict.fromkeys(found.values())))

    def describe(self) -> str:
        """Return e.g. `tp=2 pp=2 dp=1`, with all other sizes that are not the default."""
        parts = [f"tp={self.tp_size}", f"pp={self.pp_size}", f"dp={self.dp_size}"]
        extra = {"vpp": self.vpp_size, "cp": self.cp_size, "ep": self.ep_size}
        parts += [f"{name}={size}" for name, size in extra.items() if size > 1]
        return " ".join(parts if self._splits_experts else [*parts, f"etp={self.expert_tp_size}"])


@dataclass(frozen=True)
class EngineRanks:
    """Ranks of each rollout engine: ascending, disjoint, equal in number; a rank may belong to none."""

    of: tuple[tuple[int, ...], ...]

    @classmethod
    def consecutive(cls, ranks: range, width: int) -> EngineRanks:
        """Form engines of `width` consecutive ranks; `width` divides the number of `ranks`."""
        return cls(tuple(tuple(ranks[first : first + width]) for first in range(0, len(ranks), width)))

    @cached_property
    def width(self) -> int:
        """Number of ranks per engine."""
        return len(self.of[0])

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Index of each rank's engine, and the rank's index in that, by rank."""
        return {rank: (engine, place) for engine, ranks in enumerate(self.of) for place, rank in enumerate(ranks)}

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all engines."""
        return self.width * len(self.of)

    def describe(self, engine: int) -> str:
        """Return `rank 3`, `ranks 2-3`, or `ranks 0, 2` if they are not consecutive."""
        first, *others = ranks = self.of[engine]
        if not others:
            return f"rank {first}"
        if others[-1] - first == len(others):
            return f"ranks {first}-{others[-1]}"
        return f"ranks {', '.join(map(str, ranks))}"
