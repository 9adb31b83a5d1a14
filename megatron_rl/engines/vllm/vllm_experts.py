# SPDX-License-Identifier: Apache-2.0
"""vLLM's experts: views per matrix, packed order on CPU, and routes of every token.

Hooks on the routers record routes, as vLLM's own output of them needs the v2 model runner. Routes are kept per KV-cache
block, for prefix-cache hits, and per request, for preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megatron_rl.engines.protocol import Request
from megatron_rl.types import RouteShape
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.packed_experts import is_packed, split_experts, split_turns


class RouteRecorder:
    """A recorder of routes, by hooks on routers and on the v1 model runner."""

    def __init__(self, model: torch.nn.Module, runner: Any, shape: RouteShape) -> None:
        self._batch, self._shape = runner.input_batch, shape
        self._step: dict[int, torch.Tensor] = {}  # layer -> experts of the current forward's rows
        self._routes: dict[str, np.ndarray] = {}  # by request; allocated for its maximum length
        self._known: dict[str, int] = {}  # by request: number of leading tokens with routes
        self._blocks: dict[int, np.ndarray] = {}  # by number of the KV-cache block
        modules: list[Any] = [*model.modules()]
        routers = [module.router for module in modules if hasattr(getattr(module, "router", None), "set_capture_fn")]
        assert len(routers) == shape.layers, f"{len(routers)} routers in {shape.layers} layers"
        for layer, router in enumerate(routers):
            router.set_capture_fn(self._listen_to(layer))
        self._execute, runner.execute_model = runner.execute_model, self._execute_and_collect

    def expect(self, name: str, request: Request) -> None:
        """Allocate the routes of a request, by vLLM's name."""
        self._routes[name] = self._shape.unknown(len(request.tokens) + request.sampling.max_tokens)
        self._known[name] = 0

    def take(self, name: str, length: int) -> np.ndarray:
        """Remove a request; return routes of `length` tokens."""
        del self._known[name]
        return self._routes.pop(name)[:length]

    def clear(self) -> None:
        """Drop all requests and blocks."""
        self._routes, self._known, self._blocks = {}, {}, {}

    def _listen_to(self, layer: int) -> Any:
        def capture(experts: torch.Tensor) -> None:
            self._step[layer] = experts.clone()

        return capture

    def _execute_and_collect(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._step.clear()
        result = self._execute(scheduled, *arguments, **options)
        if self._step:
            rows = torch.stack([self._step[layer] for layer in range(self._shape.layers)], 1)
            self._collect(scheduled.num_scheduled_tokens, rows.cpu().numpy().astype(self._shape.dtype))
        return result

    def _collect(self, counts: dict[str, int], rows: np.ndarray) -> None:
        """Store a step's routes [rows, layers, choices]; `counts` has rows per request."""
        table, at = self._batch.block_table[0], 0
        for index, name in enumerate(self._batch.req_ids):
            first, count = int(self._batch.num_computed_tokens_cpu[index]), counts[name]
            size, numbers = table.block_size, table.block_table.np[index]
            routes, found = self._routes.get(name), rows[at : at + count]
            at += count
            for place in range(first, first + count):
                block = self._blocks.setdefault(int(numbers[place // size]), self._shape.unknown(size))
                block[place % size] = found[place - first]
            if routes is not None:
                for place in range(self._known[name], first):  # from the prefix cache
                    routes[place] = self._blocks[int(numbers[place // size])][place % size]
                routes[first : first + count] = found
                self._known[name] = first + count


def find_packed_experts(model: torch.nn.Module, device: torch.device) -> list[tuple[torch.Tensor, str]]:
    """Return fused weights that a CPU kernel needs packed, with its instruction set."""
    if device.type != "cpu":
        return []
    packed = []
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "w13_weight"):
            experts = module.quant_method.moe_kernel.fused_experts
            if not experts._use_zentorch:  # that kernel needs no packing
                packed += [(param.data, experts.isa) for param in (module.w13_weight, module.w2_weight)]
    return packed


def list_params(model: torch.nn.Module, shape: ModelShape, tp_rank: int) -> dict[str, torch.Tensor]:
    """Return parameters by name, experts as matrices, without adapters."""
    params = split_experts({name.replace(".base_layer.", "."): p.data for name, p in model.named_parameters()})
    if not is_packed(shape):
        return params
    if tp_rank:  # results are summed over TP ranks: only the first one has this bias
        for name in [name for name in params if ".w2_bias." in name]:
            params.pop(name).zero_()
    return split_turns(params)
