# SPDX-License-Identifier: Apache-2.0
"""Import of the user's Python files, with errors that name the line in the file.

Worker processes import this module: it depends on `types.py` only.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megatron_rl.types import UserError, text_of

# (file, modification time in ns) -> module
_IMPORTED: dict[tuple[Path, int], ModuleType] = {}
IMPORT_SECONDS = 300.0  # heavy libraries take a minute on a busy machine


class ProcessExit(BaseException):
    """Exception in place of the user's `os._exit`, which would end the process silently."""


class ImportTimeout(BaseException):
    """Exception for a file whose import took too long; a BaseException, so that the file does not catch it."""


class StreamClosed(Exception):
    """Exception for user code that closed stdout or stderr."""


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise ImportTimeout after `seconds`; only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> NoReturn:
        raise ImportTimeout(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _keep_streams() -> Iterator[None]:
    """Reopen stdout and stderr if the block closed them; raise StreamClosed."""
    streams, copies = {1: "stdout", 2: "stderr"}, {}
    for number in streams:
        with contextlib.suppress(OSError):  # the stream was closed before
            copies[number] = os.dup(number)
    closed = []
    try:
        yield
    finally:
        for number, copy in copies.items():
            name = streams[number]
            try:
                os.fstat(number)
            except OSError:
                os.dup2(copy, number)
                closed.append(name)
            if getattr(getattr(sys, name), "closed", False):
                setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115  # stays open
                closed.append(name)
            os.close(copy)
    if closed:
        raise StreamClosed(f"{closed[0]}, which the run writes to")


@contextlib.contextmanager
def refuse_exit() -> Iterator[None]:
    """Make `os._exit` raise ProcessExit in this thread, not in others or forks."""
    caller, end = (os.getpid(), threading.get_ident()), os._exit

    def raise_or_end(status: int) -> NoReturn:
        if caller == (os.getpid(), threading.get_ident()):
            raise ProcessExit(f"os._exit({status})")
        end(status)

    os._exit = raise_or_end
    try:
        yield
    finally:
        os._exit = end


def import_file(path: str | Path, setting: str, expected: str) -> ModuleType:
    """Import a Python file, once per process and file version.

    Args:
        path: relative to the working directory.
        setting: config key of the path.

    Raises:
        UserError: no Python file, or a failed import (with its line).
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"{file} does not exist or is not a file",
            source=setting,
            expected=expected,
            hint=f"check the path; it is relative to {Path.cwd()}",
        )
    resolved = file.resolve()
    version = (resolved, resolved.stat().st_mtime_ns)
    if version in _IMPORTED:
        return _IMPORTED[version]
    name = f"user_file_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file", source=setting, expected=expected, hint="name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        with _keep_streams(), _within(IMPORT_SECONDS), refuse_exit():
            spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit, ProcessExit, ImportTimeout) as error:
        del sys.modules[name]
        place = locate(error, str(resolved))
        if isinstance(error, SyntaxError) and error.filename == str(resolved):
            place = f"{file}:{error.lineno}"
        raise UserError(
            f"importing the file raised {type(error).__name__}: {text_of(error)}",
            source=f"{setting}, {place}",
            expected=f"a file that can be imported, within {IMPORT_SECONDS:g} s, and leaves stdout and stderr open",
            hint=f"try: python {file}",
        ) from error
    _IMPORTED[version] = module
    return module


def locate(error: BaseException, file: str) -> str:
    """Return file:line of the traceback's deepest frame in the user's file; without one, of its deepest frame."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == file] or frames
    return f"{inside[-1].filename}:{inside[-1].lineno}"


def find_function(name: str, setting: str, expected: str) -> Callable[..., Any]:
    """Import the function or class `path.py:name` that a setting names (UserError if there is none)."""
    path, _, attribute = name.rpartition(":")
    if not path or not attribute.isidentifier():
        hint = "write the file and the function, e.g. mine.py:make"
        raise UserError(f"{name!r} names no function", source=setting, expected=f"path.py:name, {expected}", hint=hint)
    module = import_file(path, setting, f"path.py:name, {expected}")
    function = getattr(module, attribute, None)
    if not callable(function):
        close = difflib.get_close_matches(attribute, vars(module), n=1)
        raise UserError(
            f'the file defines no function or class "{attribute}"',
            source=f"{setting} = {name}",
            expected=expected,
            hint=f"did you mean {close[0]}?" if close else "correct the name",
        )
    return function


def call_function(function: Callable[..., Any], source: str, *arguments: Any) -> Any:
    """Call a function of the user; an exception is a UserError with its line."""
    try:
        return function(*arguments)
    except Exception as error:  # the user's code
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        raise UserError(
            f"it raised {type(error).__name__}: {error}",
            source=f"{source}, {locate(error, file)}",
            expected=f"{len(arguments)} arguments are enough, and no exception",
            hint="call it in Python to see the whole traceback",
        ) from error


def load_plugins(paths: Sequence[str]) -> None:
    """Import plugins, once per process (UserError: missing file, failed import with its line, taken name)."""
    for path in paths:
        import_file(path, "algorithm.plugins", "Python files")
