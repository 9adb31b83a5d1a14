# SPDX-License-Identifier: Apache-2.0
"""A process with the slow imports, which forks a child for each request.

    {"file": "megatron_rl/x.py", "old": "a + b", "new": "a - b", "tests": ["tests/test_x.py::test_y"]}   a line of stdin
    {"status": 1, "output": "..."}                                                         the answer, a line of stdout

A child imports the file from its changed source, so that every module that imports from it is bound to the change, runs
the tests with pytest, and ends with pytest's status. Of megatron_rl the parent has only the modules needed to import
megatron-core; these files cannot be changed. Processes that the tests start with their own interpreter see the
unchanged file.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("numpy", "torch", "torch.distributed.checkpoint", "transformers", "megatron_rl.parallel", "megatron.core")
HEAVY += ("megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.pipeline_parallel", "yaml")
LIMIT_SECONDS = 300.0


class _Changed(SourceFileLoader):
    """Loads one file with a snippet replaced."""

    def __init__(self, name: str, path: str, old: str, new: str) -> None:
        super().__init__(name, path)
        self._old, self._new = old, new

    def get_code(self, fullname: str) -> CodeType:
        """Compile the changed source; compiled files on disk are passed over."""
        source = Path(self.path).read_text(encoding="utf-8")
        assert source.count(self._old) == 1, f"{self.path} has the snippet {source.count(self._old)} times"
        return compile(source.replace(self._old, self._new), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds one module in its changed form."""

    def __init__(self, file: str, old: str, new: str) -> None:
        self.name = file.removesuffix(".py").replace("/", ".")
        self._loader = _Changed(self.name, str(ROOT / file), old, new)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """The spec of this module, None for any other."""
        if fullname != self.name:
            return None
        return spec_from_file_location(fullname, self._loader.path, loader=self._loader)


def run_tests(request: dict[str, Any], output: int) -> int:
    """Be a child: run the tests of a request, and return pytest's status."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    if request["file"]:
        finder = _Finder(request["file"], request["old"], request["new"])
        assert finder.name not in sys.modules, f"{finder.name} is imported: the change would not be seen"
        sys.meta_path.insert(0, finder)
    # Every tier; the first failure is enough.
    return int(pytest.main([*request["tests"], "-m", "", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a child for a request; -1 is the status of one that was not done in time."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                os.setsid()
                status = run_tests(request, output.fileno())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.02)
        if not found[0]:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"status": os.waitstatus_to_exitcode(found[1]) if found[0] else -1, "output": text[-4000:]}


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    answers, _ = os.fdopen(os.dup(1), "w"), os.dup2(2, 1)  # a library's output is no answer
    for heavy in HEAVY:
        importlib.import_module(heavy)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
