# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a policy update by step mode and micro-batch size: eager, static, and replayed CUDA graphs.

    python tools/benchmarks/bench_ppo_step.py --json FILE                     one GPU: eager, static, graph; 10m to 1.5b
    OMP_NUM_THREADS=1 python tools/benchmarks/bench_ppo_step.py --shapes 1m --sizes 256 1024 --json FILE      CPU
    torchrun --nproc-per-node N tools/benchmarks/bench_ppo_step.py --tp N ... tensor parallel

An update is one optimizer step of an `Actor` on equal micro-batches, padded from about 97 %. All modes start from the
same weights; metrics and final weights are compared bitwise (`equal_to_eager`; bfloat16 attention on a GPU needs
--deterministic). Modes alternate on a CPU, in process CPU-seconds; on a GPU each runs alone, in wall seconds. Per row:

    milliseconds, tokens_per_second   of one micro-batch (update / microbatches), real tokens
    mfu, tflops                       model FLOPs of the real tokens; mfu relative to a measured matrix product
    busy                              share of an update in which the GPU computes
    peak_bytes, graph_bytes, graphs   device memory of the process, and of its graphs
    speedup                           eager milliseconds over this mode's
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import torch
import torch.distributed as dist

from megatron_rl.models.attention_kernels import check_transformer_engine
from megatron_rl.parallel.collectives import init_distributed, reduce_scalars, share_object
from megatron_rl.parallel.groups import ParallelGroups, build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError
from tools.benchmarks._bench_actor import write_random_model
from tools.benchmarks._ppo_contest import SHAPES, Contestant, Draw, measure_matmul_ceiling

MODES = ("eager", "static", "graph")
_MODES = "eager,static,graph (default: all that run), transformer_engine: eager with its layers, if it is installed"


class Bench:
    """Measurements of models on this rank; collective."""

    def __init__(self, options: argparse.Namespace) -> None:
        process = init_distributed(timeout_minutes=30)
        self.options, self.device, self.rank = options, process.device, process.rank
        self.is_gpu = process.device.type == "cuda"
        self.modes = options.modes or [mode for mode in MODES if self.is_gpu or mode != "graph"]
        if "transformer_engine" in self.modes:
            check_transformer_engine()
        if "graph" in self.modes and not self.is_gpu:
            raise UserError(
                "--modes graph, but there is no CUDA device",
                source="--modes",
                expected="eager, static",
                hint="leave graph out on a CPU",
            )
        self.dtype = options.dtype or ("bfloat16" if self.is_gpu else "float32")
        torch.use_deterministic_algorithms(options.deterministic, warn_only=True)
        self.ceiling = measure_matmul_ceiling(self.device, self.dtype)
        self.groups: ParallelGroups = build_groups(ParallelLayout(process.world_size, tp_size=options.tp))

    def run_model(self, name: str, path: Path) -> list[dict[str, Any]]:
        """Return one row per size and mode."""
        rows = []
        for size in self.options.sizes:
            draw = Draw(size, self.options.microbatches, min(size, self.options.sequence_length))
            contestants = [self._build(mode, path, draw) for mode in self.modes]
            self._take_rounds(contestants)
            found = [c.report(self.ceiling) for c in contestants]
            reference = next((c for c in contestants if c.mode == "eager"), None)
            for contestant, row in zip(contestants, found, strict=True):
                row |= {"shape": name, "size": size, "mode": contestant.mode}
                if reference is not None:
                    row["equal_to_eager"] = contestant.fingerprint == reference.fingerprint
                    norm, expected = (c.fingerprint[0]["policy/grad_norm"] for c in (contestant, reference))
                    row["difference"] = abs(norm - expected) / expected
                    row["speedup"] = statistics.median(reference.seconds) / statistics.median(contestant.seconds)
                row |= self._reduce(row)
                self._print(row)
            rows += found
        return rows

    def _build(self, mode: str, path: Path, draw: Draw) -> Contestant:
        return Contestant(
            mode, path, self.groups, draw, dtype=self.dtype, recompute=self.options.recompute, device=self.device
        )

    def _take_rounds(self, contestants: list[Contestant]) -> None:
        """Alternate modes on a CPU; run each alone on a GPU."""
        rounds = range(self.options.rounds)
        if self.is_gpu:
            for contestant in contestants:
                contestant.open()
                for _ in rounds:
                    contestant.take_round()
                contestant.measure_busy()
                contestant.close()
            return
        for contestant in contestants:
            contestant.open()
        for number in rounds:
            for contestant in contestants if number % 2 == 0 else contestants[::-1]:
                contestant.take_round()
        for contestant in contestants:
            contestant.close()

    def _reduce(self, row: dict[str, Any]) -> dict[str, float]:
        """Return the slowest rank's milliseconds."""
        return reduce_scalars({"milliseconds": row["milliseconds"]}, dist.ReduceOp.MAX, dist.group.WORLD, self.device)

    def _print(self, row: dict[str, Any]) -> None:
        if self.rank == 0:
            shown = ("milliseconds", "tokens_per_second", "mfu", "busy", "speedup", "difference", "equal_to_eager")
            numbers = "  ".join(
                f"{key} {row[key]:.4g}" if isinstance(row[key], float) else f"{key} {row[key]}"
                for key in shown
                if row.get(key) is not None
            )
            print(f"{row['shape']:>5} {row['size']:>6} {row['mode']:<6} {numbers}", flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-config", type=Path, help="model directory or config.json, in the place of --shapes")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), help="default: 10m 100m 0.5b 1.5b; on CPU 1m")
    parser.add_argument("--sizes", nargs="+", type=int, help="tokens of a microbatch; default: 256 to 32k, on CPU 2k")
    parser.add_argument("--modes", type=lambda text: text.split(","), help=_MODES)
    parser.add_argument("--microbatches", type=int, default=4, help="of an update")
    parser.add_argument("--sequence-length", type=int, default=1024, help="about the longest sequence")
    parser.add_argument("--rounds", type=int, default=10, help="updates that are timed")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16; on CPU float32")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none", help="see actor.*")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--deterministic", action="store_true", help="torch.use_deterministic_algorithms")
    parser.add_argument("--json", type=Path, help="write all rows here")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return all rows and the machine."""
    bench = Bench(options)
    options.sizes = options.sizes or [2**n for n in range(8, 16 if bench.is_gpu else 12)]
    names = options.shapes or (["10m", "100m", "0.5b", "1.5b"] if bench.is_gpu else ["1m"])
    configs = {name: SHAPES[name] for name in names}
    if options.hf_config:
        file = options.hf_config / "config.json" if options.hf_config.is_dir() else options.hf_config
        configs = {file.parent.name if file.name == "config.json" else file.stem: json.loads(file.read_text())}
    rows = []
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as directory:
            path = Path(share_object(directory, dist.group.WORLD, 0)) / "model"
            if bench.rank == 0:
                write_random_model(path, config)
            dist.barrier()
            rows += bench.run_model(name, path)
            dist.barrier()
    device = torch.cuda.get_device_name() if bench.is_gpu else "cpu"
    return {
        "device": device,
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "dtype": bench.dtype,
        "matmul_tflops": bench.ceiling / 1e12,
        "rank": bench.rank,
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 2 on bad input."""
    options = build_parser().parse_args(arguments)
    try:
        result = run(options)
        if result.pop("rank") == 0 and options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
