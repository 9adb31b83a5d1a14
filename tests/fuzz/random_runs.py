# SPDX-License-Identifier: Apache-2.0
"""Runs of the whole program with random settings, on 1 to 4 ranks that are forks of this process.

    python tests/fuzz/random_runs.py 17           the run of seed 17
    python tests/fuzz/random_runs.py 0 200        those of seeds 0 to 199, one line each

A run must end well with finite numbers, or be refused: a UserError of four parts, the same on every rank. Everything
else is a problem. The large choices (model, layout, engine, estimator, episodes, schedule, placement, adapters, ...)
are drawn together, so that most runs are valid; every other setting of the declarations has a small chance of a random
value. Whether a setting is drawn depends on the seed and on its name alone: a new setting changes few runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]  # as a command

from chat_templates import write_chat_tokenizer

from distributed import run_ranks
from golden_runs import make_golden_task
from megatron_rl.config.fields import FieldInfo, list_fields
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from rl_runs import import_engine, overrides_for, sft_module, sft_overrides, trainer_module
from tiny_models import ENGINE_SIZES, save_tiny_model

LIMIT_SECONDS = float(os.environ.get("MEGATRON_RL_FUZZ_LIMIT", "300"))  # of one run; a server starts in most of it
GRACE_SECONDS = 30.0  # the guard keeps rank 0 for a second after the others
STEPS = 2
CHANCE = 0.012  # of each other setting, of which there are more than two hundred
# Settings that are drawn together with others, or that reach outside of the run directory, or wait for somebody.
NOT_ALONE = re.compile(
    r".*(path|_parallel_size|_key|_files|_length|batch_size|zero_stage)$|model\.|placement\.|layout\.|teachers\."
    r"|rollout\.(engine|server|kv_cache|gpu_|engine_options|n$)|schedule\.(replay|max_staleness)|algorithm\.plugins"
    r"|agents\.(environment|program|tools)|reward\.(function|components|service|timeout)|data\.weights"
    r"|trainer\.(run_dir|total|debug|profile|collective|capture|best)|observability\.(trackers|wandb|status)"
    r"|checkpoint\.resume|.*memory_gib|.*worker_secrets"
)
ESTIMATORS = (
    *("grpo", "grpo", "grpo", "grpo", "gae", "gae", "gae", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "distill"),
    *("optimal_token_baseline", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"),
    "tir_optimal_token_baseline",
)
LOSSES = (
    *("ppo", "ppo", "ppo", "gspo", "geo_mean", "cispo", "sapo"),
    *("dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "dro", "policy_gradient"),
)
CORRECTIONS = (
    *("token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "product-truncate", "product-mask"),
    "bypass",
)
ENVIRONMENTS = """
import openai
from megatron_rl.agents.environment import Done, Observation

class OneTurn:
    def reset(self, task):
        return Observation([])

    def step(self, reply):
        return Done()

class Echo(OneTurn):
    def step(self, reply):
        return Observation([{"role": "tool", "content": "12="}], reward=0.25 * ("1" in reply.text))

def agent(task, base_url):
    openai.OpenAI().completions.create(model="policy", prompt=task.prompt)
