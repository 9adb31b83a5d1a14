# SPDX-License-Identifier: Apache-2.0
"""Names of TrainingArguments and GRPOConfig: their meaning here, the reported ones, the refused ones.

A whole recipe of TRL's against ours is in tests/docs/test_migrating.py. Not covered: whether TRL still uses these
names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.compat.kinds import Renamed
from megatron_rl.compat.trl import ALIASES, GROUPS
from megatron_rl.config.fields import list_fields, list_options
from megatron_rl.run.loading import LoadedConfig, load_config
from megatron_rl.types import UserError

MINIMAL = ["model.path=policy", "data.train_files=train.jsonl", "data.train_batch_size=8"]
PAGE = Path(__file__).resolve().parents[2] / "docs/migrating.md"


def load(*overrides: str) -> LoadedConfig:
    return load_config(None, [*MINIMAL, *overrides])


def value_of(loaded: LoadedConfig, name: str) -> Any:
    value: Any = loaded.config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_every_target_is_a_setting_and_no_name_is_ours() -> None:
    assert {alias.target for alias in ALIASES.values() if isinstance(alias, Renamed)} <= set(
        list_fields() | list_options()
    )
    assert not set(ALIASES) & set(list_fields())


def test_the_page_and_the_table_say_the_same() -> None:
    """Each renamed name of the page has the target of the page; the table contains all of them."""
    part = next(part for part in PAGE.read_text(encoding="utf-8").split("\n## ") if part.startswith("TRL"))
    rows = re.findall(r"^\| `(\w+)` \| `([a-z_.0-9]+)` \|", part, re.M)
    assert len(rows) > 50
    known = {*ALIASES, *(name for group in GROUPS for name in group.names)}
    assert {name for name, _ in rows} <= known
    renamed = {name: alias.target for name, alias in ALIASES.items() if isinstance(alias, Renamed)}
    assert [(name, target) for name, target in rows if renamed.get(name, target) != target] == []


@pytest.mark.parametrize(
    ("override", "name", "expected"),
    [
        ("learning_rate=2e-5", "actor.lr", 2e-5),
        ("top_k=0", "rollout.top_k", -1),
        ("min_p=null", "rollout.min_p", 0.0),
        ("bf16=false", "model.dtype", "float32"),
        ("use_vllm=false", "rollout.engine", "hf"),
        ("loss_type=dr_grpo", "algorithm.loss_agg_mode", "constant"),
        ("scale_rewards=false", "algorithm.norm_adv_by_std", False),
        ("importance_sampling_level=sequence", "algorithm.policy_loss", "gspo"),
        ("gradient_checkpointing=true", "actor.recompute_granularity", "full"),
        ("lora_rank=8", "actor.lora.rank", 8),
    ],
)
def test_a_name_is_read(override: str, name: str, expected: Any) -> None:
    assert value_of(load(override), name) == expected


@pytest.mark.parametrize("flags", [["--num_generations", "4"], ["--num-generations=4"], ["num_generations=4"]])
def test_names_may_be_flags(flags: list[str]) -> None:
    """A leaf of ours wins over a name of theirs: --top_k is rollout.top_k, in which 0 means 0."""
    assert load(*flags).config.rollout.n == 4
    assert load("--learning_rate", "1e-5", "--temperature", "0.5").config.rollout.temperature == 0.5


@pytest.mark.parametrize("order", [1, -1])
def test_one_epsilon_is_both_sides(order: int) -> None:
    both = load("epsilon=0.1").config.algorithm
    assert (both.clip_eps_low, both.clip_eps_high) == (0.1, 0.1)
    apart = load(*["epsilon=0.1", "epsilon_high=0.3"][::order]).config.algorithm
    assert (apart.clip_eps_low, apart.clip_eps_high) == (0.1, 0.3)


def test_the_correction_has_the_bounds_of_trl() -> None:
    """Nothing is masked below, and the cap is 3, unless something else is written."""
    name = "vllm_importance_sampling"
    algorithm = load(f"{name}_correction=true").config.algorithm
    found = (algorithm.importance_sampling, algorithm.importance_low, algorithm.importance_high)
    assert found == ("product-mask", 0.0, 3.0)
    algorithm = load(f"{name}_mode=token_truncate", f"{name}_cap=4.0").config.algorithm
    assert (algorithm.importance_sampling, algorithm.importance_high) == ("token-truncate", 4.0)
    loaded = load(f"{name}_correction=false", f"{name}_mode=token_mask")
    assert loaded.config.algorithm.importance_sampling == "none" and "is false" in loaded.notes[0]


def test_completions_per_device_need_prompts_beside_them() -> None:
    with pytest.raises(UserError, match="gradient_accumulation_steps = 8 counts completions") as caught:
        load("gradient_accumulation_steps=8")
    assert "each divided by num_generations" in caught.value.expected
    loaded = load("gradient_accumulation_steps=8", "steps_per_generation=null", "actor.ppo_mini_batch_size=4")
    assert loaded.config.actor.ppo_mini_batch_size == 4
    assert [note for note in loaded.notes if "decide" in note]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_steps=100", "trainer.total_steps"),
        ("loss_type=bnpo", "one of 'dapo', 'grpo', 'dr_grpo'"),
        ("vllm_mode=server", "rollout.engine=vllm_server"),
        ("warmup_ratio=0.1", "actor.lr_warmup_steps"),
        ("reward_funcs=[accuracy]", "reward.components"),
        ("dataset_name=org/set", "data.train_files"),
        ("train_type=lora", "actor.lora.rank"),
        ("fp16=true", "bfloat16 or float32"),
    ],
)
def test_what_would_mean_something_else_is_refused(override: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    assert expected in caught.value.expected
    assert override.partition("=")[0] in caught.value.found


def test_an_unknown_name_has_a_hint() -> None:
    with pytest.raises(UserError, match="unknown setting 'num_generation'") as caught:
        load("num_generation=4")
    assert "num_generations" in caught.value.hint
