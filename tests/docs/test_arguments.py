# SPDX-License-Identifier: Apache-2.0
"""Every shell command of every page is accepted: its files exist, its options are declared, its settings load.

A command is a line of a bash block, or an indented one that begins with a program. torchrun's arguments go through its
own parser, settings with their recipe through the loader of configs, and each other option must be declared in the tool
or in one of its imports. Commands beyond these checks have an entry in UNREAD. Not covered: the effect of a command;
tests/docs/test_commands.py runs those of the first pages. A recipe that a page leaves to the reader is an empty one.
"""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron_rl.run.command_line import _split
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
REQUIRED = ["model.path=m", "data.train_files=[t.jsonl]", "data.train_batch_size=256"]
PLACEHOLDERS = {"K", "SEED"}  # numbers in a setting
INDENTED = re.compile(r" {4,}((?:[A-Z_]+=\S+ )*(?:python|bash|torchrun|pytest) .*)")
ASSIGNMENT, SETTING = re.compile(r"[A-Z_0-9]+="), re.compile(r"[a-z_]+(\.[a-z_0-9]+)+=")
# First word, or the whole command -> why it is not read.
UNREAD = {
    "schedule.replay=checkpoints/runs/RUN": "needs the trace of a run; tests/run/test_schedule.py repeats one",
    "source": "of the shell",
    "mkdir": "of the shell",
    "pip": "installs a package that docs/dependencies.md names",
    "megatron-rl": "needs the package installed; tests/launch/test_wheel.py types its commands",
    "ssh": "needs another machine",
    "sbatch": "needs SLURM",
    "launch/serve.sh": "serves until it is stopped; tests/tools/serving/test_server.py starts tools/serve.py",
    "tensorboard": "another program; tests/observability/test_tensorboard.py reads what it shows",
    "wandb": "another program, and needs an account",
    "vllm.entrypoints.openai.api_server": "vLLM's; tests/engines start it with these arguments",
    "torchrun ... algorithm.plugins=my_estimator.py algorithm.options.quantile.quantile=0.25": "the files are on the "
    "page; tests/docs/test_extending.py writes and trains with them",
    "algorithm.plugins=[mine.py]": "the file is on the page; tests/run/test_algorithms_in_loop.py trains with it",
    "algorithm.plugins=[my_estimator.py,": "the files are on the page; tests/docs/test_extending.py trains with them",
}


def read_commands(text: str) -> list[list[str]]:
    """The words of each command of a page, as bash reads them."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ")
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [match[1] for line in outside.splitlines() if (match := INDENTED.match(line))]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS = {
    " ".join(words): words for page in PAGES for words in read_commands((ROOT / page).read_text(encoding="utf-8"))
}


def find_reason(command: str) -> str | None:
    """Return the entry of UNREAD that exempts a command from the check, if any."""
    return next(
        (name for name in UNREAD if command.startswith(f"{name} ") or name in (command, *command.split())), None
    )


@pytest.mark.parametrize("command", [command for command in COMMANDS if find_reason(command) is None])
def test_a_command_is_accepted(command: str) -> None:
    words = list(COMMANDS[command])
    while ASSIGNMENT.match(words[0]):
        words.pop(0)
    if words[0] == "srun":
        words = words[1 : words.index("||")]
    for word in words:
        if re.match(r"(docs|launch|tests|tools)/", word) and not re.search("[A-Z]{3}", word):
            assert (ROOT / word).exists(), word
    program, *words = words
    if program == "torchrun" and words[0] == "...":
        check_settings([word for word in words[1:] if "=" in word or word.endswith(".yaml")])
        return
    if program == "torchrun":
        read = get_args_parser().parse_args(words)
        words = [read.training_script, *read.training_script_args]
    if program == "pytest" or words[:2] == ["-m", "pytest"] or words[0] == "tests/run.sh":
        return  # its paths exist
    assert program in ("python", "bash", "torchrun"), "read it here, or say in UNREAD why it cannot be"
    if words[0] == "-m":
        assert words[1] == "mkdocs"
        return
    script, *arguments = words
    if script == "train.py":  # the reader's, on the page; tests/docs/test_extending.py runs it
        return
    if script.startswith("launch/pretrain_"):
        check_settings(arguments)
        return
    given = {word.partition("=")[0] for word in arguments if word.startswith("--") and word != "--"}
    assert given <= declared_options(ROOT / script), given - declared_options(ROOT / script)
    settings = [word for word in arguments if SETTING.match(word)]
    check_settings([word for word in arguments if word.endswith((".yaml", "RECIPE"))][:1] * bool(settings) + settings)


def check_settings(arguments: list[str]) -> None:
    """Load settings with their recipe if the repository has it, otherwise with the required settings."""
    flags, recipe, settings = _split(arguments)
    if "--help" in flags:
        return
    settings = [
        f"{name}=1" if value in PLACEHOLDERS else f"{name}{equals}{value}"
        for name, equals, value in (word.partition("=") for word in settings)
    ]
    if recipe is not None and (ROOT / recipe).exists():
        load_config(ROOT / recipe, settings)
        return
    assert recipe is None or recipe.parts[0] != "launch", recipe
    given = {word.partition("=")[0] for word in settings}
    load_config(None, [*(word for word in REQUIRED if word.partition("=")[0] not in given), *settings])


@cache
def declared_options(path: Path) -> frozenset[str]:
    """Return option-like strings in the code of a script, or of the neighboring modules that it imports."""
    if path.suffix != ".py":
        return frozenset()
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    found = {text for text in texts if re.fullmatch(r"--[a-z][\w-]*", text)}
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    for module in filter(None, modules):
        for file in (path.parent / f"{module}.py", ROOT / f"{module.replace('.', '/')}.py"):
            if file.exists() and "megatron_rl" not in module:
                found |= declared_options(file)
    return frozenset(found)


def test_no_entry_is_left_over() -> None:
    assert {find_reason(command) for command in COMMANDS} - {None} == {*UNREAD}


@pytest.mark.parametrize(
    "command",
    [
        "python tools/plan.py launch/recipes/toy_arithmetic.yaml --node 8",
        "python tools/no_such_tool.py --nodes 8",
        "torchrun --nproc 4 --nonsense launch/pretrain_grpo.py RECIPE.yaml",
        "torchrun --nproc-per-node 4 launch/pretrain_grpo.py launch/recipes/toy_arithmetic.yaml actor.lrr=1",
        "torchrun --nproc-per-node 4 launch/pretrain_grpo.py RECIPE.yaml actor.lr=fast",
        "python launch/pretrain_grpo.py RECIPE.yaml --world-size 8",
        "bash launch/quickstart.sh trainer.steps=3",
        "frobnicate the model",
    ],
)
def test_wrong_commands_are_found(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, command, command.split())
    with pytest.raises((AssertionError, SystemExit, UserError)):
        test_a_command_is_accepted(command)
