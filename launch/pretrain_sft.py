# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a policy on responses: `torchrun --nproc-per-node N launch/pretrain_sft.py RECIPE.yaml [key=value ...]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.sft_plan import SftPlan  # noqa: E402
from megatron_rl.parallel.imports import kept_imports  # noqa: E402
from megatron_rl.run.command_line import leave, run_command  # noqa: E402
from megatron_rl.run.inputs import read_sft_inputs  # noqa: E402
from megatron_rl.run.loading import LoadedConfig  # noqa: E402


def train(loaded: LoadedConfig, recipe: Path | None) -> None:
    """Train; heavy imports happen here, after the config was checked."""
    with kept_imports():
        from megatron_rl.run.sft import train_sft

    train_sft(loaded.config, recipe)


if __name__ == "__main__":
    leave(
        run_command(
            sys.argv[1:],
            name="pretrain_sft",
            description="Fine-tune a policy on responses (next-token loss).",
            build_plan=SftPlan.build,
            read_inputs=read_sft_inputs,
            run=train,
        )
    )
