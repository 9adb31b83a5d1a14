# SPDX-License-Identifier: Apache-2.0
"""Time of the Tinker cookbook's rl_loop through the server against the same loop of primitives in this process.

    python tools/benchmarks/bench_rl_loop.py RECIPE [key=value ...] [--json FILE]

The program is the package's own file, unchanged. Replaced from outside, in both ways: the data set, by sums; the name
of the renderer; and the reward, which is 1 for a response of an odd number of characters, as a small model gives no
right answers and rl_loop skips groups of equal rewards. The recipe's model.path needs a tokenizer, and its context room
for the prompt of some 130 tokens and --tokens. Needs the packages tinker and tinker_cookbook. Both ways run --blocks
times in turns; the first step of each counts as warm-up. `ratio` is the median of the seconds of a step in this process
over that through the server.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import numpy as np

from megatron_rl.engines.protocol import derive_seed
from megatron_rl.engines.token_requests import TokenRequest
from megatron_rl.run.command_line import leave
from megatron_rl.run.primitives import Primitives
from megatron_rl.training.datums import Datum
from tools.benchmarks.bench_serving import start_server
from tools.serving.request_checks import read_adam
from tools.serving.starting import build_run

RENDERER = "role_colon"
ADAM = {"learning_rate": 4e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}  # rl_loop's
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)


def score(response: str, answer: str = "") -> float:
    """Return 1 for an odd number of characters."""
    return float(len(response) % 2)


def draw_rows(count: int) -> list[dict[str, str]]:
    """Draw questions and answers in the form of the data set of rl_loop."""
    pairs = np.random.default_rng(0).integers(2, 60, (count, 2)).tolist()
    return [{"question": f"What is {a} + {b}?", "answer": f"work #### {a + b}"} for a, b in pairs]


def run_program(url: str, rows: list[dict[str, str]], model: str, args: argparse.Namespace) -> list[float]:
    """Run the cookbook's program; return the seconds of its steps."""
    import datasets

    model_info: Any = import_module("tinker_cookbook.model_info")
    rl_loop: Any = import_module("tinker_cookbook.recipes.rl_loop")
    model_info.get_recommended_renderer_name = lambda name: RENDERER
    datasets.load_dataset = lambda *names: datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    rl_loop.get_reward = score
    log = args.directory / "rl_loop"
    shutil.rmtree(log, ignore_errors=True)
    sizes = {"batch_size": args.prompts, "group_size": args.group, "max_tokens": args.tokens, "max_steps": args.steps}
    rl_loop.main(
        rl_loop.Config(
            base_url=url,
            log_path=str(log),
            model_name=model,
            loss_fn="importance_sampling",
            learning_rate=ADAM["learning_rate"],
            save_every=0,
            **sizes,
        )
    )
    lines = (log / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["time/total"] for line in lines]


def run_primitives(run: Primitives, rows: list[dict[str, str]], model: str, args: argparse.Namespace) -> list[float]:
    """Take the steps of rl_loop by primitives; return their seconds."""
    renderers = import_module("tinker_cookbook.renderers")
    renderer = renderers.get_renderer(RENDERER, import_module("tinker_cookbook.tokenizer_utils").get_tokenizer(model))
    prefix = [{"role": "user", "content": "How many r's are in strawberry?" + SUFFIX}]
    prefix.append({"role": "assistant", "content": EXAMPLE})
    policy, seconds = run.policy, list[float]()
    for step in range(args.steps):
        start = time.perf_counter()
        prompts = [
            renderer.build_generation_prompt([*prefix, {"role": "user", "content": row["question"] + SUFFIX}]).to_ints()
            for row in rows[step * args.prompts : (step + 1) * args.prompts]
        ]
        requests = [
            TokenRequest(prompt, args.tokens, derive_seed(index, 0, step, number), stop=renderer.get_stop_sequences())
            for index, prompt in enumerate(prompts)
            for number in range(args.group)
        ]
        with policy.rollout_mode():
            found = policy.sample_requests(requests)
        datums = list[Datum]()
        for index, prompt in enumerate(prompts):
            group = found[index * args.group : (index + 1) * args.group]
            messages = [renderer.parse_response(list(one.tokens))[0] for one in group]
            rewards = np.array([score(renderers.get_text_content(message)) for message in messages])
            before = [0] * (len(prompt) - 1)
            for one, advantage in zip(group, rewards - rewards.mean(), strict=True) if np.ptp(rewards) else ():
                logprobs, advantages = [*before, *one.logprobs], [*before, *[advantage] * len(one.tokens)]
                columns: dict[str, Any] = {"logprobs": logprobs, "advantages": advantages}
                datums.append(Datum([*prompt, *one.tokens[:-1]], [*before, *one.tokens], columns))
        if datums:
            policy.forward_backward_datums(datums, "importance_sampling")
            policy.optim_step(**read_adam({"adam_params": ADAM}))
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value, for both")
    parser.add_argument("--prompts", type=int, default=8, help="per step (8)")
    parser.add_argument("--group", type=int, default=4, help="responses to each prompt (4)")
    parser.add_argument("--tokens", type=int, default=256, help="of a response, at most (256, as in rl_loop)")
    parser.add_argument("--steps", type=int, default=4, help="of a block (4)")
    parser.add_argument("--blocks", type=int, default=2, help="of each way (2)")
    parser.add_argument("--directory", type=Path, default=Path("bench_rl_loop"), help="of the server's files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    args = parser.parse_intermixed_args()
    os.environ |= {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    run, rows = build_run(args.recipe, args.settings), draw_rows(args.steps * args.prompts)
    model = run.config.model.path
    served = [*args.settings, f"serve.name={model}", "serve.train_unembed=ignore"]  # True by the client's default
    server, url = start_server(args.recipe, served, args.directory)
    wall: dict[str, list[list[float]]] = {"server": [], "primitives": []}
    try:
        for _ in range(args.blocks):
            wall["server"].append(run_program(url, rows, model, args))
            wall["primitives"].append(run_primitives(run, rows, model, args))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(120)
    counted = {name: [second for block in blocks for second in block[1:]] for name, blocks in wall.items()}
    medians = {name: statistics.median(seconds) for name, seconds in counted.items()}
    means = {name: statistics.mean(seconds) for name, seconds in counted.items()}
    found = {
        "ratio": medians["primitives"] / medians["server"],
        "ratio_of_means": means["primitives"] / means["server"],
        "seconds": medians,
        "all_seconds": wall,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    run.policy.close()
    return 0


if __name__ == "__main__":
    leave(main())
