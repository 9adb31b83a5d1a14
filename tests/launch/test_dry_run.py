# SPDX-License-Identifier: Apache-2.0
"""A dry run and a start agree: both refuse the same configs with the same words, and every accepted one starts.

Both entry points are called in this process; the start is stopped before it builds the run. Not covered: properties of
the machine (GPUs, ports, permissions), which a dry run does not check.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from mistakes import Mistake, read_mistakes
from registries import restored_registries

from launch import pretrain_grpo, pretrain_sft
from megatron_rl.config.fields import config_to_dict, dump_yaml
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.run.command_line import run_command
from megatron_rl.run.inputs import plan_rl, read_rl_inputs, read_sft_inputs
from megatron_rl.run.loading import load_config
from megatron_rl.run.opening import describe_changes
from megatron_rl.types import EXIT_PREEMPTED, EXIT_USER_ERROR, Preempted, UserError
from rl_runs import overrides_for
from tiny_models import ENGINE_SIZES, save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = """
from megatron_rl.algorithms.advantages import register_advantage_estimator

@register_advantage_estimator("dry_valued", needs_values=True)
def estimate(inputs, config):
    return inputs.values

@register_advantage_estimator("dry_grouped", needs_group=True)
def estimate_group(inputs, config):
    return inputs.expand(inputs.scores)
"""
OPTIONS_PLUGIN = """
from dataclasses import dataclass
from typing import Literal
from megatron_rl.algorithms.catalog import register_loss_aggregation, register_policy_loss
from megatron_rl.config.schema import option

@dataclass(frozen=True)
class DryOptions:
    alpha: float = option(0.5, "How far a token may go.", "nats", gt=0)
    side: Literal["left", "right"] = "left"

    def __post_init__(self):
        if self.alpha >= 2:
            raise ValueError("alpha is not below 2")

@register_policy_loss("dry_loss", options=DryOptions)
def loss(inputs, config):
    return -inputs.options.alpha * inputs.logprobs, inputs.loss_mask

@register_loss_aggregation("dry_mean")
def weigh(inputs):
    return 0 * inputs.lengths + 1
"""
RL = {
    "name": "pretrain_grpo",
    "description": "",
    "build_plan": plan_rl,
    "read_inputs": read_rl_inputs,
    "run": pretrain_grpo.train,
}
SFT = {
    "name": "pretrain_sft",
    "description": "",
    "build_plan": SftPlan.build,
    "read_inputs": read_sft_inputs,
    "run": pretrain_sft.train,
}


@pytest.fixture(scope="module")
def files(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The task of sixteen sums, and beside it everything that is wrong."""
    directory = tmp_path_factory.mktemp("planted")
    shutil.copytree(task, directory, dirs_exist_ok=True)
    lines = (directory / "train.jsonl").read_text().splitlines()
    for name, text in {
        "empty.jsonl": "",
        "table.csv": "a,b\n",
        "array.jsonl": '[{"prompt": "1+1=", "answer": "2"}]',
        "short_reward.py": "def score(response):\n    return 1.0\n",
        "malformed.jsonl": "\n".join([*lines[:4], "{broken"]),
        "long.jsonl": '{"prompt": "1234+5678=", "answer": "6912"}',
        "unanswered.jsonl": "\n".join([*lines[:2], '{"prompt": "1+1="}']),
        "plugin.py": PLUGIN,
        "broken_plugin.py": "import megatron_rl\nthis is no Python\n",
        "options.py": OPTIONS_PLUGIN,
        "mutable.py": OPTIONS_PLUGIN.replace("dry_", "mutable_").replace("(frozen=True)", ""),
        "typed.py": OPTIONS_PLUGIN.replace("dry_", "typed_").replace("side:", "table: dict = None\n    side:"),
    }.items():
        (directory / name).write_text(text)
    columns = {name: pyarrow.array([], pyarrow.string()) for name in ("prompt", "answer")}
    pyarrow.parquet.write_table(pyarrow.table(columns), directory / "empty.parquet")
    sizes = {**ENGINE_SIZES, "num_hidden_layers": 2}
    save_tiny_model(directory / "other", "llama", **sizes, vocab_size=16)
    save_tiny_model(directory / "short", "qwen2", **sizes, vocab_size=8)
    save_tiny_model(directory / "olmo2", "olmo2", **sizes, vocab_size=16)
    model = json.loads((directory / "model/config.json").read_text())
    for name, change in (
        ("unknown", {"model_type": "mamba"}),
        ("wider", {"intermediate_size": 256}),
        ("negative", {"initializer_range": -0.02}),
    ):
        shutil.copytree(directory / "model", directory / name)
        (directory / name / "config.json").write_text(json.dumps(model | change))
    for name in ("weightless", "untokenized", "pointer"):
        shutil.copytree(directory / "model", directory / name)
    (directory / "weightless/model.safetensors").unlink()
    (directory / "pointer/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 12345\n")
    for file in (directory / "untokenized").glob("tokenizer*"):
        file.unlink()
    (directory / "nothing").mkdir()
    with restored_registries():
        yield directory


