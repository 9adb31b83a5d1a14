# SPDX-License-Identifier: Apache-2.0
"""The layout of a role, checked against its model before anything is built, and what the machine can run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.extension.engines import find_engine
from megatron_rl.parallel.layout import ParallelLayout, check_context_parallel
from megatron_rl.planning.cluster import DTYPE_BYTES, check_layout
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import make_adapter_shape
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.fused_experts import ROW_BYTES

HAS_TORCH = importlib.util.find_spec("torch") is not None


def read_layout(spec: RoleSpec, ranks: range, shape: ModelShape, dtype: str) -> ParallelLayout:
    """The layout of a role on its ranks.

    Args:
        spec: of the role.
        ranks: of the job.
        shape: of its model.
        dtype: of its model.

    Raises:
        UserError: the model does not fit it, or its optimizer step cannot do what is asked with its experts.
    """
    layout = check_layout(spec, shape, ranks)
    check_context_parallel(shape.num_heads, shape.num_kv_heads, layout.tp_size, layout.cp_size, section=spec.section)
    if shape.num_experts and spec.trainable:
        _check_experts(spec, shape, layout, dtype)
    return layout


def check_machine(
    config: RunConfig, roles: Mapping[str, tuple[RoleSpec, ModelShape]], engine: str | None = None
) -> list[str]:
    """Refuse what this machine cannot run, if torchrun has started ranks on it; else it is one line of a plan.

    Args:
        config: of the run.
        roles: each with its model, by name.
        engine: of the policy; None if it samples nothing.

    Raises:
        UserError: a step mode, Transformer Engine, or a model in its engine, that needs a GPU of some kind.
    """
    if not HAS_TORCH:
        return []
    import torch

    try:
        for spec, shape in roles.values():
            if spec.trainable and spec.training.step_mode == "graph":
                from megatron_rl.training.step import check_step_mode

                check_step_mode(spec, shape, config.model.dtype)
        if config.model.transformer_impl == "transformer_engine":
            from megatron_rl.models.gpt import choose_transformer_impl

            choose_transformer_impl(config.model.transformer_impl)
        check_on_cpu = find_engine(engine).check_on_cpu if engine is not None else None
        if check_on_cpu is not None and not torch.cuda.is_available():
            check_on_cpu(roles["actor"][1], config.rollout)
    except UserError as error:
        if "RANK" in os.environ:
            raise
        return [f"this machine could not start the run: {error.found}"]
    return []


def _check_experts(spec: RoleSpec, shape: ModelShape, layout: ParallelLayout, dtype: str) -> None:
    """Refuse what an optimizer step cannot do with a mixture of experts."""
    config, section = spec.training, spec.section
    mixture = f"a mixture of {shape.num_experts} experts"
    if config.overlap_grad_reduce:
        raise UserError(
            f"{section}.overlap_grad_reduce with {mixture}, for which it is not tried",
            source=f"{section}.overlap_grad_reduce",
            expected="false",
            hint=f"remove {section}.overlap_grad_reduce",
        )
    if config.step_mode == "graph" and (reason := _why_in_turn(spec, shape, layout, dtype)):
        raise UserError(
            f"{section}.step_mode = graph with {mixture} that are multiplied one after the other ({reason}): the host "
            "reads how many rows each of them has, which a graph cannot hold",
            source=f"{section}.step_mode",
            expected="experts that are multiplied in one product, or another step mode",
            hint=f"set {section}.step_mode=static: the same step without capture",
        )


def _why_in_turn(spec: RoleSpec, shape: ModelShape, layout: ParallelLayout, dtype: str) -> str:
    """Why a rank's experts are not multiplied in one product, see `models/experts.py`; empty: they are."""
    multiple = ROW_BYTES // DTYPE_BYTES[dtype]
    if spec.batch_invariant:
        return "rollout.bitwise"
    if spec.is_quantized:
        return f"{spec.section}.quantization=nf4"
    lengths = {"hidden_size": shape.hidden_size, "moe_intermediate_size / ETP": shape.ffn_hidden_size}
    lengths["moe_intermediate_size / ETP"] //= layout.expert_tp_size
    adapters = make_adapter_shape(shape, spec.lora, spec.section)
    if adapters is not None and adapters.has_experts:
        lengths[f"{spec.section}.lora.rank"] = adapters.rank
    odd = [f"{name} = {length} is no multiple of {multiple}" for name, length in lengths.items() if length % multiple]
    return ", ".join(odd)
