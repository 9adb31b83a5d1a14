# SPDX-License-Identifier: Apache-2.0
"""Small runs of the whole program with recorded numbers, and the comparison with the recordings.

    python tests/golden_runs.py record [NAME ...]     write tests/golden/NAME.json
    python tests/golden_runs.py compare [NAME ...]    print the differences; exit code 1 if there are any

A recording holds every metric that does not depend on clock and memory, digests of the columns of the rollouts files,
and digests of the last checkpoint: weights and optimizer states of every trained role, and the policy in HF format.
The numbers of a rollouts file are rounded to six decimals; metrics and weights are compared to the last bit.

The runs use nothing of the package but its command line, its files, and the reader of its checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]  # as a command

import numpy as np
import torch
from mtp_models import save_model_with_mtp
from safetensors.torch import load_file

from distributed import run_ranks
from megatron_rl.checkpoint.torch_dist import ChunkReader
from rl_runs import (
    fine_tune,
    import_engine,
    layout_overrides,
    make_task,
    overrides_for,
    read_records,
    sft_overrides,
    train,
)
from tiny_models import ENGINE_SIZES, save_tiny_model

GOLDEN = Path(__file__).parent / "golden"
Recording = dict[str, Any]
# Largest relative difference of a number under other kernels. AVX2 in place of AVX512, and plain C++ with oneDNN and
# MKL at AVX2, give at most 2.2e-5 (metrics), 1.7e-6 (rollouts), 1.7e-5 (weights, states of Adam); no token differs.
BOUNDS = {"metrics": 1e-4, "rollouts": 1e-5, "weights": 1e-4}
# A count of rounding errors above zero: in gspo_tis weights are truncated at 1, and all are 1 but for rounding.
ROUNDING = {"mismatch/truncated_fraction"}


# Variables that keep libraries from instructions that the CPU has.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")


PROGRAM = """
import openai
from megatron_rl.agents.environment import Done, Observation

class Echo:
    def reset(self, task):
        return Observation([])

    def step(self, reply):
        return Observation([{"role": "tool", "content": "12="}], reward=0.25 * ("1" in reply.text))

def agent(task, base_url):
    client = openai.OpenAI()
    reply = client.completions.create(model="policy", prompt=task.prompt, max_tokens=6).choices[0].text
    if "1" in reply:
        client.completions.create(model="policy", prompt="1" + task.prompt, max_tokens=6)
    return 0.25 * len(set(reply))
