# SPDX-License-Identifier: Apache-2.0
"""Print a data file for a directory of tasks in Harbor's format, for `agents.environment: harbor:DIRECTORY`.

python tools/list_harbor_tasks.py DIRECTORY > tasks.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_rl.agents.adapters.harbor import list_rows


def main() -> None:
    """Print a row for each task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="of the tasks")
    for row in list_rows(parser.parse_args().directory):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
