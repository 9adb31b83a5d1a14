# SPDX-License-Identifier: Apache-2.0
"""The only file that imports vllm: patches for use inside a training process.

* vLLM's shutdown does not destroy the job's process groups;
* on CPU, linear layers keep their weight (oneDNN would leave an empty parameter);
* on CPU, torch.distributed replaces vLLM's shared-memory collectives, which other or killed runs can break;
* on CPU, vLLM does not bind the trainer's memory to one NUMA node;
* on CPU, sigmoid routers without groups have one group, without which vLLM's router of CPUs takes softmax only;
* on CPU, ranks may have experts of their own (`_spread_experts`);
* drafts are drawn with the requests' own random numbers (vLLM: the global stream, so depending on the batch);
* on CPU, temperatures are repeated for drafts by torch: vLLM's kernel writes to a copy and leaves its output
  uninitialized;
* on CPU, the layer that drafts loads without the module for compiled parts, which imports inductor.

With the v1 model runner it also records the sets that tokens are drawn from, and the experts of tokens. Truncation is
our own definition, applied before vLLM's sampler. A request carries its limits in `SamplingParams.extra_args`. Sets are
stored by request and position, so that the set of a token discarded by chunked prefill or preemption is overwritten.
Routes are read from vLLM's own buffer, which only its v2 model runner returns, and are stored per KV-cache block, for
prefix-cache hits, and per request, for preemption.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.engines.protocol import EngineSpec, Request, SamplingConfig
from megatron_rl.engines.truncation import truncate
from megatron_rl.engines.vllm.vllm_settings import CODED_METHOD, DRAFTERS, LOAD_FORMAT
from megatron_rl.types import KeptSets, RouteShape, UserError
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.quantization import SCALE_SUFFIX, CodeFormat, decode
from megatron_rl.weights.rollout_layout import check_engine

KEPT_SETS = "kept_sets"  # in `SamplingParams.extra_args`


@contextmanager
def own_world(spec: EngineSpec, parallel_state: Any) -> Iterator[None]:
    """Limit vLLM to the ranks of this engine, if others have none or DP ranks step together; collective over them.

    Call it after `align_group_names`. vLLM derives its DP rank from the environment.
    """
    is_data_parallel = spec.config.data_parallel_size > 1
    if not is_data_parallel and (spec.ranks is None or len(spec.ranks) == spec.process.world_size):
        yield
        return
    place = spec.find_place(spec.process.rank)
    ranks = range(spec.process.rank - place, spec.process.rank - place + spec.config.ranks_per_engine)
    new_group, get_world_size = dist.new_group, dist.get_world_size
    init_world_group, init_groups = parallel_state.init_world_group, parallel_state.init_model_parallel_group

    def make_group(members: Sequence[int], **options: Any) -> Any:
        if dist.get_rank() not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(members, use_local_synchronization=True, **options)

    def make_groups(places: Sequence[Sequence[int]], *arguments: Any, **options: Any) -> Any:
        return init_groups([[ranks[place] for place in some] for some in places], *arguments, **options)

    with (
        patch.dict(os.environ, {"RANK": str(place)} if is_data_parallel else {}),
        patch.object(dist, "new_group", make_group),
        patch.object(dist, "get_world_size", lambda group=None: len(ranks) if group is None else get_world_size(group)),
        patch.object(parallel_state, "init_world_group", lambda _, *rest: init_world_group(list(ranks), *rest)),
        patch.object(parallel_state, "init_model_parallel_group", make_groups),
    ):
        yield


# Read by vLLM at import: offline, quiet, no telemetry, no plugins, no engine process of its own.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    # FlashInfer's sampler takes no seeds; the check for it imports FlashInfer, which may be missing, and compiles.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_vllm(device: torch.device) -> ModuleType:
    """Import and patch vllm; idempotent."""
    os.environ.update(_ENVIRONMENT)
    if device.type == "cpu":
        # Two sampler helpers use torch.compile even in eager mode, which costs seconds per start and needs a compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        torch._dynamo.config.disable = True
        # This module imports inductor to patch it, which is useless without torch.compile.
        sys.modules.setdefault("vllm.env_override", ModuleType("vllm.env_override"))
        # Gemma 4 imports the compiler even in eager mode, for names of its parts.
        compiler: Any = sys.modules.setdefault("vllm.compilation.backends", ModuleType("vllm.compilation.backends"))
        compiler.set_model_tag = lambda tag: nullcontext()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # vLLM logs the engine's state at errors, 10 kB from each rank.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
    import vllm
    from vllm.v1.engine import core

    import_module("vllm.entrypoints.llm")  # vllm imports this, and the worker, lazily

    engine_core: Any = core  # the name is imported there, which type checkers reject
    engine_core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
    if device.type == "cpu":
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
        from vllm.model_executor.layers import utils

        import_module("vllm.v1.worker.cpu_worker")

        def use_plain_linear(layer: Any, remove_weight: bool = False) -> None:
            layer.cpu_linear = F.linear

        utils.dispatch_cpu_unquantized_gemm = use_plain_linear
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        vars(torch.ops._C)["init_cpu_memory_env"] = lambda nodes: None
    return vllm


def _spread_experts() -> None:
    """Patch vLLM for ranks with experts of their own on a CPU, after `prepare_vllm`; idempotent.

    The CPU kernel expects experts to be numbered within the rank; the CPU communicator has no collectives for DP.
    """
    experts: Any = import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    if experts.apply.__module__ == experts.__module__:
        experts.apply = partialmethod(_apply_own_experts, experts.apply)
    communicator: Any = import_module("vllm.distributed.device_communicators.cpu_communicator").CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = _gather_rows, _sum_rows


def _apply_own_experts(
    self: Any, apply: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **rest: Any
) -> None:
    """Call `apply` for the experts of this rank; others have weight 0.

    Args:
        expert_map: [E] index of each expert on this rank, -1 for others; `None` if the rank has all experts.
    """
    if expert_map is not None:
        places = expert_map[topk_ids]
        topk_weights, topk_ids = topk_weights.masked_fill(places < 0, 0), places.clamp(min=0).to(topk_ids.dtype)
    apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **rest)


def _gather_rows(self: Any, tensors: Sequence[torch.Tensor], dim: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return for each tensor the rows of all ranks; `sizes`: rows of each rank, equal for all tensors."""
    found = []
    for tensor in tensors:
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.device_group)
        found.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
    return found


