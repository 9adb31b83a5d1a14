# SPDX-License-Identifier: Apache-2.0
"""The comparison with verl without a checkout of verl: verdicts, and the message instead.

Not covered: the comparison itself, which needs one; `python tools/compare_verl.py CHECKOUT` makes it. Its loops over
the tables of names cover every accepted name.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.rewards.public_sets import find_scorer, score_math_dapo
from tools.compare_verl import DATA_SOURCES, Batch, Row, draw_texts, main, measure


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


@pytest.mark.parametrize("with_holes", [False, True])
def test_packed_rows_hold_the_tokens_of_the_padded_ones(with_holes: bool) -> None:
    """Every response ends with a token in the loss, which has the reward; log-probs are not above 0."""
    batch = Batch(0, with_holes=with_holes)
    assert torch.equal(batch.unpack(batch.pack(batch.old)), batch.old[batch.mask])
    assert batch.lengths.sum() == len(batch.sequence_ids) - len(batch.lengths)
    assert (batch.packed_mask.sum() == batch.lengths.sum()) != with_holes
    assert batch.mask[torch.arange(len(batch.mask)), batch.lengths - 1].all()
    assert all(logprobs.max() <= 0 for logprobs in (batch.old, batch.new, batch.ref, batch.rollout))


def test_random_texts_reach_every_score() -> None:
    """Among them right boxes without an answer line, which DAPO's rule accepts."""
    texts = list(draw_texts(1_000))
    for source in DATA_SOURCES:
        found = [find_scorer(source)(text, {"target": truth} if "search" in source else truth) for text, truth in texts]
        assert len({str(score) for score in found}) == 2, source
    boxed = [(text, truth) for text, truth in texts if "\\boxed{" in text and "Answer" not in text]
    assert 10 < sum(score_math_dapo(*pair)["acc"] for pair in boxed) < len(boxed)


def test_differences_are_relative_to_the_largest_number() -> None:
    assert measure(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5
