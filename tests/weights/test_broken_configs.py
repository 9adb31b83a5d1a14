# SPDX-License-Identifier: Apache-2.0
"""Broken config.json files: the dry run and the start refuse each with the same four parts.

The tables hold values that hand-written, cut-off and generated files have had. Not covered: keys that only a library
reads (`attention_dropout`, say), and sizes that are right and do not fit the weights (tests/checkpoint).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.run.inputs import read_rl_inputs
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.model_config import MOST_MATRICES, load_model_shape
from megatron_rl.weights.rollout_layout import check_engine
from rl_runs import overrides_for
from shards import make_shape
from tiny_models import _FAMILY_SIZES, CONFIGS

ROOT = Path(__file__).resolve().parents[2]
NAN, INF, DEEP = float("nan"), float("inf"), "[" * 100_000 + "]" * 100_000
# Of the policy, a qwen2 model: key -> values that are refused, each by the key's name.
VALUES: dict[str, list[Any]] = {
    "num_hidden_layers": ["2", 0, -2, 2.0, True, None, [2], {}, 10_000_000, 1 << 40],
    "hidden_size": ["128", 0, -128, 128.5, None, 1 << 31, NAN],
    "intermediate_size": ["192", 0, -1, None],
    "num_attention_heads": [0, "4", -4, None, 5, 1e3],
    "num_key_value_heads": [0, "2", -2, 3, 2.0],
    "head_dim": [0, 33, "32", -32, 64],
    "vocab_size": [0, "19", None, -19],
    "max_position_embeddings": [None, 0, "256", 1, INF, -256],
    "rms_norm_eps": ["abc", NAN, INF, 0, -1e-6, None, True, 1e300, 1e-300],
    "initializer_range": ["0.02", -0.02, NAN, INF, True],
    "rope_theta": ["1e4", 0, -1.0, NAN, 1.0, [1e4]],
    "rope_scaling": [5, "yarn", [], {"rope_type": 5}, {"rope_type": ["yarn"]}, {"rope_type": "dynamic", "factor": 2.0}],
    "rope_parameters": [
        5,
        "default",
        [1],
        {"full_attention": 5},
        {"rope_theta": "x"},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": None},
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": NAN},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "64"},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1},
        {"rope_type": "yarn", "factor": 4.0, "truncate": "no"},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e20},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e308},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1e300, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 1e-300},
        {"rope_type": "linear", "factor": 1e-300},
        {"rope_type": "llama3", "factor": 1e-300, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1e-300] * 16, "long_factor": [1.0] * 16},
        {"rope_type": "longrope", "short_factor": [], "long_factor": []},
        {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]},
        {"rope_type": "longrope", "short_factor": 2.0},
        {"rope_type": "longrope", "short_factor": ["a"] * 16, "original_max_position_embeddings": 64},
        {"partial_rotary_factor": 2.0},
    ],
    "tie_word_embeddings": ["yes", 1, []],
    "hidden_act": [5, "relu", ["silu"]],
    "architectures": [5, "Qwen2ForCausalLM", [1], [None]],
    "layer_types": [5, [1, 2], ["full_attention"]],
    "model_type": [5, None, ["qwen2"], "mamba", ""],
    "quantization_config": ["fp8", {"quant_method": "fp8"}],
}
# Whole files.
FILES = {
    "empty": b"",
    "cut": b'{"model_type": "qwen2", "hidden',
    "a list": b"[1, 2]",
    "a text": b'"qwen2"',
    "null": b"null",
    "no text": b"\xff\xfe\x00{",
    "deep": f'{{"a": {DEEP}}}'.encode(),
    "deep objects": b'{"a":' * 100_000,
    "long number": b'{"hidden_size": ' + b"9" * 5000 + b"}",
}
# Families -> keys that only they have -> values.
OF_FAMILIES: dict[str, dict[str, list[Any]]] = {
    "qwen3": {"head_dim": [0, 33, "16"], "hidden_size": ["64"]},
    "qwen3_moe": {
        "num_experts": [0, "4", 1, 10_000_000],
        "num_experts_per_tok": [0, 5, "2", None],
        "moe_intermediate_size": [0, None, "64"],
        "norm_topk_prob": ["true", 3],
    },
    "mixtral": {"num_local_experts": [0, "4", None], "sliding_window": [0, "6", -6]},
    "gemma3_text": {
        "sliding_window": [None, 0, "6"],
        "query_pre_attn_scalar": [0, "24", None, -1],
        "layer_types": [["sliding_attention"], ["chunked_attention"] * 4, "sliding_attention"],
        "rope_parameters": [{"sliding_attention": 5}, {"full_attention": {"rope_theta": "x"}}],
    },
    "gemma4_text": {
        "per_layer_config": [5, {"1": 5}, {"1": {"head_dim": 0}}, {"x": {}}, {"1": {"head_dim": None}}],
        "global_head_dim": [0, "16"],
        "num_global_key_value_heads": [0, "4"],
        "attention_k_eq_v": ["true", 3],
        "final_logit_softcapping": [0, "30", -1, NAN],
        "sliding_window": [None, 0, "6"],
        "hidden_size_per_layer_input": [-1, "0"],
        "num_kv_shared_layers": ["0", 1],
        "rope_parameters": [{"sliding_attention": 5}, {"full_attention": {"rope_theta": "x"}}],
    },
    "phi3": {"partial_rotary_factor": [0, "1", 1.5, -0.5], "rope_parameters": [{"partial_rotary_factor": 0.1}]},
    "smollm3": {"no_rope_layers": [5, [1], ["1"] * 4, [-1] * 4]},
    "glm4_moe": {
        "n_routed_experts": [0, "4", None],
        "first_k_dense_replace": [-1, 9, "1"],
        "n_group": ["1", 3],
        "routed_scaling_factor": ["1", NAN, 0],
        "n_shared_experts": [-1, "2"],
    },
    "deepseek_v3": {
        "kv_lora_rank": [0, "40"],
        "qk_rope_head_dim": [0, 7, "8"],
        "v_head_dim": [0, None],
        "q_lora_rank": ["24", -1],
        "topk_group": [8, "2"],
    },
    "qwen3_next": {
        "linear_num_key_heads": [0, 3, "4"],
        "linear_conv_kernel_dim": [0, None],
        "layer_types": [["linear_attention"], [1, 2, 3, 4]],
        "shared_expert_intermediate_size": [0, "96"],
    },
    "gpt_oss": {"sliding_window": [0, None, "6"], "quantization_config": [5, "mxfp4"]},
}


def check_parts(error: UserError) -> None:
    for part in (error.found, error.source, error.expected, error.hint):
        assert part and len(part) < 800
    assert "config.json" in error.source


@pytest.fixture(scope="module")
def broken(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the task whose model's config.json is rewritten by each test."""
    directory = tmp_path_factory.mktemp("broken") / "task"
    shutil.copytree(task, directory)
    return directory


