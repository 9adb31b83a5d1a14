# SPDX-License-Identifier: Apache-2.0
"""`layout: auto` takes the planner's first choice, writes it into the config, and is refused if nothing fits.

Not covered: whether the choice is the fastest on a cluster; runs of it are in tests/run/test_auto_layout.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron_rl.config.fields import dump_yaml
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.planning.admission import list_candidates, read_job
from megatron_rl.planning.cluster import Job, describe_cluster, find_cluster
from megatron_rl.run import building, grpo
from megatron_rl.run.grpo import Prepared
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve
from megatron_rl.types import UserError
from tools.planning import automatic
from tools.planning.automatic import choose_layout
from tools.planning.communication import Assumptions, predict_seconds

RECIPE = Path(__file__).resolve().parents[2] / "launch/recipes/qwen2.5_7b_gsm8k.yaml"
LONG_TAIL = ["layout=auto lognormal:1500,1.2", "data.max_response_length=15872", "data.train_batch_size=64"]


def choose(*overrides: str, gpus: int = 8, memory_gib: float = 80) -> tuple[RunConfig, list[str]]:
    config = load_config(RECIPE, ["layout=auto", *overrides]).config
    return choose_layout(config, resolve(config), describe_cluster(gpus, memory_gib), RECIPE)


def test_the_first_of_the_plan_is_taken(tmp_path: Path) -> None:
    """A config that states it, and reads back as it was."""
    slow = "rollout.tensor_model_parallel_size=4"
    config, lines = choose(slow)
    given = load_config(RECIPE, [slow]).config
    job = read_job(given, resolve(given), describe_cluster(8, 80), RECIPE)
    best = list_candidates(job, partial(predict_seconds, Assumptions()))[0]
    assert config == best.job.config != given and config.layout.mode == "given"
    [line] = lines
    assert f"layout auto: {' '.join(best.choice.overrides(job))}: the fastest by prediction" in line
    recipe = tmp_path / "config.yaml"
    recipe.write_text(dump_yaml(config))
    assert load_config(recipe).config == config
    assert choose(slow) == (config, lines), "on every rank alike"


def test_lengths_choose_the_schedule_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the correction that it needs; schedules that the run's own checks refuse are not chosen."""
    config, lines = choose(*LONG_TAIL)
    assert config.schedule.max_staleness > 0 and config.algorithm.importance_sampling == "token-truncate"
    assert f"schedule.max_staleness={config.schedule.max_staleness}" in lines[1] and "by simulation" in lines[1]
    assert config.layout == load_config(RECIPE).config.layout

    def refuse_stale(job: Job) -> None:
        if job.config.schedule.max_staleness:
            raise UserError("stale", source="", expected="", hint="")

    monkeypatch.setattr(automatic, "check_job", refuse_stale)
    config, lines = choose(*LONG_TAIL)
    assert config.schedule.max_staleness == 0 and config.algorithm.importance_sampling == "none"
    assert "layout auto: synchronous, samples spread: rollout.dispatch=samples; " in lines[1]


def test_a_placement_is_kept() -> None:
    config, _ = choose("placement.actor=1/2", "algorithm.kl_coef=0", "placement.rollout=1/2", *LONG_TAIL, gpus=16)
    assert (config.placement.actor, config.placement.rollout) == ("1/2", "1/2")


def test_budgets_shrink_where_nothing_fits_otherwise() -> None:
    """From 262,144 tokens to the longest sequence."""
    config, [line] = choose("actor.max_tokens_per_microbatch=1048576", "actor.context_parallel_size=1")
    assert config.actor.max_tokens_per_microbatch == 1536
    assert line.endswith("no layout fits with the budgets of the config: actor.max_tokens_per_microbatch=1536")


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(UserError, match='no layout is accepted and fits 8 rank.*that of the config: phase ".*too many'):
        choose(memory_gib=4)
    with pytest.raises(UserError, match="nowhere.txt"):
        choose("layout.mode=auto nowhere.txt")


def test_how_it_is_written() -> None:
    """`layout: auto` in a recipe is that on the command line, lengths included; earlier, they were apart."""
    text = yaml.safe_load(RECIPE.read_text())
    assert load_config(text | {"layout": "auto"}).config.layout.mode == "auto"
    assert load_config(text | {"layout": {"mode": "auto"}}).config.layout.mode == "auto"
    for bad in ("automatic", "given lognormal:400,1.0"):
        with pytest.raises(UserError, match=f"layout.mode = '{bad}' is not known"):
            load_config(text | {"layout": bad})
    lengths = load_config(RECIPE, ["layout.mode=auto   a run/rollouts"]).config.layout.lengths
    assert lengths == "a run/rollouts" and load_config(RECIPE, ["layout=auto"]).config.layout.lengths is None
    earlier = "layout.lengths=lognormal:400,1.0"
    for recipe, overrides in (
        (text | {"layout": "auto"}, [earlier]),
        (text | {"layout": {"mode": "auto", "lengths": "lognormal:400,1.0"}}, []),
        (text | {"layout": {"mode": "given", "lengths": "lognormal:400,1.0"}}, ["layout=auto"]),
    ):
        loaded = load_config(recipe, overrides)
        assert (loaded.config.layout.mode, loaded.notes) == ("auto lognormal:400,1.0", [])
    loaded = load_config(RECIPE, [earlier])
    assert loaded.config.layout.mode == "given" and "layout.mode is not 'auto'" in loaded.notes[-1]
    config = load_config(RECIPE, ["layout=auto"]).config
    with pytest.raises(UserError, match="in supervised fine-tuning"):
        SftPlan.build(config, 8)


def test_hosts_share_their_memory_among_their_ranks() -> None:
    half, whole = find_cluster(2, 2, None), find_cluster(1, 1, None)
    assert half.nodes == 1 and half.memory_bytes == pytest.approx(whole.memory_bytes / 2, abs=1)
    assert find_cluster(4, 2, None).nodes == 2 and not half.has_fused_attention


def test_ranks_that_choose_for_themselves_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of different memory would otherwise wait for each other."""
    inputs = SimpleNamespace()
    monkeypatch.setattr(building, "world", lambda: None)
    monkeypatch.setattr(grpo, "init_distributed", lambda _: "process")
    monkeypatch.setattr(building, "gather_objects", lambda mine, _: [mine, ["layout auto: this"]])
    prepared = Prepared(load_config(RECIPE).config, inputs, None, grpo.Parts(), ["layout auto: another"])  # pyright: ignore
    with pytest.raises(UserError, match="do not agree: layout auto: another on rank 0, layout auto: this on rank 1"):
        prepared.join()
    assert replace(prepared, chosen=["layout auto: this"]).join() == "process"
