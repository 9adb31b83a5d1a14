# SPDX-License-Identifier: Apache-2.0
"""Every attention backend against a softmax with an explicit mask, forward and backward.

Segments are plain sequences and responses behind a shared prompt. On CPU there is one backend; the others need a GPU
(marked), where they are compared with the same formula in float32.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.models.attention import attend, build_segments, choose_attention_backend
from megatron_rl.models.attention_kernels import find_kernel_failure
from megatron_rl.models.segments import Segments
from megatron_rl.samples.batch import build_segment_keys

HEAD_DIM = 16
CPU = torch.device("cpu")
NONE = (0, 0)
# name -> lengths of the segments, and the [start, stop) of their prefixes
LAYOUTS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "one": ([7], [NONE]),
    "ragged": ([1, 5, 3], [NONE] * 3),
    "empty": ([4, 0, 1, 6], [NONE] * 4),
    # Prompt of 4 with responses of 3, 5 and 1; a sequence of its own; prompt of 1 with responses of 2 and 6; padding.
    "shared": ([7, 5, 1, 4, 3, 6, 2], [NONE, (0, 4), (0, 4), NONE, NONE, (17, 18), NONE]),
    "long prefix": ([40, 2, 30], [NONE, (0, 37), (0, 37)]),
    "of two sizes": ([5, 2, 5, 2, 0, 5, 5], [NONE] * 7),
    # Two prompts of 4, each with a response of 3, three of 2 and two of 3.
    "shared, of few sizes": (
        [7, 2, 2, 2, 3, 3, 7, 2, 2, 2, 3, 3],
        [NONE, *[(0, 4)] * 5, NONE, *[(19, 23)] * 5],
    ),
    "many": ([7 + i * i % 8 for i in range(64)], [NONE] * 64),
}
HEADS = [(4, 4), (4, 2), (6, 1)]
GPU_BACKENDS = [
    "torch-varlen",
    "efficient",
    "sdpa",
    *(["flash-attn"] if importlib.util.find_spec("flash_attn") else []),
]


def make_segments(
    name: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32, backend: str | None = None
) -> Segments:
    lengths, prefixes = LAYOUTS[name]
    bounds = np.cumsum([0, *lengths])
    own = [np.arange(bounds[i], bounds[i + 1]) for i in range(len(lengths))]
    paths = [np.concatenate([np.arange(*prefix), rows]) for prefix, rows in zip(prefixes, own, strict=True)]
    return build_segments(
        torch.from_numpy(bounds.astype(np.int32)).to(device),
        max(lengths),
        build_segment_keys(paths, lengths, device),
        dtype,
        backend,
    )


def draw_inputs(name: str, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """Query, key and value [t, heads, d] float32."""
    generator, t = torch.Generator().manual_seed(0), sum(LAYOUTS[name][0])
    return [torch.randn(t, n, HEAD_DIM, generator=generator) for n in (heads, kv_heads, kv_heads)]


def make_visible(name: str) -> torch.Tensor:
    """[t, t] bool: which key a query sees, straight from the definition of a segment."""
    lengths, prefixes = LAYOUTS[name]
    visible, start = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool), 0
    for n, (low, high) in zip(lengths, prefixes, strict=True):
        visible[start : start + n, start : start + n] = torch.ones(n, n).tril()
        visible[start : start + n, low:high] = True
        start += n
    return visible


def make_window(name: str, window: int) -> torch.Tensor:
    """The same with a sliding window: a query sees its own position and `window` - 1 before it; a prefix has the first
    positions.
    """
    lengths, prefixes = LAYOUTS[name]
    visible, start = make_visible(name), 0
    for n, (low, high) in zip(lengths, prefixes, strict=True):
        rows = [*range(low, high), *range(start, start + n)]
        for place, row in enumerate(rows[high - low :], high - low):
            visible[row, rows[: max(0, place - window + 1)]] = False
        start += n
    return visible


def attend_with_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, value)


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Compute attention with sinks, one more score per head in the softmax's denominator."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key).mul(scale).masked_fill(~visible, float("-inf"))
    more = sinks[:, None, None].expand(-1, len(query), 1)
    return torch.einsum("hqk,khd->qhd", torch.cat([scores, more], -1).softmax(-1)[..., :-1], value)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_sinks_equal_one_more_score(name: str, window: int, heads: int, kv_heads: int) -> None:
    """Outputs and all gradients, including the gradients of the sinks."""
    inputs = [x.requires_grad_() for x in draw_inputs(name, heads, kv_heads)]
    sinks = torch.linspace(-2.0, 3.0, heads).requires_grad_()
    segments = replace(make_segments(name), window=window)
    visible = make_window(name, window) if window else make_visible(name)
    found = run_backward(attend(*inputs, segments, 0.3, sinks), [*inputs, sinks])
    expected = run_backward(attend_with_sinks(*inputs, visible, 0.3, sinks), [*inputs, sinks])
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


def run_backward(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a fixed random direction, preceded by the output itself; float32 on the CPU."""
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [x.detach().float().cpu() for x in (output, *torch.autograd.grad(output, inputs, direction))]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_masked_softmax(name: str, heads: int, kv_heads: int) -> None:
    """Forward and all gradients to 1e-5 of the largest value; grouped queries down to one KV head."""
    inputs = [x.requires_grad_() for x in draw_inputs(name, heads, kv_heads)]
    found = run_backward(attend(*inputs, make_segments(name), 0.3), inputs)
    expected = run_backward(attend_with_mask(*inputs, make_visible(name), 0.3), inputs)
    for got, want in zip(found, expected, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("window", [2, 3, 6])
@pytest.mark.parametrize("name", ["ragged", "empty", "shared", "shared, of few sizes"])
def test_windows_slide(name: str, window: int) -> None:
    """Over the end of a shared prompt, too; segments that are not longer than the window have none."""
    inputs, segments = [x.requires_grad_() for x in draw_inputs(name, 4, 2)], make_segments(name)
    found = run_backward(attend(*inputs, replace(segments, window=window), 0.3), inputs)
    expected = run_backward(attend_with_mask(*inputs, make_window(name, window), 0.3), inputs)
    for got, want in zip(found, expected, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("name", ["of two sizes", "shared, of few sizes", "many"])
def test_a_batch_of_equal_segments_has_the_bits_of_one_after_the_other(name: str, heads: int, kv_heads: int) -> None:
    """Output and gradients; rows move only if few sizes serve many segments."""
    inputs = [x.requires_grad_() for x in draw_inputs(name, heads, kv_heads)]
    batched = make_segments(name)
    lengths = zip(batched.cu_seqlens_q.diff().tolist(), batched.cu_seqlens_k.diff().tolist(), strict=True)
    single = replace(
        batched, batches=tuple((1, n, k) for n, k in lengths if k), order=None, key_order=None, places=None
    )
    assert 2 * len(batched.batches) <= len(single.batches) and make_segments("ragged").order is None
    found, expected = (run_backward(attend(*inputs, segments, 0.3), inputs) for segments in (batched, single))
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_comparison_sees_a_wrong_prefix() -> None:
    """One prompt token less changes the outputs a thousand times more than the tolerance."""
    inputs = draw_inputs("shared", 4, 2)
    visible = make_visible("shared")
    visible[7:12, 3] = False
    gap = attend(*inputs, make_segments("shared"), 0.3) - attend_with_mask(*inputs, visible, 0.3)
    assert gap.abs().max() > 1e-2


def test_other_segments_have_no_influence() -> None:
    """Bitwise: sequences packed before and after another do not change its output."""
    query, key, value = draw_inputs("ragged", 4, 2)
    alone = build_segments(torch.tensor([0, 5], dtype=torch.int32), 5, None, torch.float32)
    together = attend(query, key, value, make_segments("ragged"), 0.3)[1:6]
    assert torch.equal(together, attend(query[1:6], key[1:6], value[1:6], alone, 0.3))


def test_mask_is_as_large_as_its_longest_segment() -> None:
    """28 tokens: 6 rows and 4 + 6 columns; without prefixes there is none."""
    assert make_segments("shared").mask.shape == (6, 10)
    assert make_segments("ragged").mask is None and make_segments("ragged").key_index is None


WORKING = """
from megatron_rl.models import attention as b


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal, deterministic):
    segments = b.build_segments(cu_seqlens_q, max_q, b.SegmentKeys(None, cu_seqlens_k, max_k), q.dtype, "sdpa")
    return b.attend(q, k, v, segments, softmax_scale)
"""


@pytest.mark.parametrize(
    ("content", "failure"),
    [
        (
            "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E')",
            "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E",
        ),
        ("", "ImportError: cannot import name 'flash_attn_varlen_func' from 'flash_attn'"),  # left by another wheel
        (
            "def flash_attn_varlen_func(q, k): ...",
            "TypeError: flash_attn_varlen_func() got an unexpected keyword argument",
        ),
        (WORKING.replace("return", "return 1.1 *"), "AssertionError: Tensor-likes are not close!"),
        (WORKING, None),
        (None, ""),
    ],
    ids=["abi", "namespace", "signature", "wrong", "works", "absent"],
)
def test_a_kernel_library_is_tried_before_it_is_chosen(
    content: str | None, failure: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of that name with these contents. The real ones need a GPU."""
    if content is not None:
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "__init__.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with torch.no_grad():  # as in the first forward pass
        found = find_kernel_failure.__wrapped__("flash-attn", CPU, torch.bfloat16)
    assert found == failure if not failure else found.startswith(failure)
    sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_the_efficient_kernel_is_linear(dtype: torch.dtype) -> None:
    """Shapes of everything that a forward makes for 30,000 tokens; no number is computed. Backward is not covered."""
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    t, heads = 30_000, 8
    inputs = [torch.empty(t, n, 64, dtype=dtype, device="meta", requires_grad=True) for n in (heads, 2, 2)]
    cu_seqlens = torch.empty(4, dtype=torch.int32, device="meta")
    with Watch():
        output = attend(*inputs, Segments("efficient", cu_seqlens, cu_seqlens, t, t), 0.1)
    assert output.shape == inputs[0].shape and output.requires_grad
    assert max(made) == t * heads * 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="every kernel fails where there is no GPU")
def test_what_fails_is_not_chosen() -> None:
    assert choose_attention_backend.__wrapped__(torch.device("cuda"), torch.bfloat16) == "sdpa"


def test_cpu_has_one_backend() -> None:
    assert choose_attention_backend(CPU, torch.float32) == choose_attention_backend(CPU, torch.bfloat16) == "sdpa"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        *((backend, torch.bfloat16, 2e-2) for backend in GPU_BACKENDS),  # keeps 8 bits
        ("efficient", torch.float32, 1e-4),
        ("sdpa", torch.float32, 1e-4),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("name", ["ragged", "empty", "shared", "long prefix"])
def test_gpu_backends_equal_the_masked_softmax(
    name: str, heads: int, kv_heads: int, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    """To this share of the largest value."""
    device = torch.device("cuda")
    inputs = [x.to(device, dtype).requires_grad_() for x in draw_inputs(name, heads, kv_heads)]
    found = run_backward(attend(*inputs, make_segments(name, device, dtype, backend), 0.3), inputs)
    exact = [x.detach().float().cpu().requires_grad_() for x in inputs]
    expected = run_backward(attend_with_mask(*exact, make_visible(name), 0.3), exact)
    for got, want in zip(found, expected, strict=True):
        assert (got - want).abs().max() <= tolerance * want.abs().max()
