# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of models in HF format, through placement tables: the boxes of HF tensors in each parameter.

Only the text part of an image-text model has logical tensors. Experts may be packed into one tensor per layer; those in
MXFP4 (4-bit numbers in blocks of 32 with one exponent; OCP microscaling formats, 1.0) and matrices in FP8
(`weights/block_scales.py`) are decoded to bfloat16. Reading every header detects truncated files; altered elements are
not detected, since the format has no checksums.

Each rank reads only the boxes of its parameters. Writing gathers one file's worth of logical tensors on rank 0 and
renames the finished directory into place.

A model with a score head (critic, reward model) is transformers' `*ForSequenceClassification` with one label.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
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
from megatron_rl.checkpoint.torch_dist import dtype_name
from megatron_rl.parallel.collectives import raise_together
from megatron_rl.transfer.executor import Resharder
from megatron_rl.transfer.planner import Planner, Shard
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES, SCORE_HEAD, ModelShape
from megatron_rl.weights.model_config import MTP_KEYS
from megatron_rl.weights.shard_box import ShardBox, box_slices, full_box

if TYPE_CHECKING:
    from megatron_rl.weights.packed_experts import FileTensor, PackedPart

T = TypeVar("T")
INDEX_FILE = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(.*-)\d{5}-of-(\d{5})\.safetensors")
_LFS_POINTER = b"version https://git-lfs"


def index_safetensors(directory: Path) -> dict[str, Path]:
    """Map each tensor name to its file, for a sharded or unsharded model.

    Raises:
        UserError: no safetensors; a missing or damaged file; an index that is unreadable, leaves the directory, or does
            not match the files.
    """
    index = directory / INDEX_FILE
    named = _read_index(index) if index.is_file() else None
    found = set(directory.glob("*.safetensors")) if named is None else {directory / file for file in named.values()}
    if named is None:
        for match in filter(None, [_NUMBERED.fullmatch(file.name) for file in found]):
            numbers = range(1, int(match[2]) + 1)
            found |= {directory / f"{match[1]}{number:05d}-of-{match[2]}.safetensors" for number in numbers}
    files = sorted(found)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} file(s) of the model are missing: {', '.join(missing[:3])}",
            source=str(directory),
            expected=f"every file that {index.name} names" if named else "all numbered parts",
            hint=f"download {', '.join(missing[:3])} again",
        )
    held = {file: read_names(file) for file in files}
    for name, file in (named or {}).items():
        if name not in held[directory / file]:
            others = [other.name for other, names in held.items() if name in names]
            raise UserError(
                f"{name} is not in {file}, as {index.name} says" + (f", but in {others[0]}" if others else ""),
                source=str(index),
                expected="an index that fits the files",
                hint=f"download {index.name} and {file} again, from one version of the model",
            )
    if named is not None:
        return {name: directory / file for name, file in named.items()}
    if not files:
        raise UserError(
            f"{directory} has no weights" if directory.is_dir() else f"there is no directory {directory}",
            source=str(directory),
            expected="*.safetensors (with their index when sharded)",
            hint="download the checkpoint again, or convert .bin files with transformers' save_pretrained",
        )
    return {name: file for file, names in held.items() for name in names}


