# SPDX-License-Identifier: Apache-2.0
"""Adapter directories: every setting of PEFT is accepted with a reason or refused by name; broken files are refused.

The adapters are PEFT's own. tests/training/test_lora.py compares the computations of accepted ones with PEFT; not
covered: settings of later versions of PEFT, which are refused unless they are off.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from safetensors.torch import load_file, save_file
from tiny_adapters import adapted, save_adapted

from megatron_rl.checkpoint.peft import check_adapters
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import AdapterShape, make_adapter_shape
from megatron_rl.weights.model_config import load_model_shape

WEIGHTS, CONFIG, SOURCE = "adapter_model.safetensors", "adapter_config.json", "actor.lora.path"
OFF: list[Any] = [None, False, {}, [], ""]
# Setting of PEFT -> values that are accepted, and values that are refused.
SETTINGS: dict[str, tuple[list[Any], list[Any]]] = {
    "task_type": (["CAUSAL_LM", None], []),
    "peft_type": (["LORA"], ["IA3", "ADALORA", None, ["LORA"]]),
    "auto_mapping": ([None, {"base_model_class": "LlamaForCausalLM"}], []),
    "peft_version": (["0.21.2", None], []),
    "base_model_name_or_path": (["some/model", None], []),
    "revision": (["main", None], []),
    "inference_mode": ([True, False], []),
    "r": ([4], [8, 0, -4, "4", 4.0, True, None, [4], 1 << 40]),
    "lora_alpha": ([8, 8.0], [4, 0, -8, "8", True, None, float("inf"), float("nan")]),
    "use_rslora": ([False, None], [True, "true", 3, []]),
    "lora_dropout": ([0.0, 0.05], []),
    "bias": (["none", None], ["all", "lora_only", True]),
    "init_lora_weights": (
        [True, False, None, "gaussian", "orthogonal", "eva"],
        ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "mica", "new", ["gaussian"]],
    ),
    "target_modules": (["all-linear", ["q_proj"], None], []),  # visible in the tensors
    "exclude_modules": ([None, ["lm_head"]], []),
    "layers_to_transform": ([None, [0, 1]], []),
    "layers_pattern": ([None, "layers"], []),
    "megatron_config": ([None, {"hidden_size": 64}], []),
    "megatron_core": (["megatron.core", None], []),
    "loftq_config": ([{}, {"loftq_bits": 4}], []),  # of initializations, which `init_lora_weights` names
    "eva_config": ([None, {"rho": 2.0}], []),
    "corda_config": ([None, {"corda_method": "ipm"}], []),
    "lora_ga_config": ([None, {"direction": "ArB2r"}], []),
    "velora_config": ([None, {"rank": 1}], []),  # of the backward pass
    "qalora_group_size": ([16, 32], []),  # of use_qalora
    "fan_in_fan_out": (OFF, [True]),
    "modules_to_save": (OFF, [["embed_tokens"], ["lm_head"], ["score"], "lm_head", 5]),
    "rank_pattern": (OFF, [{"q_proj": 8}, {"q_proj": 4}]),
    "alpha_pattern": (OFF, [{"q_proj": 16}, {"^model.layers.0": 8}]),
    "trainable_token_indices": (OFF, [[0, 1], {"embed_tokens": [3]}]),
    "use_dora": (OFF, [True]),
    "alora_invocation_tokens": (OFF, [[5, 6]]),
    "use_qalora": (OFF, [True]),
    "monteclora_config": (OFF, [{"num_samples": 2}]),
    "layer_replication": (OFF, [[[0, 2], [1, 2]]]),
    "lora_bias": (OFF, [True]),
    "target_parameters": (OFF, [["experts.gate_up_proj"]]),
    "use_bdlora": (OFF, [{"nblocks": 2}]),
    "arrow_config": (OFF, [{"top_k": 3}]),
    "kasa_config": (OFF, [{"beta": 1e-4}]),
    "ensure_weight_tying": (OFF, [True]),
    "a_later_setting": (OFF, [True, 1, "on", {"a": 1}, [0]]),
}
NOT_SAVED = {"runtime_config"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    save_adapted(directory, "qwen3", num_hidden_layers=1)
    return directory


@pytest.fixture
def adapter(whole: Path, tmp_path: Path) -> Path:
    """A copy of the saved adapters that a test may damage."""
    shutil.copytree(whole / "adapter", tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture(scope="module")
def shape(whole: Path) -> AdapterShape:
    found = make_adapter_shape(load_model_shape(whole / "model"), adapted(whole), "actor")
    assert found is not None
    return found


def change(directory: Path, **values: Any) -> None:
    described = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(described | values))


def refuse(directory: Path, shape: AdapterShape) -> UserError:
    with pytest.raises(UserError) as caught:
        check_adapters(directory, shape, SOURCE)
    error = caught.value
    assert all((error.found, error.source, error.expected, error.hint)) and len(str(error)) < 1200
    return error


def test_every_setting_of_peft_is_in_the_table() -> None:
    assert {field.name for field in fields(PeftConfig)} - NOT_SAVED == SETTINGS.keys() - {"a_later_setting"}


@pytest.mark.parametrize("setting", [name for name, (good, _) in SETTINGS.items() if good])
def test_values_that_mean_the_same_are_accepted(setting: str, adapter: Path, shape: AdapterShape) -> None:
    for value in SETTINGS[setting][0]:
        change(adapter, **{setting: value})
        check_adapters(adapter, shape, SOURCE)


@pytest.mark.parametrize("setting", [name for name, (_, bad) in SETTINGS.items() if bad])
def test_other_values_are_refused_by_name(setting: str, adapter: Path, shape: AdapterShape) -> None:
    for value in SETTINGS[setting][1]:
        change(adapter, **{setting: value})
        error = refuse(adapter, shape)
        if [setting, value] in (["r", 8], ["lora_alpha", 4], ["use_rslora", True]):  # which the run could have, too
            assert "the adapters have rank" in error.found
        else:
            assert f"{setting} = " in error.found and CONFIG in error.source


def test_a_score_head_is_saved_beside_adapters(whole: Path, adapter: Path) -> None:
    """Under the two names that PEFT writes for it, and nothing else."""
    critic = make_adapter_shape(load_model_shape(whole / "model", head="score"), adapted(whole), "critic")
    assert critic is not None
    tensors = load_file(adapter / WEIGHTS)
    tensors["base_model.model.score.weight"] = torch.zeros(1, critic.base.hidden_size)
    save_file(tensors, adapter / WEIGHTS)
    for names in (["score"], ["classifier", "score"]):
        change(adapter, modules_to_save=names)
        check_adapters(adapter, critic, SOURCE)
    change(adapter, modules_to_save=["score", "lm_head"])
    assert "modules_to_save = ['score', 'lm_head']" in refuse(adapter, critic).found


def rewrite(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], Any]:
    def write(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        edit(tensors)
        save_file(tensors, directory / WEIGHTS)

    return write


def cut(name: str, share: float) -> Callable[[Path], Any]:
    def write(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[: int(len(content) * share)])

    return write


def replace_config(text: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / CONFIG).write_text(text)


def set_first(value: float) -> Callable[[Path], Any]:
    return rewrite(lambda tensors: next(iter(tensors.values())).view(-1)[3:4].fill_(value))


# Broken part -> the damage, and words of the message.
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config cut": (cut(CONFIG, 0.5), "holds no JSON object"),
    "config empty": (cut(CONFIG, 0.0), "holds no JSON object"),
    "config a list": (replace_config("[]"), "a list"),
    "config a number": (replace_config("3"), "a int"),
    "config no text": (lambda d: (d / CONFIG).write_bytes(b"\xff\xfe\x00"), "holds no JSON object"),
    "config deep": (replace_config('{"r":' + "[" * 100_000 + "]" * 100_000 + "}"), "recursion"),
    "config without a rank": (replace_config('{"peft_type": "LORA", "lora_alpha": 8}'), "r = None"),
    "config missing": (lambda d: (d / CONFIG).unlink(), "has no adapter_config"),
    "tensors cut": (cut(WEIGHTS, 0.9), f"{WEIGHTS} is damaged"),
    "header cut": (cut(WEIGHTS, 0.01), f"{WEIGHTS} is damaged"),
    "tensors empty": (cut(WEIGHTS, 0.0), f"{WEIGHTS} is damaged"),
    "a pointer": (
        lambda d: (d / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "pointer of Git LFS",
    ),
    "whole numbers": (rewrite(lambda t: t.update({n: x.long() for n, x in t.items()})), "is I64"),
    "float64": (rewrite(lambda t: t.update({n: x.double() for n, x in t.items()})), "is F64"),
    "nan": (set_first(float("nan")), "is not finite"),
    "infinity": (set_first(float("-inf")), "is not finite"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_are_one_error(case: str, adapter: Path, shape: AdapterShape) -> None:
    breaks, words = BROKEN[case]
    breaks(adapter)
    error = refuse(adapter, shape)
    assert words in error.found, error
    assert str(adapter) in f"{error.found} {error.source}"


def test_the_hint_is_the_setting(adapter: Path, shape: AdapterShape) -> None:
    """Converted PiSSA under rsLoRA has an alpha of many digits, which a run must be able to repeat."""
    change(adapter, lora_alpha=8 * 2**0.5, use_rslora=True)
    alpha = float(re.search(r"lora\.alpha=(\S+)", refuse(adapter, shape).hint)[1])
    assert math.isclose(alpha, 8 * 2**0.5 * shape.rank**0.5)
