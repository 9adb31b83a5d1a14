# SPDX-License-Identifier: Apache-2.0
"""A reference that the policy replaces periodically: its scores, and a run that is resumed between.

Not covered: GPUs, and the effect of resets on long runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from distributed import run_ranks
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from rl_runs import layout_overrides, overrides_for, read_records, train

RESET = ["rollout.engine=hf", "data.validation_files=[]", "reference.reset_every=2", "algorithm.kl_coef=0.1"]


def run(task: Path, run_dir: Path, steps: int, world_size: int, *extra: str) -> list[dict]:
    """Train, and return the records."""
    overrides = overrides_for(task, run_dir, *RESET, f"trainer.total_steps={steps}", *extra)
    assert run_ranks(train, world_size, overrides, timeout=150) == [None] * world_size
    return [record for record in read_records(run_dir) if "policy/grad_norm" in record]


def test_a_reset_reference_is_the_policy_and_is_resumed(task: Path, tmp_path: Path) -> None:
    """A run that continues after step 3 is, bit for bit, one that has not ended; in another layout nearly."""
    whole = run(task, tmp_path / "whole", 5, 2)
    kl = [record["kl/per_response"] for record in whole]
    assert [value == 0 for value in kl] == [True, False, True, False, True]
    run(task, tmp_path / "halves", 3, 2)
    halves = run(task, tmp_path / "halves", 5, 2)
    assert halves == whole
    name = "checkpoints/latest/huggingface/model.safetensors"
    ours, theirs = load_file(tmp_path / "whole" / name), load_file(tmp_path / "halves" / name)
    assert all(value.equal(theirs[key]) for key, value in ours.items())
    ended = f"checkpoint.resume={tmp_path}/halves/checkpoints/step_3"
    other = run(task, tmp_path / "other", 5, 4, *layout_overrides(2, 2, 1), ended)
    for before, after in zip(whole[3:], other, strict=True):
        assert after["kl/per_response"] == pytest.approx(before["kl/per_response"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        (["reference.offload=true"], "reference.offload = True with reference.reset_every = 2: it moves the weights"),
        (
            ["actor.lora.rank=4"],
            "actor.lora.rank = 4 with reference.reset_every = 2: the reference is the actor",
        ),
        (["placement.reference=1"], "reference.reset_every = 2: it is apart from the actor"),
        (["reference.reset_every=0"], "reference.reset_every = 0 is too small"),
    ],
)
def test_what_a_reset_cannot_do_is_refused(extra: list[str], found: str, task: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, overrides_for(task, tmp_path, *RESET, *extra))
    assert found in str(caught.value)


def test_without_a_reference_nothing_is_reset(task: Path, tmp_path: Path) -> None:
    loaded = load_config(None, overrides_for(task, tmp_path, *RESET, "algorithm.kl_coef=0"))
    assert loaded.config.reference.reset_every is None
    assert any("reference.reset_every" in note for note in loaded.notes)
