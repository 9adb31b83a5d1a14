# SPDX-License-Identifier: Apache-2.0
"""Intermediate results of a model, under the same names for transformers and Megatron.

A *trace* maps HF module names to [t, n] float32 on the CPU, in execution order. The first differing entry locates an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.samples.batch import Padding, build_train_batch
from megatron_rl.training.packed_model import LogprobHead, PackedModel
from megatron_rl.types import Branch, UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.family import FAMILIES
from megatron_rl.weights.megatron_layout import stage_layers

Trace = dict[str, torch.Tensor]
_Catch = tuple[torch.nn.Module, Callable[[Any, Any], None]]  # module, hook of its inputs and output


@torch.no_grad()
def trace_huggingface(model: Any, tokens: np.ndarray) -> Trace:
    """Trace a transformers model on one sequence [t]."""
    trace: Trace = {}

    def keep(name: str) -> Callable[[Any, Any], None]:
        return lambda inputs, output: trace.update({name: _rows(output)})

    body, catches = (
        model.model,
        [
            (model.model.embed_tokens, keep("model.embed_tokens")),
            (model.model.norm, keep("model.norm")),
            (model.lm_head, keep("lm_head")),
        ],
    )
    for number, layer in enumerate(body.layers):
        prefix, block = f"model.layers.{number}.", "self_attn" if hasattr(layer, "self_attn") else "linear_attn"
        attention, at = getattr(layer, block), prefix + block
        last = attention.o_proj if hasattr(attention, "o_proj") else attention.out_proj
        catches.append((last, lambda inputs, _, at=at: trace.update({f"{at} (heads)": _rows(inputs[0])})))
        for name in ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "q_norm", "k_norm", "o_proj", "out_proj"):
            if hasattr(attention, name):
                catches.append((getattr(attention, name), keep(f"{at}.{name}")))
        catches += [(norm, keep(prefix + name)) for name, norm in layer.named_children() if name.endswith("layernorm")]
        mlp = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
        catches.append((mlp, keep(prefix + "mlp")))
    with _catching(catches):
        model(torch.from_numpy(tokens)[None].to(next(model.parameters()).device))
    return trace


@torch.no_grad()
def trace_megatron(policy: PackedModel, tokens: np.ndarray) -> Trace:
    """Trace a Megatron model; collective.

    Returns:
        The trace on rank 0, {} elsewhere.

    Raises:
        UserError: context parallelism, which would split the sequence.
    """
    layout, shape = policy.groups.layout, policy.shape
    if layout.cp_size > 1:
        raise UserError(
            f"context_parallel_size {layout.cp_size}",
            source="--layout",
            expected="cp=1",
            hint="the other dimensions find the same faults",
        )
    trace: Trace = {}
    catches: list[_Catch] = []
    for chunk, model in enumerate(policy.stages):
        numbers = stage_layers(shape.num_layers, layout, policy.groups.at.pp, chunk)
        catches += _catch_chunk(policy, model, numbers, trace)
    sequence = Branch.of_response(tokens, 1)
    count = policy.microbatch_count_multiple
    batch = build_train_batch(
        [sequence] * count,
        [0.0] * count,
        [(range(count), [[[i] for i in range(count)]])],
        dp_rank=0,
        padding=Padding(policy.pad_multiple),
        device=policy.device,
    )
    with _catching(catches):
        policy.compute_forward(batch, LogprobHead(policy))
    mine = {name: value[: len(tokens)] for name, value in trace.items()}
    is_first_replica = policy.groups.at.dp == 0 and policy.groups.at.tp == 0
    parts: list[Trace | None] = [None] * dist.get_world_size()
    dist.gather_object(mine if is_first_replica else {}, parts if dist.get_rank() == 0 else None)
    return {name: value for part in parts for name, value in (part or {}).items()}


def _catch_chunk(policy: PackedModel, model: Any, numbers: range, trace: Trace) -> Iterator[_Catch]:
    """Yield modules of a chunk and hooks that trace their outputs; equal on TP ranks, because hooks gather."""
    shape, tp_size = policy.shape, policy.groups.layout.tp_size
    norms = {kind: name for name, kind in FAMILIES[shape.family].norms}

    def keep(name: str, value: torch.Tensor, *, is_split: bool) -> None:
        """Keep the first micro-batch's value, gathered over TP."""
        if name not in trace:
            flat = value.reshape(-1, value.shape[-1]) if not is_split else value.reshape(value.shape[0], -1)
            has_rows = policy.config.sequence_parallel and not is_split
            trace[name] = _gather(flat, policy.groups.tp, 1 if is_split else 0) if is_split or has_rows else _copy(flat)

    def output_of(name: str, *, is_split: bool = False) -> Callable[[Any, Any], None]:
        return lambda inputs, output: keep(name, _first(output), is_split=is_split)

    def projections(prefix: str, own: ModelShape) -> Callable[[Any, Any], None]:
        q, kv = own.num_heads // tp_size * own.query_dim, own.num_kv_heads // tp_size * own.head_dim

        def catch(inputs: Any, output: Any) -> None:
            whole = _first(output)
            sizes = (q, kv) if whole.shape[-1] == q + kv else (q, kv, kv)  # keys may give the values
            for name, part in zip("qkv", whole.split(sizes, dim=-1), strict=False):
                keep(f"{prefix}self_attn.{name}_proj", part, is_split=True)

        return catch

    def heads_of(name: str) -> Callable[[Any, Any], None]:
        return lambda inputs, output: keep(f"{name} (heads)", inputs[0], is_split=True)

    def logits(inputs: Any, output: Any) -> None:
        output_of("model.norm")(inputs, output)
        normed = trace["model.norm"].to(output)
        local = normed @ model.output_weight.T.to(normed)  # [t, v/tp]
        if "lm_head" not in trace:
            trace["lm_head"] = _gather(local, policy.groups.tp, 1)[:, : shape.vocab_size]

    if model.pre_process:
        yield model.embedding, output_of("model.embed_tokens")
    for number, layer in zip(numbers, model.decoder.layers, strict=True):
        prefix, attention = f"model.layers.{number}.", layer.self_attention
        if "input_norm" in norms:
            yield layer.input_layernorm, output_of(prefix + norms["input_norm"])
        is_net = number in shape.delta_layers
        if shape.latent is None and not is_net:
            yield attention.linear_qkv, projections(prefix, shape.at(number))
        elif shape.latent is not None:
            name = "q_b_proj" if shape.latent.query else "q_proj"
            yield attention.linear_q_up_proj, output_of(f"{prefix}self_attn.{name}", is_split=True)
            yield attention.linear_kv_up_proj, output_of(prefix + "self_attn.kv_b_proj", is_split=True)
        if shape.qk_norm and not is_net:
            suffix = "norm" if FAMILIES[shape.family].norms_all_heads else "layernorm"
            for x in "qk":
                yield getattr(attention, f"{x}_{suffix}"), output_of(f"{prefix}self_attn.{x}_norm", is_split=True)
        yield attention.linear_proj, heads_of(prefix + ("linear_attn" if is_net else "self_attn"))
        yield attention.linear_proj, output_of(prefix + ("linear_attn.out_proj" if is_net else "self_attn.o_proj"))
        if "mlp_norm" in norms:
            yield layer.pre_mlp_layernorm, output_of(prefix + norms["mlp_norm"])
        yield layer.mlp, output_of(prefix + "mlp")
    if model.post_process:
        yield model.decoder.final_layernorm, logits


@contextmanager
def _catching(catches: list[_Catch]) -> Iterator[None]:
    handles = [
        module.register_forward_hook(lambda _, inputs, output, act=act: act(inputs, output)) for module, act in catches
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first(output: Any) -> torch.Tensor:
    """Return a module's first output."""
    return output[0] if isinstance(output, tuple) else output


def _rows(output: Any) -> torch.Tensor:
    """Reshape the output [1, t, ...] of a transformers module to [t, n]."""
    value = _first(output)
    return _copy(value.reshape(value.shape[-3] if value.ndim == 4 else value.shape[-2], -1))


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Copy to the CPU: later modules may overwrite the original."""
    return value.detach().to("cpu", torch.float32, copy=True)


def _gather(value: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    return _copy(torch.cat(parts, dim))
