# SPDX-License-Identifier: Apache-2.0
"""Heavy imports happen once, in the parent, so that forked ranks start in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no reason for an example to fail.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


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
