# SPDX-License-Identifier: Apache-2.0
"""Training states survive a save and a load, in the same layout bit by bit and in any other layout.

Not covered: CUDA generators, apex's and Transformer Engine's Adam, runs of a whole trainer
(tests/run/test_trainer.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from role_setups import make_setup

from actor_runs import Case, build_actor
from checkpoint_runs import STATE, join_pieces, make_content, make_saver, resume_actor, save_actor, snapshot
from distributed import run_ranks
from megatron_rl.checkpoint.directory import find_gaps
from megatron_rl.checkpoint.files import list_side_files
from megatron_rl.checkpoint.pieces import make_state_pieces
from megatron_rl.checkpoint.resuming import create_states, load_training_state
from megatron_rl.checkpoint.torch_dist import ChunkReader
from megatron_rl.config.schema import CriticConfig
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.training.roles.critic import Critic
from megatron_rl.types import UserError
from megatron_rl.weights.shard_box import box_slices
from shards import find_differences
from tiny_models import save_tiny_model

SP = dict(sequence_parallel=True)
NO_ZERO = dict(zero_stage=0)
MUON = dict(optimizer="muon")
ZERO_3 = dict(zero_stage=3)
BIASED = dict(router_bias_rate=0.01)
TP2_PP2 = Case(4, dict(tp_size=2, pp_size=2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    families = ("qwen2", "qwen3_moe", "glm4_moe", "gemma4_text")
    for family in families:
        save_tiny_model(root / family, family)
    return {family: root / family for family in families}


@pytest.fixture(scope="module")
def saved(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint of `TP2_PP2` in `step_1`, and what its ranks have saved."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, save_actor(TP2_PP2, models["qwen2"], directory)


def same_in_another_layout(
    path: Path, root: Path, saved_by: Case, loaded_by: Case, saved: list[Any] | None = None
) -> None:
    """Weights and states are bitwise those that were saved; the next update is the same up to rounding."""
    saved = saved or save_actor(saved_by, path, root)
    loaded = resume_actor(loaded_by, path, root / "step_1")
    assert find_differences(join_pieces([r[1] for r in loaded]), join_pieces([r[1] for r in saved])) == []
    expected = saved[0][2]
    for run, _, metrics, _, _ in loaded:
        assert (run.step, run.policy_version, run.state, run.same_layout) == (1, 1, STATE, False)
        assert metrics["policy/loss"] == pytest.approx(expected["policy/loss"], abs=1e-5)
        assert metrics["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-4)
        assert metrics["policy/lr"] == expected["policy/lr"]


@pytest.mark.parametrize(
    "case",
    [
        Case(2, dtype="bfloat16"),
        Case(2, actor=NO_ZERO, dtype="bfloat16"),
        Case(actor=NO_ZERO),
        TP2_PP2,
        Case(2, dict(pp_size=2, chunk_layers=(1, 3))),
        Case(2, actor=MUON, dtype="bfloat16"),
        pytest.param(Case(2, actor=ZERO_3, dtype="bfloat16"), marks=pytest.mark.slow),
        Case(2, actor=ZERO_3 | BIASED, dtype="bfloat16"),
        Case(4, dict(shard_size=2), actor=ZERO_3, dtype="bfloat16"),
    ],
    ids=[
        "dp2-bfloat16",
        "dp2-bfloat16-no-zero",
        "no-zero",
        "tp2pp2",
        "pp2-uneven",
        "dp2-bfloat16-muon",
        "dp2-bfloat16-zero3",
        "dp2-bfloat16-zero3-biases",
        "dp4-bfloat16-zero3-replicas",
    ],
)
def test_the_same_layout_goes_on_bit_by_bit(case: Case, models, tmp_path: Path):
    model = models["glm4_moe" if "router_bias_rate" in case.actor else "qwen2"]
    saved = save_actor(case, model, tmp_path, async_save=True)
    resumed = resume_actor(case, model, tmp_path / "step_1")
    for before, after in zip(saved, resumed, strict=True):
        run, loaded, metrics, numbers, trained = after
        assert run.same_layout and metrics == before[2] and torch.equal(numbers, before[3])
        assert find_differences(join_all(loaded), join_all(before[1])) == []
        assert find_differences(join_all(trained), join_all(before[4])) == []


def join_all(pieces) -> dict[str, torch.Tensor]:
    """One rank's pieces by place."""
    return {f"{p.key} {p.offset}": p.data for p in pieces}


