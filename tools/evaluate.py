# SPDX-License-Identifier: Apache-2.0
"""Validate a model or a checkpoint in any layout, without an optimizer: mean@k, pass@k, maj@k, and the rollouts.

    torchrun --nproc-per-node 4 tools/evaluate.py checkpoints/runs/RUN/config.yaml model.path=checkpoints/runs/RUN \\
        rollout.tensor_model_parallel_size=2 --samples 8 rollout.validation_temperature=1.0 --rollouts evaluation

model.path is an HF model, a converted checkpoint, checkpoints/step_<N> of a run, or a run (newest checkpoint). The
recipe needs only model, data.validation_files, reward, the actor's layout and engine. With a run's weights, seed and
settings, validation/<set>/accuracy equals the run's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.config.schema import RunConfig
from megatron_rl.run.command_line import end_program, leave
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from tools._arguments import Arguments

# Required by the schema, unused in an evaluation.
_NOT_READ = (
    *("data.train_files=[none]", "data.weights=null", "data.train_batch_size=1"),
    "data.shuffle=true",
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument(
        "settings",
        nargs="+",
        metavar="RECIPE.yaml | section.key=value",
        help="a recipe and settings over it, as for launch/pretrain_grpo.py; or settings alone",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="responses to each prompt, for rollout.validation_n; draw several at a temperature",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the metrics and what was evaluated here")
    parser.add_argument(
        "--rollouts",
        type=Path,
        metavar="DIR",
        help="write all rollouts to DIR/<set>, which tools/view_rollouts.py opens",
    )
    parser.add_argument(
        "--choose",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="also write the rows of prompts that are right in this share of their responses to DIR/<set>/chosen.jsonl",
    )
    return parser


def read_config(options: argparse.Namespace) -> RunConfig:
    """Read the config; rank 0 prints notes.

    Raises:
        UserError: an invalid setting or option.
    """
    if options.choose is not None and options.rollouts is None:
        raise UserError(
            "--choose without --rollouts",
            source="command line",
            expected="the directory that the rows are written to",
            hint="add --rollouts DIR",
        )
    settings = list(options.settings)
    recipe = Path(settings.pop(0)) if "=" not in settings[0] else None
    if options.samples is not None:
        settings.append(f"rollout.validation_n={options.samples}")
    loaded = load_config(recipe, [*settings, *_NOT_READ])
    notes, rollout = list(loaded.notes), loaded.config.rollout
    if rollout.validation_n > 1 and rollout.validation_temperature == 0:
        notes.append(
            f"all {rollout.validation_n} responses to a prompt are the same one: rollout.validation_temperature is 0"
        )
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    return loaded.config


def format_report(report: dict[str, Any]) -> str:
    """Format model and metrics."""
    lines = [
        f"{report['model']} (step {report['step']}): {report['layout']}, {report['engine']} "
        f"tp={report['engine_tp_size']}, {report['samples']} responses per prompt at temperature "
        f"{report['temperature']:g}"
    ]
    width = max(map(len, report["metrics"]))
    return "\n".join([*lines, *(f"  {name:{width}}  {value:.4f}" for name, value in report["metrics"].items())])


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_intermixed_args(arguments)
    try:
        config = read_config(options)
        import torch.distributed as dist

        from tools._evaluation import evaluate  # imports megatron-core: seconds

        report = evaluate(config, int(os.environ.get("WORLD_SIZE", "1")), options.rollouts, options.choose)
        if dist.get_rank() == 0:
            print(format_report(report), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        dist.destroy_process_group()
    except (Exception, KeyboardInterrupt) as error:
        return end_program(error)
    return 0


if __name__ == "__main__":
    leave(main())
