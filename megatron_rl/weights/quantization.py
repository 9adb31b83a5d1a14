# SPDX-License-Identifier: Apache-2.0
"""Matrices kept in 4 bits (QLoRA, 2305.14314): attention and MLPs, not embedding, norms, router or head.

64 neighboring elements of a row share a scale. Each such block is on one rank, so that values are the same in every
layout.
"""

from __future__ import annotations

from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.placement_tables import PlacementTable

BLOCK = 64
KINDS = frozenset({"q.weight", "k.weight", "v.weight", "o", "gate", "up", "down", "qkv", "gate_up"})
_PARAMETERS = tuple(f"linear_{name}.weight" for name in ("qkv", "proj", "fc1", "fc2"))


def is_quantized(parameter: str) -> bool:
    """Return whether a Megatron parameter is quantized."""
    return parameter.endswith(_PARAMETERS)


def list_quantized(placements: PlacementTable) -> frozenset[str]:
    """Return the quantized parameters of a rank."""
    return frozenset(param for param, _, _ in placements.rows if is_quantized(param))


def count_bytes(numel: int) -> int:
    """Return the bytes of a quantized matrix, scales included."""
    return numel // 2 + numel // BLOCK * 4


def check_quantization(shape: ModelShape, tp_size: int, section: str) -> None:
    """Refuse a layout that splits blocks (UserError)."""
    if shape.router is not None:
        raise UserError(
            f"{section}.quantization = nf4 with dense layers or shared experts beside a mixture of experts",
            source=f"{section}.quantization",
            expected="a dense model, or a mixture of experts without them",
            hint=f"set {section}.quantization=none",
        )
    names = {kind: name for name, kind in reversed(shape.tensor_kinds().items())}  # the first of each kind
    sizes = shape.kind_sizes()
    for kind in sorted(KINDS & names.keys()):
        width, parts = sizes[kind][1], tp_size if kind in ("o", "down") else 1
        if width % (parts * BLOCK):
            valid = max((n for n in range(1, parts) if width % (n * BLOCK) == 0), default=None)
            raise UserError(
                f"{section}.quantization = nf4: of {names[kind]} a rank has {width // parts} columns",
                source=f"{section}.quantization, {section}.tensor_model_parallel_size and the model's config.json",
                expected=f"whole blocks of {BLOCK}: those across ranks or rows would differ from layout to layout",
                hint=f"set {section}." + (f"tensor_model_parallel_size={valid}" if valid else "quantization=none"),
            )