def _sum_rows(self: Any, rows: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Sum rows [sum of `sizes`, ...] over the ranks; return this rank's part."""
    total = rows.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(list(sizes))[self.rank_in_group]


def keep_memory_pools() -> None:
    """Keep the pools of vLLM's GPU memory, which must sleep, until the process ends.

    vLLM's shutdown and Python's exit free them, which for memory that sleeps prints a CUDA error, or crashes in
    `cuMemRelease` (seen with CUDA graphs of the trainer).
    """
    allocator: Any = import_module("vllm.device_allocator.cumem").CuMemAllocator.instance
    if allocator is not None:
        for entries in allocator.allocator_and_pools.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(entries))  # a reference that nobody gives back
        allocator.allocator_and_pools.clear()


def register_loader(bind: Callable[[torch.nn.Module], None]) -> None:
    """Register a vLLM weight loader that calls `bind` on the model, before anything is compiled or captured."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class BindingLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Do nothing: the actor has the weights."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Bind shareable tensors; the first weight transfer writes the others."""
            bind(model)
            for module in model.modules():
                router: Any = getattr(module, "router", None)
                if type(router).__name__ == "CPURouter" and router.scoring_func == "sigmoid":  # it needs a group
                    router.num_expert_group, router.topk_group = router.num_expert_group or 1, router.topk_group or 1
                    router.use_grouped_topk = True


