# SPDX-License-Identifier: Apache-2.0
"""The format: megatron-core reads our checkpoints and we read its own; damage is one clear error.

megatron-core's side is a plain `GPTModel` from its own layer spec (interleaved QKV, its own norms and attention) with
unchanged `dist_checkpointing`. Not covered: Transformer Engine's modules, which need a GPU.
"""

from __future__ import annotations

import enum
import io
import pickle
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import megatron_rl.parallel  # noqa: F401  before megatron.core
from distributed import run_ranks
from megatron_rl.checkpoint.torch_dist import ChunkReader, ChunkWriter, write_index
from megatron_rl.models.gpt import build_transformer_config
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import padded_vocab_size
from megatron_rl.weights.model_config import load_model_shape
from shards import find_differences
from tiny_models import VOCAB_SIZE, draw_tokens, save_tiny_model
from tools.conversion.conversion import CheckpointWeights, convert_to_huggingface, convert_to_megatron
from tools.conversion.units import Workers

TOKENS = torch.from_numpy(np.stack(draw_tokens([12, 12])))


def build_plain_model(shape: ModelShape, tp_size: int) -> tuple[torch.nn.Module, dict]:
    """Build megatron-core's own model on this rank, and the metadata that its checkpointing needs."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils

    groups = build_groups(ParallelLayout(tp_size, tp_size=tp_size))
    model_parallel_cuda_manual_seed(1, tp_rank=groups.at.tp, ep_rank=0, etp_rank=groups.at.tp)
    config = build_transformer_config(shape, groups.layout, dtype=torch.float32)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    if shape.num_experts:  # the local spec gives this norm a dense model's name; Transformer Engine's spec does not
        spec.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    config.perform_initialization, config.use_te_activation_func = True, False  # its layer spec has no activation
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 without TE: NameError in every router
    model = GPTModel(
        config,
        spec,
        vocab_size=padded_vocab_size(VOCAB_SIZE, tp_size),
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        pg_collection=groups.collection,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        parallel_output=False,
    )
    return model, dict(dp_cp_group=groups.collection.dp_cp)


def _score_on_rank(rank: int, tp_size: int, shape: ModelShape, directory: Path, copy: Path) -> torch.Tensor:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    model, metadata = build_plain_model(shape, tp_size)
    loaded = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata=metadata)}, str(directory), strict="log_unexpected"
    )
    outcome = model.load_state_dict(loaded["model"], strict=False)
    assert all(name.endswith("_extra_state") for name in outcome.missing_keys) and not outcome.unexpected_keys
    positions = torch.arange(TOKENS.shape[1])[None].expand(len(TOKENS), -1)
    with torch.no_grad():
        logits = model(TOKENS, positions, None)[..., :VOCAB_SIZE]
    copy.mkdir(exist_ok=True)
    filesystem_async._results_queue = queue.Queue()  # its own starts a process that imports this one again
    dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata)}, str(copy))
    return logits


def import_model(source: Path, out: Path) -> Path:
    return convert_to_megatron(source, out, dtype=None, file_bytes=1 << 18, force=False, workers=Workers())


@pytest.mark.parametrize("family,tp_size", [("qwen2", 2), ("llama", 1), ("qwen3_moe", 1)])
def test_megatron_core_reads_and_writes_the_same(family: str, tp_size: int, tmp_path: Path):
    """Its logits are transformers' own, and its saved checkpoint converts back to the same bits."""
    reference = save_tiny_model(tmp_path / "hf", family)
    shape = load_model_shape(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "megatron")
    logits = run_ranks(_score_on_rank, tp_size, shape, tmp_path / "megatron", tmp_path / "copy", timeout=100)
    with torch.no_grad():
        expected = reference(TOKENS).logits
    assert all(torch.allclose(found, expected, atol=2e-5) for found in logits)
    convert_to_huggingface(
        CheckpointWeights(tmp_path / "copy", config=tmp_path / "hf"),
        tmp_path / "back",
        dtype=None,
        file_bytes=1 << 30,
        force=False,
        workers=Workers(),
    )
    original = load_file(tmp_path / "hf" / "model.safetensors")
    assert find_differences(load_file(tmp_path / "back" / "model.safetensors"), original) == []
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").config.vocab_size == VOCAB_SIZE


