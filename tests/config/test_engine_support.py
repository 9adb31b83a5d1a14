# SPDX-License-Identifier: Apache-2.0
"""Engines of the user's: settings that need an undeclared ability are refused, others pass.

Every ability that a check needs is tried on an engine that declares none and on one that declares all of those. Not
covered: whether an engine does what it declares; tests/engines/test_checking.py checks its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from registries import restored_registries

from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.schema import RolloutConfig, RunConfig
from megatron_rl.engines.protocol import register_rollout_engine
from megatron_rl.extension.registry import ABILITIES, ENGINES, RegisteredEngine, name_engines
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.run.inputs import Parts
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import RoleInputs, check_machine, resolve
from megatron_rl.run.user_program import enter_parts
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.rollout_layout import check_engine
from megatron_rl.weights.special_parts import DeltaNetSizes
from megatron_rl.weights.support import check_bitwise

MINIMAL = ["model.path=policy", "data.train_files=train.jsonl", "data.train_batch_size=8"]
TRUNCATE = "algorithm.importance_sampling=token-truncate"
STALE = ["schedule.max_staleness=1", TRUNCATE]
# Ability -> settings that need it, and the setting that is refused without it.
NEEDED: dict[str, tuple[list[str], str]] = {
    "tensor_parallel": (["rollout.tensor_model_parallel_size=2"], "rollout.tensor_model_parallel_size"),
    "decode_steps": ([*STALE, "schedule.steps_per_update=8"], "rollout.engine"),
    "truncation": (["rollout.top_p=0.9"], "rollout.engine"),
    "min_tokens": (["rollout.min_tokens=4"], "rollout.min_tokens"),
    "adapters": (["hybrid.lora=adapter", "actor.lora.rank=4"], "hybrid.lora"),
    "coded_weights": (["rollout.quantization=int8", TRUNCATE], "rollout.quantization"),
    "bitwise": (["rollout.bitwise=true", "model.dtype=float32"], "rollout.engine"),
    "routes": (["actor.router_replay=engine"], "actor.router_replay"),
    "options": (["rollout.engine_options={mine: 1}"], "rollout.engine_options"),
}
# The same for abilities that a server implements itself.
SERVED: dict[str, tuple[list[str], str]] = {
    "starts_server": ([], "rollout.server.endpoints"),
    "reloads_server": (
        ["rollout.server.endpoints=[http://a]", "rollout.server.directory=w"],
        "rollout.server.on_update",
    ),
    "this_python": (["rollout.server.on_update=ls"], "rollout.server.python"),
}
SHAPE = ModelShape(
    family="qwen2",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=64,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=256,
)


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    """`bare` declares nothing, `able` all abilities of engines in the ranks."""
    with restored_registries():
        register_rollout_engine("bare")(lambda spec: None)
        register_rollout_engine("able", supports=NEEDED)(lambda spec: None)
        yield


def load(*overrides: str) -> RunConfig:
    return load_config(None, [*MINIMAL, *overrides]).config


@pytest.mark.parametrize("ability", NEEDED)
def test_what_is_not_declared_is_refused(ability: str) -> None:
    """With the setting, the engine, and the engines that have it; also if everything else is declared."""
    overrides, setting = NEEDED[ability]
    register_rollout_engine("almost", supports=NEEDED.keys() - {ability})(lambda spec: None)
    with pytest.raises(UserError, match="bare"):
        load(*overrides, "rollout.engine=bare")
    with pytest.raises(UserError) as error:
        load(*overrides, "rollout.engine=almost")
    assert error.value.source.startswith(f"{setting} (") and "'almost'" in error.value.found
    assert name_engines(ability) in error.value.expected + error.value.hint
    assert load(*overrides, "rollout.engine=able").rollout.supports(ability)


@pytest.mark.parametrize("ability", SERVED)
def test_a_server_is_asked_for_what_it_lacks(ability: str) -> None:
    overrides, setting = SERVED[ability]
    others = {"is_server", *SERVED} - {ability}
    register_rollout_engine("lacking", supports=others)(lambda spec: None)
    register_rollout_engine("whole", supports={*others, ability})(lambda spec: None)
    with pytest.raises(UserError) as error:
        load(*overrides, "rollout.engine=lacking")
    assert error.value.source.startswith(setting) and "'lacking'" in error.value.found
    assert load(*overrides, "rollout.engine=whole").rollout.supports(ability)


def test_a_plain_run_needs_nothing() -> None:
    """Settings of servers are put aside, as with any engine in the ranks."""
    loaded = load_config(None, [*MINIMAL, "rollout.engine=bare", "rollout.server.python=p", "rollout.silent_seconds=5"])
    assert loaded.notes == [
        "ignored: rollout.server=ServerConfig(endpoints=[], directory=None, on_update=None, python='p'), "
        "rollout.engine 'bare' is no server",
        "ignored: rollout.silent_seconds=5.0 (command line), rollout.engine 'bare' is in the ranks",
    ]


def test_an_engine_that_is_the_actor() -> None:
    """It has the actor's layout and ranks, and adapters that are computed as in training."""
    register_rollout_engine("own", supports={"is_actor", "bitwise"})(lambda spec: None)
    layout = ["actor.tensor_model_parallel_size=2", "actor.pipeline_model_parallel_size=2"]
    config = load(*layout, "rollout.engine=own")
    plan = BatchPlan.build(config, 8, resolve(config))
    assert (plan.engine_is_actor, plan.engine_ranks, plan.num_engines) == (True, 4, 2)
    load("rollout.bitwise=true", "model.dtype=float32", "actor.lora.rank=4", "rollout.engine=own")
    for overrides, text in (
        (["actor.zero_stage=3"], "runs the actor's modules"),
        (["actor.expert_tensor_parallel_size=2"], "whole tensor parallel groups"),
    ):
        with pytest.raises(UserError, match=text):
            load(*overrides, "rollout.engine=own")
    placed = load("rollout.engine=own", "placement.actor=0-3", "placement.rollout=4-7")
    with pytest.raises(UserError, match="rollout.engine = 'own' on other ranks than the actor"):
        BatchPlan.build(placed, 8, resolve(placed))


