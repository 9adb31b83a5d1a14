# SPDX-License-Identifier: Apache-2.0
"""Replay a captured step in the same or another layout, and compare every number with the capsule.

    torchrun --nproc-per-node N tools/replay_step.py RUN/capsules/step_<N>
    torchrun --nproc-per-node 1 tools/replay_step.py RUN/capsules/step_<N> actor.tensor_model_parallel_size=1 ...

Runs `Trainer.train` on the recorded rollouts and state. Exit code: 0 equal (bitwise in the same layout, within
--tolerance in another), 1 different or failed, 2 for input that cannot be used. See docs/replay.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

import torch.distributed as dist

from megatron_rl import Trainer
from megatron_rl.capsule.recorder import Section, observe_parameters, observe_results
from megatron_rl.checkpoint.directory import list_packages
from megatron_rl.parallel.collectives import raise_together, share_object
from megatron_rl.run.command_line import end_program, leave
from megatron_rl.run.inputs import Parts
from megatron_rl.samples.experience import Experience
from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools.replay.comparing import compare_sections, format_report, make_report
from tools.replay.recording import RecordedRollouts
from tools.replay.replaying import Capsule, is_same_layout, make_config, open_capsule, restore_state


class ReplayTrainer(Trainer):
    """A trainer whose only step is a capsule's.

    Attributes:
        recorded: set before `train`.
        allow_changed: accept a state that differs from its digests.
        sections: results.
    """

    recorded: Capsule
    allow_changed = False
    sections: list[Section]

    def introduce(self) -> None:
        """Print nothing, unlike a training run."""

    def steps(self) -> Iterator[int]:
        """Restore the state and yield the step."""
        self.checkpoints.start()
        step = self.recorded.step
        self.run.timers.begin_step(step)
        present = self.primitives.state.roles
        resumed = restore_state(self.recorded, present, dist.group.WORLD, allow_changed=self.allow_changed)
        if self.kl is not None:
            self.kl.load_state_dict(resumed.state.get("kl", {}))  # {}: recorded with a fixed coefficient
        self.sections = observe_parameters(self.trained, is_input=True)
        with self.run.timers.phase("step"):
            yield step

    def describe(self, step: int, samples: Experience) -> None:
        """Keep the results."""
        self.count_elsewhere()
        self.sections += observe_results(self.trained, samples, self.inputs.tokenizer.decode, self.run.series)[1]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("capsule", type=Path, help="<run_dir>/capsules/step_<N>")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="another layout, a moved model.path")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        metavar="T",
        help="in another layout: largest difference relative to max(1, |recorded|) (1e-5)",
    )
    parser.add_argument("--allow-changed", action="store_true", help="take files with other content than was written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here as well")
    return parser


def count_ranks(number: int) -> str:
    """Format a number of ranks."""
    return f"{number} rank{'s' * (number != 1)}"


def replay(options: argparse.Namespace, run_dir: Path) -> bool:
    """Replay and print; return whether all is equal. Collective.

    Raises:
        UserError: an unusable capsule or layout.
        OSError: the report cannot be written.
    """
    capsule = open_capsule(options.capsule, allow_changed=options.allow_changed)
    config = make_config(capsule, run_dir, options.overrides)
    recorded = RecordedRollouts(capsule.recording, mask_truncated=config.algorithm.mask_truncated)
    trainer = ReplayTrainer.from_config(config, parts=Parts(rollouts=recorded))
    trainer.recorded, trainer.allow_changed = capsule, options.allow_changed
    trainer.train()
    error, is_equal = None, False
    if trainer.process.rank == 0:
        try:
            is_equal = report(options, trainer)
        except (UserError, OSError) as caught:
            error = caught
    raise_together(error, dist.group.WORLD)
    # Also holds all ranks until rank 0 has printed: torchrun stops the job once a rank exits with a difference.
    return share_object(is_equal, dist.group.WORLD)


def report(options: argparse.Namespace, trainer: ReplayTrainer) -> bool:
    """Compare, print and write the report; return whether all is equal."""
    capsule, world_size = trainer.recorded, trainer.process.world_size
    tolerance = None if is_same_layout(capsule, trainer.config, world_size) else options.tolerance
    rows = compare_sections(capsule.sections, trainer.sections, tolerance=tolerance, read=capsule.read_parameter)
    manifest, packages = capsule.manifest, list_packages()
    changed = {
        name: [version, packages.get(name)]
        for name, version in manifest["packages"].items()
        if packages.get(name) != version
    }
    here = ", ".join(f"{name} {role.model.layout.describe()}" for name, role in trainer.trained.items())
    then = ", ".join(f"{name} {layout}" for name, layout in manifest["layouts"].items())
    how = "bit by bit" if tolerance is None else f"what it begins with bit by bit, the rest within {tolerance:g}"
    title = [
        f"{options.capsule}: step {capsule.step} on {count_ranks(manifest['world_size'])} ({then})",
        f"done again on {count_ranks(world_size)} ({here}); compared {how}",
        *(f"another version: {name} {old}, now {new}" for name, (old, new) in changed.items()),
    ]
    print(format_report(rows, "\n".join(title)), flush=True)
    content = make_report(
        rows,
        {
            "capsule": str(options.capsule),
            "step": capsule.step,
            "tolerance": tolerance,
            "overrides": options.overrides,
            "layouts": {"recorded": then, "now": here},
            "changed_packages": changed,
        },
    )
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content["verdict"] == "equal"


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_intermixed_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="replay-") as run_dir:
            is_equal = replay(options, Path(run_dir))
    except Exception as error:
        return end_program(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0 if is_equal else 1


if __name__ == "__main__":
    leave(main())
