# SPDX-License-Identifier: Apache-2.0
"""Loading of reward functions by name, and errors of unusable ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_rl.extension.user_code as user_code
from megatron_rl.rewards.functions import load_reward_function
from megatron_rl.types import UserError
from reward_samples import SIGNATURE


def write_module(directory: Path, code: str) -> Path:
    file = directory / "reward.py"
    file.write_text(code)
    return file


def load(directory: Path, code: str, name: str = "f"):
    return load_reward_function(f"{write_module(directory, code)}:{name}")


def call(function, response: str = "82"):
    return function(data_source="sums", solution_str=response, ground_truth="82", extra_info={"level": 3})


@pytest.mark.parametrize(
    "rule, response, expected",
    [("exact", " 82 ", 1.0), ("exact", "82.0", 0.0), ("format", "#### 83", 1.0), ("format", "82", 0.0)],
)
def test_rules(rule, response, expected):
    assert call(load_reward_function(rule), response) == expected


@pytest.mark.parametrize("name, scores", [("math", [1.0, 0.0, 0.0]), ("math_any", [1.0, 1.0, 0.0])])
def test_the_rules_of_mathematics_differ_in_the_answers_that_count(name, scores):
    rule = load_reward_function(name)
    assert [call(rule, response)["score"] for response in ("#### 82.0", "82.0", "83")] == scores
    assert [call(rule, response)["unmarked_answers"] for response in ("#### 82.0", "82.0")] == [0.0, 1.0]


def test_a_function_may_require_further_arguments(tmp_path):
    """Only arguments that a run provides; any other one without a default is refused when the function is loaded."""
    function = load(tmp_path, f"def f({SIGNATURE}, finish_reason, step): return step")
    assert function("", "", "", {}, "stop", 3) == 3
    with pytest.raises(UserError, match="missing a required argument: 'weather'"):
        load_reward_function(f"{write_module(tmp_path / '..', f'def f({SIGNATURE}, weather): return 1')}:f")


def test_user_function_with_further_defaults(tmp_path):
    function = load(tmp_path, f"def f({SIGNATURE}, weight=2): return weight * len(solution_str) + extra_info['level']")
    assert call(function) == 7


def test_module_with_dataclasses_loads(tmp_path):
    code = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass F:\n"
        f"    gain: float = 2.0\n    def __call__(self, {SIGNATURE}): return self.gain\nf = F()\n"
    )
    assert call(load(tmp_path, code)) == 2.0


def test_a_file_is_imported_once(tmp_path):
    """Its functions share their module, so that a model loaded on import is loaded once; a changed file is read."""
    code = (
        f"state = []\ndef f({SIGNATURE}): state.append(1); return len(state)\ndef g({SIGNATURE}): return len(state)\n"
    )
    f, g = load(tmp_path, code, "f"), load_reward_function(f"{tmp_path / 'reward.py'}:g", "reward.components[1]")
    assert (call(f), call(g)) == (1, 1)
    changed = write_module(tmp_path, code.replace("len(state)", "-1"))
    os.utime(changed, ns=(0, 10**9))  # the clock of a file system may be too coarse to show the change
    assert call(load_reward_function(f"{changed}:f")) == -1


@pytest.mark.parametrize(
    "code, message",
    [
        ("g = 1", 'defines no "f"'),
        ("f = 3", "is a int and cannot be called"),
        ("def f(a, b, c, d): pass", "four arguments"),
        (f"def f({SIGNATURE}, more): pass", "missing a required argument: 'more'"),
        ("def f(solution_str, ground_truth): pass", "four arguments"),
        ("def f(:", "SyntaxError"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_unusable_functions_fail_when_loaded(tmp_path, code, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, code)


def test_import_errors_name_the_line(tmp_path):
    for code in ("x = 1\ny = (\n", "x = 1\ny = 1 / 0\n"):
        with pytest.raises(UserError) as caught:
            load(tmp_path, code)
        assert caught.value.source == f"reward.function, {tmp_path / 'reward.py'}:2"


@pytest.mark.parametrize("function", ["reward.py", ":f", "reward.py:", "nowhere.py:f", "maths"])
def test_unusable_names(tmp_path, monkeypatch, function):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("")
    with pytest.raises(UserError, match="path.py:name") as caught:
        load_reward_function(function, "reward.components[2]")
    assert caught.value.source == "reward.components[2]"


def test_a_file_that_never_ends_is_given_up(tmp_path, monkeypatch):
    """Also one that catches every Exception; the alarm that was set before is set again."""
    monkeypatch.setattr(user_code, "IMPORT_SECONDS", 0.3)
    before = signal.getsignal(signal.SIGALRM)
    loop = "while True:\n    try:\n        time.sleep(0.01)\n    except Exception:\n        pass\n"
    with pytest.raises(UserError, match="raised ImportTimeout: not done after 0.3 s") as caught:
        load(tmp_path, f"import time\n{loop}")
    assert caught.value.source.startswith(f"reward.function, {tmp_path / 'reward.py'}:")
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_exception_that_cannot_be_printed_is_reported(tmp_path):
    code = "class Mute(Exception):\n    def __str__(self):\n        raise RuntimeError('no')\nraise Mute\n"
    with pytest.raises(UserError, match=r"raised Mute: \(its message cannot be printed: RuntimeError\)") as caught:
        load(tmp_path, code)
    assert caught.value.source.endswith("reward.py:4")


@pytest.mark.parametrize("code", ["sys.stdout.close()", "os.close(1)", "sys.stderr.close()", "os.close(2)"])
def test_a_file_that_closes_a_stream_is_refused_on_that_stream(tmp_path, code):
    (tmp_path / "closing.py").write_text(f"import os, sys\n{code}\n")
    program = (
        "import sys; from megatron_rl.extension.user_code import import_file\n"
        f"try: import_file({str(tmp_path / 'closing.py')!r}, 'algorithm.plugins', 'a file')\n"
        "except ValueError as error: print(error); print(error, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    name = "stderr" if "err" in code or "2" in code else "stdout"
    for said in (done.stdout, done.stderr):
        assert f"raised StreamClosed: {name}, which the run writes to" in said and done.returncode == 0
