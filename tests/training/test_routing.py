# SPDX-License-Identifier: Apache-2.0
"""Routers with prescribed experts: updates equal transformers with the same ones, in every layout.

The routes are drawn at random, so that nearly every token gets experts that its router would not have chosen; routes of
some tokens are missing. tests/engines/test_routes.py tests the routes of engines. Not covered: GPUs.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from role_setups import take_step

from actor_runs import (
    ALGORITHM,
    LENGTHS,
    Case,
    Measured,
    assert_same,
    build_actor,
    build_batch,
    train,
    train_with_transformers,
)
from distributed import run_ranks
from megatron_rl.models.routing import RoutingCounts
from megatron_rl.training.router_replay import describe_routing, split_layers
from megatron_rl.types import RouteShape
from tiny_models import save_tiny_model

SHAPES = {
    "qwen3_moe": RouteShape(layers=4, choices=2, experts=4),
    "glm4_moe": RouteShape(layers=3, choices=2, experts=4),
    "deepseek_v3": RouteShape(layers=3, choices=4, experts=8),
}
UNKNOWN = 4  # the rollout without routes


def draw_routes(shape: RouteShape) -> np.ndarray:
    """[rollouts + 1, longest, layers, choices]; the last token of each rollout and padding have no routes.

    They need not lie in the groups that a router would choose from.
    """
    rng = np.random.default_rng(3)
    routes = np.stack([shape.unknown(max(LENGTHS))] * (len(LENGTHS) + 1))
    for i, length in enumerate(LENGTHS):
        for place in range(0 if i == UNKNOWN else length - 1):
            routes[i, place] = [rng.permutation(shape.experts)[: shape.choices] for _ in range(shape.layers)]
    return routes


ROUTES = {family: draw_routes(shape) for family, shape in SHAPES.items()}
SP, FULL = dict(sequence_parallel=True), dict(recompute_granularity="full")
LAYOUTS = {
    "tp2-sp": Case(2, dict(tp_size=2), SP),
    "pp2-vpp2": Case(2, dict(pp_size=2, vpp_size=2)),
    "pp2-vpp2-uneven": Case(2, dict(pp_size=2, vpp_size=2, chunk_layers=(0, 2, 1, 1))),
    "cp2": Case(2, dict(cp_size=2)),
    "ep2": Case(2, dict(ep_size=2)),
    "full": Case(1, {}, FULL),
    "selective": Case(1, {}, dict(recompute_granularity="selective")),
    "ep2-pp2-full": Case(4, dict(ep_size=2, pp_size=2), FULL),
    "tp2-cp2-sp-full": Case(4, dict(tp_size=2, cp_size=2), SP | FULL),
}


@dataclass(frozen=True)
class Routed:
    """A model on disk and in transformers, and its run on one rank, with which the others are compared."""

    family: str
    path: Path
    model: torch.nn.Module
    single: Measured

    def train(self, case: Case) -> Measured:
        """The run in a layout."""
        return train(replace(case, routes=ROUTES[self.family]), self.path)


def make_routed(family: str, path: Path) -> Routed:
    """The routers of GLM-4.5 and DeepSeek-V3 are sigmoids with biases, behind a dense layer."""
    model = save_tiny_model(path, family)
    return Routed(family, path, model, train(Case(routes=ROUTES[family]), path))


@pytest.fixture(scope="module")
def softmax(tmp_path_factory: pytest.TempPathFactory) -> Routed:
    return make_routed("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module", params=SHAPES)
def routed(request: pytest.FixtureRequest, softmax: Routed, tmp_path_factory: pytest.TempPathFactory) -> Routed:
    """A model on disk of each kind of router, with its run on one rank."""
    family = request.param
    return softmax if family == softmax.family else make_routed(family, tmp_path_factory.mktemp(family))


def replay_in_transformers(model: Any, routes: np.ndarray) -> None:
    """Let every gate choose from `routes`; sequences come one at a time, in their order."""

    def replace_forward(gate: Any, layer: int) -> None:
        calls, route = 0, gate.forward
        is_sigmoid = hasattr(gate, "e_score_correction_bias")

        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            nonlocal calls
            rows = hidden.flatten(0, -2)
            logits = torch.nn.functional.linear(rows, gate.weight)
            probs = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
            given = torch.from_numpy(routes[calls % len(LENGTHS), : len(rows), layer].astype(np.int64))
            calls += 1
            chosen = torch.where(given[:, :1] == 255, route(hidden)[2], given)
            shares = probs.gather(1, chosen)
            return logits, shares / shares.sum(-1, keepdim=True) * getattr(gate, "routed_scaling_factor", 1.0), chosen

        gate.forward = forward

    blocks = [block.mlp for block in model.model.layers if hasattr(block.mlp, "gate")]
    for layer, block in enumerate(blocks):
        replace_forward(block.gate, layer)


def test_replay_equals_transformers_with_the_same_choices(routed: Routed) -> None:
    """Log-probs, losses, and all weights after an update: gates and experts have the gradients of the current gate."""
    told = copy.deepcopy(routed.model)
    replay_in_transformers(told, ROUTES[routed.family])
    expected = train_with_transformers(told)
    found = routed.single
    known = [{name: got[name] for name in want} for got, want in zip(found.metrics, expected.metrics, strict=True)]
    assert_same(replace(found, metrics=known), expected)


COVERED = {"tp2-sp", "cp2", "ep2"}  # by the layouts that combine them with another


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.slow] * (layout in COVERED)) for layout in LAYOUTS]
)
def test_layout_does_not_change_the_numbers(layout: str, softmax: Routed) -> None:
    """Also the routers' counts count once, with sharing and recomputation."""
    found = softmax.train(LAYOUTS[layout])
    assert found.metrics[0]["policy/ratio_max_deviation"] == 0.0
    assert_same(found, softmax.single)


