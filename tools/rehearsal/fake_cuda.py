# SPDX-License-Identifier: Apache-2.0
"""A fake `torch.cuda`, with which megatron-core and this package take their GPU branches.

`cuda_guard.load_guard()` must run before torch is imported, `install()` before megatron-core.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_CAPABILITY = (9, 0)
_WITHOUT_EFFECT = (
    "init",
    "_lazy_init",
    "set_device",
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
    "set_stream",
    "manual_seed",
    "manual_seed_all",
    "set_rng_state",
)
_NUMBERS = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def _answer(value: Any) -> Any:
    """Return a new function that returns `value`: torch's compiler registers functions by identity."""

    def function(*args: Any, **options: Any) -> Any:
        return value

    return function


_nothing = _answer(None)
# Page-locked host memory: address -> bytes.
PINNED: dict[int, int] = {}
_KERNELS = torch.library.Library("aten", "IMPL")


class Stream:
    """A stream, and an event, without work."""

    device, device_index, device_type, stream_id, cuda_stream = torch.device("cuda", 0), 0, 1, 0, 0

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = wait = record = _nothing

    def record_event(self, event: Any = None) -> Any:
        """Return a finished event."""
        return event or self

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return zero."""
        return 0.0


class _Generator:
    """A generator that is never drawn from."""

    def __init__(self) -> None:
        self.set_state, self.graphsafe_set_state = _answer(None), _answer(None)
        self.graphsafe_get_state = self.clone_state = self.manual_seed = _answer(self)
        self.get_state, self.initial_seed = _state, _answer(0)


class _Device(nullcontext[None]):
    def __init__(self, device: Any = None) -> None:
        super().__init__()


def install(memory_bytes: int, gpus_per_node: int) -> None:
    """Fake `gpus_per_node` GPUs of `memory_bytes` each."""
    properties = types.SimpleNamespace(
        name="no GPU", major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=memory_bytes, multi_processor_count=132
    )
    stream = Stream()
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_call": lambda function, **options: function(),
        "device_count": lambda: gpus_per_node,
        "get_device_capability": lambda *device: _CAPABILITY,
        "get_device_properties": lambda *device: properties,
        "get_device_name": lambda *device: properties.name,
        "mem_get_info": lambda *device: (memory_bytes, memory_bytes),
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *device: stream,
        "default_stream": lambda *device: stream,
        "stream": lambda stream: nullcontext(),
        "device": _Device,
        "device_of": _Device,
        "initial_seed": torch.initial_seed,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *args, **options: True,
        "get_rng_state": _state,
        "default_generators": tuple(_Generator() for _ in range(gpus_per_node)),
    }
    names |= {name: _answer(None) for name in _WITHOUT_EFFECT}
    names |= {name: _answer(0) for name in _NUMBERS}
    torch.cuda.__dict__.update(names)
    _patch_torch()


def _state(*device: Any, **options: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _patch_torch() -> None:
    """Replace torch's driver queries outside of `torch.cuda`."""
    import torch.cuda._pin_memory_utils as pinning
    import torch.cuda.random as random

    for name in ("_lazy_call", "current_device", "get_rng_state", "set_rng_state"):
        random.__dict__[name] = torch.cuda.__dict__[name]
    pinning.__dict__.update(pin_memory=PINNED.__setitem__, unpin_memory=PINNED.pop)
    replaced: dict[Any, dict[str, Any]] = {
        torch.Tensor: {
            "pin_memory": lambda tensor, *args: tensor,
            "record_stream": _answer(None),
            "data_ptr": _address,
        },
        torch.UntypedStorage: {"data_ptr": lambda storage: storage._cdata},
        FakeTensorMode: {"avoid_device_init": property(lambda mode: True)},
    }
    # On a GPU, autograd saves this kernel's outputs; a CPU build would save its decomposition's.
    for kernel in ("_fused_rms_norm", "_fused_rms_norm_backward"):
        _KERNELS.impl(kernel, _refuse, "CUDA")
    torch._C.__dict__["_cuda_getDevice"] = _answer(0)
    for owner, members in replaced.items():
        for name, value in members.items():
            type.__setattr__(owner, name, value)


def _refuse(*args: Any, **options: Any) -> Any:
    raise AssertionError("tensors without memory come to no kernel")


def _address(tensor: torch.Tensor) -> int:
    """Return a number unique to a storage and offset."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
