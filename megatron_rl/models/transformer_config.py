# SPDX-License-Identifier: Apache-2.0
"""Conversion of a `ModelShape` and a layout to megatron-core's `TransformerConfig`.

Some options must be set here, because megatron-core only warns about them or gets them wrong:

* interleaved schedules overlap their p2p (`batch_p2p_comm` with PP=2 silently gives wrong numbers);
* no capacity limits, auxiliary losses or noise: the trained policy must be the sampled policy;
* gradients are only summed (`calculate_per_token_loss`): losses arrive divided by a global denominator;
* fused kernels that need apex are off.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.weights.families import FAMILIES, ModelShape

# The functions megatron-core expects; see `GatedActivation`.
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": F.gelu, "clamped_silu": F.silu}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
# Kernels of apex and Transformer Engine's fused ones; megatron-core switches some on by default.
_UNFUSED: dict[str, Any] = dict.fromkeys(
    (
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "persist_layer_norm",
        "gradient_accumulation_fusion",
        "apply_rope_fusion",
        "cross_entropy_loss_fusion",
    ),
    False,
)


def build_transformer_config(
    shape: ModelShape,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    recompute_granularity: str = "none",
    use_transformer_engine: bool = False,
) -> TransformerConfig:
    """Build the megatron-core configuration of one role's model.

    Args:
        recompute_granularity: "none", "selective" (core attention) or "full" (whole layers).
    """
    is_interleaved, family, experts = layout.vpp_size > 1, FAMILIES[shape.family], dict[str, Any]()
    if shape.num_experts:
        from megatron_rl.models.routing import list_settings

        experts = list_settings(shape, layout)
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.dense_ffn_size or shape.ffn_hidden_size,
        **_attention_settings(shape),
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        layernorm_zero_centered_gamma=family.zero_centered_norms,
        activation_func=ACTIVATIONS[family.activations[0]],
        gated_linear_unit=True,
        use_te_activation_func=True,  # our module from the layer spec
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vpp_size if is_interleaved else None,
        context_parallel_size=layout.cp_size,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are loaded from a checkpoint.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        attention_backend=AttnBackend.auto if use_transformer_engine else AttnBackend.local,
        calculate_per_token_loss=True,
        # p2p messages differ in length; megatron-core then requires this dispatcher even for dense models.
        variable_seq_lengths=layout.pp_size > 1,
        moe_token_dispatcher_type="alltoall",
        **experts,
        overlap_p2p_comm=is_interleaved,
        batch_p2p_comm=not is_interleaved,
        **_UNFUSED,
        **_RECOMPUTE[recompute_granularity],
    )
    if family.has_sinks:  # after construction: megatron-core rejects biases with experts
        config.add_bias_linear, config.softmax_type = True, "learnable"
        config.activation_func_clamp_value = 7.0
    return config


def _attention_settings(shape: ModelShape) -> dict[str, Any]:
    return dict(
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        softmax_scale=shape.attention_scale,
        add_qkv_bias=shape.qkv_bias,
        attention_output_gate=FAMILIES[shape.family].has_delta_nets,
        qk_layernorm=shape.qk_norm and not FAMILIES[shape.family].norms_all_heads,
    )
