# SPDX-License-Identifier: Apache-2.0
"""Rehearse a small job without and with each planted fault: python planted_faults.py CONFIG.json FILE.

A separate process whose torch pretends to have GPUs. FILE receives the problems by fault ("none": no fault).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools.rehearsal.cuda_guard import load_guard

load_guard()

from tools.rehearsal import fake_cuda

fake_cuda.install(80 << 30, 4)

import torch
import torch.distributed as dist

from megatron_rl.training.roles.actor import Actor
from tools.rehearsal.rank import rehearse_rank
from tools.rehearsal.report import find_problems
from tools.rehearse import read_rehearsed_job

_KEPT: list[torch.Tensor] = []


def _around_loss(change: Callable[[torch.Tensor], object]) -> AbstractContextManager[Any]:
    """Do something with the log-probs that the loss is given."""
    real = Actor._compute_policy_loss

    def compute(self: Actor, settings: Any, microbatch: Any, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
        change(logprobs)
        return real(self, settings, microbatch, logprobs, entropy)

    return patch.object(Actor, "_compute_policy_loss", compute)


def _around_step(work: Callable[[Actor], object]) -> AbstractContextManager[Any]:
    """Do something after each optimizer step."""
    real = Actor.optim_step

    def step(self: Actor) -> dict[str, float]:
        found = real(self)
        work(self)
        return found

    return patch.object(Actor, "optim_step", step)


def _keep_one_percent(actor: Actor) -> None:
    """Keep a thousandth of the weights' bytes."""
    size = sum(parameter.nbytes for parameter in actor.model.params.values()) // 100
    _KEPT.append(torch.zeros(size, dtype=torch.uint8, device=actor.model.device))


FAULTS: dict[str, AbstractContextManager[Any]] = {
    "none": nullcontext(),
    "host tensor in a collective": _around_step(
        lambda actor: dist.all_reduce(torch.zeros(1), group=actor.model.groups.dp)
    ),
    "item": _around_loss(lambda logprobs: logprobs.sum().item()),
    "forgotten device": _around_loss(lambda logprobs: logprobs + torch.zeros(len(logprobs))),
    "second wait": _around_step(lambda actor: actor.optimizer.is_sound.tolist()),
    "leak": _around_step(_keep_one_percent),
    "memory that nobody plans": _around_loss(lambda logprobs: torch.zeros(512 << 20, device=logprobs.device)),
    "bytes that nobody plans": _around_step(
        lambda actor: dist.all_reduce(torch.zeros(64 << 20, device=actor.model.device), group=actor.model.groups.dp)
    ),
}


def main(config: str, file: Path) -> None:
    """Entry point."""
    found = {}
    for name, fault in FAULTS.items():
        job, _ = read_rehearsed_job(json.loads(Path(config).read_text()))
        with fault:
            try:
                report = rehearse_rank(job, 0)
            except Exception as error:
                found[name] = [f"{type(error).__name__}: {error}"]
                dist.destroy_process_group()
                continue
        found[name] = [*find_problems(report, {"actor": "eager"})]
        _KEPT.clear()
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
