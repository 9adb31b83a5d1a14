# SPDX-License-Identifier: Apache-2.0
"""Train a policy with GRPO: `torchrun --nproc-per-node N launch/pretrain_grpo.py RECIPE.yaml [key=value ...]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.batch_plan import BatchPlan  # noqa: E402
from megatron_rl.config.command_line import run_command  # noqa: E402
from megatron_rl.config.loading import LoadedConfig  # noqa: E402


def train(loaded: LoadedConfig, recipe: Path | None) -> None:
    """Train; the heavy imports happen here, after the config has been checked."""
    from megatron_rl.trainer import train_rl

    train_rl(loaded, recipe)


if __name__ == "__main__":
    sys.exit(run_command(
        sys.argv[1:], name="pretrain_grpo", description="Train a policy with GRPO, PPO or a relative.",
        build_plan=BatchPlan.build, run=train))
