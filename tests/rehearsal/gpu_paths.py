# SPDX-License-Identifier: Apache-2.0
"""GPU code of a run outside its steps, run on an imitated GPU: python gpu_paths.py FILE.

A separate process whose torch pretends to have GPUs. FILE receives the result of each part.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools.rehearsal.cuda_guard import load_guard

load_guard()

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tools.rehearsal import fake_cuda

GPU_BYTES = 80 << 30
fake_cuda.install(GPU_BYTES, 4)

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import RolloutConfig, TrainedConfig
from megatron_rl.config.sections import ServerConfig
from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.engines.servers import served
from megatron_rl.engines.servers.server_apis import SglangServer, VllmServer
from megatron_rl.engines.vllm.vllm_settings import fit_to_device
from megatron_rl.models import attention, attention_kernels
from megatron_rl.models.offloaded_inputs import InputStore
from megatron_rl.observability.progress import StepProfiler
from megatron_rl.parallel.collectives import (
    Process,
    current_device,
    init_distributed,
    keep_random_streams,
    memory_in_use,
    read_rng,
    restore_rng,
)
from megatron_rl.planning.cluster import find_cluster
from megatron_rl.planning.role_layouts import find_gpu_memory
from megatron_rl.run.loading import load_config
from megatron_rl.training import fixed_memory
from megatron_rl.training.cuda_graph import check_step_mode
from megatron_rl.training.fast_path import find_fast_paths
from megatron_rl.training.policy_engine import PolicyEngine
from megatron_rl.transfer import transports
from megatron_rl.transfer.executor import Resharder
from megatron_rl.types import UserError
from megatron_rl.weights.support import check_bitwise
from tools.replay import replaying

CUDA = torch.device("cuda", 0)
SHAPE: Any = SimpleNamespace(num_experts=0, latent=None)


def _spec(**changes: Any) -> EngineSpec:
    process = Process(0, 4, 2, 4, CUDA)
    spec = EngineSpec("", SHAPE, "bfloat16", 8, 8, RolloutConfig(), process, 0)
    return replace(spec, **changes)


def _refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except UserError as error:
        return error.found
    return "nothing"


def start() -> list[str]:
    """Which backends a job gets, and the device of its ranks."""
    with patch.object(dist, "init_process_group") as init, patch.object(dist, "get_world_size", lambda: 1):
        with patch.object(dist, "get_rank", lambda: 0):
            process = init_distributed(1)
    return [init.call_args.args[0], str(process.device), str(current_device())]


def memory() -> int:
    """The peak, which is counted again."""
    with (
        patch.object(torch.cuda, "max_memory_allocated", lambda device: 7),
        patch.object(torch.cuda, "reset_peak_memory_stats") as reset,
    ):
        found = memory_in_use(CUDA)
    assert reset.call_args.args == (CUDA,)
    return found


def random_states() -> bool:
    """A checkpoint has the state of CUDA, and it is set."""
    with keep_random_streams():
        states = read_rng()
    with patch.object(torch.cuda, "set_rng_state") as restored:
        restore_rng(states)
    return torch.equal(restored.call_args.args[0], states["cuda"])


def cluster() -> list[int]:
    """Return the cluster of a plan."""
    memory = find_gpu_memory()
    assert memory is not None
    found = find_cluster(8, 4, memory)
    return [found.nodes, found.gpus_per_node, found.memory_bytes]


def profile() -> list[str]:
    """Files of a profiled step."""
    with tempfile.TemporaryDirectory() as directory:
        profiler = StepProfiler(Path(directory), steps=[1], ranks=[0], rank=0, device=CUDA)
        calls: list[str] = []

        def note(name: str) -> Callable[..., None]:
            return lambda *args, **options: calls.append(f"{name} {options or Path(str(args[0])).name}")

        started: list[str] = []

        def make_profile(activities: list[Any], **options: Any) -> Any:
            started.extend(activity.name for activity in activities)
            nothing = lambda *args: None  # noqa: E731
            return SimpleNamespace(start=nothing, stop=nothing, export_chrome_trace=nothing)

        with (
            patch.object(torch.profiler, "profile", make_profile),
            patch.object(torch.cuda.memory, "_record_memory_history", note("history")),
            patch.object(torch.cuda.memory, "_dump_snapshot", note("snapshot")),
            patch.object(torch.cuda.nvtx, "range", lambda name: nullcontext()),
            profiler.step(1),
            profiler.phase("update"),
        ):
            pass
        return [*started, *calls]


def share() -> str:
    """Return the handle of a GPU storage for peers: torch's recipe of all of it, not a file."""
    storage: Any = SimpleNamespace(device=CUDA)
    empty = SimpleNamespace(set_=lambda storage: f"all of it on {storage.device}")
    with (
        patch("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: f"recipe of {tensor}"),
        patch.object(torch, "empty", lambda *sizes, **options: empty),
    ):
        return transports._share(storage)


def barrier() -> int:
    """Check that a pull waits for queued device work before its barrier."""
    resharder: Any = SimpleNamespace(_device=CUDA, _group=None)
    with patch.object(torch.cuda, "synchronize") as synchronize, patch.object(dist, "barrier"):
        Resharder._meet(resharder, "before")
    return synchronize.call_count


def kernels() -> list[str]:
    """Return the fastest available kernels, and the missing ones."""
    attention.choose_attention_backend.cache_clear()
    with patch.object(
        attention_kernels, "find_kernel_failure", lambda name, *rest: None if name == "efficient" else ""
    ):
        choose = attention.choose_attention_backend
        found = {choose(device, torch.bfloat16) for device in (CUDA, torch.device("cuda"))}
    paths = find_fast_paths(TrainedConfig(), "bfloat16", "local", 2)
    refused = _refusal(attention_kernels.check_transformer_engine)
    return [*found, *(path.part for path in paths if not path.is_fast), refused]


def servers() -> dict[str, Any]:
    """Servers get the GPUs of their ranks, and none that the actor has."""
    model = SimpleNamespace(layout=SimpleNamespace(ranks=range(4)))
    config = RolloutConfig(engine="vllm_server", tensor_model_parallel_size=2)
    sglang = SglangServer(_spec(config=RolloutConfig(engine="sglang", server=ServerConfig(python="python"))))
    return {
        "refused": _refusal(lambda: served._check_device(_spec(model=model))),
        "devices": served._list_devices(_spec(config=config))["CUDA_VISIBLE_DEVICES"],
        "eager": fit_to_device(RolloutConfig(enforce_eager=False), CUDA, False).enforce_eager,
        "compiled": VllmServer(_spec(config=config)).list_environment()["TORCHDYNAMO_DISABLE"],
        "sglang": [sglang.make_command(Path("x"), 1)[-2:], sglang.list_environment()],
    }


def cache() -> int:
    """Blocks of the policy's own engine, of 8 MiB each: its share of the GPU."""
    engine: Any = SimpleNamespace(_sizes=[(8, 128)] * 64, _dtype=torch.float32)
    return PolicyEngine._count_blocks(engine, _spec(config=RolloutConfig(max_num_seqs=10**9)))


def captured_experts() -> list[str]:
    """On which GPUs, and in which types, a graph holds a mixture of experts."""
    config, shape = TrainedConfig(step_mode="graph"), SimpleNamespace(num_experts=8)
    spec = RoleSpec(name="actor", path="-", section="actor", settings=config, head="logprob", trainable=True)
    found = []
    for capability, dtype in (((9, 0), "bfloat16"), ((10, 0), "bfloat16"), ((9, 0), "float32"), ((8, 0), "bfloat16")):
        with patch.object(torch.cuda, "get_device_capability", lambda capability=capability: capability):
            refused = _refusal(lambda dtype=dtype: check_step_mode(spec, cast(Any, shape), dtype))
            found.append(refused.removeprefix("actor.step_mode = graph, but "))
    return found


def fixed_memory_calls() -> list[str]:
    """Driver calls of memory that is given back and taken again; the second time it lacks memory at first."""
    calls, driver = list[str](), MagicMock()
    driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY = "success", "out of memory"

    def add(name: str) -> None:
        def call(*values: Any) -> tuple[str, int]:
            calls.append(name)
            is_full = name == "cuMemCreate" and calls.count(name) == 2
            return "out of memory" if is_full else "success", 2 << 20

        setattr(driver, name, call)

    for name in ("GetAllocationGranularity", "AddressReserve", "Create", "Map", "SetAccess", "Unmap", "Release"):
        add(f"cuMem{name}")
    with (
        patch.object(fixed_memory, "import_module", lambda name: driver),
        patch.object(torch, "as_tensor", lambda array, device: array.__cuda_array_interface__),
        patch.object(torch.cuda, "synchronize", lambda: calls.append("synchronize")),
        patch.object(torch.cuda, "empty_cache", lambda: calls.append("empty_cache")),
    ):
        memory = fixed_memory.FixedMemory(5, CUDA)
        for work in (memory.map, memory.unmap, memory.unmap, memory.map):
            work()
    assert cast(Any, memory.block)["data"] == (2 << 20, False)
    return calls


def stored_input() -> list[Any]:
    """Bytes that are page-locked for a layer's input on a GPU, and the device that it returns to."""
    fake_cuda.PINNED.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        store = InputStore(hidden_size=4, rows=8)
        loaded = store._unpack(store._pack(torch.empty(2, 1, 4, device=CUDA)))
    return [*fake_cuda.PINNED.values(), str(loaded.device)]


PARTS: dict[str, Callable[[], Any]] = {
    "start": start,
    "memory": memory,
    "random states": random_states,
    "cluster": cluster,
    "profile": profile,
    "share": share,
    "barrier": barrier,
    "cache": cache,
    "kernels": kernels,
    "servers": servers,
    "captured experts": captured_experts,
    "fixed memory": fixed_memory_calls,
    "stored input": stored_input,
    "bitwise": lambda: _refusal(lambda: check_bitwise(SHAPE, 1, "vllm")),
    "capsule": lambda: replaying.is_same_layout(
        SimpleNamespace(manifest={"world_size": 1, "device": "cpu"}),  # type: ignore[arg-type]
        load_config(ROOT / "launch/recipes/toy_arithmetic.yaml", []).config,
        1,
    ),
}


if __name__ == "__main__":
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    Path(sys.argv[1]).write_text(json.dumps({name: part() for name, part in PARTS.items()}))
