# SPDX-License-Identifier: Apache-2.0
"""Planned bytes of a token in the KV cache equal those in vLLM's own blocks, for Gemma 4, whose layers have two sizes.

A token is counted in every layer, also where vLLM frees it behind a window. Not covered: GPUs, whose blocks are others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed import run_ranks
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.parallel.collectives import Process
from megatron_rl.planning.memory import compute_memory
from megatron_rl.weights.model_config import load_model_shape
from planning_jobs import make_job
from tiny_models import engine_sizes, save_tiny_model


def read_blocks(rank: int, world_size: int, model: Path) -> list[tuple[int, int, int]]:
    """Tokens and bytes of a block in one layer, and the layers, of each of vLLM's groups of layers."""
    spec = EngineSpec(
        model_path=str(model),
        shape=load_model_shape(model),
        dtype="float32",
        max_prompt_length=40,
        max_response_length=24,
        config=RolloutConfig(max_num_seqs=8, tensor_model_parallel_size=world_size),
        process=Process(rank, world_size, rank, world_size, torch.device("cpu")),
        seed=0,
        stop=None,
    )
    engine = VllmEngine(spec)
    cache = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_cache_config
    engine.close()
    pairs = ((group.kv_cache_spec, len(group.layer_names)) for group in cache.kv_cache_groups)
    return [(one.block_size, one.page_size_bytes, layers) for one, layers in pairs]


@pytest.mark.parametrize(("tp_size", "full_heads"), [(1, 2), (1, 1), (2, 2)])
def test_bytes_of_a_token_are_those_of_its_blocks(
    tp_size: int, full_heads: int, tmp_path: Path, vllm_imported: None
) -> None:
    """Pages of equal size, and with half as many in layers without a window, whose blocks then have more tokens."""
    sizes = engine_sizes("gemma4_text") | dict(num_global_key_value_heads=full_heads)
    save_tiny_model(tmp_path, "gemma4_text", **sizes)
    blocks = run_ranks(read_blocks, tp_size, tmp_path)
    assert blocks == blocks[:1] * tp_size and len(blocks[0]) == 2
    assert (len({tokens for tokens, _, _ in blocks[0]}) == 2) == (full_heads == 1)
    job = make_job(
        load_model_shape(tmp_path),
        "model.dtype=float32",
        f"rollout.tensor_model_parallel_size={tp_size}",
        gpus_per_node=2,
    )
    per_token = compute_memory(job)[0].kv_bytes_per_token
    assert per_token == sum(layers * size / tokens for tokens, size, layers in blocks[0])
    assert per_token == 4 * 2 * 2 * (4 * 32 + full_heads * 64) // tp_size
