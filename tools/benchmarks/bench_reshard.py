# SPDX-License-Identifier: Apache-2.0
"""A reshard by each transport, against gathering full tensors and the physical floor.

    torchrun --standalone --nproc-per-node 4 tools/benchmarks/bench_reshard.py --hf-config DIR_OR_JSON \\
        --source tp=2,pp=2 --destination tp=1 --dtype bfloat16 --json FILE

Parameters have the shapes of Megatron's and vLLM's shards; neither engine is started. Medians of interleaved repeats:

* ours: plan and executor; every element is checked afterwards;
* gather: per tensor, broadcast over PP, all-gather over TP, copy the engine's slice; without expert parallelism;
* floor: as many bytes by memcpy from mapped memory (pull), or in bucket-sized messages without packing (buckets).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import init_distributed, reduce_scalars
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.transfer.executor import Resharder
from megatron_rl.transfer.planner import Planner, group_shards
from megatron_rl.transfer.transports import export_params, map_params
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import find_shard_key, megatron_placements
from megatron_rl.weights.packed_experts import find_fused
from megatron_rl.weights.rollout_layout import vllm_placements
from megatron_rl.weights.shard_box import ShardBox, box_shape, box_slices, find_aliases
from tools._layouts import read_layouts, read_shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Bench:
    """One rank's parameters on both sides, and three ways to fill the destination."""

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        rollout_tp: int,
        dtype: torch.dtype,
        alias: bool,
        bucket_bytes: int,
        transport: str,
    ) -> None:
        self.shape, self.layout, self.tp, self.dtype = shape, layout, rollout_tp, dtype
        self.rank, self.world = dist.get_rank(), layout.world_size
        self.at, self.bucket_bytes = layout.coordinates(self.rank), bucket_bytes
        self._tensors = shape.logical_tensors()
        self._stage_tables = {stage: self.source_table(layout.rank(pp=stage)) for stage in range(layout.pp_size)}
        whole_layers = ParallelLayout(layout.tp_size, tp_size=layout.tp_size)
        self._shard_sizes = [
            {p.hf_name: box_shape(p.hf_box) for p in megatron_placements(shape, whole_layers, r)}
            for r in range(layout.tp_size)
        ]
        # For the gather path, which does not support expert parallelism.
        self._owners = {name: self._owner_stage(name) for name in self._tensors if layout.ep_size == 1}
        self.source, blocks = _allocate(self.source_table(self.rank), dtype, find_fused)
        self._blocks = list(blocks.values())
        self.write_weights(step=0)
        wanted = self.destination_table(self.rank)
        pairs = find_aliases(self.source_table(self.rank), wanted) if alias else {}
        apart = {_find_engine_block(p.param)[0] for p in wanted if p.param not in pairs}
        pairs = {name: origin for name, origin in pairs.items() if _find_engine_block(name)[0] not in apart}
        own, blocks = _allocate([p for p in wanted if p.param not in pairs], dtype, _find_engine_block)
        self._own_blocks = list(blocks.values())
        self.destination = own | {name: self.source[origin] for name, origin in pairs.items()}
        self.bytes_aliased = sum(self.source[origin].nbytes for origin in pairs.values())
        self.resharder = self._build(frozenset(pairs), transport)
        self.tp_group = dist.new_group(layout.group_of(self.rank, "tp"), use_local_synchronization=True)
        self.pp_group = dist.new_group(layout.group_of(self.rank, "pp"), use_local_synchronization=True)

    def write_weights(self, step: int) -> None:
        """Fill the source with values that identify name, position and step."""
        for p in self.source_table(self.rank):
            self.source[p.param][box_slices(p.local_box)].copy_(self._value(p, step))

    def _value(self, p: ShardBox, step: int) -> torch.Tensor:
        """Hash name, index and step, exact in either dtype."""
        width = self._tensors[p.hf_name][-1]
        index = torch.arange(*p.hf_box[-1])
        if len(p.hf_box) == 2:
            index = torch.arange(*p.hf_box[0])[:, None] * width + index
        return ((index * 31 + sum(map(ord, p.hf_name)) * 7 + step * 13) % 251 - 125).to(self.dtype)

    def source_table(self, rank: int) -> Sequence[ShardBox]:
        """Return Megatron's placements."""
        return megatron_placements(self.shape, self.layout, rank)

    def destination_table(self, rank: int) -> Sequence[ShardBox]:
        """Return vLLM's placements."""
        return vllm_placements(self.shape, tp_size=self.tp, place=rank % self.tp)

    def _build(self, aliased: frozenset[str], transport: str) -> Resharder:
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, aliased)
        source = group_shards(
            self.source_table,
            lambda r: find_shard_key(self.layout, r),
            range(self.world),
        )
        destination = group_shards(
            lambda r: [p for p in self.destination_table(r) if p.param not in everyone[r]],
            lambda r: (r % self.tp, everyone[r]),
            range(self.world),
        )
        start = time.perf_counter()
        self.plan = Planner(source, destination, ranks_per_node=self.world).plan(self.rank)
        self.seconds_plan = time.perf_counter() - start
        return Resharder(
            self.plan,
            self.source,
            self.destination,
            dist.group.WORLD,
            bucket_bytes=self.bucket_bytes,
            transport=transport,
            ranks_per_node=self.world,
            dtype=self.dtype,
        )

    @torch.no_grad()
    def gather_and_load(self) -> None:
        """Transfer by gathering full tensors on every rank."""
        mine = {}
        for p in self.source_table(self.rank):
            mine.setdefault(p.hf_name, p)
        targets: dict[str, list[ShardBox]] = {}
        for p in self.destination_table(self.rank):
            targets.setdefault(p.hf_name, []).append(p)
        for name, size in self._tensors.items():
            owner = self._owners[name]
            placement = mine.get(name)
            shard = self._shard(name, size, placement if self.at.pp == owner else None)
            root = self.layout.rank(tp=self.at.tp, dp=self.at.dp, pp=owner)
            dist.broadcast(shard, root, group=self.pp_group)
            full = self._concatenate(shard, name, size)
            for p in targets[name]:
                self.destination[p.param][box_slices(p.local_box)].copy_(full[box_slices(p.hf_box)])

    def _owner_stage(self, name: str) -> int:
        return next(stage for stage, table in self._stage_tables.items() if any(p.hf_name == name for p in table))

    def _shard(self, name: str, size: tuple[int, ...], placement: ShardBox | None) -> torch.Tensor:
        if placement is not None:
            return self.source[placement.param][box_slices(placement.local_box)].contiguous()
        return torch.empty(self._shard_sizes[self.at.tp][name], dtype=self.dtype)

    def _concatenate(self, shard: torch.Tensor, name: str, size: tuple[int, ...]) -> torch.Tensor:
        if tuple(shard.shape) == size:
            return shard
        dim = next(d for d in range(len(size)) if shard.shape[d] != size[d])
        lengths = [sizes[name][dim] for sizes in self._shard_sizes]
        if len(set(lengths)) > 1:  # the last vocabulary shard is short, and padded for the all-gather
            padded = torch.zeros(max(lengths), *size[1:], dtype=self.dtype)
            padded[: len(shard)] = shard
            shard = padded
        parts = [torch.empty_like(shard) for _ in lengths]
        dist.all_gather(parts, shard, group=self.tp_group)
        parts = [part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)]
        return torch.cat(parts, dim)

    def reset_peak(self) -> None:
        """Start measuring the growth of resident memory."""
        Path("/proc/self/clear_refs").write_text("5")
        self._resident = _status_bytes("VmRSS")

    def read_peak(self) -> None:
        """Record the growth, including touched pages of peers."""
        self.measured_peak = max(0, _status_bytes("VmHWM") - self._resident)

    def memcpy_floor(self) -> Callable[[], None]:
        """Return a memcpy of as many bytes into the same destination pages."""
        exports: list[Any] = [None] * self.world
        dist.all_gather_object(exports, export_params({str(i): block for i, block in enumerate(self._blocks)}))
        device = self._blocks[0].device
        peer = map_params(exports[(self.rank + 1) % self.world], device)
        origins = [t.view(-1) for t in peer.values()]
        pairs, index = [], 0
        for target in self._own_blocks:
            flat, at = target.view(-1), 0
            while at < flat.numel():
                origin = origins[index % len(origins)]
                length = min(origin.numel(), flat.numel() - at)
                pairs.append((flat[at : at + length], origin[:length]))
                at, index = at + length, index + 1

        def run() -> None:
            dist.barrier()
            for target, origin in pairs:
                target.copy_(origin)
            dist.barrier()

        return run

    def p2p_floor(self) -> Callable[[], None]:
        """Return a transfer of as many bytes between the same peers, without packing."""
        sends, receives = (
            {peer: sum(op.num_elements for op in ops) for peer, ops in side.items()}
            for side in (self.plan.sends, self.plan.receives)
        )
        size = max(1, self.bucket_bytes // 2 // self.dtype.itemsize)
        out, into = torch.zeros(size, dtype=self.dtype), torch.zeros(size, dtype=self.dtype)

        def run() -> None:
            for turn in range(1, self.world):
                to, origin = (self.rank + turn) % self.world, (self.rank - turn) % self.world
                left_out = sends.get(to, 0)
                left_in = receives.get(origin, 0)
                while left_out or left_in:
                    n_out, n_in = min(size, left_out), min(size, left_in)
                    works = [dist.irecv(into[:n_in], origin)] if n_in else []
                    works += [dist.isend(out[:n_out], to)] if n_out else []
                    for work in works:
                        work.wait()
                    left_out, left_in = left_out - n_out, left_in - n_in

        return run

    def report(self, options: argparse.Namespace, seconds: dict[str, list[float]], wrong: int) -> dict[str, Any]:
        """Return totals and medians; collective."""
        stats = self.resharder.stats
        totals = reduce_scalars(
            {
                "bytes_moved": stats.bytes_moved,
                "bytes_copied": stats.bytes_copied,
                "bytes_aliased": self.bytes_aliased,
                "wrong_elements": wrong,
            },
            dist.ReduceOp.SUM,
            dist.group.WORLD,
            torch.device("cpu"),
        )
        peaks = reduce_scalars(
            {
                "peak_transient_bytes": self.resharder.transient_bytes,
                "measured_peak_bytes": self.measured_peak,
                "seconds_plan": self.seconds_plan,
            },
            dist.ReduceOp.MAX,
            dist.group.WORLD,
            torch.device("cpu"),
        )
        total = totals["bytes_moved"] + totals["bytes_copied"] + totals["bytes_aliased"]
        ours, floor = statistics.median(seconds["ours"]), statistics.median(seconds["floor"])
        gather = statistics.median(seconds["gather"]) if seconds["gather"] else None
        return {
            "transport": self.resharder.transport,
            "source": self.layout.describe(),
            "destination_tp": self.tp,
            "dtype": options.dtype,
            "bytes_total": int(total),
            **{k: int(v) for k, v in totals.items()},
            "aliased_share": totals["bytes_aliased"] / total,
            "seconds": ours,
            "seconds_gather_load": gather,
            "seconds_floor": floor,
            "speedup_vs_gather": gather / ours if gather else None,
            "fraction_of_floor": floor / ours,
            "bucket_bytes": options.bucket_bytes,
            "peak_transient_bytes": int(peaks["peak_transient_bytes"]),
            "measured_peak_bytes": int(peaks["measured_peak_bytes"]),
            "seconds_plan": peaks["seconds_plan"],
            "all_seconds": seconds,
        }

    def count_wrong(self, step: int) -> int:
        """Count wrong destination elements."""
        return sum(
            int((self.destination[p.param][box_slices(p.local_box)] != self._value(p, step)).sum())
            for p in self.destination_table(self.rank)
        )


def _status_bytes(key: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key))
    return int(line.split()[1]) * 1024


