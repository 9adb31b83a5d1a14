# SPDX-License-Identifier: Apache-2.0
"""Run a script of `launch/` or `tools/` by its short name: `megatron-rl train RECIPE.yaml [section.key=value ...]`."""

import os
import sys
from pathlib import Path

_HOUSE = Path(__file__).resolve().parents[1]
ROOT = _HOUSE / "scripts" if (_HOUSE / "scripts").is_dir() else _HOUSE.parent  # of a wheel, or of a checkout
SCRIPTS = {
    "train": "launch/pretrain_grpo.py",
    "finetune": "launch/pretrain_sft.py",
    "preference": "launch/pretrain_preference.py",
    "plan": "tools/plan.py",
    "evaluate": "tools/evaluate.py",
    "convert to-megatron": "tools/convert_hf_to_megatron.py",
    "convert to-huggingface": "tools/convert_megatron_to_hf.py",
    "view": "tools/view_rollouts.py",
    "serve": "tools/serve.py",
    "toy-task": "tools/make_toy_task.py",
}
_USAGE = """usage: megatron-rl COMMAND [--nproc-per-node N] ARGUMENTS

--nproc-per-node starts N ranks on this machine with torchrun; without it there is one rank. For several machines:
torchrun OPTIONS $(command -v megatron-rl) train ARGUMENTS. A recipe that is no file here is searched for in
{recipes}.

"""


def build_command(words: list[str]) -> list[str] | None:
    """Return the command line of Python for the arguments of `megatron-rl`; `None` if they name no script."""
    name = next((name for name in SCRIPTS if words[: len(name.split())] == name.split()), None)
    if name is None:
        return None
    command, words = [sys.executable], words[len(name.split()) :]
    if words[:1] == ["--nproc-per-node"]:
        command += ["-m", "torch.distributed.run", "--standalone", *words[:2]]
        words = words[2:]
    return [*command, str(ROOT / SCRIPTS[name]), *map(_find_recipe, words)]


def _find_recipe(word: str) -> str:
    ours = (
        [] if Path(word).exists() or not word.endswith(".yaml") else [ROOT / word, ROOT / "launch" / "recipes" / word]
    )
    return next((str(path) for path in ours if path.is_file()), word)


def main() -> None:
    """Replace this process by the script's."""
    command = build_command(sys.argv[1:])
    if command is not None:
        os.execv(sys.executable, command)
    is_asked = sys.argv[1:] in (["--help"], ["-h"])
    usage = _USAGE.format(recipes=ROOT / "launch" / "recipes") + "\n".join(f"  megatron-rl {name}" for name in SCRIPTS)
    print(usage, file=sys.stdout if is_asked else sys.stderr)
    sys.exit(0 if is_asked else 2)
