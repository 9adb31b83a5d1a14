# SPDX-License-Identifier: Apache-2.0
"""Where pip looks for packages, as options of uv, which does not read pip's configuration; for `launch/setup.sh`.

Reads what `pip config list` prints, and prints the options, separated by spaces. Exit status 1, with the reason, for a
configuration that means more to pip than these options say. Runs on a bare Python.
"""

from __future__ import annotations

import argparse
import ast
import sys

OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "cert": "--cert",
    "trusted-host": "--allow-insecure-host",
    "constraint": "--constraint",
}
# How pip goes about it, not what it finds.
IGNORED = ("timeout", "default-timeout", "retries", "disable-pip-version-check", "root-user-action", "progress-bar")


def to_uv_options(configuration: str) -> list[str]:
    """The options of uv for what `pip config list` prints.

    Raises:
        ValueError: a setting that has none.
    """
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # each overrides what is before it
        for line in configuration.splitlines():
            name, _, quoted = line.partition("=")
            if name.startswith(f"{section}."):
                settings[name.removeprefix(f"{section}.")] = ast.literal_eval(quoted)
    options = ["--index-strategy", "unsafe-best-match"]  # as pip: the best version, from whichever index
    for name, values in settings.items():
        if name in OPTIONS:
            options += [word for value in values.split() for word in (OPTIONS[name], value)]
        elif name not in IGNORED:
            raise ValueError(f"pip's setting {name} has no counterpart in uv")
    return options


def main() -> int:
    """Print the options; exit status 1 if they would not say everything."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        print(*to_uv_options(sys.stdin.read()))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
