# SPDX-License-Identifier: Apache-2.0
"""Cost of planning a reshard for one rank of a large job. Nothing is started and no weights are read.

    python tools/benchmarks/bench_planning.py --hf-config docs/shapes/1t.json --source tp=8,pp=16,ep=64,dp=64 \\
        --destination tp=16 --rank 4099 --json FILE

`plan` is a rank's work at the start of a run: both placement tables, the index, and its part of the plan. `count` is
the bytes of every rank, as in tools/plan_reshard.py. CPU seconds are independent of other load. Copied into an older
checkout, this file measures that commit.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

from megatron_rl.transfer.planner import Planner
from tools._layouts import read_layouts, read_shape
from tools.planning.reshard_cost import list_flows, summarize
from tools.planning.switch import build_shards


def measure(seconds: dict[str, dict[str, float]], name: str, action: Callable[[], Any]) -> Any:
    """Run an action, record its seconds, and return its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = action()
    seconds[name] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-config", type=Path, required=True, help="model directory or config.json")
    parser.add_argument("--source", required=True, help="training layout: tp=8,pp=16,ep=64,dp=64 (also vpp, cp)")
    parser.add_argument("--destination", required=True, help="engine layout: tp=16, or ep=16 (dp is the rest)")
    parser.add_argument("--rank", type=int, default=0, help="whose plan is made (0)")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="consecutive ranks that share a node (8)")
    parser.add_argument("--json", type=Path, help="write the result here as well", metavar="FILE")
    options = parser.parse_args(arguments)
    shape = read_shape(options.hf_config)
    layout, rollout_tp, rollout_ep = read_layouts(shape, options.source, options.destination)
    seconds: dict[str, dict[str, float]] = {}

    def make_plan() -> tuple[Planner, Any]:
        shards = build_shards(shape, layout, rollout_tp, rollout_ep=rollout_ep)
        planner = Planner(*shards, ranks_per_node=options.ranks_per_node)
        return planner, planner.plan(options.rank)

    planner, plan = measure(seconds, "plan", make_plan)
    planned_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    measure(
        seconds,
        "count",
        lambda: summarize(
            list_flows(planner),
            num_ranks=layout.world_size,
            itemsize=2,
            ranks_per_node=options.ranks_per_node,
            bucket_bytes=16 << 20,
        ),
    )
    result = {
        "source": layout.describe(),
        "destination": f"tp={rollout_tp}" + (f" ep={rollout_ep}" if rollout_ep > 1 else ""),
        "num_ranks": layout.world_size,
        "num_tensors": len(shape.logical_tensors()),
        "rank": options.rank,
        "operations": {
            "local": len(plan.local),
            "receives": sum(map(len, plan.receives.values())),
            "sends": sum(map(len, plan.sends.values())),
        },
        "seconds": seconds,
        "process_mib": planned_mib,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
