# SPDX-License-Identifier: Apache-2.0
"""Planned bytes of parameters, gradients and optimizer states equal real actors', on every rank and layout.

Measured after an update, on the tensors that megatron-core allocated. Adam's step counters (4 bytes per parameter) are
left out on both sides.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mtp_models import build_with_mtp, save_model_with_mtp
from role_setups import take_step

from actor_runs import ALGORITHM, Case, build_actor, build_batch
from distributed import run_ranks
from megatron_rl.config.schema import ActorConfig
from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.experts import list_matrices
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.parameters import RoleBytes, Upkeep, compute_role_bytes, list_chunks
from megatron_rl.training.roles.actor import Actor
from megatron_rl.training.roles.mtp import Mtp
from megatron_rl.weights.model_config import find_adapters, load_model_shape
from megatron_rl.weights.quantization import QuantizedMatrix
from tiny_models import save_tiny_model

ZERO_3 = dict(zero_stage=3)
SP, REPLICATED = dict(sequence_parallel=True), dict(zero_stage=0)
LORA = dict(lora=LoraConfig(rank=4, target_modules=["q_proj", "o_proj", "up_proj"]))
LORA_OF_EXPERTS = dict(lora=LoraConfig(rank=4, target_modules=["o_proj", "gate_proj", "up_proj", "down_proj"]))
CASES = {
    "one": ("qwen2", Case()),
    "one-bf16": ("qwen3", Case(dtype="bfloat16")),
    "tp2-sp": ("qwen3", Case(2, dict(tp_size=2), SP)),
    "pp2-tied": ("qwen2", Case(2, dict(pp_size=2))),
    "pp2-vpp2-tied-bf16": ("qwen2", Case(2, dict(pp_size=2, vpp_size=2), dtype="bfloat16")),
    "pp2-vpp2-uneven": ("qwen2", Case(2, dict(pp_size=2, vpp_size=2, chunk_layers=(0, 1, 1, 2)))),
    "latent-pp2-uneven": ("deepseek_v3", Case(2, dict(pp_size=2, chunk_layers=(3, 1)))),
    "dp2-bf16": ("qwen2", Case(2, dtype="bfloat16")),
    "dp2-replicated-bf16": ("qwen3", Case(2, actor=REPLICATED, dtype="bfloat16")),
    "tp2-dp2": ("llama", Case(4, dict(tp_size=2))),
    "pp2-dp2-tied": ("qwen2", Case(4, dict(pp_size=2))),
    "pp2-dp2-tied-replicated": ("qwen2", Case(4, dict(pp_size=2), REPLICATED)),
    "moe-dp2": ("qwen3_moe", Case(2)),
    "moe-ep2-dp4-bf16": ("qwen3_moe", Case(4, dict(ep_size=2), dtype="bfloat16")),
    "moe-ep2-tp2-sp": ("qwen3_moe", Case(4, dict(ep_size=2, tp_size=2), SP)),
    "lora-tp2-dp2-sp-bf16": ("qwen2", Case(4, dict(tp_size=2), SP | LORA, dtype="bfloat16")),
    "qlora-tp2-bf16": ("qwen2 wide", Case(2, dict(tp_size=2), LORA | dict(quantization="nf4"), dtype="bfloat16")),
    "lora-pp2-replicated": ("qwen3", Case(2, dict(pp_size=2), REPLICATED | LORA)),
    "zero3-pp2-dp2-tied-bf16": ("qwen2", Case(4, dict(pp_size=2), ZERO_3, dtype="bfloat16")),
    "zero3-dp3": ("qwen3", Case(3, actor=ZERO_3)),
    "zero3-tp2-cp2": ("llama", Case(4, dict(tp_size=2, cp_size=2), ZERO_3)),
    "zero3-moe-ep2-dp4-bf16": ("qwen3_moe", Case(4, dict(ep_size=2), ZERO_3, dtype="bfloat16")),
    "zero3-tp2-replicas": ("llama", Case(4, dict(tp_size=2, shard_size=1), ZERO_3)),
    "zero3-moe-ep2-dp4-replicas-bf16": ("qwen3_moe", Case(4, dict(ep_size=2, shard_size=2), ZERO_3, dtype="bfloat16")),
    "muon-dp2-bf16": ("qwen2", Case(2, actor=dict(optimizer="muon"), dtype="bfloat16")),
    "muon-moe-ep2-replicated": ("qwen3_moe", Case(2, dict(ep_size=2), REPLICATED | dict(optimizer="muon"))),
    "moe-etp1-tp2-sp": ("qwen3_moe", Case(2, dict(etp_size=1, tp_size=2), SP)),
    "lora-experts-ep2": ("qwen3_moe", Case(4, dict(ep_size=2), LORA_OF_EXPERTS, dtype="bfloat16")),
    "glm4-tp2-pp2-sp": ("glm4_moe", Case(4, dict(tp_size=2, pp_size=2), SP)),
    "glm4-ep2-dp2": ("glm4_moe", Case(2, dict(ep_size=2))),
    "latent-tp2-pp2-sp": ("deepseek_v3", Case(4, dict(tp_size=2, pp_size=2), SP)),
    "zero3-glm4-ep2-dp4-bf16": ("glm4_moe", Case(4, dict(ep_size=2), ZERO_3, dtype="bfloat16")),
    "zero3-latent-tp2-sp": ("deepseek_v3", Case(4, dict(tp_size=2), SP | ZERO_3)),
    "delta-nets-tp2-pp2-sp": ("qwen3_next", Case(4, dict(tp_size=2, pp_size=2), SP)),
    "split-delta-nets-tp2-pp2-sp": ("qwen3_5_text", Case(4, dict(tp_size=2, pp_size=2), SP)),
    "moe-ep2-pp2": ("qwen3_moe", Case(4, dict(ep_size=2, pp_size=2))),
    "gemma4-tp2-pp2-sp-bf16": ("gemma4_text", Case(4, dict(tp_size=2, pp_size=2), SP, dtype="bfloat16")),
    "zero3-gemma4-tp2-bf16": ("gemma4_text", Case(4, dict(tp_size=2), SP | ZERO_3, dtype="bfloat16")),
}
ALWAYS = (
    "one-bf16",
    "tp2-sp",
    "pp2-vpp2-tied-bf16",
    "pp2-dp2-tied",
    "moe-ep2-dp4-bf16",
    "lora-tp2-dp2-sp-bf16",
    "qlora-tp2-bf16",
    "zero3-pp2-dp2-tied-bf16",
    "zero3-moe-ep2-dp4-replicas-bf16",
    "muon-dp2-bf16",
    "lora-experts-ep2",
    "glm4-tp2-pp2-sp",
    "gemma4-tp2-pp2-sp-bf16",
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text")
    families += ("gemma4_text",)
    found = {family: tmp_path_factory.mktemp(family) for family in families}
    for family, path in found.items():
        save_tiny_model(path, family)
    found["qwen2 wide"] = tmp_path_factory.mktemp("wide")  # no layout cuts its blocks of 64
    save_tiny_model(found["qwen2 wide"], "qwen2", hidden_size=128, intermediate_size=256)
    return found


def measure(actor: Actor | Mtp) -> RoleBytes:
    """Return the bytes of the actor's tensors."""
    if actor.model.is_fully_sharded:
        return measure_shards(actor)
    modules = actor.model.modules
    buffers = [buffer for module in modules for buffer in (*module.buffers, *module.expert_parallel_buffers)]
    weights = [p.data for p in actor.model.stages.parameters()]
    in_buffers = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    if in_buffers:  # the parameters are views of them
        starts = {tensor.untyped_storage().data_ptr() for tensor in in_buffers}
        frozen = [tensor for tensor in weights if tensor.untyped_storage().data_ptr() not in starts]
        is_untrained = any(name.endswith((".expert_bias", ".layer_scalar")) for name in actor.model.params)
        assert bool(frozen) == (is_untrained or actor.model.adapters is not None)
        in_buffers += frozen
    states, optimizer = 0, actor.optimizer.megatron
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for param, state in part.optimizer.state.items():
            states += sum(tensor.nbytes for tensor in state.values() if torch.is_tensor(tensor) and tensor.ndim > 0)
            if actor.model.config.bf16:
                assert param.dtype == torch.float32
                states += param.nbytes
    matrices = list_matrices(actor.model.stages, torch.detach).values()
    quantized = sum(matrix.nbytes for matrix in matrices if isinstance(matrix, QuantizedMatrix))
    weights_bytes = quantized + sum(t.nbytes for t in in_buffers or weights)
    return RoleBytes(weights_bytes, sum(b.grad_data.nbytes for b in buffers), states)