@pytest.mark.parametrize(
    "layout",
    [
        Case(4),
        Case(2, dict(cp_size=2)),
        pytest.param(Case(4, dict(tp_size=4)), marks=pytest.mark.slow),
        pytest.param(Case(4, dict(tp_size=2), actor=SP | NO_ZERO), marks=pytest.mark.slow),
        Case(2, dict(pp_size=2, vpp_size=2)),
        Case(2, dict(pp_size=2, chunk_layers=(1, 3))),
        pytest.param(Case(2, dict(pp_size=2, vpp_size=2, chunk_layers=(0, 2, 2, 0))), marks=pytest.mark.slow),
        Case(3, actor=ZERO_3),
        pytest.param(Case(4, dict(tp_size=2), actor=SP | ZERO_3), marks=pytest.mark.slow),
    ],
    ids=["dp4", "cp2", "tp4", "tp2dp2-no-zero", "pp2vpp2", "pp2-uneven", "pp2vpp2-uneven", "dp3-zero3", "tp2dp2-zero3"],
)
def test_tp2_pp2_goes_on_in_other_layouts(layout: Case, models, saved: tuple[Path, list[Any]]):
    """Tied embeddings: the last stage's copy, its states included, is the first stage's."""
    directory, ranks = saved
    same_in_another_layout(models["qwen2"], directory, TP2_PP2, layout, ranks)


def test_muon_goes_on_in_another_layout(models, tmp_path: Path):
    """Its momentum travels; there is no second moment of the matrices of layers."""
    tp2 = Case(4, dict(tp_size=2), SP | MUON)
    same_in_another_layout(models["qwen2"], tmp_path, tp2, Case(3, actor=MUON))
    manifest = json.loads((tmp_path / "step_1/manifest.json").read_text())
    assert manifest["roles"]["actor"]["optimizer"] == "muon" and find_gaps(tmp_path / "step_1", manifest) == []
    keys = ChunkReader(tmp_path / "step_1/actor").tensors
    assert "optimizer.exp_avg_sq.model.norm.weight" in keys
    assert "optimizer.exp_avg.model.layers.0.mlp.up_proj.weight" in keys
    assert "optimizer.exp_avg_sq.model.layers.0.mlp.up_proj.weight" not in keys
    with pytest.raises(Exception, match="trained with muon, this run has actor.optimizer=adam"):
        resume_actor(Case(), models["qwen2"], tmp_path / "step_1")


@pytest.mark.parametrize(
    "saved_by,loaded_by",
    [
        (Case(3, actor=ZERO_3), Case(2)),
        (Case(4, dict(pp_size=2), actor=ZERO_3), Case(2, dict(tp_size=2))),
        pytest.param(
            Case(4, dict(cp_size=2), actor=ZERO_3),
            Case(4, dict(pp_size=2, vpp_size=2), actor=ZERO_3),
            marks=pytest.mark.slow,
        ),
        (Case(2, actor=ZERO_3, dtype="bfloat16"), Case(3, dtype="bfloat16")),
        (Case(4, dict(shard_size=2), actor=ZERO_3), Case(4, actor=ZERO_3)),
        (Case(3, actor=ZERO_3), Case(4, dict(cp_size=2, shard_size=2), actor=ZERO_3)),
    ],
    ids=["dp3", "pp2dp2-to-tp2", "cp2dp2-to-pp2vpp2dp2", "bfloat16", "replicas-to-none", "none-to-replicas"],
)
def test_zero_3_goes_on_in_other_layouts_and_stages(saved_by: Case, loaded_by: Case, models, tmp_path: Path):
    same_in_another_layout(models["qwen2"], tmp_path, saved_by, loaded_by)


@pytest.mark.parametrize(
    "saved_by,loaded_by",
    [
        (Case(2, dict(ep_size=2)), Case()),
        pytest.param(Case(4, dict(tp_size=2, ep_size=2), SP), Case(2, dict(pp_size=2)), marks=pytest.mark.slow),
        (Case(2, dict(pp_size=2)), Case(4, dict(ep_size=2))),
        (Case(4, dict(tp_size=2, ep_size=2, etp_size=1), SP), Case(2, dict(tp_size=2), SP)),
    ],
    ids=["ep2-to-1", "tp2ep2-to-pp2", "pp2-to-ep2dp4", "tp2ep2etp1-to-tp2"],
)
def test_experts_go_on_in_other_layouts(saved_by: Case, loaded_by: Case, models, tmp_path: Path):
    same_in_another_layout(models["qwen3_moe"], tmp_path, saved_by, loaded_by)


@pytest.mark.parametrize("actor", [pytest.param({}, marks=pytest.mark.slow), ZERO_3], ids=["zero1", "zero3"])
def test_router_biases_go_on_without_optimizer_states(actor: dict[str, Any], models, tmp_path: Path):
    """No gradient trains them, and a checkpoint without their states is complete."""
    saved_by = Case(2, dict(ep_size=2), actor | BIASED)
    same_in_another_layout(models["glm4_moe"], tmp_path, saved_by, Case(2, dict(pp_size=2), BIASED))
    assert find_gaps(tmp_path / "step_1", json.loads((tmp_path / "step_1/manifest.json").read_text())) == []


