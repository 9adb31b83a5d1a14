# SPDX-License-Identifier: Apache-2.0
"""The layer that predicts the token after the next, in training.

Its loss and gradients equal transformers' layers in every layout, and the policy's steps are the same
with and without it, bit for bit. Not covered: the whole program (tests/run/test_mtp_in_loop.py), GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mtp_models import MtpReference, build_with_mtp, save_model_with_mtp
from role_setups import take_step

from actor_runs import (
    ALGORITHM,
    LENGTHS,
    NUM_PROMPT_TOKENS,
    Case,
    build_actor,
    build_batch,
    list_gradients,
    list_pieces,
)
from distributed import run_ranks
from megatron_rl.parallel.collectives import world
from megatron_rl.samples.batch import MicrobatchSlice, TrainBatch
from megatron_rl.training.roles.mtp import Mtp, _compute_loss, find_successors, shift_targets
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.packed_experts import split_huggingface_experts
from tiny_models import draw_tokens

SP: dict[str, Any] = dict(sequence_parallel=True)
# Every rank has the whole gradient of its parameters, also after the step, which sums it over the ranks.
REPLICATED: dict[str, Any] = dict(zero_stage=0, clip_grad=1e9, mtp_lr=1e-3)
LAYOUTS = {
    "single": Case(),
    "tp2-sp": Case(2, dict(tp_size=2), SP),
    "pp2": Case(2, dict(pp_size=2)),
    "dp2": Case(2),
    "ep2": Case(2, dict(ep_size=2)),
    "cp2": Case(2, dict(cp_size=2), dict(recompute_granularity="full")),
    "tp2-pp2-sp": Case(4, dict(tp_size=2, pp_size=2), SP | dict(recompute_granularity="selective")),
}
OTHERS = {"muon-ep2-bf16": Case(2, dict(ep_size=2), dict(optimizer="muon"), dtype="bfloat16")}
SAMPLED = -2.0  # log-prob that every token was sampled with


def _measure(rank: int, world_size: int, case: Case, path: Path, as_drafted: bool = False) -> Any:
    actor = build_with_mtp(case, path, as_drafted)
    batch = build_batch(actor.model, case)
    batch.rollout_logprobs.fill_(SAMPLED)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    metrics = take_step(actor, batch, ALGORITHM)
    pieces: list[Any] = []
    if isinstance(actor.mtp, Mtp):
        pieces = list_gradients(actor.mtp.model)
    return metrics, pieces, list_pieces(actor.model)


def merge_gradients(parts: list[list[Any]], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Whole tensors; replicas have the same, up to the order of sums."""
    full: dict[str, torch.Tensor] = {}
    for name, index, values in (piece for part in parts for piece in part):
        whole = full.setdefault(name, torch.full(shapes[name], torch.nan))
        assert whole[index].isnan().all() or torch.equal(whole[index], values), f"replicas of {name} differ"
        whole[index] = values
    assert not any(x.isnan().any() for x in full.values())
    return full


