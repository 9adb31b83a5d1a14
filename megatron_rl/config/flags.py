# SPDX-License-Identifier: Apache-2.0
"""Flags of a command line for one start, which no file contains: `--explain` and `--debug-rank R`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.config.schema import Flags
from megatron_rl.types import UserError


def take_flags(words: Sequence[str]) -> tuple[Flags, list[str]]:
    """Split the flags off a command line (UserError if the rank is no number)."""
    flags, rest, left = Flags(), [], iter(words)
    for word in left:
        name, sign, value = word.partition("=")
        if word == "--explain":
            flags = replace(flags, explain=True)
        elif name == "--debug-rank":
            rank = value if sign else next(left, "")
            if not rank.isdecimal():
                hint = "for example --debug-rank 0"
                raise UserError(f"--debug-rank {rank}", source="command line", expected="a rank", hint=hint)
            flags = replace(flags, debug_rank=int(rank))
        else:
            rest.append(word)
    return flags, rest


def check_debug_rank(rank: int, world_size: int) -> None:
    """Refuse a rank to debug that is not in the job, or without debugpy (UserError)."""
    if rank >= world_size:
        raise UserError(
            f"--debug-rank {rank} in a job of {world_size} ranks",
            source="command line",
            expected=f"below {world_size}",
            hint="choose one of them",
        )
    if importlib.util.find_spec("debugpy") is None:
        raise UserError(
            "--debug-rank needs the package debugpy",
            source="command line",
            expected="the package",
            hint="pip install debugpy, at the version of requirements.txt",
        )