def write(task: Path, broken: Path, **changes: Any) -> None:
    config = json.loads((task / "model/config.json").read_text())
    if "rope_theta" in changes or "rope_scaling" in changes:
        config.pop("rope_parameters", None)  # which comes first
    (broken / "model/config.json").write_text(json.dumps(config | changes))


def test_there_are_at_least_a_hundred() -> None:
    number = sum(map(len, VALUES.values())) + len(FILES)
    assert number + sum(len(values) for keys in OF_FAMILIES.values() for values in keys.values()) >= 150


@pytest.mark.parametrize("key", VALUES)
def test_values_are_refused_by_name(key: str, task: Path, broken: Path, tmp_path: Path) -> None:
    """By the function that the dry run and the start call, in a fraction of a second each."""
    config = load_config(None, overrides_for(broken, tmp_path / "run")).config
    for value in VALUES[key]:
        write(task, broken, **{key: value})
        started = time.process_time()
        with pytest.raises(UserError) as caught:
            read_rl_inputs(config, 1)
        assert time.process_time() - started < 5, value
        check_parts(caught.value)
        spoken = {"num_attention_heads": "heads", "num_key_value_heads": "KV heads", "num_hidden_layers": "layers"}
        words = (key, spoken.get(key, key), "rope", "factor", "architecture", "truncate", "beta_fast", "channels")
        assert any(word in str(caught.value) for word in words), (value, caught.value)


@pytest.mark.parametrize("case", FILES)
def test_files_are_refused(case: str, broken: Path, tmp_path: Path) -> None:
    (broken / "model/config.json").write_bytes(FILES[case])
    with pytest.raises(UserError, match="holds no JSON object") as caught:
        read_rl_inputs(load_config(None, overrides_for(broken, tmp_path / "run")).config, 1)
    check_parts(caught.value)


