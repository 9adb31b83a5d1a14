# SPDX-License-Identifier: Apache-2.0
"""HF safetensors in at any layout, and out again byte for byte."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from distributed import run_ranks
from megatron_rl.checkpoint import huggingface
from megatron_rl.checkpoint.files import split_units
from megatron_rl.checkpoint.huggingface import (
    INDEX_FILE,
    ShardedModel,
    check_checkpoint,
    index_safetensors,
    load_huggingface,
    name_safetensors,
    save_huggingface,
)
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.planner import group_shards
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES, Head
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.shard_box import box_volume
from shards import cut_shards, find_differences, make_empty_shards, place_megatron

SMALL_FILE = 10_000  # bytes; the models below are 40 to 50 kB
PADDING_ROWS = 5
SIZES = dict(
    num_hidden_layers=4,
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=70,
    max_position_embeddings=64,
)
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True, head_dim=6),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories that transformers wrote: `<family>` in one file, `<family> sharded` in several."""
    root, found = tmp_path_factory.mktemp("checkpoints"), {}
    for family, config in CONFIGS.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                torch.nn.init.normal_(parameter)  # not transformers' zeros and ones
        for name, limit in ((family, "1GB"), (f"{family} sharded", SMALL_FILE)):
            found[name] = root / name
            model.save_pretrained(found[name], max_shard_size=limit)
    assert (found["qwen2 sharded"] / INDEX_FILE).is_file() and not (found["qwen2"] / INDEX_FILE).is_file()
    return found


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of all safetensors files of a directory."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


class CountingFile:
    """A safetensors handle that records every read."""

    def __init__(self, handle: Any, read: dict[str, int]) -> None:
        self._handle, self._read = handle, read

    def __enter__(self) -> CountingFile:
        self._handle.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.__exit__(*error)

    def keys(self) -> list[str]:
        return self._handle.keys()

    def get_slice(self, name: str) -> Any:
        piece, read = self._handle.get_slice(name), self._read

        class Counting:
            def __getitem__(self, index: Any) -> torch.Tensor:
                tensor = piece[index]
                read[name] = read.get(name, 0) + tensor.numel()
                return tensor

        return Counting()


@pytest.mark.parametrize("name", ["qwen2", "qwen2 sharded", "qwen3", "qwen3 sharded"])
@pytest.mark.parametrize(
    "sizes",
    [
        dict(tp_size=1),
        dict(tp_size=2, pp_size=2),
        dict(tp_size=4),
        dict(tp_size=2, pp_size=2, vpp_size=2),
        dict(pp_size=4),
        dict(pp_size=2, vpp_size=2, chunk_layers=(0, 1, 3, 0)),
    ],
    ids=str,
)
def test_each_rank_reads_just_its_slices(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, sizes: dict[str, int]
) -> None:
    """Values, zeroed padding and the number of elements read; over 4 TP ranks the last has no tokens."""
    directory = checkpoints[name]
    shape, full = load_model_shape(directory), read_all(directory)
    read: dict[str, int] = {}
    opened = huggingface.safe_open
    monkeypatch.setattr(huggingface, "safe_open", lambda *a, **k: CountingFile(opened(*a, **k), read))
    layout = ParallelLayout(sizes.get("tp_size", 1) * sizes.get("pp_size", 1), **sizes)
    for placements in place_megatron(shape, layout):
        params = make_empty_shards(placements, padding_rows=PADDING_ROWS)
        read.clear()
        load_huggingface(directory, placements, params)
        assert find_differences(params, cut_shards(placements, full, PADDING_ROWS, fill=0.0)) == []
        wanted: dict[str, int] = {}
        for p in placements:
            wanted[p.hf_name] = wanted.get(p.hf_name, 0) + box_volume(p.hf_box)
        assert {k: v for k, v in read.items() if v} == {k: v for k, v in wanted.items() if v}


def test_values_are_converted_to_the_parameters_dtype(checkpoints: dict[str, Path]) -> None:
    directory = checkpoints["llama"]
    placements = place_megatron(load_model_shape(directory), ParallelLayout(1))[0]
    params = make_empty_shards(placements, torch.bfloat16)
    load_huggingface(directory, placements, params)
    rounded = {name: tensor.bfloat16() for name, tensor in read_all(directory).items()}
    assert find_differences(params, cut_shards(placements, rounded)) == []