def read_headers(files: Mapping[str, Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and safetensors dtype of every tensor by name."""
    headers = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as handle:
            for name in sorted(name for name, where in files.items() if where == file):
                tensor = handle.get_slice(name)
                headers[name] = tuple(tensor.get_shape()), tensor.get_dtype()
    return headers


def _read_index(index: Path) -> dict[str, str]:

    def refuse(found: str) -> UserError:
        return UserError(
            found,
            source=str(index),
            expected='{"weight_map": {tensor: name of a file beside the index}}',
            hint=f"download {index.name} again",
        )

    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise refuse(f"{index.name} is not JSON: {error}") from None
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise refuse(f"{index.name} has no weight_map of tensors and file names")
    for file in set(named.values()):
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise refuse(f"{index.name} names {file!r}, which is no safetensors file of its directory")
    return named


def read_names(file: Path) -> set[str]:
    """Return the names of the tensors in a file (UserError: the file is damaged, truncated or unreadable)."""
    try:
        with safe_open(file, framework="pt") as handle:
            return set(handle.keys())
    except OSError as error:
        what, hint = str(error), "look at the file and its rights"
    except SafetensorError as error:
        what, hint = f"{error} ({file.stat().st_size:,} bytes)", f"download {file.name} again"
        with file.open("rb") as content:
            if content.read(len(_LFS_POINTER)) == _LFS_POINTER:
                what, hint = "it is a pointer of Git LFS", "run git lfs pull"
    raise UserError(f"{file.name} is damaged: {what}", source=str(file), expected="a whole safetensors file", hint=hint)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 8 to 15 are the negatives
_BIAS = 127  # exponent bias
_Headers = dict[str, tuple[tuple[int, ...], str]]


class ModelFiles(Mapping[str, Path]):
    """Mapping from logical tensor to file (UserError: see `index_safetensors`; or MXFP4 blocks without scales)."""

    def __init__(self, directory: Path) -> None:
        stored, config = index_safetensors(directory), directory / "config.json"
        # Tensor names do not determine how experts are packed.
        described = read_config(config) if config.is_file() else {}
        family = FAMILIES.get(str(described.get("model_type")))
        # Name in the files of every unpacked or packed tensor; `stored` is its file.
        self.names = {name: name for name in stored}
        if family is not None and family.image_text is not None:
            self.names = {
                re.sub(r"^model\.language_model\.", "model.", name): name
                for name in stored
                if not re.match(r"model\.(visual|vision_tower|embed_vision|audio_tower|embed_audio)\.", name)
            }
        self.stored = {text: stored[name] for text, name in self.names.items()}
        self._files, self._source = dict(self.stored), str(directory)
        self.scales: dict[str, str] = {}  # of every matrix in FP8, both as in the files
        self.block: tuple[int, int] | None = None
        if described.get("quantization_config"):
            from megatron_rl.weights.block_scales import find_block, find_scales

            self.block, self.scales = find_block(described), find_scales(self.stored)
            for name in self.scales.values():
                del self._files[name]
        self.parts: dict[str, PackedPart] = {}  # place in a packed tensor of every logical tensor that is packed
        packing = family.experts.packing if family is not None and family.experts is not None else None
        if packing is not None:
            self._unpack(directory, in_halves=packing == "halves")

    def _unpack(self, directory: Path, *, in_halves: bool) -> None:
        """Replace tensors of all experts by the logical tensors that they pack."""
        from megatron_rl.weights.packed_experts import find_parts

        for name in self.stored:
            if not find_parts(name, 1) or not name.startswith("model."):  # all others belong to draft layers
                continue
            (num_experts, *_), _ = self._read_stored([name])[name]
            parts = find_parts(name, num_experts, in_halves=in_halves)
            self._files |= dict.fromkeys(parts, self._files.pop(name))
            self.parts |= parts
            scales = next(iter(parts.values())).scales
            if scales is not None and self._files.pop(scales, None) is None:
                raise UserError(
                    f"there is {name}, but no {scales}",
                    source=str(directory),
                    expected="blocks and scales of MXFP4",
                    hint="download the checkpoint again",
                )

    def _read_stored(self, names: Iterable[str]) -> _Headers:
        headers = read_headers({self.names[name]: self.stored[name] for name in names})
        return {name: headers[self.names[name]] for name in names}

    def __getitem__(self, name: str) -> Path:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def read_headers(self) -> _Headers:
        """Return shape and safetensors dtype of every logical tensor."""
        headers = self._read_stored(self.stored)
        found = {name: header for name, header in headers.items() if name in self._files}
        if self.scales or any(dtype.startswith("F8") for _, dtype in found.values()):
            from megatron_rl.weights.block_scales import check_scales

            check_scales(headers, self.scales, self.block, self._source)
            found |= {name: (headers[name][0], "BF16") for name in self.scales}
        for name, part in self.parts.items():
            (_, *size), dtype = headers[part.packed]
            if part.in_halves:
                found[name] = (size[0] // part.turns, size[1]), dtype
            elif part.scales is not None:
                found[name] = (size[0] // part.turns, size[1] * size[2] * 2), "BF16"
            else:
                found[name] = (size[-1] // part.turns, *size[:-1]), dtype
        return found

    def open(self) -> OpenFiles:
        """Open the files, as they are needed, for reading logical tensors in a `with` block."""
        return OpenFiles(self)


def list_copies(shape: ModelShape) -> dict[str, str]:
    """Map tensors of the MTP layer that are copies in published checkpoints to the model's own tensors."""
    prefix = f"model.layers.{shape.num_layers}."
    head = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    return {f"{prefix}embed_tokens.weight": "model.embed_tokens.weight", f"{prefix}shared_head.head.weight": head}


class OpenFiles(ExitStack):
    """Open files of logical tensors, with the interface of `safe_open`."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__()
        self._files = files
        self._handles: dict[Path, Any] = {}
        self._last: tuple[str, int] | None = None  # expert that was read last: gate and up are read in turns
        self._matrix = torch.empty(0)

    def get_slice(self, name: str) -> Any:
        """Return an indexable view of a tensor."""
        part = self._files.parts.get(name)
        if part is None:
            if name not in self._files.scales:
                return self._get(name)
            from megatron_rl.weights.block_scales import BlockScaled

            assert self._files.block is not None, "`read_headers` refuses scales without blocks"
            codes, scales = self._get(name), self._get(self._files.scales[name])
            return BlockScaled(tuple(codes.get_shape()), self._files.block, codes, scales)
        if self._last != (part.packed, part.expert):
            matrix = self._get(part.packed)[part.expert]
            if part.scales is not None:
                matrix = decode_mxfp4(matrix, self._get(part.scales)[part.expert]).t()
            self._last, self._matrix = (part.packed, part.expert), matrix
        return part.cut(self._matrix)

    def _get(self, name: str) -> Any:
        """Open a tensor as stored, in its own file: MXFP4 scales may be in another file than their blocks."""
        file, stored = self._files.stored[name], self._files.names[name]
        if file not in self._handles:
            self._handles[file] = self.enter_context(safe_open(file, framework="pt"))
        return self._handles[file].get_slice(stored)


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode MXFP4 to bfloat16, [..., 32 g].

    Args:
        blocks: [..., g, 16] uint8, two 4-bit numbers per byte, lower bits first.
        scales: [..., g] uint8, exponents of 2 with a bias of 127.
    """
    numbers = torch.tensor([*_FP4, *(-x for x in _FP4)], device=blocks.device)
    values = torch.stack([numbers[(blocks & 15).int()], numbers[(blocks >> 4).int()]], -1).flatten(-2)
    return torch.ldexp(values, scales[..., None].int() - _BIAS).to(torch.bfloat16).flatten(-2)


_KEYS = (*MTP_KEYS, "mtp_num_hidden_layers")


def check_checkpoint(directory: str | Path, shape: ModelShape, may_lack: Collection[str] = ()) -> None:
    """Check tensors' headers against the config (UserError: missing, unless in `may_lack`, or of another kind)."""
    directory = Path(directory)
    files, wanted = ModelFiles(directory), shape.logical_tensors()
    _check_head(directory, files, shape, may_lack)
    wrong = [f"{name} is missing" for name in wanted if name not in files and name not in may_lack]
    for name, (found, _) in files.read_headers().items():
        expected = wanted.get(name, found)
        if found != expected:
            wrong.append(f"{name} is {list(found)}, config.json says {list(expected)}")
    refuse_mismatch(wrong, directory)


def refuse_mismatch(wrong: Sequence[str], directory: Path) -> None:
    """Refuse a checkpoint with tensors that do not match, if any; `wrong`: a phrase for each (UserError)."""
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
    wanted = [p for p in placements if p.hf_name in files or p.hf_name not in may_lack]
    for tensor in params.values():
        tensor.zero_()
    for _, held in groupby(sorted(wanted, key=lambda p: files[p.hf_name]), key=lambda p: files[p.hf_name]):
        with files.open() as handle:
            for p in held:
                piece = handle.get_slice(p.hf_name)[box_slices(p.hf_box)]
                params[p.param][box_slices(p.local_box)].copy_(piece)


@dataclass(frozen=True)
class ShardedModel:
    """A model whose weights are sharded over the ranks of a group."""

    shape: ModelShape
    shards: Sequence[Shard]
    params: Mapping[str, torch.Tensor]
    group: dist.ProcessGroup
    dtype: torch.dtype  # in files, except for router biases
    mtp: ModelShape | None = None  # the MTP layer, if `shards` and `params` contain it

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
        kept = [name for name in unit.tensors if name in drafts]
        tensors = gather_on_first(trained, model, bucket_bytes)
        tensors |= {copy: tensors[original].clone() for copy, original in copies.items() if copy in here and tensors}
        do_on_first(group, _write_tensors, tensors, here, kept, Path(side_files_from), partial / unit.file)
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
    tensors: Mapping[str, torch.Tensor],
    written: Mapping[str, FileTensor],
    kept: Sequence[str],
    initial: Path,
    path: Path,
) -> None:
    """Write a file of gathered tensors, and of those `kept` from the initial model."""
    from megatron_rl.weights.packed_experts import join_turns

    found = {}
    for name, tensor in written.items():
        experts = [join_turns([tensors[part].cpu() for part in turns]) for turns in tensor.experts]
        found[name] = torch.stack(experts) if experts else tensors[name].cpu()
    if kept:
        with ModelFiles(initial).open() as handle:
            found |= {name: handle.get_slice(name)[:] for name in kept}
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
    return {name: file for name, file in ModelFiles(directory).items() if shape.is_draft(name)}