"""


@dataclass
class Draw:
    """One run: its seed, its ranks, its settings, "{task}" for the directory of the task, and its program."""

    seed: int
    world_size: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    is_sft: bool = False

    def overrides(self, task: Path, run_dir: Path) -> list[str]:
        """The command line; later settings overrule earlier ones."""
        extra = [f"{name}={_write(value)}".replace("{task}", str(task)) for name, value in self.settings.items()]
        if self.is_sft:
            return sft_overrides(task, f"trainer.total_steps={STEPS}", f"trainer.run_dir={run_dir}", *extra)
        return overrides_for(task, run_dir, f"trainer.total_steps={STEPS}", *extra)

    def describe(self) -> str:
        """Return the number of ranks and the deviations from the usual run."""
        settings = shlex.join(f"{name}={_write(value)}" for name, value in self.settings.items())
        program = "pretrain_sft.py" if self.is_sft else "pretrain_grpo.py"
        return f"torchrun --nproc-per-node {self.world_size} launch/{program} ... {settings}"


class Problem(AssertionError):
    """A run that neither ended well nor was refused."""


def draw(seed: int) -> Draw:
    """Draw the run of a seed."""
    rng = random.Random(seed)
    found = Draw(seed, rng.choices((1, 2, 3, 4), (3, 5, 1, 3))[0], is_sft=rng.random() < 0.08)
    settings, world = found.settings, found.world_size
    has_experts, batch = rng.random() < 0.25, rng.choice((4, 6, 8, 12))
    apart = "" if found.is_sft or world < 2 else _pick(rng, none=6, engines=1, critic=1).replace("none", "")
    trained = world // 2 if apart else world
    settings |= {"model.path": "{task}/moe" if has_experts else "{task}/model"}
    settings |= {
        "model.dtype": _pick(rng, float32=14, bfloat16=1),
        "trainer.seed": seed,
        "data.train_batch_size": batch,
    }
    settings |= _draw_training(rng, "actor", trained, has_experts)
    if found.is_sft:
        return found
    settings |= {"actor.ppo_mini_batch_size": rng.choice((None, batch // 2, batch)), "rollout.n": rng.choice((2, 4))}
    settings |= {"actor.ppo_epochs": rng.choice((1, 1, 1, 2))}
    settings |= _draw_algorithm(rng, world, settings, apart)
    settings |= _draw_engine(rng, world - trained if apart == "engines" else world, settings, apart)
    settings |= {**_draw_rewards(rng, world), **_draw_episodes(rng, settings), **_draw_schedule(rng)}
    return found if rng.random() < 0.3 else Draw(seed, world, settings | _draw_others(seed))


def _pick(rng: random.Random, **weights: float) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]


def _draw_layout(rng: random.Random, section: str, world: int, has_experts: bool) -> dict[str, Any]:
    """Sizes whose product divides the ranks, but for a few."""
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
    sizes, left = dict.fromkeys(names, 1), world
    for name in rng.sample(names, 3):
        divisors = [n for n in range(1, left + 1) if left % n == 0]
        sizes[name] = rng.choice([1, *divisors])
        left //= sizes[name]
    if rng.random() < 0.03:
        sizes[rng.choice(names)] = 3
    found: dict[str, Any] = {f"{section}.{name}": size for name, size in sizes.items() if size > 1}
    if sizes["tensor_model_parallel_size"] > 1:
        found[f"{section}.sequence_parallel"] = rng.random() < 0.8 or has_experts
    if sizes["pipeline_model_parallel_size"] == 2 and rng.random() < 0.2:
        if section == "actor":
            found["actor.virtual_pipeline_model_parallel_size"] = 2
        else:
            found[f"{section}.pipeline_model_parallel_layout"] = rng.choice(("Et|t|t|tL", "E|t|tt|tL"))
    if has_experts:
        shared = left * sizes["context_parallel_size"]
        found[f"{section}.expert_model_parallel_size"] = rng.choice((1, 2)) if shared % 2 == 0 else 1
    return found | {f"{section}.max_tokens_per_microbatch": rng.choice((64, 128, 256))}


def _draw_training(rng: random.Random, section: str, world: int, has_experts: bool) -> dict[str, Any]:
    found = _draw_layout(rng, section, world, has_experts)
    found[f"{section}.lr"] = "0.001"
    if rng.random() < 0.2:
        found[f"{section}.lora.rank"] = rng.choice((2, 4))
        if rng.random() < 0.3:
            found |= {"actor.quantization": "nf4"} if section == "actor" else {}
        elif rng.random() < 0.3 and section == "actor":
            found["hybrid.lora"] = "adapter"
    if rng.random() < 0.15:
        found[f"{section}.zero_stage"] = 3
    elif rng.random() < 0.2:
        found[f"{section}.step_mode"] = _pick(rng, static=9, graph=1)
    if rng.random() < 0.1 and f"{section}.zero_stage" not in found:
        found[f"{section}.optimizer"] = "muon"
    if rng.random() < 0.2:
        found[f"{section}.recompute_granularity"] = rng.choice(("selective", "full"))
    if section == "actor" and rng.random() < 0.2:
        found[f"{section}.share_prompts"] = rng.choice((False, "tree"))
    return found


def _draw_engine(rng: random.Random, world: int, settings: dict[str, Any], apart: str) -> dict[str, Any]:
    weights = dict(vllm=45, hf=20, vllm_server=4, openai=1, sglang=1)
    is_whole = not apart and settings.get("actor.zero_stage") != 3
    engine = _pick(rng, **weights, megatron=28 if is_whole else 1)
    found: dict[str, Any] = {"rollout.engine": engine}
    if engine.startswith("vllm") and world % 2 == 0 and rng.random() < 0.4:
        found["rollout.tensor_model_parallel_size"] = 2
    if rng.random() < 0.25:
        truncation = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_tokens": 3, "temperature": 0.7}
        name = rng.choice(list(truncation))
        found[f"rollout.{name}"] = truncation[name]
    if rng.random() < 0.1:
        found["rollout.bitwise"] = True
    if "moe" in settings["model.path"] and rng.random() < 0.5:
        found["actor.router_replay"] = rng.choice(("engine", "trainer"))
    return found


def _draw_algorithm(rng: random.Random, world: int, settings: dict[str, Any], apart: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "algorithm.adv_estimator": "gae" if apart == "critic" else rng.choice(ESTIMATORS),
        "algorithm.policy_loss": rng.choice(LOSSES),
    }
    modes = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
    found |= {"algorithm.loss_agg_mode": rng.choice(modes), "algorithm.kl_coef": rng.choice((0, 0, 0.01, 0.1))}
    if found["algorithm.kl_coef"]:
        found["algorithm.kl_in"] = _pick(rng, loss=3, reward=1)
    if rng.random() < 0.3:
        found["algorithm.importance_sampling"] = rng.choice(CORRECTIONS)
    if rng.random() < 0.1:
        found |= {"algorithm.dynamic_sampling": True, "algorithm.max_sampling_rounds": 2}
    if found["algorithm.adv_estimator"] == "gae":
        found |= _draw_training(rng, "critic", world // 2 if apart else world, "moe" in settings["model.path"])
        found.pop("hybrid.lora", None)
    first, second = f"0-{world // 2 - 1}", f"{world // 2}-{world - 1}"
    if apart:
        found |= {"placement.actor": first, f"placement.{apart.replace('engines', 'rollout')}": second}
    if apart == "engines":  # other trained roles share the actor's ranks
        found |= {"placement.critic": first} if found["algorithm.adv_estimator"] == "gae" else {}
        found |= {"placement.reference": first} if found["algorithm.kl_coef"] else {}
    if found["algorithm.adv_estimator"] == "distill" or rng.random() < 0.06:
        found |= {
            "teachers.wise.path": "{task}/teacher",
            "algorithm.distillation.kind": rng.choice(("sampled", "full")),
        }
        if rng.random() < 0.3:
            found |= {"algorithm.distillation.kind": "top_k", "algorithm.distillation.k": 4}
    return found


def _draw_rewards(rng: random.Random, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.15:
        found |= {
            "reward_model.path": "{task}/reward_model",
            "reward.components": ["2.0 model", "0.5 {task}/reward.py:score"],
        }
        found |= _draw_layout(rng, "reward_model", world, False)
    elif rng.random() < 0.15:
        found |= {"reward.workers": 1}
    if rng.random() < 0.15:
        found |= {"data.train_files": ["{task}/train.jsonl", "{task}/more.jsonl"], "data.weights": [1.0, 3.0]}
    if rng.random() < 0.5:
        found["data.validation_files"] = []
    return found


def _draw_episodes(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    if rng.random() > 0.2:
        return {}
    kind = rng.choice(("OneTurn", "Echo", "agent", "tools", "calculator"))
    if kind == "agent":
        return {"agents.program": "{task}/environments.py:agent"}
    if kind in ("OneTurn", "Echo"):
        return {"agents.environment": f"{{task}}/environments.py:{kind}", "agents.max_turns": rng.choice((1, 2))}
    found = {"model.path": "{task}/chats/model", "data.train_files": ["{task}/chats/train.jsonl"]}
    found |= {"data.validation_files": [], "data.max_prompt_length": 450, "data.max_response_length": 32}
    found |= {"data.weights": None}
    roles = ["actor", "critic", "reward_model", *["teachers.wise"][: "teachers.wise.path" in settings]]
    found |= {f"{role}.max_tokens_per_microbatch": 1024 for role in roles}
    choice = {"agents.tools": ["calculator"]} if kind == "tools" else {"agents.environment": "calculator"}
    return found | choice | {"agents.max_turns": 2}


def _draw_schedule(rng: random.Random) -> dict[str, Any]:
    if rng.random() > 0.25:
        return {}
    found = {"schedule.max_staleness": rng.choice((1, 1, 2)), "schedule.updates": _pick(rng, in_flight=3, drain=1)}
    found["schedule.order"] = _pick(rng, stream=3, whole=1)
    if rng.random() < 0.3:
        found["schedule.steps_per_update"] = rng.choice((2, 4))
    found["algorithm.importance_sampling"] = rng.choice(("token-truncate", "sequence-mask", "bypass"))
    return found


def _draw_others(seed: int) -> dict[str, Any]:
    found = {}
    for name, info in list_fields(teachers=()).items():
        rng = random.Random(f"{seed} {name}")  # whatever other settings there are
        if rng.random() < CHANCE and not NOT_ALONE.match(name):
            with contextlib.suppress(LookupError):
                found[name] = _draw_value(rng, info)
    return found


def _draw_value(rng: random.Random, info: FieldInfo) -> Any:
    """A value of the setting's type, often one that makes sense; LookupError for texts."""
    if info.accepts_none and rng.random() < 0.15:
        return None
    if info.choices:
        return rng.choice(info.choices)
    numbers = [info.default] * 3 if isinstance(info.default, int | float) else []
    values = {
        bool: [True, False],
        int: [0, 1, 1, 2, 2, 3, 4, 8, -1, *numbers],
        float: [0.0, 0.1, 0.3, 0.5, 0.5, 0.9, 1.0, 2.0, -1.0, 1e9, *numbers],
        list[int]: [[], [1], [32, 64], [0]],
        list[int | str]: [[], [1], ["1"], [7, "x"]],
        list[float]: [[], [0.5], [0.0, 1.0]],
    }
    return rng.choice(values[info.kind])