@pytest.mark.parametrize("name", ["qwen2", "qwen2 sharded", "qwen3 sharded", "llama"])
def test_a_whole_checkpoint_is_accepted(checkpoints: dict[str, Path], name: str) -> None:
    directory = checkpoints[name]
    shape = load_model_shape(directory)
    check_checkpoint(directory, shape)
    files = index_safetensors(directory)
    assert files.keys() == shape.logical_tensors().keys()
    assert (len(set(files.values())) > 1) is ("sharded" in name)


def test_tensors_that_are_missing_or_have_another_shape_are_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tensors = read_all(checkpoints["llama"])
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = torch.zeros(69, 24)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="2 tensor.s. do not match") as caught:
        check_checkpoint(str(tmp_path), load_model_shape(checkpoints["llama"]))
    assert "model.norm.weight is missing" in caught.value.found
    assert "lm_head.weight is [69, 24], config.json says [70, 24]" in caught.value.found


def test_directories_without_all_their_files_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no weights"):
        index_safetensors(tmp_path)
    index = json.loads((checkpoints["qwen2 sharded"] / INDEX_FILE).read_text())
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(UserError, match="of the model are missing: model-00001-of"):
        index_safetensors(tmp_path)


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with a score head as transformers writes them, by their peculiarity."""
    root, found = tmp_path_factory.mktemp("scorers"), {}
    for name, auto_class, num_labels in (
        ("sequence", AutoModelForSequenceClassification, 1),
        ("two labels", AutoModelForSequenceClassification, 2),
        ("token", AutoModelForTokenClassification, 1),
    ):
        config = Qwen2Config(**SIZES, tie_word_embeddings=True, num_labels=num_labels)
        found[name] = root / name
        auto_class.from_config(config, dtype=torch.float32).save_pretrained(found[name])
    return found


def rewrite(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a one-file checkpoint whose tensors `change` has edited."""
    tensors = read_all(source)
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


@pytest.mark.parametrize("name", ["sequence", "token"])
def test_score_heads_are_read_on_every_tp_rank_of_the_last_stage(scorers: dict[str, Path], name: str) -> None:
    """A token classification's bias of zero (here as transformers draws it) is no hindrance."""
    directory = scorers[name]
    shape, full = load_model_shape(directory, head="score"), read_all(directory)
    check_checkpoint(directory, shape)
    tables = place_megatron(shape, ParallelLayout(4, tp_size=2, pp_size=2))
    for rank, placements in enumerate(tables):
        params = make_empty_shards(placements, padding_rows=PADDING_ROWS)
        load_huggingface(directory, placements, params)
        assert ("0.score.weight" in params) is (rank >= 2)
        assert find_differences(params, cut_shards(placements, full, PADDING_ROWS, fill=0.0)) == []
    assert full["score.weight"].any()


def test_a_missing_head_is_an_error_or_zero_as_asked(checkpoints: dict[str, Path]) -> None:
    """Only tensors of `may_lack` may be missing: another missing tensor is still named."""
    directory = checkpoints["qwen3"]
    shape = load_model_shape(directory, head="score")
    with pytest.raises(UserError, match="there is no score.weight") as caught:
        check_checkpoint(directory, shape)
    assert caught.value.expected == "a Qwen3ForSequenceClassification with one label"
    check_checkpoint(directory, shape, may_lack=("score.weight",))
    placements = place_megatron(shape, ParallelLayout(1))[0]
    params = make_empty_shards(placements)
    with pytest.raises(KeyError):
        load_huggingface(directory, placements, params)
    load_huggingface(directory, placements, params, may_lack=("score.weight",))
    assert not params["0.score.weight"].any()
    full = read_all(directory) | {"score.weight": torch.zeros(1, 24)}
    assert find_differences(params, cut_shards(placements, full)) == []


