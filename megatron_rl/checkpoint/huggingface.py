# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of models in HF format, through placement tables: the boxes of HF tensors in each parameter.

Each rank reads only the boxes of its parameters. Writing gathers one file's worth of logical tensors on rank 0 and
renames the finished directory into place.

A model with a score head (critic, reward model) is transformers' `*ForSequenceClassification` with one label.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.checkpoint.files import (
    Unit,
    copy_side_files,
    list_side_files,
    publish,
    read_config,
    split_units,
    write_file,
)
from megatron_rl.checkpoint.model_files import INDEX_FILE, ModelFiles, index_safetensors, list_copies, read_headers
from megatron_rl.checkpoint.torch_dist import dtype_name
from megatron_rl.parallel.collectives import raise_together
from megatron_rl.transfer.executor import Resharder
from megatron_rl.transfer.planner import Planner, Shard
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES, SCORE_HEAD, ModelShape
from megatron_rl.weights.model_config import MTP_KEYS
from megatron_rl.weights.shard_box import ShardBox, box_slices, full_box

if TYPE_CHECKING:
    from megatron_rl.weights.packed_experts import FileTensor

_KEYS = (*MTP_KEYS, "mtp_num_hidden_layers")


T = TypeVar("T")


def check_checkpoint(directory: str | Path, shape: ModelShape, may_lack: Collection[str] = ()) -> None:
    """Check names and shapes of the tensors against the config; reads headers only.

    Raises:
        UserError: names the first missing (unless in `may_lack`) or mismatched tensors, or a head of another kind.
    """
    directory = Path(directory)
    files, wanted = ModelFiles(directory), shape.logical_tensors()
    _check_head(directory, files, shape, may_lack)
    wrong = [f"{name} is missing" for name in wanted if name not in files and name not in may_lack]
    for name, (found, _) in files.read_headers().items():
        expected = wanted.get(name, found)
        if found != expected:
            wrong.append(f"{name} is {list(found)}, config.json says {list(expected)}")
    if wrong:
        raise UserError(
            f"{len(wrong)} tensor(s) do not match: {'; '.join(wrong[:3])}",
            source=str(directory),
            expected="the tensors that config.json describes",
            hint="config.json and weights belong to two models",
        )


def _check_head(directory: Path, files: Mapping[str, Path], shape: ModelShape, may_lack: Collection[str]) -> None:
    family, source = FAMILIES[shape.family], str(directory)
    if not shape.has_score_head:
        if SCORE_HEAD in files:
            raise UserError(
                f"there is a {SCORE_HEAD}: this model scores and does not generate",
                source=source,
                expected=f"a {family.architecture}",
                hint="a reward model or critic belongs to reward_model.path or critic.path",
            )
        return
    if SCORE_HEAD not in files:
        if SCORE_HEAD not in may_lack:
            raise UserError(
                f"there is no {SCORE_HEAD}",
                source=source,
                expected=f"a {family.scoring_architecture} with one label",
                hint="a language model gives no scores",
            )
        return
    size, _ = read_headers({SCORE_HEAD: files[SCORE_HEAD]})[SCORE_HEAD]
    if size != (1, shape.hidden_size):
        raise UserError(
            f"{SCORE_HEAD} is {list(size)}",
            source=source,
            expected=f"one label: [1, {shape.hidden_size}]",
            hint="save the model with num_labels=1",
        )
    bias = SCORE_HEAD.replace("weight", "bias")
    if bias in files:
        with safe_open(files[bias], framework="pt") as handle:
            value = handle.get_tensor(bias)
        if value.any():
            raise UserError(
                f"{bias} is {value.tolist()}",
                source=source,
                expected=f"a {family.scoring_architecture}, without bias",
                hint="this head has no bias; without it all scores would be shifted",
            )


