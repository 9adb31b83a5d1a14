# SPDX-License-Identifier: Apache-2.0
"""List the differences between runs, and plot their curves.

    python tools/compare_runs.py RUN_DIR RUN_DIR
    python tools/compare_runs.py grpo=RUN_DIR grpo=RUN_DIR ppo=RUN_DIR --metrics reward/mean policy/entropy --out F.png

Prints differing settings and the first differing step. Runs of one label are seeds, plotted as mean and range.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools.viewer.comparison import describe_comparison, plot_comparison


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Arguments(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN_DIR", help="runs; without a label, the directory's name")
    parser.add_argument("--metrics", nargs="+", default=["reward/mean"], help="keys of metrics.jsonl, one panel each")
    parser.add_argument("--out", type=Path, help="picture to write")
    options = parser.parse_args(arguments)
    runs: dict[str, list[Path]] = {}
    for text in options.runs:
        label, _, directory = text.rpartition("=")
        runs.setdefault(label or Path(directory).name, []).append(Path(directory))
    try:
        print(describe_comparison(runs))
        if options.out:
            plot_comparison(runs, options.metrics, options.out)
            print(options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