@pytest.mark.parametrize("family", OF_FAMILIES)
def test_values_of_families_are_refused(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict(
        vocab_size=517,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    CONFIGS[family](**(sizes | _FAMILY_SIZES[family])).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    load_model_shape(tmp_path)
    for key, values in OF_FAMILIES[family].items():
        for value in values:
            (tmp_path / "config.json").write_text(json.dumps(whole | {key: value}))
            with pytest.raises(UserError) as caught:
                load_model_shape(tmp_path)
            check_parts(caught.value)


@pytest.mark.parametrize("key", ["num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "vocab_size"])
def test_absent_keys_are_named(key: str, task: Path, broken: Path) -> None:
    write(task, broken)
    config = json.loads((broken / "model/config.json").read_text())
    del config[key]
    (broken / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"key '{key}' is missing") as caught:
        load_model_shape(broken / "model")
    check_parts(caught.value)


def test_the_bound_on_layers_is_exact(task: Path, broken: Path) -> None:
    """Tensors are not listed before the check: the names alone would take minutes."""
    write(task, broken, num_hidden_layers=MOST_MATRICES, layer_types=None)
    assert load_model_shape(broken / "model").num_layers == MOST_MATRICES
    write(task, broken, num_hidden_layers=MOST_MATRICES + 1, layer_types=None)
    with pytest.raises(UserError, match="100,001 layers with 1 experts"):
        load_model_shape(broken / "model")


# Refused by a library, an engine or the machine -> changes of config.json, settings, and words.
BEHIND_CONFIG: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a text for a number": ({"attention_dropout": "x"}, [], "transformers cannot read it"),
    "no token ids": ({"eos_token_id": [1, "a"]}, [], "transformers cannot read it"),
    "no type": ({"dtype": "float99"}, [], "transformers cannot read it"),
    "padding outside": ({"pad_token_id": 9999}, ["rollout.engine=hf"], "Padding_idx must be within"),
    "windows": ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}, [], "layer_types"),
    "large rank": (
        {},
        ["actor.lora.rank=1024", "hybrid.lora=adapter", "rollout.engine=vllm"],
        "vLLM serves adapters up to rank 512",
    ),
}


@pytest.mark.parametrize("case", BEHIND_CONFIG)
def test_what_an_engine_refuses_is_refused_before(case: str, task: Path, broken: Path, tmp_path: Path) -> None:
    changes, settings, words = BEHIND_CONFIG[case]
    write(task, broken, **changes)
    with pytest.raises(UserError) as caught:
        read_rl_inputs(load_config(None, overrides_for(broken, tmp_path / "run", *settings)).config, 1)
    assert words in caught.value.found
    assert caught.value.source and caught.value.expected and caught.value.hint


@pytest.mark.parametrize("is_launched", [True, False])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("actor.step_mode=graph", "actor.step_mode = graph, but there is no CUDA device"),
        ("model.transformer_impl=transformer_engine", "Transformer Engine is not usable here"),
    ],
)
def test_the_machine_is_checked_where_ranks_were_started(
    setting: str, words: str, is_launched: bool, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is for another machine, perhaps: there it is a note. No GPU is here, as everywhere in this tier."""
    monkeypatch.delenv("RANK", raising=False)
    if is_launched:
        monkeypatch.setenv("RANK", "0")
    config = load_config(None, overrides_for(task, tmp_path / "run", setting)).config
    if is_launched:
        with pytest.raises(UserError, match=words):
            read_rl_inputs(config, 1)
    else:
        assert any(f"this machine could not start the run: {words}" in note for note in read_rl_inputs(config, 1).notes)


def test_codes_of_experts_are_refused_for_every_device() -> None:
    """In the dry run; vLLM's kernels of experts accept none."""
    experts = make_shape("qwen3_moe")
    with pytest.raises(UserError, match="rollout.quantization=fp8 with a mixture of experts"):
        check_engine(experts, "vllm", "fp8")
    adapters = AdapterShape(experts, 8, 1.0, ("gate",))
    with pytest.raises(UserError, match="adapters of experts"):
        check_engine(experts, "vllm", "none", adapters)


CASES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a value": ({"num_hidden_layers": "2"}, [], "num_hidden_layers = '2'"),
    "a key of the engine": ({"attention_dropout": "x"}, [], "transformers cannot read it"),
    "a model that the engine cannot build": ({"pad_token_id": 9999}, [], "Padding_idx"),
    "graphs without a GPU": ({}, ["actor.step_mode=graph"], "actor.step_mode = graph, but there is no CUDA device"),
    "an adapter": ({}, ["actor.lora.rank=4", "actor.lora.path={adapter}"], "holds no JSON object"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_end_with_one_message(case: str, task: Path, broken: Path, tmp_path: Path) -> None:
    """The real program; the dry run that torchrun starts prints the same."""
    changes, settings, words = CASES[case]
    write(task, broken, **changes)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("[")
    arguments = overrides_for(broken, tmp_path / "run", "rollout.engine=hf", *settings)
    arguments = [argument.replace("{adapter}", str(tmp_path)) for argument in arguments]
    errors = []
    for flags in ([], ["--dry-run"]):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, "launch/pretrain_grpo.py", *arguments, *flags],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        said = done.stderr
        assert said.count("error: ") == 1 and "error on rank" not in said and words in said, said[-3000:]
        for part in ("source:", "expected:", "hint:"):
            assert said.count(part) == 1
        errors.append(said.partition("error: ")[2].partition("\n  hint:")[0])
    assert errors[0] == errors[1]
