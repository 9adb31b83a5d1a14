# SPDX-License-Identifier: Apache-2.0
"""Every estimator, loss and role inside of the whole program, on small real parts.

The formulas have tests of their own (tests/algorithms). Not covered: learning (docs/algorithms.md has the curves).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from distributed import run_ranks
from megatron_rl.data.tokenizer import load_tokenizer
from rl_runs import layout_overrides, overrides_for, read_records, train
from tiny_models import ENGINE_SIZES, save_tiny_model

README = Path(__file__).parents[2] / "README.md"


def run(world_size: int, overrides: list[str], run_dir: Path) -> list[dict[str, Any]]:
    """Train, and return the records of the run."""
    assert run_ranks(train, world_size, overrides, timeout=170) == [None] * world_size
    return read_records(run_dir)


PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.gae_lambda=0.95",
    "critic.max_tokens_per_microbatch=128",
    "critic.lr=1e-3",
    "algorithm.kl_in=reward",
    "algorithm.kl_target=0.01",
    "algorithm.kl_horizon=64",
    "algorithm.dual_clip=3.0",
    "trainer.total_steps=3",
]


@pytest.fixture(scope="module")
def ppo_on_one_rank(task: Path, tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> list[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("ppo") / "run"
    return run(1, overrides_for(task, run_dir, *PPO), run_dir)


def test_ppo_trains_a_critic(ppo_on_one_rank: list[dict[str, Any]]) -> None:
    """Values of zero explain nothing; two steps later they explain something. The adaptive coefficient moves."""
    first, second, third = ppo_on_one_rank[1:]
    assert third["value/loss"] < first["value/loss"] and third["value/grad_norm"] > 0
    assert third["value/explained_variance"] > first["value/explained_variance"]
    assert first["kl/coef"] == 0.01 and first["kl/per_response"] == 0.0
    assert second["kl/coef"] == pytest.approx(0.01 * (1 - 0.2 * 32 / 64)), "the KL was below its target"
    for term in ("policy", "value"):
        assert first[f"ledger/{term}/denominator"] == pytest.approx(first["tokens/response"] / 2), "two minibatches"


def test_the_decay_of_the_actor_is_laid_over_the_steps_in_which_it_learns(task: Path, tmp_path: Path) -> None:
    """Two of four steps; that of the critic over all four. A resumed run continues exactly."""
    decay = [f"{role}.{name}" for role in ("actor", "critic") for name in ("lr_decay_style=linear", "min_lr=2e-4")]
    settings = [*PPO, *decay, "rollout.engine=hf", "trainer.critic_warmup=2", "data.validation_files=[]"]
    settings += ["trainer.total_steps=4", "trainer.save_freq=3", "actor.ppo_mini_batch_size=8"]
    records = run(1, overrides_for(task, tmp_path / "whole", *settings), tmp_path / "whole")[-4:]
    assert {path.name for path in (tmp_path / "whole/checkpoints").glob("step_*")} == {"step_3", "step_4"}
    assert [record.get("policy/lr") for record in records] == [None, None, pytest.approx(6e-4), pytest.approx(2e-4)]
    assert [record["value/lr"] for record in records] == pytest.approx([8e-4, 6e-4, 4e-4, 2e-4])
    settings += [f"checkpoint.resume={tmp_path}/whole/checkpoints/step_3"]
    resumed = run(1, overrides_for(task, tmp_path / "resumed", *settings), tmp_path / "resumed")[-1]
    assert resumed["policy/grad_norm"] > 0 and {**resumed, **records[-1]} == resumed


@pytest.mark.parametrize(
    ("world", "actor", "critic"),
    [
        (2, (1, 2, 1), ["critic.tensor_model_parallel_size=2", "critic.sequence_parallel=true"]),
        pytest.param(
            4,
            (2, 1, 2),
            ["critic.pipeline_model_parallel_size=2", "critic.max_tokens_per_microbatch=96"],
            marks=pytest.mark.slow,
        ),
        (2, (1, 1, 1), ["actor.context_parallel_size=2", "actor.share_prompts=false"]),
    ],
)
def test_ppo_is_the_same_in_any_pair_of_layouts(
    task: Path,
    tmp_path: Path,
    vllm_imported: None,
    ppo_on_one_rank: list[dict[str, Any]],
    world: int,
    actor: tuple[int, int, int],
    critic: list[str],
) -> None:
    """Actor and critic lie on different ranks in different ways: values and returns travel between their packings."""
    overrides = overrides_for(task, tmp_path / "run", *PPO, *layout_overrides(*actor), *critic)
    for mine, reference in zip(run(world, overrides, tmp_path / "run"), ppo_on_one_rank, strict=True):
        assert mine.get("reward/mean") == reference.get("reward/mean")
        for key in (
            "policy/loss",
            "policy/grad_norm",
            "value/loss",
            "value/grad_norm",
            "value/explained_variance",
            "kl/per_response",
            "kl/coef",
            "ledger/value/numerator",
            "ledger/policy/denominator",
        ):
            if key in reference:
                assert mine[key] == pytest.approx(reference[key], abs=1e-4, rel=1e-4), key


VARIANTS = {
    "rloo, gspo": [
        "algorithm.adv_estimator=rloo",
        "algorithm.policy_loss=gspo",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
    ],
    "reinforce++, cispo": [
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.policy_loss=cispo",
        "algorithm.importance_sampling=token-truncate",
    ],
    "remax": ["algorithm.adv_estimator=remax", "rollout.n=2", "algorithm.policy_loss=policy_gradient"],
    "reinforce++-baseline": [
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        "algorithm.importance_sampling=sequence-mask",
        "algorithm.reject_sequence_above=0.5",
    ],
    "dr grpo": ["algorithm.adv_estimator=dr_grpo", "algorithm.loss_agg_mode=constant", "algorithm.kl_coef=0"],
    "otb, kl_cov": [
        "algorithm.adv_estimator=optimal_token_baseline",
        "algorithm.policy_loss=kl_cov",
        "algorithm.options.kl_cov.ratio=0.1",
        "algorithm.options.kl_cov.coef=1.0",
        "actor.ppo_epochs=2",
        "algorithm.importance_sampling=product-truncate",
        "algorithm.importance_normalize=true",
    ],
    "gdpo, dro": [
        "algorithm.adv_estimator=gdpo",
        "algorithm.options.gdpo.rewards=[digits]",
        "algorithm.policy_loss=dro",
        "algorithm.options.dro.beta=0.5",
        "algorithm.loss_agg_mode=token-sum",
    ],
    "masked": ["algorithm.mask_truncated=true", "algorithm.entropy_coef=0.01"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_the_same_on_one_and_two_ranks(name: str, task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """One step each; DP=2 against one rank would show a local denominator, baseline or whitening."""
    records = []
    for world in (1, 2):
        run_dir = tmp_path / str(world)
        extra = [*VARIANTS[name], "trainer.total_steps=1", "data.validation_files=[]", "trainer.save_freq=null"]
        records.append(run(world, overrides_for(task, run_dir, *extra), run_dir)[0])
    one, two = records
    assert one["policy/grad_norm"] > 0 and one["ledger/policy/numerator"] != 0
    for key in one:
        if key.startswith(("policy/", "ledger/", "reward/", "mismatch/mean_weight", "kl/")):
            assert two[key] == pytest.approx(one[key], abs=2e-5, rel=2e-4), key
    if name == "masked":
        truncated = one["response/truncated"] * 32
        assert one["ledger/policy/denominator"] * 2 == one["tokens/response"] - 8 * truncated


PLUGIN = """
from dataclasses import dataclass
from megatron_rl.algorithms.advantages import Advantages
from megatron_rl.algorithms.catalog import (
    register_advantage_estimator, register_loss_aggregation, register_policy_loss)

