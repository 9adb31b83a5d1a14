# SPDX-License-Identifier: Apache-2.0
"""The Megatron models compute the same logits as transformers, at every position and in every layout.

Ragged sequences are packed into several microbatches; the hidden states of the last stage times its output weight,
gathered over TP, are compared with transformers run on one sequence after the other. Not covered: data parallelism
(it does not touch a forward; tests/training/test_actor.py) and Transformer Engine (GPU).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from role_setups import make_setup

from distributed import run_ranks
from megatron_rl.config.schema import ActorConfig
from megatron_rl.models import gpt
from megatron_rl.models.attention_kernels import check_transformer_engine
from megatron_rl.models.gpt import (
    ColumnParallelLinear,
    ModuleSpec,
    build_gpt_stages,
    build_transformer_config,
)
from megatron_rl.models.stages import gather_for_shards
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Padding, build_train_batch
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.training.packed_model import LogprobHead, PackedModel
from megatron_rl.types import Branch, UserError
from megatron_rl.weights.families import Head
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.special_parts import SigmoidRouter
from tiny_models import VOCAB_SIZE, draw_tokens, save_tiny_model

LENGTHS = [10, 7, 23, 5, 1, 9, 2, 30]
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(family="llama"),
    "llama-tied-eps": dict(family="llama", tie_word_embeddings=True, rms_norm_eps=1e-2),
    "llama-scaled": dict(
        family="llama",
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=1e4,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-yarn": dict(
        family="llama",
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64),
    ),
    "qwen2": dict(family="qwen2"),
    "qwen2-rope": dict(family="qwen2", rope_theta=1e6, tie_word_embeddings=False),
    "qwen3": dict(family="qwen3"),
    "qwen3-mha": dict(family="qwen3", num_key_value_heads=8, rope_theta=1e6),
    "mistral": dict(family="mistral", rope_theta=1e6, head_dim=16),
    "gemma": dict(family="gemma"),
    "gemma3": dict(family="gemma3_text"),
    "gemma4": dict(family="gemma4_text"),
    "gemma4-values": dict(family="gemma4_text", attention_k_eq_v=False, global_head_dim=8, tie_word_embeddings=False),
    "phi3": dict(family="phi3"),
    "phi3-partial": dict(
        family="phi3",
        tie_word_embeddings=True,
        original_max_position_embeddings=64,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=1e4,
            partial_rotary_factor=0.5,
            original_max_position_embeddings=64,
            short_factor=[1.0, 1.5],
            long_factor=[2.0] * 2,
        ),
    ),
    "smollm3": dict(family="smollm3"),
    "glm4": dict(family="glm4"),
    "olmo2": dict(family="olmo2"),
    "qwen3_5": dict(family="qwen3_5_text", tie_word_embeddings=True),
    "qwen3_5-images": dict(family="qwen3_5", tie_word_embeddings=True),
    "gemma4-images": dict(family="gemma4", use_bidirectional_attention="vision"),
}
# Their shares are normalized after the selection, before it, and always; the last has more experts per token.
EXPERT_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(family="qwen3_moe"),
    "qwen3_moe-shares": dict(family="qwen3_moe", norm_topk_prob=False, num_experts=8),
    "mixtral": dict(family="mixtral", num_experts_per_tok=3),
    "qwen3_next": dict(family="qwen3_next"),
    "qwen3_5_moe-images": dict(
        family="qwen3_5_moe",
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e4,
            partial_rotary_factor=0.5,
            mrope_interleaved=True,
            mrope_section=[2, 1, 1],
        ),
    ),
    "glm4_moe": dict(
        family="glm4_moe", rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    ),
    "glm4_moe-groups": dict(
        family="glm4_moe",
        attention_bias=False,
        use_qk_norm=False,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=0,
    ),
    "deepseek_v3": dict(family="deepseek_v3"),
    "glm4_moe_lite": dict(family="glm4_moe_lite"),
    "minimax_m2": dict(family="minimax_m2"),
    "deepseek_v3-yarn": dict(
        family="deepseek_v3",
        q_lora_rank=None,
        first_k_dense_replace=0,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=0.7,
            mscale_all_dim=1.0,
        ),
    ),
    "gpt_oss": dict(family="gpt_oss"),
}


@dataclass(frozen=True)
class Case:
    """A layout with its options."""

    sizes: dict[str, int]
    sequence_parallel: bool = False
    dtype: str = "float32"

    @property
    def world_size(self) -> int:
        """Expert parallelism takes its ranks from the data parallel ones."""
        sizes = [self.sizes.get(name, 1) for name in ("tp_size", "pp_size", "ep_size")]
        return math.prod(sizes)


CASES = {
    "single": Case({}),
    "tp2": Case(dict(tp_size=2)),
    "tp2-sp": Case(dict(tp_size=2), sequence_parallel=True),
    "pp2": Case(dict(pp_size=2)),
    "pp2-vpp2": Case(dict(pp_size=2, vpp_size=2)),
    "pp4": Case(dict(pp_size=4)),
    "tp4-sp": Case(dict(tp_size=4), sequence_parallel=True),
    "tp2-pp2": Case(dict(tp_size=2, pp_size=2)),
    "tp2-pp2-vpp2-sp": Case(dict(tp_size=2, pp_size=2, vpp_size=2), sequence_parallel=True),
}
EXPERT_CASES = {
    "single": Case({}),
    "tp2-sp": Case(dict(tp_size=2), sequence_parallel=True),
    "pp2": Case(dict(pp_size=2)),
    "pp2-vpp2": Case(dict(pp_size=2, vpp_size=2)),
    "ep2": Case(dict(ep_size=2)),
    "ep4": Case(dict(ep_size=4)),
    "ep2-tp2-sp": Case(dict(ep_size=2, tp_size=2), sequence_parallel=True),
    "ep2-pp2": Case(dict(ep_size=2, pp_size=2)),
}

# By the layouts that combine them with another.
COVERED = {"tp2", "tp2-sp", "pp2", "pp2-vpp2", "pp4", "tp4-sp", "tp2-pp2"}
EXPERTS_COVERED = {"tp2-sp", "pp2", "ep2", "ep4", "ep2-pp2"}


@dataclass(frozen=True)
class Reference:
    """A saved model and the logits of its sequences: float32, and the error of transformers' own bfloat16."""

    path: Path
    logits: list[torch.Tensor]
    bfloat16_error: float


