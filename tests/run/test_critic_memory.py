# SPDX-License-Identifier: Apache-2.0
"""Gradients of actor and critic are released before a rollout, as configured, without changing a number."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import run_ranks
from megatron_rl.training.optimizer import Optimizer
from megatron_rl.transfer.hybrid_engine import HybridEngine
from rl_runs import overrides_for, read_records, train

PPO = ["algorithm.adv_estimator=gae", "critic.lr=1e-3", "rollout.engine=hf", "trainer.save_freq=null"]


def _train_watched(rank: int, world_size: int, overrides: list[str]) -> list[list[int]]:
    """Bytes of the gradients of actor and critic at the beginning of each rollout."""
    optimizers: list[Optimizer] = []
    found: list[list[int]] = []
    build, reshard = Optimizer.__init__, HybridEngine.reshard

    def note(self: Optimizer, *arguments: object) -> None:
        build(self, *arguments)  # pyright: ignore[reportArgumentType]  # as it is called
        optimizers.append(self)

    def look(self: HybridEngine) -> None:
        buffers = [[b for module in optimizer._ddp for b in module.buffers] for optimizer in optimizers]
        found.append([sum(b.grad_data.untyped_storage().nbytes() for b in part) for part in buffers])
        reshard(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "__init__", note)
        patch.setattr(HybridEngine, "reshard", look)
        assert train(rank, world_size, overrides) is None
    return found


def test_offloaded_gradients_are_not_there_during_a_rollout(task: Path, tmp_path: Path) -> None:
    records, held = {}, {}
    for name, offload in (("kept", "false"), ("given", "true")):
        run_dir = tmp_path / name
        overrides = overrides_for(task, run_dir, *PPO, f"actor.offload_gradients={offload}")
        [held[name]] = run_ranks(_train_watched, 1, overrides, timeout=120)
        records[name] = [
            {key: value for key, value in record.items() if key.startswith(("policy/", "value/"))}
            for record in read_records(run_dir)
        ]
    assert len(held["kept"]) == len(held["given"]) >= 2
    assert all(actor > 0 and critic > 0 for actor, critic in held["kept"])
    assert all(actor == critic == 0 for actor, critic in held["given"])
    assert records["kept"] == records["given"] and any("value/loss" in record for record in records["kept"])