@dataclass(frozen=True)
class Scale:
    factor: float = 1.0

@register_advantage_estimator("scaled", options=Scale)
def estimate(inputs, config):
    advantages = inputs.expand(inputs.options.factor * inputs.scores)
    return Advantages(advantages, metrics={"advantage": advantages, "largest": inputs.scores.max()})

@register_policy_loss("scaled", options=Scale)
def lose(inputs, config):
    return -inputs.advantages * inputs.logprobs, inputs.advantages < 0, {
        "advantage": inputs.advantages, "factor": 0 * inputs.logprobs + inputs.options.factor}

@dataclass(frozen=True)
class Power:
    power: float = 1.0

@register_loss_aggregation("powers", options=Power)
def weigh(inputs):
    return 0.5 / (1 + inputs.lengths) ** inputs.options.power, {"sequences": len(inputs.lengths)}
"""


def test_what_plugins_report_is_the_same_in_any_layout(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Options reach all three doors. One rank, eager; then DP 2 x PP 2, in static steps. The ledger checks both."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    extra = [
        f"algorithm.plugins=[{tmp_path}/mine.py]",
        "algorithm.adv_estimator=scaled",
        "algorithm.policy_loss=scaled",
        "algorithm.options.scaled.factor=0.25",
        "algorithm.loss_agg_mode=powers",
        "algorithm.options.powers.power=2",
        "actor.ppo_mini_batch_size=8",
        "trainer.total_steps=1",
        "data.validation_files=[]",
        "trainer.save_freq=null",
    ]
    (one,) = run(1, overrides_for(task, tmp_path / "1", *extra), tmp_path / "1")
    extra += [*layout_overrides(1, 2, 1), "actor.step_mode=static", "actor.share_prompts=false"]
    (four,) = run(4, overrides_for(task, tmp_path / "4", *extra), tmp_path / "4")
    own = ("loss/", "estimator/", "aggregation/")
    for record in (one, four):
        assert {key for key in record if key.startswith(own)} == {
            "loss/scaled/advantage",
            "loss/scaled/factor",
            "estimator/scaled/advantage",
            "estimator/scaled/largest",
            "aggregation/powers/sequences",
        }
        assert record["loss/scaled/factor"] == 0.25 and record["aggregation/powers/sequences"] == 32
        assert record["loss/scaled/advantage"] == pytest.approx(record["estimator/scaled/advantage"], rel=1e-6)
        assert 0 < record["loss/scaled/advantage"] < 0.25 * record["estimator/scaled/largest"]
        assert record["ledger/policy/denominator"] == 1.0 and record["policy/grad_norm"] > 0
    for key in one:
        if key.startswith((*own, "policy/", "ledger/")):
            assert four[key] == pytest.approx(one[key], abs=2e-5, rel=2e-4), key


def test_dynamic_sampling_fills_the_batch_with_informative_groups(
    task: Path, tmp_path: Path, vllm_imported: None
) -> None:
    """A reward that is constant for half of the prompts: about twice as many groups are drawn, and none is kept.

    When rounds run out, uninformative groups fill the batch.
    """
    (tmp_path / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 if int(ground_truth) % 4 == 1 else sum(map(ord, solution_str)) / 1000\n"
    )
    extra = [
        f"reward.function={tmp_path}/reward.py:score",
        "algorithm.dynamic_sampling=true",
        "trainer.total_steps=2",
        "data.validation_files=[]",
        "trainer.save_freq=null",
        "trainer.log_rollouts=-1",
    ]
    first, second = run(2, overrides_for(task, tmp_path / "a", *extra), tmp_path / "a")
    for record in (first, second):
        assert record["sampling/rounds"] >= 2 and record["sampling/informative_groups"] >= 8
        assert record["reward/uninformative_groups"] == 0 and record["sampling/filled_groups"] == 0
        assert record["sampling/generated_groups"] == 8 * record["sampling/rounds"]
    rows = [json.loads(line) for line in (tmp_path / "a/rollouts/step_1.jsonl").read_text().splitlines()]
    assert len(rows) == 32 and all(int(row["ground_truth"]) % 4 == 3 for row in rows)
    assert len({(row["prompt_id"], tuple(row["tokens"])) for row in rows}) > 24, "samples must differ"
    extra[2:2] = ["algorithm.max_sampling_rounds=1"]
    (record, _) = run(1, overrides_for(task, tmp_path / "b", *extra), tmp_path / "b")
    assert record["sampling/filled_groups"] == 8 - record["sampling/informative_groups"] > 0


def test_group_reward_compares_the_responses_to_a_prompt(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """The rank of a response in its group, on two engines that sample whole groups."""
    (tmp_path / "reward.py").write_text(
        "def rank(prompt, completions):\n    return [sorted(completions).index(text) for text in completions]\n"
    )
    settings = ["trainer.total_steps=1", "data.validation_files=[]", "trainer.save_freq=null"]
    settings += [f"reward.function={tmp_path}/reward.py:rank", "rollout.dispatch=groups", "trainer.log_rollouts=-1"]
    run(2, overrides_for(task, tmp_path / "run", *settings), tmp_path / "run")
    assert not [*tmp_path.glob("run/checkpoints/*")], "none was wanted"
    groups: dict[int, list[dict[str, Any]]] = {}
    for line in (tmp_path / "run/rollouts/step_1.jsonl").read_text().splitlines():
        groups.setdefault(json.loads(line)["prompt_id"], []).append(json.loads(line))
    assert [len(group) for group in groups.values()] == [4] * 8
    for group in groups.values():
        texts = [row["response"] for row in group]
        assert [row["reward"] for row in group] == [sorted(texts).index(text) for text in texts]
    assert any(len({row["reward"] for row in group}) > 2 for group in groups.values())


@pytest.mark.slow
@pytest.mark.parametrize("episodes", [False, True])
def test_group_rewards_of_samples_that_begin_ahead(
    episodes: bool, task: Path, tmp_path: Path, vllm_imported: None
) -> None:
    """Beside a function in a worker, on two engines, of prompts that occur twice in a step, and in validation."""
    (tmp_path / "reward.py").write_text(
        "def rank(prompt, completions):\n    return [sorted(completions).index(text) for text in completions]\n"
        "def length(data_source, solution_str, ground_truth, extra_info):\n    return float(len(solution_str))\n"
        "def twice(prompts, epoch):\n    return [i // 2 for i in range(len(prompts))]\n"
        "from megatron_rl.agents.environment import Done, Observation\n"
        "class Game:\n    def reset(self, task):\n        return Observation([])\n"
        "    def step(self, reply):\n        return Done()\n"
    )
    file = f"{tmp_path}/reward.py"
    settings = [
        "trainer.total_steps=3",
        f"reward.components=[1.0 {file}:rank, 0.25 {file}:length]",
        "reward.workers=1",
        f"data.shuffle={file}:twice",
        "rollout.dispatch=groups",
        "rollout.validation_n=3",
        "rollout.validation_temperature=1.0",
        "schedule.max_staleness=1",
        "schedule.steps_per_update=2",
        "algorithm.importance_sampling=token-truncate",
        "trainer.log_rollouts=-1",
        *([f"agents.environment={file}:Game"] if episodes else []),
    ]
    run(2, overrides_for(task, tmp_path / "run", *settings), tmp_path / "run")
    files = [(tmp_path / f"run/rollouts/step_{step}.jsonl", 4) for step in (1, 2, 3)]
    files += [(file, 3) for file in sorted((tmp_path / "run/validation").rglob("step_*.jsonl"))]
    assert len(files) == 5
    for file, n in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        groups = [rows[i : i + n] for i in range(0, len(rows), n)]
        for group in groups:
            assert {row["prompt_id"] for row in group} == {group[0]["prompt_id"]}
            assert [row["sample_index"] for row in group] == list(range(n))
            texts = [row["response"] for row in group]
            expected = [np.float64(sorted(texts).index(text)) + 0.25 * len(text) for text in texts]
            assert [row["reward"] for row in group] == expected
        assert n == 3 or len({group[0]["prompt_id"] for group in groups}) == len(groups) // 2


def test_estimator_and_loss_of_the_users_own(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_imported: None
) -> None:
    """The file that README shows, with the arguments of the command that it shows."""
    command = (
        "torchrun --nproc-per-node 4 launch/pretrain_grpo.py RECIPE.yaml algorithm.plugins=[mine.py] "
        "algorithm.adv_estimator=best_of_group algorithm.policy_loss=plain"
    )
    nproc, arguments = int(command.split()[2]), command.split()[5:]
    (code,) = (block for block in README.read_text().split("```python\n")[1:] if block.startswith("# mine.py"))
    (tmp_path / "mine.py").write_text(code.split("```")[0])
    monkeypatch.chdir(tmp_path)
    extra = [*arguments, "data.validation_files=[]", "trainer.save_freq=null"]
    records = run(nproc, overrides_for(task, tmp_path / "run", *extra), tmp_path / "run")
    assert [r["policy/grad_norm"] > 0 for r in records] == [True, True]
    assert all(r["policy/clip_fraction"] == 0 for r in records)
    extra[1] = "algorithm.adv_estimator=best_of_gruop"
    (error,) = run_ranks(train, 1, overrides_for(task, tmp_path / "typo", *extra), timeout=60)
    assert 'did you mean "best_of_group"' in error


def test_reward_models_and_sum_of_rewards(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """A random reward model on two TP ranks, one on each rank, offloaded, and a function; each has its component.

    Validation draws three responses per prompt. A response ends with a stop token, or the token that completes a stop
    string, and the function reads the text before the string.
    """
    vocab = json.loads((task / "model/config.json").read_text())["vocab_size"]
    for name, family in (("rm", "qwen2"), ("safety", "llama")):
        save_tiny_model(tmp_path / name, family, **ENGINE_SIZES, vocab_size=vocab, num_hidden_layers=2, num_labels=1)
    tokenizer = load_tokenizer(task / "model")
    (seven,) = tokenizer.encode("7")
    extra = [
        f"reward_model.path={tmp_path}/rm",
        "reward_model.tensor_model_parallel_size=2",
        "reward_model.max_tokens_per_microbatch=64",
        f"reward_model.further.safety={{path: {tmp_path}/safety, tensor_model_parallel_size: 1, offload: true}}",
        f"reward.components=[2.0 model, -0.75 model:safety, 0.5 {task}/reward.py:score]",
        "reward.overlong_buffer_length=4",
        "rollout.validation_sets={validation: {n: 3, temperature: 1.0}}",
        f"rollout.stop=['=', {seven}, '+1']",
        "trainer.best_metric=validation/validation/pass@3",
        "trainer.log_rollouts=-1",
        "trainer.total_steps=1",
    ]
    before, record = run(2, overrides_for(task, tmp_path / "run", *extra), tmp_path / "run")
    models = 2.0 * record["reward/model"] - 0.75 * record["reward/safety"]
    expected = models + 0.5 * record["reward/score"] + record["reward/overlong"]
    assert record["reward/mean"] == pytest.approx(expected) and record["reward/overlong"] < 0
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step_1.jsonl").read_text().splitlines()]
    assert len({round(row["reward_components"]["model"], 6) for row in rows}) > 16, "scores differ between responses"
    for name, folder in (("model", "rm"), ("safety", "safety")):
        judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / folder, dtype=torch.float64)
        for row in rows[::4]:
            tokens = torch.tensor([[*tokenizer.encode(row["prompt"]), *row["tokens"]]])
            score = judge(tokens).logits.item()
            assert row["reward_components"][name] == pytest.approx(score, abs=1e-5, rel=0)
    stopped = [row for row in rows if row["response"].endswith(("=", "+1"))]
    assert len(stopped) > 3 and {row["finish_reason"] for row in stopped} == {"stop"}
    ended = [row for row in rows if seven in row["tokens"]]
    assert ended and all(row["tokens"].index(seven) == len(row["tokens"]) - 1 for row in ended)
    assert {row["finish_reason"] for row in ended} == {"stop"} and all("7" in row["response"] for row in ended)
    for row in rows:
        text = row["response"].removesuffix("=").removesuffix("+1")
        assert "=" not in text and "+1" not in text
        assert row["reward_components"]["score"] == sum(character.isdigit() for character in text) / 8
    rows = [json.loads(line) for line in (tmp_path / "run/validation/validation/rollouts/step_0.jsonl").open()]
    groups = [sorted(rows[i : i + 3], key=lambda row: row["sample_index"]) for i in range(0, len(rows), 3)]
    rewards = [[row["reward"] - row["reward_components"]["overlong"] for row in group] for group in groups]
    votes = [[row["response"].strip() for row in group] for group in groups]
    majority = [max(range(3), key=lambda i: (vote.count(vote[i]), -i)) for vote in votes]
    expected = {
        "accuracy": np.mean(rewards),
        "mean@3": np.mean(rewards),
        "pass@3": np.mean([max(group) >= 0.5 for group in rewards]),
        "maj@3": np.mean([group[i] for group, i in zip(rewards, majority)]),
    }
    assert {key: before[f"validation/validation/{key}"] for key in expected} == pytest.approx(expected)
    last = np.mean([group[-1] for group in rewards])
    assert before["validation/validation/maj@3"] != pytest.approx(last), "the last answers would do as well"
    assert (tmp_path / "run/checkpoints/latest/huggingface/config.json").is_file()


def test_a_reward_model_by_name_is_the_reward_model(task: Path, tmp_path: Path) -> None:
    """Alone in `further`, it gives the metrics of the same model in `path` to the last bit, updates included."""
    vocab = json.loads((task / "model/config.json").read_text())["vocab_size"]
    save_tiny_model(tmp_path / "rm", "qwen2", **ENGINE_SIZES, vocab_size=vocab, num_hidden_layers=2, num_labels=1)
    records = {}
    for name, setting in (("model", "path"), ("only", "further.only.path")):
        extra = [f"reward_model.{setting}={tmp_path}/rm", "data.validation_files=[]", "trainer.save_freq=null"]
        overrides = overrides_for(task, tmp_path / name, *extra, "rollout.engine=hf", "reward.function=math")
        found = run(1, overrides, tmp_path / name)
        records[name] = [
            {key.replace("reward/only", "reward/model"): value for key, value in record.items()} for record in found
        ]
    assert records["only"] == records["model"] and len(records["model"]) == 2
    assert all(record["reward/model"] == record["reward/mean"] for record in records["model"])
    assert all(record["policy/grad_norm"] > 0 for record in records["model"])
