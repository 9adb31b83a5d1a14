# SPDX-License-Identifier: Apache-2.0
"""The parser of a tool's command line."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

from megatron_rl.types import UserError


class Arguments(argparse.ArgumentParser):
    """Parser that answers a mistake in the four parts of `UserError`, with exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Print the message and end the process."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        unknown = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []
        close = [close for flag in unknown for close in difflib.get_close_matches(flag, flags, n=1)]
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        error = UserError(
            message,
            source=f"command line of {self.prog}",
            expected=usage,
            hint=f"did you mean {', '.join(close)}?" if close else f"{self.prog} --help describes each argument",
        )
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
