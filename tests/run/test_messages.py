# SPDX-License-Identifier: Apache-2.0
"""Number of pickled Python objects that the ranks exchange in a step: each costs all ranks a gather over the job.

Counted in torch's pickling, for any caller. Not covered: steps that save or validate, and engines that are servers.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch.distributed.distributed_c10d as library

from distributed import run_ranks
from megatron_rl.observability.run import Run
from rl_runs import overrides_for, train

PLACED = ["placement.actor=0-0", "placement.reference=0-0", "placement.rollout=1-1"]


@pytest.mark.parametrize("placement", [[], PLACED], ids=["together", "apart"])
def test_a_step_pickles_nothing(placement: list[str], task: Path, tmp_path: Path) -> None:
    """Of four steps the third: in the first, ranks find each other; before the last record, the last save begins."""
    overrides = overrides_for(
        task,
        tmp_path / "run",
        "rollout.engine=hf",
        "trainer.total_steps=4",
        "trainer.val_before_train=false",
        "data.validation_files=[]",
        *placement,
    )

    def count(rank: int, world_size: int) -> dict[int, list[str]]:
        pickled: dict[int, list[str]] = {}
        steps, record, pack = [0], Run.record, library._object_to_tensor

        def end_step(run: Run, step: int) -> None:
            steps.append(step)
            record(run, step)

        def pickle(*args: object) -> object:
            callers = [frame.name for frame in traceback.extract_stack() if "megatron_rl" in frame.filename]
            pickled.setdefault(steps[-1] + 1, []).append(" > ".join(callers[-3:]))
            return pack(*args)

        Run.record, library._object_to_tensor = end_step, pickle
        assert train(rank, world_size, overrides) is None
        return pickled

    for pickled in run_ranks(count, 2, timeout=170):
        assert pickled[1] and 3 not in pickled, pickled
