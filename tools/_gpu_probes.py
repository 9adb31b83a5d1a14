# SPDX-License-Identifier: Apache-2.0
"""GPU checks, one per process: python tools/_gpu_probes.py PROBE [--pretend]; see tools/first_gpu_run.py.

A probe prints its results, and exits with status 1 if they are wrong. Without a GPU, computations run on the CPU, and
with --pretend other probes on a fake GPU. `numbers` prints the CPU reference.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation
NUMBERS = Path(__file__).with_name("first_gpu_numbers.json")
if __name__ == "__main__" and "--pretend" in sys.argv:
    from tools.rehearsal.cuda_guard import load_guard

    load_guard()  # before torch

import torch
import torch.distributed as dist

GIB = 1 << 30
_LENGTHS = [37, 64, 1, 90]  # tokens per segment of the attention probe
# Largest relative error against the CPU's float32 results.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class WrongAnswer(Exception):
    """A wrong GPU result."""


def probe_machine() -> dict[str, Any]:
    """List GPUs and check for free memory."""
    if not torch.cuda.is_available():
        from megatron_rl.parallel.collectives import explain_unusable_gpus

        reason = explain_unusable_gpus()
        raise WrongAnswer(f"torch {torch.__version__} sees no GPU" if reason is None else str(reason))
    found = {}
    for index in range(torch.cuda.device_count()):
        device, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        if free < 0.9 * total:
            raise WrongAnswer(
                f"of {total / GIB:.1f} GiB of GPU {index} only {free / GIB:.1f} are free: somebody uses it"
            )
        found[f"GPU {index}"] = f"{device.name}, sm_{device.major}{device.minor}, {total / GIB:.1f} GiB"
    return found


def probe_products() -> dict[str, Any]:
    """Check and time matrix products."""
    device, found = _find_device(), {}
    generator = torch.Generator().manual_seed(1)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        a, b = (torch.randn(512, 512, generator=generator).to(dtype) for _ in range(2))
        got, want = (a.to(device) @ b.to(device)).cpu().double(), a.double() @ b.double()
        error = float((got - want).abs().max() / want.abs().max())
        found[f"{dtype} error"] = error
        if not error < bound:
            raise WrongAnswer(f"a matrix product in {dtype} is off by {error:.1e} of its largest element")
    if device.type == "cuda":
        a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
        seconds = _time(lambda: a @ a)
        found["bfloat16 TFLOP/s"] = 2 * 8192**3 / seconds / 1e12
    return found


def probe_groups() -> dict[str, Any]:
    """Check sums over process groups, under torchrun."""
    from megatron_rl.parallel.collectives import init_distributed
    from megatron_rl.parallel.groups import build_groups
    from megatron_rl.parallel.layout import ParallelLayout

    process = init_distributed(timeout_minutes=2)
    size, found = process.world_size, {}
    groups = build_groups(ParallelLayout(size, tp_size=2 if size % 2 == 0 else 1))
    for name in ("tp", "dp", "cp", "pp", "mp", "tp_ep_pp"):
        group = getattr(groups.collection, name)
        value = torch.full((1 << 20,), float(process.rank), device=process.device)
        dist.all_reduce(value, group=group)
        ranks = dist.get_process_group_ranks(group)
        if value[-1].item() != sum(ranks):
            raise WrongAnswer(f"an all-reduce over {name} {ranks} gave {value[-1].item()} instead of {sum(ranks)}")
        found[name] = ranks
    if size > 1:
        payload = torch.ones(64 << 20, dtype=torch.bfloat16, device=process.device)
        seconds = _time(lambda: dist.all_reduce(payload))
        found["all-reduce GB/s"] = 2 * (size - 1) / size * payload.nbytes / seconds / 1e9
    dist.destroy_process_group()
    return found


def probe_memory() -> dict[str, Any]:
    """Check that freed memory returns to the driver."""
    device = _find_device()
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    block = torch.empty(GIB, dtype=torch.uint8, device=device)
    held = free - torch.cuda.mem_get_info(device)[0]
    del block
    torch.cuda.empty_cache()
    lost = free - torch.cuda.mem_get_info(device)[0]
    if lost > GIB // 8:
        raise WrongAnswer(f"{lost / GIB:.2f} GiB of a tensor of 1 GiB were not given back")
    return {"total GiB": total / GIB, "context GiB": (total - free) / GIB, "held by a tensor of 1 GiB": held / GIB}


def probe_attention() -> dict[str, Any]:
    """Compare attention kernels, output and gradients, with a CPU."""
    from megatron_rl.models.attention_kernels import KERNELS, find_kernel_failure, list_kernels

    device, expected, found = _find_device(), json.loads(NUMBERS.read_text())["attention"], {}
    for dtype, tolerance in TOLERANCES.items():
        kernels = list_kernels(dtype) if device.type == "cuda" else []
        for name in ["sdpa", *kernels]:
            failure = find_kernel_failure(name, device, dtype) if name in KERNELS else None
            if failure is not None:
                found[f"{name} {dtype}"] = failure or "not installed"
                continue
            got = compute_attention(name, device, dtype)
            error = max(abs(one / want - 1) for one, want in zip(got, expected, strict=True))
            found[f"{name} {dtype} error"] = error
            if not error < tolerance:
                raise WrongAnswer(f"attention by {name} in {dtype} is off by {error:.1%} from a CPU")
    return found


def compute_attention(backend: str, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Return weighted means of attention's output and gradients on fixed inputs."""
    from megatron_rl.models.attention import attend, build_segments

    rows, starts = sum(_LENGTHS), torch.tensor([0, *_LENGTHS]).cumsum(0).to(device, torch.int32)
    inputs = [
        torch.arange(rows * heads * 64.0).mul(wave).sin().view(rows, heads, 64).to(device, dtype).requires_grad_()
        for heads, wave in ((4, 0.7), (2, 0.9), (2, 1.1))
    ]
    output = attend(*inputs, build_segments(starts, max(_LENGTHS), None, dtype, backend), 0.125)
    tensors = [output, *torch.autograd.grad(output.float().square().sum(), inputs)]
    return [_describe(tensor) for tensor in tensors]


def _describe(tensor: torch.Tensor) -> float:
    values = tensor.detach().double().cpu().flatten()
    return float((values * torch.arange(len(values)).mul(0.3).cos()).abs().mean() + values.square().mean())


def compute_numbers() -> dict[str, Any]:
    """Return the reference without `steps`."""
    return {"attention": compute_attention("sdpa", torch.device("cpu"), torch.float32)}


def _find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _time(work: Callable[[], object]) -> float:
    """Return the mean seconds of ten calls."""
    import time

    is_gpu = torch.cuda.is_available()
    for count in (2, 10):
        begun = time.perf_counter()
        for _ in range(count):
            work()
        if is_gpu:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / count
    return seconds


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "machine": probe_machine,
    "products": probe_products,
    "groups": probe_groups,
    "memory": probe_memory,
    "attention": probe_attention,
    "numbers": compute_numbers,
}


def _pretend(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a probe on a fake GPU of 80 GiB."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tools.rehearsal import fake_cuda

    fake_cuda.install(80 * GIB, 8)
    with FakeTensorMode():
        return probe()


def main(name: str, is_pretended: bool) -> int:
    """Run the probe."""
    try:
        found = _pretend(PROBES[name]) if is_pretended else PROBES[name]()
    except WrongAnswer as error:
        sys.stderr.write(f"error: {error}\n")  # one write: several ranks fail at once
        sys.stderr.flush()
        return 1
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--pretend" in sys.argv))