def test_pipeline_of_experts_does_not_change_the_numbers(routed: Routed) -> None:
    """Routes are numbered without dense layers, over all stages."""
    assert_same(routed.train(LAYOUTS["ep2-pp2-full"]), routed.single)


def test_routers_are_described(softmax: Routed) -> None:
    """About one in six random routes is the router's own choice (of 4 experts 2); missing ones are not counted.

    In the metrics of an update: loads by the routes of the tokens in the loss.
    """
    first = softmax.single.metrics[0]
    assert 0.05 < first["moe/agreement"] < 0.35
    assert first["moe/flipped_tokens"] > 0.95
    assert first["moe/dead_experts"] == 0 and 1 < first["moe/mean_load"] <= first["moe/max_load"] < 2
    assert 0.5 < first["moe/entropy"] < 1


def record_and_replay(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """Log-probs and an update without routes, with those that the model has chosen itself, and beside each other."""
    actor = build_actor(Case(), path)
    batch = actor.record_routes(build_batch(actor.model, Case()))
    own = actor.compute_logprobs(batch)
    replayed = replace(batch, replayed_routes=batch.routes_used, routes_used=None)
    again = actor.record_routes(replayed)
    found = {"own": own, "replayed": actor.compute_logprobs(again), "used": batch.routes_used}
    found["used_again"] = again.routes_used
    take_step(actor, replace(batch, old_logprobs=own), ALGORITHM)
    found["metrics"] = take_step(actor, replace(replayed, old_logprobs=own), ALGORITHM)
    found["tokens"] = batch.sequence_ids >= 0
    return found


def test_what_a_pass_chose_is_replayed(routed: Routed) -> None:
    """R2: with its own choices a pass has the same bits; an update later, routers have moved, the choices have not."""
    found = run_ranks(record_and_replay, 1, routed.path)[0]
    assert torch.equal(found["own"], found["replayed"])
    assert torch.equal(found["used"], found["used_again"])
    assert int(found["used"].max()) == SHAPES[routed.family].experts - 1
    assert 0.5 < found["metrics"]["moe/agreement"] < 1, "an update at this learning rate flips some"


def test_engines_without_routes_measure_no_agreement(softmax: Routed) -> None:
    """Off is off: no routes, no metric that would compare with them, and loads as the routers choose."""
    found = train(Case(), softmax.path).metrics[0]
    names = {f"moe/{name}" for name in ("max_load", "mean_load", "dead_experts", "entropy")}
    thirds = {f"{name}/{third}" for name in names for third in ("first", "middle", "last")}
    assert {name for name in found if name.startswith("moe/")} == names | thirds


def test_a_collapse_of_the_last_layers_is_seen() -> None:
    """Five layers, four experts, two choices of 20 tokens: the first three are even, the last two dead but for two.

    The thirds of five layers are one, two and two layers.
    """
    even, collapsed = [10, 10, 10, 10], [20, 20, 0, 0]
    counts = RoutingCounts(
        loads=torch.tensor([even, even, even, collapsed, collapsed]),
        entropy=20 * math.log(4) * torch.tensor([1.0, 1.0, 0.5, 0.25, 0.0], dtype=torch.float64),
        replayed=torch.tensor([20, 20, 20, 20, 20]),
        agreeing=torch.tensor([20, 10, 20, 0, 10]),
        strayed=torch.tensor(0),
    )
    found = describe_routing(counts, 2, torch.tensor([9.0, 0.0, 16.0, 36.0, 64.0], dtype=torch.float64), 5)
    expected = {
        "": (2.0, 1.4, 4, 0.55, 125**0.5, 0.6),
        "/first": (1.0, 1.0, 0, 1.0, 3.0, 1.0),
        "/middle": (1.0, 1.0, 0, 0.75, 4.0, 0.75),
        "/last": (2.0, 2.0, 4, 0.125, 10.0, 0.25),
    }
    names = ("max_load", "mean_load", "dead_experts", "entropy", "bias_norm", "agreement")
    values = {f"moe/{name}{third}": x for third, xs in expected.items() for name, x in zip(names, xs, strict=True)}
    assert found == pytest.approx(values | {"moe/flipped_tokens": 0.25})


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 58])
def test_thirds_share_the_layers(num_layers: int) -> None:
    """Every layer is in one third, thirds differ by one layer at most, and two layers have no thirds."""
    found = [range(num_layers)[layers] for layers in split_layers(num_layers).values()]
    assert [layer for third in found for layer in third] == (list(range(num_layers)) if num_layers > 2 else [])
    assert not found or max(map(len, found)) - min(map(len, found)) <= 1


