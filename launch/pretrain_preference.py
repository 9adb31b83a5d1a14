# SPDX-License-Identifier: Apache-2.0
"""Learn from preferences: `torchrun --nproc-per-node N launch/pretrain_preference.py RECIPE.yaml [key=value ...]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.parallel.imports import kept_imports  # noqa: E402
from megatron_rl.run.command_line import leave, run_command  # noqa: E402
from megatron_rl.run.loading import LoadedConfig  # noqa: E402
from megatron_rl.run.preference_inputs import plan_preferences, read_preference_inputs  # noqa: E402


def train(loaded: LoadedConfig, recipe: Path | None) -> None:
    """Train; heavy imports happen here, after the config was checked."""
    with kept_imports():
        from megatron_rl.run.preference import train_preferences

    train_preferences(loaded.config, recipe)


if __name__ == "__main__":
    leave(
        run_command(
            sys.argv[1:],
            name="pretrain_preference",
            description="Learn from preferences: DPO and its relatives, KTO, or a reward model.",
            build_plan=plan_preferences,
            read_inputs=read_preference_inputs,
            run=train,
        )
    )
