# SPDX-License-Identifier: Apache-2.0
"""The layout of a role from its config section, the layouts that its model refuses, and the memory of the GPUs here."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import FULLY_SHARDED, STAGE_SETTINGS, LayoutConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.model_config import find_adapters

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def build_layout(config: LayoutConfig, world_size: int, first_rank: int = 0) -> ParallelLayout:
    """Build the layout of a config section on `world_size` ranks (UserError if its sizes do not divide them)."""
    chunks: tuple[int | None, ...] = ()
    pp_size = config.pipeline_model_parallel_size
    if pp_size > 1 and any(getattr(config, name) for name in STAGE_SETTINGS[1:]):
        from megatron_rl.weights.pipeline_stages import find_chunk_layers

        chunks = find_chunk_layers(config)
    layout = ParallelLayout(
        world_size,
        first_rank=first_rank,
        tp_size=config.tensor_model_parallel_size,
        pp_size=pp_size,
        vpp_size=config.virtual_pipeline_model_parallel_size or max(1, len(chunks) // pp_size),
        cp_size=config.context_parallel_size,
        chunk_layers=chunks,
        ep_size=config.expert_model_parallel_size,
        etp_size=config.expert_tensor_parallel_size,
    )
    size = config.zero_shard_size if config.zero_stage == FULLY_SHARDED else None
    return replace(layout, shard_size=size) if size and size < layout.shard_sizes[0] else layout


def check_layout(role: RoleSpec, shape: ModelShape, ranks: range) -> ParallelLayout:
    """Return a role's layout on its ranks; raise UserError if its model does not support it."""
    layout = build_layout(role.settings, len(ranks), ranks.start)
    if layout.is_split:
        from megatron_rl.weights.support import check_training_layout

        check_training_layout(shape, layout, sequence_parallel=role.settings.sequence_parallel, section=role.section)
    allowed: dict[str, list[object]] = {}
    if shape.delta_net is not None:
        heads = shape.delta_net.key_heads // layout.tp_size
        allowed["context_parallel_size"] = [n for n in range(1, heads + 1) if heads % n == 0]
    if shape.delta_net is not None or FAMILIES[shape.family].has_sinks:
        allowed |= {"zero_stage": [1], "step_mode": ["eager", "static"]}
    if layout.vpp_size > 1:  # microbatches of an interleaved schedule are not captured
        allowed["step_mode"] = ["eager", "static"]
    for name, values in allowed.items():
        setting = f"{role.section}.{name}"
        if (value := getattr(role.settings, name, values[0])) not in values:
            raise UserError(
                f"{setting} = {value} with a {shape.family} model in the layout {layout.describe()}",
                source=f"{setting} and the model's config.json",
                expected=f"one of {values}",
                hint=f"set {setting}={values[0]}",
            )
    find_adapters(shape, role.lora, role.section)
    if role.is_quantized:
        from megatron_rl.weights.quantization import check_quantization

        check_quantization(shape, layout.tp_size, role.section)
    if role.settings.zero_stage == FULLY_SHARDED:
        from megatron_rl.weights.row_shards import check_shards

        check_shards(layout, shape, role.section)
    return layout


def find_gpu_memory() -> int | None:
    """Return the bytes of this process's smallest local GPU; `None` without GPUs."""
    import torch  # dry runs load no torch

    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min(sizes, default=None)
