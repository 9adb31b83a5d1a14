# SPDX-License-Identifier: Apache-2.0
"""Plan a reshard for any cluster without running it: bytes per link class, seconds, memory.

    python tools/plan_reshard.py --hf-config DIR_OR_JSON --source tp=8,pp=8,dp=16 --destination tp=8 \\
        --ranks-per-node 8 --json FILE

The plan is training's; its bytes are exact. Seconds are a lower bound from bandwidth alone (bytes of the busiest rank
over the speed of its link). No weights are read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.transfer.planner import Planner
from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools._gather_path import predict_gather_seconds, summarize_gather
from tools._layouts import read_layouts, read_shape
from tools.planning.reshard_cost import Bandwidths, list_flows, predict_seconds, summarize
from tools.planning.switch import build_shards

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--hf-config", type=Path, required=True, help="model directory or config.json")
    parser.add_argument("--source", required=True, help="training layout: tp=8,pp=8,dp=16 (also vpp, cp, ep)")
    parser.add_argument("--destination", required=True, help="engine layout: tp=8, or ep=8 (dp is the rest)")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="consecutive ranks that share a node (8)")
    parser.add_argument("--dtype", choices=sorted(ITEM_SIZES), default="bfloat16", help="on the wire (bfloat16)")
    parser.add_argument(
        "--intra-gb-s", type=float, default=400.0, help="GB/s per rank and direction inside a node (400)"
    )
    parser.add_argument("--inter-gb-s", type=float, default=50.0, help="GB/s per rank and direction between nodes (50)")
    parser.add_argument("--bucket-mib", type=int, default=16, help="staging bucket, see hybrid.bucket_bytes (16)")
    parser.add_argument("--json", type=Path, help="write the result here as well", metavar="FILE")
    return parser


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Return bytes and seconds, as in the JSON file.

    Raises:
        UserError: arguments that cannot be planned.
    """
    for flag in ("ranks_per_node", "bucket_mib"):
        if getattr(options, flag) < 1:
            raise UserError(
                f"--{flag.replace('_', '-')} {getattr(options, flag)}",
                source="command line",
                expected="a number greater than 0",
                hint="leave it out for the default",
            )
    bandwidths = Bandwidths(options.intra_gb_s * 1e9, options.inter_gb_s * 1e9)
    shape = read_shape(options.hf_config)
    layout, rollout_tp, rollout_ep = read_layouts(shape, options.source, options.destination)
    experts = f" ep={rollout_ep}" if rollout_ep > 1 else ""
    world, itemsize, node = layout.world_size, ITEM_SIZES[options.dtype], options.ranks_per_node
    start = time.perf_counter()
    source, destination = build_shards(shape, layout, rollout_tp, rollout_ep=rollout_ep)
    planner = Planner(source, destination, ranks_per_node=node)
    first = planner.plan(0)
    planning_seconds = time.perf_counter() - start
    sizes = dict(num_ranks=world, itemsize=itemsize, ranks_per_node=node, bucket_bytes=options.bucket_mib << 20)
    summary = summarize(list_flows(planner), **sizes)
    gather = summarize_gather(
        source,
        num_ranks=world,
        stage_ranks=world // layout.pp_size,
        block_ranks=math.lcm(layout.tp_size, layout.expert_tp_size * layout.ep_size),
        itemsize=itemsize,
        ranks_per_node=node,
    )
    prediction = predict_seconds(summary, bandwidths)
    return {
        "source": layout.describe(),
        "destination": f"tp={rollout_tp} dp={world // max(rollout_tp, rollout_ep)}{experts}",
        "dtype": options.dtype,
        "ranks_per_node": node,
        "intra_gb_s": options.intra_gb_s,
        "inter_gb_s": options.inter_gb_s,
        "model_bytes": sum(map(math.prod, shape.logical_tensors().values())) * itemsize,
        **asdict(summary),
        "bytes_moved": summary.bytes_moved,
        "critical_path": prediction.critical,
        "predicted_seconds": prediction.seconds,
        "rank_0": {
            "operations": len(first.local) + sum(map(len, first.receives.values())),
            "receives_from": len(first.receives),
            "sends_to": len(first.sends),
            "planning_seconds": planning_seconds,
        },
        "gather": {
            **asdict(gather),
            "bytes_received": gather.bytes_received,
            "predicted_seconds": predict_gather_seconds(gather, bandwidths),
        },
    }


def format_result(result: dict[str, Any]) -> str:
    """Format the result as a table."""
    gather, first = result["gather"], result["rank_0"]

    def gib(num_bytes: int) -> str:
        return f"{num_bytes / 2**30:,.3f} GiB"

    lines = [
        f"{result['num_ranks']} ranks, {result['ranks_per_node']} per node: {result['source']} -> "
        f"{result['destination']}, {result['dtype']}, model {gib(result['model_bytes'])}",
        "",
        f"{'':34}{'all ranks':>20}{'busiest sends':>20}{'busiest receives':>20}",
        f"{'stays on its rank':34}{gib(result['bytes_kept']):>20}",
    ]
    for title, where in (("inside a node", "within"), ("between nodes", "across")):
        total = result["bytes_within_node" if where == "within" else "bytes_across_nodes"]
        lines.append(
            f"{title:34}{gib(total):>20}{gib(result[f'max_egress_{where}']):>20}"
            f"{gib(result[f'max_ingress_{where}']):>20}"
        )
    lines += [
        f"{'egress, busiest / mean':34}{result['egress_balance']:>20.3f}",
        f"{'rank 0':34}{first['operations']} operations, receives from {first['receives_from']} ranks, "
        f"sends to {first['sends_to']}; planned in {first['planning_seconds']:.2f} s",
        "",
        f"predicted from {result['intra_gb_s']:g} GB/s inside and {result['inter_gb_s']:g} GB/s between nodes, "
        "not measured:",
        f"{'':34}{'this plan':>20}{'gather full tensors':>20}",
        f"{'seconds':34}{result['predicted_seconds']:>20.4f}{gather['predicted_seconds']:>20.4f}",
        f"{'busiest rank receives':34}"
        f"{gib(result['max_ingress_within'] + result['max_ingress_across']):>20}{gib(gather['bytes_received']):>20}",
        f"{'staging memory per rank':34}{gib(result['transient_bytes']):>20}{gib(gather['transient_bytes']):>20}",
        f"critical path of this plan: {result['critical_path']}",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    try:
        result = plan(options)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_result(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
