# SPDX-License-Identifier: Apache-2.0
"""Mixtures of sources (`data.sources`): read from recipes, split into configs, refused, ordered, and routed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.fields import dump_yaml
from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.prompts import PromptBatches, PromptSet
from megatron_rl.rewards.plan import build_reward_plan
from megatron_rl.rollout.by_source import MixedScorer, describe_mixture
from megatron_rl.run.loading import load_config
from megatron_rl.run.mixed_inputs import join_sources
from megatron_rl.samples.table import build_headers
from megatron_rl.types import Prompt, Rollout, UserError, UserErrors

RECIPE = """\
model: {path: policy}
data:
  train_batch_size: 10
  max_response_length: 64
  sources:
    - name: sums
      files: [a.jsonl]
      weight: 50
    - name: calls
      files: [b.jsonl]
      weight: 30
      validation_files: [v.jsonl, w.jsonl]
      tools: [calculator]
      reward: {function: exact}
      max_response_length: 32
    - name: asked
      files: c.jsonl
      weight: 20
      program: p.py:agent
      system_prompt: Be brief.
      top_p: 0.9
actor: {lr: 1e-5}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_a_source_has_its_own_settings_and_else_the_runs(recipe: Path, tmp_path: Path) -> None:
    settings = ["reward.components=[1 math, 0.1 format]", "agents.max_turns=3", "data.sources.calls.weight=40"]
    config = load_config(recipe, settings).config
    sums, calls, asked = config.by_source.values()
    assert list(config.by_source) == ["sums", "calls", "asked"] and config.data.sources["calls"].weight == 40
    assert config.has_episodes and config.is_truncated and not config.agents.has_episodes
    assert config.data.train_files == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert config.data.validation_files == ["v.jsonl", "w.jsonl"] == calls.data.validation_files
    assert [one.data.train_files for one in (sums, calls, asked)] == [["a.jsonl"], ["b.jsonl"], ["c.jsonl"]]
    assert [one.data.max_response_length for one in (sums, calls, asked)] == [64, 32, 64]
    assert [one.agents.has_episodes for one in (sums, calls, asked)] == [False, True, True]
    assert [one.rollout.top_p for one in (sums, calls, asked)] == [1.0, 1.0, 0.9]
    assert (calls.reward.function, calls.reward.components, calls.agents.max_turns) == ("exact", [], 3)
    assert asked.reward.components == ["1 math", "0.1 format"] and asked.data.system_prompt == "Be brief."
    written = tmp_path / "written.yaml"
    written.write_text(dump_yaml(config))
    assert load_config(written, []).config == config


def test_without_sources_the_run_is_its_only_source() -> None:
    config = load_config(None, ["model.path=p", "data.train_files=[a]", "data.train_batch_size=1"]).config
    assert config.by_source == {"": config} and not config.has_episodes


def test_an_episodes_source_replaces_the_runs_environment(recipe: Path) -> None:
    views = load_config(recipe, ["agents.environment=calculator"]).config.by_source
    assert [one.agents.environment for one in views.values()] == ["calculator", None, None]


