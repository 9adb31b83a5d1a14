# SPDX-License-Identifier: Apache-2.0
"""Engines outside the job that are lost at random moments: whole jobs, or one long job.

    python tools/make_toy_task.py --out TASK
    OMP_NUM_THREADS=1 python tools/benchmarks/bench_elastic.py launch/recipes/toy_arithmetic.yaml \\
        model.path=TASK/model data.train_files=[TASK/train.jsonl] data.validation_files=[] \\
        actor.tensor_model_parallel_size=1 actor.pipeline_model_parallel_size=1 actor.sequence_parallel=false \\
        rollout.engine=hf rollout.bitwise=true trainer.log_rollouts=-1 rollout.silent_seconds=2 \\
        trainer.total_steps=3 trainer.save_freq=1 --jobs 100 --json FILE
    ... --way suspended rollout.silent_seconds=30 --jobs 8 --json FILE      # for a minute each
    ... --soak --every 20 trainer.total_steps=500 --json FILE

Each job loses one of its engines in generation, at an update of the weights, in a checkpoint or as it joins; by
kill -9, by a suspension for twice the limit, or by an exception. Losses other than at a join wait until all engines
serve, or for the last step. A lost engine is started again. A job passes if it loses an engine, ends with status 0,
and its rollouts and metrics equal an undisturbed job's, bit for bit. `unseen` counts losses that the front never saw:
the job ended first, or the engine had not joined yet. Job (one rank) and engines are forks of this process, so that a
start takes no imports. The soak measures the front's process after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import torch

import megatron_rl.engines.local.transformers  # noqa: F401 - imported once, for all forks
from megatron_rl.engines.elastic.front import Front, Member
from megatron_rl.engines.elastic.member import EngineProcess
from megatron_rl.observability import curves
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.run.checkpoints import Checkpoints
from megatron_rl.run.grpo import Trainer
from megatron_rl.run.loading import load_config
from megatron_rl.samples.experience import Experience
from tools.benchmarks.bench_soak import measure, summarize

MOMENTS = ("generation", "update", "checkpoint", "join")
WAYS = ("killed", "suspended", "raised")
_PIDS, _NOTES, _FIGURES = "pids.json", "notes.jsonl", "figures.jsonl"
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Metrics that depend on clocks, memory, or engines rather than on samples.
_MEASURED = ("time/", "memory/", "tokens/per_second", "throughput/", "mfu/", "engines/", "schedule/engine_busy")


def fork(work: Callable[[], Any], log: Path) -> BaseProcess:
    """Run a function in a fork, whose output goes to a file; its status is 1 after an exception."""

    def run() -> None:
        for name in _LAUNCHER:
            os.environ.pop(name, None)
        torch.set_num_threads(1)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    process = get_context("fork").Process(target=run)
    process.start()
    return process


def serve(run_dir: Path) -> None:
    """Be an engine of a run; raise at SIGUSR2."""

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    signal.signal(signal.SIGUSR2, fail)
    EngineProcess(run_dir, init_distributed(100.0), patience_seconds=60.0).run()


class Loss:
    """A loss of an engine in a job, in the process of the job.

    Args:
        moment, way: of `MOMENTS` and `WAYS`.
        step: from which on the moment is awaited; 0 for the first.
        delay: seconds between the moment and the loss.
    """

    def __init__(self, run_dir: Path, moment: str, way: str, step: int, delay: float, silent: float) -> None:
        self._run_dir, self.moment, self._way, self._step = run_dir, moment, way, step
        self._delay, self._silent, self._has_come = delay, silent, False

    def reach(self, moment: str, updates: int) -> None:
        """Lose an engine if this is the first such moment."""
        if not self._has_come and moment == self.moment and updates >= self._step:
            self._has_come = True
            threading.Timer(self._delay, self._act).start()

    def _act(self) -> None:
        pids = json.loads((self._run_dir / _PIDS).read_text())
        numbers = {"killed": signal.SIGKILL, "suspended": signal.SIGSTOP, "raised": signal.SIGUSR2}
        victim = random.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(victim, numbers[self._way])
            note(self._run_dir, lost=time.monotonic())
            if self._way == "suspended":
                threading.Timer(2 * self._silent, lambda: os.kill(victim, signal.SIGCONT)).start()


def note(run_dir: Path, **what: Any) -> None:
    """Append a line to the notes of a job."""
    with open(run_dir / _NOTES, "a") as file:
        file.write(json.dumps(what) + "\n")


def watch(run_dir: Path, reach: Callable[[str, int], None], count: int = 0, last: int = 0) -> None:
    """Call `reach` with each moment and the number of weight updates so far, and note when losses are seen.

    Before all of `count` engines serve, only joins count, and moments from update `last` on: a loss of an engine that
    has not joined shows nothing.
    """
    step, end_update, lose, take = Front.step, Front.end_weight_update, Front._lose, Front._take
    end_step, updates, serving = Checkpoints.end_step, [0], [0]

    def arrive(moment: str) -> None:
        if moment == "join" or serving[0] >= count or updates[0] >= last:
            reach(moment, updates[0])

    def in_step(self: Front) -> Any:
        serving[0] = sum(member.is_ready for member in self._members)
        if any(member.running for member in self._members):
            arrive("generation")
        return step(self)

    def in_update(self: Front) -> None:
        updates[0] += 1
        arrive("update")
        end_update(self)

    def in_checkpoint(self: Checkpoints, step: int, is_best: bool = False) -> None:
        arrive("checkpoint")
        end_step(self, step, is_best)

    def in_join(self: Front, member: Member, kind: str, *what: Any) -> None:
        if kind == "joined":
            arrive("join")
        take(self, member, kind, *what)

    def in_loss(self: Front, member: Member, reason: str) -> None:
        note(run_dir, seen=time.monotonic(), reason=reason)
        lose(self, member, reason)

    Front.step, Front.end_weight_update, Front._lose, Front._take = in_step, in_update, in_loss, in_join
    Checkpoints.end_step = in_checkpoint


class MeasuredTrainer(Trainer):
    """A trainer that writes figures of its process after each step."""

    def describe(self, step: int, samples: Experience) -> None:
        """Describe the step, then measure."""
        super().describe(step, samples)
        self.run.settle()  # the rollout file is open while it is written
        with open(Path(str(self.config.trainer.run_dir)) / _FIGURES, "a") as file:
            file.write(json.dumps(measure()) + "\n")


def carry_out(
    recipe: Path, overrides: Sequence[str], run_dir: Path, count: int, prepare: Callable[[], Any]
) -> tuple[int, float]:
    """Run a job with `count` engines, which are started again when lost; return its status and seconds."""
    run_dir.mkdir(parents=True)
    started = time.monotonic()
    loaded = load_config(recipe, [*overrides, "schedule.elastic=true", f"trainer.run_dir={run_dir}"])

    def train() -> None:
        curves.plot_curves = lambda run_dir: run_dir / curves.CURVES_FILE  # takes longer than a small job
        prepare()
        MeasuredTrainer.from_config(loaded.config, recipe).train()

    job, log = fork(train, run_dir / "job.log"), run_dir / "engines.log"
    engines = [fork(lambda: serve(run_dir), log) for _ in range(count)]
    while job.is_alive():
        engines = [one if one.is_alive() or not one.exitcode else fork(lambda: serve(run_dir), log) for one in engines]
        unfinished = run_dir / f"{_PIDS}.partial"
        unfinished.write_text(json.dumps([one.pid for one in engines if one.is_alive()]))
        unfinished.replace(run_dir / _PIDS)
        time.sleep(0.05)
    seconds = round(time.monotonic() - started, 2)
    for engine in engines:
        engine.join(2)
        with suppress(ProcessLookupError):
            os.kill(engine.pid or 0, signal.SIGKILL)
        engine.join()
    return job.exitcode or 0, seconds


def read_results(run_dir: Path) -> tuple[list[Any], list[Any]]:
    """Return the rollouts and the metrics that follow from them."""
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    kept = [{k: v for k, v in record.items() if not k.startswith(_MEASURED)} for record in records]
    return [(file.name, [*map(json.loads, file.read_text().splitlines())]) for file in files], kept


def read_times(run_dir: Path) -> list[float]:
    """Return the seconds from each loss until the front saw it."""
    file = run_dir / _NOTES
    notes = [*map(json.loads, file.read_text().splitlines())] if file.exists() else []
    lost = [one["lost"] for one in notes if "lost" in one]
    seen = [one["seen"] for one in notes if "seen" in one]
    return [min((after - before for after in seen if after >= before), default=-1.0) for before in lost]


def lose_at_random(
    recipe: Path,
    overrides: Sequence[str],
    work: Path,
    jobs: int,
    count: int,
    ways: Sequence[str] = WAYS,
    seed: int = 0,
) -> dict[str, Any]:
    """Run a job that loses nothing, then `jobs` that lose an engine each; return what they showed."""
    draw, found = random.Random(seed), list[dict[str, Any]]()
    config = load_config(recipe, [*overrides, "schedule.elastic=true", f"trainer.run_dir={work}"]).config
    status, undisturbed = carry_out(recipe, overrides, work / "undisturbed", count, lambda: None)
    if status:
        raise RuntimeError((work / "undisturbed" / "job.log").read_text()[-2000:])
    expected, last = read_results(work / "undisturbed"), config.trainer.total_steps or 1
    for number in range(jobs):
        run_dir, silent = work / f"job_{number}", config.rollout.silent_seconds
        moment, way = MOMENTS[number % len(MOMENTS)], ways[number // len(MOMENTS) % len(ways)]
        step = 0 if moment == "join" else draw.randint(1, max((config.trainer.total_steps or 1) - 1, 1))
        loss = Loss(run_dir, moment, way, step, 0.1 * draw.random(), silent)
        status, seconds = carry_out(recipe, overrides, run_dir, count, partial(watch, run_dir, loss.reach, count, last))
        equal = status == 0 and read_results(run_dir) == expected
        one = {"moment": moment, "way": way, "step": step, "status": status, "equal": equal, "seconds": seconds}
        found.append(one | {"seen_after": read_times(run_dir)})
        print(json.dumps(found[-1]), flush=True)
    return {
        "overrides": list(overrides),
        "engines": count,
        "jobs": jobs,
        "passed": sum(one["equal"] and len(one["seen_after"]) == 1 for one in found),
        "losses": sum(len(one["seen_after"]) for one in found),
        "unseen": sum(seen < 0 for one in found for seen in one["seen_after"]),
        "undisturbed_seconds": undisturbed,
        "largest_seconds": max(one["seconds"] for one in found),
        "each": found,
    }


def soak(recipe: Path, overrides: Sequence[str], work: Path, every: int, count: int) -> dict[str, Any]:
    """Run one job that loses an engine in the generation of every `every`-th step; return its front's figures."""
    run_dir, done = work / "soak", set[int]()

    def reach(moment: str, updates: int) -> None:
        if moment == "generation" and updates % every == 0 and updates not in done:
            done.add(updates)
            Loss(run_dir, moment, "killed", 0, 0.01, 0.0).reach(moment, updates)

    status, _ = carry_out(recipe, overrides, run_dir, count, partial(watch, run_dir, reach))
    figures = [*map(json.loads, (run_dir / _FIGURES).read_text().splitlines())]
    seconds = [one.pop("seconds") for one in figures]
    samples = [(row["prompt_id"], row["sample_index"]) for _, rows in read_results(run_dir)[0] for row in rows]
    times = read_times(run_dir)
    return {
        "overrides": list(overrides),
        "engines": count,
        "status": status,
        "steps": len(figures),
        "samples": len(samples),
        "losses": len(times),
        "largest_seen_after": max(times, default=0.0),
        "seconds_per_step": (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1),
        "front": {name: summarize([one[name] for one in figures]) for name in figures[0]},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the status is 1 if a job did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, help="of all losses (default: one after the other)")
    parser.add_argument("--soak", action="store_true", help="one job instead")
    parser.add_argument("--every", type=int, default=20, help="steps between losses of the soak")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench_elastic_", ignore_cleanup_errors=True) as name:
        common = options.recipe, options.overrides, Path(name)
        if options.soak:
            found = soak(*common, options.every, options.engines)
            is_good = found["status"] == 0
        else:
            ways = WAYS if options.way is None else (options.way,)
            found = lose_at_random(*common, options.jobs, options.engines, ways)
            is_good = found["passed"] == options.jobs
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "each"}, indent=1))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
