# SPDX-License-Identifier: Apache-2.0
"""Every command of README.md and of docs/getting-started.md runs here, is covered elsewhere, or is exempt for a reason.

Commands run unchanged, in a directory that looks like a checkout and holds their inputs. Their results are tested
elsewhere. A test that covers a command holds the command's own words and takes its arguments from them. The commands of
all other pages are read, not run: tests/docs/test_arguments.py.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from launch_runs import assert_succeeded, fork_program
from tiny_models import ENGINE_SIZES, save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/getting-started.md")
PLACEHOLDERS = {"DIR": "gsm8k"}  # placeholder of a page -> a file or directory of the fixture

# Command -> its output.
RUN = {
    "python launch/pretrain_grpo.py my_recipe.yaml --dry-run --world-size 64": "train_batch_size: 256",
    "python launch/pretrain_grpo.py --help": "trainer.run_dir",
    "python tools/plan.py my_recipe.yaml --nodes 8 --gpus-per-node 8": "the plan fits",
    "python tools/plan.py launch/recipes/qwen2.5_7b_gsm8k.yaml --nodes 1 --gpus-per-node 8 --gpu-memory-gib 80": "the plan fits",
    "python tools/view_rollouts.py checkpoints/runs/RUN --out page.html": "2 rollouts of 2 steps",
    "python tools/prepare_prompts.py --dataset gsm8k --input DIR --out data/gsm8k": "1 prompts",
    "python launch/pretrain_grpo.py launch/recipes/qwen2.5_7b_gsm8k.yaml --dry-run --world-size 8": "batch plan:",
    "python tools/view_rollouts.py checkpoints/runs/first --out page.html": "2 rollouts of 2 steps",
    "python tools/compare_runs.py checkpoints/runs/first checkpoints/runs/second --metrics reward/mean --out curves.png"
    "": "curves.png",
}
# Command -> the test that holds it, word for word, and runs it; or the line of continuous integration.
COVERED = {
    "python tools/evaluate.py checkpoints/runs/RUN/config.yaml model.path=checkpoints/runs/RUN --samples 4": "tests/tools/test_evaluate.py::test_a_run_by_its_own_config_and_plain_python",
    "bash launch/quickstart.sh": "tests/launch/test_quickstart.py::test_the_whole_of_it",
    "NPROC=2 bash launch/quickstart.sh trainer.total_steps=5": "tests/launch/test_quickstart.py::test_two_ranks_and_five_steps",
    "bash tests/run.sh": ".ci/run::exec bash tests/run.sh",
    "torchrun --nproc-per-node 4 launch/pretrain_grpo.py RECIPE.yaml algorithm.plugins=[mine.py] "
    "algorithm.adv_estimator=best_of_group algorithm.policy_loss=plain": "tests/run/test_algorithms_in_loop.py::test_estimator_and_loss_of_the_users_own",
    "megatron-rl toy-task --out checkpoints/toy_arithmetic": "tests/launch/test_wheel.py::test_training_from_a_wheel_in_another_directory",
    "megatron-rl finetune --nproc-per-node 2 toy_arithmetic_sft.yaml": "tests/launch/test_wheel.py::test_training_from_a_wheel_in_another_directory",
    "megatron-rl train --nproc-per-node 2 toy_arithmetic.yaml actor.pipeline_model_parallel_size=1": "tests/launch/test_wheel.py::test_training_from_a_wheel_in_another_directory",
    "python tools/doctor.py": "tests/tools/test_doctor.py::test_one_machine",
    "python tools/inspect_checkpoint.py checkpoints/runs/first": "tests/tools/test_convert.py::test_training_checkpoints",
    "python tools/convert_megatron_to_hf.py --checkpoint checkpoints/runs/first --out policy": "tests/tools/test_convert.py::test_training_checkpoints",
}
NOT_RUN = {
    "pip install .[cpu]": "installs packages",
    "megatron-rl --help": "needs the package installed; tests/launch/test_wheel.py has its commands",
    "bash launch/quickstart_real.sh": "downloads a model",
    "source .venv/bin/activate": "the environment of this test is active",
    "torchrun --nproc-per-node 8 launch/pretrain_grpo.py my_recipe.yaml actor.lr=1e-6 --sequence-parallel": "needs GPUs and a model of the reader's; tests/launch/test_entry_points.py runs torchrun with the toy recipe",
    "bash launch/train_single_node.sh launch/recipes/qwen2.5_7b_gsm8k.yaml trainer.run_dir=checkpoints/runs/first": "needs 8 GPUs and the model; tests/launch/test_launch_scripts.py runs the script",
    "torchrun --standalone --nproc-per-node 8 launch/pretrain_grpo.py launch/recipes/qwen2.5_7b_gsm8k.yaml "
    "actor.lr=2e-6": "needs 8 GPUs and the model",
    "tensorboard --logdir checkpoints/runs": "serves until it is stopped",
}


def list_commands(page: str) -> list[str]:
    """The commands of the bash blocks of a page: without comments, continued lines joined, words as bash reads them."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [" ".join(found) for found in words if found]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    """Launchers and tools, a recipe with a small model and prompts, a data set in its published form, and two runs."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in ("launch", "tools", "megatron_rl"):
        (directory / name).symlink_to(ROOT / name)
    recipe = (ROOT / "launch/recipes/qwen2.5_7b_gsm8k.yaml").read_text()
    (directory / "my_recipe.yaml").write_text(recipe)
    _write_what_the_recipe_reads(directory, task)
    (directory / "shapes").symlink_to(ROOT / "launch/recipes/shapes")  # plan.py looks beside the recipe
    (directory / "gsm8k").mkdir()
    for split in ("train", "test"):
        row = {"question": "How much is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}
        (directory / f"gsm8k/{split}.jsonl").write_text((json.dumps(row) + "\n") * (256 if split == "train" else 1))
    for name in ("RUN", "first", "second"):
        run = directory / "checkpoints/runs" / name
        (run / "rollouts").mkdir(parents=True)
        for step in (1, 2):
            rollout = {"prompt_id": 0, "sample_index": 0, "prompt": "2+3=", "response": "5", "reward": 1.0}
            (run / f"rollouts/step_{step}.jsonl").write_text(json.dumps(rollout) + "\n")
        (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in (1, 2)))
    return directory


