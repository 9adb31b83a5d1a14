# SPDX-License-Identifier: Apache-2.0
"""A rank of bench_breakdown.py: a checkout's GRPO program with CPU-time timers, started by torchrun.

    _breakdown_rank.py CHECKOUT OUT COMPUTE_STEPS ARGUMENTS...

Writes a line per step to OUT.<rank>: CPU-seconds in total (key "step") and by phase. The last COMPUTE_STEPS steps time
every operator, for matrix products and attention (key "compute").
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

checkout, out, compute_steps, *arguments = sys.argv[1:]
sys.path.insert(0, checkout)

from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.observability.progress import PhaseTimers

# Phases in addition to the program's: module, class and method. A checkout without one counts it as rest.
FURTHER = {
    "packing": ("megatron_rl.samples.batch", "Packer", "pack"),
    "kl": ("megatron_rl.run.grpo", "Trainer", "compare"),
    "advantages": ("megatron_rl.run.grpo", "Trainer", "estimate"),
    "describe": ("megatron_rl.run.grpo", "Trainer", "describe"),
}
COMPUTE = ("mm", "linear", "matmul", "scaled_dot_product", "attention")


class ComputeClock(TorchDispatchMode):
    """Sums CPU time in matrix products and attention, forward and backward."""

    seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, timed if it is in `COMPUTE`."""
        if not any(word in func.__name__ for word in COMPUTE):
            return func(*args, **(kwargs or {}))
        start = time.thread_time()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds += time.thread_time() - start


class CpuTimers(PhaseTimers):
    """The program's timers on CPU time, with further phases."""

    def __init__(self) -> None:
        super().__init__(time.process_time)
        self._path = Path(f"{out}.{os.environ['RANK']}")
        self._compute, self._began, self._step = ComputeClock(), time.process_time(), 0
        for name, (module, owner, method) in FURTHER.items():
            self._time(name, module, owner, method)

    def _time(self, name: str, module: str, owner: str, method: str) -> None:
        try:
            kind = getattr(importlib.import_module(module), owner)
            function = getattr(kind, method)
        except (ImportError, AttributeError):
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        setattr(kind, method, timed)

    def pop(self) -> dict[str, float]:
        """End the step and write its line."""
        record, now = super().pop(), time.process_time()
        seconds = {key.removeprefix("time/"): value for key, value in record.items() if key.startswith("time/")}
        line = seconds | {"step": now - self._began, "compute": self._compute.seconds}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._step += 1
        if self._step == int(arguments[0]) - int(compute_steps):
            self._compute.__enter__()  # to the end of the process
        self._compute.seconds, self._began = 0.0, time.process_time()
        return record


importlib.import_module("megatron_rl.observability.progress").PhaseTimers = CpuTimers
sys.argv = [f"{checkout}/launch/pretrain_grpo.py", *arguments[1:], f"trainer.total_steps={arguments[0]}"]
runpy.run_path(sys.argv[0], run_name="__main__")
