# SPDX-License-Identifier: Apache-2.0
"""Heavy imports happen once, in the parent, so that forked ranks start in milliseconds.

Processes that are given one empty directory as --claims share the tests: each runs those that it is the first to
claim. One goes through the files --backwards, so that both come to their end together. --part and --deadline choose
among the slow tests that tests/slow_seconds.json has seconds for.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no reason for an example to fail.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

OUT_OF_TIME = "not run, out of time"
UNRECORDED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options with which tests/run.sh starts its processes."""
    parser.addoption("--claims", type=Path, metavar="DIRECTORY", help="run the tests that no other process has claimed")
    parser.addoption("--backwards", action="store_true", help="run the last file first")
    parser.addoption("--sign", type=Path, metavar="FILE", help="make this file after the last test")
    parser.addoption("--part", metavar="I/N", help="run one of N parts that take equally long")
    parser.addoption("--deadline", type=float, metavar="TIME", help="begin no test that would end later (Unix time)")


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose a part, and turn the order of the files, not of the tests in them."""
    if config.getoption("--part"):
        part, _, parts = config.getoption("--part").partition("/")
        config.stash[UNRECORDED] = [item.nodeid for item in items if find_seconds(item.nodeid) is None]
        chosen = divide(_count_seconds(items), int(parts))[int(part) - 1]
        is_chosen = [_name_unit(item) in chosen and find_seconds(item.nodeid) is not None for item in items]
        config.hook.pytest_deselected(items=[item for item, mine in zip(items, is_chosen) if not mine])
        items[:] = [item for item, mine in zip(items, is_chosen) if mine]
    if config.getoption("--backwards"):
        paths = list(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: -paths.index(item.path))


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Print the files of a part, and the tests that belong to none."""
    if not config.getoption("--part"):
        return []
    counts = Counter(_name_file(item) for item in items)
    unrecorded = [f"not run, no seconds in slow_seconds.json: {name}" for name in config.stash[UNRECORDED]]
    files = [f"  {file} ({count})" for file, count in counts.items()]
    return [f"part {config.getoption('--part')}:", *files, *unrecorded]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests that no other process has claimed; each test is claimed before the teardown of the previous one."""
    claims = session.config.getoption("--claims")
    if claims is None or session.testsfailed or session.config.option.collectonly:
        return None
    mine = (item for item in session.items if _claim(claims, _name_unit(item)))
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose recorded seconds end after the deadline."""
    deadline = item.config.getoption("--deadline")
    if deadline is not None and time.time() + (find_seconds(item.nodeid) or 0.0) > deadline:
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name each test that was left out for lack of time."""
    for report in terminalreporter.stats.get("skipped", []):
        if OUT_OF_TIME in str(report.longrepr):
            terminalreporter.write_line(f"{OUT_OF_TIME}: {report.nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave the sign that this process has come to its end: one that a test ends leaves none."""
    if session.config.getoption("--sign"):
        session.config.getoption("--sign").touch()


def divide(seconds: dict[str, float], num_parts: int) -> list[set[str]]:
    """Divide units into parts that take equally long: the longest first, each to the part that has least."""
    parts, totals = [set[str]() for _ in range(num_parts)], [0.0] * num_parts
    for unit in sorted(seconds, key=lambda unit: (-seconds[unit], unit)):
        smallest = totals.index(min(totals))
        parts[smallest].add(unit)
        totals[smallest] += seconds[unit]
    return parts


def find_seconds(nodeid: str) -> float | None:
    """Return the recorded seconds of a slow test on two quiet cores, or of each of its parametrisations."""
    return _load_seconds().get(nodeid, _load_seconds().get(nodeid.partition("[")[0]))


@cache
def _load_seconds() -> dict[str, float]:
    return json.loads((Path(__file__).parent / "slow_seconds.json").read_text())


def _count_seconds(items: list[pytest.Item]) -> dict[str, float]:
    """Seconds of each unit whose tests have a record."""
    seconds = Counter[str]()
    for item in items:
        seconds[_name_unit(item)] += find_seconds(item.nodeid) or 0.0
    return {unit: found for unit, found in seconds.items() if found}


def _name_file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _name_unit(item: pytest.Item) -> str:
    """Return the unit that a process claims or a part has: a test, or its file if the tests of it share a fixture."""
    definitions = [found for known in item._fixtureinfo.name2fixturedefs.values() for found in known]
    is_shared = any(found.scope == "module" for found in definitions)
    return _name_file(item) if is_shared else item.nodeid


@cache
def _claim(claims: Path, name: str) -> bool:
    """Return whether this process is the first to claim the unit."""
    try:
        (claims / sha256(name.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """Run `import_engine` once."""
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
