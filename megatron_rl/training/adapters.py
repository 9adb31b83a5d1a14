# SPDX-License-Identifier: Apache-2.0
"""The adapters of a model as what is trained of it: where they come from, and what a checkpoint holds."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch

from megatron_rl.checkpoint.peft import load_adapters
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.shard_box import box_slices
from megatron_rl.weights.tables import PlacementTable


@dataclass(frozen=True)
class Adapters:
    """The parameters of a rank that are trained; a `SavedModel`.

    Attributes:
        shape: of the adapters.
        groups: process groups of the role.
        stages: the model that they are in.
        params: this rank's, by name; with the score head where the model has one.
        placements: their table on any rank of the layout.
        shard_key: ranks with equal keys have equal tables.
    """

    shape: AdapterShape
    groups: ParallelGroups
    stages: torch.nn.ModuleList
    params: Mapping[str, torch.Tensor]
    placements: Callable[[int], PlacementTable]
    shard_key: Callable[[int], Hashable]

    def fill(self, rank: int, path: str | None, seed: int) -> None:
        """Give the adapters their first values: those in PEFT's files, or A at random and B of zeros.

        A is uniform in +-1/sqrt(in), as PEFT draws it, and the same in every layout.

        Args:
            rank: this one.
            path: directory that PEFT has saved; None: draw them.
            seed: of the run.
        """
        if path is not None:
            load_adapters(path, self.placements(rank), self.params)
            return
        sizes = self.shape.logical_tensors()
        for p in self.placements(rank):
            if p.hf_name.endswith("lora_A.weight"):
                size = sizes[p.hf_name]
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {p.hf_name}".encode()))
                values = (2 * torch.rand(size, generator=generator) - 1) / math.sqrt(size[1])
                self.params[p.param][box_slices(p.local_box)].copy_(values[box_slices(p.hf_box)])
