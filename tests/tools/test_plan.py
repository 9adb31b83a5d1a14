# SPDX-License-Identifier: Apache-2.0
"""The planning tool: every shipped recipe on the cluster that it names, a large job in time, refusals, files.

The numbers behind the tables are tested in tests/planning/.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(
    path for path in (ROOT / "launch/recipes").glob("*.yaml") if not path.name.startswith(("toy_", "smollm2_"))
)
SEVEN = str(ROOT / "launch/recipes/qwen2.5_7b_gsm8k.yaml")
SEVENTY = str(ROOT / "launch/recipes/qwen2.5_72b_math.yaml")
SEVENTY_LORA = str(ROOT / "launch/recipes/qwen2.5_72b_lora.yaml")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("tools.plan")


def test_recipes_are_shipped_for_real_models() -> None:
    names = {path.stem for path in RECIPES}
    assert {
        "deepseek_v3_math",
        "glm4.5_air_math",
        "qwen2.5_0.5b_gsm8k",
        "qwen2.5_7b_distill",
        "qwen2.5_7b_gsm8k",
        "qwen3_32b_math",
        "qwen3_8b_long",
        "qwen3_8b_math",
        "llama3.1_8b_gsm8k",
        "llama3.1_8b_qlora",
        "qwen2.5_72b_lora",
        "qwen2.5_72b_math",
        "qwen3_30b_a3b_math",
        "qwen3_30b_a3b_zero3",
    } <= names


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_fits_the_cluster_that_it_names(
    recipe: Path, tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command in its head is run as it stands there; no layout is predicted to be 5 % faster."""
    [line] = [line for line in recipe.read_text().splitlines() if line.startswith("#   python tools/plan.py ")]
    monkeypatch.chdir(ROOT)
    out = tmp_path / "plan.json"
    assert tool.main([*shlex.split(line)[3:], f"--json={out}"]) == 0, capsys.readouterr().err
    output = capsys.readouterr()
    assert "the plan fits" in output.out and "<- this recipe" in output.out
    assert "note:" not in output.err
    plan = json.loads(out.read_text())
    assert plan["seconds"]["step"] <= 1.05 * plan["candidates"][0]["seconds"], plan["candidates"][0]["overrides"]


@pytest.mark.parametrize(
    ("recipe", "nodes"), [("deepseek_v3_math", "64"), ("qwen3_30b_a3b_math", "4"), ("qwen3_30b_a3b_zero3", "2")]
)
def test_rollouts_of_mixtures_are_most_of_a_step_but_not_nearly_all(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, nodes: str
) -> None:
    """DeepSeek-V3's took 89 % in engines without latents, DP and DeepEP; the cache held 19 of the longest responses."""
    out = tmp_path / "plan.json"
    arguments = ["--nodes", nodes, "--gpus-per-node", "8", "--gpu-memory-gib", "80", f"--json={out}"]
    assert tool.main([str(ROOT / f"launch/recipes/{recipe}.yaml"), *arguments]) == 0
    plan = json.loads(out.read_text())
    assert 0.5 < plan["seconds"]["rollout"] / plan["seconds"]["step"] <= 0.6
    [held] = re.findall(r"the KV cache holds (\d+) of the longest responses", capsys.readouterr().out)
    assert int(held) >= 256


def test_a_thousand_gpus_are_planned_in_time(tool: ModuleType, tmp_path: Path) -> None:
    """72B on 1024 GPUs with all layouts; half a minute is the promise."""
    start, out = time.monotonic(), tmp_path / "plan.json"
    assert (
        tool.main(
            [SEVENTY, "--nodes", "128", "data.train_batch_size=1024", "actor.ppo_mini_batch_size=256", f"--json={out}"]
        )
        == 0
    )
    assert time.monotonic() - start < 30
    plan = json.loads(out.read_text())
    assert plan["cluster"]["world_size"] == 1024 and plan["fits"] and len(plan["candidates"]) > 10
    assert plan["batch_plan"]["dp_size"] == 32 and len(plan["memory"]) == 4


