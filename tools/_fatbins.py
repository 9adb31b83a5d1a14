# SPDX-License-Identifier: Apache-2.0
"""Code for GPUs in shared libraries: nvcc's fatbins, each with the same functions for several generations.

Blanked code takes no space once it is compressed. Headers stay, and the CUDA runtime never loads an entry that is not
for the GPU.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MAGIC = 0xBA55ED50
_PTX, _CODE = 1, 2
# An attention kernel's mangled name: size of a head's values, type of queries.
_ATTENTION = re.compile(r"CollectiveMainloopFwdSm90I.*?Li(\d+)EN\w{1,4}?\d+([a-z]\w+?)_tEf")
_HEAD_SIZES = {"64", "128"}


@dataclass(frozen=True)
class Entry:
    """Code for one architecture.

    Attributes:
        kind: 1 for PTX, 2 for machine code.
        architecture: 90 for compute capability 9.0.
        start: offset behind the header.
    """

    kind: int
    architecture: int
    start: int
    size: int


def list_sections(elf: bytes | bytearray) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    width, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + number * width) for number in range(count)]
    for name, _, _, _, offset, size in headers:
        start = headers[names][4] + name
        yield elf[start : elf.index(b"\0", start)].decode(), offset, size


def list_fatbins(elf: bytes | bytearray) -> Iterator[list[Entry]]:
    """Yield the entries of each fatbin."""
    for name, position, size in list_sections(elf):
        if name not in (".nv_fatbin", "__nv_relfatbin"):
            continue
        end = position + size
        while position < end:
            magic, _, header, length = struct.unpack_from("<IHHQ", elf, position)
            if magic != _MAGIC:  # padding
                position += 8
                continue
            position += header
            yield list(_list_entries(elf, position, position + length))
            position = (position + length + 7) & ~7


def _list_entries(elf: bytes | bytearray, position: int, end: int) -> Iterator[Entry]:
    while position < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", elf, position)
        (architecture,) = struct.unpack_from("<I", elf, position + 28)
        yield Entry(kind, architecture, position + header, size)
        position += header + size


def choose_entries(fatbin: Sequence[Entry], capability: int) -> list[Entry]:
    """Return the entries that a GPU uses: the nearest machine code of its generation, or without any the newest PTX."""
    usable = [entry for entry in fatbin if entry.architecture <= capability]
    code = [entry for entry in usable if entry.kind == _CODE and entry.architecture // 10 == capability // 10]
    kept = code or [entry for entry in usable if entry.kind == _PTX]
    newest = max((entry.architecture for entry in kept), default=0)
    return [entry for entry in kept if entry.architecture == newest]


def is_needed_attention(code: bytes | bytearray) -> bool:
    """Whether FlashAttention 3 code is for bfloat16 and heads of usual size, or for all (as a sum over splits)."""
    if not code.startswith(b"\x7fELF"):  # compressed
        return True
    name = _ATTENTION.search(" ".join(section for section, _, _ in list_sections(code)))
    return name is None or (name[1] in _HEAD_SIZES and name[2] == "bfloat16")


def blank_code(library: bytearray, capability: int, is_attention: bool = False) -> tuple[int, int]:
    """Zero the code that is not for a GPU of this capability (90 for 9.0), in place.

    Args:
        is_attention: also code that `is_needed_attention` refuses.

    Returns:
        Bytes of code that is kept, and of all.
    """
    kept = total = 0
    for fatbin in list_fatbins(library):
        chosen = choose_entries(fatbin, capability)
        for entry in fatbin:
            place = slice(entry.start, entry.start + entry.size)
            total += entry.size
            if entry in chosen and (not is_attention or is_needed_attention(library[place])):
                kept += entry.size
            else:
                library[place] = bytes(entry.size)
    return kept, total
