# SPDX-License-Identifier: Apache-2.0
"""vLLM's own models with gated delta nets, in bfloat16 on a CPU: our table fills them as vLLM's reader does.

The program refuses them there, as their kernels want other weights than an update leaves: vLLM packs the filters of
convolutions once. Here it takes them as they are, by kernels of torch. Not covered: float32, GPUs, an update by the
hybrid engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import ModelFiles, load_huggingface
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.protocol import EngineSpec, Request, SamplingConfig
from megatron_rl.engines.vllm import vllm_engine as engine_module
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.parallel.collectives import Process
from megatron_rl.weights.model_config import load_model_shape
from shards import find_differences
from tiny_models import draw_tokens, engine_sizes, save_tiny_model

# Its kernels take no smaller heads.
SIZES = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128)
CASES = [("qwen3_next", 2), ("qwen3_5_text", 1), ("qwen3_5", 2), ("qwen3_5_moe_text", 2), ("qwen3_5_moe", 1)]
PROMPT, NUM_TOKENS = draw_tokens([9])[0], 16


class Absent(ModuleType):
    """Stands in for a package that is not here, whose names are imported and not used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name)


def generate(rank: int, world_size: int, path: Path) -> tuple[list[str], list[tuple[np.ndarray, np.ndarray]]]:
    """Parameters that vLLM's reader and ours fill differently, and tokens with log-probs of four responses."""
    engine_module.check_cpu_limits = lambda shape, config: None  # in this fork only
    torch.cpu._is_avx512_bf16_supported = lambda: False
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules[name] = Absent(name)  # vLLM's file has image-text models as well; builds for CPUs are not on PyPI
    shape = load_model_shape(path)
    options = {"enable_prefix_caching": False}  # which wants prompts in parts
    engine = VllmEngine(
        EngineSpec(
            model_path=str(path),
            shape=shape,
            dtype="bfloat16",
            max_prompt_length=len(PROMPT),
            max_response_length=NUM_TOKENS,
            config=RolloutConfig(max_num_seqs=4, tensor_model_parallel_size=world_size, engine_options=options),
            process=Process(rank, world_size, rank, 1, torch.device("cpu")),
            seed=0,
        )
    )
    engine.begin_weight_update()
    load_huggingface(path, engine.placements(rank), engine.params)
    ours = {name: param.clone() for name, param in engine.params.items()}
    for param in engine.params.values():
        param.fill_(float("nan"))
    engine._llm.llm_engine.model_executor.driver_worker.worker.get_model().load_weights(read_logical(path).items())
    wrong = find_differences(dict(engine.params), ours)
    engine.end_weight_update()
    sampling = SamplingConfig(temperature=1.0, max_tokens=NUM_TOKENS, stop_token_ids=())
    engine.add([Request(key, PROMPT, key, sampling) for key in range(4)])
    found = []
    while engine.has_requests():
        found += engine.step()
    return wrong, [(one.tokens, one.logprobs) for one in found]


def read_logical(path: Path) -> dict[str, torch.Tensor]:
    files, found = ModelFiles(path), {}
    for name in load_model_shape(path).logical_tensors():
        with files.open() as handle:
            found[name] = handle.get_slice(name)[:].clone()
    return found


@pytest.mark.parametrize(("family", "tp_size"), CASES)
def test_table_and_model_are_those_of_vllm(family: str, tp_size: int, tmp_path: Path, vllm_imported: None) -> None:
    """Names, sizes and values of all parameters; and log-probs that spread by 0.5, which bfloat16 moves by 0.02.

    A different choice of an expert moves them by 0.3, so the largest gap is not bounded.
    """
    save_tiny_model(tmp_path, family, **engine_sizes(family) | SIZES)
    (wrong, responses), *others = run_ranks(generate, tp_size, tmp_path, timeout=150)
    assert wrong == [] and all(other[0] == [] for other in others)
    assert len(responses) == 4
    model, gaps = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval(), []
    for tokens, logprobs in responses:
        ids = torch.from_numpy(np.concatenate([PROMPT, tokens]).astype(np.int64))
        with torch.no_grad():
            expected = model(ids[None]).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        picked = expected.gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()
        assert len(tokens) == NUM_TOKENS and picked.std() > 0.3
        gaps.append(np.abs(picked - logprobs))
    assert np.median(gaps) < 0.05, gaps
