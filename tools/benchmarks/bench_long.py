# SPDX-License-Identifier: Apache-2.0
"""Tokens per second and peak memory of updates on long responses.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 tools/benchmarks/bench_long.py --json FILE --plot PICTURE

Five parts (`--parts`) vary one thing each on a random model; variants alternate by round:

    lengths   longest response 1k, 2k, ...: packing or padding, chunked or full logits, cp = 1, 2, 4
    logits    memory with a vocabulary of 150k: chunked or full logits
    context   activations per rank: cp = 1, 2, 4 and recomputation
    packing   a lognormal batch: padded, packed, packed with shared prompts
    linear    seconds over total tokens at fixed length

Timed is one optimizer step: process CPU-seconds on a CPU, wall seconds on a GPU, summed over ranks. Tokens exclude
padding; `tokens_per_second` is per rank. `peak_bytes` is tensor memory above weights, gradients and optimizer during
forward and backward of a rank's largest micro-batch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import psutil
import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import init_distributed, reduce_scalars, share_object
from megatron_rl.parallel.groups import ParallelGroups, build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.given_losses import compute_sft_loss
from megatron_rl.training.roles.actor import Actor
from megatron_rl.types import UserError
from tools.benchmarks._bench_actor import (
    ALGORITHM,
    Stopwatch,
    build_bench_actor,
    build_bench_batch,
    measure_peak,
    write_random_model,
)
from tools.benchmarks._long_cases import PARTS, Case
from tools.benchmarks._plot_long import plot_long

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2**20,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}


class Bench:
    """Measurements of cases on this rank; collective."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        process = init_distributed(timeout_minutes=30)
        self.options, self.device, self.world_size = options, process.device, process.world_size
        self.rank, self._directory = process.rank, Path(share_object(str(directory), dist.group.WORLD, 0))
        self.rows: list[dict[str, Any]] = []
        self._groups: Callable[[int], ParallelGroups] = cache(
            lambda cp_size: build_groups(ParallelLayout(self.world_size, cp_size=cp_size))
        )

    def run_part(self, part: str) -> None:
        """Measure a part; skip lengths that would exceed memory."""
        cases: list[tuple[Case, dict[str, Any]]] = []
        for case in PARTS[part](self.options, self.world_size):
            known = [row for c, row in cases if (c.arm, c.cp_size) == (case.arm, case.cp_size)]
            if known and not self._fits(known[-1]["peak_bytes"] * case.length / known[-1]["length"]):
                continue
            cases.append((case, self.measure_memory(case)))
            self._report(cases[-1][1])
        timed = [(case, row) for case, row in cases if case.is_timed]
        for number in range(self.options.rounds):
            for case, row in timed if number % 2 == 0 else timed[::-1]:
                row["seconds"].append(self.measure_seconds(case))
                row["tokens_per_second"] = row["tokens"] / statistics.median(row["seconds"])
                self._report(row)

    def measure_memory(self, case: Case) -> dict[str, Any]:
        """Return a case's row with its peak memory."""
        actor, batch = self._build(case)
        largest = max(batch.microbatches(), key=lambda m: len(m.tokens))

        def loss_function(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
            return compute_sft_loss(logprobs, microbatch.loss_mask, microbatch.loss_weights)

        actor.optimizer.zero_grad()
        peak = measure_peak(
            self.device, lambda: actor.model.run_microbatches(largest.microbatches(), actor.head, loss_function)
        )
        sums = self._reduce({"tokens_computed": len(batch.tokens)}, dist.ReduceOp.SUM)
        highs = self._reduce({"peak_bytes": peak, "microbatch_tokens": len(largest.tokens)}, dist.ReduceOp.MAX)
        computed = sums["tokens_computed"] / case.cp_size
        return {
            "part": case.part,
            "arm": case.arm,
            "cp": case.cp_size,
            "length": case.length,
            "tokens": sum(case.work.lengths),
            "tokens_computed": int(computed),
            "microbatches": len(batch.slices),
            "microbatch_tokens": int(highs["microbatch_tokens"]),
            "peak_bytes": int(highs["peak_bytes"]),
            "imbalance": self._measure_imbalance(actor, batch),
            "seconds": [],
        }

    def measure_seconds(self, case: Case) -> float:
        """Return the seconds of one update, summed over ranks."""
        actor, batch = self._build(case)
        batch = replace(batch, old_logprobs=torch.full_like(batch.loss_weights, -math.log(case.vocab_size)))
        actor.forward_backward(replace(batch.microbatches()[0], ledgers=()), ALGORITHM)  # warm-up
        actor.optim_step()
        dist.barrier()
        watch = Stopwatch(self.device)
        actor.forward_backward(batch, ALGORITHM)
        actor.optim_step()
        wall, cpu = watch.read()
        return self._reduce({"seconds": wall if self.device.type == "cuda" else cpu}, dist.ReduceOp.SUM)["seconds"]

    def _build(self, case: Case) -> tuple[Actor, TrainBatch]:
        actor = build_bench_actor(
            self._model(case.vocab_size),
            self._groups(case.cp_size),
            self.options.dtype,
            context_parallel_size=case.cp_size,
            logprob_chunk_tokens=case.chunk_tokens or case.max_tokens,
            recompute_granularity=case.recompute,
        )
        batch = build_bench_batch(
            actor,
            case.work,
            max_tokens=case.max_tokens,
            shares_prompts=case.shares_prompts,
            device=self.device,
            pad_to=max(case.work.lengths) if case.is_padded else 0,
        )
        return actor, batch

    def _model(self, vocab_size: int) -> Path:
        path = self._directory / str(vocab_size)
        if self.rank == 0 and not path.exists():
            config = json.loads(self.options.hf_config.read_text()) if self.options.hf_config else MODEL
            write_random_model(path, config | {"vocab_size": vocab_size})
        dist.barrier()
        return path

    def _measure_imbalance(self, actor: Actor, batch: TrainBatch) -> float:
        """Return the heaviest DP rank's estimated cost over the mean."""
        cost = 0.0
        for piece in batch.slices:
            queries = piece.cu_seqlens.diff().double()
            keys = queries if piece.keys is None else piece.keys.cu_seqlens.diff().double()
            cost += float(queries.sum() + actor.model.attention_ratio * (keys**2 - (keys - queries) ** 2).sum())
        mean = self._reduce({"cost": cost}, dist.ReduceOp.SUM)["cost"] / self.world_size
        return self._reduce({"cost": cost}, dist.ReduceOp.MAX)["cost"] / mean

    def _fits(self, num_bytes: float) -> bool:
        """Whether every rank can allocate `num_bytes`; collective."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = psutil.virtual_memory().available / self.world_size
        free = min(free, self.options.memory_limit_gib * 2**30)
        return self._reduce({"free": free}, dist.ReduceOp.MIN)["free"] > num_bytes

    def _reduce(self, values: dict[str, float], op: Any) -> dict[str, float]:
        return reduce_scalars(values, op, dist.group.WORLD, self.device)

    def _report(self, row: dict[str, Any]) -> None:
        """Print a row and save all rows."""
        if row not in self.rows:
            self.rows.append(row)
        if self.rank > 0:
            return
        seconds = "".join(f" {s:8.2f} s" for s in row["seconds"])
        print(
            f"{row['part']:8} {row['arm']:24} cp={row['cp']} {row['length']:>7}: {row['tokens']:>8} tokens of "
            f"{row['tokens_computed']:>8}, peak {row['peak_bytes'] / 2**20:8.1f} MiB{seconds}",
            flush=True,
        )
        if self.options.json:
            self.options.json.write_text(json.dumps({"ranks": self.world_size, "rows": self.rows}, indent=2) + "\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS), help="default: all")
    parser.add_argument("--hf-config", type=Path, help="config.json of another model; its vocabulary is replaced")
    parser.add_argument("--rounds", type=int, default=2, help="each measures every case once")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192], help="of part lengths")
    parser.add_argument("--cp", nargs="+", type=int, default=[1, 2, 4], help="sizes; those that divide the ranks")
    parser.add_argument("--vocab", type=int, default=16384, help="vocabulary of part lengths")
    parser.add_argument("--logits-lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--large-vocab", type=int, default=150_000, help="vocabulary of part logits")
    parser.add_argument("--context-length", type=int, default=8192, help="tokens of the microbatch of part context")
    parser.add_argument("--packing-prompts", type=int, default=16, help="prompts of part packing, 8 responses each")
    parser.add_argument("--memory-limit-gib", type=float, default=math.inf, help="of a rank; longer is left out")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--plot", type=Path, help="picture of the parts that were run")
    parser.add_argument("--also", nargs="+", type=Path, default=[], help="files of other runs, for the picture as well")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(options, Path(directory))
            for part in options.parts:
                bench.run_part(part)
            dist.barrier()
        if bench.rank == 0 and options.plot:
            others = [row for path in options.also for row in json.loads(path.read_text())["rows"]]
            plot_long([*bench.rows, *others], options.plot)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
