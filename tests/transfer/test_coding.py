# SPDX-License-Identifier: Apache-2.0
"""Engines with matrices in eight bits: their parameters, results, moved bytes, and detected faults.

Not covered: GPUs, whose vLLM runs the same plain products; the effect of the lost bits on learning, which is in
docs/sampling.md.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

import megatron_rl.parallel  # noqa: F401 (before megatron.core)
from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.config.schema import (
    ActorConfig,
    DataConfig,
    HybridConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_rl.engines.protocol import Request, SamplingConfig
from megatron_rl.observability.progress import PhaseTimers, RolloutProgress
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.parameters import compute_engine_bytes
from megatron_rl.rollout.generation import generate
from megatron_rl.run import building
from megatron_rl.run.building import build_role, build_rollout
from megatron_rl.run.models import RoleInputs, resolve
from megatron_rl.transfer.executor import CertificateError
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.quantization import encode, find_scales
from megatron_rl.weights.rollout_layout import huggingface_placements
from megatron_rl.weights.shard_box import box_slices
from tiny_models import ENGINE_SIZES, save_tiny_model

LIMITS = {"int8": 127, "fp8": 448}
# One wrong code or scale; a scale that TP ranks share is compared on the first of them, as all that they share.
FAULTS = ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.gate_up_proj.weight_scale")
PROMPT = np.arange(5, 45, dtype=np.int32)


def quantize(matrix: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference, row by row: codes [n, m] and scales [n, 1], all float32."""
    codes, scales = [], []
    for row in matrix.float():
        scale = row.abs().max() / LIMITS[kind] if bool(row.any()) else torch.tensor(1.0)
        exact = row / scale
        codes.append(torch.round(exact) if kind == "int8" else exact.to(torch.float8_e4m3fn).float())
        scales.append(scale[None])
    return torch.stack(codes), torch.stack(scales)


def is_matrix(name: str) -> bool:
    return "_proj.weight" in name


