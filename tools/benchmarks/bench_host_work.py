# SPDX-License-Identifier: Apache-2.0
"""CPU time of Python and numpy per step on one data parallel rank, without model and communication.

    OMP_NUM_THREADS=1 python tools/benchmarks/bench_host_work.py --ranks 8 128 1024 --sequences 512 8192 --json FILE

Covers the host work of `run/grpo.py`: headers of all sequences, minibatch plans, token exchange, this replica's batch,
dispatch, group baselines and metrics.

    OMP_NUM_THREADS=1 python tools/benchmarks/bench_host_work.py --running 512 --rounds 3 --json FILE

Instead: the host's work in a decode step of the real vLLM, by part, with its first model runner, its own output
processor and log-probs as dictionaries ("before"), and as a run on a GPU has it ("after"), with the second runner and
async scheduling (`tools/_runner_on_cpu.py`): medians of rounds that alternate. Forward passes and kernels are left
out, and so are their launches.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config

from megatron_rl.config.schema import AlgorithmConfig, LayoutConfig, RolloutConfig
from megatron_rl.engines.protocol import EngineSpec, Request, SamplingConfig
from megatron_rl.parallel.collectives import Process
from megatron_rl.parallel.imports import kept_imports
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rollout.generation import assign_engines
from megatron_rl.samples.batch import Packer
from megatron_rl.samples.experience import describe_rollouts
from megatron_rl.samples.table import HEADER, Headers, Holders, build_headers, plan_fetch
from megatron_rl.types import Branch, Prompt, Rollout, Turn
from megatron_rl.weights.model_config import load_model_shape
from tools._runner_on_cpu import use_gpu_modes

GROUP_SIZE = 8
PROMPT, LONGEST = 64, 256  # tokens: short sequences, to leave little else to do
# A model of which hardly anything is computed.
_MODEL = dict(
    num_hidden_layers=1,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=128,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
_ENGINE_PARTS = ("schedule", "update", "outputs", "prepare")


@dataclass(frozen=True)
class HostStep:
    """A step of `num_sequences` on `dp_size` replicas as seen by one rank."""

    num_sequences: int
    dp_size: int
    share_prompts: bool = False
    num_minibatches: int = 4
    max_tokens: int = 16384

    def measure(self) -> dict[str, float]:
        """Return CPU-seconds by part."""
        random, seconds = np.random.default_rng(0), {}

        def timed(name: str, action: Any) -> Any:
            start = time.process_time()
            found = action()
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - start
            return found

        responses = np.minimum(random.lognormal(4, 0.8, self.num_sequences), LONGEST - PROMPT - 2).astype(int)
        lengths = PROMPT + 1 + responses
        groups = self.num_sequences // GROUP_SIZE
        engine_of = timed(
            "dispatch", lambda: assign_engines("samples", [PROMPT] * groups, GROUP_SIZE, self.dp_size, LONGEST)
        )
        headers = self._make_headers(lengths, engine_of, random)
        mine = np.flatnonzero(engine_of == 0)
        rollouts = {index: _make_rollout(index, int(lengths[index])) for index in mine.tolist()}
        timed("headers", lambda: build_headers(((i // GROUP_SIZE, r) for i, r in rollouts.items()), holder=0))
        ranks = np.arange(self.dp_size)[:, None]
        branches = {length: _make_branch(length) for length in np.unique(lengths).tolist()}

        def fetch(destination: Holders) -> Mapping[int, Branch]:
            plan = timed("fetch plan", lambda: plan_fetch(0, Holders(engine_of, ranks), destination))
            return {index: branches[lengths[index]] for index in plan.sequences.tolist()}

        packing = timed("packing", lambda: self._build_packer().pack(headers, fetch))
        seconds["packing"] -= seconds["fetch plan"]
        timed("metrics", lambda: describe_rollouts(headers))
        scores = np.split(headers["reward"], groups)
        timed("advantages", lambda: [part - part.mean() for part in scores] and packing)
        return seconds

    def _make_headers(self, lengths: np.ndarray, engine_of: np.ndarray, random: np.random.Generator) -> Headers:
        rows = np.zeros(self.num_sequences, HEADER)
        rows["num_tokens"], rows["num_prompt_tokens"] = lengths, PROMPT
        rows["num_sampled"], rows["in_loss"] = lengths - PROMPT, True
        rows["rollout"] = np.arange(self.num_sequences)
        rows["group"] = rows["prompt_id"] = rows["rollout"] // GROUP_SIZE
        rows["sample_index"], rows["holder"] = rows["rollout"] % GROUP_SIZE, engine_of
        rows["reward"] = random.integers(0, 2, self.num_sequences)
        return Headers(rows, ("score",), rows["reward"][:, None])

    def _build_packer(self) -> Packer:
        model: Any = SimpleNamespace(
            layout=ParallelLayout(world_size=self.dp_size),
            dp_rank=0,
            buckets=None,
            pad_multiple=1,
            attention_ratio=1e-4,
            microbatch_count_multiple=1,
        )
        plan: Any = SimpleNamespace(
            rollouts_per_minibatch=self.num_sequences // self.num_minibatches,
            longest_sequence=LONGEST,
            max_response_length=LONGEST - PROMPT,
        )
        config = LayoutConfig(max_tokens_per_microbatch=self.max_tokens, share_prompts=self.share_prompts)
        return Packer(model, config, plan, AlgorithmConfig(), torch.device("cpu"))


def _make_branch(length: int) -> Branch:
    sampled = np.arange(length) >= PROMPT
    return Branch(np.zeros(length, np.int32), sampled, np.zeros(length, np.float32), sampled.astype(np.int32), PROMPT)


def _make_rollout(index: int, length: int) -> Rollout:
    prompt = Prompt(index // GROUP_SIZE, np.zeros(PROMPT, np.int32), "", None)
    turns = [Turn(0, PROMPT, length)]
    return Rollout(prompt, index % GROUP_SIZE, [_make_branch(length)], turns, "stop", reward=0.0)


class PartClock:
    """CPU-seconds of this thread by part; a part within another counts alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._parts, self._since = list[str](), 0.0

    def clear(self) -> None:
        """Forget everything measured."""
        self.seconds, self.calls = {}, {}

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count calls of a method, and their time, to a part."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            self._pass()
            self._parts.append(part)
            self.calls[part] = self.calls.get(part, 0) + 1
            try:
                return function(*arguments, **options)
            finally:
                self._pass()
                self._parts.pop()

        setattr(owner, name, timed)

    def _pass(self) -> None:
        now = time.thread_time()
        if self._parts:
            self.seconds[self._parts[-1]] = self.seconds.get(self._parts[-1], 0.0) + now - self._since
        self._since = now


