# SPDX-License-Identifier: Apache-2.0
"""Activation memory: tensors kept from forward to backward, and temporary ones.

Counted from the tensors that autograd saves, per token of a packed microbatch (elements; `h` hidden, `f` feed-forward
columns, `q`, `kv` columns of all heads, `s` = TP with sequence parallelism, else 1):

    norms        4 h / s                             input and output of both
    attention    ((q + 2 kv) + (q + kv) + q) / tp    projected, rotated, attended
                 ((q + 2 kv) + q + q) / tp           with Ulysses: exchanged, attended, exchanged back
    MLP          3 f / tp                            [gate; up], silu(gate) * up
    experts      k (h + 4 f / tp)                    k experts per token; temporarily up to 5 k h more
    head         h / s + h                           final norm, and the output layer's gathered input

Full recomputation keeps each layer's input, h / s. On CPU, attention keeps a copy of its result. In float32 on a GPU,
KV heads are repeated to the query heads: another 2 q / tp. A test compares the sum with the peak of real updates.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import LayoutConfig, TrainedConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import padded_vocab_size

_FLOAT = 4


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one rank.

    Attributes:
        stored: from forward to backward, over all microbatches in flight.
        transient: of one layer while it runs.
        logits: of a chunk of tokens, with the output layer's gradient in an update.
        output: that gradient, absent under adapters.
    """

    stored: int
    transient: int
    logits: int
    output: int = 0

    @property
    def total(self) -> int:
        """Stored bytes plus the larger temporary part."""
        return self.stored + max(self.transient, self.logits)


def count_layer_elements(
    shape: ModelShape, layout: ParallelLayout, sequence_parallel: bool, fused: bool, repeats_heads: bool = False
) -> float:
    """Count the elements per token that one layer keeps."""
    tp = layout.tp_size
    s = tp if sequence_parallel else 1
    h, f, d = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    q, kv = shape.num_heads * d, shape.num_kv_heads * d
    if layout.cp_size == 1:
        attention = 3 * q + 3 * kv + (0 if fused else q)
    else:
        attention = 3 * q + 2 * kv + (q + 2 * kv) * shape.qk_norm
    if shape.latent is not None:
        attention += 2 * tp * (shape.latent.query + shape.latent.key_value) / s
    attention += 2 * q if repeats_heads and kv < q else 0
    elements = 4 * h / s + attention / tp
    if shape.num_experts:
        taken = h * layout.expert_tp_size / tp
        return elements + shape.experts_per_token * (taken + 4 * f / tp) + 3 * shape.shared_ffn_size / tp
    return elements + 3 * f / tp


def count_passes_in_flight(layout: ParallelLayout, pp_rank: int, num_microbatches: int) -> int:
    """Count the forward passes whose activations a stage holds at its peak.

    1F1B: `pp - pp_rank`. Interleaved: `2 (pp - pp_rank - 1) + (vpp - 1) pp + 1`.
    """
    if layout.vpp_size == 1:
        return min(num_microbatches, layout.pp_size - pp_rank)
    passes = 2 * (layout.pp_size - pp_rank - 1) + (layout.vpp_size - 1) * layout.pp_size + 1
    return min(num_microbatches * layout.vpp_size, passes)


def compute_activation_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    config: LayoutConfig,
    *,
    pp_rank: int,
    num_microbatches: int | None,
    itemsize: int,
    fused: bool = True,
) -> ActivationBytes:
    """Compute the activations of one role on one rank, with a full token budget.

    Args:
        num_microbatches: per update; `None` for a forward-only scoring pass.
        itemsize: bytes of an activation element.
        fused: whether attention keeps no intermediate results.
    """
    tokens = config.max_tokens_per_microbatch / layout.cp_size
    s = layout.tp_size if config.sequence_parallel else 1
    h, is_last = shape.hidden_size, pp_rank == layout.pp_size - 1
    is_update = num_microbatches is not None
    is_full = is_update and isinstance(config, TrainedConfig) and config.recompute_granularity == "full"
    layer = count_layer_elements(shape, layout, config.sequence_parallel, fused, fused and itemsize == _FLOAT)
    head = (h / s + h) * tokens * itemsize if is_last else 0
    logits = 0
    if is_last and not shape.has_score_head:
        logits = _count_logits(shape, layout, config, itemsize, is_update)
    if num_microbatches is None:
        transient = count_forward_elements(shape, layout, config.sequence_parallel) * tokens * itemsize
        return ActivationBytes(0, int(transient), int(head) + logits)
    passes = count_passes_in_flight(layout, pp_rank, num_microbatches)
    layers = passes * shape.num_layers / (layout.pp_size * layout.vpp_size)
    # megatron-core also keeps a pass's output for the next stage; the last chunk has none.
    sent = passes * (1 - is_last / layout.vpp_size) * h / s
    stored = layers * (h / s if is_full else layer) + sent
    # Gradients of one layer's results in its backward; with recomputation also its activations.
    transient = 2 * shape.ffn_hidden_size / layout.tp_size + 2 * h + (layer if is_full else 0)
    if shape.num_experts:  # peak just after the layer's forward
        transient += shape.experts_per_token * _count_exchanged(layout, 2) * h
    output = _count_output_gradient(shape, layout, config, itemsize) if logits else 0
    return ActivationBytes(int(stored * tokens * itemsize + head), int(transient * tokens * itemsize), logits, output)


def count_forward_elements(shape: ModelShape, layout: ParallelLayout, sequence_parallel: bool) -> float:
    """Count the peak elements per token of a forward-only pass."""
    tp = layout.tp_size
    s = tp if sequence_parallel else 1
    h, f, k = shape.hidden_size, shape.ffn_hidden_size / tp, shape.experts_per_token
    if shape.num_experts:
        return k * _count_exchanged(layout, 3) * h + 6 * h / s
    return 3 * f + 4 * h / s + h


def _count_exchanged(layout: ParallelLayout, own: int) -> float:
    """Count copies of expert inputs in a layer: `own` local ones and communication buffers."""
    split = layout.expert_tp_size
    return (own * split + 1 + (layout.ep_size > 1) + (split > 1)) / layout.tp_size


def _count_logits(
    shape: ModelShape, layout: ParallelLayout, config: LayoutConfig, itemsize: int, is_update: bool
) -> int:
    """Return bytes of a chunk's logits, twice in float32, and of its hidden states; in an update, also of gradients."""
    columns = padded_vocab_size(shape.vocab_size, layout.tp_size) // layout.tp_size
    tokens = config.max_tokens_per_microbatch // layout.cp_size
    chunk, hidden = min(config.logprob_chunk_tokens, tokens), tokens * shape.hidden_size * itemsize
    if not is_update:
        return chunk * columns * 2 * _FLOAT + hidden
    output = _count_output_gradient(shape, layout, config, itemsize)
    return chunk * columns * (2 * _FLOAT + itemsize) + output + 2 * hidden


def _count_output_gradient(shape: ModelShape, layout: ParallelLayout, config: LayoutConfig, itemsize: int) -> int:
    columns = padded_vocab_size(shape.vocab_size, layout.tp_size) // layout.tp_size
    is_single = config.logprob_chunk_tokens >= config.max_tokens_per_microbatch // layout.cp_size
    return columns * shape.hidden_size * (itemsize if is_single else _FLOAT)
