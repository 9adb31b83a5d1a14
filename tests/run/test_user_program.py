# SPDX-License-Identifier: Apache-2.0
"""Arguments of a program: rows, rewards of several kinds, TRL's names; and the texts of samples and errors.

Not covered: hub ids, TRL's own classes (a dataclass stands for GRPOConfig), and rewards inside of reward workers.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatron_rl
from distributed import run_ranks
from launch_runs import assert_succeeded, fork_ranks, run_script
from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.passed_rows import pass_rows
from megatron_rl.data.rows import read_rows
from megatron_rl.rewards.calls import check_columns, score_batch
from megatron_rl.rewards.functions import enter_rewards
from megatron_rl.rewards.plan import build_reward_plan
from megatron_rl.rewards.silence import explain_silence
from megatron_rl.run.grpo import Trainer
from megatron_rl.run.user_program import read_program
from megatron_rl.types import Prompt, UserError
from reward_samples import make_rollout
from rl_runs import read_records

ROWS = [{"prompt": f"{a}+{a + 3}=", "answer": str(2 * a + 3)} for a in range(8)]
README = """
from datasets import Dataset
from megatron_rl import Trainer

dataset = Dataset.from_list([{{"prompt": f"{{a}}+{{a + 3}}=", "completion": "?"}} for a in range(8)])

def reward_num_unique_letters(completions, **kwargs):
    return [len(set(completion)) for completion in completions]

trainer = Trainer(
    model="{model}",
    reward_funcs=reward_num_unique_letters,
    args={{"max_completion_length": 8, "max_prompt_length": 16, "max_steps": 2, "use_vllm": False, "bf16": False,
           "output_dir": "{out}"}},
    train_dataset=dataset,
)
trainer.train()
"""


def test_a_program_of_trl_trains(task: Path, tmp_path: Path) -> None:
    """The program of TRL's README with another import and class name, and with sizes that fit a tiny model."""
    (tmp_path / "program.py").write_text(README.format(model=task / "model", out=tmp_path / "run"))
    assert_succeeded(fork_ranks(partial(run_script, tmp_path / "program.py"), 1, tmp_path))
    first, second = read_records(tmp_path / "run")
    assert first["reward/mean"] > 0 and second["policy/grad_norm"] > 0 and first["tokens/prompt"] == 8 * 4


SAME = """
import json
import sys
import tempfile
from pathlib import Path
import megatron_rl
import numpy as np
from transformers import AutoModelForCausalLM

model, out, kind, file = sys.argv[1:]
rows = [json.loads(line) for line in open(file)]

def count(data_source, solution_str, ground_truth, extra_info):
    return float(sum(c.isdigit() for c in solution_str))

def count_batch(completions, **columns):
    return [float(sum(c.isdigit() for c in text)) for text in completions]

def make():
    return rows

def order(prompts, epoch):
    return np.random.default_rng([1, epoch]).permutation(len(prompts))

config = {"model.dtype": "float32", "data": {"train_batch_size": 2, "max_response_length": 8, "max_prompt_length": 16},
          "rollout": {"engine": "hf", "n": 2}, "trainer": {"total_steps": 2, "run_dir": out, "save_freq": None}}
data, reward = {"file": (file, count), "object": (rows, count_batch), "function": ([__file__ + ":make"], count)}[kind]
if kind == "object":
    tempfile.tempdir = out + "_models"
    Path(tempfile.tempdir).mkdir()
    model = AutoModelForCausalLM.from_pretrained(model)
if kind == "function":
    config["data"]["shuffle"] = __file__ + ":order"
if __name__ == "__main__":  # the file is imported for its functions, too
    trainer = megatron_rl.Trainer(model, config, data=data, reward=reward)
    trainer.train()
    try:
        trainer.train()
    except megatron_rl.UserError as error:
        assert str(error).startswith("the loop of a trainer that has ended")
    else:
        sys.exit("it trained twice")
"""