def _write_what_the_recipe_reads(directory: Path, task: Path) -> None:
    """Write the inputs of the recipe: a model whose heads four ranks can share, and a batch of prompts."""
    model = directory / "models/Qwen2.5-7B-Instruct"
    save_tiny_model(
        model,
        "qwen2",
        **ENGINE_SIZES | dict(num_key_value_heads=4),
        vocab_size=64,
        num_hidden_layers=1,
        max_position_embeddings=2048,
    )
    (model / "tokenizer.model").write_bytes((task / "tokenizer.model").read_bytes())
    (directory / "data/gsm8k").mkdir(parents=True)
    for split, size in (("train", 256), ("test", 4)):
        rows = [{"prompt": f"{split} {number}+1=", "answer": str(number + 1)} for number in range(size)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / f"data/gsm8k/{split}.parquet")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_accounted_for(page: str) -> None:
    commands = list_commands(page)
    assert len(commands) > 5
    unknown = [command for command in commands if command not in {**RUN, **COVERED, **NOT_RUN}]
    assert not unknown, "run it in this test, name the test that does, or say why it cannot be run"


def test_no_list_has_a_command_that_no_page_has() -> None:
    on_pages = {command for page in PAGES for command in list_commands(page)}
    assert {*RUN, *COVERED, *NOT_RUN} == on_pages
    assert len(RUN) + len(COVERED) + len(NOT_RUN) == len(on_pages)


@pytest.mark.parametrize("command", COVERED)
def test_what_covers_a_command_holds_it(command: str) -> None:
    """The test of that name has the command among its strings, so that it cannot run another one for long."""
    file, _, name = COVERED[command].partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    if file == ".ci/run":
        assert name in text
        return
    [test] = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    strings = [node.value for node in ast.walk(test) if isinstance(node, ast.Constant)]
    assert command in strings


@pytest.mark.parametrize("command", RUN)
def test_command_works(command: str, checkout: Path, tmp_path: Path) -> None:
    """In a fork of this process, whose imports are done; tests/tools/test_help.py starts every program afresh."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]
    done = fork_program(words, tmp_path, checkout)
    assert_succeeded(done)
    assert RUN[command] in done.stdout, done.stdout[-2000:]


def test_python_of_the_readme_is_run_elsewhere() -> None:
    """Its one block is the file that tests/run/test_algorithms_in_loop.py trains with."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block.startswith("# mine.py")
    assert 'startswith("# mine.py")' in (ROOT / "tests/run/test_algorithms_in_loop.py").read_text(encoding="utf-8")
