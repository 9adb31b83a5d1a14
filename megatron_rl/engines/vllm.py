# SPDX-License-Identifier: Apache-2.0
"""vLLM inside the training processes (`external_launcher`), on GPU and on CPU. The only file that imports vllm.

What in-process vLLM needs (each guarded by a test):

* torch.distributed is initialized before, else world > tp breaks;
* its shutdown must not destroy the job's process groups;
* on CPU, linears must keep their weight (oneDNN would pack it away and leave an empty parameter);
* on CPU, its shared-memory collectives stay off: their segments are named after ranks only, so a
  killed run, or a second one on the host, makes the next engine fail; torch.distributed serves;
* on CPU, it must not bind the memory of the whole process, the trainer's included, to one NUMA node;
* on CPU, its fused experts compute with weights in a packed order: they are packed in place after every
  update, so that between updates their parameters do not hold what the placement table says;
* on CPU, prompts are computed whole: for one that is computed in parts vLLM turns back its random numbers,
  which CPU generators cannot do;
* an error in a step leaves its requests running: they are aborted before it is raised;
* it must not reseed or advance the trainer's random numbers;
* the prefix cache is dropped after every weight update.

A test lists the private names that this file relies on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, share_params
from megatron_rl.engines.vllm_arguments import (
    LOAD_FORMAT,
    list_engine_arguments,
    list_engine_environment,
    records_kept_sets,
)
from megatron_rl.engines.vllm_bitwise import make_batch_invariant
from megatron_rl.engines.vllm_coding import register_method
from megatron_rl.engines.vllm_experts import RouteRecorder, find_packed_experts, list_params
from megatron_rl.engines.vllm_limits import check_device_limits, check_options
from megatron_rl.engines.vllm_lora import list_adapter_params, take_slot
from megatron_rl.engines.vllm_truncation import KeptSetRecorder, list_extra_args
from megatron_rl.engines.vllm_world import find_world
from megatron_rl.parallel.random_streams import keep_random_streams
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.megatron_layout import padded_vocab_size
from megatron_rl.weights.rollout_layout import VLLM_PADDED_PARAMETERS, vllm_placements
from megatron_rl.weights.row_quantization import SCALE_SUFFIX, CodeFormat
from megatron_rl.weights.shard_box import ShardBox, check_placements

# Read by vLLM at import: offline, quiet, no telemetry, no plugins, no engine process of its own.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class VllmEngine:
    """One rank of one vLLM engine.

    Attributes:
        params: vLLM's own parameters by name, written in place by the hybrid engine.
        code_format: of its matrices; None: they are in the type of the model.
    """

    def __init__(self, spec: EngineSpec) -> None:
        assert dist.is_initialized(), "vLLM must join the job's process groups, not make its own"
        self._shape, self._tp_size = spec.shape, spec.config.tensor_model_parallel_size
        self._place = spec.find_place
        check_device_limits(spec)
        vllm = prepare_vllm(spec.process.device)
        check_options(spec, {item.name for item in fields(import_module("vllm.engine.arg_utils").EngineArgs)})
        _register_model(vllm, spec)
        self.code_format = _register_codes(spec)
        launcher_world = os.environ.get("LOCAL_WORLD_SIZE")
        self.padded_params = VLLM_PADDED_PARAMETERS
        shared = self._register_loader(spec)
        os.environ |= list_engine_environment(spec)
        with keep_random_streams(), find_world(spec, import_module("vllm.distributed.parallel_state")):
            self._llm = vllm.LLM(**list_engine_arguments(spec))
        self.shared_params = frozenset(shared)
        self._sampling_params = vllm.SamplingParams
        if launcher_world is not None:  # the CPU platform overwrites it with tp
            os.environ["LOCAL_WORLD_SIZE"] = launcher_world
        self._names: dict[int, str] = {}  # key of a request -> vLLM's name for it
        self._requests: dict[int, Request] = {}
        self._stop = spec.stop
        self._keys: dict[str, int] = {}  # and back, from the short name
        self._can_sleep = spec.process.device.type == "cuda"
        worker = self._llm.llm_engine.model_executor.driver_worker.worker
        self.params: dict[str, torch.Tensor] = list_params(worker.get_model())
        if spec.config.bitwise:
            columns = padded_vocab_size(spec.shape.vocab_size, self._tp_size) // self._tp_size
            make_batch_invariant(worker.get_model(), worker.model_runner.sampler, columns)
        self._kept = KeptSetRecorder(worker.model_runner) if records_kept_sets(spec) else None
        self._routes: RouteRecorder | None = None
        if spec.route_shape is not None:
            self._routes = RouteRecorder(worker.get_model(), worker.model_runner, spec.route_shape)
        self._packed_experts = find_packed_experts(worker.get_model(), spec.process.device)
        check_placements(
            self.placements(spec.process.rank),
            {name: tuple(p.shape) for name, p in self.params.items() if not name.endswith(SCALE_SUFFIX)},
            where=f"vLLM on rank {spec.process.rank}",
            padded=VLLM_PADDED_PARAMETERS,
        )
        self._lora_request = _take_adapters(worker, spec) if spec.adapters is not None else None
        for name, tensor in self.params.items():  # vocabulary padding is written by nobody: zero it once
            if name not in self.shared_params:
                tensor.zero_()
        self._adapters = list_adapter_params(worker.get_model(), spec.adapters) if spec.adapters else {}
        self.params |= self._adapters

    def _register_loader(self, spec: EngineSpec) -> set[str]:
        """Let vLLM "load" by sharing the actor's storage, before anything is compiled or captured.

        Returns:
            The names of the parameters that it shares, once it has loaded.
        """
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        shareable, shared = spec.shareable(self.placements(spec.process.rank)), set()

        @register_model_loader(LOAD_FORMAT)
        class SharingLoader(BaseModelLoader):
            def download_model(self, model_config: Any) -> None:
                """Nothing to fetch: the actor has the weights."""

            def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
                """Bind what can be shared; the rest is written by the first reshard."""
                shared.update(share_params(dict(model.named_parameters()), shareable))

        return shared

    def shard_key(self, rank: int) -> int:
        """Ranks with equal keys have equal placement tables."""
        return self._place(rank)

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """ShardBox table of any rank of the job."""
        return vllm_placements(self._shape, tp_size=self._tp_size, tp_rank=self._place(rank))

    def begin_weight_update(self) -> None:
        """Bring the parameters' memory back (same addresses) after a sleep."""
        if self._can_sleep and self._llm.llm_engine.is_sleeping():
            self._llm.wake_up(tags=["weights"])
            for tensor in self._adapters.values():  # wider than the adapters: nothing else is written behind them
                tensor.zero_()

    def end_weight_update(self) -> None:
        """Pack the experts, forget keys and values computed with the old weights; bring the cache back."""
        for param, instructions in self._packed_experts:
            _pack_experts(param, instructions)
        if self._can_sleep and self._llm.llm_engine.is_sleeping():
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def add(self, requests: Sequence[Request]) -> None:
        """Take requests in; they run from the next step on."""
        params = [
            self._sampling_params(
                temperature=request.sampling.temperature,
                max_tokens=request.sampling.max_tokens,
                seed=request.seed,
                stop_token_ids=list(request.sampling.stop_token_ids),
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                skip_clone=True,  # it serves this request only
                extra_args=list_extra_args(str(request.key), request),
            )
            for request in requests
        ]
        with self._running():
            names = self._llm.enqueue(
                [{"prompt_token_ids": request.tokens.tolist()} for request in requests],
                params,
                self._lora_request,
                use_tqdm=False,
            )
        for request, name in zip(requests, names, strict=True):
            self._names[request.key], self._keys[_short(name)] = name, request.key
            self._requests[request.key] = request
            if self._routes is not None:
                self._routes.expect(name, request)

    def step(self) -> list[Sampled]:
        """One forward for everything that runs; a response is returned by the step that samples its last token."""
        with self._running():
            outputs = [output for output in self._llm.llm_engine.step() if output.finished]
        finished = []
        for output in outputs:
            key, last = self._keys[output.request_id], output.outputs[0]
            reason = "stop" if last.finish_reason == "stop" or self._completes_text(key, last.token_ids) else "length"
            finished.append(self._end(key, last.token_ids, last.logprobs, reason, output.num_cached_tokens))
        return finished + (self._stop_early() if self._stop else [])

    def _stop_early(self) -> list[Sampled]:
        """What a stop string has ended; vLLM, which has no tokenizer, would continue."""
        states = self._llm.llm_engine.output_processor.request_states
        keys = [
            key
            for key, name in self._names.items()
            if self._completes_text(key, states[name].detokenizer.output_token_ids)
        ]
        return [replace(sampled, finish_reason="stop") for sampled in self.interrupt(keys)]

    def _completes_text(self, key: int, sampled: Sequence[int]) -> bool:
        return self._stop is not None and bool(sampled) and self._requests[key].ends_by(self._stop, sampled)

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Forget requests; their blocks of the prefix cache stay, for those that continue them."""
        engine, partial = self._llm.llm_engine, []
        names = {key: self._names[key] for key in keys if key in self._names}
        for key, name in names.items():  # vLLM itself says nothing of what it aborts
            state = engine.output_processor.request_states[name]
            tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
            partial.append(self._end(key, tokens, logprobs, "interrupted", state.num_cached_tokens))
        engine.abort_request(list(names.values()), internal=True)
        return partial

    def _end(
        self, key: int, token_ids: Sequence[int], logprobs: Any, finish_reason: str, num_cached: int | None
    ) -> Sampled:
        """What a request has, which is forgotten here."""
        name, request = self._names.pop(key), self._requests.pop(key)
        del self._keys[_short(name)]
        kept = None
        if request.sampling.is_truncated:
            assert self._kept is not None, "config.rollout_checks refuses it"
            kept = self._kept.take(str(key), len(request.tokens), len(token_ids))
        routes = None if self._routes is None else self._routes.take(name, len(request.tokens) + len(token_ids))
        tokens, picked = np.array(token_ids, np.int32), np.full(len(logprobs), np.nan, np.float32)
        if len(logprobs) == len(tokens):  # else `check_sampled` says so, on all ranks
            picked[:] = [entry[token].logprob for entry, token in zip(logprobs, token_ids, strict=True)]
        return Sampled(key, tokens, picked, finish_reason, kept, num_cached if len(tokens) else None, routes)

    def has_requests(self) -> bool:
        """True if something runs or waits."""
        return self._llm.llm_engine.has_unfinished_requests()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Keep the trainer's random numbers; an error leaves no request behind."""
        with keep_random_streams():
            try:
                yield
            except BaseException:
                self._abort()
                raise

    def _abort(self) -> None:
        """Forget every request, and the blocks of the prefix cache that a step announced and did not fill."""
        engine = self._llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        self._llm.reset_prefix_cache()
        self._names, self._keys, self._requests = {}, {}, {}
        if self._kept is not None:
            self._kept.clear()
        if self._routes is not None:
            self._routes.clear()

    def tokens_in_flight(self) -> int:
        """Tokens sampled so far for responses that are not finished."""
        states = list(self._llm.llm_engine.output_processor.request_states.values())
        return sum(state.detokenizer.num_output_tokens() for state in states)

    def sleep(self) -> None:
        """Give weights and KV cache back to the trainer (CUDA; a no-op on CPU)."""
        if self._can_sleep:
            self._llm.sleep(level=2)

    def close(self) -> None:
        """Shut the engine down; the process groups of the job stay alive (see `prepare_vllm`)."""
        self._llm.llm_engine.engine_core.shutdown()