def test_rows_and_a_batch_function_train_like_a_file_and_a_function(task: Path, tmp_path: Path) -> None:
    """The records are equal to the last bit, also with a model object, and with functions for rows and order."""
    (tmp_path / "program.py").write_text(SAME)
    for kind in ("file", "object", "function"):
        (tmp_path / kind).mkdir()
        arguments = (task / "model", tmp_path / kind / "run", kind, task / "train.jsonl")
        assert_succeeded(fork_ranks(partial(run_script, tmp_path / "program.py", *arguments), 1, tmp_path / kind))
    first, second, third = (read_records(tmp_path / kind / "run") for kind in ("file", "object", "function"))
    assert len(first) == 2 and first == second == third
    (saved,) = (tmp_path / "object/run_models").glob("megatron_rl_models_*/object:*")
    assert {file.name for file in saved.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.model"}


def f(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return float(len(solution_str))


def g(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [float(len(completions))] * len(completions)


async def h(prompts: list[Any], completions: list[Any], **columns: Any) -> list[None]:
    await asyncio.sleep(0)
    return [None for _ in completions]


async def k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"score": 1.0, "seen": 2.0}


def sizes(**changes: Any) -> dict[str, Any]:
    return {
        "model.dtype": "float32",
        "data": {"train_batch_size": 2, "max_response_length": 8, "max_prompt_length": 16},
        "rollout": {"engine": "hf", "n": 2},
        "trainer": {"total_steps": 1},
        **changes,
    }


def use_in_a_notebook(rank: int, world_size: int, task: Path) -> dict[str, Any]:
    """One rank that samples with five rewards, its own prompts, and makes the mistakes of a rerun cell."""
    run = megatron_rl.load(
        task / "model", sizes(), data=Dataset.from_list(ROWS), reward=[f, g, h, k, "format"], weights=[1, 2, 3, 4, 5]
    )
    policy, errors = run.policy, []

    def sample(*arguments: Any, **options: Any) -> Any:
        with policy.rollout_mode():
            return policy.sample(1, *arguments, **options)

    samples = sample()
    samples.old_logprobs = policy.logprobs(samples)
    for mistake in (
        lambda: setattr(samples, "old_logprobs", samples.old_logprobs),
        lambda: policy.expand(samples, [1.0]),
        lambda: policy.forward_backward(samples, run.config.algorithm),
        lambda: policy.logprobs([1]),
        lambda: sample([5]),
        lambda: sample(5),
        lambda: sample(["1+1="], n=0),
        lambda: policy.save(None, 1),
        lambda: policy.save("here", "1"),
        lambda: policy.load(5),
        lambda: policy.export([]),
    ):
        with pytest.raises(UserError) as caught:
            mistake()
        errors.append(str(caught.value).splitlines()[0])
    lengths = {name: samples.headers.rollouts.component(name).tolist() for name in ("f", "g", "h", "k", "k/seen")}
    return {"repr": repr(samples), "rewards": samples.rewards.tolist(), "errors": errors, **lengths}


def test_rewards_of_every_kind_and_mistakes_of_a_notebook(task: Path, tmp_path: Path) -> None:
    """TRL's function gets the whole batch of 4; None counts as 0; weights apply."""
    found = run_ranks(use_in_a_notebook, 1, task, timeout=200)[0]
    assert (
        found["g"] == [4.0] * 4 and found["h"] == [0.0] * 4 and found["k"] == [1.0] * 4 and found["k/seen"] == [2.0] * 4
    )
    assert found["rewards"] == [length + 2 * 4 + 4 for length in found["f"]]
    assert found["repr"].startswith("<4 samples of 2 prompts: ")
    assert "columns: old_logprobs>" in found["repr"]
    assert [error.partition(": <")[0] for error in found["errors"]] == [
        "samples.old_logprobs is set already",
        "values of shape [1] for 4 rollouts: [1.0]",
        "a Experience",
        "a list: [1]",
        "prompt 0 is a int: 5",
        "prompts = 5",
        "n = 0",
        "a NoneType: None",
        "a str: '1'",
        "a int: 5",
        "a list: []",
    ]


def pass_other_rows(rank: int, world_size: int, task: Path) -> str:
    os.environ["WORLD_SIZE"] = str(world_size)
    with pytest.raises(UserError) as caught:
        megatron_rl.load(task / "model", sizes(), data=ROWS[rank:], reward=f)
    return str(caught.value).splitlines()[0]


def test_ranks_with_other_rows_are_refused(task: Path) -> None:
    first, second = run_ranks(pass_other_rows, 2, task, timeout=200)
    assert first == second and first.startswith("the ranks do not agree: object:train?")


OTHER_WEIGHTS = """
import os
import sys
import tempfile
from pathlib import Path
import megatron_rl
from transformers import AutoModelForCausalLM

path, out = sys.argv[1:]
tempfile.tempdir, rank = out, int(os.environ["RANK"])
model = AutoModelForCausalLM.from_pretrained(path)
model.get_input_embeddings().weight.data[0] += rank // 2
config = {"data": {"train_batch_size": 4, "max_response_length": 8, "max_prompt_length": 16},
          "rollout": {"engine": "hf", "n": 2}, "trainer": {"total_steps": 1}}
try:
    megatron_rl.load(model, config, data=["1+1="] * 4, reward=lambda completions, **columns: [0.0] * len(completions))
except megatron_rl.UserError as error:
    Path(out, f"{rank}.txt").write_text(str(error).splitlines()[0])
"""


def test_ranks_with_other_weights_are_refused(task: Path, tmp_path: Path) -> None:
    """Each rank passes a model; ranks with equal ones write it once."""
    (tmp_path / "program.py").write_text(OTHER_WEIGHTS)
    assert_succeeded(fork_ranks(partial(run_script, tmp_path / "program.py", task / "model", tmp_path), 3, tmp_path))
    found = {(tmp_path / f"{rank}.txt").read_text() for rank in range(3)}
    assert len(found) == 1 and found.pop().startswith(f"the ranks do not agree: {tmp_path}/megatron_rl_models_")
    assert len([*tmp_path.glob("megatron_rl_models_*/object:*")]) == 2


def test_a_model_object_needs_a_tokenizer(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    model.name_or_path = ""
    with pytest.raises(UserError, match="a model without a tokenizer(.|\n)*processing_class=tokenizer"):
        read_program(model, None, [], {"data": ROWS})
    given = {"processing_class": AutoTokenizer.from_pretrained(task / "model"), "data": ROWS}
    config = read_program(model, None, [], given)[0]
    assert Path(config.model.path, "tokenizer.json").is_file() and not [*tmp_path.glob("*/tmp*")]
    with pytest.raises(UserError, match="generates no text(.|\n)*AutoModelForCausalLM"):
        read_program(model.model, None, [], {"data": ROWS})
    with pytest.raises(UserError, match="it cannot be written: (.|\n)*meta"):
        read_program(model.to("meta"), None, [], {**given, "data": ROWS})


def test_rows_are_read_from_every_kind_of_object() -> None:
    """Equal rows have equal names; names hold a digest."""
    names = pass_rows("train", ROWS)
    assert names == pass_rows("train", Dataset.from_list(ROWS)) == pass_rows("train", (dict(row) for row in ROWS))
    assert names != pass_rows("train", ROWS[::-1]) and names != pass_rows("validation", ROWS)
    rows = [*read_rows(names)]
    assert [row.columns for row in rows] == ROWS and rows[2].location == "train data, row 3"
    assert names == pass_rows("train", lambda: iter(ROWS))
    assert [row.columns for row in read_rows(pass_rows("x", ["1+1=", "1+2="]))] == [
        {"prompt": "1+1="},
        {"prompt": "1+2="},
    ]
    assert pass_rows("train", ["a.jsonl", Path("b.parquet")]) == ["a.jsonl", "b.parquet"]
    with pytest.raises(UserError, match="stands for rows that a program passed"):
        list(read_rows(["object:train?0123"]))


@pytest.mark.parametrize(
    "data, found",
    [(5, "that is a int"), ({"prompt": ["a"]}, "from_dict"), ([], "no row"), ([1], "row 1 is a int"), ("abc", "a str")],
)
def test_other_data_is_refused(data: Any, found: str) -> None:
    with pytest.raises(UserError, match=found):
        pass_rows("train", data)


@dataclass
class Arguments:
    """Stand-in for GRPOConfig: defaults are left alone, and what `__post_init__` derives is no setting."""

    learning_rate: float = 1e-6
    num_generations: int = 8
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_completion_length: int = 512
    beta: float = 0.0
    bf16: bool | None = None
    use_cpu: bool = False
    steps_per_generation: int | None = None

    def __post_init__(self) -> None:
        self.bf16, self.steps_per_generation = True, self.gradient_accumulation_steps


def test_trl_names_become_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in completions become sizes in prompts; the program's own overrides are used."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = Arguments(learning_rate=1e-5, num_generations=4, gradient_accumulation_steps=2, beta=0.1, use_cpu=True)
    passed = {"args": given, "train_dataset": ROWS, "eval_dataset": {"a": ROWS[:2]}, "reward_funcs": [f, g]}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        config, recipe, parts = read_program("m", None, ["actor.adam_beta2=0.5"], passed)
    data, actor, rollout = config.data, config.actor, config.rollout
    assert (data.train_batch_size, actor.ppo_mini_batch_size, rollout.n) == (4 * 8 * 2 // 4, 16, 4)
    assert (actor.lr, config.algorithm.kl_coef, data.max_response_length) == (1e-5, 0.1, 512)
    assert (actor.adam_beta2, actor.weight_decay, actor.lr_decay_style) == (0.5, 0.0, "linear")
    assert data.train_files[0].startswith("object:train?") and data.validation_files[0].startswith("object:a?")
    assert parts.reward == [f, g] and recipe is None
    assert any("ignored of args, without a counterpart: use_cpu" in str(note.message) for note in notes)
    monkeypatch.setenv("RANK", "1")  # rank 0 alone says it
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        read_program("m", None, [], passed)
    assert notes == []


@pytest.mark.parametrize(
    "passed, hint",
    [
        ({"reword": f}, "did you mean reward="),
        ({"learning_rat": 1}, "did you mean learning_rate="),
        ({"train_dataset": ROWS, "data": ROWS}, "leave out train_dataset"),
        ({"peft_config": object()}, "config={.*lora"),
        ({"callbacks": [1]}, "docs/primitives.md"),
        ({"processing_class": object()}, "leave it out"),
        ({"args": 3}, "GRPOConfig"),
        ({"per_device_train_batch_size": 3}, "train_batch_size"),
    ],
)
def test_arguments_without_a_counterpart_name_the_line_to_write(passed: dict[str, Any], hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        read_program("m", None, [], passed)


def test_a_model_or_config_of_another_type_is_refused() -> None:
    for model, config in ((None, None), (3, None), ("m", [1])):
        with pytest.raises(UserError, match="that is a|model = "):
            Trainer(model, config)
    with pytest.raises(UserError, match=r"the overrides \[1\]"):
        Trainer("m", {"data": None}, [1])  # pyright: ignore


@pytest.mark.parametrize("reward, weights", [([f, g], [1]), (f, 2), ([], None), ([f, g], "ab"), (None, [1.0])])
def test_weights_need_one_number_per_reward(reward: Any, weights: Any) -> None:
    if (reward, weights) == (f, 2):
        assert enter_rewards(reward, weights, RewardConfig()).components == [f"2 {__file__}:f"]
        return
    with pytest.raises(UserError, match="one number per reward"):
        enter_rewards(reward, weights, RewardConfig())


def test_rewards_of_one_name_are_kept_apart() -> None:
    config = enter_rewards([f, f, "math"], None, RewardConfig())
    assert config.components == [f"1.0 {__file__}:f", f"1.0 {__file__}:f_2", "1.0 math"]


def test_a_batch_is_checked() -> None:
    """Missing columns before the run; a wrong number of scores with the first response."""
    with pytest.raises(UserError, match="takes solution, and no row has such a column"):
        check_columns(lambda completions, solution, **columns: [], [make_rollout().prompt], "reward.function")
    with pytest.raises(UserError, match="returned 1 scores for 2 completions"):
        score_batch(lambda completions: [1.0], [make_rollout(), make_rollout()], [1, 1])
    seen: dict[str, Any] = {}

    def keep(**columns: Any) -> list[float]:
        seen.update(columns)
        return [1.0]

    def trl(completions: Any, **columns: Any) -> list[float]:
        return keep(completions=completions, **columns)

    chat = Prompt(
        0, np.zeros(1, np.int32), "...", "5", row={"answer": "5"}, messages=[{"role": "user", "content": "?"}]
    )
    rollout = make_rollout("82")
    assert [score.value for score in score_batch(trl, [rollout], [7])] == [1.0]
    assert seen["prompts"] == [rollout.prompt.text] and seen["completions"] == ["82"]
    assert seen["trainer_state"].global_step == 7
    from dataclasses import replace

    score_batch(trl, [replace(rollout, prompt=chat)], [1])
    assert seen["completions"] == [[{"role": "assistant", "content": "82"}]]
    assert seen["prompts"] == [chat.messages] and seen["answer"] == ["5"]


class Headers(dict[str, Any]):
    """Stand-in for the headers of a step."""

    def __init__(self, rewards: list[float], group: int) -> None:
        super().__init__(reward=np.array(rewards), sample_index=np.arange(len(rewards)) % group)
        self.has_reward = np.ones(len(rewards), bool)


@pytest.mark.parametrize(
    "rewards, group, unmarked, rule, said",
    [
        ([0.0] * 4, 2, 1.0, "math", ["all 4 rewards are 0; no response marks its answer", "reward.function=math_any"]),
        ([0.0] * 4, 2, 0.0, "math", ["all 4 rewards are 0. Read the responses"]),
        ([1.0] * 4, 2, 0.0, "math", ["all 4 rewards are 1. The prompts are too easy"]),
        ([0.0, 0.0, 1.0, 1.0], 2, 0.0, "math_any", ["the responses to each prompt have equal rewards"]),
        ([0.0, 0.0, 1.0, 1.0], 1, 0.0, "math_any", []),
        ([0.0, 1.0, 1.0, 1.0], 2, 0.5, "math", []),
        ([0.0, 1.0, 1.0, 1.0], 2, 1.0, "math", ["no response marks its answer"]),
        ([0.0, 1.0, 1.0, 1.0], 2, 1.0, "math_any", []),
    ],
)
def test_a_first_step_without_a_signal_is_explained(
    rewards: list[float], group: int, unmarked: float, rule: str, said: list[str]
) -> None:
    groups = np.array(rewards).reshape(-1, group)
    counted = {"unmarked_answers": unmarked}
    metrics = {
        "reward/uninformative_groups": float(np.mean(np.ptp(groups, axis=1) == 0)),
        "reward/unmarked_answers": unmarked,
    }
    shown = [replace(make_rollout(text), reward_components=counted) for text in (r"so \boxed{81}", "82")]
    text = explain_silence(
        Headers(rewards, group),
        metrics,
        lambda: [(one, {}) for one in shown],
        {"": build_reward_plan(RewardConfig(function=rule), 8)},
    )
    if not said:
        assert text == ""
        return
    first, *quotes = text.splitlines()
    assert all(part in first for part in said) and "docs/health.md#no-signal" in first
    assert len(quotes) == 2 and quotes[0].endswith("ground truth '82', extracted '81'")
    assert "response '82'" in quotes[1] and quotes[1].endswith("extracted nothing")


def test_episodes_without_room_for_a_reply_are_explained() -> None:
    """Then the form of an answer is not the reason; a truth that is not there is not shown.

    Nor is an answer where the environment has scored: no rule has extracted any.
    """
    metrics = {"reward/uninformative_groups": 1.0, "reward/unmarked_answers": 1.0, "agents/turns": 0.0}
    shown = [replace(make_rollout("", ""), reward=0.0)]
    plan = {"": build_reward_plan(RewardConfig(), 8)}
    text = explain_silence(Headers([0.0] * 4, 2), metrics, lambda: [(one, {}) for one in shown], plan)
    first, quote = text.splitlines()
    assert "no episode has a reply" in first and "Raise data.max_response_length" in first and "boxed" not in first
    assert quote == "  response '' (reward 0)"
    played = explain_silence(Headers([0.0] * 4, 2), metrics | {"agents/turns": 1.0}, list, plan)
    assert "no response marks its answer" in played