def measure_shards(actor: Actor | Mtp) -> RoleBytes:
    """Return the bytes under ZeRO-3: storages, padded if the rows of a parameter do not divide."""
    params, state = actor.model.params.values(), actor.optimizer.megatron.optimizer.state
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in params}  # of all experts: one
    moments = sum(x.nbytes for states in state.values() for x in states.values() if x.ndim > 0)
    grads = {p.grad.untyped_storage() for *_, p in actor.optimizer.megatron._shards}  # of a unit: one
    sizes = {storage.data_ptr(): storage.nbytes() for storage in grads}
    return RoleBytes(sum(weights.values()), sum(sizes.values()), moments)


def _measure_rank(rank: int, world_size: int, case: Case, path: Path) -> tuple[RoleBytes, list[list[str]]]:
    actor = build_actor(case, path)
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    take_step(actor, batch, ALGORITHM)
    names = [[name for name, p in stage.named_parameters() if p.requires_grad] for stage in actor.model.stages]
    return measure(actor), names


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in CASES]
)
def test_bytes_are_those_of_a_real_actor(name: str, paths: dict[str, Path]) -> None:
    family, case = CASES[name]
    shape, layout = load_model_shape(paths[family]), ParallelLayout(case.world_size, **case.sizes)
    is_quantized = case.actor.get("quantization") == "nf4"
    adapters = find_adapters(shape, case.actor.get("lora", LoraConfig()), "actor", is_quantized=is_quantized)
    for rank, (found, names) in enumerate(run_ranks(_measure_rank, case.world_size, case, paths[family])):
        planned = compute_role_bytes(
            shape,
            layout,
            rank,
            dtype=case.dtype,
            upkeep=Upkeep.of(ActorConfig(**case.actor)),
            adapters=adapters,
        )
        assert planned == found, f"rank {rank}"
        trained = list_chunks(adapters or shape, layout, rank)
        assert [[p.name for p in chunk if not p.is_frozen] for chunk in trained] == names, f"rank {rank}"