def prepare_vllm(device: torch.device) -> ModuleType:
    """Import vllm, made fit for life inside a training process; safe to call twice."""
    os.environ.update(_ENVIRONMENT)
    if device.type == "cpu":
        # Two sampler helpers use torch.compile even in eager mode: seconds per start, and a compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        torch._dynamo.config.disable = True
        # It imports inductor to correct what is compiled.
        sys.modules.setdefault("vllm.env_override", ModuleType("vllm.env_override"))
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # An error in a step would be preceded by the state of the engine, 10 kB of it from each rank.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
    import vllm
    from vllm.v1.engine import core

    import_module("vllm.entrypoints.llm")  # vllm imports it, and the worker, when they are used

    def keep_process_groups(*args: Any, **kwargs: Any) -> None:
        """Stand in for a clean-up that destroys the job's process groups."""

    engine_core: Any = core  # it imports this name from elsewhere
    engine_core.cleanup_dist_env_and_memory = keep_process_groups
    if device.type == "cpu":
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
        from vllm.model_executor.layers import utils

        import_module("vllm.v1.worker.cpu_worker")
        _pack_reloaded_experts()

        def use_plain_linear(layer: Any, remove_weight: bool = False) -> None:
            layer.cpu_linear = F.linear

        utils.dispatch_cpu_unquantized_gemm = use_plain_linear
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        vars(torch.ops._C)["init_cpu_memory_env"] = lambda nodes: None
    return vllm


