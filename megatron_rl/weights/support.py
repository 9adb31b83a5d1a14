# SPDX-License-Identifier: Apache-2.0
"""Checks of models against layouts and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.extension.registry import find_engine, name_engines
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.family import FAMILIES
from megatron_rl.weights.rope import YarnScaling

if TYPE_CHECKING:
    from megatron_rl.parallel.layout import ParallelLayout

LARGEST_RANK = 512  # largest buffer of vLLM


def check_engine(
    shape: ModelShape, engine: str, quantization: str = "none", adapters: AdapterShape | None = None
) -> None:
    """Refuse a model, a quantization or separate `adapters` that the engine does not support (UserError)."""
    supports = find_engine(engine).has
    if shape.delta_net is not None and not supports("delta_nets"):
        raise UserError(
            f"rollout.engine = {engine!r} with a {shape.family} model: its cache holds keys and values, no states",
            source="rollout.engine and the model's config.json",
            expected=name_engines("delta_nets"),
            hint=f"set rollout.engine={name_engines('delta_nets')}; on a CPU, one that serves it there",
        )
    if quantization != "none" and (shape.num_experts or shape.delta_net is not None):
        raise UserError(
            f"rollout.quantization={quantization} with "
            + ("a mixture of experts" if shape.num_experts else f"a {shape.family} model"),
            source="rollout.quantization",
            expected="a dense model whose layers attend: kernels of experts take no codes with a scale per row, and "
            "linear attention is not tried",
            hint="set rollout.quantization=none",
        )
    if adapters is not None and adapters.rank > LARGEST_RANK:
        raise UserError(
            f"vLLM serves adapters up to rank {LARGEST_RANK}, these have {adapters.rank}",
            source="actor.lora.rank and hybrid.lora",
            expected=f"at most {LARGEST_RANK}",
            hint="set hybrid.lora=merge",
        )
    if adapters is not None and adapters.has_experts:
        raise UserError(
            "adapters of experts, which are not written into vLLM's own buffers",
            source="actor.lora.target_modules and hybrid.lora",
            expected="hybrid.lora=merge, or adapters of attention alone",
            hint="set hybrid.lora=merge",
        )
    if not FAMILIES[shape.family].has_sinks:
        return
    if not supports("sinks"):
        raise UserError(
            f"rollout.engine = {engine!r} with a {shape.family} model, whose heads have sinks and whose "
            "experts are packed in files",
            source="rollout.engine and the model's config.json",
            expected=f"{name_engines('sinks')} for this family",
            hint=f"set rollout.engine={name_engines('sinks')}",
        )
    is_published = shape.sliding_layers == tuple(range(0, shape.num_layers, 2)) and shape.rms_norm_eps == 1e-5
    if not supports("any_sinks") and not (is_published and isinstance(shape.rope_scaling, YarnScaling)):
        raise UserError(
            f"rollout.engine = {engine!r} with a {shape.family} model of windows in the layers {shape.sliding_layers}, "
            f"an epsilon of {shape.rms_norm_eps} and {shape.rope_scaling}",
            source="rollout.engine and the model's config.json",
            expected="windows in every other layer from the first on, an epsilon of 1e-5, and yarn, as published",
            hint=f"set rollout.engine={name_engines('any_sinks')}",
        )


def check_training_layout(
    shape: ModelShape, layout: ParallelLayout, *, sequence_parallel: bool = True, section: str = "actor"
) -> None:
    """Refuse a Megatron layout that does not fit the model (UserError)."""
    experts, tp_size, ep_size = shape.num_experts, layout.tp_size, layout.ep_size
    pp_size, vpp_size = layout.pp_size, layout.vpp_size
    if ep_size > 1 and (experts == 0 or experts % ep_size):
        valid = [n for n in range(1, experts + 1) if experts % n == 0] or [1]
        what = f"does not divide the {experts} experts of the model" if experts else "needs a mixture of experts"
        raise UserError(
            f"expert_model_parallel_size {ep_size} {what}",
            source=f"{section}.expert_model_parallel_size and the model's config.json",
            expected=f"one of {valid}",
            hint="every rank holds as many experts" if experts else f"set {section}.expert_model_parallel_size=1",
        )
    if experts and tp_size > 1 and not sequence_parallel:
        raise UserError(
            f"tensor_model_parallel_size {tp_size} without sequence parallelism does not train experts",
            source=f"{section}.sequence_parallel",
            expected="true for a mixture of experts under tensor parallelism",
            hint=f"set {section}.sequence_parallel=true",
        )
    sizes = [
        ("attention heads", shape.num_heads),
        ("KV heads", shape.num_kv_heads),
        *((("key heads of linear attention", shape.delta_net.key_heads),) if shape.delta_net else ()),
        *(("feed-forward columns", size) for size in shape.ffn_sizes().values()),
    ]
    for what, size in sizes:
        if size % tp_size:
            raise UserError(
                f"tensor_model_parallel_size {tp_size} does not divide the {size} {what} of the model",
                source=f"{section}.tensor_model_parallel_size and the model's config.json",
                expected="one of "
                f"{[n for n in range(1, shape.num_kv_heads + 1) if all(size % n == 0 for _, size in sizes)]}",
                hint="use a smaller TP and more pipeline or data parallelism",
            )
    if shape.num_layers % (pp_size * vpp_size):
        valid = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]
        raise UserError(
            f"pp * vpp = {pp_size} * {vpp_size} = {pp_size * vpp_size} does not divide "
            f"the {shape.num_layers} layers of the model",
            source=f"{section}.pipeline_model_parallel_size, {section}.virtual_pipeline_model_parallel_size",
            expected=f"pp * vpp one of {valid}",
            hint="every chunk of every stage holds the same number of layers",
        )


def check_router_replay(shape: ModelShape, source: str) -> None:
    """Refuse router replay for a dense model (UserError)."""
    if source != "off" and not shape.num_experts:
        raise UserError(
            f"actor.router_replay = {source!r}, and the model has no routers",
            source="actor.router_replay and the model's config.json",
            expected="off for a dense model",
            hint="leave actor.router_replay out",
        )


def check_rollout_layout(shape: ModelShape, tp_size: int) -> None:
    """Refuse an engine layout that does not fit the model (UserError); KV heads may be replicated."""
    if not _fits_engine(shape, tp_size):
        valid = [n for n in range(1, shape.num_heads + 1) if _fits_engine(shape, n)]
        raise UserError(
            f"rollout.tensor_model_parallel_size {tp_size} does not fit {shape.num_heads} attention heads, "
            f"{shape.num_kv_heads} KV heads and {shape.ffn_hidden_size} feed-forward columns",
            source="rollout.tensor_model_parallel_size and the model's config.json",
            expected=f"one of {valid} (divides, or is a multiple of, the KV heads; divides the rest)",
            hint="start with rollout.tensor_model_parallel_size=1",
        )


def _fits_engine(shape: ModelShape, tp_size: int) -> bool:
    kv, net = shape.num_kv_heads, shape.delta_net
    sizes = (shape.num_heads, *shape.ffn_sizes().values(), *((net.key_heads,) if net else ()))
    return all(size % tp_size == 0 for size in sizes) and (kv % tp_size == 0 or tp_size % kv == 0)
