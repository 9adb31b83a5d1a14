# SPDX-License-Identifier: Apache-2.0
"""Figures that rungs of tools/first_gpu_run.py measured, and the table of them.

A reader returns pairs of what was measured and its value with the unit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

Figure = tuple[str, str]
_PROBED = re.compile(r'"(bfloat16|all-reduce) (TFLOP/s|GB/s)": ([\d.e+]+)')


def read_probe(output: str) -> list[Figure]:
    """Read speeds that tools/_gpu_probes.py printed; every rank prints them."""
    found = {name: f"{float(value):.4g} {unit}" for name, unit, value in _PROBED.findall(output)}
    return list(found.items())


def read_speeds(file: Path) -> list[Figure]:
    """Read the rows of bench_ppo_step.py, with milliseconds per microbatch."""
    found = []
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        value = f"{row['milliseconds']:.4g} ms, mfu {row['mfu']:.3f}"
        if row["mode"] != "eager":
            value += f", {row['speedup']:.2f} times as fast as eager, gradients' norm {row['difference']:.1g} from its"
        found.append((f"{row['shape']}, {row['size']} tokens, {row['mode']}", value))
    return found


def read_switch(file: Path) -> list[Figure]:
    """Read the result of bench_reshard.py."""
    result = json.loads(file.read_text(encoding="utf-8"))
    return [("weights in the host's memory", f"{result['bytes_total'] / result['seconds'] / 1e9:.4g} GB/s")]


def read_rollout(run: Path) -> list[Figure]:
    """Read a run's last rollout; the first ones warm up."""
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return [("sampled in the last rollout", f"{last['tokens/response'] / last['time/rollout']:,.0f} tokens/s")]


def format_table(figures: Mapping[str, Sequence[Figure]]) -> str:
    """Format the figures of each rung."""
    rows = [f"| {rung} | {what} | {value} |" for rung, found in figures.items() for what, value in found]
    return "\n".join(["| rung | figure | |", "|---|---|---|", *rows])
