# SPDX-License-Identifier: Apache-2.0
"""The training of `launch/pretrain_grpo.py` under Ray Train.

    ray job submit --working-dir . -- python launch/ray_train.py RECIPE.yaml --num-workers 16 [section.key=value ...]

TorchTrainer starts one worker per rank, numbered node by node as by torchrun. With --max-failures a failed run restarts
from the newest checkpoint in trainer.run_dir, on a disk shared by all nodes. --engines N adds tasks with an engine
outside the job each (schedule.elastic=true), which Ray starts again wherever there is room.

Requires pip install "ray[train]". Checked with Ray 2.60 on one machine without GPUs. Not covered: clusters, GPUs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_rl.run.command_line import run_command  # noqa: E402
from megatron_rl.run.inputs import plan_rl, read_rl_inputs  # noqa: E402
from megatron_rl.run.loading import LoadedConfig  # noqa: E402
from megatron_rl.types import UserError  # noqa: E402

_END_SECONDS = 60.0  # for engines to end after the run


def train_worker(settings: dict[str, Any]) -> None:
    """Run one rank; Ray has initialized torch.distributed."""
    os.chdir(settings["directory"])  # Ray workers start in their own directory; recipes use relative paths
    from launch.pretrain_grpo import train as train_rank

    train_rank(settings["loaded"], settings["recipe"])


def serve(run_dir: Path) -> None:
    """Be one engine outside the job, in a task of Ray; raise CalledProcessError if it failed again and again."""
    # A task's output reaches the driver; the GPUs that Ray gave it are in CUDA_VISIBLE_DEVICES.
    subprocess.run(["bash", "launch/engine.sh", str(run_dir)], cwd=ROOT, env=os.environ | {"ENGINES": "1"}, check=True)


def train(loaded: LoadedConfig, recipe: Path | None, *, options: argparse.Namespace) -> None:
    """Start a Ray worker per rank and wait for their end.

    Raises:
        UserError: Ray is missing, or restarts lack a run directory.
    """
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise UserError(
            f"Ray Train cannot be imported: {error}",
            source="launch/ray_train.py",
            expected="an installed ray[train]",
            hint='pip install "ray[train]", or start the same recipe with torchrun (launch/train_multi_node.sh)',
        ) from error
    if options.max_failures and loaded.config.trainer.run_dir is None:
        raise UserError(
            f"--max-failures {options.max_failures} without trainer.run_dir",
            source="command line",
            expected="a run directory in which the next attempt finds the checkpoints",
            hint="set trainer.run_dir=/shared/runs/NAME and trainer.save_freq",
        )
    if not ray.is_initialized():
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}})
    tp = loaded.config.rollout.tensor_model_parallel_size
    use_gpu = ray.cluster_resources().get("GPU", 0) > 0
    resources = {"CPU": options.cpus_per_worker} | ({"GPU": 1} if use_gpu else {})
    check_cluster(ray.cluster_resources(), resources, options.num_workers + options.engines * tp)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"loaded": loaded, "recipe": recipe, "directory": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=use_gpu, resources_per_worker=resources),
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo",
            timeout_s=int(loaded.config.trainer.collective_timeout) + 30,
        ),
        run_config=RunConfig(
            storage_path=str(Path("checkpoints/ray").absolute()),
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    engines = []
    if options.engines:
        shares = {"num_cpus": options.cpus_per_worker * tp, "num_gpus": tp if use_gpu else 0}
        run_dir = Path(str(loaded.config.trainer.run_dir)).absolute()
        engine = ray.remote(**shares, max_retries=-1, runtime_env={"env_vars": {"TP": str(tp)}})(serve)
        engines = [engine.remote(run_dir) for _ in range(options.engines)]
    trainer.fit()
    ray.wait(engines, num_returns=len(engines), timeout=_END_SECONDS)


def check_cluster(has: dict[str, float], per_worker: dict[str, float], num_workers: int) -> None:
    """Refuse a job for which Ray would silently wait forever.

    Raises:
        UserError: too few resources.
    """
    for name, amount in per_worker.items():
        if has.get(name, 0) < amount * num_workers:
            raise UserError(
                f"{num_workers} workers take {amount * num_workers:g} {name}s, the cluster has {has.get(name, 0):g}",
                source="--num-workers and the Ray cluster",
                expected=f"{amount * num_workers:g} {name}s or more",
                hint="start fewer workers, or lower --cpus-per-worker" if name == "CPU" else "start fewer workers",
            )


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--cpus-per-worker", type=float, default=1.0)
    parser.add_argument("--engines", type=int, default=0)
    parser.add_argument("--max-failures", type=int, default=0)
    options, rest = parser.parse_known_args(arguments)
    if "--dry-run" in rest and not any(argument.startswith("--world-size") for argument in rest):
        rest += ["--world-size", str(options.num_workers)]
    return run_command(
        rest,
        name="ray_train",
        description="Train a policy under Ray Train: --num-workers N [--cpus-per-worker X] [--engines N] "
        "[--max-failures N].",
        build_plan=plan_rl,
        read_inputs=read_rl_inputs,
        run=partial(train, options=options),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
