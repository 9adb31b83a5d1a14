# SPDX-License-Identifier: Apache-2.0
"""The parser of a tool's command line."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Any, NoReturn

from megatron_rl.types import UserError


class Arguments(argparse.ArgumentParser):
    """Parser that answers a mistake in the four parts of `UserError`, with exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse and keep the words for the hint of an error."""
        self._words = sys.argv[1:] if args is None else [*args]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message and end the process."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        given = [word.partition("=")[0] for word in self._words if word.startswith("--")]
        unknown = [word for word in given if not any(flag.startswith(word) for flag in flags)]
        close = [close for word in unknown for close in difflib.get_close_matches(word, flags, n=1)]
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        error = UserError(
            message,
            source=f"command line of {self.prog}",
            expected=usage,
            hint=f"did you mean {', '.join(close)}?" if close else f"{self.prog} --help describes each argument",
        )
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
