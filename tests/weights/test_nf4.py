# SPDX-License-Identifier: Apache-2.0
"""Matrices in NF4: the values, the gradients and the shapes of bitsandbytes, whatever is cut out of them.

Not covered: CUDA.
"""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch

from megatron_rl.models.lora_linears import multiply_quantized
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.model_config import model_shape_from_config
from megatron_rl.weights.quantization import QuantizedMatrix, check_quantization, count_bytes
from tiny_models import CONFIGS


def draw(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(5)) * 0.1


def quantize(values: torch.Tensor) -> QuantizedMatrix:
    matrix = QuantizedMatrix(values)
    matrix.store(values)
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    """Error 0 against its own layer, forward and backward."""
    weight, x = draw(96, 192).to(dtype), draw(7, 192).to(dtype)
    theirs = bnb.nn.Linear4bit(
        192, 96, bias=False, quant_type="nf4", compress_statistics=False, compute_dtype=dtype, device="cpu"
    )
    theirs.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=False)
    theirs.to("cpu")
    found = []
    for product in (theirs, lambda x: multiply_quantized(x, quantize(weight))):
        given = x.clone().requires_grad_()
        output = product(given)
        (output * draw(*output.shape).to(dtype)).sum().backward()
        found.append((output, given.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("columns", [64, 128, 192, 448])
def test_every_piece_has_the_bits_of_the_whole(columns: int) -> None:
    """Shards of rows and of columns, as tensor parallel ranks have them, and any piece that is read."""
    weight = draw(24, columns)
    whole = quantize(weight)[:]
    assert ((whole - weight).norm() / weight.norm()).item() == pytest.approx(0.092, abs=0.006)
    assert torch.equal(torch.cat([quantize(part)[:] for part in weight.chunk(2, 0)]), whole)
    for parts in (n for n in (2, 3, 7) if columns % (64 * n) == 0):
        shards = [quantize(part.contiguous())[:] for part in weight.chunk(parts, 1)]
        assert torch.equal(torch.cat(shards, 1), whole)
    for place in ((slice(3, 17), slice(5, 41)), (slice(0, 24), slice(0, columns)), (slice(8, 8), slice(None))):
        assert torch.equal(quantize(weight)[place], whole[place])
    assert quantize(weight).nbytes == count_bytes(weight.numel()) == 24 * columns * 9 // 16


def test_the_fault_of_the_cpu_kernel_is_still_there() -> None:
    """Rows that are no whole blocks silently come out wrong, so matrices are passed flat.

    If this fails, the kernel is right or refuses, and the note in `weights/quantization.py` can go.
    """
    weight = draw(96, 96)
    errors = []
    for given in (weight, weight.flatten()):
        codes, state = bnb.functional.quantize_4bit(given, blocksize=64, quant_type="nf4")
        back = bnb.functional.dequantize_4bit(codes, state).view(96, 96)
        errors.append(((back - weight).norm() / weight.norm()).item())
    assert errors[1] < 0.1
    assert errors[0] > 0.2 or torch.backends.cpu.get_cpu_capability() != "AVX512"


def make_shape(**sizes: int) -> ModelShape:
    config = CONFIGS["qwen2"](
        **dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384) | sizes
    )
    return model_shape_from_config(config.to_dict(), source="a test")


@pytest.mark.parametrize(
    ("sizes", "tp_size", "expected"),
    [
        (dict(), 1, ""),
        (dict(), 2, ""),
        (dict(intermediate_size=320), 2, "of model.layers.0.mlp.down_proj.weight a rank has 160 columns"),
        (dict(intermediate_size=64), 2, "mlp.down_proj.weight a rank has 32 columns"),
        (dict(hidden_size=96, num_attention_heads=2), 1, "layers.0.mlp.gate_proj.weight a rank has 96 columns"),
    ],
)
def test_layouts_that_cut_blocks_are_refused(sizes: dict[str, int], tp_size: int, expected: str) -> None:
    if not expected:
        check_quantization(make_shape(**sizes), tp_size, "actor")
        return
    with pytest.raises(UserError) as caught:
        check_quantization(make_shape(**sizes), tp_size, "actor")
    assert expected in caught.value.found