FAMILIES = ("deepseek_v3", "glm4_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, the mean loss of its layer, the share of drafts accepted, and the gradients."""
    path = tmp_path_factory.mktemp(request.param)
    return path, *measure_reference(save_model_with_mtp(path, request.param), path)


def measure_reference(model: MtpReference, path: Path, as_served: bool = False) -> tuple[float, float, dict[str, Any]]:
    """The mean loss of a layer, the share of drafts accepted, and the gradients; see `MtpReference.score`."""
    shape = load_model_shape(path)
    scored = [model.score(torch.from_numpy(x), as_served)[NUM_PROMPT_TOKENS - 2 :] for x in draw_tokens(LENGTHS)]
    logprobs = torch.cat(scored)
    loss = -logprobs.mean()
    loss.backward()
    grads = split_huggingface_experts(shape.mtp, model.find_gradients())
    accepted = (logprobs.detach() - SAMPLED).clamp(max=0).exp().mean()
    return loss.item(), accepted.item(), grads


def _list_turns(layouts: Iterable[str], *whole: str) -> list[Any]:
    """Rows of a family and a layout, families in turn but for the layouts `whole`; other rows are slow."""
    return [
        pytest.param(family, layout, marks=[pytest.mark.slow] * ((i + j) % 2 and layout not in whole))
        for j, family in enumerate(FAMILIES)
        for i, layout in enumerate(layouts)
    ]


@pytest.mark.parametrize(("reference", "layout"), _list_turns(LAYOUTS), indirect=["reference"])
def test_gradients_equal_transformers(layout: str, reference: Any) -> None:
    compare_with_reference(layout, *reference)


@pytest.mark.parametrize(
    ("family", "layout"), [("glm4_moe", "single"), ("deepseek_v3", "tp2-pp2-sp"), ("glm4_moe", "cp2")]
)
def test_gradients_equal_those_of_the_layer_that_vllm_drafts_with(family: str, layout: str, tmp_path: Path) -> None:
    """Without the embedding of each sequence's second token, several sequences in a microbatch."""
    model = save_model_with_mtp(tmp_path, family)
    published = measure_reference(model, tmp_path)
    model.clear_gradients()
    expected = measure_reference(model, tmp_path, as_served=True)
    assert all(abs(mine / theirs - 1) > 5e-4 for mine, theirs in zip(expected[:2], published[:2], strict=True))
    compare_with_reference(layout, tmp_path, *expected, as_drafted=True)


def compare_with_reference(
    layout: str, path: Path, loss: float, accepted: float, expected: dict[str, Any], as_drafted: bool = False
) -> None:
    """Compare loss, acceptance and gradients of a layout with a reference's."""
    case = LAYOUTS[layout]
    case = Case(case.world_size, case.sizes, REPLICATED | case.actor)
    ranks = run_ranks(_measure, case.world_size, case, path, as_drafted, timeout=100)
    for metrics, *_ in ranks:
        assert metrics == ranks[0][0]
        assert metrics["mtp/loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["mtp/acceptance"] == pytest.approx(accepted, rel=1e-4)
    found = merge_gradients([pieces for _, pieces, _ in ranks], load_model_shape(path).mtp.logical_tensors())
    assert found.keys() == expected.keys() and len(found) > 20
    gaps = {name: (found[name] - x).abs().max().item() for name, x in expected.items()}
    assert max(gaps.values()) <= 1e-5, {k: v for k, v in gaps.items() if v > 1e-5}
    for name, gradient in expected.items():
        assert gradient.any() or ".experts." in name, name


def test_the_share_of_accepted_drafts_by_hand() -> None:
    """Tokens in the proportions of p: their mean of min(1, q / p) is the sum of min(p, q), 0.25 + 0.3 + 0.1."""
    policy, draft = torch.tensor([0.25, 0.5, 0.25]), torch.tensor([0.6, 0.3, 0.1])
    drawn = torch.tensor([0, 1, 1, 2, 2])  # the last of them is not in the loss
    mask = torch.tensor([True] * 4 + [False])
    microbatch: Any = SimpleNamespace(loss_mask=mask, loss_weights=mask / 4, rollout_logprobs=policy[drawn].log())
    _, metrics = _compute_loss(None, microbatch, draft[drawn].log(), torch.zeros(5))
    assert metrics["accepted"].item() / 4 == pytest.approx(torch.minimum(policy, draft).sum().item())


def _measure_policy(rank: int, world_size: int, case: Case, path: Path) -> Any:
    actor = build_with_mtp(case, path) if case.actor.get("mtp_lr") else build_actor(case, path)
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    metrics = [take_step(actor, batch, ALGORITHM) for _ in range(3)]
    pieces = list_pieces(actor.mtp.model) if case.actor.get("mtp_lr") and isinstance(actor.mtp, Mtp) else []
    return metrics, list_pieces(actor.model), pieces


@pytest.mark.parametrize(
    ("reference", "layout"),
    _list_turns(["single", "tp2-pp2-sp", "muon-ep2-bf16"], "single"),
    indirect=["reference"],
)
def test_the_policy_is_the_same_bit_for_bit(layout: str, reference: Any) -> None:
    """Also with clipping, whose norm is the policy's alone; the layer learns meanwhile."""
    path, *_ = reference
    case = (LAYOUTS | OTHERS)[layout]
    off = run_ranks(_measure_policy, case.world_size, case, path, timeout=100)
    case = replace(case, actor=case.actor | dict(mtp_lr=3e-3))
    on = run_ranks(_measure_policy, case.world_size, case, path, timeout=100)
    for (plain, weights, _), (metrics, same, _) in zip(off, on, strict=True):
        for before, after in zip(plain, metrics, strict=True):
            assert {name: after[name] for name in before} == before
            assert after.keys() - before.keys() == {"mtp/loss", "mtp/acceptance", "mtp/grad_norm"}
        assert all(torch.equal(a[2], b[2]) for a, b in zip(weights, same, strict=True))
    losses = [step["mtp/loss"] for step in on[0][0]]
    assert losses[2] < losses[1] < losses[0]


def test_targets_move_by_one_within_their_sequences() -> None:
    """Two sequences and padding in one microbatch, by hand."""

    def shift(rank: int, world_size: int) -> Any:
        batch = build_batch_by_hand()
        shifted = shift_targets(batch, world())
        return (
            find_successors(batch.tokens, batch.predecessors).tolist(),
            shifted.loss_mask.tolist(),
            shifted.predecessors.tolist(),
            shifted.loss_weights.tolist(),
            shifted.ledgers[0].num_tokens,
        )

    ((successors, mask, predecessors, weights, count),) = run_ranks(shift, 1)
    # Rows: a0 a1 a2 a3 | b0 b1 | padding; a2, a3 and b1 are sampled. b1 has no row two before it.
    assert successors == [11, 12, 13, 0, 21, 0, 0]
    assert mask == [False, False, True, True, False, False, False]
    assert predecessors == [0, 0, 0, 1, 4, 4, 6]
    assert weights == [0, 0, 0.5, 0.5, 0, 0, 0] and count == 2


def build_batch_by_hand() -> TrainBatch:
    mask = torch.tensor([False, False, True, True, False, True, False])
    zeros = torch.zeros(7)
    return TrainBatch(
        tokens=torch.tensor([10, 11, 12, 13, 20, 21, 0]),
        position_ids=torch.tensor([0, 1, 2, 3, 0, 1, 0]),
        predecessors=torch.tensor([0, 0, 1, 2, 4, 4, 6]),
        loss_mask=mask,
        loss_weights=mask.float() / 3,
        sequence_ids=torch.tensor([0, 0, 0, 0, 1, 1, -1]),
        rollout_logprobs=zeros,
        slices=[MicrobatchSlice(0, 7, torch.tensor([0, 4, 6, 7], dtype=torch.int32), 4)],
        minibatch_sizes=[1],
    )