# Matrices that vLLM fuses, with their parts.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class AdapterSlots:
    """vLLM's slots of LoRA adapters: weight transfers write the first one, and the others have versions kept of it.

    Versions are kept on the host. One that requests name is copied to a slot, in place of the one used longest ago.
    """

    def __init__(self, worker: Any, shape: AdapterShape) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.request import LoRARequest

        manager = worker.model_runner.lora_manager._adapter_manager
        for number in range(1, manager.lora_slots + 1):
            # `add_adapter` refuses adapters without matrices.
            manager._registered_adapters[number] = LoRAModel(number, shape.rank, {})
            manager.activate_adapter(number)
        self._request, model = LoRARequest, worker.get_model()
        self._slots = [_list_slot(model, shape, index) for index in range(manager.lora_slots)]
        # `<matrix>.lora_A` [R, in] and `.lora_B` [out, R] with the scale, of the slot's rank R, at least the adapters'.
        self.params = self._slots[0]
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._filled: dict[str, int] = {}  # version -> its slot, the one used longest ago first

    def keep(self, version: str) -> None:
        """Copy the first slot's adapters to the host, under a name that was never used before."""
        self._kept[version] = [tensor.to("cpu", copy=True) for tensor in self.params.values()]

    def drop(self, version: str) -> None:
        """Forget a version, if it is kept."""
        self._kept.pop(version, None)
        self._filled.pop(version, None)

    def clear(self) -> None:
        """Set the first slot to zero and take the others as empty, after their memory was lost."""
        self._filled = {}
        for tensor in self.params.values():  # transfers do not write the buffers' padding
            tensor.zero_()

    def select(self, versions: Sequence[str | None], running: Collection[str | None]) -> list[Any]:
        """Return vLLM's `LoRARequest` for each version, `None` being the first slot's.

        Args:
            running: versions of the unfinished requests.

        Raises:
            UserError: a version is not kept, or there are more than slots.
        """
        wanted, most = ({*versions, *running} - {None}), len(self._slots) - 1
        if unknown := wanted - self._kept.keys():
            found, hint = f"adapters {min(map(str, unknown))!r}, which are not kept", "keep them in rollout_mode"
            raise UserError(found, source="TokenRequest.version", expected="names that were kept", hint=hint)
        if len(wanted) > most:
            hint = f"sample in turns, or set rollout.engine_options.max_loras={len(wanted) + 1}"
            raise UserError(f"{len(wanted)} versions at once", source="TokenRequest", expected=f"{most}", hint=hint)
        for version in sorted(wanted, key=lambda one: one not in self._filled):
            self._fill(version)
        places = {None: ("policy", 0)} | {version: (version, slot) for version, slot in self._filled.items()}
        return [self._request(name, slot + 1, "in memory") for name, slot in (places[one] for one in versions)]

    def _fill(self, version: Any) -> None:
        slot = self._filled.pop(version, None)
        if slot is None:
            free = {*range(1, len(self._slots))} - {*self._filled.values()}
            slot = min(free) if free else self._filled.pop(next(iter(self._filled)))
            for tensor, kept in zip(self._slots[slot].values(), self._kept[version], strict=True):
                tensor.copy_(kept)
        self._filled[version] = slot


def _list_slot(model: torch.nn.Module, shape: AdapterShape, index: int) -> dict[str, torch.Tensor]:
    found, modules = {}, set(shape.modules)
    named: Any = model.named_modules()
    for name, module in named:
        if not hasattr(module, "lora_a_stacked"):
            continue
        owner, _, last = name.rpartition(".")
        for part, a, b in zip(_FUSED.get(last, (last,)), module.lora_a_stacked, module.lora_b_stacked, strict=True):
            if part in modules:
                found |= {f"{owner}.{part}.lora_A": a[index, 0], f"{owner}.{part}.lora_B": b[index, 0]}
    return found


def pack_experts(param: torch.Tensor, instructions: str) -> None:
    """Reorder fused experts [E, rows, columns] in place for vLLM's CPU kernel; not idempotent."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    param.copy_(cpu_prepack_moe_weight(param, instructions))


def register_model(vllm: ModuleType, spec: EngineSpec) -> None:
    """Register vLLM's class of the model, and of the layer that drafts, which it would inspect in a slow subprocess.

    Raises:
        UserError: vLLM's implementation keeps weights in another order, or needs a missing package.
    """
    check_engine(spec.shape, "vllm", spec.config.quantization, spec.adapters)
    if spec.config.expert_parallel_size > 1 and spec.process.device.type == "cpu":
        _spread_experts()
    family = FAMILIES[spec.shape.family]
    try:
        module = import_module(f"vllm.model_executor.models.{family.vllm_module or spec.shape.family}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"vLLM's {family.architecture} needs the package {error.name}, which is not installed",
            source="rollout.engine and the model's config.json",
            expected=f"{error.name}, in a build that fits torch",
            hint="install it, or set rollout.engine=hf",
        ) from None
    vllm.ModelRegistry.register_model(family.architecture, getattr(module, family.architecture))
    if spec.config.draft_tokens:
        _prepare_drafts(vllm, spec)


def _prepare_drafts(vllm: ModuleType, spec: EngineSpec) -> None:
    """Register vLLM's class of the layer that drafts; patch how drafts are drawn and, on CPU, verified; idempotent.

    A draft from q is accepted with probability min(1, p / q), else replaced by a sample of max(p - q, 0), so that
    tokens are samples of p, the policy (arXiv 2211.17192, section 2.3).
    """
    if spec.process.device.type == "cpu":
        backends: Any = ModuleType("vllm.compilation.backends")
        backends.set_model_tag = lambda *names: nullcontext()
        sys.modules.setdefault(backends.__name__, backends)
        sampler: Any = import_module("vllm.v1.sample.rejection_sampler")
        sampler.expand_batch_to_tokens = repeat_for_drafts
    proposer: Any = import_module("vllm.v1.spec_decode.llm_base_proposer")
    proposer.compute_probs_and_sample_next_token = draw_drafts
    architecture = DRAFTERS[spec.shape.family]
    module, name = import_module("vllm.model_executor.models.registry")._SPECULATIVE_DECODING_MODELS[architecture]
    found = import_module(f"vllm.model_executor.models.{module}")
    vllm.ModelRegistry.register_model(architecture, getattr(found, name))


def repeat_for_drafts(
    values: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat a value per request for each of its drafts, [b] -> [num_tokens]; a replacement in vLLM.

    Args:
        ends: [b] cumulative number of drafts.
    """
    repeated = values.repeat_interleave(torch.diff(ends.long(), prepend=ends.new_zeros(1).long()))
    assert len(repeated) == num_tokens
    return torch.where(repeated == replace_from, torch.full_like(repeated, replace_to), repeated)


