# SPDX-License-Identifier: Apache-2.0
"""Jobs for tests of the planner: a small shape, or a published one, on a cluster of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.planning.admission import read_shape
from megatron_rl.planning.cluster import GIB, Cluster, Job, build_job
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.model_config import model_shape_from_config

SHAPES = Path(__file__).resolve().parents[1] / "launch/recipes/shapes"
SMALL: dict[str, Any] = dict(
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=512,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    rope_theta=10000.0,
)


# Three dense layers before five mixtures of experts.
PREFIXED: dict[str, Any] = dict(
    model_type="glm4_moe",
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=3,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    use_qk_norm=False,
    attention_bias=False,
    partial_rotary_factor=0.5,
)


def small_shape(**changes: Any) -> ModelShape:
    """A llama of eight layers; 512 tokens need no padding up to TP 4."""
    return model_shape_from_config(SMALL | changes, source="a test")


def published_shape(name: str) -> ModelShape:
    """A shape that lies beside the recipes."""
    return read_shape(SHAPES / f"{name}.json")


def make_job(
    shape: ModelShape, *overrides: str, nodes: int = 1, gpus_per_node: int = 8, memory_gib: float = 80, **cluster: Any
) -> Job:
    """A run of 64 prompts x 8 responses of 512 + 512 tokens, with these overrides."""
    config = load_config(
        None,
        [
            "model.path=somewhere",
            "data.train_files=[x.jsonl]",
            "data.train_batch_size=64",
            "rollout.n=8",
            "data.max_prompt_length=512",
            "data.max_response_length=512",
            "actor.max_tokens_per_microbatch=4096",
            *overrides,
        ],
    ).config
    memory = int(memory_gib * GIB)
    machines = Cluster(nodes=nodes, gpus_per_node=gpus_per_node, memory_bytes=memory, **{"reserve_bytes": 0} | cluster)
    return build_job(config, resolve(config), machines, shape)