def test_heads_of_another_kind_are_refused(
    scorers: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A score head instead of a language model (by its tensors alone), two labels, and a bias."""
    tied = load_model_shape(checkpoints["qwen3"])  # lacks nothing in a scorer: there is no lm_head to miss
    head = {"score.weight": torch.ones(1, 24)}
    language = rewrite(checkpoints["qwen3"], tmp_path / "extra", lambda x: x.update(head))
    with pytest.raises(UserError, match="there is a score.weight") as caught:
        check_checkpoint(language, tied)
    assert caught.value.expected == "a Qwen3ForCausalLM" and "critic.path" in caught.value.hint
    for may_lack in ((), ("score.weight",)):
        with pytest.raises(UserError, match=r"(?s)score.weight is \[2, 24\].*\[1, 24\].*num_labels=1"):
            check_checkpoint(scorers["two labels"], load_model_shape(scorers["two labels"], "score"), may_lack)
    shifted = rewrite(scorers["token"], tmp_path / "bias", lambda x: x["score.bias"].fill_(0.5))
    with pytest.raises(UserError, match=r"score.bias is \[0.5\]"):
        check_checkpoint(shifted, load_model_shape(shifted, head="score"))


@pytest.mark.parametrize("source", ["sequence", "qwen2", "qwen3 sharded"])
def test_four_ranks_write_a_sequence_classification(
    scorers: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path, source: str
) -> None:
    """From a model of its kind every tensor comes back; from a language model it becomes one, with a head of zeros."""
    source_path, target = (scorers | checkpoints)[source], tmp_path / "model"

    def save(rank: int, world_size: int) -> str:
        return save_from_ranks(
            rank, world_size, source_path, target, dict(tp_size=2, pp_size=2), torch.float32, head="score"
        )

    assert run_ranks(save, 4, timeout=90) == [""] * 4
    shape, config = load_model_shape(target, head="score"), json.loads((target / "config.json").read_text())
    assert config["architectures"] == [FAMILIES[shape.family].scoring_architecture] and config["num_labels"] == 1
    check_checkpoint(target, shape)
    wanted = {"score.weight": torch.zeros(1, 24)} | read_all(source_path)
    assert find_differences(read_all(target), {name: wanted[name] for name in shape.logical_tensors()}) == []
    loaded, info = AutoModelForSequenceClassification.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and loaded.config.num_labels == 1
    assert torch.equal(loaded.score.weight, wanted["score.weight"])


def save_from_ranks(
    rank: int,
    world_size: int,
    source: Path,
    target: Path,
    sizes: dict[str, int],
    dtype: torch.dtype,
    head: Head = "lm",
    **options: Any,
) -> str:
    """Load the checkpoint on every rank and write it again; the error's text, or nothing."""
    shape = load_model_shape(source, head)
    tables = place_megatron(shape, ParallelLayout(world_size, **sizes))
    shards = group_shards(lambda r: tables[r], lambda r: r, range(world_size))
    params = make_empty_shards(tables[rank], dtype, PADDING_ROWS)
    load_huggingface(source, tables[rank], params, may_lack=("score.weight",))
    try:
        written = save_huggingface(
            target,
            ShardedModel(shape, shards, params, dist.group.WORLD, next(iter(params.values())).dtype),
            side_files_from=source,
            bucket_bytes=2000,
            **options,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert written == target and target.is_dir()
    return ""


@pytest.mark.parametrize("max_file_bytes", [SMALL_FILE, 4 << 30], ids=["many files", "one file"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2", dict(tp_size=2, pp_size=2)),
        ("qwen3", dict(tp_size=2, pp_size=2)),
        ("llama", dict(tp_size=4)),
        ("qwen3", dict(pp_size=2, vpp_size=2, chunk_layers=(0, 2, 1, 1))),
    ],
)
def test_four_ranks_write_what_transformers_wrote(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, sizes: dict[str, int], max_file_bytes: int
) -> None:
    """Equal bytes of every tensor, side files, and a directory that transformers loads; tokenizers are not covered."""
    source, target = checkpoints[family], tmp_path / "deep" / "model"

    def save(rank: int, world_size: int) -> str:
        return save_from_ranks(rank, world_size, source, target, sizes, torch.float32, max_file_bytes=max_file_bytes)

    assert run_ranks(save, 4, timeout=90) == [""] * 4
    assert find_differences(read_all(target), read_all(source)) == []
    assert (target / "config.json").read_text() == (source / "config.json").read_text()
    assert (target / "generation_config.json").is_file() and [d.name for d in target.parent.iterdir()] == ["model"]
    files = sorted(target.glob("*.safetensors"))
    if max_file_bytes == SMALL_FILE:
        index = json.loads((target / INDEX_FILE).read_text())["weight_map"]
        assert len(files) > 3 and {target / file for file in index.values()} == set(files)
        for file in files:
            tensors = load_file(file)
            assert {index[name] for name in tensors} == {file.name}
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= SMALL_FILE
    else:
        assert [file.name for file in files] == ["model.safetensors"] and not (target / INDEX_FILE).exists()
    check_checkpoint(target, load_model_shape(target))
    ids = torch.arange(12)[None]
    logits = [AutoModelForCausalLM.from_pretrained(directory)(ids).logits for directory in (source, target)]
    assert torch.equal(*logits)


def test_bfloat16_is_written_as_bfloat16_and_an_older_directory_replaced(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source, target = checkpoints["llama"], tmp_path / "model"
    for directory in (target, tmp_path / "model.partial"):  # of an older and of an interrupted run
        directory.mkdir()
        (directory / "model-00001-of-00002.safetensors").write_text("stale")

    def save(rank: int, world_size: int) -> str:
        return save_from_ranks(rank, world_size, source, target, dict(tp_size=2), torch.bfloat16)

    assert run_ranks(save, 2, timeout=60) == ["", ""]
    rounded = {name: tensor.bfloat16() for name, tensor in read_all(source).items()}
    assert find_differences(read_all(target), rounded) == []
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def fail_writing(error: Exception, number: int) -> Callable[[], None]:
    """Makes the file with this number fail, in the process that calls the result."""

    def patch() -> None:
        real, calls = huggingface.save_file, []

        def save(*args: Any, **kwargs: Any) -> None:
            calls.append(None)
            if len(calls) == number:
                raise error
            real(*args, **kwargs)

        huggingface.save_file = save

    return patch


def fail_copying() -> None:
    """Makes the copy of the side files fail."""

    def copy(*args: Any) -> None:
        raise PermissionError("no right to copy")

    huggingface.copy_side_files = copy


def fail_renaming() -> None:
    """Makes the last move fail, when the old directory has had to make way."""
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(source).suffix == ".partial":
            raise OSError(5, "Input/output error")
        real(source, target)

    os.replace = replace


def fail_allocating() -> None:
    """Makes the second allocation on rank 0 fail."""
    real, calls = torch.empty, []

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 2 and dist.get_rank() == 0:
            raise MemoryError("none is left")
        return real(*args, **kwargs)

    huggingface.torch = SimpleNamespace(**vars(torch) | {"empty": empty})


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        (fail_writing(OSError(28, "No space left on device"), 1), "OSError: [Errno 28] No space left"),
        (fail_writing(SafetensorError("I/O error: No space left"), 2), "SafetensorError: I/O error: No space left"),
        (fail_copying, "PermissionError: no right to copy"),
        (fail_renaming, "OSError: [Errno 5] Input/output error"),
        (fail_allocating, "MemoryError: none is left"),
    ],
    ids=["first file", "second file, as safetensors says it", "side files", "rename", "memory"],
)
def test_a_failing_write_raises_everywhere_and_leaves_the_old_directory(
    checkpoints: dict[str, Path], tmp_path: Path, patch: Callable[[], None], expected: str
) -> None:
    """Rank 0 fails; no other rank waits for it, and the directory keeps its files."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("kept")

    def save(rank: int, world_size: int) -> str:
        patch()
        return save_from_ranks(
            rank, world_size, checkpoints["qwen2"], target, dict(tp_size=2), torch.float32, max_file_bytes=SMALL_FILE
        )

    errors = run_ranks(save, 2, timeout=60)
    assert all(error.startswith(expected) for error in errors), errors
    assert [path.name for path in target.iterdir()] == ["old"]


def test_a_place_that_cannot_be_written_raises_everywhere(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")

    def save(rank: int, world_size: int) -> str:
        target = tmp_path / "file" / "model"
        return save_from_ranks(rank, world_size, checkpoints["qwen2"], target, dict(tp_size=2), torch.float32)

    for error in run_ranks(save, 2, timeout=60):
        assert error.startswith(("NotADirectoryError", "FileExistsError"))


def test_the_split_into_files_keeps_order_and_bound(checkpoints: dict[str, Path]) -> None:
    shapes = load_model_shape(checkpoints["qwen2"]).logical_tensors()
    sizes = {name: 4 * torch.Size(size).numel() for name, size in shapes.items()}
    for limit in (1, 5000, SMALL_FILE, 1 << 30):
        units = split_units(sizes, limit, name_safetensors)
        assert [name for unit in units for name in unit.tensors] == list(sizes)
        for unit in units:
            assert unit.num_bytes == sum(sizes[name] for name in unit.tensors)
            assert len(unit.tensors) == 1 or unit.num_bytes <= limit
    assert len(split_units(sizes, 1, name_safetensors)) == len(sizes)