"""


@dataclass(frozen=True)
class GoldenRun:
    """One run.

    Attributes:
        settings: overrides of its command line; "{task}" is the directory of the task, "{traces}" that of the traces.
        legs: further overrides of each start in the same run directory; the last one ends the run.
        recording: name of the recording that it must give; default: its own name.
        is_sft: whether it is supervised fine-tuning.
    """

    world_size: int
    settings: list[str]
    legs: list[list[str]] = field(default_factory=lambda: [[]])
    recording: str | None = None
    is_sft: bool = False


NO_VALIDATION = ["data.validation_files=[]"]
PPO = [
    *NO_VALIDATION,
    *layout_overrides(1, 2, 1),
    "critic.tensor_model_parallel_size=2",
    "critic.sequence_parallel=true",
    "critic.max_tokens_per_microbatch=96",
    "critic.lr=1e-3",
    "algorithm.adv_estimator=gae",
    "algorithm.gae_lambda=0.95",
    "algorithm.kl_in=reward",
    "algorithm.kl_target=0.01",
    "algorithm.kl_horizon=64",
    "algorithm.dual_clip=3.0",
    "trainer.total_steps=3",
]
STALE = ["algorithm.importance_sampling=token-truncate", "rollout.max_num_seqs=3", "trainer.total_steps=4"]
APART = ["placement.actor=0", "placement.reference=0", "placement.rollout=1"]
LORA = ["actor.lora.rank=4", "actor.lora.alpha=32", "checkpoint.contents=[optimizer,huggingface]"]
RUNS: dict[str, GoldenRun] = {
    "grpo": GoldenRun(4, layout_overrides(2, 2, 1)),
    "grpo_vllm_tp2": GoldenRun(4, layout_overrides(2, 2, 2)),
    "ppo": GoldenRun(2, PPO),
    "ppo_resumed": GoldenRun(2, PPO, [["trainer.total_steps=1"], []], recording="ppo"),
    "reward_model": GoldenRun(
        2,
        [
            "reward_model.path={task}/reward_model",
            "reward_model.tensor_model_parallel_size=2",
            "reward_model.max_tokens_per_microbatch=64",
            "reward.components=[2.0 model, 0.5 {task}/reward.py:score]",
            "rollout.validation_n=3",
            "rollout.validation_temperature=1.0",
            "actor.share_prompts=false",
        ],
    ),
    "dapo": GoldenRun(
        2,
        [
            *NO_VALIDATION,
            "reward.function={task}/dapo.py:score",
            "algorithm.dynamic_sampling=true",
            "algorithm.clip_eps_high=0.28",
            "algorithm.kl_coef=0",
            "reward.overlong_buffer_length=4",
            "algorithm.mask_truncated=true",
            "algorithm.loss_agg_mode=token-mean",
        ],
    ),
    "remax": GoldenRun(
        2, [*NO_VALIDATION, "algorithm.adv_estimator=remax", "rollout.n=2", "algorithm.policy_loss=policy_gradient"]
    ),
    "gspo_tis": GoldenRun(
        2,
        [
            *NO_VALIDATION,
            *layout_overrides(2, 1, 1),
            "algorithm.policy_loss=gspo",
            "actor.ppo_epochs=2",
            "algorithm.loss_agg_mode=seq-mean-token-mean",
            "algorithm.importance_sampling=token-truncate",
            "algorithm.importance_high=1.0",
            "algorithm.entropy_coef=0.01",
        ],
    ),
    "cp2": GoldenRun(2, [*NO_VALIDATION, "actor.context_parallel_size=2"]),
    "moe_ep2": GoldenRun(2, [*NO_VALIDATION, "model.path={task}/moe", "actor.expert_model_parallel_size=2"]),
    "static": GoldenRun(2, [*NO_VALIDATION, "actor.step_mode=static"]),
    "hf_engine": GoldenRun(2, [*layout_overrides(2, 1, 1), "rollout.engine=hf"]),
    "sft": GoldenRun(2, [*layout_overrides(1, 2, 1), "trainer.total_steps=3"], is_sft=True),
    "shared_prompts": GoldenRun(
        2,
        [
            *NO_VALIDATION,
            "actor.max_tokens_per_microbatch=40",
            "rollout.n=6",
            "actor.ppo_mini_batch_size=8",
            "actor.ppo_epochs=2",
        ],
    ),
    "otb_kl_cov": GoldenRun(
        2,
        [
            *NO_VALIDATION,
            "algorithm.adv_estimator=optimal_token_baseline",
            "algorithm.policy_loss=kl_cov",
            "algorithm.options.kl_cov.ratio=0.1",
            "algorithm.options.kl_cov.coef=1.0",
            "actor.ppo_epochs=2",
            "algorithm.importance_sampling=product-truncate",
            "algorithm.importance_normalize=true",
        ],
    ),
    # Samples of older weights; engines stop after a count of decode steps, or at the steps of a trace.
    "stale": GoldenRun(2, [*NO_VALIDATION, *STALE, "schedule.max_staleness=1", "schedule.steps_per_update=2"]),
    "stale_replayed": GoldenRun(
        2, [*NO_VALIDATION, *STALE, *APART, "schedule.max_staleness=2", "schedule.replay={traces}/stale_replayed"]
    ),
    "apart": GoldenRun(
        2,
        [
            *NO_VALIDATION,
            *STALE,
            *APART,
            "schedule.max_staleness=1",
            "schedule.steps_per_update=2",
            "reward.function={task}/dapo.py:score",
            "algorithm.dynamic_sampling=true",
        ],
    ),
    # Every second episode sends another request with a changed history, which begins a branch.
    "branches": GoldenRun(
        2,
        [
            *NO_VALIDATION,
            "agents.program={task}/program.py:agent",
            "data.max_response_length=16",
            "algorithm.policy_loss=gspo",
            "actor.ppo_epochs=2",
        ],
    ),
    "turns": GoldenRun(
        2,
        [
            *NO_VALIDATION,
            "agents.environment={task}/program.py:Echo",
            "agents.max_turns=3",
            "data.max_response_length=24",
            "actor.max_tokens_per_microbatch=256",
        ],
    ),
    "lora_merge": GoldenRun(2, [*NO_VALIDATION, *LORA, *layout_overrides(2, 1, 1), "hybrid.lora=merge"]),
    "lora_adapter": GoldenRun(2, [*NO_VALIDATION, *LORA, "hybrid.lora=adapter"]),
    "zero3": GoldenRun(2, [*NO_VALIDATION, "actor.zero_stage=3"]),
    "teacher": GoldenRun(
        2,
        [
            *NO_VALIDATION,
            "algorithm.adv_estimator=distill",
            "algorithm.kl_coef=0",
            "algorithm.distillation.kind=top_k",
            "algorithm.distillation.k=4",
            "teachers.other.path={task}/other",
            "teachers.other.tensor_model_parallel_size=2",
            "teachers.other.sequence_parallel=true",
        ],
    ),
    "moe_replayed": GoldenRun(
        4,
        [
            *NO_VALIDATION,
            *layout_overrides(2, 2, 1),
            "model.path={task}/moe",
            "rollout.engine=hf",
            "actor.router_replay=engine",
        ],
    ),
    # Its recording is older than `rollout.draft_tokens`, which is 0.
    "mtp": GoldenRun(1, [*NO_VALIDATION, "model.path={task}/mtp", "actor.mtp_lr=1e-2"]),
}


def make_golden_task(directory: Path) -> None:
    """Make the task of sixteen sums, with the further models and rewards of the runs."""
    make_task(directory)
    vocab = json.loads((directory / "model/config.json").read_text())["vocab_size"]
    sizes = ENGINE_SIZES | dict(vocab_size=vocab, num_hidden_layers=2)
    save_tiny_model(directory / "reward_model", "qwen2", **sizes, num_labels=1)
    save_tiny_model(directory / "moe", "qwen3_moe", **sizes)
    save_tiny_model(directory / "other", "qwen2", **sizes | dict(num_hidden_layers=4))
    save_model_with_mtp(directory / "mtp", "glm4_moe", **ENGINE_SIZES, vocab_size=vocab)
    for name in ("moe", "other", "mtp"):
        shutil.copy(directory / "tokenizer.model", directory / name)
    # The same for every response to half of the prompts.
    (directory / "dapo.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 if int(ground_truth) % 4 == 1 else sum(map(ord, solution_str)) / 1000\n"
    )
    (directory / "program.py").write_text(PROGRAM)


def carry_out(run: GoldenRun, task: Path, run_dir: Path, *extra: str) -> Recording:
    """Run the program, each leg in new forks, and read its output files."""
    for leg in run.legs:
        settings = [setting.format(task=task, traces=GOLDEN / "traces") for setting in (*run.settings, *leg, *extra)]
        # Recorded when an engine had whole groups: which samples run together decides the last bits of log-probs.
        settings += ["trainer.log_rollouts=-1", "observability.trackers=[]", "rollout.dispatch=groups"]
        program: Callable[..., Any] = fine_tune if run.is_sft else train
        overrides = (
            sft_overrides(task, f"trainer.run_dir={run_dir}", *settings)
            if run.is_sft
            else overrides_for(task, run_dir, *settings)
        )
        assert run_ranks(program, run.world_size, overrides, timeout=170) == [None] * run.world_size
    return observe(run_dir)


def observe(run_dir: Path) -> Recording:
    """Read the recording of a run directory."""
    return {
        "machine": describe_machine(),
        "metrics": _read_metrics(run_dir),
        "rollouts": _read_rollouts(run_dir),
        "weights": _read_weights(run_dir / "checkpoints/latest"),
    }


def describe_machine() -> dict[str, str]:
    """Return everything that affects the last bits of a float32: kernels, their selection, and library versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    vectors = [flag for flag in sorted(cpu.get("flags", "").split()) if flag.startswith(("avx", "amx", "fma"))]
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    packages = ("torch", "vllm", "megatron.core", "transformers")
    return {
        "cpu": " ".join(cpu.get(name, "unknown") for name in ("vendor_id", "cpu family", "model")),
        "instructions": " ".join([torch.backends.cpu.get_cpu_capability(), *limits, *vectors]),
        **{name: importlib.import_module(name).__version__ for name in packages},
    }


