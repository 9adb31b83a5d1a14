# SPDX-License-Identifier: Apache-2.0
"""vLLM's experts: as matrices, their order on CPU, and which ones it chose for each token, however it came to it.

vLLM's own output of routes needs its second model runner; routers in process have a hook. Routes lie where keys
and values do, in blocks: a prompt that is found in the prefix cache has the routes of who computed it. A request's
routes are collected step by step, as a preempted one may lose its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megatron_rl.engines.protocol import Request
from megatron_rl.types import RouteShape
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.fused_experts import split_experts
from megatron_rl.weights.packed_experts import is_packed, split_turns


class RouteRecorder:
    """Listens to the routers of a model, and to the model runner (vLLM's v1) for whose rows they are.

    Args:
        model: vLLM's.
        runner: that executes it.
        shape: of the routes.
    """

    def __init__(self, model: torch.nn.Module, runner: Any, shape: RouteShape) -> None:
        self._batch, self._shape = runner.input_batch, shape
        self._step: dict[int, torch.Tensor] = {}  # layer -> experts of the rows of the forward that is under way
        self._routes: dict[str, np.ndarray] = {}  # of each request, with room for all of its tokens
        self._known: dict[str, int] = {}  # tokens of it whose routes are there
        self._blocks: dict[int, np.ndarray] = {}  # of the cache, by vLLM's number
        modules: list[Any] = [*model.modules()]
        routers = [module.router for module in modules if hasattr(getattr(module, "router", None), "set_capture_fn")]
        assert len(routers) == shape.layers, f"{len(routers)} routers in {shape.layers} layers"
        for layer, router in enumerate(routers):
            router.set_capture_fn(self._listen_to(layer))
        self._execute, runner.execute_model = runner.execute_model, self._execute_and_collect

    def expect(self, name: str, request: Request) -> None:
        """A request, by vLLM's name for it."""
        self._routes[name] = self._shape.unknown(len(request.tokens) + request.sampling.max_tokens)
        self._known[name] = 0

    def take(self, name: str, length: int) -> np.ndarray:
        """The routes of so many tokens of a request, which is forgotten."""
        del self._known[name]
        return self._routes.pop(name)[:length]

    def clear(self) -> None:
        """Forget all requests and blocks."""
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
        """Note [rows, layers, choices] of a step; a request has a number of them, behind its computed tokens."""
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
    """Fused expert weights with the instruction set that vLLM's CPU kernel wants them packed for."""
    if device.type != "cpu":
        return []
    packed = []
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "w13_weight"):
            experts = module.quant_method.moe_kernel.fused_experts
            if not experts._use_zentorch:  # that kernel takes them as they are
                packed += [(param.data, experts.isa) for param in (module.w13_weight, module.w2_weight)]
    return packed


def list_params(model: torch.nn.Module, shape: ModelShape, tp_rank: int) -> dict[str, torch.Tensor]:
    """The parameters by name, experts as matrices; a linear with adapters has the one without inside."""
    params = split_experts({name.replace(".base_layer.", "."): p.data for name, p in model.named_parameters()})
    if not is_packed(shape):
        return params
    if tp_rank:  # results are summed: the first rank alone has this bias
        for name in [name for name in params if ".w2_bias." in name]:
            params.pop(name).zero_()
    return split_turns(params)
