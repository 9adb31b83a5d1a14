# SPDX-License-Identifier: Apache-2.0
"""Which context parallel sizes the attention heads of a model allow: arithmetic, without torch.

`np` and `ng` of `ulysses.py` are heads of one TP rank here: tensor parallelism has divided them already.
"""

from __future__ import annotations

from megatron_rl.types import UserError


def _divides(num_heads: int, num_kv_heads: int, cp_size: int) -> bool:
    return num_heads % cp_size == 0 and (num_kv_heads % cp_size == 0 or cp_size % num_kv_heads == 0)


def check_context_parallel(
    num_heads: int, num_kv_heads: int, tp_size: int, cp_size: int, *, section: str = "actor"
) -> None:
    """Refuse a context parallel size that the heads of the model do not allow.

    Args:
        num_heads, num_kv_heads: of the whole model, divisible by `tp_size`.
        section: of the configuration, for the error.

    Raises:
        UserError: naming the sizes that work.
    """
    heads, kv_heads = num_heads // tp_size, num_kv_heads // tp_size
    if not _divides(heads, kv_heads, cp_size):
        allowed = [size for size in range(1, heads + 1) if _divides(heads, kv_heads, size)]
        raise UserError(
            f"context_parallel_size {cp_size} cannot divide the {heads} query heads and {kv_heads} KV heads of a "
            f"tensor parallel rank ({num_heads} and {num_kv_heads} of the model over tp = {tp_size})",
            source=f"{section}.context_parallel_size, {section}.tensor_model_parallel_size and the model's config.json",
            expected=f"one of {allowed}: it divides the query heads, and divides the KV heads or is a multiple of them",
            hint=f"set {section}.context_parallel_size to one of these, or change the tensor parallel size",
        )
