# SPDX-License-Identifier: Apache-2.0
"""Keys of segments behind a shared prompt, by hand."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.packing.prefix import build_segment_keys

CPU = torch.device("cpu")


def test_keys_are_the_prefix_and_then_the_segments_own() -> None:
    """Rows 0-3 with a prompt of two, rows 4-5 behind it, row 6 alone, rows 7-8 behind row 6."""
    keys = build_segment_keys(np.array([0, 4, 6, 7, 9]), [(0, 0), (0, 2), (4, 4), (6, 7)], CPU)
    assert keys.index.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 6, 7, 8]
    assert keys.cu_seqlens.tolist() == [0, 4, 8, 9, 12] and keys.max_seqlen == 4
    assert keys.index.dtype == torch.int64 and keys.cu_seqlens.dtype == torch.int32


def test_without_prefixes_there_are_no_keys() -> None:
    assert build_segment_keys(np.array([0, 4, 6]), [(0, 0), (3, 3)], CPU) is None
