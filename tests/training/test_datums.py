# SPDX-License-Identifier: Apache-2.0
"""Datums: log-probs, losses and gradients equal formulas in float64, and every layout equals them.

The gradient is read from the weights: a step with a learning rate and an epsilon far above it moves them by a multiple
of it, which also shows that these settings hold for one step. Not covered: CUDA, context parallelism with fixed shapes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actor_runs import Case, build_actor, list_pieces, merge_weights
from distributed import run_ranks
from megatron_rl.samples.batch import Packer
from megatron_rl.training.datums import Datum, DatumPasses, check_step_settings
from megatron_rl.training.roles.actor import Actor
from megatron_rl.types import UserError
from tiny_models import VOCAB_SIZE, save_tiny_model

LENGTHS = [9, 4, 17, 1, 12]
SCALE = 100.0  # by which a step moves the weights, relative to their gradient
STEP: dict[str, Any] = dict(lr=1e6 * SCALE, eps=1e6, betas=(0.5, 0.5), weight_decay=0.0, grad_clip_norm=0.0)
LOSSES: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "cispo": {},
    "dro": {"beta": 0.3},
    "gspo": {"clip_high_threshold": 1.02},
}
LAYOUTS = {
    "tp2-sp": Case(2, dict(tp_size=2), dict(sequence_parallel=True)),
    "pp2": Case(2, dict(pp_size=2)),
    "dp2": Case(2),
    "cp2": Case(2, dict(cp_size=2)),
    "dp2-zero3": Case(2, actor=dict(zero_stage=3)),
    "static": Case(1, actor=dict(step_mode="static")),
    "streamed": Case(1, actor=dict(offload_optimizer="stream")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model")
    return path, save_tiny_model(path, "qwen2").double()


def draw(loss: str, k: tuple[int, ...] = (0,)) -> list[Datum]:
    """Datums with targets that are not the next tokens; `k` in turn, 0 for targets [n]."""
    rng = np.random.default_rng(3)
    found = []
    for index, n in enumerate(LENGTHS):
        size = (n, width) if (width := k[index % len(k)]) else (n,)
        tokens, targets = rng.integers(0, VOCAB_SIZE, n), rng.integers(0, VOCAB_SIZE, size)
        if size[1:] and n > 4:
            targets[4] = targets[4, 0]  # the same target again and again
        columns: dict[str, Any] = {
            "logprobs": rng.normal(size=n) * 0.2 - np.log(VOCAB_SIZE),
            "advantages": rng.normal(size=n),
        }
        if loss == "gspo":
            columns["sequence_ratio_mask"] = np.arange(n) % 3 > 0
        if loss == "ppo" and index == 2:
            columns["clip_low_threshold"] = np.linspace(0.7, 1.0, n)
        columns = {"weights": rng.normal(size=size)} if loss == "cross_entropy" else columns
        found.append(Datum(tokens, targets, columns))
    return found


def compute(loss: str, lp: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    """The formulas of the page, in float64, for one datum."""
    if loss == "cross_entropy":
        return -(columns["weights"] * lp).sum()
    q, a = columns["logprobs"], columns["advantages"]
    low, high = (columns.get(f"clip_{name}_threshold", value) for name, value in (("low", 0.8), ("high", 1.2)))
    low, high = (torch.as_tensor(x).expand(len(lp)) for x in (low, high))
    r = (lp - q).exp()
    if loss == "importance_sampling":
        return -(r * a).sum()
    if loss == "ppo":
        return -torch.minimum(r * a, torch.clamp(r, low, high) * a).sum()
    if loss == "cispo":
        return -(torch.clamp(r, low, high).detach() * lp * a).sum()
    if loss == "dro":
        return -(lp * a - columns["beta"] / 2 * (lp - q) ** 2).sum()
    mask = columns["sequence_ratio_mask"] != 0
    mean = (lp - q)[mask].mean() if mask.any() else torch.zeros(())
    s = mean.exp().detach() * (lp - lp.detach()).exp()
    return -torch.minimum(s * a, torch.clamp(s, low, high) * a).sum()


def expect(net: Any, datums: list[Datum], loss: Any) -> tuple[list[np.ndarray], float, dict[str, torch.Tensor]]:
    """Log-probs, loss and gradients by transformers; `loss`: a name, or a function of all datums."""
    net.zero_grad()
    answers = []
    for datum in datums:
        targets = torch.from_numpy(datum.targets)
        logp = net(torch.from_numpy(datum.tokens)[None]).logits[0].log_softmax(-1)
        answers.append(logp.gather(1, targets.view(len(targets), -1)).view(targets.shape))
    if callable(loss):
        total, _ = loss(datums, answers)
    else:
        total = torch.zeros((), dtype=torch.float64)
        for datum, lp in zip(datums, answers, strict=True):
            columns = {name: torch.as_tensor(np.asarray(x), dtype=torch.float64) for name, x in datum.columns.items()}
            settings = {name: torch.tensor(x, dtype=torch.float64) for name, x in LOSSES[loss].items()}
            total = total + compute(loss, lp, settings | columns)
    total.backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return [answer.detach().numpy() for answer in answers], float(total.detach()), gradients


def open_passes(case: Case, path: Path) -> tuple[Actor, DatumPasses]:
    actor = build_actor(case, path)
    plan: Any = SimpleNamespace(longest_sequence=64)
    settings: Any = SimpleNamespace(max_tokens_per_microbatch=24, mtp_lr=0.0)
    algorithm: Any = None
    return actor, DatumPasses(actor, Packer(actor.model, settings, plan, algorithm, actor.model.device))


def measure(rank: int, world_size: int, case: Case, path: Path, datums: list[Datum], loss: Any, parts: Any) -> Any:
    """Answers and sums with and without gradients, and the weights before and after a step."""
    actor, passes = open_passes(case, path)
    config = LOSSES.get(loss, {}) if isinstance(loss, str) else {}
    before = list_pieces(actor.model)
    forward = passes.run(datums, loss, config, backward=False)
    assert actor.optim_step() == {}  # a pass without gradients leaves none
    found = [passes.run(datums[part], loss, config, backward=True) for part in parts]
    passes.run(datums, loss, config, backward=False)  # changes no gradients either
    metrics = actor.optim_step(**STEP)
    return forward, found, metrics, before, list_pieces(actor.model)


def check(case: Case, model: tuple[Path, Any], datums: list[Datum], loss: Any, parts: Any = (slice(None),)) -> None:
    path, net = model
    answers, total, gradients = expect(net, datums, loss)
    ranks = run_ranks(measure, case.world_size, case, path, datums, loss, parts, timeout=100)
    for (forward, sums), found, metrics, _, _ in ranks:
        passed = [answer for part, _ in found for answer in part]
        for want, got, again in zip(answers, forward, passed, strict=True):
            assert got.shape == again.shape == want.shape and got.dtype == again.dtype == np.float32
            np.testing.assert_allclose(got, want, atol=2e-5)
            np.testing.assert_allclose(again, want, atol=2e-5)
        assert sums["loss:sum"] == pytest.approx(total, abs=1e-4)
        assert sum(m["loss:sum"] for _, m in found) == pytest.approx(total, abs=1e-4)
        assert metrics["policy/lr"] == STEP["lr"]
    before, after = (merge_weights([rank[place] for rank in ranks], path) for place in (3, 4))
    high = max(float(g.abs().max()) for g in gradients.values())
    assert high > 1e-2 and len(gradients) > 10
    for name, gradient in gradients.items():
        moved = (before[name] - after[name]).double() / SCALE
        assert (moved - gradient).abs().max() < 1e-4 * high, name


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_equal_their_formulas(loss: str, model: tuple[Path, Any]) -> None:
    check(Case(), model, draw(loss), loss)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_the_formulas(layout: str, model: tuple[Path, Any]) -> None:
    """Several targets per token, and a ratio per sequence; two calls, the later part first."""
    check(LAYOUTS[layout], model, draw("cross_entropy", (0, 3, 5)), "cross_entropy")
    datums = draw("gspo")
    check(LAYOUTS[layout], model, [*datums[3:], *datums[:3]], "gspo", (slice(0, 2), slice(2, None)))


def prefer(datums: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A loss of pairs of datums, such as DPO's."""
    margin = sum(lp.mean() for lp in logprobs[::2]) - sum(lp.mean() for lp in logprobs[1::2])
    return -torch.nn.functional.logsigmoid(margin), {"margin": float(margin.detach())}


