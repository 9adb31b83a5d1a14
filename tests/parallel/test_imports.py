# SPDX-License-Identifier: Apache-2.0
"""Imports of a run: without garbage collections, and without optional imports of megatron.core and vLLM.

tools/benchmarks/bench_startup.py measures the time of a start.
"""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from distributed import run_ranks
from megatron_rl.parallel.imports import UNUSED_BY_MEGATRON, kept_imports


def _keep(rank: int, world_size: int) -> tuple[bool, int, bool]:
    before = gc.get_freeze_count()
    with kept_imports():
        inside, made = gc.isenabled(), [[] for _ in range(1000)]
    return inside, gc.get_freeze_count() - before - len(made), gc.isenabled()


def test_nothing_is_collected_while_importing_or_after() -> None:
    """In a separate process: frozen objects stay frozen."""
    inside, frozen, after = run_ranks(_keep, 1)[0]
    assert not inside and after
    assert frozen >= 0


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with kept_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("name", UNUSED_BY_MEGATRON)
def test_megatron_does_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core reports the package as missing; all other importers find it."""
    context = importlib.import_module("megatron.core.inference.contexts.dynamic_context")
    assert getattr(context, "HAVE_WANDB", False) is False  # megatron-core 0.19 does not import it there
    assert importlib.import_module("megatron.core.timers").wandb is None
    assert find_spec(name) is not None
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="not for megatron.core"):
        exec(f"import {name}", {"__name__": "megatron.core.somewhere"})


def test_inductor_is_not_corrected_where_nothing_is_compiled(vllm_imported: None) -> None:
    """The module that we stand in for on CPU is there, and is about inductor and environment variables."""
    import vllm

    assert not hasattr(sys.modules["vllm.env_override"], "__file__")
    text = (Path(vllm.__file__).parent / "env_override.py").read_text()
    assert "_inductor" in text and "\ndef " in text