def test_ways_to_train_are_compared(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """72B on one node: adapters fit, in NF4 too, and all weights in no layout; the recommended settings fit."""
    out = tmp_path / "plan.json"
    assert tool.main([SEVENTY_LORA, "--nodes", "1", f"--json={out}"]) == 0
    found = {method["name"]: method for method in json.loads(out.read_text())["methods"]}
    assert [name for name, method in found.items() if method["fits"]] == ["LoRA", "QLoRA"]
    assert [name for name, method in found.items() if method["is_recipe"]] == ["LoRA"]
    assert "actor.quantization=nf4" in found["QLoRA"]["overrides"]
    assert tool.main([SEVENTY_LORA, "--nodes", "1", *found["QLoRA"]["overrides"]]) == 0
    text = capsys.readouterr().out
    assert "full, ZeRO-1         0        -         -  does not fit in any layout" in text
    assert text.count("QLoRA") == 2 and text.rstrip().endswith("<- this recipe")


def test_ways_that_a_family_is_not_served_with_are_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text part of an image-text model of the size of Qwen3.5-9B, read from its config.json."""
    text = dict(
        vocab_size=248320,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
    )
    config, out = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    assert tool.main([SEVEN, "--hf-config", str(config), f"--json={out}"]) == 0, capsys.readouterr().err
    found = {method["name"]: method for method in json.loads(out.read_text())["methods"]}
    assert [name for name, method in found.items() if method["fits"]] == ["full, ZeRO-1"]
    assert found["full, ZeRO-3"]["refusal"].startswith("actor.zero_stage = 3 with a qwen3_5_text model")
    assert "lora.target_modules" in found["LoRA"]["refusal"]


def test_json_table_and_picture_agree(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "memory.png"
    assert tool.main([SEVEN, f"--json={out}", f"--plot={picture}", "--top=2"]) == 0
    plan, text = json.loads(out.read_text()), capsys.readouterr().out
    phases = plan["memory"][0]["phases"]
    assert list(phases) == ["engine start", "switch", "rollout", "log-probs", "actor update"]
    for phase in phases.values():
        assert phase["total"] == sum(size for part, size in phase.items() if part != "total")
        assert f"{phase['total'] / 2**30:.2f}" in text
    assert plan["seconds"]["step"] == pytest.approx(sum(s for name, s in plan["seconds"].items() if name != "step"))
    assert plan["bytes_per_rank_and_step"]["within node"] == sum(
        t["bytes_per_rank"] for t in plan["traffic"] if t["link"] == "within node"
    )
    assert "rollouts_per_step = train_batch_size * n = 256 * 8 = 2048" in text
    assert "40% of peak operations" in text and "not measured" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert tool.main([SEVEN, "--json=-"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == plan["memory"]


def test_what_does_not_fit_is_refused_with_the_nearest_that_does(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [SEVENTY, "--nodes", "4", "actor.pipeline_model_parallel_size=1"]
    assert tool.main(arguments) == 1
    error = capsys.readouterr().err
    assert 'phase "actor update" takes' in error and "GiB too many" in error
    [hint] = [line for line in error.splitlines() if "hint:" in line]
    change = [word for word in hint.split() if "=" in word]
    assert change and tool.main([*arguments, *change]) == 0, "the hint, typed at the command line, fits"
    capsys.readouterr()
    assert tool.main([SEVENTY, "--nodes", "1", "--gpu-memory-gib", "24", "actor.pipeline_model_parallel_size=1"]) == 1
    assert "no layout of this model fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory-gib=0"], "memory_bytes = 0"),
        (["--lengths=nowhere.txt"], "--lengths nowhere.txt"),
        (["--reserve-gib=90"], "a reserve of 90 GiB"),
        (["--hf-config=/nowhere"], "/nowhere"),
        (["actor.lr=fast"], "actor.lr"),
        (["actor.tensor_model_parallel_size=3"], "world_size 8"),
        (["model.path=/models/unknown"], "/models/unknown"),
        (["reward_model.path=/models/judge", "reward.components=[1.0 model]"], "/models/judge"),
    ],
)
def test_bad_input_is_one_clear_error(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert tool.main([SEVEN, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "hint:" in error and "Traceback" not in error


def test_each_reward_model_is_in_the_plan(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """One of its own TP is in layouts that split the first; methods are found beside a reward model."""
    models = ["reward_model.path=/models/Qwen2.5-7B-Instruct", "reward_model.offload=true"]
    models.append("reward_model.further.small={path: /models/Qwen2.5-0.5B-Instruct, tensor_model_parallel_size: 1}")
    assert tool.main([SEVEN, *models]) == 0
    out = capsys.readouterr().out
    assert "   rewards  reward model small  " in out and "reward_model.tensor_model_parallel_size=2" in out
    rows = {line[2:20].strip(): line.split() for line in out.splitlines() if line.startswith("  reward model")}
    assert float(rows["reward model"][-1][:-1]) > 5 * float(rows["reward model small"][-1][:-1]) > 0, "of the seconds"


SHORT = ["--lengths=lognormal:400,1.0", "--nodes=2", "data.train_batch_size=32", "actor.ppo_mini_batch_size=32"]


def test_schedules_are_simulated_where_lengths_are_given(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option stands in table and JSON, the recommended one in words to type; the simulation is tested apart."""
    out = tmp_path / "plan.json"
    assert tool.main([SEVEN, *SHORT, f"--json={out}", "--top=1"]) == 0
    found, text = json.loads(out.read_text())["schedules"], capsys.readouterr().out
    options = {option["name"]: option for option in found["options"]}
    assert list(options)[:4] == [
        "synchronous, whole groups",
        "synchronous, samples spread",
        "partial rollouts, max_staleness 1",
        "partial rollouts, max_staleness 2",
    ]
    apart = [option for option in options.values() if option["own_ranks"]]
    assert {option["engine_gpus"] for option in apart} == {8} and {o["max_staleness"] for o in apart} == {1, 2}
    assert {"placement.actor=0-7", "placement.rollout=8-15"} <= set(apart[0]["overrides"])
    for option in options.values():
        assert f"{option['name']:42}{option['seconds']:9.1f}" in text
        assert option["staleness_max"] <= option["max_staleness"] and 0 <= option["engine_idle"] < 1
        assert (option["trainer_idle"] is None) == (not option["own_ranks"])
        stale = option["max_staleness"] > 0
        assert stale == ("algorithm.importance_sampling=token-truncate" in option["overrides"])
    best = options[found["recommended"]]
    assert best["seconds"] <= 1.1 * min(option["seconds"] for option in options.values())
    assert f"to choose it: {' '.join(best['overrides'])}\n" in text
    assert "lognormal with median 400" in text and "lognormal with median 400" in found["lengths"]


def test_without_lengths_or_without_room_nothing_is_simulated(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([SEVEN, "--json=-"]) == 0
    assert "schedules" not in json.loads(capsys.readouterr().out)
    assert tool.main([SEVEN, *SHORT, "--gpu-memory-gib=24"]) == 1
    assert "schedules" not in capsys.readouterr().out


def test_a_placed_recipe_is_planned(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory of each combination of roles, the engines' own cache, and schedules of the ranks that it names."""
    placed = [
        "placement.actor=1/2",
        "placement.rollout=4-7",
        "algorithm.kl_coef=0",
        "actor.recompute_granularity=full",
        "rollout.tensor_model_parallel_size=4",
        *SHORT[:1],
        *SHORT[2:],
    ]
    assert tool.main([SEVEN, *placed, "--json=-"]) == 0
    found = json.loads(capsys.readouterr().out)
    roles = {rank["rank"]: rank["roles"] for rank in found["memory"]}
    assert roles[0] == ["actor"] and roles[4] == ["rollout"] and set(roles) == {0, 4, 5, 6, 7}
    phases = {rank["rank"]: rank["phases"] for rank in found["memory"]}
    assert "rollout" not in phases[0] and "KV cache" in phases[4]["rollout"]
    assert [rank["pipeline_stage"] for rank in found["memory"]] == [0, None, None, None, None]
    options = {option["name"]: option for option in found["schedules"]["options"]}
    assert list(options)[2:] == ["placed as it is, max_staleness 1", "placed as it is, max_staleness 2"]
    assert all(option["own_ranks"] and option["engine_gpus"] == 4 for option in options.values())
    assert tool.main([SEVEN, *placed]) == 0
    text = capsys.readouterr().out
    assert "placement: actor on 0-3, rollout on 4-7" in text and "peak of ranks like 4, with rollout: " in text


def test_a_verl_recipe_is_planned(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The tutorial's six GPUs, its model's shape found by name; ignored settings are noted."""
    recipe = ROOT / "tests/config/verl/tutorial.yaml"
    assert tool.main([str(recipe), "--gpus-per-node=6", "algorithm.adv_estimator=grpo"]) == 1
    output = capsys.readouterr()
    assert "rollouts_per_engine = train_batch_size / num_engines * n = 60 / 3 * 12 = 240" in output.out
    assert "settings without effect on the results" in output.err and "actor_rollout_ref.actor.strategy" in output.err
    assert "the nearest layout that fits: actor." in output.err


def test_help_is_complete(capsys: pytest.CaptureFixture[str], tool: ModuleType) -> None:
    with pytest.raises(SystemExit) as end:
        tool.main(["--help"])
    assert end.value.code == 0 and "--gpu-memory-gib" in capsys.readouterr().out


def test_a_lost_engine_has_a_price(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines outside the job need no memory in it; with the job's GPUs beside them, a rollout is that of ranks."""
    out, alike = tmp_path / "plan.json", ["rollout.gpu_memory_utilization=0.8", "rollout.tensor_model_parallel_size=2"]
    elastic = ["schedule.elastic=true", "trainer.run_dir=x", "placement.rollout=0-0", "--engine-gpus", "8"]
    assert tool.main([SEVEN, "--nodes", "1", *alike, *elastic, f"--json={out}"]) == 0
    text, plan = capsys.readouterr().out, json.loads(out.read_text())
    loss, seconds = plan["loss_of_an_engine"], plan["seconds"]
    assert "an engine that joins fetches 15.23 GB" in text and "the KV cache holds" not in text
    # A quarter of 2,048 responses, of up to 1,024 tokens; 7.6 billion parameters in bfloat16.
    assert (loss["lost_responses"], loss["lost_tokens"]) == (512, 512 * 1024)
    assert loss["bytes_to_join"] == pytest.approx(2 * 7.6156e9, rel=1e-3)
    placed = ["placement.actor=0-7", "placement.reference=0-7", "placement.rollout=8-15"]
    assert tool.main([SEVEN, "--nodes", "2", *alike, *placed, f"--json={out}"]) == 0
    inside = json.loads(out.read_text())
    assert seconds["rollout"] == pytest.approx(inside["seconds"]["rollout"]) and inside["loss_of_an_engine"] is None
    assert tool.main([SEVEN, "--nodes", "1", *alike, *elastic[:-1], "6", f"--json={out}"]) == 0
    assert json.loads(out.read_text())["seconds"]["step"] == pytest.approx(loss["step_with_one_fewer"])
    assert loss["step_with_one_fewer"] > 1.05 * loss["step"]
