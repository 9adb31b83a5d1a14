# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a model: initialization, norm and parameter tables."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.peft import load_adapters
from megatron_rl.checkpoint.pieces import load_weights
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.models.experts import list_matrices
from megatron_rl.models.lora_linears import HALVES, AdaptedLinear, AdaptedMatrix, freeze_model, is_trained
from megatron_rl.models.stages import local_values
from megatron_rl.transfer.computed import MergedParam, ScaledParam, SourceParams
from megatron_rl.weights.adapters import AdapterShape, adapter_placements
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.placement_tables import PlacementTable
from megatron_rl.weights.quantization import QuantizedMatrix
from megatron_rl.weights.shard_box import ShardBox, box_slices, check_placements


class Adapters:
    """Trained parameters of a `PackedModel` on a rank under LoRA: adapters and, if any, the score head."""

    def __init__(self, model: Any, shape: AdapterShape) -> None:
        self.shape, self.layout, self.groups, self.stages = shape, model.layout, model.groups, model.stages
        self.dtype, self.shard_key, self._of_model = model.dtype, model.shard_key, model.placements
        self.params: Any = {n: p for n, p in list_matrices(model.stages, torch.detach).items() if is_trained(n)}

    def placements(self, rank: int) -> PlacementTable:
        """List the slices of checkpoint tensors that a rank's adapters hold."""
        return adapter_placements(self.shape, self._of_model(rank))

    def scale(self) -> SourceParams:
        """Return the parameters, B multiplied by the LoRA scale."""
        return {
            name: ScaledParam(param, self.shape.live_scale) if name.endswith("lora_B") else param
            for name, param in self.params.items()
        }

    @torch.no_grad()
    def measure_norm(self) -> torch.Tensor:
        """Compute the Frobenius norm of all s B A (s the LoRA scale), [] float64; collective over the role.

        |B A|^2 = sum((A A^T) * (B^T B)), which adds up over tensor parallel ranks.
        """
        squares = {is_expert: torch.zeros((), device=next(self.stages.parameters()).device) for is_expert in (0, 1)}
        for param, (_, parts) in _list_adapted(self.stages).items():
            for _, a, b in parts:
                a, b = a.float(), b.float()
                squares[".experts." in param] += ((a @ a.T) * (b.T @ b)).sum()
        for is_expert, group in ((0, self.groups.collection.mp), (1, self.groups.collection.tp_ep_pp)):
            torch.distributed.all_reduce(squares[is_expert], group=group)
        return self.shape.live_scale * (squares[0].double() + squares[1].double()).clamp(min=0.0).sqrt()


def list_params(stages: torch.nn.Module) -> dict[str, torch.Tensor | QuantizedMatrix]:
    """List a model's parameters by name, including NF4 matrices, excluding adapters."""
    return {name: p for name, p in list_matrices(stages, local_values).items() if not name.endswith(HALVES)}


def fill_adapted(model: Any, params: SourceParams, spec: RoleSpec, seed: int) -> None:
    """Load and freeze the base weights of a `PackedModel`, and read its adapters from `spec.lora.path`.

    Without a path, B is 0 and A uniform in +-1/sqrt(in), as in PEFT, and equal in every layout.
    """
    assert model.adapters is not None and spec.lora is not None
    _load(Path(spec.path), model.shape, model.placements(model.rank), params, spec.may_lack)
    freeze_model(model.stages)
    adapters = Adapters(model, model.adapters)
    sizes = {name: tuple(p.shape) for name, p in adapters.params.items()}
    placements = adapters.placements(model.rank)
    check_placements(placements, sizes, where=f"adapters of megatron {model.groups.at}")
    if spec.lora.path is not None:
        load_adapters(spec.lora.path, placements, adapters.params)
        return
    sizes = adapters.shape.logical_tensors()
    for p in placements:
        if p.hf_name.endswith("lora_A.weight"):
            values = draw_initial(seed, p.hf_name, sizes[p.hf_name])
            adapters.params[p.param][box_slices(p.local_box)].copy_(values[box_slices(p.hf_box)])


def draw_initial(seed: int, name: str, size: tuple[int, ...]) -> torch.Tensor:
    """Return the first values of an adapter's matrix A [r, in], by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return (2 * torch.rand(size, generator=generator) - 1) / math.sqrt(size[1])


def _load(
    path: Path, shape: ModelShape, placements: PlacementTable, params: SourceParams, may_lack: Collection[str]
) -> None:
    """Read the weights into `params`, one layer after the other for NF4 matrices, to bound the unquantized bytes.

    Args:
        may_lack: tensors that are zero if the files lack them.
    """
    whole = {name: param for name, param in params.items() if isinstance(param, torch.Tensor)}
    quantized = {name: param for name, param in params.items() if isinstance(param, QuantizedMatrix)}
    boxes: dict[str, list[ShardBox]] = {}
    for p in placements:
        layer = ".".join(p.param.split(".")[:4])
        boxes.setdefault(layer if p.param in quantized else "", []).append(p)
    load_weights(path, shape, boxes.pop(""), whole, may_lack=may_lack)
    for mine in boxes.values():
        matrices = {p.param: quantized[p.param] for p in mine}
        read = {name: torch.empty(m.shape, dtype=m.dtype, device=m.device) for name, m in matrices.items()}
        load_weights(path, shape, mine, read)
        for name, matrix in matrices.items():
            matrix.store(read[name])


def merge_adapters(stages: torch.nn.Module, scale: torch.Tensor) -> dict[str, MergedParam]:
    """Return the weights that have adapters, by parameter name; each is merged when it is read."""
    return {param: MergedParam(weight, scale, parts) for param, (weight, parts) in _list_adapted(stages).items()}


def _list_adapted(stages: torch.nn.Module) -> dict[str, AdaptedMatrix]:
    found: dict[str, AdaptedMatrix] = {}
    for name, module in stages.named_modules():
        if isinstance(module, AdaptedLinear):
            found |= module.list_matrices(name)
    return found
