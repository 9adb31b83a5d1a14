# SPDX-License-Identifier: Apache-2.0
"""Train a policy with GRPO: `torchrun --nproc-per-node N launch/pretrain_grpo.py RECIPE.yaml [key=value ...]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.schema import RunConfig  # noqa: E402
from megatron_rl.run.command_line import leave, run_command  # noqa: E402
from megatron_rl.run.inputs import plan_rl, read_rl_inputs  # noqa: E402
from megatron_rl.run.loading import LoadedConfig  # noqa: E402
from megatron_rl.run.models import resolve  # noqa: E402


def check_memory(
    config: RunConfig, recipe: Path | None, world_size: int, memory_gib: float, gpus_per_node: int | None
) -> tuple[RunConfig, list[str], str]:
    """Choose a layout if `layout.mode` is auto, and refuse a run that does not fit GPUs of this size."""
    from megatron_rl.planning.admission import check_fits
    from megatron_rl.planning.cluster import describe_cluster
    from tools.planning.automatic import choose_layout

    cluster, chosen = describe_cluster(world_size, memory_gib, gpus_per_node), []
    if config.layout.mode != "given":
        config, chosen = choose_layout(config, resolve(config), cluster, recipe)
    return config, chosen, check_fits(config, resolve(config), cluster, recipe)


def train(loaded: LoadedConfig, recipe: Path | None) -> None:
    """Train; heavy imports happen here, after the config was checked."""
    from megatron_rl import Trainer
    from megatron_rl.run.inputs import NO_PARTS, Parts

    parts = NO_PARTS
    if loaded.config.layout.mode != "given":
        from tools.planning.automatic import choose_layout

        parts = Parts(choose_layout=choose_layout)
    Trainer.from_config(loaded.config, recipe, parts).train()


if __name__ == "__main__":
    leave(
        run_command(
            sys.argv[1:],
            name="pretrain_grpo",
            description="Train a policy with GRPO, PPO or a relative.",
            build_plan=plan_rl,
            read_inputs=read_rl_inputs,
            run=train,
            check_memory=check_memory,
        )
    )