def _write(value: Any) -> str:
    """Format a value as YAML reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def make_fuzz_task(directory: Path) -> None:
    """The task of sums with a mixture, a reward model, environments, and chats with a model of their own."""
    make_golden_task(directory)
    for name, family in (("model", "qwen2"), ("moe", "qwen3_moe")):  # of four layers, which interleaved stages need
        sizes = json.loads((directory / name / "config.json").read_text())
        save_tiny_model(directory / name, family, **ENGINE_SIZES, vocab_size=sizes["vocab_size"], num_hidden_layers=4)
    shutil.copytree(directory / "model", directory / "teacher")
    save_tiny_model(directory / "teacher", "qwen3", **ENGINE_SIZES, vocab_size=sizes["vocab_size"], num_hidden_layers=2)
    (directory / "environments.py").write_text(ENVIRONMENTS)
    shutil.copy(directory / "train.jsonl", directory / "more.jsonl")
    chats = directory / "chats"
    tokenizer = write_chat_tokenizer(chats / "model", "qwen2.5")
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "answer": f"{n}"} for n in range(16)]
    (chats / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ENGINE_SIZES | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "max_position_embeddings": 1024}
    save_tiny_model(chats / "model", "qwen2", **sizes, vocab_size=tokenizer.vocab_size, num_hidden_layers=2)


def _run_rank(rank: int, world_size: int, overrides: Sequence[str], is_sft: bool, console: Path) -> Any:
    """The four parts of the error that refuses the run, if one does."""
    descriptor = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    # pytest has replaced sys.stderr, to which the guard of a run writes its error.
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        config = load_config(None, overrides).config
        if is_sft:
            sft_module.train_sft(config, None)
        else:
            trainer_module.Trainer.from_config(config).train()
    except UserError as error:
        return error.found, error.source, error.expected, error.hint
    return None


def carry_out(found: Draw, task: Path, directory: Path) -> str:
    """Run the program.

    Args:
        found: result of `draw`.
        task: made by `make_fuzz_task`.
        directory: run directory, removed at the end.

    Returns:
        "ended", or "refused: " and the refused value.

    Raises:
        Problem: it hung, crashed, was refused by some ranks only, or has numbers that are not finite.
    """
    overrides, console = found.overrides(task, directory), directory.with_name(f"{directory.name}.console")
    try:
        try:
            args = (overrides, found.is_sft, console)
            results = run_ranks(_run_rank, found.world_size, *args, timeout=LIMIT_SECONDS, grace=GRACE_SECONDS)
        except AssertionError as error:
            ended = re.findall(r"rank \d exited \(exit code 2\) without a result", str(error))
            said = re.findall(
                r"^error: (.+\n)  source: .+\n  expected: .+\n  hint: .+", console.read_text(), re.MULTILINE
            )
            if len(ended) == found.world_size and len(said) == 1:  # the guard ends roles that are on other ranks
                return f"refused: {said[0].strip()}"
            raise Problem(f"{error}\n{console.read_text()[-3000:]}") from error
        if any(results):
            _check_refusal(results)
            return f"refused: {results[0][0]}"
        _check_metrics(directory / "metrics.jsonl", is_validation=found.settings.get("trainer.total_steps") == 0)
        return "ended"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        console.unlink(missing_ok=True)


def _check_refusal(results: list[tuple[str, ...] | None]) -> None:
    """Check that all ranks refuse alike, except for numbers, such as a rank's."""
    texts = {result and tuple(re.sub(r"\d+", "N", part) for part in result) for result in results}
    if None in texts or len(texts) != 1:
        raise Problem(f"ranks were refused differently: {results}")
    if not all(part.strip() for part in results[0] or ()):
        raise Problem(f"a part of the error is empty: {results[0]}")


def _check_metrics(path: Path, *, is_validation: bool) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {record["step"] for record in records if record["step"] > 0}
    if not is_validation and steps != set(range(1, STEPS + 1)):
        raise Problem(f"records of steps {sorted(steps)}")
    bad = {(record["step"], key): value for record in records for key, value in record.items() if not _is_finite(value)}
    if bad:
        raise Problem(f"not finite: {bad}")


def _is_finite(value: Any) -> bool:
    return not isinstance(value, int | float) or math.isfinite(value)


def main(arguments: list[str]) -> int:
    """Run one seed, or a number of seeds from the first; returns the number of problems, 1 at most."""
    first, count = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 1
    import_engine()
    problems = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        task = Path(name, "task")
        task.mkdir()
        make_fuzz_task(task)
        for seed in range(first, first + count):
            run, begun = draw(seed), time.monotonic()
            try:
                result = carry_out(run, task, Path(name, f"run{seed}"))
            except Problem as error:
                problems += 1
                result = f"PROBLEM\n{run.describe()}\n{error}"
            print(f"{seed} ({run.world_size} ranks, {time.monotonic() - begun:.0f} s): {result}", flush=True)
    return min(problems, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
