# SPDX-License-Identifier: Apache-2.0
"""Filters training prompts by pass rate, as measured with `tools/evaluate.py --rollouts`.

Estimators with a group baseline learn nothing from prompts whose responses are all correct or all wrong.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from pathlib import Path

from megatron_rl.config.sections import DataConfig
from megatron_rl.data.prompts import PromptSet, name_files
from megatron_rl.data.rows import read_rows
from megatron_rl.types import UserError, has_reward

_CORRECT_FROM = 0.5  # minimum reward of a correct response, as in pass@k
_HINT = (
    "evaluate the train files with these settings: tools/evaluate.py RECIPE data.validation_files=[TRAIN_FILE] "
    "--samples 8 rollout.validation_temperature=1.0 --rollouts DIR"
)

Measured = dict[int, tuple[str, list[bool]]]  # row in the file -> text of the prompt, correctness of each response


def list_pass_rate_files(cfg: DataConfig) -> dict[str, Path]:
    """Return train file -> its latest file of rollouts below `data.pass_rates` (UserError if there is none)."""
    found = {}
    for name, file in name_files(cfg.train_files).items():
        folder = Path(cfg.pass_rates or "") / name / "rollouts"
        steps = {int(path.stem.removeprefix("step_")): path for path in folder.glob("step_*.jsonl")}
        if not steps:
            raise _refuse(f"no rollouts of {file}", f"{folder}/step_<N>.jsonl")
        found[file] = steps[max(steps)]
    return found


def select_by_pass_rate(train: PromptSet, cfg: DataConfig, shaping: str) -> tuple[PromptSet, list[str]]:
    """Keep prompts with a pass rate in `pass_rate_range` (inclusive); return them and a note.

    Args:
        shaping: reward component to subtract from the rewards, because it does not measure correctness.

    Raises:
        UserError: a prompt was not measured, or has changed since.
    """
    measured = [_read(path, shaping) for path in list_pass_rate_files(cfg).values()]
    (low, high), kept = cfg.pass_rate_range, []
    for prompt in train.prompts:
        file = bisect_right(train.file_starts, prompt.prompt_id) - 1
        row = prompt.prompt_id - train.file_starts[file]
        text, correct = measured[file].get(row, (None, []))
        if text != prompt.text:
            state = "has not been measured" if text is None else "was another one when it was measured"
            raise _refuse(
                f"the prompt in row {row} (from 0) of {cfg.train_files[file]} {state}", "rollouts of each prompt"
            )
        if low <= sum(correct) / len(correct) <= high:
            kept.append(prompt)
    note = f"data.pass_rates: {len(kept)} of {len(train.prompts)} prompts are right in {low:g} to {high:g} of the cases"
    return replace(train, prompts=kept), [note]


def _read(path: Path, shaping: str) -> Measured:
    found: Measured = {}
    for row in read_rows([str(path)]):
        columns = row.columns
        try:
            number, text, components = int(columns["prompt_id"]), str(columns["prompt"]), columns["reward_components"]
            is_correct = columns["reward"] - components.get(shaping, 0.0) >= _CORRECT_FROM
            if has_reward(columns.get("finish_reason", ""), components):
                found.setdefault(number, (text, []))[1].append(is_correct)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise _refuse(f"{row.location} is no scored rollout", "rollouts that tools/evaluate.py wrote") from None
    return found


def _refuse(found: str, expected: str) -> UserError:
    return UserError(found, source="data.pass_rates", expected=expected, hint=_HINT)
