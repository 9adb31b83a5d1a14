# SPDX-License-Identifier: Apache-2.0
"""Weights of a server's engine: whole HF tensors, distributed over its ranks and written to files for the server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.weights.rollout_layout import huggingface_placements
from megatron_rl.weights.shard_box import ShardBox, box_shape

_IS_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


class StagedWeights:
    """One rank's share of the tensors, `params`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._width = spec, spec.config.tensor_model_parallel_size
        self._place = spec.find_place(spec.process.rank)
        self.params = {
            box.param: torch.zeros(
                box_shape(box.local_box), dtype=getattr(torch, spec.dtype), device=spec.process.device
            )
            for box in self.placements(spec.process.rank)
        }
        self.shared_params: frozenset[str] = frozenset()
        self.padded_params: tuple[str, ...] = ()

    def shard_key(self, rank: int) -> int:
        """Return a key shared by ranks with equal tables."""
        return self._spec.find_place(rank)

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """Return the table of any rank of the job."""
        return self._list_tensors(self._spec.find_place(rank))

    def _list_tensors(self, place: int) -> list[ShardBox]:
        return huggingface_placements(self._spec.shape)[place :: self._width]

    def begin_weight_update(self) -> None:
        """Do nothing."""

    def sleep(self) -> None:
        """Do nothing."""

    def write(self, directory: Path) -> None:
        """Write this rank's file in HF format; the first rank adds index, config and tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        name = _name_file(self._place, self._width)
        partial = directory / f"{name}.partial"
        save_file({name: tensor.cpu() for name, tensor in self.params.items()}, partial, metadata={"format": "pt"})
        os.replace(partial, directory / name)
        if self._place == 0:
            for path in sorted(Path(self._spec.model_path).iterdir()):
                if path.is_file() and not path.name.endswith(_IS_WEIGHTS):
                    shutil.copyfile(path, directory / path.name)
            self._write_index(directory)

    def _write_index(self, directory: Path) -> None:
        places = range(self._width)
        files = {box.param: _name_file(place, self._width) for place in places for box in self._list_tensors(place)}
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _name_file(place: int, width: int) -> str:
    return f"model-{place + 1:05d}-of-{width:05d}.safetensors"