def test_models_that_an_engine_serves() -> None:
    """Gated delta nets, sinks as published, and other sinks are three abilities; the last two name the engines."""
    nets = replace(SHAPE, delta_net=DeltaNetSizes(2, 4, 16, 16, 4))
    sinks = replace(SHAPE, family="gpt_oss", sliding_layers=(1,))
    for shape, abilities, text in (
        (nets, {"delta_nets"}, "its cache holds keys and values"),
        (sinks, {"sinks", "any_sinks"}, "whose heads have sinks"),
    ):
        name = "_".join(sorted(abilities))
        register_rollout_engine(name, supports=abilities)(lambda spec: None)
        check_engine(shape, name)
        with pytest.raises(UserError, match=f"rollout.engine = 'bare' with a {shape.family} model.*{text}") as error:
            check_engine(shape, "bare")
        assert f" or {name}" in error.value.expected
    register_rollout_engine("as_published", supports={"sinks"})(lambda spec: None)
    with pytest.raises(UserError, match="'as_published' with a gpt_oss model of windows in the layers"):
        check_engine(sinks, "as_published")
    with pytest.raises(UserError, match="rollout.engine = 'able' has another order"):
        check_bitwise(replace(SHAPE, num_experts=4), 1, "able")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without a GPU cannot run")
def test_an_engine_refuses_models_on_a_cpu() -> None:
    """By a function of its own, in a line of the plan."""

    def refuse(shape: ModelShape, config: RolloutConfig) -> None:
        raise UserError(
            f"{shape.family} on {config.tensor_model_parallel_size}",
            source="model.path",
            expected="another",
            hint="none",
        )

    ENGINES["picky"] = RegisteredEngine(lambda spec: None, check_on_cpu=refuse)
    config = load("rollout.engine=picky")
    roles = {"actor": RoleInputs(resolve(config).roles["actor"], SHAPE, ParallelLayout(1))}
    assert check_machine(config, roles, "picky") == ["this machine could not start the run: qwen2 on 1"]
    assert check_machine(config, roles, "bare") == []


def test_an_ability_that_does_not_exist(tmp_path: Path) -> None:
    """With the place of the engine, also from a plugin."""
    file = tmp_path / "plugin.py"
    file.write_text(
        "from megatron_rl.engines.protocol import register_rollout_engine\n"
        "@register_rollout_engine('typo', supports={'trunkation'})\ndef make(spec):\n    pass\n"
    )
    with pytest.raises(UserError, match="an engine that supports trunkation") as error:
        load(f"algorithm.plugins={file}", "rollout.engine=typo")
    assert error.value.source == f"{file}:2" and error.value.expected == f"of {', '.join(ABILITIES)}"


def test_an_engine_that_is_passed_as_an_object() -> None:
    """The config was checked for the engine of its recipe: it is checked again."""
    config = load("rollout.tensor_model_parallel_size=2")
    with pytest.raises(UserError, match="is not supported by rollout.engine = '<lambda>'"):
        enter_parts(Parts(engine=lambda spec: None), config)

    def make(spec: object) -> None:
        pass

    entry = RegisteredEngine(make, {"tensor_parallel"})
    assert [enter_parts(Parts(engine=entry), config).rollout.engine for _ in range(2)] == ["make", "make"]
