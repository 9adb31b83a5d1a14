# SPDX-License-Identifier: Apache-2.0
"""Translate pip's package sources to options of uv, which does not read pip's configuration; for `launch/setup.sh`.

Reads `pip config list` and prints options. Exit status 1 for a setting without a uv option. Runs on a bare Python.
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
# These affect how pip works, not the packages it finds.
IGNORED = ("timeout", "default-timeout", "retries", "disable-pip-version-check", "root-user-action", "progress-bar")


def to_uv_options(configuration: str) -> list[str]:
    """Return uv options for the output of `pip config list`.

    Raises:
        ValueError: a setting has no uv option.
    """
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # later sections override earlier ones
        for line in configuration.splitlines():
            name, _, quoted = line.partition("=")
            if name.startswith(f"{section}."):
                settings[name.removeprefix(f"{section}.")] = ast.literal_eval(quoted)
    options = ["--index-strategy", "unsafe-best-match"]  # as pip: the best version of all indexes
    for name, values in settings.items():
        if name in OPTIONS:
            options += [word for value in values.split() for word in (OPTIONS[name], value)]
        elif name not in IGNORED:
            raise ValueError(f"pip's setting {name} has no counterpart in uv")
    return options


def main() -> int:
    """Print the options."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        print(*to_uv_options(sys.stdin.read()))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
