# SPDX-License-Identifier: Apache-2.0
"""Writer of safetensors files that never holds a whole tensor, unlike `safetensors.torch.save_file`.

Format: header length as 8 bytes little-endian, header as JSON, elements in the header's order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_rl.checkpoint.files import FileRecord, HashingFile

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class SafetensorsWriter:
    """One file; call `write` with all elements of all tensors, in order.

    Args:
        tensors: name -> (shape, dtype), in writing order.

    Raises:
        OSError: (every method) the file cannot be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (shape, dtype) in tensors.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = HashingFile(path)
        self._file.write(len(text).to_bytes(8, "little"))
        self._file.write(text)
        self._expected_bytes = self._file.num_bytes + offset

    def write(self, elements: torch.Tensor) -> None:
        """Append elements in row-major order."""
        self._file.write(elements.contiguous().view(-1).view(torch.uint8).numpy().data)

    def close(self) -> FileRecord:
        """Flush the file to disk."""
        assert self._file.num_bytes == self._expected_bytes, "not all of the tensors were written"
        return self._file.close()

    def abandon(self) -> None:
        """Close after a failure."""
        self._file.abandon()