def test_unknown_routes_fit_the_type() -> None:
    """255 experts and an unknown one fit a byte, 256 do not."""
    assert RouteShape(2, 1, 255).unknown(3).dtype == np.uint8
    assert RouteShape(2, 1, 256).unknown(3).dtype == np.int16
    assert int(RouteShape(2, 1, 256).unknown(1).max()) > 256
    assert RouteShape.of(RouteShape(2, 1, 256).unknown(3)).unknown(0).dtype == np.int16


BIASED = Case(actor=dict(router_bias_rate=0.01))
BIASED_LAYOUTS = {
    "full": Case(1, {}, FULL),
    "ep2-tp2-sp": Case(4, dict(ep_size=2, tp_size=2), SP),
    "pp2-cp2-full": Case(4, dict(pp_size=2, cp_size=2), FULL),
}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sigmoid routers with biases, whose first layer is dense."""
    path = tmp_path_factory.mktemp("biased")
    save_tiny_model(path, "glm4_moe")
    return path


def balance(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """The routes of a batch, its mask, biases before and after an update, and those after it without a rate."""
    found: dict[str, Any] = {}
    for name, case in (("kept", Case()), ("moved", BIASED)):
        actor = build_actor(case, path)
        batch = actor.record_routes(build_batch(actor.model, case))
        batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
        found["before"] = {k: p.clone() for k, p in actor.model.params.items() if k.endswith("expert_bias")}
        found["metrics"] = take_step(actor, batch, ALGORITHM)
        found[name] = {k: p.clone() for k, p in actor.model.params.items() if k.endswith("expert_bias")}
    return found | {"routes": batch.routes_used, "mask": batch.loss_mask}


def test_biases_follow_the_rule_of_deepseek(biased: Path) -> None:
    """b_i += u sign(mean - c_i), written as a loop over the tokens in the loss; without a rate they stay."""
    found = run_ranks(balance, 1, biased)[0]
    assert found["before"].keys() == found["kept"].keys() and len(found["before"]) == found["routes"].shape[1]
    assert all(torch.equal(found["before"][name], found["kept"][name]) for name in found["before"])
    for layer, name in enumerate(sorted(found["before"])):
        bias = found["before"][name].tolist()
        loads = [0] * len(bias)
        for row, is_counted in enumerate(found["mask"].tolist()):
            for expert in found["routes"][row, layer].tolist() if is_counted else ():
                loads[expert] += 1
        mean = sum(loads) / len(loads)
        expected = [b + 0.01 * ((load < mean) - (load > mean)) for b, load in zip(bias, loads, strict=True)]
        assert found["moved"][name].tolist() == pytest.approx(expected, abs=1e-7)
    norm = torch.cat([*found["moved"].values()]).double().norm().item()
    assert found["metrics"]["moe/bias_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("layout", BIASED_LAYOUTS)
def test_biases_move_alike_in_every_layout(layout: str, biased: Path) -> None:
    """Tokens are counted once, whatever is computed again; replicas of a bias are bitwise equal (see `merge`)."""
    case = BIASED_LAYOUTS[layout]
    assert_same(train(replace(case, actor=case.actor | BIASED.actor), biased), train(BIASED, biased))