@torch.no_grad()
def load_huggingface(
    directory: str | Path,
    placements: Iterable[ShardBox],
    params: Mapping[str, torch.Tensor],
    *,
    may_lack: Collection[str] = (),
) -> None:
    """Fill `params` in place from a model in HF format; padding and missing tensors in `may_lack` become zero."""
    files = ModelFiles(Path(directory))
    by_file: dict[Path, list[ShardBox]] = {}
    for placement in placements:
        if placement.hf_name in may_lack and placement.hf_name not in files:
            continue
        by_file.setdefault(files[placement.hf_name], []).append(placement)
    for tensor in params.values():
        tensor.zero_()
    for wanted in by_file.values():
        with files.open() as handle:
            for placement in wanted:
                piece = handle.get_slice(placement.hf_name)[box_slices(placement.hf_box)]
                params[placement.param][box_slices(placement.local_box)].copy_(piece)


@dataclass(frozen=True)
class ShardedModel:
    """A model whose weights are sharded over the ranks of a group.

    Attributes:
        dtype: in files, except for router biases.
        mtp: the MTP layer, if `shards` and `params` contain it.
    """

    shape: ModelShape
    shards: Sequence[Shard]
    params: Mapping[str, torch.Tensor]
    group: dist.ProcessGroup
    dtype: torch.dtype
    mtp: ModelShape | None = None

    def find_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a logical tensor in files."""
        return torch.float32 if self.shape.is_router_bias(name) else self.dtype


def save_huggingface(
    directory: str | Path,
    model: ShardedModel,
    *,
    side_files_from: str | Path,
    bucket_bytes: int,
    max_file_bytes: int = 4 << 30,
) -> Path:
    """Write a model in HF format; collective over its group, rank 0 writes.

    Args:
        directory: written as `<directory>.partial`, then renamed; an existing one is replaced.
        side_files_from: model directory with config, tokenizer files and draft layers to copy.
        max_file_bytes: bytes per safetensors file, held by rank 0 at once.

    Raises:
        Exception: rank 0 could not write; raised on every rank. An existing directory stays.
    """
    from megatron_rl.weights.packed_experts import list_file_tensors

    directory, shape, group = Path(directory), model.shape, model.group
    partial, shapes = directory.with_name(directory.name + ".partial"), shape.logical_tensors()
    written = list_file_tensors(shape)
    drafts, copies = find_drafts(Path(side_files_from), shape), dict[str, str]()
    if model.mtp is not None:
        shapes, copies, drafts = shapes | model.mtp.logical_tensors(), list_copies(shape), {}
        written |= list_file_tensors(model.mtp) | {copy: written[original] for copy, original in copies.items()}
    all_shapes = {name: tensor.size for name, tensor in written.items()} | {
        name: size for name, (size, _) in read_headers(drafts).items()
    }
    sizes = {name: torch.Size(size).numel() * model.find_dtype(name).itemsize for name, size in all_shapes.items()}
    units = split_units(sizes, max_file_bytes, name_safetensors)
    do_on_first(group, make_empty, partial)
    for unit in units:
        here = {name: written[name] for name in unit.tensors if name in written}
        experts = [name for tensor in here.values() for turns in tensor.experts for name in turns]
        names = [copies.get(name, name) for name in (*here, *experts)]
        trained = {name: shapes[name] for name in names if name in shapes}
        kept = {name: drafts[name] for name in unit.tensors if name in drafts}
        tensors = gather_on_first(trained, model, bucket_bytes)
        tensors |= {copy: tensors[original].clone() for copy, original in copies.items() if copy in here and tensors}
        do_on_first(group, _write_tensors, tensors, here, kept, partial / unit.file)
    do_on_first(group, finish_model, partial, directory, units, Path(side_files_from), shape, model.dtype)
    return directory


def name_safetensors(index: int, count: int) -> str:
    """Return the name of a weight file in HF format; `index` counts from 0."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def finish_model(
    partial: Path, directory: Path, units: Sequence[Unit], config: Path, shape: ModelShape, dtype: torch.dtype
) -> None:
    """Write the index, and the side files of model `config`, beside `units` in `partial`; rename it to `directory`."""
    if len(units) > 1:
        weight_map = {name: unit.file for unit in units for name in unit.tensors}
        total = {"total_size": sum(unit.num_bytes for unit in units)}
        write_file(partial / INDEX_FILE, json.dumps({"metadata": total, "weight_map": weight_map}, indent=2).encode())
    files = list_side_files(config)
    described = read_config(files.pop("config.json"))
    if not any(shape.is_draft(name) for unit in units for name in unit.tensors):
        described |= dict.fromkeys(described.keys() & set(_KEYS), 0)
    keys = [key for key in ("dtype", "torch_dtype") if key in described] or ["torch_dtype"]
    described |= dict.fromkeys(keys, dtype_name(dtype))
    described.pop("quantization_config", None)  # weights were decoded when they were read
    if shape.has_score_head:  # transformers derives the number of labels from `id2label`
        described |= {
            "architectures": [FAMILIES[shape.family].scoring_architecture],
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
    copy_side_files(files, partial)
    write_file(partial / "config.json", (json.dumps(described, indent=2) + "\n").encode())
    publish(partial, directory)


def do_on_first(group: dist.ProcessGroup, action: Callable[..., T], *args: Any) -> T | None:
    """Run an action on rank 0 and return its result there; errors are raised on every rank; collective."""
    result, error = None, None
    if group.rank() == 0:
        try:
            result = action(*args)
        except Exception as caught:
            error = caught
    raise_together(error, group)
    return result


def make_empty(directory: Path) -> None:
    """Create an empty directory, deleting an existing one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _write_tensors(
    tensors: Mapping[str, torch.Tensor], written: Mapping[str, FileTensor], kept: Mapping[str, Path], path: Path
) -> None:
    from megatron_rl.weights.packed_experts import join_turns

    found = {}
    for name, tensor in written.items():
        experts = [join_turns([tensors[part].cpu() for part in turns]) for turns in tensor.experts]
        found[name] = torch.stack(experts) if experts else tensors[name].cpu()
    for name, file in kept.items():
        with safe_open(file, framework="pt") as handle:
            found[name] = handle.get_tensor(name)
    save_file(found, path, metadata={"format": "pt"})


def gather_on_first(
    batch: Mapping[str, tuple[int, ...]], model: ShardedModel, bucket_bytes: int = 32 << 20
) -> dict[str, torch.Tensor]:
    """Gather the logical tensors in `batch` (name -> shape) on rank 0; return {} on other ranks; collective."""
    group, device = model.group, next(iter(model.params.values())).device

    def allocate() -> dict[str, torch.Tensor]:
        return {name: torch.empty(size, dtype=model.find_dtype(name), device=device) for name, size in batch.items()}

    tensors = do_on_first(group, allocate) or {}
    for dtype in dict.fromkeys(map(model.find_dtype, batch)):
        names = {name for name in batch if model.find_dtype(name) == dtype}
        wanted = [Shard(s.ranks, tuple(p for p in s.placements if p.hf_name in names)) for s in model.shards]
        whole = tuple(ShardBox(n, full_box(size), n, full_box(size)) for n, size in batch.items() if n in names)
        plan = Planner(wanted, [Shard((0,), whole)], ranks_per_node=group.size()).plan(group.rank())
        mine = {name: tensor for name, tensor in tensors.items() if name in names}
        Resharder(plan, model.params, mine, group, bucket_bytes=bucket_bytes, dtype=dtype).run()
    return tensors


def find_drafts(directory: Path, shape: ModelShape) -> dict[str, Path]:
    """Return the file of each tensor of the MTP layers (of DeepSeek-V3, GLM-4.5, Qwen3-Next), which engines draft with.

    Unless `actor.mtp_lr` trains one, exports copy them from the initial model.
    """
    config = json.loads((directory / "config.json").read_bytes())
    may_have = shape.delta_net is not None or any(config.get(key) for key in _KEYS)  # Qwen3-Next has no such key
    if not may_have or not any(directory.glob("*.safetensors")):
        return {}
    return {name: file for name, file in index_safetensors(directory).items() if shape.is_draft(name)}