def _pack_reloaded_experts() -> None:
    """Servers load weights again by vLLM's own loader, which packs fused experts at the first time only."""
    methods = import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    method = methods.UnquantizedFusedMoEMethod
    set_up = method._setup_kernel
    if hasattr(set_up, "__wrapped__"):
        return

    @wraps(set_up)
    def set_up_and_pack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_first = self.moe_kernel is None
        set_up(self, layer, w13, w2)
        if not is_first:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = set_up_and_pack


def _take_adapters(worker: Any, spec: EngineSpec) -> Any:
    """vLLM's name for the policy's adapters, for which it has a slot now."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest

    assert spec.adapters is not None
    take_slot(worker, LoRAModel(1, spec.adapters.rank, {}))
    return LoRARequest("policy", 1, "in memory")


def _pack_experts(param: torch.Tensor, instructions: str) -> None:
    """Reorder a fused parameter [E, rows, columns] in place; once per update, as packing twice is another order."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    param.copy_(cpu_prepack_moe_weight(param, instructions))


def _register_model(vllm: ModuleType, spec: EngineSpec) -> None:
    """Register the class itself: by name, vLLM inspects it in a subprocess that takes 8 to 16 seconds."""
    family = FAMILIES[spec.shape.family]
    module = import_module(f"vllm.model_executor.models.{family.vllm_module or spec.shape.family}")
    vllm.ModelRegistry.register_model(family.architecture, getattr(module, family.architecture))


def _register_codes(spec: EngineSpec) -> CodeFormat | None:
    """Let vLLM keep matrices in eight bits, if this is asked for."""
    if spec.config.quantization == "none":
        return None
    layers = "vllm.model_executor.layers"
    register_method(
        spec.config.quantization, import_module(f"{layers}.quantization"), import_module(f"{layers}.linear")
    )
    return spec.config.quantization


def _short(name: str) -> str:
    """What vLLM calls a request when it is finished: "7" for "7-random"."""
    return name.partition("-")[0]