def write_example(directory: Path) -> torch.Tensor:
    """A tensor [6, 5] in three irregular chunks over two files."""
    whole = torch.arange(30.0).view(6, 5)
    chunks, files = [], ((((0, 2), (0, 5)), ((2, 6), (0, 2))), (((2, 6), (2, 5)),))
    for number, boxes in enumerate(files):
        writer = ChunkWriter(directory / f"__{number}_0.distcp")
        for box in boxes:
            part = whole[tuple(slice(*pair) for pair in box)]
            writer.add("x", (6, 5), tuple(start for start, _ in box), part)
        writer.close()
        chunks += writer.chunks
    write_index(directory, chunks, {})
    return whole


@pytest.mark.parametrize("box", [((0, 6), (0, 5)), ((1, 4), (1, 3)), ((5, 6), (4, 5)), ((0, 1), (0, 5))], ids=str)
def test_any_box_is_read_from_irregular_chunks(box, tmp_path: Path):
    whole = write_example(tmp_path)
    part = whole[tuple(slice(*pair) for pair in box)]
    target = torch.full_like(part, -1)
    ChunkReader(tmp_path).read("x", box, target)
    assert torch.equal(target, part)


def test_large_tensors_become_several_chunks(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("megatron_rl.checkpoint.torch_dist.MAX_CHUNK_BYTES", 64)
    writer, stacked = ChunkWriter(tmp_path / "__0_0.distcp"), torch.randn(9, 5)
    writer.add("x", (2, 9, 5), (1, 0, 0), stacked)
    writer.add("x", (2, 9, 5), (0, 0, 0), -stacked)
    writer.close()
    assert [chunk.box[1] for chunk in writer.chunks[:3]] == [(0, 3), (3, 6), (6, 9)]
    write_index(tmp_path, writer.chunks, {})
    target = torch.empty(2, 9, 5)
    ChunkReader(tmp_path).read("x", ((0, 2), (0, 9), (0, 5)), target)
    assert torch.equal(target, torch.stack([-stacked, stacked]))


def test_what_is_missing_is_named(tmp_path: Path):
    write_example(tmp_path)
    reader = ChunkReader(tmp_path)
    with pytest.raises(UserError, match="y: the checkpoint holds 0 of the 4 elements"):
        reader.read("y", ((0, 4),), torch.empty(4))
    with pytest.raises(UserError, match="x: the checkpoint holds 5 of the 10 elements"):
        reader.read("x", ((5, 7), (0, 5)), torch.empty(2, 5))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage,found",
    [
        (Path.unlink, "__0_0.distcp is damaged: it is missing"),
        (_cut, r"__0_0.distcp is damaged: it ends at byte \d+, x needs byte \d+"),
    ],
    ids=["missing", "truncated"],
)
def test_damaged_chunks_are_named(damage, found: str, tmp_path: Path):
    """Without any digest. (A flipped byte shows in the digests only, see test_directory.py.)"""
    write_example(tmp_path)
    damage(tmp_path / "__0_0.distcp")
    with pytest.raises(UserError, match=found):
        ChunkReader(tmp_path).read("x", ((0, 6), (0, 5)), torch.empty(6, 5))


class _Evil:
    def __reduce__(self):
        return print, ("this must never run",)


class _EvilAttribute:
    """A method of an allowed class, by the name under which members of enums come."""

    def __reduce__(self):
        return getattr, (torch.Size, "numel")


class _OldPickler(pickle.Pickler):
    """Members of enums as Python 3.11.0 to 3.11.3 pickles them."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_of_an_early_python_3_11_is_read(tmp_path: Path):
    write_example(tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    content = io.BytesIO()
    _OldPickler(content).dump(metadata)
    assert b"getattr" in content.getvalue()
    (tmp_path / ".metadata").write_bytes(content.getvalue())
    assert ChunkReader(tmp_path).tensors["x"][0] == (6, 5)


def test_metadata_names_files_beside_it_only(tmp_path: Path):
    write_example(tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"metadata is damaged: it names '\.\./__0_0.distcp', no file beside it"):
        ChunkReader(tmp_path)


@pytest.mark.parametrize(
    "content,found",
    [
        (pickle.dumps(_Evil()), "it asks for builtins.print, which no checkpoint needs"),
        (pickle.dumps(_EvilAttribute()), "it asks for builtins.getattr, which no checkpoint needs"),
        (pickle.dumps({"a": 1}), "it does not hold the metadata of a checkpoint"),
        (b"", "Ran out of input"),
    ],
    ids=["code", "attribute", "other", "empty"],
)
def test_metadata_runs_no_code(content: bytes, found: str, tmp_path: Path, capsys):
    write_example(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=found):
        ChunkReader(tmp_path)
    assert "never run" not in capsys.readouterr().out
