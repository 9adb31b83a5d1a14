# SPDX-License-Identifier: Apache-2.0
"""Files of the user that register advantage estimators and policy losses.

A plugin is a Python file of any name and place:

    from megatron_rl.algorithms.advantages import register_advantage_estimator

    @register_advantage_estimator("best_of_group")
    def compute_best_of_group(inputs, config):
        return inputs.expand([float(s == scores.max()) for scores in inputs.grouped_scores() for s in scores])
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.types import UserError

_SOURCE = "algorithm.plugins"


def load_plugins(paths: Sequence[str]) -> None:
    """Import the user's files, each once per process.

    Args:
        paths: Python files; relative ones start at the working directory.

    Raises:
        UserError: a file is missing or cannot be imported (with the line of the file), or it registers a name
            that is taken.
    """
    for path in paths:
        file = Path(path).expanduser()
        if not file.is_file():
            raise UserError(
                f"{file} does not exist or is not a file", source=_SOURCE, expected="Python files",
                hint=f"check the path; it is relative to {Path.cwd()}")
        _import_file(file)


def _import_file(file: Path) -> None:
    resolved = file.resolve()
    name = f"algorithm_plugin_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file", source=_SOURCE, expected="Python files", hint="name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(
            f"importing the file raised {type(error).__name__}: {error}",
            source=f"{_SOURCE}, {_describe_place(error, file)}", expected="a file that can be imported",
            hint=f"try: python {file}") from error


def _describe_place(error: BaseException, file: Path) -> str:
    """file:line of the deepest frame inside the user's file."""
    if isinstance(error, SyntaxError) and error.filename == str(file.resolve()):
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == str(file.resolve())]
    return f"{file}:{lines[-1]}" if lines else str(file)
