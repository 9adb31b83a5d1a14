# SPDX-License-Identifier: Apache-2.0
"""The error for a setting that does not exist, with the settings that may be meant; places of settings in errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from megatron_rl.types import UserError

# Options of the command line that are no settings.
_FLAGS = ("--dry-run", "--world-size", "--gpu-memory-gib", "--gpus-per-node", "--json", "--help")
_SYNONYMS = {"max_new_tokens": "max_response_length", "max_steps": "total_steps"}  # of leaves, besides TRL's names
_SETTING = re.compile(r"(?<![\w./])([a-z_]+(?:\.\w+)+)(?:\[\d+\])?(?![\w.\[/]| \()")  # without a place behind it
_HISTORY = "not served: a token's probability would depend on which tokens came before, by a rule that training lacks"
_FORBIDDEN = "not served: it forbids tokens, and which ones is not recorded for training"
# Settings of samplers that users look for, and why they are missing (docs/sampling.md); flags of other programs.
_NOT_SERVED = {
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _HISTORY),
    **dict.fromkeys(
        ("set", "config", "recipe"), "write RECIPE.yaml first, then section.key=value, both without a flag"
    ),
    **dict.fromkeys(("logit_bias", "bad_words", "structured_outputs"), _FORBIDDEN),
}


def unknown_key_error(name: str, source: str, fields: Collection[str], aliases: Mapping[str, str | None]) -> UserError:
    """Return the error for an unknown setting, named at `source`; it suggests close names of `fields` and `aliases`."""
    known = [*fields, *aliases]
    leaf = name.rpartition(".")[2]
    other = _SYNONYMS.get(leaf) or aliases.get(leaf) or leaf
    meant = _end_in(other.rpartition(".")[2], fields)
    meant.sort(key=lambda full: full.partition(".")[0] != name.partition(".")[0])  # of its own section first
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    leaves = {known_name.rpartition(".")[2] for known_name in fields}
    close_leaves = difflib.get_close_matches(leaf, sorted(leaves), n=2, cutoff=0.6)
    by_leaf = [full for close_leaf in close_leaves for full in _end_in(close_leaf, fields)]
    suggestions = list(dict.fromkeys([*meant, *close, *by_leaf]))[:4]
    suggestions = difflib.get_close_matches(f"--{name}", _FLAGS, n=1, cutoff=0.8) or suggestions
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else "see --help for all settings"
    hint = _NOT_SERVED.get(leaf, hint)
    if name.startswith("algorithm.options."):
        hint += " options are declared by the files of algorithm.plugins"
    return UserError(
        f"unknown setting {name!r}",
        source=source,
        expected=f"a setting of the sections {', '.join(dict.fromkeys(full.partition('.')[0] for full in fields))}",
        hint=hint,
    )


def add_places(error: UserError, places: Mapping[str, str]) -> UserError:
    """Return the error with the place of each setting in its source, such as `rollout.n (recipe.yaml:7)`."""

    def add(found: re.Match[str]) -> str:
        place = places.get(found[1])
        return found[0] if place is None else f"{found[0]} ({place})"

    source = _SETTING.sub(add, error.source)
    if source == error.source:
        return error
    return UserError(error.found, source=source, expected=error.expected, hint=error.hint)


def _end_in(leaf: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.rpartition(".")[2] == leaf]
