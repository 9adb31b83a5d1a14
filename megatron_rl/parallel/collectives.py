# SPDX-License-Identifier: Apache-2.0
"""Start of torch.distributed, shared collectives, and what works on this machine: its GPUs and optional kernels.

Every collective takes its group explicitly.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import resource
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from megatron_rl.types import UserError, text_of

T = TypeVar("T")
_OTHER_FILES = 512  # open files of a process besides its connections to ranks
PAIRS: dict[dist.ProcessGroup, Any] = {}  # `Pair` of each group for which `pairs.open_pair` opened one


@dataclass(frozen=True)
class Process:
    """This process's place in the job, and its device."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    device: torch.device


def init_distributed(timeout_minutes: float) -> Process:
    """Join the job that torchrun described in the environment; without torchrun, start a job of one rank.

    Raises:
        UserError: torch cannot use the GPUs here, or the process may not open enough connections.
    """
    allow_connections(int(os.environ.get("WORLD_SIZE", "1")))
    if (unusable := explain_unusable_gpus()) is not None:
        raise unusable
    is_launched = "RANK" in os.environ
    if not is_launched:  # set torchrun's variables: in-process libraries read them
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        store, rank, world_size = HashStore(), 0, 1
        if is_launched:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            store = meet(store, rank, world_size, timeout)
        # Without `device_id`: torch would split the world's communicator for every new group, with all ranks waiting.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_cuda else "gloo", timeout=timeout, store=store, rank=rank, world_size=world_size
        )
    world_size = dist.get_world_size()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    return Process(dist.get_rank(), world_size, local_rank, ranks_per_node, device)


def allow_connections(world_size: int) -> None:
    """Raise this process's soft limit of open files, as gloo opens a connection between every two ranks of a group.

    Raises:
        UserError: the hard limit is lower.
    """
    needed = 2 * world_size + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"a process may have {hard} open files",
            source="ulimit -Hn",
            expected=f"{needed}: twice the {world_size} ranks, with which it is connected, and {_OTHER_FILES}",
            hint=f"start the job under a higher limit (ulimit -n {needed}; LimitNOFILE of systemd, --ulimit of docker)",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def world() -> dist.ProcessGroup:
    """Return the group of all ranks, after `init_distributed`."""
    group = dist.group.WORLD
    assert group is not None, "init_distributed comes first"
    return group


def current_device() -> torch.device:
    """Return this process's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def make_group(ranks: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup | None:
    """Create a group, called by its members after `align_group_names`; `None` if this rank is not a member."""
    if len(ranks) == dist.get_world_size():
        return world()
    group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return group if isinstance(group, dist.ProcessGroup) else None


def align_group_names() -> None:
    """Bring all ranks to the same number of groups, so that members give new groups the same name; collective."""
    # torch derives the name of a group created only by its members from the process's number of groups
    # (`_hash_ranks_to_str`); members with different names would wait until the timeout.
    count = torch.tensor(len(dist.distributed_c10d._world.pg_names))
    most = count.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for _ in range(int(most - count)):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def connect(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Connect the communicator of a group by a first all-reduce; collective."""
    # NCCL would otherwise connect at the first point-to-point batch, and wait forever for ranks without messages.
    if group is not None and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a section of the launcher's store that only the ranks of this start of the job share; collective.

    torchrun keeps one store across restarts, with addresses of killed ranks (pytorch/pytorch issues 135712 and 167288).
    So rank 0 answers each request in the store, even a killed rank's, with a new section's name until all have joined.

    Raises:
        TimeoutError: on rank 0, a rank did not arrive in time; other ranks raise torch's own error.
    """
    name = uuid.uuid4().hex
    if rank:
        store.set(f"knock/{rank}", name)
        store.wait([f"answer/{name}"], timeout)
        place = store.get(f"answer/{name}").decode()
        store.set(f"{place}/{rank}", "here")
        return PrefixStore(place, store)
    absent, answered, deadline = set(range(1, world_size)), set(), time.monotonic() + timeout.total_seconds()
    while absent:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(absent)} did not come within {timeout}")
        for peer in sorted(absent):
            knock = store.get(f"knock/{peer}").decode() if store.check([f"knock/{peer}"]) else None
            if knock and knock not in answered:
                store.set(f"answer/{knock}", name)
                answered.add(knock)
            if store.check([f"{name}/{peer}"]):
                absent.remove(peer)
        time.sleep(0.01)
    return PrefixStore(name, store)


def open_store(name: str, group: dist.ProcessGroup) -> Store:
    """Open this rank's own connection to the job's key-value store, for another thread; collective."""
    unique = share_object(f"{name}-{uuid.uuid4().hex}", group)
    store: Any = _get_default_store()
    return PrefixStore(unique, store.clone())


def memory_in_use(device: torch.device) -> int:
    """Return bytes: peak device memory since the last call on CUDA, the process's resident memory on CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return psutil.Process().memory_info().rss


