# SPDX-License-Identifier: Apache-2.0
"""Files, rooms and functions of the package that one synchronous step enters, from a trace of a real one.

    python tests/step_figures.py [SETTING=VALUE...]

Traces the body of step 2 of `Trainer.train` in a GRPO run of one rank on a toy task: vLLM in the rank, a reference
model, the rule of the toy recipe. The recording of metrics, validation and checkpoints come after the body. A function
counts once, with the lines of its own text. APART: files that are entered, and that a reader of the step may skip.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

import megatron_rl.run.grpo as trainer_module
from distributed import run_ranks
from rl_runs import make_task, overrides_for, train

PACKAGE = f"{ROOT}/megatron_rl/"
APART = {
    "parallel/cpu_runtime.py": "megatron-core's CUDA calls on a CPU; a GPU run loads none of it",
    "observability/console.py": "the bar of responses, drawn by a thread",
}
MAX_FILES, MAX_LINES = 30, 6_500
Entered = dict[str, Counter[str]]  # file -> lines by function


def trace_body(steps: Iterator[int], traced: int, entered: set[CodeType]) -> Iterator[int]:
    """Yield the steps of a run; during the body of step `traced`, collect the code of the package that is entered."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add(frame.f_code)

    for step in steps:
        hook = note if step == traced else None
        threading.setprofile(hook)  # of threads that start in the body
        sys.setprofile(hook)
        yield step
        sys.setprofile(None)
        threading.setprofile(None)


def trace(rank: int, world_size: int, directory: str, extra: list[str]) -> Entered:
    """Run the job of one rank; return the functions that the second of its three steps enters."""
    task, found, steps = Path(directory), set[CodeType](), trainer_module.Trainer.steps
    trainer_module.Trainer.steps = lambda self: trace_body(steps(self), 2, found)
    settings = ("reward.function=exact", "data.validation_files=[]", "trainer.total_steps=3")
    error = train(rank, world_size, overrides_for(task, task / "run", *settings, *extra))
    assert error is None, error
    entered: Entered = defaultdict(Counter)
    for code in found:
        last = max(line for _, _, line in code.co_lines() if line)
        entered[code.co_filename.removeprefix(PACKAGE)][code.co_qualname] += last - code.co_firstlineno + 1
    return dict(entered)


def trace_step(extra: list[str]) -> Entered:
    """Return the functions of a step by file, those APART last."""
    with tempfile.TemporaryDirectory() as directory:
        make_task(Path(directory))
        [entered] = run_ranks(trace, 1, directory, extra)
    return dict(sorted(entered.items(), key=lambda item: (item[0] in APART, item[1].total())))


def main() -> None:
    """Entry point."""
    entered = trace_step(sys.argv[1:])
    for name, found in entered.items():
        note = f"apart: {APART[name]}" if name in APART else ", ".join(list(found)[:6])
        print(f"{name:32} {len(found):3} functions {found.total():4} lines   {note}")
    kept = {name: found for name, found in entered.items() if name not in APART}
    rooms, lines = {name.split("/")[0] for name in kept}, sum(found.total() for found in kept.values())
    print(f"{len(kept)} files, {len(rooms)} rooms, {sum(map(len, kept.values()))} functions of {lines} lines")


if __name__ == "__main__":
    main()
