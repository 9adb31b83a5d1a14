# SPDX-License-Identifier: Apache-2.0
"""vLLM linear layers over 8-bit codes with a scale per row (`weights.row_quantization`).

Parameters lie as in plain linear layers, to be written in place. Activations are not quantized, and outputs are scaled
in float32: only weights lose precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.weights.row_quantization import SCALE_SUFFIX, CodeFormat, decode

METHOD = "megatron_rl"  # name in vLLM's registry
_WEIGHT = "weight"


def register_method(code_format: CodeFormat, quantization: ModuleType, linear: ModuleType) -> None:
    """Register the method with vLLM, given its modules `quantization` and `linear`."""

    class CodedLinear(linear.LinearMethodBase):
        def create_weights(
            self, layer: Any, input_size_per_partition: int, output_partition_sizes: Sequence[int], **sizes: Any
        ) -> None:
            rows = sum(output_partition_sizes)
            codes, scales = torch.zeros(rows, input_size_per_partition, dtype=torch.int8), torch.zeros(rows, 1)
            for name, values in ((_WEIGHT, codes), (_WEIGHT + SCALE_SUFFIX, scales.float())):
                layer.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            product = F.linear(x, decode(layer.weight, code_format, x.dtype))
            scaled = (product.float() * layer.weight_scale[:, 0]).to(x.dtype)
            return scaled if bias is None else scaled + bias

    @quantization.register_quantization_config(METHOD)
    class CodedConfig(quantization.QuantizationConfig):
        def get_name(self) -> str:
            return METHOD

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: Mapping[str, Any]) -> Any:
            return cls()

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return CodedLinear() if isinstance(layer, linear.LinearBase) else None
