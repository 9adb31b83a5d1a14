# SPDX-License-Identifier: Apache-2.0
"""Small runs that go wrong on purpose, one per alarm of docs/health.md, and ten that do not.

    python tests/planted_runs.py DIRECTORY [NAME ...]    carry them out and print the table; exit code 1 if one is off

Every run is one rank of the whole program on sixteen sums, from a policy that was fine-tuned on answers most of which
are wrong. An alarm must come within the steps that are stated here; a healthy run has none in sixty steps.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]  # as a command

import torch
from elastic_runs import engines

from distributed import run_ranks
from megatron_rl.engines.elastic.member import EngineProcess
from rl_runs import fine_tune, import_engine, make_task, overrides_for, sft_overrides, train
from tiny_models import ENGINE_SIZES, save_tiny_model

HEALTHY_STEPS = 60
REWARDS = """
import random

from megatron_rl.agents.environment import Done, Observation

calls = 0

def exact(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip() == ground_truth)

def close(data_source, solution_str, ground_truth, extra_info):
    same = sum(a == b for a, b in zip(solution_str.strip(), ground_truth))
    return same / max(len(solution_str.strip()), len(ground_truth), 1)

def constant(data_source, solution_str, ground_truth, extra_info):
    return 0.5

def chance(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    return random.Random(calls).random()

def evaluated(data_source, solution_str, ground_truth, extra_info):
    parts = solution_str.strip().split("+")
    return float(all(map(str.isdigit, parts)) and sum(map(int, parts)) == int(ground_truth))

def sevens(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("7") / 8

def rescaled(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    return close(data_source, solution_str, ground_truth, extra_info) * (100 if calls > 20 * 32 else 1)

class Flaky:
    def reset(self, task):
        if int(task.ground_truth) % 8 == 3:
            raise RuntimeError("not this one")
        return Observation([])

    def step(self, reply):
        return Done()
"""
PLUGINS = """
import torch

from megatron_rl.algorithms.advantages import register_advantage_estimator
from megatron_rl.engines.protocol import register_rollout_engine
from megatron_rl.engines.local.transformers import HuggingFaceEngine

@register_advantage_estimator("longest")
def compute_longest(inputs, config):
    rollouts = inputs.find_rollouts()[inputs.loss_mask]
    lengths = torch.bincount(rollouts, minlength=len(inputs.scores))[: len(inputs.scores)].double()
    return inputs.expand(((lengths - lengths.mean()) / (lengths.std() + 1e-3)).numpy())

def drift(name, factor):
    @register_rollout_engine(name)
    class Drifting(HuggingFaceEngine):
        batches = 0

        def __init__(self, spec):
            super().__init__(spec)
            self._model.model.norm.register_forward_hook(lambda module, given, out: out * factor(self.batches))

        def step(self):
            self.batches += self.has_requests()
            return super().step()

drift("drifting", lambda step: 1 + 1e-3 * step)
drift("flat", lambda step: 1 / (1 + step / 4))
"""


@dataclass(frozen=True)
class Planted:
    """A run that goes wrong.

    Attributes:
        how: cause of the failure, for the table.
        within: step by which its alarm must have come, the last one of the run.
        settings: added to the common ones.
        model: of the task.
        engines: outside the job; one of them ends when it fetches its third weights.
        since: step before which the alarm would be a false one: by default, the first with a whole window.
    """

    how: str
    within: int
    settings: Sequence[str]
    model: str = "policy"
    engines: int = 0
    since: int = 10


PLANTED = {
    "entropy": Planted("`actor.lr` 30 times too high", 60, ["actor.lr=3e-3"]),
    "length": Planted(
        "an estimator that prefers long responses",
        60,
        ["algorithm.adv_estimator=longest", "actor.lr=1e-3", "data.max_response_length=24"],
    ),
    "mismatch": Planted(
        "an engine whose logits are 0.1% larger with every step",
        40,
        ["rollout.engine=drifting"],
    ),
    "sample-size": Planted("an engine whose logits shrink to a third within 8 steps", 40, ["rollout.engine=flat"]),
    "gradient": Planted(
        "a reward that is 100 times larger from step 21 on",
        40,
        ["reward.function=REWARDS:rescaled", "algorithm.adv_estimator=rloo"],
        since=21,
    ),
    "clipping": Planted(
        "16 epochs on each batch, at 10 times the rate, for a reward by chance",
        20,
        ["actor.ppo_epochs=16", "actor.lr=1e-3", "reward.function=REWARDS:chance"],
    ),
    "truncated": Planted("responses of one token", 12, ["data.max_response_length=1"]),
    "no-signal": Planted("a constant reward", 12, ["reward.function=REWARDS:constant"]),
    "restating": Planted(
        "a reward that evaluates sums, and a policy that sometimes repeats its prompt",
        60,
        ["reward.function=REWARDS:evaluated"],
        "restating",
    ),
    "components": Planted(
        "a reward that pays more for sevens than for the answer",
        60,
        ["reward.components=[1.0 REWARDS:sevens, 0.2 REWARDS:close]", "actor.lr=1e-3"],
    ),
    "dead-experts": Planted("routers that prefer two of eight experts", 12, [], "dead_experts"),
    "critic": Planted("`critic.lr` 1,000 times too high", 40, ["algorithm.adv_estimator=gae", "critic.lr=0.1"]),
    "engines": Planted(
        "an engine that ends in its third step and is not started again",
        20,
        ["rollout.engine=hf", "schedule.elastic=true"],
        engines=2,
        since=12,
    ),
    "failures": Planted(
        "an environment that raises for a quarter of the prompts", 12, ["agents.environment=REWARDS:Flaky"]
    ),
}
HEALTHY = {
    **{f"grpo, seed {seed}": [f"trainer.seed={seed}"] for seed in (1, 2, 3)},
    "rloo": ["algorithm.adv_estimator=rloo"],
    "reinforce++": ["algorithm.adv_estimator=reinforce_plus_plus"],
    "dr. grpo": ["algorithm.adv_estimator=dr_grpo"],
    "gspo": ["algorithm.policy_loss=gspo"],
    "ppo": ["algorithm.adv_estimator=gae", "critic.lr=1e-3", "critic.max_tokens_per_microbatch=1024"],
    "two components": ["reward.components=[1.0 REWARDS:exact, 0.5 REWARDS:close]"],
    "experts": ["model.path=EXPERTS"],
}


def make_policies(task: Path) -> None:
    """Make the task, and policies that write well-formed but often wrong answers."""
    make_task(task)
    (task / "rewards.py").write_text(REWARDS)
    (task / "plugins.py").write_text(PLUGINS)
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    wrong = [str((7 * number + 11 * other) % 30 + 4) for number, other in ((n, o) for n in range(16) for o in range(4))]
    for name, num_repeated in (("policy", 0), ("restating", 2)):
        with (task / f"{name}.jsonl").open("w") as file:
            for number, row in enumerate(rows):
                repeated = [row["prompt"].rstrip("=")] * num_repeated
                for answer in (row["answer"], *wrong[4 * number : 4 * number + 4], *repeated):
                    file.write(json.dumps({"prompt": row["prompt"], "answer": answer}) + "\n")
    sizes = ENGINE_SIZES | dict(vocab_size=16, num_hidden_layers=2)
    save_tiny_model(task / "raw_experts", "qwen3_moe", **sizes)
    unbalanced = dict(num_experts=8, num_experts_per_tok=1, norm_topk_prob=False)
    model = save_tiny_model(task / "dead_experts", "qwen3_moe", **sizes | unbalanced)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # one of the first two is above 0, which the others have
                weight[1], weight[2:] = -weight[0], 0.0
    model.save_pretrained(task / "dead_experts")
    for name in ("raw_experts", "dead_experts"):
        shutil.copy(task / "tokenizer.model", task / name)
    for name, raw, shown in (
        ("policy", "model", "policy"),
        ("experts", "raw_experts", "policy"),
        ("restating", "model", "restating"),
    ):
        settings = [f"model.path={task / raw}", f"data.train_files=[{task}/{shown}.jsonl]"]
        settings += ["data.train_batch_size=40", "trainer.total_steps=60", f"trainer.run_dir={task}/sft_{name}"]
        run_ranks(fine_tune, 1, sft_overrides(task, *settings), timeout=600)
        (task / name).symlink_to(task / f"sft_{name}/checkpoints/step_60/huggingface")


def end_one(flag: Path) -> None:
    """Let an engine end when it is to fetch its third weights, if it is the first to make the flag."""
    load = EngineProcess._load

    def end(engine: EngineProcess, version: int) -> None:
        if version == 3:
            with suppress(FileExistsError):
                flag.mkdir()
                os._exit(1)
        load(engine, version)

    EngineProcess._load = end  # pyright: ignore[reportAttributeAccessIssue]


def carry_out(
    task: Path,
    run_dir: Path,
    settings: Sequence[str],
    steps: int = HEALTHY_STEPS,
    model: str = "policy",
    num_engines: int = 0,
) -> list[tuple[str, int]]:
    """The alarms of a run and their steps."""
    found = [text.replace("REWARDS", f"{task}/rewards.py").replace("EXPERTS", f"{task}/experts") for text in settings]
    overrides = overrides_for(
        task,
        run_dir,
        f"model.path={task / model}",
        "actor.lr=1e-4",
        "actor.ppo_mini_batch_size=8",
        "actor.max_tokens_per_microbatch=1024",
        "algorithm.kl_coef=0",
        f"algorithm.plugins=[{task}/plugins.py]",
        f"reward.function={task}/rewards.py:close",
        "data.validation_files=[]",
        "observability.trackers=[]",
        "trainer.save_freq=null",
        f"trainer.total_steps={steps}",
        *found,
    )
    with engines(run_dir, num_engines, partial(end_one, run_dir.with_name("ended"))):
        (error,) = run_ranks(train, 1, overrides, timeout=600)
    assert error is None, error
    alarms = json.loads((run_dir / "summary.json").read_text())["alarms"]
    return [(alarm["name"], alarm["step"]) for alarm in alarms]


def check(task: Path, directory: Path, names: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """Whether each run had the alarms that it should have, and its row of the table."""
    for name in names:
        run_dir = directory / name.replace(" ", "_")
        if name in HEALTHY:
            alarms = carry_out(task, run_dir, HEALTHY[name])
            yield not alarms, f"| {name} | - | - | {_list(alarms) or 'none'} |"
            continue
        plant = PLANTED[name]
        alarms = carry_out(task, run_dir, plant.settings, plant.within, plant.model, plant.engines)
        steps = [step for alarm, step in alarms if alarm == name]
        others = [(alarm, step) for alarm, step in alarms if alarm != name]
        row = f"| [{name}](#{name}) | {plant.how} | {steps[0] if steps else '-'} | {plant.within} | {_list(others)} |"
        yield bool(steps) and plant.since <= steps[0] <= plant.within, row


def _list(alarms: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{alarm} ({step})" for alarm, step in alarms)


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    directory = Path(arguments[0])
    task = directory / "task"
    import_engine()
    task.mkdir(parents=True)
    make_policies(task)
    is_right = True
    for is_one, row in check(task, directory, arguments[1:] or [*PLANTED, *HEALTHY]):
        print(("ok   " if is_one else "OFF  ") + row, flush=True)
        is_right &= is_one
    return 0 if is_right else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
