# SPDX-License-Identifier: Apache-2.0
"""HF -> Megatron -> HF: the same bits for every tensor of every family, through any layout.

Layouts are cut without processes: `load_weights` fills the parameters of each rank, and the placement tables merge
them. tests/models/test_gpt.py checks the computations of one rank.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from actor_runs import Case, build_actor
from checkpoint_runs import make_content, make_saver
from distributed import run_ranks
from megatron_rl.checkpoint.directory import find_problems
from megatron_rl.checkpoint.files import Unit
from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.checkpoint.pieces import load_weights
from megatron_rl.checkpoint.saving import SaveOutcome
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.build import build_engine
from megatron_rl.engines.protocol import EngineSpec, Request, SamplingConfig
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rollout.generation import generate
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.packed_experts import split_huggingface_experts
from megatron_rl.weights.shard_box import box_slices
from shards import find_differences, make_empty_shards, place_megatron
from tiny_models import ENGINE_SIZES, draw_tokens, save_tiny_model
from tools.conversion import conversion
from tools.conversion.conversion import CheckpointWeights, convert_to_huggingface, convert_to_megatron
from tools.conversion.units import Finished, Progress, Workers

LAYOUTS = {
    "tp2": ParallelLayout(2, tp_size=2),
    "tp4": ParallelLayout(4, tp_size=4),
    "pp2": ParallelLayout(2, pp_size=2),
    "pp4": ParallelLayout(4, pp_size=4),
    "pp2vpp2": ParallelLayout(2, pp_size=2, vpp_size=2),
    "tp2pp2": ParallelLayout(4, tp_size=2, pp_size=2),
}
EXPERT_LAYOUTS = {"ep2": ParallelLayout(2, ep_size=2), "tp2ep2": ParallelLayout(4, tp_size=2, ep_size=2)}
WRITE_DISTCP = conversion._write_distcp
SMALL = dict(num_hidden_layers=4, hidden_size=32, intermediate_size=48)


def import_model(source: Path, out: Path, **changes: Any) -> Path:
    settings = dict(dtype=None, file_bytes=1 << 16, force=False, workers=Workers()) | changes
    return convert_to_megatron(source, out, **settings)


def export_model(checkpoint: Path, out: Path, **changes: Any) -> Path:
    settings = dict(dtype=None, file_bytes=1 << 16, force=False, workers=Workers()) | changes
    source = {name: settings.pop(name) for name in ("role", "config", "verify") if name in settings}
    return convert_to_huggingface(CheckpointWeights(checkpoint, **source), out, **settings)


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load_through(directory: Path, source: Path, layout: ParallelLayout) -> dict[str, torch.Tensor]:
    """Load every rank of a layout, and merge their parameters."""
    shape = load_model_shape(source)
    whole = {name: torch.full(size, float("nan")) for name, size in shape.logical_tensors().items()}
    for placements in place_megatron(shape, layout):
        params = make_empty_shards(placements, padding_rows=3)
        load_weights(directory, shape, placements, params)
        for p in placements:
            whole[p.hf_name][box_slices(p.hf_box)] = params[p.param][box_slices(p.local_box)]
        for name, param in params.items():
            assert "embed" not in name or not param[-3:].any(), "padding rows are zero"
    return whole


@pytest.mark.parametrize(
    "family,changes",
    [
        *((family, {}) for family in FAMILIES),
        ("llama", dict(tie_word_embeddings=True)),
        ("qwen2", dict(tie_word_embeddings=False)),
        ("qwen3", dict(num_key_value_heads=8)),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(f"{k}={v}" for k, v in value.items()) or "base",
)
def test_there_and_back_through_all_layouts(family: str, changes: dict[str, Any], tmp_path: Path):
    save_tiny_model(tmp_path / "hf", family, **SMALL | changes)
    original = read_tensors(tmp_path / "hf")
    logical = split_huggingface_experts(load_model_shape(tmp_path / "hf"), original)
    import_model(tmp_path / "hf", tmp_path / "megatron")
    assert find_problems(tmp_path / "megatron") == []
    for name, layout in (LAYOUTS | (EXPERT_LAYOUTS if FAMILIES[family].experts else {})).items():
        found = load_through(tmp_path / "megatron", tmp_path / "hf", layout)
        assert find_differences(found, logical) == [], name
    export_model(tmp_path / "megatron", tmp_path / "back")
    assert find_differences(read_tensors(tmp_path / "back"), original) == []
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (tmp_path / "hf/config.json").read_text()
    )
    assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob(".units"))


@pytest.mark.parametrize(
    "family,sizes",
    [
        ("llama", dict(tp_size=4)),
        ("gemma", dict(pp_size=2, vpp_size=2)),
        ("qwen2", dict(tp_size=2, pp_size=2)),
        ("qwen3_moe", dict(ep_size=2)),
        ("gpt_oss", dict(ep_size=2)),
    ],
    ids=["tp4", "pp2vpp2", "tp2pp2", "ep2", "packed-ep2"],
)
def test_what_a_layout_saves_becomes_the_model(family: str, sizes: dict[str, int], tmp_path: Path):
    """Real ranks load the converted checkpoint as `model.path`, and save their shards as training does."""
    save_tiny_model(tmp_path / "hf", family)
    import_model(tmp_path / "hf", tmp_path / "megatron")
    layout = dict(sizes)
    world_size = math.prod(size for name, size in layout.items() if name != "vpp_size")

    def save(rank: int, world_size: int) -> None:
        actor = build_actor(Case(world_size, layout), tmp_path / "hf", weights=tmp_path / "megatron")
        outcomes: list[SaveOutcome] = []
        make_saver(tmp_path / "checkpoints", outcomes).save(make_content(tmp_path / "hf"), {"actor": actor})

    run_ranks(save, world_size, timeout=100)
    export_model(tmp_path / "checkpoints/step_1", tmp_path / "back")
    assert find_differences(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf")) == []


def _generate_with_vllm(rank: int, world_size: int, directory: Path, prompt: np.ndarray) -> tuple[list[str], list[int]]:
    """Names of parameters that vLLM's own reader and ours fill differently, and the greedy response."""
    requests, engine, *_ = build_engine(
        EngineSpec(
            model_path=str(directory),
            shape=load_model_shape(directory),
            dtype="float32",
            max_prompt_length=len(prompt),
            max_response_length=12,
            config=RolloutConfig(max_num_seqs=1),
            process=init_distributed(2),
            seed=0,
        )
    )
    engine.begin_weight_update()
    load_huggingface(directory, engine.placements(rank), engine.params)
    ours = {name: param.clone() for name, param in engine.params.items()}
    for param in engine.params.values():
        param.fill_(float("nan"))
    model = engine._llm.llm_engine.model_executor.driver_worker.worker.get_model()
    model.load_weights(read_tensors(directory).items())
    wrong = find_differences(dict(engine.params), ours)
    engine.end_weight_update()
    greedy = SamplingConfig(temperature=0.0, max_tokens=12, stop_token_ids=())
    (response,) = generate(requests, [Request(0, prompt, 0, greedy)])
    return wrong, response.tokens.tolist()


