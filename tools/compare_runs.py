# SPDX-License-Identifier: Apache-2.0
"""Draw the curves of several runs over each other.

python tools/compare_runs.py grpo=RUN_DIR ppo=RUN_DIR --metrics reward/mean policy/entropy --out F.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.observability.comparison import plot_comparison
from megatron_rl.types import UserError


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN_DIR", help="runs; without a label, the directory's name")
    parser.add_argument("--metrics", nargs="+", default=["reward/mean"], help="keys of metrics.jsonl, one panel each")
    parser.add_argument("--out", type=Path, required=True, help="picture to write")
    options = parser.parse_args(arguments)
    runs = {}
    for text in options.runs:
        label, _, directory = text.rpartition("=")
        runs[label or Path(directory).name] = Path(directory)
    try:
        plot_comparison(runs, options.metrics, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
