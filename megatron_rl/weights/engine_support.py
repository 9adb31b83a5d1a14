# SPDX-License-Identifier: Apache-2.0
"""Which engines serve a family whose layers are not like the others'."""

from __future__ import annotations

from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.family import FAMILIES
from megatron_rl.weights.rope import YarnScaling


def check_engine(shape: ModelShape, engine: str) -> None:
    """Refuse an engine that is not known to compute what a model with sinks or gated delta nets computes.

    Args:
        shape: the model.
        engine: `rollout.engine`; one that a plugin adds is not refused.

    Raises:
        UserError: naming engines that serve it.
    """
    if shape.delta_net is not None and engine == "megatron":
        raise UserError(
            f"rollout.engine = megatron with a {shape.family} model: its cache holds keys and values, no states",
            source="rollout.engine and the model's config.json",
            expected="vllm (on GPUs) or hf",
            hint="set rollout.engine=hf",
        )
    if not FAMILIES[shape.family].has_sinks:
        return
    if engine in ("vllm_server", "sglang", "openai"):
        raise UserError(
            f"rollout.engine = {engine!r} with a {shape.family} model, whose experts are packed in files",
            source="rollout.engine and the model's config.json",
            expected="vllm, hf or megatron for this family",
            hint="set rollout.engine=vllm",
        )
    is_published = shape.sliding_layers == tuple(range(0, shape.num_layers, 2)) and shape.rms_norm_eps == 1e-5
    if engine == "vllm" and not (is_published and isinstance(shape.rope_scaling, YarnScaling)):
        raise UserError(
            f"rollout.engine = 'vllm' with a {shape.family} model of windows in the layers {shape.sliding_layers}, "
            f"an epsilon of {shape.rms_norm_eps} and {shape.rope_scaling}",
            source="rollout.engine and the model's config.json",
            expected="windows in every other layer from the first on, an epsilon of 1e-5, and yarn, as published",
            hint="set rollout.engine=hf or megatron",
        )
