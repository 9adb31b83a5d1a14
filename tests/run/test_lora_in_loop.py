# SPDX-License-Identifier: Apache-2.0
"""Runs that train adapters: GRPO with the actor as its own reference, PPO with two sets of adapters, SFT.

That adapters train as PEFT's do is in tests/training/test_lora.py, that engines have them in
tests/transfer/test_hybrid_engine.py. Not covered: GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_adapters import save_dequantized
from transformers import AutoModelForCausalLM

from distributed import run_ranks
from megatron_rl.checkpoint.directory import find_problems
from megatron_rl.checkpoint.pieces import check_weights
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import load_model_shape
from rl_runs import fine_tune, layout_overrides, overrides_for, read_records, sft_overrides, train
from tools.conversion.inspection import describe_checkpoint
from tools.inspect_checkpoint import format_description

LORA = ["actor.lora.rank=4", "actor.lora.alpha=32"]
SETTINGS = [*LORA, "trainer.save_freq=1", "trainer.total_steps=3", "trainer.log_rollouts=-1", "hybrid.verify=full"]


def run(task: Path, run_dir: Path, world_size: int, *extra: str) -> list[dict]:
    """Train, and return the records."""
    overrides = overrides_for(task, run_dir, *SETTINGS, *extra)
    assert run_ranks(train, world_size, overrides, timeout=150) == [None] * world_size
    return read_records(run_dir)


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Path:
    """The run that nobody disturbs, on two ranks."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run(task, run_dir, 2, "checkpoint.contents=[optimizer,huggingface]", *layout_overrides(2, 1, 1))
    return run_dir


def test_nothing_but_adapters_is_trained_and_saved(task: Path, whole: Path) -> None:
    """The gap to the engine is that of rounding, and a checkpoint is small and whole."""
    steps = [record for record in read_records(whole) if "policy/grad_norm" in record]
    assert len(steps) == 3
    for record in steps:
        assert record["mismatch/max"] < 1e-5 and record["policy/grad_norm"] > 0
    assert steps[-1]["kl/mean"] > 1e-4
    checkpoint = whole / "checkpoints/step_3"
    assert find_problems(checkpoint, reads_all=True) == []
    assert "adapters of rank 4 on qwen2" in format_description(
        describe_checkpoint(checkpoint), tensors=False, recipe=False
    )
    with pytest.raises(UserError, match="holds adapters"):
        check_weights(checkpoint / "actor", load_model_shape(task / "model"))
    keys = json.loads((checkpoint / "manifest.json").read_text())["roles"]["actor"]["model"]
    assert (keys["rank"], keys["scale"], len(keys["kinds"])) == (4, 8.0, 7)
    assert sum(f.stat().st_size for f in (checkpoint / "actor").glob("*.distcp")) < 400_000


