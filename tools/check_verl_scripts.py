# SPDX-License-Identifier: Apache-2.0
"""Run every example script of a verl checkout with stub programs, and load the recorded arguments here.

    python tools/check_verl_scripts.py CHECKOUT [--json FILE]        # without a checkout, skipped

Scripts of `examples/` and `recipe/` run under bash in a scratch directory, with programs on PATH that only record their
arguments. A script counts if it starts a trainer of verl's for text models on GPUs: those that name images, videos,
audio, diffusion or an NPU, or a program of a recipe's own, are left out. A script is accepted (the dry run would start,
given its files), refused for what this program does not have, or has names that are unknown here. The table at the end
names each capability once, with the number of scripts that are refused for it; "no capability" is a fault of this tool
or of the tables of names.
Exit code: 0, or 1 if a name is unknown.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.run.inputs import plan_rl
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError, UserErrors
from tools._arguments import Arguments

_RECORDED = "python python3 torchrun uv ray accelerate deepspeed mpirun srun"
_SILENT = "nvidia-smi pip pip3 wget curl git hf huggingface-cli sleep tee rm mv cp ssh sudo apt-get kill pkill"
_STUB = """#!/bin/bash
[ "$1" = -c ] && exec {python} -I -S "$@"  # a script tests for a module or computes a value
printf '%s\\0' "$@" > "$RECORDS/$(ls "$RECORDS" | wc -l)"
"""
_PRELUDE = "ulimit() { :; }; ifconfig() { :; }"  # limits that a container cannot raise end a script of `set -e`
_SECONDS = 15
_UNSET = re.compile(r": (\w+): (?:unbound|must|[Pp]lease|parameter|set )")  # bash names a variable that is not set
# verl's trainers; DAPO's is verl's with algorithm.filter_groups.
_TRAINERS = re.compile(r"^verl\..*(main_ppo|main_ppo_sync|sft_trainer|fully_async_main)$|^recipe\.dapo\.main_dapo$")
_GIVEN = ["8", "/run"]  # arguments of scripts that take some: ranks of a node, and a directory below the scratch one
_CAPABILITY = re.compile(r"there is no ([^;]+)")
_OTHER_DATA = re.compile(
    r"[-_]vl\b|[-_]vl[-_]|vlm|video|image_key|images|audio|\bomni|minicpm|glm4_1v|geo3k|geometry3k|deepeyes|pokemon|wan2|diffusion"
)
_NPU = re.compile(r"npu|ascend", re.IGNORECASE)


@dataclass
class Outcome:
    """Outcome of one script: left out, accepted (nothing else is set), refused, or unknown names."""

    script: str
    left_out: str = ""
    refused: list[str] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)  # capabilities
    unknown: list[str] = field(default_factory=list)

    def name(self) -> str:
        """Return the verdict in one word."""
        return "left out" if self.left_out else "unknown" if self.unknown else "refused" if self.refused else "accepted"


def write_stubs(directory: Path) -> None:
    """Write the programs that scripts find on PATH."""
    for name in _RECORDED.split():
        (directory / name).write_text(_STUB.format(python=sys.executable))
    for name in _SILENT.split():
        (directory / name).write_text("#!/bin/bash\nexit 0\n")
    for path in directory.iterdir():
        path.chmod(0o755)


def record(script: Path, checkout: Path, stubs: Path) -> list[list[str]]:
    """Run a script with stub programs, and return the arguments of each program that it starts."""
    with tempfile.TemporaryDirectory() as scratch:
        records, place, prelude = Path(scratch, "records"), Path(scratch, "verl"), Path(scratch, "prelude")
        records.mkdir()
        place.mkdir()  # files that a script writes at the root stay out of the checkout
        for entry in checkout.iterdir():
            (place / entry.name).symlink_to(entry)
        prelude.write_text(_PRELUDE)
        environment = {"PATH": f"{stubs}:/usr/bin:/bin", "HOME": f"{scratch}/home", "BASH_ENV": str(prelude)}
        environment["RECORDS"] = str(records)
        arguments = [_GIVEN[0], f"{scratch}{_GIVEN[1]}"] if re.search(r"\$[1#]|\$\{1\}", script.read_text()) else []
        missing = ["USER"]
        while missing:  # variables that the user of a script sets
            environment |= dict.fromkeys(missing, "given")
            for path in records.iterdir():
                path.unlink()
            errors = _run(["bash", str(script), *arguments], place, environment)
            missing = [name for name in _UNSET.findall(errors) if name not in environment]
        found = sorted(records.iterdir(), key=lambda path: int(path.name))
        texts = [path.read_text(errors="replace").replace(str(place), str(checkout)) for path in found]
        return [text.replace(scratch, "").split("\0")[:-1] for text in texts]


def _run(command: list[str], place: Path, environment: dict[str, str]) -> str:
    """Run a command without input, and return its stderr."""
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command,
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        return done.stderr
    return ""


def find_trainer(commands: list[list[str]]) -> tuple[str, list[str], int] | None:
    """Return the module or file of the last command with training data, its arguments, and the ranks of a node."""
    for arguments in reversed(commands):
        programs = [
            index
            for index, argument in enumerate(arguments)
            if (argument.endswith(".py") or arguments[index - 1] == "-m") and "=" not in argument
        ]
        if programs and any("data.train_files=" in argument for argument in arguments):
            ranks = re.search(r"--nproc[-_]per[-_]node[= ](\d+)", " ".join(arguments[: programs[-1]]))
            own = [one for one in arguments[programs[-1] + 1 :] if one and one not in _GIVEN]
            return arguments[programs[-1]], own, int(ranks[1]) if ranks else 8
    return None


def judge(script: str, checkout: Path, trainer: tuple[str, list[str], int] | None) -> Outcome:
    """Load the arguments of a script, and sort the mistakes."""
    outcome = Outcome(script)
    program, arguments, ranks = trainer or ("", [], 8)
    said = " ".join((script, *arguments)).lower()
    if trainer is None or "generation" in program:
        outcome.left_out = "starts no trainer"
    elif not _TRAINERS.search(program):
        outcome.left_out = "a program of its own"
    elif _OTHER_DATA.search(said):
        outcome.left_out = "not text alone"
    elif _NPU.search(script) or "trainer.device=npu" in said:
        outcome.left_out = "for an NPU"
    if outcome.left_out:
        return outcome
    home = checkout.joinpath(*program.split(".")[:-1])  # from where Hydra's --config-path counts
    for place, argument in enumerate(arguments):
        flag, _, path = argument.partition("=")
        if flag == "--config-path":
            arguments[place] = f"{flag}={home / (path or arguments.pop(place + 1))}"
    try:
        loaded = load_config(None, arguments)
        plan = SftPlan.build if "sft_trainer" in program else plan_rl
        plan(loaded.config, loaded.num_ranks or ranks)
    except UserError as error:
        for one in error.errors if isinstance(error, UserErrors) else [error]:
            name = re.match(r"unknown setting '([^']+)'", one.found)
            if name:
                outcome.unknown.append(name[1])
            else:
                outcome.refused.append(f"{one.found} (expected: {one.expected})")
                outcome.missing.add((_CAPABILITY.findall(one.expected) or ["no capability: see the reason above"])[0])
    return outcome


def check(checkout: Path) -> Iterator[Outcome]:
    """Judge every script of a checkout."""
    with tempfile.TemporaryDirectory() as stubs:
        write_stubs(Path(stubs))
        for script in sorted(path for folder in ("examples", "recipe") for path in checkout.glob(f"{folder}/**/*.sh")):
            trainer = find_trainer(record(script, checkout, Path(stubs)))
            yield judge(str(script.relative_to(checkout)), checkout, trainer)


def format_table(outcomes: list[Outcome]) -> str:
    """Format each script with its verdict, then the counts of verdicts and of unknown names."""
    lines = []
    for one in outcomes:
        lines.append(f"{one.name():9} {one.script}{f' ({one.left_out})' if one.left_out else ''}")
        lines += [f"            {reason}" for reason in one.refused]
        lines += [f"            unknown: {', '.join(one.unknown)}"] if one.unknown else []
    names = Counter(name for one in outcomes for name in one.unknown)
    missing = Counter(name for one in outcomes if not one.unknown for name in one.missing)
    for title, found in (("unknown names", names), ("scripts, by missing capability", missing)):
        pairs = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
        lines += ["", f"{title}:", *(f"{count:4} {name}" for name, count in pairs)] if pairs else []
    lines.append("")
    counts = Counter(one.name() for one in outcomes)
    counted = len(outcomes) - counts["left out"]
    lines.append(
        f"{len(outcomes)} scripts, {counted} of text on GPUs: {counts['accepted']} accepted, {counts['refused']} "
        f"refused, {counts['unknown']} with unknown names"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = Arguments(description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, help="a checkout of verl")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write accepted, refused_for_capability, unknown")
    options = parser.parse_args(argv)
    if options.checkout is None:
        print("skipped: no checkout of verl is given")
        return 0
    outcomes = list(check(options.checkout.resolve()))
    if not outcomes:
        print(f"there are no scripts in {options.checkout}/examples or recipe", file=sys.stderr)
        return 2
    print(format_table(outcomes))
    if options.json:
        names = {"accepted": "accepted", "refused": "refused_for_capability", "unknown": "unknown"}
        lists = {key: [one.script for one in outcomes if one.name() == name] for name, key in names.items()}
        options.json.write_text(json.dumps(lists, indent=1))
    return int(any(one.unknown for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
