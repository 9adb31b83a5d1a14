# SPDX-License-Identifier: Apache-2.0
"""Inputs of recomputed layers that wait on the host change no bit, and all of them leave and return.

On a CPU the same code copies to other memory of the host. Not covered: page-locked memory and the time of the copies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from distributed import run_ranks
from megatron_rl.models import offloaded_inputs
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from step_runs import BUDGET, Setup, build_ragged_batch, build_role, find_differences, take_steps
from tiny_models import save_tiny_model

SP = dict(sequence_parallel=True)
SETUPS = {
    1: {"plain": Setup(), "bfloat16": Setup(dtype="bfloat16"), "critic": Setup("critic")},
    2: {
        "tp2-sp": Setup(sizes=dict(tp_size=2), config=SP),
        "pp2": Setup(sizes=dict(pp_size=2)),
        "dp2-zero3": Setup(config=dict(zero_stage=3)),
        "cp2": Setup(sizes=dict(cp_size=2)),
    },
}
STORES: list[Store] = []


class Store(offloaded_inputs.InputStore):
    """A store that notes the most inputs on the host at once."""

    def __init__(self, hidden_size: int, rows: int) -> None:
        super().__init__(hidden_size, rows)
        self.most = 0
        STORES.append(self)

    def _pack(self, tensor: torch.Tensor) -> Any:
        found = super()._pack(tensor)
        self.most = max(self.most, self.num_stored)
        return found


def _compare(rank: int, world_size: int, setups: dict[str, Setup], path: Path) -> dict[str, Any]:
    found = {}
    for name, setup in setups.items():
        groups = build_groups(ParallelLayout(world_size, **setup.sizes))
        STORES.clear()
        with patch.object(offloaded_inputs, "InputStore", Store):
            roles = [
                build_role(
                    Setup(setup.role, setup.sizes, setup.config | dict(recompute_granularity=kind), setup.dtype),
                    path,
                    groups,
                    "eager",
                )
                for kind in ("none", "full", "offload")
            ]
        results = []
        for step in range(2):
            for role in roles:
                batch = build_ragged_batch(role.model, None, step, shares_prompts=False)
                results.append(take_steps(role, batch, step)[:2])
        differing = [
            kind
            for kind, role, *steps in zip(("full", "none"), (roles[1], roles[0]), strict=True)
            if not role.model.is_fully_sharded and find_differences(roles[2], role)
        ]
        scores = [torch.equal(results[3 * step + 2][0], results[3 * step + 1][0]) for step in range(2)]
        metrics = [results[3 * step + 2][1] == results[3 * step + 1][1] for step in range(2)]
        [store] = STORES
        layers = len(list(roles[2].model.stages[0].decoder.layers))
        found[name] = dict(
            differing=differing,
            equal=scores + metrics,
            most=store.most / layers,
            left=store.num_stored,
            blocks=store.num_bytes / store.most / roles[2].model.shape.hidden_size / roles[2].model.dtype.itemsize,
            rows=roles[2].model.count_rows(BUDGET),
        )
    return found


@pytest.mark.parametrize("world_size", SETUPS)
def test_inputs_on_the_host_change_no_bit(world_size: int, path: Path) -> None:
    """Also the store: one input per layer and microbatch in flight, in blocks of the token budget, none afterwards."""
    for rank, results in enumerate(run_ranks(_compare, world_size, SETUPS[world_size], path, timeout=300)):
        for name, found in results.items():
            assert found["differing"] == [] and all(found["equal"]), (rank, name, found)
            flights = 2 if name == "pp2" and rank == 0 else 1
            assert found["most"] == flights and found["left"] == 0 and found["blocks"] == found["rows"], (name, found)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen2")
    save_tiny_model(directory, "qwen2")
    return directory