@pytest.mark.parametrize("layout", ["tp2-sp", "dp2"])
def test_a_function_of_all_logprobs(layout: str, model: tuple[Path, Any]) -> None:
    check(LAYOUTS[layout], model, draw("any"), prefer)


def change_settings(rank: int, world_size: int, path: Path) -> Any:
    actor, passes = open_passes(Case(actor=dict(lr_warmup_steps=0, adam_beta1=0.8)), path)
    datums, found = draw("ppo"), []
    for given in ({}, STEP | dict(lr=2e-3, eps=1e-3), {}):
        passes.run(datums, "ppo", {}, backward=True)
        lr = actor.optim_step(**given)["policy/lr"]
        groups = [group for adam in actor.optimizer.adams for group in adam.param_groups]
        found.append((lr, [(tuple(g["betas"]), g["eps"], g["weight_decay"]) for g in groups]))
    return found


def test_settings_hold_for_one_step(model: tuple[Path, Any]) -> None:
    (before, given, after) = run_ranks(change_settings, 1, model[0], timeout=60)[0]
    assert before == after and before[0] == 1e-3
    assert sorted(before[1]) == [((0.8, 0.95), 1e-8, 0.0), ((0.8, 0.95), 1e-8, 0.1)]
    assert given == (2e-3, [((0.5, 0.5), 1e-3, 0.0)] * 2)


