# SPDX-License-Identifier: Apache-2.0
"""Log-probs and update of a GRPO step against TRL: same model, prompts and responses; CPU-seconds, or wall on a GPU.

    OMP_NUM_THREADS=1 python tools/benchmarks/bench_step_vs_trl.py --trl-python VENV/bin/python --json FILE

Needs TRL (`pip install trl==1.16.0`), here or in the environment of `--trl-python`. Each side is a process with one
thread; they take the same steps (16 prompts x 8 samples) in alternating order. Except in the last workload, response
lengths are scripted, and a step is the log-probs before the update and one update, the mean of two. TRL takes a
separate pass for these log-probs, as by default with vLLM (forced by `num_iterations=2`); ours come from the update.
Also printed: ratios for two epochs, and for one update without TRL's pass.

    ragged     32 prompt tokens, up to 128 in a response (geometric, mean about 45)
    prompt     256 prompt tokens, up to 64 in a response (geometric, mean about 33)
    fixed      32 prompt tokens, 128 in every response
    reference  as ragged, with a reference pass for the KL term, and two epochs
    rollouts   as ragged, but each side samples, scores and takes one update: vLLM in process against TRL with
               transformers, per 1000 response tokens (the end probability is about 1/49 per token)

Ours includes packing; TRL's padding, rewards and advantages are left out. Log-probs are compared in every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from megatron_rl.types import UserError
from tools.benchmarks._bench_actor import write_random_model
from tools.benchmarks._step_contest import MARK, MODEL, PARTS, WORDS, WORKLOADS, add_worker_options, draw_workload

TOOLS = Path(__file__).resolve().parent
ONE_UPDATE = ("ragged", "prompt", "fixed")
RATIOS = ("ratio", "two_epochs_ratio", "update_ratio")
SIDES = {"ours": TOOLS / "_our_side.py", "trl": TOOLS / "_trl_side.py"}


class Side:
    """A contestant in its own process."""

    def __init__(self, name: str, python: str, arguments: list[str], directory: Path) -> None:
        self.name, self._log = name, directory / f"{name}.log"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(SIDES[name]), *arguments],
                env=environment,
                text=True,
                bufsize=1,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def take_step(self) -> dict[str, Any]:
        """Request a step; return its measurements."""
        self._process.stdin.write("step\n")
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Return the next answer."""
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        lines = self._log.read_text().strip().splitlines()[-8:]
        raise UserError(
            f"the process of {self.name} ended",
            source="\n".join(lines) or "it said nothing",
            expected="an answer per step",
            hint="--trl-python must have TRL with rollout_func (1.16.0)",
        )

    def end(self) -> None:
        """Kill and reap the process."""
        self._process.kill()
        self._process.wait()


def run_workload(options: argparse.Namespace, workload: str, directory: Path) -> dict[str, Any]:
    """Run a workload."""
    steps = options.warmup_steps + options.steps
    model = directory / ("model" if workload != "rollouts" else "ending")
    if not model.exists():
        write_random_model(model, MODEL) if workload != "rollouts" else _write_ending_model(model)
    arguments = [
        "--model",
        str(model),
        "--workload",
        workload,
        "--num-steps",
        str(steps),
        *(
            f"--{name}={getattr(options, name.replace('-', '_'))}"
            for name in ("prompts", "samples", "max-tokens", "trl-micro-batch")
        ),
    ]
    pythons = {"ours": sys.executable, "trl": options.trl_python}
    rounds = []
    for _ in range(options.rounds):
        sides = [Side(name, pythons[name], arguments, directory) for name in SIDES]
        try:
            for side in sides:
                side.receive()
            rounds.append([_take_turns(sides, step) for step in range(steps)][options.warmup_steps :])
        finally:
            for side in sides:
                side.end()
    if workload == "rollouts":
        sampled = [step["ours"]["tokens_computed"] for step in rounds[0]]
        for found in (step[name] for steps_ in rounds for step in steps_ for name in SIDES):
            found["whole"] *= 1000 / found["tokens_computed"]
        return summarize(workload, rounds, [0] * len(sampled), sampled)
    options.workload = workload
    works = [draw_workload(options, step) for step in range(options.warmup_steps, steps)]
    return summarize(
        workload,
        rounds,
        [len(work.lengths) * work.prompt_lengths[0] for work in works],
        [sum(work.lengths) for work in works],
    )