PLUGINS, VALUED = "algorithm.plugins=[{files}/plugin.py]", "algorithm.adv_estimator=dry_valued"
DRY_LOSS, DRY = ["algorithm.plugins={files}/options.py", "algorithm.policy_loss=dry_loss"], "algorithm.options.dry_loss"
TP1 = "actor.tensor_model_parallel_size=1"
# World size 4; the base has tensor parallelism of 2.
MISTAKES = [mistake for mistake in read_mistakes() if mistake.kind in ("train", "finetune")]
PASSES: dict[str, tuple[list[str], list[str]]] = {
    "as it is": ([], []),
    "idle settings": (
        ["trainer.test_freq=100", "data.validation_files=[]", TP1, "trainer.critic_warmup=5", "trainer.capture_step=9"],
        ["trainer.test_freq=100", "actor.sequence_parallel=True", "trainer.critic_warmup=5", "trainer.capture_step=9"],
    ),
    "options of a plugin": (
        [*DRY_LOSS, "algorithm.loss_agg_mode=dry_mean", f"--{DRY}.alpha", "1.5", TP1],
        ["sequence_parallel"],
    ),
    "a mixture of one": (["data.weights=2.5"], []),
    "critic of a plugin": ([PLUGINS, VALUED, "trainer.critic_warmup=5", "rollout.n=1", TP1], ["sequence_parallel"]),
}


@pytest.fixture
def start(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, list[str], str]]:
    """Runs a program on the task with some settings: exit status, error, notes and stdout."""

    def stop(*arguments: object) -> None:
        raise Preempted("the run would be built now")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("megatron_rl.run.grpo.Trainer.__init__", stop)
    monkeypatch.setattr("megatron_rl.run.sft.SftTrainer.__init__", stop)

    def run(program: dict[str, object], settings: list[str], *flags: str) -> tuple[int, str, list[str], str]:
        world_size = settings[settings.index("--world-size") + 1] if "--world-size" in settings else "4"
        monkeypatch.setenv("WORLD_SIZE", world_size)
        base = overrides_for(
            files,
            tmp_path / "run",
            "actor.tensor_model_parallel_size=2",
            "--sequence-parallel",
            "critic.max_tokens_per_microbatch=128",
            "reward_model.max_tokens_per_microbatch=128",
        )
        changes = [setting.replace("{files}", str(files)) for setting in settings]
        if "--world-size" in changes and "--dry-run" not in flags:  # a run has the ranks that torchrun starts
            del changes[(place := changes.index("--world-size")) : place + 2]
        status = run_command([*base, *changes, *flags], **program)
        out, err = capsys.readouterr()
        notes = [line for line in err.splitlines() if line.startswith("note: ")]
        return status, err.partition("error: ")[2], notes, out

    return run


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.kind}-{mistake.name}")
def test_both_refuse_with_the_same_words(mistake: Mistake, files: Path, start: Callable[..., tuple]) -> None:
    program = SFT if mistake.kind == "finetune" else RL
    (status, error, *_), (dry_status, dry_error, *_) = (
        start(program, mistake.given),
        start(program, mistake.given, "--dry-run"),
    )
    assert (status, dry_status) == (EXIT_USER_ERROR, EXIT_USER_ERROR)
    assert error == dry_error
    mistake.assert_answered_by(error, files)


@pytest.mark.parametrize("case", PASSES)
def test_what_passes_starts(case: str, start: Callable[..., tuple]) -> None:
    """Each idle setting is one note, and there are no others, but for the validation set, which is the training set."""
    settings, idle = PASSES[case]
    if "data.validation_files=[]" not in settings:
        idle = [*idle, "validation set validation: each of its 16 prompts is a training prompt"]
    status, error, notes, out = start(RL, settings, "--dry-run")
    assert status == 0 and not error and "total_steps = trainer.total_steps = 2" in out
    assert "steps_per_epoch = num_train_prompts / train_batch_size = 16 / 8 = 2" in out
    assert len(notes) == len(idle) and all(any(name in note for note in notes) for name in idle), notes
    assert out.splitlines()[-1].startswith("the run would start on 4 rank(s) (not checked: ")
    assert start(RL, settings)[0] == EXIT_PREEMPTED
    assert start(SFT, settings, "--dry-run")[0] == 0 and start(SFT, settings)[0] == EXIT_PREEMPTED


