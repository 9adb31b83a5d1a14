# SPDX-License-Identifier: Apache-2.0
"""--help of every tool and entry point: help, and nothing on stderr."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("tools/*.py"), *ROOT.glob("tools/benchmarks/*.py"), *ROOT.glob("launch/*.py"))
    if not path.name.startswith("_")
)
# One process, so that heavy imports happen once; output of a module's import appears in it as well.
RUN_ALL = """
import contextlib, io, json, runpy, sys, warnings
def refuse(message, category, filename, lineno, file=None, line=None):
    print(f"{program}: {category.__name__}: {message}", file=sys.stderr)
warnings.showwarning = refuse
found = {}
for program in sys.argv[1:]:
    sys.argv, out = [program, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        found[program] = [end.code, out.getvalue()]
print(json.dumps(found))
"""


def test_help_is_all_that_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *PROGRAMS], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    # A CUDA build of torch prints this on a machine with CUDA's compiler and without a GPU.
    errors = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert (done.returncode, errors) == (0, []), done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert list(found) == PROGRAMS and len(PROGRAMS) > 20
    for program, (code, text) in found.items():
        assert code in (0, None) and text.startswith("usage: "), program


def test_settings_may_stand_after_options() -> None:
    """Of each program with a list of settings; argparse alone refuses those after the first option."""
    texts = {program: (ROOT / program).read_text(encoding="utf-8") for program in PROGRAMS}
    takes_settings = [name for name, text in texts.items() if re.search(r'"(settings|overrides)", nargs="\*"', text)]
    assert len(takes_settings) > 5
    assert not [name for name in takes_settings if "parse_intermixed_args(" not in texts[name]]
