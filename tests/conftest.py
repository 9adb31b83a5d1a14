# SPDX-License-Identifier: Apache-2.0
"""Heavy imports happen once, in the parent, so that forked ranks start in milliseconds.

Two processes that are given one empty directory as --claims share the files: each runs those that it is the first to
begin. One goes through them --backwards, so that they meet where both are done.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no reason for an example to fail.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What tests/run.sh starts two processes with."""
    parser.addoption("--claims", type=Path, metavar="DIRECTORY", help="run the files that no other process has begun")
    parser.addoption("--backwards", action="store_true", help="run the last file first")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Turn the order of the files, not of the tests in them."""
    if config.getoption("--backwards"):
        paths = list(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: -paths.index(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """True, "this has been run", for the tests of a file that another process has begun."""
    claims = item.config.getoption("--claims")
    return None if claims is None or _claim(claims, item.path) else True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell tests/run.sh that this process has come to its end: one that a test ends has no other sign."""
    claims = session.config.getoption("--claims")
    if claims is not None:
        (claims / f"finished-{'behind' if session.config.getoption('--backwards') else 'in-front'}").touch()


@cache
def _claim(claims: Path, path: Path) -> bool:
    try:
        (claims / sha256(str(path).encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """What `import_engine` imports."""
    from rl_runs import import_engine

    import_engine()


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory made by `make_task`."""
    from rl_runs import make_task

    directory = tmp_path_factory.mktemp("task")
    make_task(directory)
    return directory


@pytest.fixture
def registry() -> Iterator[None]:
    """Names, options and modules that a test registers are gone after it."""
    from registries import restored_registries

    with restored_registries():
        yield