@pytest.mark.parametrize(
    "family,changes",
    [
        ("qwen2", {}),
        ("mixtral", {}),
        ("gemma", dict(tie_word_embeddings=False)),  # tied, it repeats one token forever
    ],
    ids=["qwen2", "mixtral", "gemma"],
)
def test_the_result_generates_the_same_tokens(
    family: str, changes: dict[str, Any], tmp_path: Path, vllm_imported: None
):
    """In transformers and in vLLM, each of which reads the directory by itself."""
    original = save_tiny_model(tmp_path / "hf", family, **ENGINE_SIZES, **changes)
    (tmp_path / "hf/tokenizer.model").write_bytes(b"a tokenizer")
    export_model(import_model(tmp_path / "hf", tmp_path / "megatron"), tmp_path / "back")
    assert (tmp_path / "back/tokenizer.model").read_bytes() == b"a tokenizer"
    assert (tmp_path / "back/model.safetensors.index.json").is_file()
    prompt = draw_tokens([6])[0]
    ids = torch.from_numpy(prompt)[None]
    expected, found = (
        model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=[])[0, 6:].tolist()
        for model in (original, AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval())
    )
    assert found == expected and len(set(expected)) > 1
    assert run_ranks(_generate_with_vllm, 1, tmp_path / "back", prompt, timeout=100) == [([], expected)]