@torch.no_grad()
def run_transformers(model: torch.nn.Module, sequences: list[np.ndarray]) -> list[torch.Tensor]:
    return [model(torch.from_numpy(tokens)[None]).logits[0].float() for tokens in sequences]


def max_gap(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest absolute difference over all sequences; shapes must agree."""
    assert [x.shape for x in found] == [x.shape for x in expected]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    sequences, result = draw_tokens(LENGTHS), {}
    for name, settings in (MODELS | EXPERT_MODELS).items():
        path = tmp_path_factory.mktemp(name)
        model = save_tiny_model(path, **settings)
        logits = run_transformers(model, sequences)
        error = max_gap(run_transformers(model.to(torch.bfloat16), sequences), logits)
        result[name] = Reference(path, logits, error)
    return result


def collect_logits(
    rank: int, world_size: int, case: Case, paths: dict[str, Path], changes: dict[str, Any]
) -> dict[str, list[torch.Tensor]]:
    """Every model's logits [s, v] by sequence, from the last stage (empty elsewhere)."""
    groups = build_groups(ParallelLayout(world_size, **case.sizes))
    result = {}
    for name, path in paths.items():
        policy = PackedModel(
            make_setup(
                "reference",
                path,
                ActorConfig(sequence_parallel=case.sequence_parallel),
                groups,
                dtype=case.dtype,
                shape=replace(load_model_shape(path), **changes),
            )
        )
        if (logits := _run_policy(policy)) is not None:
            result[name] = logits
    return result


def _run_policy(policy: PackedModel) -> list[torch.Tensor] | None:
    """Run the pipeline; the hidden states of the last stage are caught on their way to the scoring."""
    sequences = [Branch.of_response(tokens, 1) for tokens in draw_tokens(LENGTHS)]
    plan = plan_microbatches(LENGTHS, dp_size=1, max_tokens=32, count_multiple=policy.microbatch_count_multiple)
    batch = build_train_batch(
        sequences,
        np.ones(len(LENGTHS)),
        [(range(len(LENGTHS)), plan)],
        dp_rank=0,
        padding=Padding(policy.pad_multiple),
        device=torch.device("cpu"),
    )
    assert len(batch.slices) >= 3
    caught: list[torch.Tensor] = []
    policy.stages[-1].register_forward_hook(lambda module, inputs, output: caught.append(output))
    policy.compute_forward(batch, LogprobHead(policy))
    if not policy.groups.is_last_stage:
        return None
    hidden = [
        gather_for_shards(x, sequence_parallel=policy.config.sequence_parallel, tp_group=policy.groups.tp)[:, 0]
        for x in caught
    ]  # [t, h] each
    with torch.no_grad():
        local = (torch.cat(hidden) @ policy.stages[-1].output_weight.t()).float()  # [t, v/tp]
    parts = [torch.empty_like(local) for _ in range(policy.groups.tp.size())]
    dist.all_gather(parts, local, group=policy.groups.tp)
    full, cap = torch.cat(parts, -1)[:, :VOCAB_SIZE], policy.shape.logit_softcap
    full = full if cap is None else cap * torch.tanh(full / cap)
    return [full[batch.sequence_ids == i] for i in range(len(LENGTHS))]


def run_case(
    case: Case, references: dict[str, Reference], names: list[str], **changes: Any
) -> dict[str, list[torch.Tensor]]:
    """Logits by model from the last rank, which is on the last stage."""
    paths = {name: references[name].path for name in names}
    return run_ranks(collect_logits, case.world_size, case, paths, changes, timeout=100)[-1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in COVERED else []) for name in CASES]
)
def test_logits_equal_transformers(name: str, references: dict[str, Reference]) -> None:
    """All models on one layout. float32 rounding leaves 1e-6 to 2e-6 on logits of up to 2.5."""
    found = run_case(CASES[name], references, list(MODELS))
    gaps = {model: max_gap(found[model], references[model].logits) for model in MODELS}
    assert max(gaps.values()) <= 2e-5, gaps


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in EXPERTS_COVERED)) for name in EXPERT_CASES]
)
def test_logits_of_experts_equal_transformers(name: str, references: dict[str, Reference]) -> None:
    """Expert parallel ranks run the same batch: each owns a part of the experts, all send tokens to it."""
    found = run_case(EXPERT_CASES[name], references, list(EXPERT_MODELS))
    gaps = {model: max_gap(found[model], references[model].logits) for model in EXPERT_MODELS}
    assert max(gaps.values()) <= 2e-5, gaps


