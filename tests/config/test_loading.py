# SPDX-License-Identifier: Apache-2.0
"""Recipes and command lines, from text to a checked config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.compat.aliases import format_help, format_names
from megatron_rl.config.fields import config_to_dict, dump_yaml, list_fields
from megatron_rl.run.command_line import run_command
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

RECIPE = """\
model:
  path: policy
  dtype: float32
data:
  train_files: train.jsonl
  train_batch_size: 8
actor:
  lr: 1e-5
reference:
"""
MINIMAL = ["model.path=policy", "data.train_files=train.jsonl", "data.train_batch_size=8"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def refusal(recipe: Path | None, *overrides: str) -> UserError:
    """Return the first mistake of a refused config; malformed recipes also lack required settings."""
    with pytest.raises(UserError) as caught:
        load_config(recipe, overrides)
    return getattr(caught.value, "errors", [caught.value])[0]


def test_recipe_values_have_the_declared_types(recipe: Path) -> None:
    config = load_config(recipe).config
    assert config.model.dtype == "float32"
    assert config.data.train_files == ["train.jsonl"]
    assert config.actor.lr == 1e-5 and isinstance(config.actor.lr, float)
    assert config.reference.path is None
    assert config.rollout.n == 8


def test_command_line_alone_is_enough() -> None:
    config = load_config(None, MINIMAL).config
    assert (config.model.path, config.data.train_batch_size) == ("policy", 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_goes_with_either_type(recipe: Path, dtype: str) -> None:
    """The recipes of bfloat16 stay as they are when only the type is changed."""
    loaded = load_config(
        recipe, ["actor.offload_optimizer=true", "critic.offload_optimizer=true", f"model.dtype={dtype}"]
    )
    assert loaded.config.actor.offload_optimizer and loaded.config.critic.offload_optimizer and loaded.notes == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["actor.pipeline_model_parallel_size=2"],
        ["--actor.pipeline_model_parallel_size=2"],
        ["--actor.pipeline-model-parallel-size", "2"],
        ["--pipeline-model-parallel-size", "2"],
        ["--pipeline-model-parallel-size=2"],
        ["--pipeline_model_parallel_size=2"],
        ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"],
        ["+actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"],
        ["actor.pipeline_model_parallel_size=4", "--pipeline-model-parallel-size=2"],
    ],
)
def test_every_spelling_of_an_override(recipe: Path, arguments: list[str]) -> None:
    loaded = load_config(recipe, arguments)
    assert loaded.config.actor.pipeline_model_parallel_size == 2
    assert loaded.sources["actor.pipeline_model_parallel_size"] == "command line"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sequence-parallel"], True),
        (["--sequence-parallel", "false"], False),
        (["--sequence-parallel=false"], False),
        (["--sequence-parallel", "actor.lr=1e-3"], True),
        (["--sequence-parallel", "--lr", "1e-3"], True),
        (["--actor_rollout_ref.actor.megatron.sequence_parallel"], True),
    ],
)
def test_boolean_flag(recipe: Path, arguments: list[str], expected: bool) -> None:
    config = load_config(recipe, ["--actor.tensor_model_parallel_size", "2", *arguments]).config
    assert config.actor.sequence_parallel is expected
    assert config.actor.lr == (1e-3 if "1e-3" in arguments[-1] else 1e-5)


@pytest.mark.parametrize(
    ("override", "section", "leaf", "expected"),
    [
        ("actor.lr=1", "actor", "lr", 1.0),
        ("actor.lr=2E-6", "actor", "lr", 2e-6),
        ("trainer.run_dir=2024", "trainer", "run_dir", "2024"),
        ("trainer.run_dir=2024-13-45", "trainer", "run_dir", "2024-13-45"),
        ("trainer.run_dir=null", "trainer", "run_dir", None),
        ("trainer.total_steps=null", "trainer", "total_steps", None),
        ("data.validation_files=[a.jsonl, b.jsonl]", "data", "validation_files", ["a.jsonl", "b.jsonl"]),
        ("data.validation_files=a.jsonl", "data", "validation_files", ["a.jsonl"]),
        ("reward.function=dir/r=1.py:score", "reward", "function", "dir/r=1.py:score"),
        ("--top-k -1", "rollout", "top_k", -1),
        ("actor.recompute_granularity=none", "actor", "recompute_granularity", "none"),
    ],
)
def test_values_on_the_command_line(recipe: Path, override: str, section: str, leaf: str, expected: object) -> None:
    arguments = override.split(" ") if override.startswith("--") else [override]
    value = getattr(getattr(load_config(recipe, arguments).config, section), leaf)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.n=1.5", "integer"),
        ("rollout.n=true", "integer"),
        ("rollout.n='8'", "integer"),
        ("rollout.n=", "integer"),
        ("actor.lr=fast", "number"),
        ("actor.lr=.nan", "number"),
        ("actor.lr=false", "number"),
        ("actor.sequence_parallel=1", "true or false"),
        ("model.dtype=float16", "float32 | bfloat16"),
        ("data.train_files=[1, 2]", "list of texts"),
        ("trainer.total_steps=ten", "integer or null [steps]"),
    ],
)
def test_wrong_type_is_refused(recipe: Path, override: str, expected: str) -> None:
    error = refusal(recipe, override)
    assert override.partition("=")[0] in error.found
    assert error.source == "command line"
    assert error.expected.startswith(expected)


@pytest.mark.parametrize("number", ["1e39", "-1e300", "1e-300", "-1e-38", "1" + "0" * 400])
@pytest.mark.parametrize("name", ["actor.lr", "actor.adam_eps", "data.weights"])
def test_numbers_that_float32_cannot_hold_are_refused(recipe: Path, name: str, number: str) -> None:
    error = refusal(recipe, f"{name}={number}")
    assert error.found.startswith(name) and "is not accepted" in error.found and "number" in error.expected
    assert name == "data.weights" or "from 1e-37 to 3e+38 in size" in error.hint


@pytest.mark.parametrize("name", ["trainer.seed", "rollout.n", "data.max_prompt_length"])
def test_integers_have_64_bits(recipe: Path, name: str) -> None:
    for value in (1 << 63, -(1 << 63) - 1):
        assert "integers have 64 bits" in refusal(recipe, f"{name}={value}").hint
    assert load_config(recipe, [f"trainer.seed={(1 << 63) - 1}", "actor.lr=1e-37"]).config.trainer.seed == (1 << 63) - 1


@pytest.mark.parametrize(("section", "leaf"), [("trainer", "run_dir"), ("reference", "path")])
def test_a_path_has_no_nul(section: str, leaf: str) -> None:
    """Python would raise a ValueError on opening it; all other characters are left to the system."""
    load_config({section: {leaf: "a\1b"}}, MINIMAL)
    with pytest.raises(UserError, match=rf"{section}.{leaf} = 'a.x00b' \(str\) is not accepted") as caught:
        load_config({section: {leaf: "a\0b"}}, MINIMAL)
    assert "NUL" in caught.value.hint


def test_wrong_type_in_a_recipe_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(RECIPE + "rollout:\n  n: many\n")
    error = refusal(path)
    assert error.source == f"{path}:11"
    assert "rollout.n = 'many' (str)" in error.found


@pytest.mark.parametrize(
    ("text", "line", "suggestion"),
    [
        ("rollout: {temprature: 1.0}\n", 10, "rollout.temperature"),
        ("rolout: {n: 4}\n", 10, "rollout.n"),
        ("trainer:\n  tensor_model_parallel_size: 2\n", 11, "actor.tensor_model_parallel_size"),
        ("actor_rollout_ref: {rollout: {nn: 4}}\n", 10, "actor_rollout_ref.rollout.n"),
        ("trainer: {output_dir: out}\n", 10, "did you mean trainer.run_dir"),
        ("critic: {learning_rate: 1.0}\n", 10, "did you mean critic.lr or actor.lr"),
    ],
)
def test_unknown_key_suggests_the_right_one(tmp_path: Path, text: str, line: int, suggestion: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(RECIPE + text)
    error = refusal(path)
    assert error.source == f"{path}:{line}"
    assert "did you mean" in error.hint and suggestion in error.hint


@pytest.mark.parametrize("override", ["--tensor-model-paralel-size=2", "actor.tensor_model_paralel_size=2"])
def test_unknown_override_suggests_the_right_one(recipe: Path, override: str) -> None:
    error = refusal(recipe, override)
    assert error.source == "command line"
    assert "actor.tensor_model_parallel_size" in error.hint


def test_ambiguous_leaf_is_refused_with_the_candidates(recipe: Path) -> None:
    error = refusal(recipe, "--tensor-model-parallel-size", "2")
    assert "actor.tensor_model_parallel_size and rollout.tensor_model_parallel_size" in error.found


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["stray"], "'stray' is not an override"),
        (["-n=4"], "'-n=4' is not an override"),
        (["--lr"], "--actor.lr has no value"),
        (["--lr", "--rollout.n=4"], "--actor.lr has no value"),
        (["data.train_files=[a"], "the value of data.train_files cannot be read"),
        (["rollout=4"], "the section 'rollout' has the value 4"),
        (["model.path=${HOME}/m"], "contains an interpolation"),
    ],
)
def test_malformed_command_line(recipe: Path, arguments: list[str], found: str) -> None:
    assert found in refusal(recipe, *arguments).found


@pytest.mark.parametrize(
    ("text", "found", "line"),
    [
        ("actor: {lr: 1, lr: 2}\n", "'actor.lr' stands twice", ":1"),
        ("actor: {lr: 1}\nactor: {min_lr: 0}\n", "'actor' stands twice", ":2"),
        ("actor: {lr: 1}\nactor.lr: 2\n", "'actor.lr' stands twice", ":2"),
        ("actor:\n  lr: [1\n", "malformed YAML", ":3"),
        ("actor: {lr: 1}\n\tx: 2\n", "malformed YAML", ":2"),
        ("- actor\n", "not a mapping", ":1"),
        ("? [a, b]\n: 1\n", "malformed YAML", ":1"),
        ("actor: &a\n  x: *a\n", "nested too deeply", ":1"),
        ("model:\n  path: ${oc.env:HOME}\n", "contains an interpolation", ":2"),
        ("trainer:\n  run_dir: 2024-13-45\n", "malformed YAML", ":2"),
    ],
)
def test_malformed_recipe(tmp_path: Path, text: str, found: str, line: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    error = refusal(path)
    assert found in error.found
    assert error.source.endswith(line)


def test_missing_recipe(tmp_path: Path) -> None:
    assert "cannot read the recipe" in refusal(tmp_path / "absent.yaml").found


def test_missing_settings_are_named_together() -> None:
    error = refusal(None, "model.path=policy")
    assert error.found == "data.train_files, data.train_batch_size are missing"


def test_merge_keys_are_resolved(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("model: &m {path: policy}\nreference:\n  <<: *m\ndata: {train_files: [a], train_batch_size: 4}\n")
    assert load_config(path).config.reference.path == "policy"


def test_resolved_config_reads_back_equal(recipe: Path, tmp_path: Path) -> None:
    """Does not cover texts that YAML would read as another type; the dumper quotes those."""
    config = load_config(
        recipe,
        [
            "trainer.run_dir=2024",
            "actor.adam_eps=1e-20",
            "data.validation_files=[v]",
            "data.apply_chat_template_kwargs.enable_thinking=false",
            "teachers.math.path=large",
            "teachers.math.values=[gsm8k]",
            "placement.teachers.math=0-3",
        ],
    ).config
    assert config.teachers["math"].values == ["gsm8k"] and config.placement.placed == ["teachers.math"]
    again = tmp_path / "config.yaml"
    again.write_text(dump_yaml(config))
    assert load_config(again).config == config
    assert list(config_to_dict(config)) == list(dict.fromkeys(info.section for info in list_fields().values()))


def test_parts_of_a_mapping_are_put_together(recipe: Path) -> None:
    name = "data.apply_chat_template_kwargs"
    recipe.write_text(recipe.read_text() + f"{name}: {{enable_thinking: true, style: short}}\n")
    config = load_config(recipe, [f"{name}.enable_thinking=false", f"{name}.level=3"]).config
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False, "style": "short", "level": 3}
    assert load_config(recipe, [f"{name}={{level: 4}}"]).config.data.apply_chat_template_kwargs == {"level": 4}
    with pytest.raises(UserError, match="data.apply_chat_template_kwargs = 3"):
        load_config(recipe, [f"{name}=3"])


def test_credentials_of_urls_are_in_no_file(recipe: Path) -> None:
    urls = ["reward.components=[1.0 https://me:hidden@host:80/a@b, 1 math]", "reward.function=http://key@host/score"]
    config = load_config(recipe, urls).config
    assert "hidden" in config.reward.components[0], "the run itself knows them"
    text = dump_yaml(config) + str(config_to_dict(config))
    assert "hidden" not in text and "key@" not in text
    assert text.count("1.0 https://***@host:80/a@b") == text.count("http://***@host/score") == 2


def test_help_names_every_setting_with_type_default_and_unit() -> None:
    text = format_help()
    for name, info in list_fields().items():
        assert f"  {name}  ({info.describe_type()}; " in text
    assert "data.train_batch_size  (integer; required)  [prompts]" in text
    assert "data.val_files -> data.validation_files" in format_names()


def test_help_on_a_section_or_setting(capsys: pytest.CaptureFixture[str]) -> None:
    program = {"name": "x", "description": "", "build_plan": print, "read_inputs": print, "run": print}
    assert run_command(["--help", "actor.lora"], **program) == 0
    text = capsys.readouterr().out
    names = [line.split()[0] for line in text.splitlines()[1:] if line.startswith("  ") and line[2] != " "]
    assert text.startswith("[actor]  ") and names == [name for name in list_fields() if name.startswith("actor.lora.")]
    assert run_command(["-h", "rollout.n", "actor.lr=1"], **program) == 0
    out = capsys.readouterr().out
    assert out.startswith("[rollout]  ") and out.count("\n  rollout.") == 1 and "\n  rollout.n  (integer; " in out
    assert run_command(["--help", "actr"], **program) == 2
    assert "there is no section or setting 'actr'" in capsys.readouterr().err


def test_loading_needs_no_torch() -> None:
    """Covers config and batch plan; tests/launch/test_dry_run.py has the whole dry run."""
    code = (
        "import sys; from megatron_rl.run.loading import load_config; "
        "from megatron_rl.run.inputs import plan_rl; "
        f"plan_rl(load_config(None, {MINIMAL!r}).config, 2); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
