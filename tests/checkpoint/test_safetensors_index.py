# SPDX-License-Identifier: Apache-2.0
"""Models that were half downloaded, mixed or tampered with: one error with the file, the fault and a hint.

Not covered: altered elements of a tensor, which safetensors files cannot reveal.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint.huggingface import INDEX_FILE, index_safetensors
from megatron_rl.types import UserError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 400\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two files and their index."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": torch.arange(6.0)}, directory / FIRST)
    save_file({"b": torch.ones(2, 3), "c": torch.ones(1)}, directory / SECOND)
    write_index(directory, {"a": FIRST, "b": SECOND, "c": SECOND})
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Replace the file's content by the result of `change`."""
    return lambda model: (model / name).write_bytes(change((model / name).read_bytes()))


def remap(**changes: object) -> Callable[[Path], object]:
    """Return a fault that changes entries of the index's weight map."""
    return lambda model: write_index(model, {"a": FIRST, "b": SECOND, "c": SECOND} | changes)


# Name -> (damage, message, hint).
BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "empty file": (rewrite(SECOND, lambda _: b""), f"{SECOND} is damaged: .*header too small .0 bytes", SECOND),
    "cut in the header": (rewrite(SECOND, lambda old: old[:30]), f"{SECOND} is damaged: .*header length", SECOND),
    "cut in the data": (rewrite(SECOND, lambda old: old[:-1]), f"{SECOND} is damaged: .*not fully covered", SECOND),
    "longer than it says": (rewrite(FIRST, lambda old: old + b"x"), f"{FIRST} is damaged: .*not fully", FIRST),
    "header of 2**60 bytes": (
        rewrite(FIRST, lambda old: struct.pack("<Q", 1 << 60) + old[8:]),
        f"{FIRST} is damaged: .*too large",
        FIRST,
    ),
    "header that is no text": (
        rewrite(FIRST, lambda old: old[:8] + b"\xff" + old[9:]),
        f"{FIRST} is damaged: .*UTF-8",
        FIRST,
    ),
    "a web page": (rewrite(FIRST, lambda _: b"<html>not found</html>"), f"{FIRST} is damaged: .*too large", FIRST),
    "a pointer": (rewrite(FIRST, lambda _: POINTER), f"{FIRST} is damaged: it is a pointer of Git LFS", "git lfs pull"),
    "a directory": (lambda model: ((model / FIRST).unlink(), (model / FIRST).mkdir()), f"are missing: {FIRST}", FIRST),
    "a missing file": (
        lambda model: (model / SECOND).unlink(),
        f"1 file.s. of the model are missing: {SECOND}",
        SECOND,
    ),
    "a missing file and no index": (
        lambda model: ((model / SECOND).unlink(), (model / INDEX_FILE).unlink()),
        f"missing: {SECOND}",
        SECOND,
    ),
    "cut index": (rewrite(INDEX_FILE, lambda old: old[:-9]), f"{INDEX_FILE} is not JSON: .*line 1", INDEX_FILE),
    "binary index": (rewrite(INDEX_FILE, lambda _: b"\xff\xfe\x00"), f"{INDEX_FILE} is not JSON", INDEX_FILE),
    "deep index": (rewrite(INDEX_FILE, lambda _: b"[" * 200_000), f"{INDEX_FILE} is not JSON", INDEX_FILE),
    "index without weight_map": (rewrite(INDEX_FILE, lambda _: b"{}"), "has no weight_map", INDEX_FILE),
    "index that is a list": (rewrite(INDEX_FILE, lambda _: b"[]"), "has no weight_map", INDEX_FILE),
    "empty weight_map": (lambda model: write_index(model, {}), "has no weight_map", INDEX_FILE),
    "file name that is none": (remap(a=3), "has no weight_map", INDEX_FILE),
    "parent directory": (remap(a=f"../other/{FIRST}"), f"names '../other/{FIRST}', which is no", INDEX_FILE),
    "absolute path": (remap(a=f"/etc/{FIRST}"), f"names '/etc/{FIRST}'", INDEX_FILE),
    "another kind of file": (remap(a="config.json"), "names 'config.json'", INDEX_FILE),
    "tensor of another file": (
        remap(b=FIRST),
        f"b is not in {FIRST}, as {INDEX_FILE} says, but in {SECOND}",
        f"{INDEX_FILE} and {FIRST} ag",
    ),
    "tensor of no file": (remap(d=FIRST), f"d is not in {FIRST}, as {INDEX_FILE} says\n", FIRST),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_one_error(case: str, model: Path, tmp_path: Path) -> None:
    damage, found, hint = BROKEN[case]
    (tmp_path / "other").mkdir()
    save_file({"a": torch.zeros(6)}, tmp_path / "other" / FIRST)
    damage(model)
    with pytest.raises(UserError, match=found) as caught:
        index_safetensors(model)
    assert hint in caught.value.hint and str(model) in caught.value.source


def test_whole_models_are_read(model: Path, tmp_path: Path) -> None:
    """With an index, without, in sub-directories, and through links to a cache, as the hub's client lays them."""
    expected = {"a": model / FIRST, "b": model / SECOND, "c": model / SECOND}
    assert index_safetensors(model) == expected
    cache = tmp_path / "blob"
    (model / FIRST).rename(cache)
    (model / FIRST).symlink_to(f"../{cache.name}")
    assert index_safetensors(model) == expected
    (model / INDEX_FILE).unlink()
    assert index_safetensors(model) == expected
    (model / "deep").mkdir()
    save_file({"a": torch.zeros(1)}, model / "deep/x.safetensors")
    remap(a="deep/x.safetensors")(model)
    assert index_safetensors(model)["a"] == model / "deep/x.safetensors"