def test_logits_are_large_enough_for_the_comparison(references: dict[str, Reference]) -> None:
    """Logits near 0 would agree with anything."""
    assert all(torch.cat(r.logits).std() > 0.3 for r in references.values())


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen2-rope", dict(rope_theta=1e4)),
        ("llama-tied-eps", dict(rms_norm_eps=1e-6)),
        ("llama-scaled", dict(rope_scaling=None)),
        ("llama-yarn", dict(rope_scaling=None)),
        ("phi3-partial", dict(rotary_dim=None, rope_scaling=None)),
        ("smollm3", dict(unrotated_layers=(1,))),
        ("gemma3", dict(sliding_window=7)),
        ("gemma3", dict(sliding_rope_theta=1e6)),
        ("gemma3", dict(attention_scale=None)),
        ("gemma4", dict(sliding_window=7)),
        ("gemma4", dict(rope_scaling=None)),
        ("gemma4", dict(attention_scale=None)),
        ("gemma4", dict(logit_softcap=None)),
        ("qwen3_moe", dict(normalizes_shares=False)),
        ("mixtral", dict(experts_per_token=2)),
        ("deepseek_v3", dict(rms_norm_eps=1e-3)),
        ("deepseek_v3-yarn", dict(attention_scale=None)),
        ("gpt_oss", dict(sliding_window=7)),
        ("gpt_oss", dict(rope_scaling=None)),
        ("glm4_moe", dict(router=SigmoidRouter(scale=1.0))),
        ("glm4_moe-groups", dict(router=SigmoidRouter(scale=1.5))),
    ],
)
def test_comparison_sees_a_wrong_setting(
    model: str, changes: dict[str, float], references: dict[str, Reference]
) -> None:
    """The same weights with another rotary base, epsilon or routing are a hundred times outside of the tolerance."""
    found = run_case(CASES["single"], references, [model], **changes)
    assert max_gap(found[model], references[model].logits) > 2e-3