def load_tensors(path: Path, factor: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shape = load_model_shape(path)
    full = {name: torch.zeros(size) for name, size in shape.logical_tensors().items()}
    load_huggingface(path, huggingface_placements(shape), full)
    return {name: tensor.to(dtype) * factor for name, tensor in full.items()}


def find_faults(engine: Any, full: dict[str, torch.Tensor], kind: str) -> list[str]:
    """Return parameters of this rank that differ in a bit from the reference's coding; a few without codes."""
    wrong = []
    for p in engine.placements(dist.get_rank()):
        local, hf = box_slices(p.local_box), box_slices(p.hf_box)
        found = engine.params[p.param][local]
        if is_matrix(p.hf_name):
            codes, scales = quantize(full[p.hf_name], kind)
            stored = found.view(torch.float8_e4m3fn) if kind == "fp8" else found
            dequantized = stored.float() * engine.params[p.param + "_scale"][local[0]]
            same = torch.equal(dequantized, codes[hf] * scales[hf[0]])
        else:
            same = torch.equal(found, full[p.hf_name][hf])
        wrong += [] if same else [p.param]
    return wrong


def work(rank: int, world_size: int, path: Path, sizes: dict[str, int], rollout: dict[str, Any]) -> dict[str, Any]:
    building.find_shared = lambda *_: {}
    process, layout = init_distributed(2), ParallelLayout(world_size, **sizes)
    tp, dtype = sizes.get("tp_size", 1), rollout.pop("dtype", "float32")
    config = RunConfig(
        model=ModelConfig(path=str(path), dtype=dtype),
        data=DataConfig(train_files=[], train_batch_size=5, max_prompt_length=80, max_response_length=12),
        actor=ActorConfig(
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            pipeline_model_parallel_size=sizes.get("pp_size", 1),
        ),
        rollout=RolloutConfig(max_num_seqs=4, **rollout),
        hybrid=HybridConfig(verify="full"),
    )
    inputs = RoleInputs(resolve(config).roles["actor"], load_model_shape(path), layout)
    actor = build_role(config, inputs, build_groups(layout), total_optimizer_steps=1)
    hybrid, generator = build_rollout(config, actor, process, PhaseTimers(), RolloutProgress())
    engine, requests = hybrid.engine, generator._engine.requests
    tensors = load_tensors(path, 1.0, getattr(torch, dtype))
    result: dict[str, Any] = {"stats": asdict(hybrid.reshard_stats)}
    hybrid.reshard()
    result["first"], result["verified"] = find_faults(engine, tensors, rollout["quantization"]), hybrid.verified_tensors
    (sampled,) = generate(requests, [Request(0, PROMPT, 0, SamplingConfig(0.0, 12, ()))])
    result["greedy"] = sampled.tokens.tolist(), sampled.logprobs.tolist()
    with torch.no_grad():
        for param in actor.model.params.values():
            param.mul_(1.5)
    hybrid.reshard()
    tensors = load_tensors(path, 1.5, getattr(torch, dtype))
    result["second"] = find_faults(engine, tensors, rollout["quantization"])
    result["caught"] = []
    for name in FAULTS:
        if rank == world_size - 1:
            engine.params[name][3, 0] += 1
        with pytest.raises(CertificateError) as caught:
            sum(transfer.certificate.verify() for transfer in hybrid._transfers)
        result["caught"].append(str(caught.value))
        if rank == world_size - 1:
            engine.params[name][3, 0] -= 1
    generator.close()
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen2", **ENGINE_SIZES, num_hidden_layers=2)
    return directory


CASES = [
    (1, {}, {"quantization": "fp8"}),
    (4, {"tp_size": 2, "pp_size": 2}, {"quantization": "int8", "tensor_model_parallel_size": 2}),
]


@pytest.mark.parametrize(("ranks", "sizes", "rollout"), CASES, ids=["fp8", "int8, TP2 x PP2 to TP2"])
def test_an_engine_holds_what_a_reference_makes_of_the_weights(
    model: Path, vllm_imported: None, ranks: int, sizes: dict[str, int], rollout: dict[str, Any]
) -> None:
    """Bit by bit in every layout, after an update too; it computes with that, and one wrong code or scale is named."""
    kind, results = rollout["quantization"], run_ranks(work, ranks, model, sizes, dict(rollout), timeout=200)
    tensors = load_tensors(model, 1.0, torch.float32)
    assert all(result["first"] == result["second"] == [] for result in results)
    assert results[0]["verified"] == len(tensors) + sum(map(is_matrix, tensors)), "scales are tensors of their own"
    for result in results:
        for message, name in zip(result["caught"], FAULTS, strict=True):
            assert f"rank {ranks - 1} {name}, box" in message
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, param in reference.named_parameters():
            if is_matrix(name):
                codes, scales = quantize(param, kind)
                param.copy_(codes * scales)
        tokens, logprobs = results[0]["greedy"]
        ids = torch.tensor([[*PROMPT.tolist(), *tokens]])
        scored = reference(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert scored.argmax(-1).tolist() == tokens
    assert scored.max(-1).values.tolist() == pytest.approx(logprobs, abs=1e-5)


def test_half_of_the_bytes_of_bfloat16_are_moved(model: Path, vllm_imported: None) -> None:
    """One byte per element of a matrix, and four per row; two for the rest."""
    (result,) = run_ranks(work, 1, model, {}, {"quantization": "int8", "dtype": "bfloat16"}, timeout=200)
    assert result["first"] == result["second"] == []
    tensors = load_tensors(model, 1.0, torch.bfloat16)
    matrices = [tensor for name, tensor in tensors.items() if is_matrix(name)]
    rest = sum(tensor.nbytes for name, tensor in tensors.items() if not is_matrix(name))
    expected = rest + sum(tensor.nbytes // 2 + 4 * len(tensor) for tensor in matrices)
    assert sum(value for name, value in result["stats"].items() if name != "bytes_aliased") == expected
    assert compute_engine_bytes(load_model_shape(model), 1, 2, coded=True) == expected, "and so it is planned"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_are_the_nearest(kind: Any) -> None:
    """Of a row of zeros, and of numbers halfway between two codes; pieces have the codes of the whole."""
    matrix = torch.randn(7, 48, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 7)[:, None]
    matrix[2] = 0
    matrix[3, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    matrix[3, 4:] = 0
    scales = find_scales(matrix.abs().amax(1, keepdim=True), kind)
    codes, expected = encode(matrix, scales, kind), quantize(matrix, kind)
    assert torch.equal(scales, expected[1])
    stored = codes.view(torch.float8_e4m3fn) if kind == "fp8" else codes
    assert torch.equal(stored.float(), expected[0]) and not stored[2].float().any()
    assert torch.equal(encode(matrix[1:5, 8:30], scales[1:5], kind), codes[1:5, 8:30])
    error = (stored.float() * scales - matrix).abs()
    step = scales / 2 if kind == "int8" else torch.maximum(matrix.abs() / 16, scales * 2**-10)
    assert (error <= step * 1.001).all()
    if kind == "int8":
        assert stored[3, :4].tolist() == [127, 0, 2, -2]