def _read_metrics(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Read metrics.jsonl: key -> step -> value."""
    found: dict[str, dict[str, Any]] = {}
    for record in read_records(run_dir):
        for key in sorted(record):
            found.setdefault(key, {})[str(record["step"])] = record[key]
    return found


def _read_rollouts(run_dir: Path) -> dict[str, Any]:
    """Column -> step -> digest of the whole column, and mean and size of its numbers."""
    found: dict[str, Any] = {}
    for path in (run_dir / "rollouts").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for name in sorted({name for row in rows for name in row}):
            column = [row.get(name) for row in rows]
            entry = {"sha256": _digest(json.dumps(column, sort_keys=True).encode())}
            numbers = np.array(list(_numbers(column)), np.float64)
            if len(numbers):
                entry["size"] = _summarize(numbers)
            found.setdefault(name, {})[path.stem.removeprefix("step_")] = entry
    return found


def _read_weights(checkpoint: Path) -> dict[str, Any]:
    """Part -> digest of all its tensors, and mean and size of each."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for metadata in sorted(checkpoint.glob("*/.metadata")):
        reader = ChunkReader(metadata.parent)
        tensors = parts.setdefault(metadata.parent.name, {})
        for name, (shape, dtype) in sorted(reader.tensors.items()):
            tensors[name] = torch.empty(shape, dtype=dtype)
            reader.read(name, tuple((0, size) for size in shape), tensors[name])
    parts["huggingface"] = {}
    for path in sorted(checkpoint.glob("huggingface/*.safetensors")):  # the model, or the merged model and the adapter
        parts["huggingface"].update(load_file(path))
    return {part: _describe_tensors(tensors) for part, tensors in parts.items()}


def _describe_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    digest = hashlib.sha256()
    summaries: dict[str, Any] = {}
    for name, tensor in sorted(tensors.items()):
        flat = tensor.contiguous().flatten()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
        summaries[name] = _summarize(flat.double().numpy())
    return {"sha256": digest.hexdigest()[:32], "tensors": summaries}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield float(value)


def _summarize(numbers: np.ndarray) -> list[float]:
    """Mean and root mean square, for the comparison within bounds."""
    mean, square = (math.fsum(values) / max(len(values), 1) for values in (numbers, numbers**2))
    return [float(f"{value:.9g}") for value in (mean, math.sqrt(square))]


@dataclass
class Comparison:
    """Comparison of a run with its recording.

    Attributes:
        is_exact: whether all bits had to be equal: the recording was made with the same kernels.
        counts: part of the recording -> values compared; gaps: part -> largest relative difference of
            its numbers.
        differences: one line each.
        added: keys that the recording lacks.
        flip: first step whose tokens differ, on another machine; comparison stops there.
    """

    is_exact: bool
    counts: dict[str, int] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    flip: int | None = None


def compare(expected: Recording, found: Recording) -> Comparison:
    """Compare a run with a recording: equal on the same kernels, within BOUNDS on others."""
    result = Comparison(expected["machine"] == found["machine"])
    before, after = (dict(_flatten({part: r[part] for part in BOUNDS})) for r in (expected, found))
    if not result.is_exact:
        steps = [
            int(path[2])
            for path, value in before.items()
            if path[:2] == ("rollouts", "tokens") and path[3] == "sha256" and after.get(path) != value
        ]
        result.flip = min(steps, default=None)
    for path, value in before.items():
        part, name = path[0], ".".join(path[1:])
        if path not in after:
            result.differences.append(f"{part}: {name} is gone")
        elif result.is_exact or not _is_left_out(path, result.flip):
            result.counts[part] = result.counts.get(part, 0) + 1
            gap = _relative_gap(value, after[path])
            result.gaps[part] = max(result.gaps.get(part, 0.0), gap if math.isfinite(gap) else 0.0)
            if not gap <= (0.0 if result.is_exact else BOUNDS[part]):  # NaN as well
                result.differences.append(f"{part}: {name} was {value!r}, is {after[path]!r}")
    if result.flip == 1:
        result.differences.append("rollouts: tokens differ in the first step, nothing is left to compare")
    result.added = sorted({f"{path[0]}: {path[1]}" for path in after.keys() - before.keys()})
    return result


def _flatten(tree: dict[str, Any], *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, *path, name)
        else:
            yield (*path, name), value


def _is_left_out(path: tuple[str, ...], flip: int | None) -> bool:
    """Return whether a value may differ on another machine."""
    if path[1] in ROUNDING:
        return True
    if path[-1] == "sha256":
        return path[:2] != ("rollouts", "tokens") or (flip is not None and int(path[2]) >= flip)
    return flip is not None and (path[0] == "weights" or int(path[2]) >= flip)


def _relative_gap(expected: Any, found: Any) -> float:
    """Of numbers relative to themselves or 1, whichever is larger; of means and sizes relative to the size; of digests
    0 or infinity."""
    if isinstance(expected, list) and isinstance(found, list):
        largest = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        return largest / max(expected[1], 1e-12)
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return abs(found - expected) / max(abs(expected), 1.0)
    return 0.0 if expected == found else math.inf


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of the runs (all): {', '.join(RUNS)}")
    options = parser.parse_args(arguments)
    import_engine()
    is_equal = True
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        task = Path(scratch, "task")
        task.mkdir()
        make_golden_task(task)
        for name in options.names or RUNS:
            run = RUNS[name]
            found = carry_out(run, task, Path(scratch, name))
            path = GOLDEN / f"{run.recording or name}.json"
            if options.action == "record" and run.recording is None:
                path.write_text(json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n")
            result = compare(json.loads(path.read_text()), found)
            print("\n".join(describe(name, result)), flush=True)
            is_equal &= not result.differences
    return 0 if is_equal else 1


def describe(name: str, result: Comparison, most: int = 20) -> Iterator[str]:
    """Yield the lines of the table: parts with their largest difference, differences, new keys."""
    kind = "to the last bit" if result.is_exact else "other kernels, within bounds"
    for part, count in result.counts.items():
        differs = any(line.startswith(part) for line in result.differences)
        gap = result.gaps[part]
        yield f"{name:16} {part:9} {count:5} values  {kind:28}  " + (
            f"DIFFERENT, largest relative difference {gap:.2g}" if differs else "equal" if not gap else f"{gap:.2g}"
        )
    if result.flip is not None:
        yield f"{name:16} tokens differ from step {result.flip} on, which is not compared"
    yield from (f"    {line}" for line in result.differences[:most])
    if len(result.differences) > most:
        yield f"    and {len(result.differences) - most} more"
    if result.added:
        yield f"    new: {', '.join(result.added)}"


if __name__ == "__main__":
    sys.exit(main())
