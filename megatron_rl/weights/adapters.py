# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters as logical tensors: `<matrix>.lora_A.weight` [r, in] and `<matrix>.lora_B.weight` [out, r].

Names are PEFT's without its prefix. Beside a parameter `X.weight` are `X.lora_A` and `X.lora_B`, stacked in the order
of a fused parameter's adapted parts. B of a row-sharded matrix and A of a column-sharded one are sharded likewise; the
other factor is not sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from megatron_rl.config.sections import ALL_LINEAR, LoraConfig
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES, FUSED_KINDS, SCORE_HEAD, ModelShape
from megatron_rl.weights.head_sizes import FullHeads, LatentSizes
from megatron_rl.weights.placement_tables import BoxPair, PlacementTable, TableRows
from megatron_rl.weights.rope import restore_rope_scaling
from megatron_rl.weights.shard_box import columns, full_box, rows
from megatron_rl.weights.special_parts import DeltaNetSizes, SigmoidRouter

if TYPE_CHECKING:
    import torch

# PEFT name -> kind.
_ATTENTION = {"q_proj": "q.weight", "k_proj": "k.weight", "v_proj": "v.weight", "o_proj": "o"}
_DENSE = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_CUT_BY_COLUMNS = ("o", "down")


@dataclass(frozen=True)
class AdapterShape:
    """The trained tensors of a model with LoRA adapters: these, and its score head if there is one."""

    base: ModelShape
    rank: int
    scale: float  # factor of the product B A
    kinds: tuple[str, ...]  # kinds of matrices with adapters, in the order of `list_matrices`
    is_quantized: bool = False  # all matrices of the model are in NF4 (`weights/quantization.py`)

    @cached_property
    def live_scale(self) -> torch.Tensor:
        """The scale that the model computes with, 0-d: a server of several models sets that of the one in turn."""
        import torch

        return torch.tensor(self.scale, dtype=torch.float64)

    @property
    def modules(self) -> list[str]:
        """PEFT names of the matrices with adapters."""
        return [name for name, kind in list_matrices(self.base).items() if kind in self.kinds]

    @property
    def has_experts(self) -> bool:
        """True if experts have adapters."""
        return self.base.num_experts > 0 and not {*_DENSE.values()}.isdisjoint(self.kinds)

    def kind_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each kind of tensor: `<kind>.lora_A` and `<kind>.lora_B`, and the score head."""
        sizes = self.base.kind_sizes()
        found = {"score": sizes["score"]}
        for kind in self.kinds:
            size_out, size_in = sizes[kind]
            found |= {f"{kind}.lora_A": (self.rank, size_in), f"{kind}.lora_B": (size_out, self.rank)}
        return found

    def tensor_kinds(self) -> dict[str, str]:
        """Return the kind of each tensor by name, in model order."""
        found = {}
        for name, kind in self.base.tensor_kinds().items():
            if kind in self.kinds:
                matrix = name.removesuffix(".weight")
                found |= {f"{matrix}.{half}.weight": f"{kind}.{half}" for half in ("lora_A", "lora_B")}
            elif name == SCORE_HEAD:
                found[name] = kind
        return found

    def logical_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each tensor by name, in model order."""
        sizes = self.kind_sizes()
        return {name: sizes[kind] for name, kind in self.tensor_kinds().items()}


def list_matrices(shape: ModelShape) -> dict[str, str]:
    """Return the kinds of a layer's matrices that can have adapters, by PEFT's module name."""
    family, names = FAMILIES[shape.family], FAMILIES[shape.family].experts
    if family.fuses or family.has_sinks or shape.latent is not None or shape.delta_layers or family.has_full_heads:
        return {}
    if shape.router is not None:  # PEFT names cannot tell experts from other MLPs
        return dict(_ATTENTION)
    return _ATTENTION | (_DENSE if names is None else {names.gate: "gate", names.up: "up", names.down: "down"})


def read_shape(saved: Mapping[str, Any]) -> ModelShape | AdapterShape:
    """Restore a shape from `dataclasses.asdict`."""
    if "base" not in saved:
        router, scaling, latent, net, heads = (
            saved.get(name) for name in ("router", "rope_scaling", "latent", "delta_net", "full_heads")
        )
        nested = dict(
            router=router and SigmoidRouter(**router),
            latent=latent and LatentSizes(**latent),
            delta_net=net and DeltaNetSizes(**net),
            full_heads=heads and FullHeads(**heads),
            rope_scaling=scaling and restore_rope_scaling(scaling),
            **{name: tuple(saved.get(name, ())) for name in ("unrotated_layers", "sliding_layers", "delta_layers")},
        )
        return ModelShape(**{**saved, **nested})
    base = read_shape(saved["base"])
    assert isinstance(base, ModelShape), "adapters of a model"
    return AdapterShape(**{**saved, "base": base, "kinds": tuple(saved["kinds"])})


