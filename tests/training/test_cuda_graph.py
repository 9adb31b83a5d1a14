# SPDX-License-Identifier: Apache-2.0
"""The message of a failed capture. Captures and replays themselves need a GPU: tests/gpu/test_graph_step.py."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.training.cuda_graph import OpRecorder, explain_capture_failure


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        grad.nonzero()
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")


def test_last_operation_is_known_in_forward_and_backward() -> None:
    with OpRecorder() as ops:
        x = torch.ones(3, requires_grad=True)
        x.cos()
        assert ops.last == "aten.cos.default"
        with pytest.raises(RuntimeError):
            _FailsInBackward.apply(x).sum().backward()
    assert ops.last == "aten.nonzero.default"


def test_failure_names_operation_bucket_and_line() -> None:
    """The end of a capture that went wrong raises an error of its own, which is not the one to show."""
    ops = OpRecorder()
    try:
        try:
            with ops:
                torch.ones(3).nonzero()
                raise RuntimeError("operation not permitted when stream is capturing\nsecond line")
        except RuntimeError as error:
            raise RuntimeError("capture was invalidated") from error
    except RuntimeError as error:
        found = explain_capture_failure(error, ops.last, "a microbatch of 512 tokens")
    assert "a microbatch of 512 tokens" in str(found) and "aten.nonzero.default" in str(found)
    assert "not permitted" in str(found) and "second line" not in str(found) and "invalidated" not in str(found)
    assert "test_cuda_graph.py" in found.source and "step_mode=static" in found.hint
