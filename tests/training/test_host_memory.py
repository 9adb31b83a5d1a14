# SPDX-License-Identifier: Apache-2.0
"""Tensors that wait on the host come back bit for bit. That copies are fast is not covered."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.training.packed_model import HostMemory


def draw(device: str = "cpu") -> list[torch.Tensor]:
    """Of several types and sizes, an empty one among them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [((7, 3), torch.float32), ((0,), torch.float32), ((1000,), torch.bfloat16), ((5,), torch.float32)]
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape, dtype in shapes]


def test_stored_tensors_are_one_block_that_is_kept() -> None:
    tensors, memory = draw(), HostMemory(torch.device("cpu"))
    copies = memory.store(tensors)
    assert len(memory._block) == 512 + 0 + 2048 + 512
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    block = copies[0].untyped_storage().data_ptr()
    loaded = memory.load(copies)
    for tensor, copy, back in zip(tensors, copies, loaded, strict=True):
        assert torch.equal(tensor, copy) and torch.equal(tensor, back) and back.dtype == tensor.dtype
        back.fill_(1.0)
        assert tensor.numel() == 0 or not (copy == 1.0).all(), "what works is not what is stored"
    again = memory.store(loaded[2:])
    assert again[0].untyped_storage().data_ptr() == block and (again[0] == 1.0).all() and len(memory._block) == 3072
    assert memory.store([*loaded, torch.zeros(1)])[2].eq(1.0).all() and len(memory._block) == 3584


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_block_is_page_locked_and_grows() -> None:
    memory = HostMemory(torch.device("cuda", torch.cuda.current_device()))
    for count in (1, 3):
        tensors = draw("cuda") * count
        copies = memory.store(tensors)
        assert all(copy.is_pinned() for copy in copies if copy.numel())
        for tensor, back in zip(tensors, memory.load(copies), strict=True):
            assert back.is_cuda and torch.equal(tensor, back)