def test_scalars_of_layers_go_on_without_optimizer_states(models, tmp_path: Path):
    """No gradient trains them; heads of two sizes, in tensors of their own for each layer."""
    saved_by = Case(2, dict(tp_size=2), SP | ZERO_3)
    same_in_another_layout(models["gemma4_text"], tmp_path, saved_by, Case(2, dict(pp_size=2)))
    assert find_gaps(tmp_path / "step_1", json.loads((tmp_path / "step_1/manifest.json").read_text())) == []


def test_zero_with_odd_ranges_of_a_bfloat16_model(models, tmp_path: Path):
    """Three ranks cut parameters inside their rows; the float32 weights travel too."""
    saved = save_actor(Case(3, dtype="bfloat16"), models["qwen2"], tmp_path)
    loaded = resume_actor(Case(dtype="bfloat16", actor=NO_ZERO), models["qwen2"], tmp_path / "step_1")
    joined = join_pieces([r[1] for r in loaded])
    assert find_differences(joined, join_pieces([r[1] for r in saved])) == []
    assert "optimizer.main_param.model.norm.weight" in joined


def _refuse_on_rank(rank: int, world_size: int, path: Path, directory: Path, other: Path) -> list[str]:
    """Return the errors of invalid checkpoints; nothing of the actor changes."""
    found = []

    def attempt(case: Case, model: Path, tokenizer: Path | None = None) -> None:
        actor = build_actor(case, model)
        before = {name: param.clone() for name, param in actor.model.params.items()}
        with pytest.raises(UserError) as caught:
            load_training_state(
                directory,
                {"actor": actor},
                group=dist.group.WORLD,
                side_files={"actor": list_side_files(path, tokenizer)},
            )
        assert all(torch.equal(before[name], param) for name, param in actor.model.params.items())
        found.append(str(caught.value))

    attempt(Case(world_size), other / "larger-vocabulary")
    attempt(Case(world_size), other / "other-model")
    attempt(Case(world_size, dtype="bfloat16"), path)
    attempt(Case(world_size), path, other / "tokenizer.model")
    return found


def test_what_does_not_fit_is_refused(models, tmp_path: Path):
    path = models["qwen2"]
    (path / "tokenizer.model").write_bytes(b"pieces")
    (tmp_path / "tokenizer.model").write_bytes(b"other pieces")
    save_tiny_model(tmp_path / "larger-vocabulary", "qwen2", vocab_size=600)
    save_tiny_model(tmp_path / "other-model", "qwen2", num_hidden_layers=2, rope_theta=500.0)
    save_actor(Case(2), path, tmp_path)
    errors = run_ranks(_refuse_on_rank, 2, path, tmp_path / "step_1", tmp_path)
    assert errors[0] == errors[1]
    expected = (
        "belongs to another vocabulary: vocab_size 517 where the model has 600",
        "belongs to another model: num_layers 4 where the model has 2, rope_theta 10000.0 where the model has 500.0",
        "the actor was trained in float32, this run has model.dtype=bfloat16",
        "trained with another vocabulary: its tokenizer.model differs from",
    )
    assert all(text in error for text, error in zip(expected, errors[0], strict=True))


def test_critic_and_actor_in_layouts_of_their_own(models, tmp_path: Path):
    """Both roles of PPO in one checkpoint; the critic has another layout and has taken other steps."""
    path = models["qwen2"]

    def build_roles(world_size: int, **critic_sizes: int) -> dict[str, Any]:
        groups = build_groups(ParallelLayout(world_size, **critic_sizes))
        critic = Critic(make_setup("critic", path, CriticConfig(), groups, total_optimizer_steps=10))
        return {"actor": build_actor(Case(world_size), path), "critic": critic}

    def save(rank: int, world_size: int) -> Any:
        roles = build_roles(2, tp_size=2)
        with torch.no_grad():
            create_states(roles["critic"], 3)
            roles["critic"].optimizer.resume(3, {"num_steps": 3})
            for piece in make_state_pieces(roles["critic"], rank, None):
                piece.data.copy_(
                    torch.rand(piece.shape, generator=torch.Generator().manual_seed(len(piece.key)))[
                        box_slices(piece.box)
                    ].view_as(piece.data)
                )
            for name, param in roles["critic"].model.params.items():
                if name.endswith("score.weight"):
                    param.fill_(0.5)
        outcomes = []
        make_saver(tmp_path, outcomes).save(make_content(path), roles)
        assert outcomes[0].error is None
        return snapshot(roles["critic"])

    def load(rank: int, world_size: int) -> Any:
        roles = build_roles(1)
        run = load_training_state(tmp_path / "step_1", roles, side_files={}, group=dist.group.WORLD)
        assert not run.same_layout and [role.optimizer.steps for role in roles.values()] == [0, 3]
        return snapshot(roles["critic"])

    saved, loaded = run_ranks(save, 2), run_ranks(load, 1)
    joined = join_pieces(loaded)
    assert find_differences(joined, join_pieces(saved)) == []
    assert (joined["score.weight"] == 0.5).all() and "optimizer.exp_avg.score.weight" in joined