def _find_engine_block(name: str) -> tuple[str, int | None]:
    """Return engine parameter and expert index of a table's name."""
    param, _, expert = name.rpartition(".")
    return (param, int(expert)) if ".experts." in name else (name, None)


def _allocate(
    placements: Sequence[ShardBox], dtype: torch.dtype, find_block: Callable[[str], tuple[str, int | None]]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Allocate parameters, fusing a layer's experts; return views by table name, and the parameters."""
    extents: dict[str, tuple[int, ...]] = {}
    for p in placements:
        stops = tuple(stop for _, stop in p.local_box)
        extents[p.param] = tuple(map(max, stops, extents.get(p.param, stops)))
    counts = Counter(find_block(name)[0] for name, _ in extents.items())
    blocks = {find_block(name)[0]: size for name, size in extents.items()}
    params = {
        name: torch.zeros((counts[name], *size) if counts[name] > 1 else size, dtype=dtype)
        for name, size in blocks.items()
    }
    places = {name: find_block(name) for name in extents}
    views = {name: params[p] if counts[p] == 1 else params[p][e] for name, (p, e) in places.items()}
    return views, params


def measure(function: Callable[[], Any]) -> float:
    """Return the slowest rank's seconds."""
    dist.barrier()
    start = time.perf_counter()
    function()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contestants and check every element."""
    process = init_distributed(timeout_minutes=10)
    torch.set_num_threads(1)
    shape = read_shape(options.hf_config)
    world_size, known = process.world_size, ("tp", "dp")
    layout, rollout_tp, _ = read_layouts(shape, options.source, options.destination, world_size, known)
    bench = Bench(
        shape, layout, rollout_tp, DTYPES[options.dtype], not options.no_alias, options.bucket_bytes, options.transport
    )
    floor = bench.memcpy_floor() if bench.resharder.transport == "pull" else bench.p2p_floor()
    seconds: dict[str, list[float]] = {"ours": [], "gather": [], "floor": []}
    wrong = 0
    for step in range(-1, options.repeats):  # the first round touches every page, uncounted
        if step in (-1, options.repeats - 1):
            written = step
            bench.write_weights(step)
        for name, function in (("floor", floor), ("gather", bench.gather_and_load), ("ours", bench.resharder.run)):
            if name == "gather" and (bench.bytes_aliased or layout.ep_size > 1):
                continue  # it would overwrite aliased source storage, or lacks experts
            if name == "ours":
                bench.reset_peak()
            elapsed = measure(function)
            if name == "ours":
                bench.read_peak()
            if step >= 0:
                seconds[name].append(elapsed)
        if step in (-1, options.repeats - 1):
            wrong += bench.count_wrong(written)
    return bench.report(options, seconds, wrong)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-config", type=Path, required=True, help="model directory or config.json")
    parser.add_argument("--source", required=True, help="training layout: tp=2,pp=2 (also vpp, cp, ep; dp is the rest)")
    parser.add_argument("--destination", required=True, help="engine layout: tp=1 (dp is the rest)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of both sides")
    parser.add_argument("--transport", choices=("auto", "pull", "buckets"), default="auto", help="see hybrid.transport")
    parser.add_argument("--bucket-bytes", type=int, default=32 << 20, help="see hybrid.bucket_bytes")
    parser.add_argument("--no-alias", action="store_true", help="copy even where both layouts agree")
    parser.add_argument("--repeats", type=int, default=3, help="counted rounds; medians are reported")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    try:
        result = run(options)
    except UserError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:  # all ranks raise the same error
            print(f"error: {error}", file=sys.stderr)
        return 2
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=2))
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    wrong = result["wrong_elements"]
    dist.barrier()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
