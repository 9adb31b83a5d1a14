# SPDX-License-Identifier: Apache-2.0
"""GRPO of SmolLM2-135M-Instruct against TRL: same model, prompts, reward, settings, threads; CPU-seconds and accuracy.

    pip install --no-deps --target DIR trl==1.16.0
    python tools/benchmarks/bench_real.py --trl DIR --steps 16 --out DIR [--threads 2]

Needs the model and the prompts of launch/quickstart_real.sh. Each side is one process that samples, scores, updates and
validates greedily; TRL samples with transformers. Rewards and accuracies are plotted over samples and over the
CPU-seconds of training: a step's CPU-seconds less its validation's share of the step's wall time. Each side draws its
own prompts and samples. Both take the settings of launch/recipes/smollm2_sums.yaml, TRL in its own names.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from megatron_rl.observability.metrics import METRICS_FILE
from megatron_rl.types import UserError

RECIPE = ROOT / "launch/recipes/smollm2_sums.yaml"
ACCURACY = "validation/validation/accuracy"
TEST_FREQ = 4  # steps between validations, on both sides
TICKS = os.sysconf("SC_CLK_TCK")
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, metavar="DIR", help="directory that contains TRL")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps (16)")
    parser.add_argument("--seed", type=int, default=1, help="seed of both sides (1)")
    parser.add_argument("--threads", type=int, default=2, help="threads of a side (2)")
    parser.add_argument("--micro-batch", type=int, default=16, help="TRL's per_device_train_batch_size (16)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory for runs, JSON, picture")
    parser.add_argument("--side", choices=("both", "ours", "trl"), default="both", help="sides to run (both)")
    return parser


def follow(process: subprocess.Popen[bytes], file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run as they are written, with the CPU-seconds of training so far."""
    position, training, last = 0, 0.0, None
    while True:
        is_over = process.poll() is not None
        lines = file.read_text().splitlines() if file.exists() else []
        for record in map(json.loads, lines[position:]):
            spent = read_cpu_seconds(process.pid) if not is_over else last or 0.0
            if last is not None:  # the first record is the validation before training
                training += (spent - last) * (1 - record.get("time/validation", 0.0) / record["time/step"])
            last, position = spent, position + 1
            yield record | {"cpu_seconds": training}
        if is_over:
            return
        time.sleep(0.05)


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU-seconds of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def run_side(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one side; return a row per record.

    Raises:
        UserError: the process failed.
    """
    directory = options.out / name
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(options.threads)}
    if name == "trl":
        environment["PYTHONPATH"] = str(options.trl)
        command = [str(ROOT / "tools/benchmarks/_trl_real.py"), str(directory), str(options.steps)]
        command += [str(options.micro_batch), str(options.seed)]
    else:  # one rank without torchrun, whose process would hide the rank's
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [str(ROOT / "launch/pretrain_grpo.py"), str(RECIPE), f"trainer.run_dir={directory}"]
        command += [f"trainer.total_steps={options.steps}", f"trainer.test_freq={TEST_FREQ}"]
        command += [f"trainer.seed={options.seed}"]
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        rows = []
        for record in follow(process, directory / METRICS_FILE):
            kept = {"step": record["step"], "reward": record.get("reward/mean"), "accuracy": record.get(ACCURACY)}
            rows.append(kept | {"seconds": record.get("time/step"), "cpu_seconds": record["cpu_seconds"]})
            print(name, rows[-1], flush=True)
    if process.returncode:
        raise UserError(
            f"{name} ended with status {process.returncode}",
            source=str(log),
            expected="a run of all steps",
            hint="look at the end of the log",
        )
    return rows


def plot(results: dict[str, list[dict[str, Any]]], samples: int, file: Path) -> None:
    """Plot rewards and accuracies over samples, and accuracies over CPU-seconds."""
    import matplotlib as mpl
    from matplotlib import pyplot

    from megatron_rl.observability.curves import STYLE

    mpl.use("Agg")
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
        titles = ("reward over samples", "accuracy over samples", "accuracy over CPU-seconds of training")
        for panel, title, key in zip(panels, titles, ("reward", "accuracy", "accuracy"), strict=True):
            for name, rows in results.items():
                found = [row for row in rows if row[key] is not None]
                over = [row["cpu_seconds"] if "CPU" in title else row["step"] * samples for row in found]
                panel.plot(over, [row[key] for row in found], marker="o", label=name)
            panel.set_title(title)
            panel.legend()
        figure.savefig(file, dpi=100)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    options.out, options.trl = options.out.resolve(), options.trl.resolve()
    names = ("ours", "trl") if options.side == "both" else (options.side,)
    try:
        results = {name: run_side(name, options) for name in names}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (options.out / "result.json").write_text(
        json.dumps({"seed": options.seed, "threads": options.threads, **results}, indent=2) + "\n"
    )
    plot(results, 128, options.out / "real_against_trl.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
