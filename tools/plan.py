# SPDX-License-Identifier: Apache-2.0
"""Predict whether a recipe fits a cluster, how long a step takes, and which layouts are better.

    python tools/plan.py launch/recipes/qwen2.5_7b_gsm8k.yaml --nodes 1 --gpus-per-node 8 --gpu-memory-gib 80
    python tools/plan.py RECIPE.yaml --nodes 8 --lengths lognormal:4000,1.0 --top 3 --json plan.json --plot memory.png

No weights are read: the model's shape comes from config.json (--hf-config, else the one in model.path, else
shapes/<last part of model.path>.json beside the recipe). Memory of weights and optimizer, batch arithmetic and the
weight transfer are exact, activations are counted, seconds follow from stated assumptions. Exit status 1 if the recipe
does not fit, 2 if it cannot be planned.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.planning.admission import explain_problem, read_job
from megatron_rl.planning.cluster import GIB, RESERVE, Cluster, Job
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve
from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools.planning.communication import Assumptions
from tools.planning.lengths import read_lengths
from tools.planning.methods import compare_methods, format_methods, methods_to_dict
from tools.planning.report import format_plan, make_plan, save_plot, to_dict
from tools.planning.schedule_choice import choose_schedule, format_schedules, schedules_to_dict


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; unrecognized arguments are overrides of the recipe."""
    parser = Arguments(description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe", type=Path, help="YAML recipe; section.key=value overrides may follow")
    parser.add_argument("--hf-config", type=Path, help="model directory or config.json of the policy")
    parser.add_argument("--critic-hf-config", type=Path, help="the same of the critic, where critic.path is set")
    parser.add_argument("--reward-hf-config", type=Path, help="the same of the reward model")
    cluster = parser.add_argument_group("cluster")
    for flag, default, kind, text in (
        ("--nodes", 1, int, "machines"),
        ("--gpus-per-node", 8, int, "accelerators per machine"),
        ("--gpu-memory-gib", 80.0, float, "memory of one accelerator"),
        ("--intra-gb-s", 400.0, float, "GB/s per accelerator and direction inside a node"),
        ("--inter-gb-s", 50.0, float, "GB/s per accelerator and direction between nodes"),
        ("--tflops", 990.0, float, "peak 1e12 operations/s of one accelerator in bfloat16 (H100: 990)"),
        ("--memory-gb-s", 3350.0, float, "GB/s of its memory (H100: 3350)"),
        ("--host-gb-s", 50.0, float, "GB/s between it and the host"),
    ):
        cluster.add_argument(flag, type=kind, default=default, help=f"{text} (default: {default:g})")
    cluster.add_argument(
        "--reserve-gib",
        type=float,
        help=f"of its memory, for driver, communication buffers and fragmentation (default: {RESERVE * 100:g} percent)",
    )
    assumed = parser.add_argument_group("assumptions")
    assumed.add_argument("--mfu", type=float, default=0.4, help="share of peak operations in training (0.4)")
    assumed.add_argument("--mean-response", type=float, default=0.5, help="mean response over the longest one (0.5)")
    assumed.add_argument(
        "--engine-gpus", type=int, default=8, help="accelerators outside the job, for elastic engines (8)"
    )
    assumed.add_argument(
        "--lengths",
        metavar="FILE|lognormal:MEDIAN,SIGMA[,R]",
        help="simulate schedules, their idle times and staleness, and shares of the ranks, for these responses: a file "
        "with a length per line, rollouts/step_<N>.jsonl or a run with them, or lognormal lengths that correlate by R "
        "inside of a prompt (0.5)",
    )
    parser.add_argument("--top", type=int, default=10, help="layouts to list (10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON; - for stdout instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write memory by phase as a PNG")
    return parser


def read_plan_job(options: argparse.Namespace, overrides: list[str]) -> tuple[Job, list[str]]:
    """Return the job, and notes on settings without effect.

    Raises:
        UserError: a recipe, cluster or model that cannot be planned.
    """
    loaded, memory = load_config(options.recipe, overrides), int(options.gpu_memory_gib * GIB)
    reserve = RESERVE * memory if options.reserve_gib is None else options.reserve_gib * GIB
    cluster = Cluster(
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        memory_bytes=memory,
        reserve_bytes=int(reserve),
        within_node=options.intra_gb_s * 1e9,
        across_nodes=options.inter_gb_s * 1e9,
        flops=options.tflops * 1e12,
        memory_bandwidth=options.memory_gb_s * 1e9,
        host_bandwidth=options.host_gb_s * 1e9,
    )
    given = {"actor": options.hf_config, "critic": options.critic_hf_config, "reward_model": options.reward_hf_config}
    job = read_job(
        loaded.config,
        resolve(loaded.config),
        cluster,
        options.recipe,
        {name: path for name, path in given.items() if path is not None},
    )
    return job, loaded.notes


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options, overrides = build_parser().parse_known_args(arguments)
    try:
        job, notes = read_plan_job(options, overrides)
        lengths = None if options.lengths is None else read_lengths(options.lengths)
        assumed = Assumptions(mfu=options.mfu, mean_response=options.mean_response, engine_gpus=options.engine_gpus)
        plan = make_plan(job, assumed)
        schedules = None
        if lengths is not None and plan.problem is None:
            schedules = choose_schedule(job, plan.switch.prediction.seconds, lengths, assumed)
        methods = compare_methods(job, assumed, resolve)
        found = (
            to_dict(plan)
            | {"methods": methods_to_dict(methods)}
            | ({} if schedules is None else {"schedules": schedules_to_dict(schedules)})
        )
        text = json.dumps(found, indent=2) + "\n"
        is_json_only = options.json is not None and str(options.json) == "-"
        if options.json is not None and not is_json_only:
            options.json.write_text(text, encoding="utf-8")
        if options.plot is not None:
            save_plot(plan, options.plot)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(text if is_json_only else f"{format_plan(plan, options.top)}\n\n{format_methods(methods)}")
    if schedules is not None and not is_json_only:
        print("\n" + format_schedules(schedules))
    if plan.problem is not None:
        print(f"error: {explain_problem(job, plan.problem, plan.nearest)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