def _measure_mtp(rank: int, world_size: int, case: Case, path: Path) -> RoleBytes:
    actor = build_with_mtp(case, path)
    batch = build_batch(actor.model, case)
    take_step(actor, replace(batch, old_logprobs=batch.rollout_logprobs), ALGORITHM)
    return measure(actor.mtp) if isinstance(actor.mtp, Mtp) else RoleBytes(0, 0, 0)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("glm4_moe", Case(4, dict(ep_size=2), dict(mtp_lr=1e-3), dtype="bfloat16")),
        ("deepseek_v3", Case(4, dict(tp_size=2, pp_size=2), SP | dict(mtp_lr=1e-3))),
    ],
)
def test_bytes_of_the_layer_behind_the_last(family: str, case: Case, tmp_path: Path) -> None:
    save_model_with_mtp(tmp_path, family)
    shape, layout = load_model_shape(tmp_path).mtp, ParallelLayout(case.world_size, **case.sizes).last_stage
    found = run_ranks(_measure_mtp, case.world_size, case, tmp_path, timeout=100)
    for rank in layout.ranks:
        assert compute_role_bytes(shape, layout, rank, dtype=case.dtype) == found[rank], rank


def test_shards_add_up_to_the_model(paths: dict[str, Path]) -> None:
    """ZeRO-1 splits the states of a replica: their sum equals that of one rank without it."""
    shape, layout = load_model_shape(paths["qwen3"]), ParallelLayout(8, tp_size=2)
    sharded = [compute_role_bytes(shape, layout, rank, dtype="bfloat16").optimizer for rank in range(0, 8, 2)]
    whole = compute_role_bytes(
        shape, layout, 0, dtype="bfloat16", upkeep=Upkeep(use_distributed_optimizer=False)
    ).optimizer
    assert sum(sharded) == whole


def test_a_role_without_an_optimizer_has_weights_only(paths: dict[str, Path]) -> None:
    shape = load_model_shape(paths["qwen3"])
    expected = sum(p.numel for p in list_chunks(shape, ParallelLayout(1), 0)[0]) * 2
    found = compute_role_bytes(shape, ParallelLayout(1), 0, dtype="bfloat16", is_trained=False)
    assert found == RoleBytes(expected, 0, 0)
