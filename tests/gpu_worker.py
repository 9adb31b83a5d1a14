# SPDX-License-Identifier: Apache-2.0
"""vLLM on a GPU, as `VllmEngine` sees it: memory that sleeps, loses its contents, and returns at the same addresses.

From vLLM's `gpu_worker.py` and `cumem.py`: parameters and KV cache lie in a pool with the tags "weights" and
"kv_cache". `sleep(level=2)` unmaps all of it; `wake_up` maps the named tags again, at the same addresses, with
arbitrary contents (NaN here). Parameters bound to other storage, such as shared weights, are not in the pool. Each step
runs kernels on all of it. Workspaces and the pool of CUDA graphs are never released. It generates nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megatron_rl.engines.vllm import vllm_engine as seam
from megatron_rl.engines.vllm.vllm_settings import LOAD_FORMAT
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.rollout_layout import vllm_placements

KEPT_BYTES = 3 << 20  # workspaces and graphs


class Unmapped(RuntimeError):
    """A kernel has touched memory that is not there: on a GPU, an illegal access."""


class _Model(torch.nn.Module):
    """Parameters with vLLM's names and sizes."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        sizes: dict[str, list[int]] = {}
        for placed in vllm_placements(shape, tp_size=1, place=0):
            stops = [stop for _, stop in placed.local_box]
            sizes[placed.param] = [max(pair) for pair in zip(sizes.get(placed.param, stops), stops, strict=True)]
        self._by_name = {name: torch.nn.Parameter(torch.full(size, math.nan)) for name, size in sizes.items()}

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._by_name.items()


class Llm:
    """`vllm.LLM` with its worker.

    Attributes:
        calls: recorded calls, in order.
    """

    made: list[Llm] = []
    shape: ModelShape
    loaders: dict[str, Callable[[], Any]] = {}

    def __init__(self, **arguments: Any) -> None:
        assert arguments["enable_sleep_mode"] and arguments["load_format"] == LOAD_FORMAT
        self.calls: list[str] = []
        self._model, self._asleep = _Model(self.shape), set[str]()
        self.loaders[LOAD_FORMAT]().load_weights(self._model, None)
        own = [p.data for p in self._model._by_name.values() if bool(p.data.isnan().any())]
        cache = [torch.zeros(1 << 16)]
        self._pool = {"weights": own, "kv_cache": cache}
        sampler = SimpleNamespace(topk_topp_sampler=SimpleNamespace(forward=None))
        runner = SimpleNamespace(requests={}, input_batch=None, sampler=sampler)
        worker = SimpleNamespace(get_model=lambda: self._model, model_runner=runner)
        blocks = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=(0, 0)), empty_kv_cache_blocks=None)
        scheduler = SimpleNamespace(update_from_output=None, kv_cache_manager=blocks, requests={}, max_model_len=0)
        scheduler.scheduler_config = SimpleNamespace(async_scheduling=False)
        core = SimpleNamespace(scheduler=scheduler)
        self.llm_engine = SimpleNamespace(
            dp_group=None,
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=worker)),
            is_sleeping=lambda: bool(self._asleep),
            has_unfinished_requests=lambda: False,
            abort_request=lambda names, internal: None,
            step=self._step,
            engine_core=SimpleNamespace(engine_core=core, shutdown=lambda: self.calls.append("shutdown")),
        )
        self.made.append(self)

    @property
    def held_bytes(self) -> int:
        """Bytes of the GPU that are in use."""
        return KEPT_BYTES + sum(x.nbytes for tag, held in self._pool.items() if tag not in self._asleep for x in held)

    def sleep(self, level: int) -> None:
        """Give the pool back."""
        assert level == 2
        if self._asleep:  # as in vLLM's log
            return
        self.calls.append("sleep")
        self._asleep = set(self._pool)
        self._lose(self._asleep)

    def wake_up(self, tags: list[str]) -> None:
        """Map the tags again."""
        assert set(tags) <= self._asleep, "what is awake is not woken"
        self.calls.append(f"wake {' '.join(tags)}")
        self._lose(set(tags))  # writes in between were lost
        self._asleep -= set(tags)

    def reset_prefix_cache(self) -> bool:
        """Forget keys and values."""
        self.calls.append("reset")
        return True

    def _step(self) -> list[Any]:
        self.calls.append("step")
        if self._asleep:
            raise Unmapped(f"{' and '.join(sorted(self._asleep))} are not mapped")
        self._pool["kv_cache"][0].zero_()
        return []

    def _lose(self, tags: set[str]) -> None:
        for tag in tags:
            for tensor in self._pool[tag]:
                tensor.fill_(math.nan)


def install(shape: ModelShape) -> None:
    """Replace vLLM by `Llm` in this process."""
    Llm.shape = shape
    register = {"register_model_loader": lambda name: lambda made: Llm.loaders.setdefault(name, made)}
    members: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.engine.arg_utils": {"EngineArgs": make_dataclass("EngineArgs", ["model"])},
        "vllm.model_executor.model_loader": register,
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": object},
        "vllm.distributed.parallel_state": {},
    }
    for name, values in members.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    vllm = SimpleNamespace(LLM=Llm, SamplingParams=None)
    seam.__dict__.update(
        prepare_vllm=lambda device: vllm,
        register_model=lambda vllm, spec: None,
        keep_memory_pools=lambda: Llm.made[-1].calls.append("keep pools"),
    )