def test_score_models_keep_their_head(tmp_path: Path):
    config = save_tiny_model(tmp_path / "lm", "llama", **SMALL).config
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "hf")
    export_model(import_model(tmp_path / "hf", tmp_path / "megatron"), tmp_path / "back")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    assert torch.equal(back.score.weight, load_file(tmp_path / "hf/model.safetensors")["score.weight"])


def test_types(tmp_path: Path):
    """Same type by default; another one on request, then recorded in config.json; biases of routers stay float32."""
    save_tiny_model(tmp_path / "routed", "glm4_moe", num_hidden_layers=2)
    import_model(tmp_path / "routed", tmp_path / "routed-megatron", dtype=torch.bfloat16)
    export_model(tmp_path / "routed-megatron", tmp_path / "routed-back", dtype=torch.bfloat16)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(read_tensors(tmp_path / "routed-back")[bias], read_tensors(tmp_path / "routed")[bias])
    save_tiny_model(tmp_path / "hf", "llama", **SMALL)
    original = read_tensors(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "megatron", dtype=torch.bfloat16)
    export_model(tmp_path / "megatron", tmp_path / "back")
    found = read_tensors(tmp_path / "back")
    assert find_differences(found, {name: x.bfloat16() for name, x in original.items()}) == []
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"
    export_model(tmp_path / "megatron", tmp_path / "wide", dtype=torch.float32)
    assert find_differences(read_tensors(tmp_path / "wide"), {k: x.float() for k, x in found.items()}) == []


def test_an_interrupted_conversion_goes_on(tmp_path: Path):
    """Finished files are not written again; half a file is, and so is everything after the source has changed."""
    save_tiny_model(tmp_path / "hf", "llama", **SMALL)
    whole = import_model(tmp_path / "hf", tmp_path / "whole")
    partial = tmp_path / "megatron.partial"

    class Interrupt:
        def begin(self, num_bytes: int) -> None:
            self.left = num_bytes // 2

        def advance(self, num_bytes: int) -> None:
            self.left -= num_bytes
            if self.left < 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_model(tmp_path / "hf", tmp_path / "megatron", progress=Interrupt())
    assert partial.is_dir() and not (tmp_path / "megatron").exists()
    with pytest.raises(UserError, match="holds no Megatron distributed checkpoint"):
        export_model(partial, tmp_path / "back")
    first = partial / "__0_0.distcp"
    times = first.stat().st_mtime_ns
    (partial / "__1_0.distcp").write_bytes(b"half")

    import_model(tmp_path / "hf", tmp_path / "megatron")
    assert (tmp_path / "megatron/__0_0.distcp").stat().st_mtime_ns == times
    assert find_problems(tmp_path / "megatron") == []
    for file in whole.glob("*.distcp"):
        assert file.read_bytes() == (tmp_path / "megatron" / file.name).read_bytes()

    with pytest.raises(KeyboardInterrupt):
        import_model(tmp_path / "hf", tmp_path / "megatron", force=True, progress=Interrupt())
    tensors = read_tensors(tmp_path / "hf")
    save_file({k: x + 1 for k, x in tensors.items()}, tmp_path / "hf/model.safetensors", {"format": "pt"})
    export_model(import_model(tmp_path / "hf", tmp_path / "megatron", force=True), tmp_path / "back")
    assert find_differences(read_tensors(tmp_path / "back"), {k: x + 1 for k, x in tensors.items()}) == []


def _write_half_and_die(unit: Unit, path: Path, progress: Progress, **settings: Any) -> Finished:
    if unit.file == "__1_0.distcp":
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return WRITE_DISTCP(unit, path, progress, **settings)


