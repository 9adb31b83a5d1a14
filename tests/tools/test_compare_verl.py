# SPDX-License-Identifier: Apache-2.0
"""The comparison with verl without a checkout of verl: verdicts, and the message instead.

Not covered: the comparison itself, which needs one; `python tools/compare_verl.py CHECKOUT` makes it. Its loops over
the tables of names cover every accepted name.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.compare_verl import Batch, Row, main, measure


def test_without_a_checkout_it_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and "skipped: no checkout" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2 and "there is no verl/trainer/ppo/core_algos.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("difference", "reason", "is_wrong"),
    [
        (0.0, "", False),
        (1e-6, "", False),
        (1.1e-6, "", True),
        (float("nan"), "", True),
        (None, "", True),
        (0.5, "on purpose", False),
        (None, "not made", False),
    ],
)
def test_verdicts(difference: float | None, reason: str, is_wrong: bool) -> None:
    row = Row("loss", "vanilla", "ppo", difference, reason)
    assert row.is_wrong == is_wrong and row.cells()[-1] == (reason or ("DIFFERENT" if is_wrong else "equal"))


def test_packed_rows_hold_the_tokens_of_the_padded_ones() -> None:
    batch = Batch(0)
    assert torch.equal(batch.unpack(batch.pack(batch.old)), batch.old[batch.mask])
    assert batch.packed_mask.sum() == batch.lengths.sum() == len(batch.sequence_ids) - len(batch.lengths)
    assert measure(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5