def test_only_settings_without_their_defaults_are_printed(start: Callable[..., tuple]) -> None:
    """They load as the same run, and --json has all."""
    settings = ["--teachers.math.path={files}/model", "algorithm.distillation.coef=0.1", *DRY_LOSS]
    status, error, _, out = start(RL, settings, "--dry-run")
    assert status == 0 and not error
    text, _, rest = out.partition("# all other settings have their defaults (--json prints them)\n")
    *_, full = start(RL, settings, "--dry-run", "--json")
    assert load_config(yaml.safe_load(text)).config == load_config(json.loads(full)["config"]).config
    assert (
        len(text.splitlines()) < 60
        and "adam_beta1" not in text
        and "health" not in text
        and rest.startswith("batch plan:\n")
    )


def test_what_the_config_alone_says_is_printed_where_the_model_is_not(start: Callable[..., tuple]) -> None:
    status, error, _, out = start(RL, ["model.path=/nowhere"], "--dry-run", "--json")
    assert status == EXIT_USER_ERROR and "/nowhere" in error
    assert json.loads(out)["batch_plan"]["dp_size"] == 2 and json.loads(out)["config"]["model"]["path"] == "/nowhere"


def test_options_of_a_plugin_are_settings_like_others(
    files: Path, tmp_path: Path, start: Callable[..., tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a recipe, in --help, in the config of the run, which gives the same run again, and in the list of changes."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"algorithm:\n  plugins: [{files}/options.py]\n  policy_loss: dry_loss\n"
        "  options:\n    dry_loss:\n      side: right\n"
    )
    assert run_command([str(recipe), "--help"], **RL) == 0
    text = capsys.readouterr().out
    assert f"{DRY}.alpha  (number; default: 0.5)  [nats]\n      How far a token may go.\n" in text
    assert f"{DRY}.side  (left | right; default: left)" in text
    assert run_command([f"--plugins={files}/broken_plugin.py", "-h"], **RL) == 0
    out, error = capsys.readouterr()
    assert "may be missing: importing the file raised SyntaxError" in error and "rollout.n" in out

    settings = [setting for setting in overrides_for(files, tmp_path / "run") if "--" not in setting]
    loaded = load_config(recipe, [*settings, f"{DRY}.alpha=1e-1"])
    assert asdict(loaded.config.algorithm.options["dry_loss"]) == {"alpha": 0.1, "side": "right"}
    assert loaded.sources[f"{DRY}.side"] == f"{recipe}:6" and loaded.sources[f"{DRY}.alpha"] == "command line"
    again = tmp_path / "config.yaml"
    again.write_text(dump_yaml(loaded.config))
    assert load_config(again).config == loaded.config == load_config(config_to_dict(loaded.config)).config
    changed = load_config(again, [f"{DRY}.alpha=1.0"]).config
    assert describe_changes(again.read_text(), dump_yaml(changed)) == [f"{DRY}.alpha: 0.1 -> 1.0"]
    recipe.write_text(recipe.read_text().replace("right", "rihgt"))
    with pytest.raises(UserError, match=f"source:   {recipe}:6\n(.|\n)*did you mean 'right'"):
        load_config(recipe, settings)


def test_no_torch_is_needed(files: Path, tmp_path: Path) -> None:
    """The whole dry run, with torch made impossible to import: only the headers of the weights stay unread.

    A plugin that needs no torch itself is imported.
    """
    arguments = [
        *overrides_for(files, tmp_path / "run"),
        f"algorithm.plugins={files}/options.py",
        "algorithm.policy_loss=dry_loss",
        "--dry-run",
        "--json",
        "--world-size",
        "8",
    ]
    code = (
        "import sys, runpy; sys.modules['torch'] = None; "
        f"sys.argv = ['x', *{arguments!r}]; runpy.run_path('launch/pretrain_grpo.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["batch_plan"]["num_train_prompts"] == 16
    assert json.loads(done.stdout)["config"]["algorithm"]["options"] == {"dry_loss": {"alpha": 0.5, "side": "left"}}
    assert "note: not checked: the headers of the weights" in done.stderr