def test_peft_speaks_as_the_engine_did(task: Path, whole: Path) -> None:
    """The adapters that are saved after step 2 give the tokens of step 3 the log-probs that vLLM had."""
    base = AutoModelForCausalLM.from_pretrained(task / "model")
    model = PeftModel.from_pretrained(base, whole / "checkpoints/step_2/huggingface").eval()
    lines = (whole / "rollouts/step_3.jsonl").read_text().splitlines()
    prompts = {row["prompt"]: row for row in map(json.loads, (task / "train.jsonl").read_text().splitlines())}
    import sentencepiece

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(task / "tokenizer.model"))
    assert lines and prompts
    for row in map(json.loads, lines):
        prompt = tokenizer.encode(row["prompt"])
        ids = torch.tensor([[*prompt, *row["tokens"]]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        found = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert (found - torch.tensor(row["rollout_logprobs"])).abs().max() < 1e-5


@pytest.mark.parametrize("layout", ["same", "other"])
def test_a_run_resumes(task: Path, whole: Path, tmp_path: Path, layout: str) -> None:
    """In its layout bit by bit; in another with other rounding only."""
    more = layout_overrides(2, 1, 1) if layout == "same" else layout_overrides(1, 2, 1)
    resume = f"checkpoint.resume={whole}/checkpoints/step_2"
    found, expected = run(task, tmp_path / "run", 2, *more, resume)[-1], read_records(whole)[-1]
    if layout == "same":
        found = {key: value for key, value in found.items() if key in expected}
        assert found == expected
    else:
        for name in ("reward/mean", "policy/grad_norm", "kl/mean", "policy/loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_the_reference_is_the_actor_without_adapters(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """A reference of its own gives the same numbers, to the last bit."""
    (tmp_path / "copy").symlink_to(task / "model")
    shared = run(task, tmp_path / "shared", 1)
    own = run(task, tmp_path / "own", 1, f"reference.path={tmp_path}/copy")
    moved = {"reshard/bytes_moved", "reshard/bytes_copied", "reshard/bytes_aliased"}
    assert [{k: v for k, v in r.items() if k not in moved} for r in shared] == [
        {k: v for k, v in r.items() if k not in moved} for r in own
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("merge", ["algorithm.adv_estimator=gae", "critic.lora.rank=2", "critic.lr=1e-2"]),
        ("adapter", []),
    ],
)
def test_a_quantized_run_is_the_run_on_what_it_stands_for(
    task: Path, tmp_path: Path, vllm_imported: None, mode: str, settings: list[str]
) -> None:
    """Bit by bit, engine and certificate included; it is interrupted after two steps, and quantized again."""
    settings = [f"hybrid.lora={mode}", *settings, *layout_overrides(1, 2, 1)]
    model = save_dequantized(task / "model", tmp_path / "model")
    expected = run(task, tmp_path / "plain", 2, *settings, f"model.path={model}")
    settings.append("actor.quantization=nf4")
    if mode == "merge":  # the critic's weights are whole in both runs
        settings.append(f"critic.path={model}")
    run(task, tmp_path / "run", 2, *settings, "trainer.total_steps=2")
    found = run(task, tmp_path / "run", 2, *settings)[-1]
    names = {name for name in found if name in expected[-1] and not name.startswith("reshard/bytes")}
    assert {name: found[name] for name in names} == {name: expected[-1][name] for name in names}
    assert {"mismatch/max", "policy/grad_norm", "kl/mean"} <= names and found["mismatch/max"] < 1e-5


@pytest.mark.parametrize("quantization", [pytest.param("none", marks=pytest.mark.slow), "nf4"])
def test_the_engine_that_is_the_policy_computes_the_same_bits(task: Path, tmp_path: Path, quantization: str) -> None:
    """Adapters included: there is no gap at all."""
    settings = ["rollout.engine=megatron", "rollout.bitwise=true", f"actor.quantization={quantization}"]
    records = run(task, tmp_path / "run", 2, *settings, *layout_overrides(1, 2, 1))
    gaps = [record["mismatch/max"] for record in records if "mismatch/max" in record]
    assert gaps == [0.0] * 3


def test_a_critic_and_supervised_fine_tuning(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """The critic trains its score head with its adapters; the output of SFT starts a GRPO run."""
    critic = ["algorithm.adv_estimator=gae", "critic.lora.rank=2", "critic.lr=1e-2"]
    records = run(task, tmp_path / "ppo", 1, *critic)
    losses = [record["value/loss"] for record in records if "value/loss" in record]
    assert losses[-1] < losses[0]
    run_ranks(
        fine_tune,
        1,
        sft_overrides(task, *LORA, f"trainer.run_dir={tmp_path}/sft", "checkpoint.contents=[optimizer,huggingface]"),
    )
    adapters = tmp_path / "sft/checkpoints/latest/huggingface"
    assert set(load_file(adapters / "adapter_model.safetensors")) >= {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    }
    records = run(task, tmp_path / "grpo", 1, f"actor.lora.path={adapters}")
    assert records[-1]["kl/mean"] > 1e-4
