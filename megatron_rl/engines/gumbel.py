# SPDX-License-Identifier: Apache-2.0
"""Sampling as an argmax with one random stream per response: what is drawn does not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def add_gumbel_noise(scaled: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Noise on top of logits: their largest is then a sample of `softmax(scaled)` (the Gumbel-max trick).

    Args:
        scaled: [b, v] logits over the temperature, float32.
        generators: of each row, on the CPU; each is advanced by v numbers.

    Returns:
        [b, v].
    """
    noise = torch.stack([torch.rand(scaled.shape[1], generator=g) for g in generators])
    return scaled - (-noise.clamp_min(1e-20).log()).log().to(scaled.device)