def measure_engine(arm: str, running: int, steps: int) -> dict[str, Any]:
    """Return the host's CPU-milliseconds per decode step of `running` requests by part, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        Qwen2Config(architectures=["Qwen2ForCausalLM"], **_MODEL).save_pretrained(directory)
        engine = _build_engine(arm, directory, running, steps)
    clock, llm = PartClock(), engine._llm.llm_engine
    core = llm.engine_core.engine_core
    runner = llm.model_executor.driver_worker.worker.model_runner
    watched = [(core.scheduler, "schedule", "schedule"), (core.scheduler, "update_from_output", "update")]
    watched += [(llm.output_processor, "process_outputs", "outputs")]
    watched += [(runner, name, "prepare") for name in ("execute_model", "sample_tokens")]
    watched += [(runner.model, name, "device") for name in ("forward", "compute_logits")]
    watched.append((runner.sampler, "forward" if arm == "before" else "sample", "sampler"))
    if arm == "after":
        watched.append((import_module("vllm.v1.worker.gpu.async_utils").AsyncOutput, "get_output", "prepare"))
    engine.add([_make_request(key, steps) for key in range(running)])
    while len(core.scheduler.running) < running:  # prompts
        engine.step()
    for _ in range(2):
        engine.step()
    if arm == "after":
        executor = import_module("triton.runtime.interpreter").GridExecutor
        executor.__call__ = _replay(executor.__call__)
        watched.append((executor, "__call__", "kernels"))
    for _ in range(2):
        engine.step()
    for one in [*watched, (engine, "step", "own")]:
        clock.watch(*one)
    for _ in range(steps):
        engine.step()
    assert len(core.scheduler.running) == running and clock.calls["schedule"] == steps
    found = {part: 1e3 * seconds / steps for part, seconds in clock.seconds.items()}
    host = {part: found[part] for part in (*_ENGINE_PARTS, "sampler", "own")}
    sums = {"four parts": sum(found[part] for part in _ENGINE_PARTS), "all": sum(host.values())}
    launches = {"kernels": clock.calls["kernels"] / steps} if arm == "after" else {}
    return {"arm": arm, "running": running, **{k: round(v, 2) for k, v in (host | sums | launches).items()}}


def _build_engine(arm: str, directory: str, running: int, steps: int) -> Any:
    if arm == "after":
        use_gpu_modes()
    with kept_imports():  # as a run does
        module: Any = import_module("megatron_rl.engines.vllm.vllm_engine")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spec = EngineSpec(
        model_path=directory,
        shape=load_model_shape(Path(directory)),
        dtype="float32",
        max_prompt_length=PROMPT,
        max_response_length=steps + 16,
        config=RolloutConfig(max_num_seqs=running),
        process=Process(0, 1, 0, 1, torch.device("cpu")),
        seed=0,
    )
    if arm == "after":
        engine = module.VllmEngine(spec)
    else:  # what this project replaces of vLLM
        with patch.object(module, "skip_block_searches"), patch.object(module, "ResponseRecorder"):
            engine = module.VllmEngine(spec)
        processor: Any = import_module("vllm.v1.engine.output_processor").OutputProcessor
        engine._llm.llm_engine.output_processor = processor(None, log_stats=False)
    for param in engine.params.values():
        param.normal_(std=0.1)
    engine.end_weight_update()
    return engine


def _make_request(key: int, steps: int) -> Request:
    tokens = np.random.default_rng(key).integers(0, _MODEL["vocab_size"], PROMPT // 4, np.int32)
    return Request(key, tokens, seed=key, sampling=SamplingConfig(1.0, steps + 16, ()))


def _replay(interpret: Any) -> Any:
    """Repeat each kernel's first results, which leaves the host's work as it is and takes no seconds."""
    kept: dict[Any, list[torch.Tensor]] = {}

    def run(self: Any, *arguments: Any, **options: Any) -> None:
        tensors = [x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
        key = self.fn.__name__, *(x.shape for x in tensors)
        if key in kept:
            for tensor, result in zip(tensors, kept[key], strict=True):
                tensor.copy_(result)
        else:
            interpret(self, *arguments, **options)
            kept[key] = [x.clone() for x in tensors]

    return run


def compare_engines(arguments: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return each arm's medians, with the machine's load of a minute, and the ratios of the sums."""
    found: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for arm in [*found] * rounds:  # a process each: Triton interprets or not
        command = [sys.executable, __file__, *arguments, "--arm", arm]
        interpreter = {"TRITON_INTERPRET": "1"} if arm == "after" else {}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | interpreter)
        found[arm].append(json.loads(done.stdout.splitlines()[-1]) | {"load": os.getloadavg()[0]})
        print(json.dumps(found[arm][-1]), file=sys.stderr)
    middle = {
        arm: {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0] if key != "arm"}
        for arm, rows in found.items()
    }
    ratios = {key: round(middle["after"][key] / middle["before"][key], 3) for key in ("four parts", "all")}
    return [{"arm": arm} | row for arm, row in middle.items()] + [{"ratio": ratios}]


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64], help="DP replicas (1 8 64)")
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[512, 4096, 65536], help="per step (512 4096 65536)"
    )
    parser.add_argument("--minibatches", type=int, default=4, help="of a step (4)")
    parser.add_argument("--running", type=int, default=0, help="requests of vLLM's decode steps; measure only these")
    parser.add_argument("--steps", type=int, default=100, help="decode steps (100)")
    parser.add_argument("--rounds", type=int, default=1, help="of both arms of vLLM's decode steps (1)")
    parser.add_argument("--arm", choices=["before", "after"], help="measure one arm in this process")
    parser.add_argument("--json", type=Path, help="write the result here as well", metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.arm:
        print(json.dumps(measure_engine(options.arm, options.running, options.steps)))
        sys.stdout.flush()
        os._exit(0)  # without vLLM's shutdown
    gc.freeze()  # as a run does after its imports
    rows = compare_engines(arguments or sys.argv[1:], options.rounds) if options.running else []
    for ranks in () if options.running else options.ranks:
        for sequences in options.sequences:
            for share in (False, True):
                parts = HostStep(sequences, ranks, share, options.minibatches).measure()
                rows.append({"ranks": ranks, "sequences": sequences, "share_prompts": share, **parts})
                rows[-1]["cpu_seconds"] = sum(parts.values())
    print(json.dumps(rows, indent=2))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
