# SPDX-License-Identifier: Apache-2.0
"""ParallelLayout: rank <-> (pp, dp, cp, tp) coordinates, pure arithmetic.

Ranks are numbered as Megatron numbers them (order "tp-cp-ep-dp-pp"): tp runs fastest, pp slowest. They are ranks of the
job everywhere: a role that has its own ranks counts its coordinates from the first of them.
An expert is split over the same TP ranks as a dense layer, and expert parallelism takes its ranks out of cp x dp; or
it is whole on a rank (expert tensor parallel size 1), and expert parallelism takes them out of tp x cp x dp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_rl.types import UserError


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in a layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ExpertCoordinates:
    """Where one rank stands in the layout of the expert layers; `dp` counts replicas of an expert."""

    tp: int
    ep: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions of one role.

    Attributes:
        world_size: ranks of the role.
        tp_size: tensor parallel size; likewise pp, cp, ep.
        vpp_size: model chunks per pipeline stage (1: no interleaving).
        first_rank: the ranks of the role are those that follow from this one.
        etp_size: tensor parallel size of experts, 1 or `tp_size`; None: `tp_size`.
    """

    world_size: int
    tp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    first_rank: int = 0
    etp_size: int | None = None

    def __post_init__(self) -> None:
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

    @property
    def ranks(self) -> range:
        """The ranks of the role."""
        return range(self.first_rank, self.first_rank + self.world_size)

    @cached_property
    def dp_size(self) -> int:
        """Data parallel size: what the other dimensions leave."""
        return self.world_size // (self.tp_size * self.pp_size * self.cp_size)

    @property
    def last_stage(self) -> ParallelLayout:
        """The last pipeline stage as a layout without pipeline parallelism."""
        first = self.first_rank + self.world_size - self.stage_size
        return replace(self, world_size=self.stage_size, pp_size=1, vpp_size=1, first_rank=first)

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
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
        """Ranks of a stage that have the same of the same experts."""
        return self.stage_size // (self.expert_tp_size * self.ep_size)

    @property
    def has_expert_replicas(self) -> bool:
        """Whether these are others than the replicas of the rest of a layer."""
        return self.ep_size > 1 or not self._splits_experts

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank`, one of `ranks`."""
        rest, tp = divmod(rank - self.first_rank, self.tp_size)
        rest, cp = divmod(rest, self.cp_size)
        pp, dp = divmod(rest, self.dp_size)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Inverse of `coordinates`."""
        return self.first_rank + tp + self.tp_size * (cp + self.cp_size * (dp + self.dp_size * pp))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Coordinates of `rank` in the expert layers."""
        pp, place = divmod(rank - self.first_rank, self.stage_size)
        rest, tp = divmod(place, self.expert_tp_size)
        dp, ep = divmod(rest, self.ep_size)
        return ExpertCoordinates(tp=tp, ep=ep, dp=dp, pp=pp)

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Ranks of the group of `rank` that spans `axes` (of "tp", "cp", "dp", "pp"), ascending.

        Example: with tp=2, pp=2, dp=1, `group_of(3, "pp")` is `[1, 3]`.
        """
        return self._spread(rank, axes, dict(tp=self.tp_size, cp=self.cp_size, dp=self.dp_size, pp=self.pp_size))

    def expert_group_of(self, rank: int, *axes: str) -> list[int]:
        """The same for the expert layers: `axes` of "tp", "ep", "dp", "pp"."""
        sizes = dict(tp=self.expert_tp_size, ep=self.ep_size, dp=self.expert_replicas, pp=self.pp_size)
        return self._spread(rank, axes, sizes)

    def _spread(self, rank: int, axes: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
        """All ranks that differ from `rank` in these axes only; `sizes` by axis, the fastest first."""
        ranks, stride = [rank], 1
        for axis, size in sizes.items():
            if axis in axes:
                at = (rank - self.first_rank) // stride % size
                ranks = [other + (step - at) * stride for step in range(size) for other in ranks]
            stride *= size
        return ranks

    def model_copies(self) -> EngineRanks:
        """The ranks that hold the model once: all of tp and pp, and with experts the ranks that share them."""
        found: dict[int, tuple[int, ...]] = {}
        for rank in self.ranks:
            if rank not in found:
                ranks = tuple(self.expert_group_of(rank, "tp", "ep", "pp"))
                found |= dict.fromkeys(ranks, ranks)
        return EngineRanks(tuple(dict.fromkeys(found.values())))

    def describe(self) -> str:
        """`tp=2 pp=2 dp=1`, with vpp, cp and ep where they are larger than 1, and etp where it is not tp."""
        parts = [f"tp={self.tp_size}", f"pp={self.pp_size}", f"dp={self.dp_size}"]
        extra = {"vpp": self.vpp_size, "cp": self.cp_size, "ep": self.ep_size}
        parts += [f"{name}={size}" for name, size in extra.items() if size > 1]
        return " ".join(parts if self._splits_experts else [*parts, f"etp={self.expert_tp_size}"])


@dataclass(frozen=True)
class EngineRanks:
    """Which ranks form which rollout engine.

    Attributes:
        of: the ranks of each engine, ascending; all engines have equally many, and a rank is in one engine or in none.
    """

    of: tuple[tuple[int, ...], ...]

    @classmethod
    def consecutive(cls, ranks: range, width: int) -> EngineRanks:
        """`width` neighbors each; the number of ranks is a multiple of it."""
        return cls(tuple(tuple(ranks[first : first + width]) for first in range(0, len(ranks), width)))

    @property
    def width(self) -> int:
        """Ranks of one engine."""
        return len(self.of[0])

    def find(self, rank: int) -> tuple[int, int]:
        """The engine of a rank, and its place there; (-1, 0) for a rank that is in none."""
        found = ((engine, ranks.index(rank)) for engine, ranks in enumerate(self.of) if rank in ranks)
        return next(found, (-1, 0))

    @property
    def num_ranks(self) -> int:
        """Ranks of all engines."""
        return self.width * len(self.of)

    def describe(self, engine: int) -> str:
        """`rank 3`, `ranks 2-3`, or `ranks 0, 2` where they are no neighbors."""
        first, *others = ranks = self.of[engine]
        if not others:
            return f"rank {first}"
        if others[-1] - first == len(others):
            return f"ranks {first}-{others[-1]}"
        return f"ranks {', '.join(map(str, ranks))}"


def _divides(num_heads: int, num_kv_heads: int, cp_size: int) -> bool:
    return num_heads % cp_size == 0 and (num_kv_heads % cp_size == 0 or cp_size % num_kv_heads == 0)


def check_context_parallel(
    num_heads: int, num_kv_heads: int, tp_size: int, cp_size: int, *, section: str = "actor"
) -> None:
    """Refuse a context parallel size that the heads of the model do not allow.

    Args:
        num_heads, num_kv_heads: of the whole model, divisible by `tp_size`.
        section: of the configuration, for the error.

    Raises:
        UserError: naming the sizes that work.
    """
    heads, kv_heads = num_heads // tp_size, num_kv_heads // tp_size
    if not _divides(heads, kv_heads, cp_size):
        allowed = [size for size in range(1, heads + 1) if _divides(heads, kv_heads, size)]
        raise UserError(
            f"context_parallel_size {cp_size} cannot divide the {heads} query heads and {kv_heads} KV heads of a "
            f"tensor parallel rank ({num_heads} and {num_kv_heads} of the model over tp = {tp_size})",
            source=f"{section}.context_parallel_size, {section}.tensor_model_parallel_size and the model's config.json",
            expected=f"one of {allowed}: it divides the query heads, and divides the KV heads or is a multiple of them",
            hint=f"set {section}.context_parallel_size to one of these, or change the tensor parallel size",
        )
