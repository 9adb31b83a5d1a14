# SPDX-License-Identifier: Apache-2.0
"""The only file that imports vllm: patches for use inside a training process (each has a test).

* its shutdown must not destroy the job's process groups;
* on CPU, linear layers keep their weight (oneDNN would leave an empty parameter);
* on CPU, torch.distributed replaces its shared-memory collectives: their segment names contain ranks only, so a killed
  run, or a second one on the host, breaks the next engine;
* on CPU, it must not bind the trainer's memory to one NUMA node;
* on CPU, a server that reloads weights packs its fused experts again.

A test lists the private names that this file and `engines.vllm.vllm_engine` rely on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.engines.vllm.vllm_arguments import LOAD_FORMAT
from megatron_rl.engines.vllm.vllm_coding import register_method
from megatron_rl.engines.vllm.vllm_limits import check_family
from megatron_rl.engines.vllm.vllm_lora import take_slot
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.row_quantization import CodeFormat
from megatron_rl.weights.support import check_engine


def find_world(spec: EngineSpec, parallel_state: Any) -> AbstractContextManager[None]:
    """Return a context that restricts vLLM to this engine's ranks, if not all ranks have engines."""
    if spec.ranks is None or len(spec.ranks) == spec.process.world_size:
        return nullcontext()
    first = spec.process.rank - spec.find_place(spec.process.rank)
    return _own_world(range(first, first + spec.config.tensor_model_parallel_size), parallel_state)


@contextmanager
def _own_world(ranks: range, parallel_state: Any) -> Iterator[None]:
    """Show vLLM only `ranks`, which all enter after `align_group_names`."""
    new_group, get_world_size = dist.new_group, dist.get_world_size
    init_world_group, init_model_parallel_group = (
        parallel_state.init_world_group,
        parallel_state.init_model_parallel_group,
    )

    def make_group(members: Sequence[int], **options: Any) -> Any:
        if dist.get_rank() not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(members, use_local_synchronization=True, **options)

    def count_ranks(group: dist.ProcessGroup | None = None) -> int:
        return len(ranks) if group is None else get_world_size(group)

    def make_world(_: Sequence[int], *arguments: Any) -> Any:
        return init_world_group(list(ranks), *arguments)

    def make_groups(places: Sequence[Sequence[int]], *arguments: Any, **options: Any) -> Any:
        return init_model_parallel_group([[ranks[place] for place in some] for some in places], *arguments, **options)

    with ExitStack() as patches:
        for module, name, stand_in in (
            (dist, "new_group", make_group),
            (dist, "get_world_size", count_ranks),
            (parallel_state, "init_world_group", make_world),
            (parallel_state, "init_model_parallel_group", make_groups),
        ):
            patches.enter_context(patch.object(module, name, stand_in))
        yield


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


def prepare_vllm(device: torch.device) -> ModuleType:
    """Import and patch vllm; idempotent."""
    os.environ.update(_ENVIRONMENT)
    if device.type == "cpu":
        # Two sampler helpers use torch.compile even in eager mode, which costs seconds per start and needs a compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        torch._dynamo.config.disable = True
        # This module imports inductor to patch it, which is useless without torch.compile.
        sys.modules.setdefault("vllm.env_override", ModuleType("vllm.env_override"))
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # vLLM logs the engine's state at errors, 10 kB from each rank.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
    import vllm
    from vllm.v1.engine import core

    import_module("vllm.entrypoints.llm")  # vllm imports this, and the worker, lazily

    def keep_process_groups(*args: Any, **kwargs: Any) -> None:
        """Replace the clean-up of process groups."""

    engine_core: Any = core  # the name is imported there, which type checkers reject
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
    """Pack fused experts at every load, not only at the first."""
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


def register_loader(bind: Callable[[torch.nn.Module], None]) -> None:
    """Register a loader that calls `bind` before anything is compiled or captured."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class BindingLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Nothing to fetch: the actor has the weights."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Bind shareable tensors; the first reshard writes the rest."""
            bind(model)


def take_adapters(worker: Any, spec: EngineSpec) -> Any:
    """Activate vLLM's slot for the policy's adapters; return their LoRA request."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest

    assert spec.adapters is not None
    take_slot(worker, LoRAModel(1, spec.adapters.rank, {}))
    return LoRARequest("policy", 1, "in memory")


def pack_experts(param: torch.Tensor, instructions: str) -> None:
    """Reorder a fused parameter [E, rows, columns] in place; not idempotent."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    param.copy_(cpu_prepack_moe_weight(param, instructions))


def register_model(vllm: ModuleType, spec: EngineSpec) -> None:
    """Register the class itself: by name, vLLM would inspect it in a subprocess for 8 to 16 seconds.

    Raises:
        UserError: vLLM's implementation is missing, keeps weights in another order, or needs a missing package.
    """
    check_engine(spec.shape, "vllm", spec.config.quantization, spec.adapters)
    check_family(spec.shape, spec.config.engine)
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


def register_codes(spec: EngineSpec) -> CodeFormat | None:
    """Register 8-bit matrices with vLLM if `rollout.quantization` is set."""
    if spec.config.quantization == "none":
        return None
    layers = "vllm.model_executor.layers"
    register_method(
        spec.config.quantization, import_module(f"{layers}.quantization"), import_module(f"{layers}.linear")
    )
    return spec.config.quantization
