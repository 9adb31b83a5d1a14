# SPDX-License-Identifier: Apache-2.0
"""A file of the reference's log-probs gives the bits of a loaded reference, in every layout; others are refused.

Not covered: hosts without a common file system (rank 0 alone touches the file), and weights in which a few numbers were
edited (their digest is of samples).
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from preference_runs import LAYOUTS, keep_compared, learn, list_pairs, read_weights
from safetensors.torch import load_file, save_file

from megatron_rl.observability.metrics import read_metrics
from megatron_rl.run.loading import load_config
from megatron_rl.run.preference_inputs import plan_preferences
from megatron_rl.types import UserError
from rl_runs import make_task


def _copy_model(task: Path, directory: Path) -> Path:
    """A model with other weights."""
    shutil.copytree(task / "model", directory)
    weights = load_file(directory / "model.safetensors")
    save_file({name: 1.1 * tensor for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory


def _check_equal(task: Path, directory: Path, world_size: int, *extra: str) -> None:
    """A loaded reference, the run that writes the file and one that reads it have equal bits.

    Validation has rows of its own: the sum of a row in both is of its training batch, and rounded otherwise.
    """
    pairs, file = list_pairs(task), f"preference.reference_logprobs={directory}/known.npz"
    (directory / "own.jsonl").write_text("".join(json.dumps(x | {"prompt": "0" + x["prompt"]}) + "\n" for x in pairs))
    extra = (*extra, f"data.validation_files=[{directory}/own.jsonl]")
    loaded = learn(task, directory / "loaded", pairs, *extra, world_size=world_size)
    written = learn(task, directory / "written", pairs, *extra, file, world_size=world_size)
    before = (directory / "known.npz").read_bytes()
    read = learn(task, directory / "read", pairs, *extra, file, world_size=world_size)
    assert keep_compared(loaded) == keep_compared(written) == keep_compared(read)
    assert loaded[-1]["validation/own/margin"] > 0
    assert (directory / "known.npz").read_bytes() == before, "a file that is there is only read"
    times = [
        "time/ref_logprobs" in record
        for name in ("loaded", "read")
        for record in read_metrics(directory / name / "run")
    ]
    assert times == [True] * 4 + [False] * 4, "no reference works in the run that reads"
    weights = [read_weights(directory / name) for name in ("loaded", "written", "read")]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]) and torch.equal(tensor, weights[2][name])


def test_a_file_gives_the_bits_of_a_loaded_reference(task: Path, tmp_path: Path) -> None:
    """Also of a reference with other weights than the policy's, whose rewards are not 0 at first."""
    _check_equal(task, tmp_path, 1, f"reference.path={_copy_model(task, tmp_path / 'other')}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, task: Path, tmp_path: Path) -> None:
    _check_equal(task, tmp_path, 2, LAYOUTS[layout])


def test_adapters(task: Path, tmp_path: Path) -> None:
    _check_equal(task, tmp_path, 1, "actor.lora.rank=4", "actor.lora.alpha=8", "preference.loss=ipo")


def test_a_resumed_run_reads_the_file(task: Path, tmp_path: Path) -> None:
    pairs, file = list_pairs(task), f"preference.reference_logprobs={tmp_path}/known.npz"
    whole = learn(task, tmp_path / "whole", pairs, file)
    learn(task, tmp_path / "parts", pairs, file, "trainer.total_steps=2")
    parts = learn(task, tmp_path / "parts", pairs, file)
    assert keep_compared(parts)[-1] == keep_compared(whole)[-1]
    mine, theirs = read_weights(tmp_path / "parts"), read_weights(tmp_path / "whole")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_the_file_serves_other_orders_and_lengths(task: Path, tmp_path: Path) -> None:
    """Later epochs, another order and a part of the rows: equal but for rounding, which depends on the batch."""
    pairs, file = list_pairs(task), f"preference.reference_logprobs={tmp_path}/known.npz"
    learn(task, tmp_path / "first", pairs, file)
    with np.load(tmp_path / "known.npz") as found:
        assert found["keys"].dtype == np.uint64 and len(found["keys"]) == len(found["sums"]) == 2 * len(pairs)
        assert np.isfinite(found["sums"]).all() and (found["sums"] < 0).all()
    other = ["trainer.seed=7", "data.train_batch_size=8", "trainer.total_steps=4"]
    loaded = learn(task, tmp_path / "loaded", pairs[:12], *other)
    read = learn(task, tmp_path / "read", pairs[:12], *other, file)
    for mine, theirs in zip(keep_compared(read), keep_compared(loaded), strict=True):
        ties = {name for name in mine if name.endswith(("accuracy", "calibration_error"))}  # rounding decides ties
        assert {k: v for k, v in mine.items() if k not in ties} == pytest.approx(
            {k: v for k, v in theirs.items() if k not in ties}, rel=2e-5, abs=2e-6
        )


@pytest.fixture(scope="module")
def known(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that a run has written."""
    directory = tmp_path_factory.mktemp("known")
    learn(task, directory, list_pairs(task), f"preference.reference_logprobs={directory}/known.npz")
    return directory / "known.npz"


@pytest.mark.parametrize("kind", ["rows", "model", "tokenizer", "temperature", "damaged", "directory"])
def test_what_does_not_fit_is_refused(kind: str, known: Path, task: Path, tmp_path: Path) -> None:
    pairs, file, extra = list_pairs(task), known, []
    if kind == "rows":
        pairs[3] |= {"rejected": "99999"}
        expected = "lacks 2 responses of the rows, the first to '3+6='"  # a row of both data sets
    elif kind == "model":
        extra = [f"reference.path={_copy_model(task, tmp_path / 'other')}"]
        expected = "another reference or tokenizer: weights of the reference "
    elif kind == "tokenizer":
        other = tmp_path / "other"
        other.mkdir()
        make_task(other, ["<a>"])
        extra = [f"model.tokenizer={other}/tokenizer.model", f"model.path={tmp_path}/model"]
        shutil.copytree(other / "model", tmp_path / "model")
        expected = "tokenizer "
    elif kind == "temperature":
        extra, expected = ["rollout.temperature=0.5"], "rollout.temperature 1.0, here 0.5"
    elif kind == "damaged":
        file, expected = tmp_path / "damaged.npz", "cannot be read: "
        file.write_bytes(known.read_bytes()[:-100])
    else:
        file, expected = tmp_path / "missing" / "known.npz", "its directory is missing or read-only"
    with pytest.raises(AssertionError, match="UserError") as error:
        learn(task, tmp_path / "run", pairs, *extra, f"preference.reference_logprobs={file}")
    text = str(error.value)
    assert f"{file} " in text and expected in text
    assert all(
        part in text for part in ("source:   preference.reference_logprobs", "expected: ", "hint:     name another")
    )


@pytest.mark.parametrize("loss", ["kto", "orpo", "bradley_terry"])
def test_losses_without_such_log_probs(loss: str, task: Path) -> None:
    settings = [f"model.path={task}/model", f"data.train_files=[{task}/train.jsonl]", "data.train_batch_size=4"]
    config = load_config(None, [*settings, f"preference.loss={loss}", "preference.reference_logprobs=x.npz"]).config
    with pytest.raises(UserError, match=f"preference.reference_logprobs with preference.loss = '{loss}'"):
        plan_preferences(config, 1)


def test_pairs_are_in_the_viewer(task: Path, tmp_path: Path) -> None:
    """Validation writes each pair for the page, which shows it side by side."""
    from tools.view_rollouts import main

    pairs = list_pairs(task)
    records = learn(task, tmp_path, pairs)
    rows = [
        json.loads(line) for line in (tmp_path / "run/validation/rows/rollouts/step_3.jsonl").read_text().splitlines()
    ]
    assert [(row["label"], row["response"]) for row in rows] == [
        (side, pair[side]) for pair in pairs for side in ("chosen", "rejected")
    ]
    assert [row["prompt"] for row in rows[::2]] == [pair["prompt"] for pair in pairs]
    margins = [row["reward_components"]["margin"] for row in rows[::2]]
    assert margins == [a["reward"] - b["reward"] for a, b in zip(rows[::2], rows[1::2], strict=True)]
    assert sum(margins) / len(margins) == pytest.approx(records[-1]["validation/rows/margin"])
    assert main([str(tmp_path / "run/validation/rows"), "--out", str(tmp_path / "page.html")]) == 0
    (index,) = re.findall('id="index">(.*?)</script>', (tmp_path / "page.html").read_text())
    columns = json.loads(gzip.decompress(base64.b64decode(index)))["columns"]
    assert columns["label"] == ["chosen", "rejected"] * (2 * len(pairs)), "at step 0 and at the end"
    assert columns["response"][: 2 * len(pairs)] == [pair[side] for pair in pairs for side in ("chosen", "rejected")]