def make_adapter_shape(
    shape: ModelShape, config: LoraConfig, section: str, *, is_quantized: bool = False
) -> AdapterShape:
    """Return the adapters of a model, of rank 1 or more.

    Args:
        config: `<section>.lora`.

    Raises:
        UserError: `target_modules` has a matrix that cannot have adapters.
    """
    matrices, asked = list_matrices(shape), config.target_modules
    all_linear = [name for name in matrices if not shape.num_experts or name in _ATTENTION]
    names = all_linear if asked == [ALL_LINEAR] else asked
    wrong = [name for name in names if name not in matrices]
    if wrong or not names:
        raise UserError(
            f"{section}.lora.target_modules = {asked!r}: "
            + (f"{wrong[0]!r} is no matrix that can have an adapter" if wrong else "no matrix"),
            source=f"{section}.lora.target_modules",
            expected=f"{ALL_LINEAR}, or some of {', '.join(matrices)}",
            hint=f"set {section}.lora.target_modules=[{ALL_LINEAR}]",
        )
    kinds = tuple(kind for name, kind in matrices.items() if name in names)
    return AdapterShape(shape, config.rank, config.scale, kinds, is_quantized)


def adapter_placements(shape: AdapterShape, base: PlacementTable, *, is_stacked: bool = True) -> PlacementTable:
    """Return a rank's table of adapters.

    Args:
        base: table of the model, of Megatron or of an engine.
        is_stacked: like the model's fused parameters, or else `<matrix>.lora_A` and `.lora_B` for each matrix.
    """
    kinds = {kind: base.boxes[kind] for kind in (*shape.kinds, *(("score",) if shape.base.has_score_head else ()))}
    boxes = _cut(shape, tuple(kinds.items()), is_stacked)
    return PlacementTable(_list_rows(base.rows, shape.kinds, is_stacked), boxes)


def adapted_parameters(shape: AdapterShape, base: PlacementTable) -> frozenset[str]:
    """Return the parameters that have adapters."""
    return frozenset(param for param, _, kind in base.rows if kind in shape.kinds)


@lru_cache(maxsize=8)
def _list_rows(base: TableRows, kinds: tuple[str, ...], is_stacked: bool) -> TableRows:
    found = []
    for param, name, kind in base:
        if kind in kinds:
            matrix = name.removesuffix(".weight")
            owner = param.removesuffix(".weight") if is_stacked else matrix
            found += [(f"{owner}.{half}", f"{matrix}.{half}.weight", f"{kind}.{half}") for half in ("lora_A", "lora_B")]
        elif name == SCORE_HEAD:
            found.append((param, name, kind))
    return TableRows(found)


@lru_cache(maxsize=64)
def _cut(shape: AdapterShape, base: Sequence[tuple[str, BoxPair]], is_stacked: bool) -> dict[str, BoxPair]:
    boxes, sizes, r = dict(base), shape.kind_sizes(), shape.rank
    found = {"score": boxes["score"]} if "score" in boxes else {}
    for kind in shape.kinds:
        a, b, (local, whole) = f"{kind}.lora_A", f"{kind}.lora_B", boxes[kind]
        if kind in _CUT_BY_COLUMNS:
            found[a] = columns(*local[1], (r, 0)), columns(*whole[1], (r, 0))
            found[b] = full_box(sizes[b]), full_box(sizes[b])
            continue
        fused = next(parts for parts in FUSED_KINDS.values() if kind in parts) if is_stacked else (kind,)
        before = [part for part in fused[: fused.index(kind)] if part in shape.kinds]
        start = sum(boxes[part][0][0][1] - boxes[part][0][0][0] for part in before)
        length = local[0][1] - local[0][0]
        found[a] = rows(len(before) * r, (len(before) + 1) * r, sizes[a]), full_box(sizes[a])
        found[b] = rows(start, start + length, sizes[b]), rows(*whole[0], sizes[b])
    return found
