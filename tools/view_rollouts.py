# SPDX-License-Identifier: Apache-2.0
"""Show rollouts of one or more runs in a browser: from disk, or as an HTML page that needs no server and no network.

    python tools/view_rollouts.py checkpoints/runs/RUN
    python tools/view_rollouts.py checkpoints/runs/RUN --out page.html --steps 90-100
    python tools/view_rollouts.py RUN_DIR OTHER_RUN_DIR --out page.html

A run logs trainer.log_rollouts=N groups of each step; see docs/rollout_viewer.md.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools.viewer.rollout_page import write_page
from tools.viewer.rollout_store import RolloutStore
from tools.viewer.serving import serve_store


def read_steps(text: str) -> range:
    """Parse "90-100" or "7" into a range of steps."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def serve(run_dirs: list[Path], host: str, port: int) -> int:
    """Serve the rollouts of the runs until Ctrl-C."""
    server = serve_store(RolloutStore(run_dirs), host, port)
    print(f"rollouts: {server.url}", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.stop()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Arguments(description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument("--out", type=Path, help="page to write (default: serve the rollouts until Ctrl-C)")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to serve at (0: any free one)")
    parser.add_argument("--steps", type=read_steps, metavar="FIRST[-LAST]", help="only these steps (default: all)")
    options = parser.parse_args(arguments)
    try:
        if options.out is None:
            return serve(options.run_dirs, options.host, options.port)
        page = write_page(options.run_dirs, options.out, options.steps)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {page.num_rollouts} rollouts of {page.num_steps} steps, {page.num_bytes / 1e6:.1f} MB")
    if page.missing:
        print(f"not in this run: {', '.join(page.missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