@pytest.mark.parametrize(
    ("old", "new", "line", "found", "hint"),
    [
        ("tools: [calc", "tool: [calc", 13, "unknown setting 'data.sources.calls.tool'", "data.sources.calls.tools"),
        ("weight: 30", "weight: -1", 11, "data.sources.calls.weight = -1.0 is not positive", "leave the source out"),
        ("function: exact", "function: exat", 14, "data.sources.calls.reward.function = 'exat'", "mean 'exact'?"),
        ("length: 32", "length: 65", 15, "data.sources.calls.max_response_length = 65 is more", "raise"),
        ("name: calls", "name: sums", 9, "two sources are called 'sums'", "rename"),
        ("name: calls", "nam: calls", 9, "None is no name", "{name: sums"),
        ("name: calls", "name: a.b", 9, "'a.b' is no name", "{name: sums"),
        ("p.py:agent", "p.py:agent\n      environment: calculator", 19, "data.sources.asked.program", "leave out"),
        ("top_p: 0.9", "top_k: 0", 21, "data.sources.asked.top_k = 0 is no number", "-1: all"),
        ("top_p: 0.9", "temperature: 1", 21, "unknown setting 'data.sources.asked.temperature'", "rollout.temperature"),
        ("function: exact", "function: foo", 14, "data.sources.calls.reward.function = 'foo'", "my_reward.py"),
        ("function: exact", "components: [1 model]", 14, "data.sources.calls.reward.components", "reward_model.path"),
    ],
)
def test_a_mistake_names_the_entry_and_its_line(
    recipe: Path, old: str, new: str, line: int, found: str, hint: str
) -> None:
    recipe.write_text(RECIPE.replace(old, new))
    with pytest.raises(UserError) as caught:
        load_config(recipe, [])
    first = getattr(caught.value, "errors", [caught.value])[0]
    assert found in first.found and hint in first.hint and f"recipe.yaml:{line}" in first.source, first


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("data.weights=[1, 1, 1]", "data.weights = [1.0, 1.0, 1.0] beside data.sources"),
        ("data.shuffle=order.py:easy", "data.shuffle = 'order.py:easy' beside data.sources"),
        ("trainer.capture_step=1", "trainer.capture_step = 1 with data.sources"),
        ("data.sources.sums.weight=0.12345", "repeats after"),
        ("data.sources=[{files: [a]}]", "None is no name of a source"),
        ("data.sources=[a.jsonl]", "'a.jsonl' is no name of a source"),
        ("data.sources=[{name: a}]", "data.sources.a.files is missing"),
        ("layout=auto lognormal:400,1", "layout.mode = 'auto lognormal:400,1' has the lengths of one kind of response"),
    ],
)
def test_settings_that_do_not_go_with_sources(recipe: Path, setting: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(recipe, [setting])
    errors = caught.value.errors if isinstance(caught.value, UserErrors) else (caught.value,)
    assert any(found in error.found for error in errors), caught.value


def test_files_of_the_run_are_ignored_with_a_note(recipe: Path) -> None:
    loaded = load_config(recipe, ["data.train_files=[z.jsonl]", "data.sources=[{name: a, files: [q.jsonl]}]"])
    assert loaded.config.data.train_files == ["q.jsonl"] and list(loaded.config.by_source) == ["a"]
    assert loaded.notes == ["ignored: data.train_files=['z.jsonl'] (command line), data.sources has files of its own"]


def make_set(size: int, num_dropped: int = 0) -> PromptSet:
    prompts = [Prompt(i, np.array([i + 1], np.int32), f"{i}", "1") for i in range(size)]
    return PromptSet(prompts, 0, num_dropped, [0])


def test_every_step_has_the_shares_of_its_sources() -> None:
    """Within one prompt in every prefix; exactly where a step is a period. The order depends on the seed alone."""
    joined = join_sources({"sums": make_set(7), "calls": make_set(4, num_dropped=2), "asked": make_set(3)})
    assert len({prompt.prompt_id for prompt in joined.prompts}) == 14 and joined.file_sizes == [7, 4, 3]
    assert [p.prompt_id for p in joined.prompts if p.source == "asked"] == [13, 14, 15]
    weights = {"sums": 50.0, "calls": 30.0, "asked": 20.0}
    shares = {name: weight / 100 for name, weight in weights.items()}

    def open_batches(size: int) -> PromptBatches[Any]:
        values = [*weights.values()]
        return PromptBatches(joined.prompts, size, True, 1, weights=values, file_sizes=joined.file_sizes)

    for _, batch in zip(range(20), open_batches(10)):
        assert Counter(prompt.source for prompt in batch) == {"sums": 5, "calls": 3, "asked": 2}
    counts, batches = Counter[str](), open_batches(7)
    for step in range(1, 200):
        counts.update(prompt.source for prompt in next(batches))
        assert all(abs(counts[name] - 7 * step * share) < 1 for name, share in shares.items())
    resumed = open_batches(7)
    resumed.load_state_dict(batches.state_dict())
    assert next(resumed) == next(batches)


def make_rollout(source: str, text: str) -> Rollout:
    prompt = Prompt(0, np.array([1], np.int32), "", "2", source=source)
    return Rollout.from_response(prompt, 0, np.array([ord(c) for c in text], np.int32), None, "stop")


def test_each_source_has_its_reward_and_its_metrics(recipe: Path) -> None:
    config = load_config(recipe, ["reward.function=format"]).config
    plans = {name: build_reward_plan(one.reward, 64) for name, one in config.by_source.items()}
    scorer = MixedScorer(plans, lambda tokens: "".join(map(chr, tokens)))
    sources, texts = ["calls", "sums", "calls", "asked"], ["2", "#### 7", "#### 7", "2"]
    rollouts = [make_rollout(*pair) for pair in zip(sources, texts, strict=True)]
    done = list[None]()
    scored = scorer.finish(rollouts, count=lambda: done.append(None))
    assert len(done) == 4
    assert [(one.response, one.reward) for one in scored] == [("2", 1.0), ("#### 7", 1.0), ("#### 7", 0.0), ("2", 0.0)]
    headers = build_headers(enumerate(scored), holder=0)
    found = describe_mixture(headers, [one.prompt for one in scored], plans, 1)
    assert {name: value for name, value in found.items() if name.count("/") == 2 and "calls" in name} == {
        "sources/calls/prompts": 2,
        "sources/calls/reward": 0.5,
        "sources/calls/truncated": 0.0,
        "sources/calls/response_tokens": 3.5,
        "sources/calls/failed": 0.0,
    }
    assert found["sources/sums/reward"] == 1.0 and found["sources/asked/reward"] == 0.0
    part, _ = headers.select_groups([0, 2])
    assert describe_mixture(part, [scored[0].prompt, scored[2].prompt], plans, 1) == {}, "one source is the run itself"


def test_components_and_weights_belong_to_the_sources_that_have_them() -> None:
    """A mean does not count sources without the component; equal names of scheduled terms stay apart."""
    scored = [make_rollout(source, "2") for source in ("sums", "sums", "calls", "asked")]
    given = {"digits": 4.0}, {}, {"digits": 1.0, "service_failures": 1.0}, {"turns": 2.0}
    scored = [replace(one, reward=1.0, reward_components=parts) for one, parts in zip(scored, given, strict=True)]
    terms = {"sums": "1@0,3@2 format", "calls": "0@0,1@2 format", "asked": "1.0 exact"}
    plans = {name: build_reward_plan(RewardConfig(components=[term]), 64) for name, term in terms.items()}
    headers, prompts = build_headers(enumerate(scored), holder=0), [one.prompt for one in scored]
    found = describe_mixture(headers, prompts, plans, 1)
    own = {"reward/digits": 2.0, "reward/turns": 2.0}  # of two with a reward, one of which does not report it, and one
    own |= {"sources/sums/reward/weight/format": 2.0, "sources/calls/reward/weight/format": 0.5}
    assert {name: x for name, x in found.items() if name in own or not name.startswith("sources/")} == own
    shared = describe_mixture(headers, prompts, dict.fromkeys(terms, plans["sums"]), 1)
    assert shared["reward/weight/format"] == 2.0 and not any(name.endswith("s/reward/weight/format") for name in shared)


def test_the_toy_recipe_is_what_the_page_shows() -> None:
    root = Path(__file__).resolve().parents[2]
    loaded = load_config(root / "launch/recipes/toy_mixture.yaml", [])
    assert [json.dumps(one.weight) for one in loaded.config.data.sources.values()] == ["50.0", "30.0", "20.0"]
    page = (root / "docs/recipes.md").read_text(encoding="utf-8")
    sources = (root / "launch/recipes/toy_mixture.yaml").read_text(encoding="utf-8").partition("data:\n")[2]
    assert sources.partition("actor:")[0] in page
