# SPDX-License-Identifier: Apache-2.0
"""Throughput of a step: tokens per second and GPU, and the share of the GPUs' peak operations (MFU)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.observability.metrics import Record
from megatron_rl.weights.families import ModelShape

# Name of a GPU -> dense operations per second in bfloat16, from the data sheets of NVIDIA and AMD.
_PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H20": 148e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI325": 1307e12,
    "MI300": 1307e12,
}
_FORWARDS = ("old_logprobs", "ref_logprobs")  # phases of one pass without a backward pass


class Throughput:
    """Speed of the phases of a step, as metrics.

    Args:
        sequences: prompts with a response of a step.
        epochs: passes of the update over them.
        ranks: number of ranks at work by phase: "update", "step" and, if there is one, "rollout".
        peak: operations per second of a GPU; `None` leaves out `mfu/...`.
    """

    def __init__(
        self, shape: ModelShape, peak: float | None, *, sequences: int, epochs: int, ranks: Mapping[str, int]
    ) -> None:
        self._shape, self._peak, self._sequences, self._epochs, self._ranks = shape, peak, sequences, epochs, ranks

    def __call__(self, record: Record) -> dict[str, float]:
        """Compute `throughput/<phase>` and `mfu/<phase>` of each phase in `ranks`.

        Operations are counted over whole sequences, without sharing of prompts, recomputation or padding.

        Args:
            record: metrics and seconds of the step.
        """
        sampled, prompts = record.get("tokens/response") or 0.0, record.get("tokens/prompt") or 0.0
        tokens, passes = sampled + prompts, 3.0 * self._epochs
        forwards = sum(f"time/{phase}" in record for phase in _FORWARDS) + ("rollout" in self._ranks)
        amounts = {  # phase -> tokens, forward passes of all tokens
            "update": (tokens * self._epochs, passes),
            "rollout": (sampled, 1.0),
            "step": (tokens, passes + forwards),
        }
        operations = count_operations(self._shape, tokens / self._sequences) * tokens
        found = dict[str, float]()
        for phase, size in self._ranks.items():
            count, weight = amounts[phase]
            if seconds := record.get(f"time/{phase}"):
                found[f"throughput/{phase}"] = count / seconds / size
                if self._peak is not None:
                    found[f"mfu/{phase}"] = weight * operations / seconds / size / self._peak
        return found


def find_peak(device: torch.device) -> float | None:
    """Return the dense bfloat16 operations per second of a device; `None` for a CPU or a GPU that is not listed."""
    return read_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def read_peak(name: str) -> float | None:
    """Return the dense bfloat16 operations per second of a GPU by its name; `None` for one that is not listed."""
    return next((peak for known, peak in _PEAKS.items() if all(word in name for word in known.split())), None)


def count_operations(shape: ModelShape, length: float) -> float:
    """Return operations per token of a forward pass through a sequence of `length` tokens."""
    h, shapes = shape.hidden_size, [shape.at(layer) for layer in range(shape.num_layers)]
    scored = shape.num_heads * sum(one.head_dim + one.value_dim for one in shapes) / len(shapes)
    layer = shape.attention_elements + 3 * h * shape.active_columns + h * shape.num_experts
    head = 0 if shape.has_score_head else h * shape.vocab_size
    attending = shape.num_layers - len(shape.delta_layers)
    return 2 * (shape.num_layers * layer + head) + attending * scored * length