def test_a_killed_process_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_tiny_model(tmp_path / "hf", "llama", **SMALL)
    workers = Workers(processes=2)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_write_distcp", _write_half_and_die)
        with pytest.raises(UserError, match="a process of the conversion was killed"):
            import_model(tmp_path / "hf", tmp_path / "megatron", workers=workers)
    assert not (tmp_path / "megatron").exists() and (tmp_path / "megatron.partial/__1_0.distcp").is_file()
    export_model(import_model(tmp_path / "hf", tmp_path / "megatron", workers=workers), tmp_path / "back")
    assert find_differences(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf")) == []


def test_an_existing_output_stays(tmp_path: Path):
    save_tiny_model(tmp_path / "hf", "llama", **SMALL)
    import_model(tmp_path / "hf", tmp_path / "megatron")
    (tmp_path / "megatron/mine").touch()
    with pytest.raises(UserError, match="megatron exists"):
        import_model(tmp_path / "hf", tmp_path / "megatron")
    assert (tmp_path / "megatron/mine").is_file()
    import_model(tmp_path / "hf", tmp_path / "megatron", force=True)
    assert not (tmp_path / "megatron/mine").exists() and find_problems(tmp_path / "megatron") == []


def _convert_on_rank(rank: int, world_size: int, source: Path, out: Path) -> list[str]:
    import torch.distributed as dist

    workers = Workers(dist.group.WORLD)
    export_model(import_model(source, out, workers=workers), out.with_name("back"), workers=workers)
    return find_problems(out)


@pytest.mark.parametrize("how", ["ranks", "processes"])
def test_several_processes_share_the_work(how: str, tmp_path: Path):
    save_tiny_model(tmp_path / "hf", "llama", **SMALL)
    if how == "ranks":
        assert run_ranks(_convert_on_rank, 3, tmp_path / "hf", tmp_path / "megatron") == [[], [], []]
    else:
        workers = Workers(processes=2)
        import_model(tmp_path / "hf", tmp_path / "megatron", workers=workers)
        export_model(tmp_path / "megatron", tmp_path / "back", workers=workers)
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 2
    assert find_differences(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "hf")) == []


def change_tensors(directory: Path, change) -> None:
    tensors = read_tensors(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def change_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "damage,found",
    [
        (lambda d: change_config(d, model_type="unheard_of"), r"unknown architecture 'unheard_of'(.|\n)*qwen3_moe"),
        (lambda d: change_config(d, num_hidden_layers=5), r"model.layers.4.input_layernorm.weight is missing"),
        (lambda d: change_config(d, vocab_size=600), r"is \[517, 32\], config.json says \[600, 32\]"),
        (
            lambda d: change_config(d, num_hidden_layers=3),
            r"9 tensor\(s\) have no place in a llama model: model.layers.3",
        ),
        (lambda d: change_config(d, tie_word_embeddings=True), "lm_head.weight differs from model.embed_tokens.weight"),
        (
            lambda d: change_tensors(d, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].double()})),
            "model.norm.weight is stored as F64",
        ),
        (
            lambda d: change_tensors(
                d,
                lambda t: t.update(
                    {"model.layers.0.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"].half()}
                ),
            ),
            "tensors that become one differ in type",
        ),
        (lambda d: (d / "model.safetensors").unlink(), "has no weights"),
        (lambda d: shutil.rmtree(d), "there is no directory"),
    ],
    ids=["family", "missing", "vocabulary", "surplus", "tie", "float64", "mixed", "no-weights", "nothing"],
)
def test_a_model_that_does_not_fit_is_one_error(damage, found: str, tmp_path: Path):
    save_tiny_model(tmp_path / "hf", "llama", **SMALL)
    damage(tmp_path / "hf")
    with pytest.raises(UserError, match=found):
        import_model(tmp_path / "hf", tmp_path / "megatron")
    assert not list(tmp_path.glob("megatron*"))


def test_a_tied_head_that_is_stored_twice_is_accepted(tmp_path: Path):
    save_tiny_model(tmp_path / "hf", "qwen2", **SMALL)
    original = read_tensors(tmp_path / "hf")
    change_tensors(tmp_path / "hf", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    export_model(import_model(tmp_path / "hf", tmp_path / "megatron"), tmp_path / "back")
    assert find_differences(read_tensors(tmp_path / "back"), original) == []


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path):
    save_tiny_model(tmp_path / "hf", "llama", **SMALL)
    import_model(tmp_path / "hf", tmp_path / "megatron")
    file = tmp_path / "megatron/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="__0_0.distcp has another content than was written"):
        export_model(tmp_path / "megatron", tmp_path / "back")
    change_config(tmp_path / "megatron/config", vocab_size=600)
    with pytest.raises(UserError, match=r"word_embeddings.weight is \[517, 32\], config.json says \[600, 32\]"):
        export_model(tmp_path / "megatron", tmp_path / "back", verify=False)
    assert not list(tmp_path.glob("back*"))
