# SPDX-License-Identifier: Apache-2.0
"""Join a run with schedule.elastic=true as one more rollout engine (launch/engine.sh starts this file).

    python launch/engine.py RUN_DIR
    torchrun --standalone --nproc-per-node 2 launch/engine.py RUN_DIR    # rollout.tensor_model_parallel_size=2

It ends with status 0 when the run has ended, and after SIGUSR1 or SIGTERM, when its requests were given back.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.run.command_line import end_program, leave

_WORLD_MINUTES = 365 * 24 * 60.0  # the ranks of an engine wait for each other as long as the run needs


def main(arguments: argparse.Namespace) -> int:
    """Serve until the run has ended; return the exit status."""
    from megatron_rl.engines.elastic.member import EngineProcess
    from megatron_rl.parallel.collectives import init_distributed

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        EngineProcess(arguments.run_dir, init_distributed(_WORLD_MINUTES), arguments.patience).run()
    except BaseException as error:
        return end_program(error)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="trainer.run_dir of the run, on a file system that both see")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for a run (default: 600)")
    leave(main(parser.parse_args()))
