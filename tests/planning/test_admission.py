# SPDX-License-Identifier: Apache-2.0
"""A job that cannot fit is refused by a dry run and at the start, before anything is built; one that fits is not.

Not covered: reading the memory of real GPUs (one line of torch); here the cluster that is found is put in its place.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS
from megatron_rl.planning.admission import check_fits, find_shape, read_job
from megatron_rl.planning.cluster import GIB, Cluster, describe_cluster
from megatron_rl.planning.memory import compute_memory
from megatron_rl.planning.role_layouts import find_gpu_memory
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve
from megatron_rl.types import UserError

ROOT = Path(__file__).resolve().parents[2]
ENTRY = str(ROOT / "launch/pretrain_grpo.py")
RECIPE = ROOT / "launch/recipes/qwen2.5_7b_gsm8k.yaml"
ONE_STAGE = ["actor.tensor_model_parallel_size=1", "actor.sequence_parallel=false"]


def start(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the entry point here; returns its exit status."""
    monkeypatch.setattr("sys.argv", ["pretrain_grpo", str(RECIPE), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(ENTRY, run_name="__main__")
    return end.value.code


def fit(overrides: list[str], cluster: Cluster) -> str:
    """Check the recipe with these overrides."""
    config = load_config(RECIPE, overrides).config
    return check_fits(config, resolve(config), cluster, RECIPE)


def test_dry_run_says_what_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the model's files its shape is still available, and the run would not start."""
    assert start(["--dry-run", "--world-size", "8", "--gpu-memory-gib", "80"], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert "planned memory: at most 73.8 of 80.0 GiB per GPU" in out and "the run would not start" in out
    assert "there is no directory models/Qwen2.5-7B-Instruct" in err
    assert start(["--dry-run", "--world-size", "8"], monkeypatch) == 2
    assert "planned memory" not in capsys.readouterr().out


def test_a_critic_that_a_plugin_asks_for_is_planned(tmp_path: Path) -> None:
    """It has the bytes of a critic for gae, and its layout is checked."""
    plugin = tmp_path / "valued.py"
    plugin.write_text(
        "from megatron_rl.algorithms.advantages import register_advantage_estimator\n"
        "register_advantage_estimator('planned_valued', needs_values=True)(lambda *_: None)\n"
    )
    valued = [f"algorithm.plugins=[{plugin}]", "algorithm.adv_estimator=planned_valued"]
    layout = ["critic.tensor_model_parallel_size=4", "critic.max_tokens_per_microbatch=16384"]
    cluster = describe_cluster(8, 300)
    lines = [fit(settings, cluster) for settings in ([], [*valued, *layout], ["algorithm.adv_estimator=gae", *layout])]
    assert lines[1] == lines[2] != lines[0]
    with pytest.raises(UserError, match="critic.tensor_model_parallel_size"):
        fit([*valued, "critic.tensor_model_parallel_size=3"], cluster)
    ADVANTAGE_ESTIMATORS.pop("planned_valued")


def test_dry_run_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(["--dry-run", "--world-size=8", "--gpu-memory-gib=80", *ONE_STAGE], monkeypatch) == 2
    error = capsys.readouterr().err
    assert 'phase "actor update" takes' in error and "GiB too many" in error and "nearest layout that fits" in error
    assert start(["--dry-run", "--world-size=8", "--gpu-memory-gib=much"], monkeypatch) == 2
    assert start(["--dry-run", "--world-size=8", "--gpu-memory-gib=80", "--gpus-per-node=3"], monkeypatch) == 2
    assert "equal nodes" in capsys.readouterr().err


@pytest.mark.parametrize("is_checked", [True, False])
def test_start_on_gpus_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_checked: bool
) -> None:
    """Before the data, which do not exist here, are read; without the check, the missing data are the first error."""
    model = tmp_path / "Qwen2.5-7B-Instruct"
    model.mkdir()
    (model / "config.json").write_bytes(find_shape(str(model), RECIPE).read_bytes())
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr("megatron_rl.run.grpo.find_gpu_memory", lambda: 80 * GIB)
    arguments = [f"model.path={model}", f"trainer.check_memory={str(is_checked).lower()}", *ONE_STAGE]
    assert start(arguments, monkeypatch) == 2
    error = capsys.readouterr().err
    assert ('phase "actor update" takes' in error) == is_checked and "Traceback" not in error


def test_without_gpus_nothing_is_checked() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    assert find_gpu_memory() is None


def test_cluster_by_its_size() -> None:
    cluster = describe_cluster(16, 40)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.reserve_bytes) == (2, 8, int(0.05 * (40 << 30)))
    assert (describe_cluster(4, 40).nodes, describe_cluster(4, 40, 2).nodes) == (1, 2)


def test_shapes_are_found_in_the_model_then_beside_the_recipe_then_among_ours(tmp_path: Path) -> None:
    name, recipe = "Qwen2.5-7B-Instruct", tmp_path / "recipe.yaml"
    ours = ROOT / f"launch/recipes/shapes/{name}.json"
    assert find_shape(f"/models/{name}", recipe) == find_shape(f"/models/{name}", None) == ours
    beside = tmp_path / f"shapes/{name}.json"
    beside.parent.mkdir()
    beside.write_bytes(ours.read_bytes())
    assert find_shape(f"/models/{name}", recipe) == beside
    assert find_shape("/models/other", recipe) == Path("/models/other/config.json")


def test_models_with_a_path_of_their_own_have_their_own_shape() -> None:
    small = str(ROOT / "launch/recipes/shapes/Qwen2.5-0.5B-Instruct.json")
    settings = ["algorithm.adv_estimator=gae", "reward_model.path=/models/Qwen2.5-0.5B-Instruct"]
    settings.append("reward_model.further.large={path: /models/Qwen2.5-7B-Instruct, offload: true}")
    config = load_config(RECIPE, settings).config
    job = read_job(config, resolve(config), describe_cluster(8, 80), RECIPE)
    critic, reward_model = job.shapes["critic"], job.shapes["reward_model"]
    assert critic.num_layers == 28 and critic.has_score_head
    assert reward_model.num_layers == 24 and reward_model.has_score_head
    assert job.shapes["reward_model.further.large"].num_layers == 28
    resting, *_, large = [phase.parts for phase in compute_memory(job)[0].phases if phase.name.startswith("reward")]
    assert large["reward model large"] > 4 * large["reward model"] > 0, "resident while it scores, and only then"
    assert resting["reward model"] == large["reward model"] and "reward model large" not in resting
    job = read_job(config, resolve(config), describe_cluster(8, 80), RECIPE, {"critic": Path(small)})
    assert job.shapes["critic"].num_layers == 24
    with pytest.raises(UserError, match="/models/judge/config.json"):
        fit(["reward_model.path=/models/judge"], describe_cluster(8, 80))


def test_roles_on_ranks_of_their_own_are_judged_there() -> None:
    """The critic of 7B parameters takes more on two ranks than the actor on four, or an engine on two."""
    placement = ["algorithm.adv_estimator=gae", "placement.actor=0-3", "placement.critic=4-5", "placement.rollout=6-7"]
    placement += [
        "rollout.tensor_model_parallel_size=2",
        "algorithm.kl_coef=0",
        "critic.lr=1e-6",
        "critic.max_tokens_per_microbatch=16384",
    ]
    assert fit(placement, describe_cluster(8, 250)).count('in phase "critic update" on rank 4;') == 1
    with pytest.raises(UserError, match="on rank 4: .* GiB too many") as caught:
        fit(placement, describe_cluster(8, 141))
    change = [word for word in caught.value.hint.split() if "=" in word]
    assert "the nearest layout that fits: critic.tensor_model_parallel_size=2 " in caught.value.hint
    assert "of 141.0 GiB per GPU" in fit([*placement, *change], describe_cluster(8, 141))
    with pytest.raises(UserError, match="GiB too many") as caught:
        fit(placement, describe_cluster(8, 24))
    assert "the placement leaves too little" in caught.value.hint