@pytest.mark.parametrize("name", ["single", "tp2-sp", pytest.param("tp2-pp2", marks=pytest.mark.slow)])
def test_bfloat16_is_as_good_as_transformers_bfloat16(name: str, references: dict[str, Reference]) -> None:
    """Sanity only: bfloat16 keeps 8 bits, so order of operations moves logits by percents.

    The yardstick is the error of transformers' own bfloat16 run against float32; within twice of it nothing is
    systematically wrong (a wrong dtype conversion or a lost piece of the pipeline is far outside).
    """
    found = run_case(replace(CASES[name], dtype="bfloat16"), references, list(MODELS))
    errors = {model: max_gap(found[model], references[model].logits) for model in MODELS}
    limits = {model: 2 * references[model].bfloat16_error for model in MODELS}
    assert all(errors[model] <= limits[model] for model in MODELS), (errors, limits)


class CustomColumnParallelLinear(ColumnParallelLinear):
    """A replacement by a plugin or a later megatron-core."""


def _describe_parameters(
    rank: int, world_size: int, path: Path, head: Head, qkv_class: type[ColumnParallelLinear]
) -> dict[str, tuple[bool, bool]]:
    build_layer_spec = gpt.build_layer_spec

    def build(*arguments: Any) -> ModuleSpec:
        spec = build_layer_spec(*arguments)
        spec.submodules.self_attention.submodules.linear_qkv = qkv_class
        return spec

    gpt.build_layer_spec = build  # in this fork only
    groups = build_groups(ParallelLayout(world_size, tp_size=2))
    shape = load_model_shape(path, head)
    config = build_transformer_config(shape, groups.layout, dtype=torch.float32, sequence_parallel=True)
    stages = build_gpt_stages(shape, config, groups)
    return {
        name: (getattr(p, "tensor_model_parallel", False), getattr(p, "sequence_parallel", False))
        for name, p in stages.named_parameters()
    }


@pytest.mark.parametrize(
    ("model", "head", "qkv_class"),
    [
        *(
            (model, head, ColumnParallelLinear)
            for model in ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "olmo2", "gpt_oss")
            for head in ("lm", "score")
        ),
        ("qwen2", "lm", CustomColumnParallelLinear),
    ],
)
def test_parameters_tell_megatron_how_they_are_split(
    model: str, head: Head, qkv_class: type[ColumnParallelLinear], references: dict[str, Reference]
) -> None:
    """Matrices, QKV biases and norms of all heads are shards; the rest are replicas with partial gradients."""
    for found in run_ranks(_describe_parameters, 2, references[model].path, head, qkv_class, timeout=60):
        found = {name: marks for name, marks in found.items() if "expert_bias" not in name}  # without a gradient
        replicas = ("layernorm", "router", "score", "proj.bias", "fc2.bias")
        expected = {name: (False, True) if any(x in name for x in replicas) else (True, False) for name in found}
        assert found == expected
        assert ("0.score.weight" in found) is (head == "score")
        assert not (head == "score" and "0.output_layer.weight" in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts what a machine without CUDA does")
def test_transformer_implementation_without_cuda() -> None:
    with pytest.raises(UserError, match="Transformer Engine is not usable here"):
        check_transformer_engine()
