# SPDX-License-Identifier: Apache-2.0
"""Cost of an engine's control message, which its first rank shares before each decoding step.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 tools/benchmarks/bench_control.py --json FILE

The ranks form one engine and share empty messages and ones with requests. Back to back, the fastest round shows the
pure cost; behind a decoding step (a sleep), a message also waits for the last rank to wake up. Exit status 1 if an
empty message, back to back, takes over 1 % of the step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import numpy as np
import torch.distributed as dist

from megatron_rl.engines.protocol import Request, SamplingConfig
from megatron_rl.parallel.collectives import gather_objects, init_distributed, world
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rollout.generation import Channel, ControlMessage, open_channel
from megatron_rl.run.command_line import leave

LIMIT = 0.01


def time_message(channel: Channel, message: ControlMessage, count: int, step_seconds: float) -> float:
    """Return this rank's mean seconds of a message after a step; collective."""
    total = 0.0
    dist.barrier()
    for _ in range(count):
        if step_seconds:
            time.sleep(step_seconds)
        start = time.perf_counter()
        channel.share(message if channel.is_first else None)
        total += time.perf_counter() - start
    return total / count


def measure(channel: Channel, message: ControlMessage, args: argparse.Namespace) -> dict[str, float]:
    """Return the slowest rank's microseconds of a message; collective."""
    return {
        name: 1e6
        * max(gather_objects(min(time_message(channel, message, count, seconds) for _ in range(args.rounds)), world()))
        for name, count, seconds in (("back_to_back", 25, 0.0), ("behind_a_step", 10, args.step))
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=0.01, help="seconds of a decoding step (0.01)")
    parser.add_argument("--rounds", type=int, default=100, help="of which the fastest counts (100)")
    parser.add_argument("--requests", type=int, default=8, help="in a message that is not empty (8)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of their prompts (512)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    args = parser.parse_args()
    process = init_distributed(5)
    channel = open_channel(EngineRanks.consecutive(range(process.world_size), process.world_size), process.rank)
    sampling = SamplingConfig(temperature=1.0, max_tokens=1024, stop_token_ids=())
    prompt = np.zeros(args.prompt, np.int32)
    requests = [Request(key, prompt, key, sampling) for key in range(args.requests)]
    found = {
        "ranks": process.world_size,
        "step_seconds": args.step,
        "empty": measure(channel, ControlMessage(), args),
        "requests": measure(channel, ControlMessage(requests=requests), args),
    }
    share = found["empty"]["back_to_back"] / 1e6 / args.step
    if process.rank == 0:
        text = json.dumps(found | {"empty_share_of_a_step": share}, indent=1)
        print(text)
        if args.json:
            args.json.write_text(text + "\n", encoding="utf-8")
    return int(share > LIMIT and process.rank == 0)


if __name__ == "__main__":
    leave(main())
