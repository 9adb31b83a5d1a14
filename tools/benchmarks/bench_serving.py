# SPDX-License-Identifier: Apache-2.0
"""Time of an RL loop through the server against the same loop of primitives in this process.

    python tools/benchmarks/bench_serving.py RECIPE [key=value ...] --json FILE

Each step takes a sampler of the current weights, samples groups for some prompts, and updates the weights by the
policy gradient, as the cookbook's rl_loop does. Both loops alternate in steps, with equal prompts and seeds; the server
is a process of its own, and the client is the package tinker, on the same machine. `ratio` is the median over the steps
of the seconds in this process over the server's: 1 means that the server costs nothing; `cpu_ratio` is that of
CPU-seconds, client included, for a busy machine. `first_loss_gap` is the difference of the first losses, relative.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import numpy as np

from megatron_rl.engines.protocol import derive_seed
from megatron_rl.engines.token_requests import TokenRequest
from megatron_rl.run.command_line import leave
from megatron_rl.run.primitives import Primitives
from megatron_rl.training.datums import Datum
from tools.serving.request_checks import read_adam
from tools.serving.starting import build_run

ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
ROOT = Path(__file__).resolve().parents[2]
Step = Callable[[int], float]  # number -> sum of the loss


def draw_prompts(args: argparse.Namespace, vocab_size: int, step: int) -> list[list[int]]:
    """Draw the prompts of a step."""
    rng = np.random.default_rng(step)
    return rng.integers(3, vocab_size, (args.prompts, args.prompt_tokens)).tolist()


def compute_advantages(responses: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the advantages of a group, whose reward is the share of even tokens."""
    rewards = np.array([np.mean(np.array(tokens) % 2 == 0) for tokens in responses])
    return rewards - rewards.mean()


def make_local_step(run: Primitives, args: argparse.Namespace, vocab_size: int) -> Step:
    """Return a step of primitives."""
    policy, settings = run.policy, read_adam({"adam_params": ADAM})

    def take_step(step: int) -> float:
        prompts = draw_prompts(args, vocab_size, step)
        requests = [
            TokenRequest(prompt, args.tokens, seed=derive_seed(index, 0, 0, number), stop_token_ids=())
            for index, prompt in enumerate(prompts)
            for number in range(args.group)
        ]
        with policy.rollout_mode():
            found = policy.sample_requests(requests)
        datums = []
        for index, prompt in enumerate(prompts):
            group = found[index * args.group : (index + 1) * args.group]
            before = [0.0] * (len(prompt) - 1)
            for one, advantage in zip(group, compute_advantages([one.tokens for one in group]), strict=True):
                columns = {
                    "logprobs": [*before, *one.logprobs],
                    "advantages": [*before, *[advantage] * len(one.tokens)],
                }
                tokens = [*prompt, *one.tokens]
                datums.append(Datum(tokens[:-1], tokens[1:], columns))
        _, metrics = policy.forward_backward_datums(datums, "importance_sampling")
        policy.optim_step(**settings)
        return metrics["loss:sum"]

    return take_step


def make_served_step(url: str, args: argparse.Namespace, vocab_size: int) -> Step:
    """Return a step of the client."""
    os.environ["TINKER_TELEMETRY"] = "0"
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    client = service.create_lora_training_client(base_model="served").result()

    def take_step(step: int) -> float:
        prompts = draw_prompts(args, vocab_size, step)
        sampler = client.save_weights_and_get_sampling_client().result()
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                args.group,
                types.SamplingParams(max_tokens=args.tokens, seed=index, stop=[]),
            )
            for index, prompt in enumerate(prompts)
        ]
        data = []
        for prompt, future in zip(prompts, futures, strict=True):
            group, before = future.result().sequences, [0.0] * (len(prompt) - 1)
            for one, advantage in zip(group, compute_advantages([one.tokens for one in group]), strict=True):
                tokens, logprobs = [*prompt, *one.tokens], list(one.logprobs or ())
                inputs = {
                    "target_tokens": np.array(tokens[1:]),
                    "logprobs": np.array([*before, *logprobs], np.float32),
                    "advantages": np.array([*before, *[advantage] * len(one.tokens)], np.float32),
                }
                data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        passed = client.forward_backward(data, "importance_sampling")
        taken = client.optim_step(types.AdamParams(**ADAM))
        loss = passed.result().metrics["loss:sum"]
        taken.result()
        return loss

    return take_step


def start_server(recipe: Path, settings: Sequence[str], directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server of one rank and return it with its address."""
    directory.mkdir(parents=True, exist_ok=True)
    log, given = directory / "server.log", ["serve.port=0", "serve.name=served", *settings]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, ROOT / "tools/serve.py", recipe, *given, f"trainer.run_dir={directory / 'served'}"],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    while server.poll() is None:
        if found := re.search(r"serving on (\S+)", log.read_text()):
            return server, found[1]
        time.sleep(0.1)
    sys.exit(log.read_text())


def read_cpu_seconds(server: int) -> float:
    """Return the CPU-seconds that this process and the server have used."""
    user, system = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[11:13]
    return time.process_time() + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(steps: dict[str, Step], args: argparse.Namespace, server: int) -> dict[str, Any]:
    """Time the steps of each way in turns, after one that warms up."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    first = {name: take_step(0) for name, take_step in steps.items()}
    for number in range(1, 1 + args.steps):
        for name, take_step in steps.items():
            start, used = time.perf_counter(), read_cpu_seconds(server)
            take_step(number)
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(read_cpu_seconds(server) - used)
    pairs = zip(wall["primitives"], wall["server"], strict=True)
    return {
        "ratio": statistics.median(one / other for one, other in pairs),
        "cpu_ratio": sum(cpu["primitives"]) / sum(cpu["server"]),
        "seconds": {name: statistics.median(found) for name, found in wall.items()},
        "cpu_seconds": {name: statistics.mean(found) for name, found in cpu.items()},
        "fastest": {name: min(found) for name, found in wall.items()},
        "first_loss_gap": abs(first["primitives"] - first["server"]) / abs(first["primitives"]),
        "tokens_per_step": args.prompts * args.group * args.tokens,
        "all_seconds": wall,
    }


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value, for both")
    parser.add_argument("--prompts", type=int, default=16, help="per step (16)")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt (8)")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="(16)")
    parser.add_argument("--tokens", type=int, default=32, help="of each response (32)")
    parser.add_argument("--steps", type=int, default=15, help="of each way (15)")
    parser.add_argument("--directory", type=Path, default=Path("bench_serving"), help="of the server's files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    args = parser.parse_intermixed_args()
    server, url = start_server(args.recipe, args.settings, args.directory)
    try:
        run = build_run(args.recipe, args.settings)
        vocab_size = run.policy.model.shape.vocab_size
        ways = {
            "primitives": make_local_step(run, args, vocab_size),
            "server": make_served_step(url, args, vocab_size),
        }
        found = measure(ways, args, server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(120)
    text = json.dumps(found, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    run.policy.close()
    return 0


if __name__ == "__main__":
    leave(main())
