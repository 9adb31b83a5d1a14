# SPDX-License-Identifier: Apache-2.0
"""Remove a test's registrations after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS, LOSS_AGGREGATIONS, POLICY_LOSSES
from megatron_rl.config.algorithm import OPTIONS
from megatron_rl.extension.registry import ENGINES

_TABLES = (ADVANTAGE_ESTIMATORS, POLICY_LOSSES, LOSS_AGGREGATIONS, OPTIONS, ENGINES)


@contextmanager
def restored_registries() -> Iterator[None]:
    """Put all tables of names back, and forget the modules of the user's files."""
    known, modules = [dict(table) for table in _TABLES], set(sys.modules)
    try:
        yield
    finally:
        for table, entries in zip(_TABLES, known, strict=True):
            table.clear()
            table.update(entries)
        for name in set(sys.modules) - modules:
            if name.startswith("user_file_"):
                del sys.modules[name]