def refuse(rank: int, world_size: int, path: Path) -> None:
    _, passes = open_passes(Case(), path)
    good = Datum([1, 2], [3, 4], {"logprobs": [0.0, 0.0], "advantages": [1.0, 1.0]})
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        ([good], "stable_reinforce", {}, "expected: cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
        ([], "ppo", {}, "not empty"),
        ([good, replace(good, tokens=[1])], "ppo", {}, "targets of datum 1"),
        ([replace(good, targets=[[1, 2], [3]])], "cross_entropy", {}, "targets of datum 0"),
        ([replace(good, tokens=[1, VOCAB_SIZE])], "ppo", {}, f"token ids below {VOCAB_SIZE}"),
        ([replace(good, targets=[[1, 2], [3, 4]])], "ppo", {}, r"\[n, k\] for cross_entropy"),
        ([replace(good, columns={"logprobs": [0, 0]})], "ppo", {}, "no column 'advantages' in datum 0"),
        ([replace(good, columns={**good.columns, "advantage": [0, 0]})], "dro", {}, "column 'advantage' of datum 0"),
        ([replace(good, columns={**good.columns, "logprobs": [0, np.inf]})], "dro", {}, "finite numbers"),
        ([good], "dro", {"clip_low_threshold": 0.5}, "config clip_low_threshold = 0.5"),
        ([good], "dro", {"beta": np.nan}, "config beta = nan"),
        ([Datum(np.ones(24, int), np.ones(24, int))], "cross_entropy", {}, "24 tokens(?s:.*)at most 23"),
        ([good], lambda datums, logprobs: (logprobs[7], {}), {}, "the loss function failed: IndexError"),
    ]
    for datums, loss, config, message in cases:
        with pytest.raises(UserError, match=message):
            passes.run(datums, loss, config, backward=True)
    config: Any = SimpleNamespace(step_mode="eager")
    for given in (dict(lr=-1.0), dict(betas=(0.9, 1.0)), dict(eps=0), dict(momentum=0.9), dict(lr=True)):
        with pytest.raises(UserError, match=next(iter(given))):
            check_step_settings(given, config)
    config.step_mode = "graph"
    check_step_settings({"lr": 1.0}, config)
    with pytest.raises(UserError, match="only lr with step_mode = graph"):
        check_step_settings({"eps": 1.0}, config)


def test_mistakes_are_refused(model: tuple[Path, Any]) -> None:
    run_ranks(refuse, 1, model[0], timeout=60)


def run_unprinted(rank: int, world_size: int, path: Path) -> None:
    def fail(datum: Datum) -> str:
        raise AssertionError("a text of all data, which no one reads, takes as long as a pass of a small model")

    _, passes = open_passes(Case(), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Datum, "__repr__", fail)
        passes.run(draw("ppo"), "ppo", {}, backward=True)


def test_data_are_not_printed_unless_they_are_refused(model: tuple[Path, Any]) -> None:
    run_ranks(run_unprinted, 1, model[0], timeout=60)
