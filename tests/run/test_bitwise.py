# SPDX-License-Identifier: Apache-2.0
"""rollout.bitwise: engine and trainer compute the same bits of every log-prob, and one that does not is found.

Responses are longer than a tile of attention (32 positions). Not covered: GPUs, more than two TP ranks, and experts in
other engines than the policy itself, all of which are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_rl
from distributed import run_ranks
from megatron_rl.models import attention
from megatron_rl.models.attention import PackedAttention
from megatron_rl.models.stages import RMSNorm
from megatron_rl.samples.corrections import check_bits
from megatron_rl.samples.experience import Experience
from megatron_rl.types import Prompt, UserError
from rl_runs import layout_overrides, load_nested, overrides_for, read_records, train
from tiny_models import ENGINE_SIZES, save_tiny_model

LONG = ["data.max_response_length=48", "actor.max_tokens_per_microbatch=160", "rollout.bitwise=true"]
PROMPTS = [np.array([5, *[4 + i % 9 for i in range(length)]], np.int32) for length in (2, 37, 70)]


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        pytest.param(2, [*layout_overrides(2, 1, 2), "rollout.engine=vllm"], marks=pytest.mark.slow),
        (2, [*layout_overrides(2, 1, 2), "rollout.engine=vllm", "rollout.top_p=0.8", "rollout.min_p=0.01"]),
        (2, ["actor.context_parallel_size=2", "rollout.engine=vllm", "actor.share_prompts=false", "rollout.top_p=0.9"]),
        (2, ["rollout.engine=hf", "actor.step_mode=static", "rollout.top_k=5"]),
        pytest.param(
            4,
            [*layout_overrides(2, 2, 1), "rollout.engine=megatron", "rollout.max_num_seqs=5"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["vllm_tp2", "vllm_tp2_truncated", "vllm_cp2", "hf_dp2_static", "megatron_tp2_pp2"],
)
def test_no_step_has_a_gap(
    task: Path, tmp_path: Path, vllm_imported: None, world_size: int, overrides: list[str]
) -> None:
    """Two steps of two minibatches: rollout, recomputation and update have the same log-probs, and so the reference.

    With truncated sampling, all of them of the same sets of tokens.
    """
    command = overrides_for(task, tmp_path / "run", *LONG, *overrides, "data.validation_files=[]")
    assert run_ranks(train, world_size, command) == [None] * world_size
    records = read_records(tmp_path / "run")
    assert [record["mismatch/max"] for record in records] == [0.0, 0.0]
    assert [record["policy/ratio_max_deviation"] for record in records] == [0.0, 0.0]
    assert records[0]["kl/per_response"] == 0.0 and records[1]["kl/per_response"] != 0.0
    assert records[0]["response/truncated"] > 0  # 48 tokens: behind the first tile


def sample_family(rank: int, world_size: int, models: Path, families: list[str], engine: str) -> None:
    """Responses to prompts on both sides of the edge of a tile, scored by the trainer: not one other bit."""
    for family in families:
        with loaded(models / family, models, engine) as (policy, samples):
            assert scores_are_equal(policy, samples), family


@contextmanager
def loaded(model: Path, tokens: Path, engine: str) -> Iterator[tuple[Any, Experience]]:
    """Load a policy, and sample from its engine."""
    recipe = load_nested(overrides_for(tokens, tokens / "never", *LONG, f"rollout.engine={engine}"))
    del recipe["model"]["path"]
    recipe["model"]["tokenizer"] = str(tokens)
    recipe["data"] |= {"max_prompt_length": 80, "validation_files": []}
    run = megatron_rl.load(model, recipe)
    prompts = [Prompt(i, tokens, "", None) for i, tokens in enumerate(PROMPTS)]
    with run.policy.rollout_mode():
        samples = run.policy.sample(1, prompts, n=4)
    yield run.policy, samples
    run.policy.close()


def scores_are_equal(policy: Any, samples: Experience) -> bool:
    samples.columns.pop("old_logprobs", None)
    samples.old_logprobs = policy.logprobs(samples)
    try:
        batch = policy.read(samples, "old_logprobs")
        check_bits(batch, batch.loss_mask, policy.model.groups.dp)
    except UserError as error:
        assert "whose log-probs are others in the engine" in str(error) and "prompt" in str(error)
        return False
    return True


@pytest.fixture(scope="module")
def families(task: Path) -> list[str]:
    """One model of each kind beside the task, that its tokenizer fits."""
    found = ["llama", "qwen2", "qwen3", "mistral", "gemma", "qwen3_moe", "mixtral"]
    for family in found:
        save_tiny_model(task / family, family, **ENGINE_SIZES | {"vocab_size": 17, "num_hidden_layers": 2})
    return found


def test_every_dense_family_with_transformers(task: Path, families: list[str]) -> None:
    run_ranks(sample_family, 1, task, families[:5], "hf")


def test_every_family_with_the_policy_itself(task: Path, families: list[str]) -> None:
    run_ranks(sample_family, 1, task, families, "megatron")


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_families_with_vllm(task: Path, families: list[str], vllm_imported: None, family: str) -> None:
    """A norm of queries and keys; norms about zero, a scaled embedding and another activation."""
    run_ranks(sample_family, 1, task, [family], "vllm")


def test_one_ulp_is_found(task: Path, families: list[str]) -> None:
    """Faults of the trainer that are as small as can be, each beside a control without it."""
    run_ranks(plant_faults, 1, task)


def plant_faults(rank: int, world_size: int, models: Path) -> None:
    with loaded(models / "qwen3", models, "hf") as (policy, samples):
        for name, plant in FAULTS.items():
            assert scores_are_equal(policy, samples), f"before {name}"
            with pytest.MonkeyPatch.context() as patch:
                plant(patch, policy.model)
                assert not scores_are_equal(policy, samples), name
        assert scores_are_equal(policy, samples)


def next_float32(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def scale_attention(patch: pytest.MonkeyPatch, model: Any) -> None:
    first = next(m for m in model.stages.modules() if isinstance(m, PackedAttention))
    patch.setattr(first, "scale", next_float32(first.scale))


def turn_faster(patch: pytest.MonkeyPatch, model: Any) -> None:
    patch.setattr(model, "shape", replace(model.shape, rope_theta=next_float32(model.shape.rope_theta)))


def change_epsilon(patch: pytest.MonkeyPatch, model: Any) -> None:
    first = next(m for m in model.stages.modules() if isinstance(m, RMSNorm))
    patch.setattr(first, "eps", first.eps * 1.1)


def see_the_next_token(patch: pytest.MonkeyPatch, model: Any) -> None:
    real = attention.F.scaled_dot_product_attention

    def attend(*qkv: torch.Tensor, attn_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        return real(*qkv, attn_mask=attn_mask | attn_mask.roll(1, 1), **options)

    patch.setattr(attention.F, "scaled_dot_product_attention", attend)


def keep_an_old_weight(patch: pytest.MonkeyPatch, model: Any) -> None:
    name = next(name for name in model.params if name.endswith("linear_fc2.weight"))
    stale = model.params[name].clone()
    stale[0, 0] = next_float32(stale[0, 0].item())
    patch.setattr(dict(model.stages.named_parameters())[name], "data", stale)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "scale of attention": scale_attention,
    "base of the rotation": turn_faster,
    "epsilon of a norm": change_epsilon,
    "mask off by one": see_the_next_token,
    "one stale element of one parameter": keep_an_old_weight,
}