def _write_ending_model(directory: Path) -> None:
    """Write a random model with an end probability of about 1/49 per token, and its tokenizer."""
    write_random_model(directory, MODEL | {"tie_word_embeddings": False})
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0.3  # makes the first hidden value about 2.6
    weights["lm_head.weight"][WORDS["<eos>"]] = 0.0
    weights["lm_head.weight"][WORDS["<eos>"], 0] = 1.2
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(WordLevel(WORDS, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "<pad>", "unk_token": "<pad>", "eos_token": "<eos>"}
    (directory / "special_tokens_map.json").write_text(json.dumps(names))


def _take_turns(sides: list[Side], step: int) -> dict[str, Any]:
    found = {side.name: side.take_step() for side in (sides if step % 2 == 0 else sides[::-1])}
    pairs = zip(found["ours"].pop("logprob_sums"), found["trl"].pop("logprob_sums"), strict=True)
    return found | {"logprob_gap": max((abs(a - b) / max(abs(b), 1.0) for a, b in pairs), default=0.0)}


def summarize(
    workload: str, rounds: list[list[dict[str, Any]]], prompt_tokens: list[int], tokens: list[int]
) -> dict[str, Any]:
    """Return medians per round, and TRL's over ours."""
    table = []
    for steps in rounds:
        sums = {
            name: statistics.median(sum(step[name].get(part, 0.0) for part in PARTS) for step in steps)
            for name in SIDES
        }
        table.append(
            {
                name: {part: statistics.median(step[name].get(part, 0.0) for step in steps) for part in PARTS}
                | {"total": sums[name], "tokens_computed": statistics.median(s[name]["tokens_computed"] for s in steps)}
                for name in SIDES
            }
            | {"ratio": sums["trl"] / sums["ours"]}
        )
        if workload in ONE_UPDATE:
            ours, trl = (table[-1][name] for name in ("ours", "trl"))
            table[-1]["two_epochs_ratio"] = (trl["total"] + trl["update"]) / (ours["total"] + ours["update"])
            table[-1]["update_ratio"] = (trl["total"] - trl["logprobs"]) / ours["total"]
    return {
        "workload": workload,
        "rounds": table,
        **{name: min(row[name] for row in table) for name in RATIOS if name in table[0]},
        "response_tokens": statistics.median(a - b for a, b in zip(tokens, prompt_tokens, strict=True)),
        "tokens": statistics.median(tokens),
        "max_logprob_gap": max(step["logprob_gap"] for steps in rounds for step in steps),
    }


def format_result(result: dict[str, Any]) -> str:
    """Format a table."""
    lines = [
        f"{result['workload']}: {result['response_tokens']:.0f} response tokens of {result['tokens']:.0f}; "
        f"log-probs differ by {result['max_logprob_gap']:.1e} (relative)",
        f"  {'round':>5} {'side':5}" + "".join(f"{part:>10}" for part in (*PARTS, "total")) + f"{'computed':>10}",
    ]
    for number, row in enumerate(result["rounds"], 1):
        for name in SIDES:
            found = row[name]
            lines.append(
                f"  {number:>5} {name:5}"
                + "".join(f"{found[part]:10.3f}" for part in (*PARTS, "total"))
                + f"{found['tokens_computed']:10.0f}"
            )
        lines.append(f"        TRL takes {row['ratio']:.2f} times as long")
        if "update_ratio" in row:
            lines[-1] += f"; two epochs: {row['two_epochs_ratio']:.2f}, without its pass: {row['update_ratio']:.2f}"
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_worker_options(parser)
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=sorted(WORKLOADS))
    parser.add_argument("--trl-python", default=sys.executable, help="Python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=2, help="each with fresh processes")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a round")
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps of a round that are not measured")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    results = []
    try:
        with tempfile.TemporaryDirectory() as directory:
            for workload in options.workloads:
                results.append(run_workload(options, workload, Path(directory)))
                print(format_result(results[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=2) + "\n")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