def raise_together(error: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise the error of the lowest failed rank on every rank of `group`, if there is one; collective.

    The raised error carries the failed rank's global number (`raised_on`); on that rank it is the original, with its
    traceback.
    """
    first = torch.tensor(group.size() if error is None else group.rank())
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    if int(first) == group.size():
        return
    source = dist.get_global_rank(group, int(first))
    portable = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # it cannot be pickled
        portable = error and RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    raised = share_object(portable, group, source)
    if error is not None and source == dist.get_rank():
        raised = error
    vars(raised)["raised_on"] = source
    raise raised


@contextmanager
def failing_together(group: dist.ProcessGroup, explain: Callable[[OSError], UserError] | None = None) -> Iterator[None]:
    """If the block raises a UserError on one rank, raise it on every rank; collective.

    `explain` converts an OSError to a UserError. Any other error is raised on its own rank only.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as caught:
        error = caught
    except OSError as caught:
        if explain is None:
            raise
        error = explain(caught)
    raise_together(error, group)


def gather_flat(array: np.ndarray, group: dist.ProcessGroup) -> tuple[list[np.ndarray], int]:
    """All-gather byte arrays [k] uint8 of different lengths, without pickling or padding.

    Returns:
        One array per rank, in rank order, and the bytes received from other ranks.
    """
    mine = torch.from_numpy(np.array(array, np.uint8))
    sizes = gather_rows(torch.tensor([[len(mine)]]), group)[:, 0].tolist()
    found = exchange_bytes([mine] * group.size(), sizes, group)
    return [piece.numpy() for piece in found], sum(sizes) - len(mine)


def exchange_bytes(
    pieces: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Exchange pieces [k] uint8 of different lengths all-to-all; `sizes`: bytes to receive from each rank."""
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=pieces[0].device)
    dist.all_to_all_single(
        received, torch.cat(list(pieces)), list(sizes), [len(piece) for piece in pieces], group=group
    )
    return list(received.split(list(sizes)))


def find_pair(group: dist.ProcessGroup | None, num_bytes: int) -> Any:
    """Return the group's shared-memory connection; `None`, on both ranks, if none is open or `num_bytes` too many."""
    pair = None if group is None else PAIRS.get(group)
    return pair if pair is not None and pair.fits(num_bytes) else None


def gather_rows(row: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather `[1, k]` to `[group size, k]`; k is the same on all ranks."""
    rows = row.new_empty(group.size(), *row.shape[1:])
    if (pair := find_pair(group, row.nbytes)) is None:
        dist.all_gather_into_tensor(rows, row.contiguous(), group=group)
    else:
        pair.all_gather_into_tensor(rows, row, group)
    return rows


def reduce_scalars(
    values: dict[str, float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """All-reduce a dict of numbers with equal keys on every rank, in float64, in one call."""
    if not values:
        return {}
    flat = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(flat, op=op, group=group)
    return dict(zip(values, flat.tolist(), strict=True))


def broadcast_tensors(tensors: Iterable[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Broadcast tensors in place from global rank `source`, one call per tensor."""
    if group.size() > 1:
        for tensor in tensors:
            pair = find_pair(group, tensor.nbytes)
            if pair is None:
                dist.broadcast(tensor, source, group=group)
            elif dist.get_rank() == source:
                pair.send(tensor)
            else:
                pair.receive(tensor)


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Gather a small Python object from all ranks, in rank order; collective."""
    found = [value] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def share_object(value: Any, group: dist.ProcessGroup, source: int = 0) -> Any:
    """Broadcast a small Python object from global rank `source`."""
    box = [value]
    dist.broadcast_object_list(box, source, group=group)
    return box[0]


# CUDA major version -> oldest driver that supports it.
OLDEST_DRIVERS = {"11": "450", "12": "525", "13": "580"}


def list_gpus() -> list[tuple[str, str]]:
    """Return driver version and name of each GPU that nvidia-smi lists."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    return [(version.strip(), name.strip()) for version, found, name in (x.partition(",") for x in lines) if found]


def explain_unusable_gpus() -> UserError | None:
    """Return an error if this machine has GPUs but torch sees none of them, else `None`.

    A CPU build of torch, or CUDA_VISIBLE_DEVICES that hides all GPUs, is not an error.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if torch.cuda.is_available() or torch.version.cuda is None or hidden.strip() in ("", "-1"):
        return None
    gpus = list_gpus()
    if not gpus:
        return None
    driver, name = gpus[0]
    wanted = OLDEST_DRIVERS.get(torch.version.cuda.partition(".")[0])
    major = driver.partition(".")[0]  # "[N/A]" if the driver does not respond
    is_old = wanted is not None and major.isdigit() and int(major) < int(wanted)
    return UserError(
        f"nvidia-smi lists {len(gpus)} GPUs ({name}, driver {driver}), and torch {torch.__version__} sees none",
        source="the NVIDIA driver" if is_old else "CUDA on this machine",
        expected=f"driver {wanted} or newer for CUDA {torch.version.cuda}" if wanted else "a driver for this torch",
        hint=(
            "update the driver, or install NVIDIA's cuda-compat for this CUDA"
            if is_old
            else "python -c 'import torch; torch.cuda.init()' says why"
        )
        + "; to run on the CPU all the same, set CUDA_VISIBLE_DEVICES= (empty)",
    )


@contextmanager
def keep_random_streams() -> Iterator[None]:
    """Restore the generators of Python, numpy, torch and the current GPU after the block, even after an error."""
    python, legacy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices, device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


_STREAM = "megatron."  # prefix of megatron-core's named streams


def get_streams() -> Any:
    """Return the tracker of megatron-core's named random streams, which this module imports only when it is called."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def read_rng() -> dict[str, torch.Tensor]:
    """Return the states of torch's, CUDA's, numpy's, Python's and megatron-core's generators, as tensors by name."""
    version, python, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert name == "MT19937", f"numpy's legacy generator is {name}"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *python], dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.array([*keys, position, has_gauss], dtype=np.int64)),
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, state in get_streams().get_states().items():
        # with CUDA graphs a stream is a generator registered with the graphs, else its state
        states[_STREAM + name] = state.get_state() if isinstance(state, torch.Generator) else state
    return states


def restore_rng(states: dict[str, torch.Tensor]) -> None:
    """Set all generators to states from `read_rng` (CUDA's only if available)."""
    torch.set_rng_state(states["torch"])
    version, *python = states["python"].tolist()
    gauss = states["python.gauss"].tolist()
    random.setstate((version, tuple(python), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, states["numpy.gauss"].item()))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tracker = get_streams()
    known = tracker.get_states()
    saved = {name.removeprefix(_STREAM): state for name, state in states.items() if name.startswith(_STREAM)}
    for name in known.keys() & saved.keys():
        if isinstance(known[name], torch.Generator):
            known[name].set_state(saved[name])
        else:
            known[name] = saved[name]
    tracker.set_states(known)


def find_failure(module: str, call: Callable[[], object]) -> str | None:
    """Try an optional library on this machine, and return the reason why it cannot be used.

    Args:
        call: imports the library and uses it on tensors of a few elements.

    Returns:
        `None` if it works, "" if it is not installed, else the error.
    """
    try:
        if importlib.util.find_spec(module) is None:
            return ""
    except ModuleNotFoundError:  # the parent package is missing
        return ""
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whichever mode the first caller is in
            call()
    except Exception as error:  # a broken wheel raises anything: ImportError, OSError, RuntimeError, TypeError
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return None


@cache
def find_triton_failure() -> str | None:
    """Return why `triton_kernels` cannot run on the current GPU; see `find_failure`."""

    def call() -> None:
        logits, targets = torch.zeros(1, 16, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        if has_gpu_memory(logits):
            import_module("megatron_rl.parallel.triton_kernels").summarize_logits(logits, targets, 0, 1.0)

    return find_failure("triton", call)


def choose_triton_kernels(tensor: torch.Tensor) -> ModuleType | None:
    """Return `triton_kernels` if they work and suit a tensor: on a GPU, of at most 32 bits; else `None`."""
    if not has_gpu_memory(tensor) or tensor.dtype == torch.float64 or find_triton_failure() is not None:
        return None
    return import_module("megatron_rl.parallel.triton_kernels")


def has_gpu_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in a GPU's memory; a rehearsal's fake tensors only claim to."""
    return tensor.is_cuda and type(tensor) is torch.Tensor
