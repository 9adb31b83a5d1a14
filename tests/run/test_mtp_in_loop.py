# SPDX-License-Identifier: Apache-2.0
"""Runs that train the layer behind the policy's last one, on two pipeline stages of GLM-4.5.

Gradients and layouts are in tests/training/test_mtp.py, drafts of vLLM in test_drafts_in_loop.py. Not covered: GPUs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_models import PREFIX, read_tensors, save_model_with_mtp
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from distributed import run_ranks
from rl_runs import layout_overrides, overrides_for, read_records, train
from shards import find_differences
from tiny_models import ENGINE_SIZES
from tools.conversion.conversion import CheckpointWeights, convert_to_huggingface
from tools.conversion.units import Workers

PP2 = layout_overrides(1, 2, 1)
SETTINGS = [
    "rollout.engine=hf",
    "data.validation_files=[]",
    "trainer.save_freq=1",
    "checkpoint.contents=[optimizer,huggingface]",
]
MTP = ["actor.mtp_lr=1e-2"]


@pytest.fixture(scope="module")
def model(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GLM-4.5 for the task, with the layer."""
    path = tmp_path_factory.mktemp("mtp") / "model"
    vocab_size = json.loads((task / "model/config.json").read_text())["vocab_size"]
    save_model_with_mtp(path, "glm4_moe", **ENGINE_SIZES | dict(vocab_size=vocab_size))
    shutil.copy(task / "tokenizer.model", path)
    return path


def run(task: Path, model: Path, run_dir: Path, *extra: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Train, and return the records."""
    overrides = overrides_for(task, run_dir, *SETTINGS, "trainer.total_steps=3", *extra, f"model.path={model}")
    assert run_ranks(train, ranks, overrides, timeout=170) == [None] * ranks
    return read_records(run_dir)


@pytest.fixture(scope="module")
def whole(task: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run(task, model, run_dir, *PP2, *MTP)
    return run_dir


def test_the_policy_of_a_run_is_the_same(task: Path, model: Path, whole: Path, tmp_path: Path) -> None:
    """All metrics of a run without it, bit for bit; its export keeps the layer as it was."""
    plain = run(task, model, tmp_path / "plain", *PP2, "actor.share_prompts=false")
    found = read_records(whole)
    assert [{name: record[name] for name in plain[i]} for i, record in enumerate(found)] == plain
    losses = [record["mtp/loss"] for record in found]
    assert losses[2] < losses[0] and all(0 < record["mtp/acceptance"] < 1 for record in found)
    exported = tmp_path / "plain/checkpoints/step_3/huggingface"
    of_layer = {name: x for name, x in read_tensors(model).items() if name.startswith(PREFIX)}
    assert find_differences({n: x for n, x in read_tensors(exported).items() if n in of_layer}, of_layer) == []


@pytest.mark.slow
def test_a_run_resumes_bit_by_bit(task: Path, model: Path, whole: Path, tmp_path: Path) -> None:
    """With the layer's weights and optimizer; a run without it does not take its checkpoint for its own."""
    run(task, model, tmp_path / "run", *PP2, *MTP, "trainer.total_steps=2")
    assert run(task, model, tmp_path / "run", *PP2, *MTP)[-1] == read_records(whole)[-1]


def test_the_layer_is_exported(task: Path, model: Path, whole: Path, tmp_path: Path) -> None:
    """The export of a run is the conversion of its checkpoint, and transformers takes the layer from it."""
    exported = whole / "checkpoints/step_3/huggingface"
    tensors, original = read_tensors(exported), read_tensors(model)
    assert tensors.keys() == original.keys()
    assert torch.equal(tensors[f"{PREFIX}embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors[f"{PREFIX}shared_head.head.weight"], tensors["lm_head.weight"])
    moved = [name for name in tensors if name.startswith(PREFIX) and not torch.equal(tensors[name], original[name])]
    assert len(moved) > 0.8 * sum(name.startswith(PREFIX) for name in tensors)
    settings: dict[str, Any] = dict(dtype=None, file_bytes=1 << 30, force=False, workers=Workers())
    convert_to_huggingface(CheckpointWeights(whole), tmp_path / "converted", **settings)
    assert find_differences(read_tensors(tmp_path / "converted"), tensors) == []
    layer = MtpModel.from_pretrained(load_policy(exported))  # raises if a weight is missing
    assert torch.equal(layer.layers[0].eh_proj.weight, tensors[f"{PREFIX}eh_proj.weight"])
    checkpoint = whole / "checkpoints/step_3/actor"
    again = run(task, checkpoint, tmp_path / "again", *MTP, "trainer.total_steps=1", ranks=1)
    assert again[0]["mtp/loss"] < read_records(whole)[0]["mtp/loss"]


def load_policy(path: Path) -> Any:
    """Load the policy in transformers, which recognizes the extra layer's number for published models only."""
    policy: Any = AutoModelForCausalLM.from_pretrained(path).eval()
    policy._keys_to_ignore_on_load_unexpected = [PREFIX.replace(".", r"\.")]
    return policy


def count_passes(path: Path, prompts: list[list[int]]) -> int:
    """Forward passes of the policy that greedy responses of sixteen tokens take when the layer drafts."""
    policy, passes = load_policy(path), 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    policy.model.register_forward_hook(count)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        drafted = policy.generate(ids, do_sample=False, max_new_tokens=16, min_new_tokens=16, use_mtp=True)
        assert torch.equal(drafted, policy.generate(ids, do_sample=False, max_new_tokens=16, min_new_tokens=16))
    return passes - 16 * len(prompts)  # that the plain responses took


@pytest.mark.slow
def test_drafts_are_accepted_more_often(task: Path, model: Path, tmp_path: Path) -> None:
    """Speculative decoding in transformers needs fewer passes with the layer that a run has trained."""
    extra = ["actor.lr=1e-6", "trainer.total_steps=30", "trainer.save_freq=0", "rollout.n=8"]
    records = run(task, model, tmp_path / "run", *MTP, *extra, ranks=1)
    assert records[-1]["mtp/acceptance"] > records[0]["mtp/acceptance"] + 0.1
    prompts = [[4 + i, 5, 6] for i in range(6)]
    before, after = (
        count_passes(model, prompts),
        count_passes(tmp_path / "run/checkpoints/step_30/huggingface", prompts),
    )
    assert after < before