def draw_drafts(
    logits: torch.Tensor, metadata: Any, use_fp64_gumbel: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a draft per request, or take the most likely one if it is greedy; a replacement in vLLM.

    Args:
        logits: [b, v] of the MTP layer.
        metadata: vLLM's temperatures and, of requests with a seed, generators.

    Returns:
        Tokens [b], and the probabilities [b, v] that they were drawn from.
    """
    is_greedy = metadata.temperature == 0
    probs = (logits / torch.where(is_greedy, 1.0, metadata.temperature)[:, None]).softmax(-1, dtype=torch.float32)
    noise = torch.empty_like(probs).exponential_()
    for row, generator in metadata.generators.items():
        noise[row].exponential_(generator=generator)
    return torch.where(is_greedy, probs.argmax(-1), (probs / noise).argmax(-1)), probs


def register_codes(spec: EngineSpec) -> CodeFormat | None:
    """Register vLLM linear layers with 8-bit weights, if `rollout.quantization` is set; return the weight format.

    Activations are not quantized; outputs are scaled in float32, by a factor per weight row.
    """
    if spec.config.quantization == "none":
        return None
    code_format: CodeFormat = spec.config.quantization
    quantization, linear = (import_module(f"vllm.model_executor.layers.{x}") for x in ("quantization", "linear"))

    class CodedLinear(linear.LinearMethodBase):
        def create_weights(
            self, layer: Any, input_size_per_partition: int, output_partition_sizes: Sequence[int], **sizes: Any
        ) -> None:
            rows = sum(output_partition_sizes)
            codes, scales = torch.zeros(rows, input_size_per_partition, dtype=torch.int8), torch.zeros(rows, 1)
            for name, values in (("weight", codes), (f"weight{SCALE_SUFFIX}", scales.float())):
                layer.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            product = F.linear(x, decode(layer.weight, code_format, x.dtype))
            scaled = (product.float() * layer.weight_scale[:, 0]).to(x.dtype)
            return scaled if bias is None else scaled + bias

    @quantization.register_quantization_config(CODED_METHOD)
    class CodedConfig(quantization.QuantizationConfig):
        def get_name(self) -> str:
            return CODED_METHOD

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: Mapping[str, Any]) -> Any:
            return cls()

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return CodedLinear() if isinstance(layer, linear.LinearBase) else None

    return code_format


class KeptSetRecorder:
    """A wrapper of a sampler that truncates logits and records the remaining token sets (kept sets) of each request."""

    def __init__(self, runner: Any) -> None:
        self._requests, self._batch = runner.requests, runner.input_batch
        self._sets: dict[str, dict[int, KeptSets]] = {}
        sampler = runner.sampler.topk_topp_sampler
        sample = sampler.forward
        sampler.forward = lambda logits, *arguments: sample(self._cut(logits), *arguments)

    def take(self, name: str, first: int, count: int) -> KeptSets:
        """Remove a request; return the sets that its `count` tokens from position `first` on were drawn from."""
        sets = self._sets.pop(name, {})
        return KeptSets.join([KeptSets.whole(0), *(sets[first + i] for i in range(count))])

    def clear(self) -> None:
        """Drop the recorded token sets of all requests."""
        self._sets = {}

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Truncate logits [b, v] (divided by the temperature) in place; record the remaining sets."""
        names = self._batch.req_ids
        assert len(names) == len(logits), f"{len(logits)} rows for {len(names)} requests"
        rows_of: dict[tuple[Any, ...], list[tuple[int, str, int]]] = {}
        for row, name in enumerate(names):
            told = (self._requests[name].sampling_params.extra_args or {}).get(KEPT_SETS)
            if told is not None:
                set_name, first, stops, *limits = told
                rows_of.setdefault((tuple(stops), *limits), []).append((row, set_name, first))
        for limits, rows in rows_of.items():
            index = torch.tensor([row for row, _, _ in rows], device=logits.device)
            places = [int(self._batch.num_tokens_no_spec[row]) for row, _, _ in rows]
            in_response = [place - first for place, (_, _, first) in zip(places, rows, strict=True)]
            logits[index], kept = truncate(logits[index], SamplingConfig(1.0, 1, *limits), in_response)
            for (_, name, _), place, kept_set in zip(rows, places, kept.split(), strict=True):
                self._sets.setdefault(name, {})[place] = kept_set
        return logits


class RouteRecorder:
    """A recorder of the experts chosen for each token (routes), which routers leave in a buffer of vLLM.

    Graphs write it too if it is made before they are captured; making it needs vLLM's current config.
    """

    def __init__(self, model: torch.nn.Module, shape: RouteShape) -> None:
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturing
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        config = get_current_vllm_config()
        self._buffer = capturing.RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        capturing.bind_routed_experts_capturer(model, self._buffer)
        self._layers = [module.layer_id for module in model.modules() if isinstance(module, MoERunner)]
        assert len(self._layers) == shape.layers, f"{len(self._layers)} routers in {shape.layers} layers"
        self._shape = shape
        self._routes: dict[str, np.ndarray] = {}  # by request; allocated for its maximum length
        self._known: dict[str, int] = {}  # by request: number of leading tokens with routes
        self._blocks: dict[int, np.ndarray] = {}  # by number of the KV-cache block
        # By forward: experts on the host, and of each request the first unknown place, the first computed one, the one
        # after the last, and the numbers of these places' blocks.
        self._copies = deque[tuple[torch.Tensor, list[tuple[str, int, int, int, np.ndarray]]]]()

    def follow(self, runner: Any) -> None:
        """Collect the routes of each forward of a v1 model runner."""
        self._batch = runner.input_batch
        self._execute, runner.execute_model = runner.execute_model, self._execute_and_copy

    def expect(self, name: str, request: Request) -> None:
        """Prepare to record the expert choices of a request that vLLM calls `name`."""
        self._routes[name] = self._shape.unknown(len(request.tokens) + request.sampling.max_tokens)
        self._known[name] = 0

    def take(self, name: str, length: int) -> np.ndarray:
        """Remove a request; return the expert choices for its first `length` tokens, [length, layers, choices].

        The choices for the last token are unknown, although a forward that was started before its sampling ended may
        have had it.
        """
        del self._known[name]
        routes = self._routes.pop(name)[:length]
        routes[-1:] = self._shape.unknown(1)
        return routes

    def clear(self) -> None:
        """Drop the recorded expert choices of all requests and KV-cache blocks."""
        self._routes, self._known, self._blocks = {}, {}, {}
        self._copies.clear()

    def _execute_and_copy(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        """Run a forward and start the copy of its expert choices, which ends before its tokens are sampled."""
        result = self._execute(scheduled, *arguments, **options)
        if not scheduled.total_num_scheduled_tokens:
            return result
        experts = self._buffer.snapshot_routing_data(scheduled.total_num_scheduled_tokens).to("cpu", non_blocking=True)
        table, requests = self._batch.block_table[0], []
        for index, name in enumerate(self._batch.req_ids):
            first = int(self._batch.num_computed_tokens_cpu[index])
            end, start = first + scheduled.num_scheduled_tokens[name], min(first, self._known.get(name, first))
            numbers = table.block_table.np[index, start // table.block_size : (end - 1) // table.block_size + 1]
            requests.append((name, start, first, end, numbers.copy()))
            if name in self._known:
                self._known[name] = end
        self._copies.append((experts, requests))
        return result

    def collect(self, in_flight: int) -> None:
        """Read the copies of all forwards but the last `in_flight`, whose tokens are not known yet."""
        size = self._batch.block_table[0].block_size
        while len(self._copies) > in_flight:
            experts, requests = self._copies.popleft()
            rows, at = experts.numpy()[:, self._layers].astype(self._shape.dtype), 0  # [rows, layers, choices]
            for name, start, first, end, numbers in requests:
                blocks = [self._blocks.setdefault(int(n), self._shape.unknown(size)) for n in numbers]
                routes, found = self._routes.get(name), rows[at : at + end - first]
                at += end - first
                for place in range(first, end):
                    blocks[place // size - start // size][place % size] = found[place - first]
                if routes is not None:
                    for place in range(start, first):  # from the prefix cache
                        routes[place] = blocks[place // size - start // size][place % size]
                    routes[first:end] = found
