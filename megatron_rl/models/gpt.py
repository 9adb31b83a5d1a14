# SPDX-License-Identifier: Apache-2.0
"""Construction of this rank's stages of a megatron-core GPTModel that ends in hidden states, and its configuration.

The last stage only holds the head's weight: `training/` computes logits for a few tokens at a time. The
layer spec is megatron-core's local spec with our own norm (megatron-core's refuses sequence parallelism), core
attention, activation and experts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_rl.models.attention import BlockedSelfAttention, PackedAttention
from megatron_rl.models.stages import GatedActivation, HiddenStatesModel, RMSNorm
from megatron_rl.parallel.collectives import current_device
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.megatron_layout import padded_vocab_size, stage_layers

if TYPE_CHECKING:
    from megatron_rl.weights.adapters import AdapterShape


# The functions megatron-core expects; see `GatedActivation`.
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": F.gelu, "clamped_silu": F.silu}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
_RECOMPUTE["offload"] = _RECOMPUTE["full"]  # with inputs of layers on the host (`offloaded_inputs.py`)
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


# megatron-core only warns about some options, or gets them wrong:
# * interleaved schedules overlap their p2p (`batch_p2p_comm` with PP=2 silently gives wrong numbers);
# * no capacity limits, auxiliary losses or noise: the trained policy must be the sampled policy;
# * gradients are only summed (`calculate_per_token_loss`): losses arrive divided by a global denominator.
def build_transformer_config(
    shape: ModelShape,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    recompute_granularity: str = "none",
    use_transformer_engine: bool = False,
    overlap_shared_experts: bool = False,
) -> TransformerConfig:
    """Build the megatron-core configuration of one role's model.

    Args:
        recompute_granularity: "none", "selective" (core attention), "full" or "offload" (whole layers).
        overlap_shared_experts: while tokens are exchanged, if there is expert parallelism.
    """
    is_interleaved, family, experts = layout.vpp_size > 1, FAMILIES[shape.family], dict[str, Any]()
    if shape.num_experts:
        from megatron_rl.models.routing import list_settings

        experts = list_settings(shape, layout, overlap_shared_experts=overlap_shared_experts)
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
        perform_initialization=False,  # weights are loaded from a checkpoint
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


def build_layer_spec(
    shape: ModelShape,
    config: TransformerConfig,
    transformer_impl: str,
    batch_invariant: bool = False,
    adapters: AdapterShape | None = None,
    layer_number: int = 0,
) -> ModuleSpec:
    """Build the spec of layer `layer_number`; parameter names do not depend on the implementation."""
    num_experts = config.num_moe_experts if shape.has_experts(layer_number) else None
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer: Any = spec.submodules  # "object" by its annotation
    attention, mlp = layer.self_attention.submodules, _submodules(layer.mlp)
    kinds = {*shape.layer_kinds(layer_number).values()}
    if "mlp_output_norm" in kinds:
        from megatron_rl.models.layer_variants import OutputNormLayer, SandwichLayer, ScaledLayer

        spec.module = SandwichLayer if "mlp_norm" in kinds else OutputNormLayer
        spec.module = ScaledLayer if "layer_scalar" in kinds else spec.module
    mlps = [mlp]
    if num_experts:
        from megatron_rl.models.experts import GroupedExperts
        from megatron_rl.models.routing import BiasedRouter, OverlappedSharedExperts, RoutedLayer, RoutedRouter

        moe: Any = moe_utils
        moe.__dict__.setdefault("te_general_gemm", None)  # 0.16.1 without TE: NameError in every router
        spec.module = RoutedLayer
        mlp.router = BiasedRouter if config.moe_router_score_function == "sigmoid" else RoutedRouter
        own = {"batch_invariant": batch_invariant, "adapters": adapters}
        mlp.experts = ModuleSpec(module=GroupedExperts, params=own)
        mlps = [_submodules(mlp.shared_experts)]
        if config.moe_shared_expert_overlap:
            mlp.shared_experts = ModuleSpec(module=OverlappedSharedExperts, submodules=mlps[0])
    for part in mlps:
        part.activation_func = GatedActivation
    layer.self_attention.module, sizes = choose_mixer(shape, layer_number)
    layer.self_attention.params.update(sizes)
    norm, attention.core_attention = RMSNorm, PackedAttention
    if transformer_impl == "transformer_engine":
        from megatron.core.extensions import transformer_engine as te  # optional dependency

        norm = te.TENorm
        if adapters is None or not adapters.is_quantized:
            attention.linear_qkv, attention.linear_proj = te.TEColumnParallelLinear, te.TERowParallelLinear
            for part in mlps:
                part.linear_fc1, part.linear_fc2 = te.TEColumnParallelLinear, te.TERowParallelLinear
    if adapters is not None:
        from megatron_rl.models.lora_linears import adapt_layer

        adapt_layer(config, adapters, attention, None if num_experts else mlp)
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if config.qk_layernorm or shape.latent is not None:
        attention.q_layernorm = attention.k_layernorm = norm
    return spec


def _submodules(spec: Any) -> Any:
    """Return the submodules of a megatron-core spec, or of the `partial` that replaces it in newer versions."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


class ChunkStarts:
    """Numbers of the first layers of a rank's model chunks, which megatron-core would divide evenly."""

    # In place of megatron-core's own layouts, which take the stage from its global state.
    def __init__(self, num_layers: int, groups: ParallelGroups) -> None:
        layout, stage = groups.layout, groups.at.pp
        self._starts = [stage_layers(num_layers, layout, stage, chunk).start for chunk in range(layout.vpp_size)]

    def get_layer_offset(self, vp_stage: int | None = None, **_: Any) -> int:
        """Return the number of layers before a model chunk."""
        return self._starts[vp_stage or 0]


def build_gpt_stages(
    shape: ModelShape,
    config: TransformerConfig,
    groups: ParallelGroups,
    transformer_impl: str = "local",
    batch_invariant: bool = False,
    adapters: AdapterShape | None = None,
) -> torch.nn.ModuleList:
    """Build the model chunks of this rank; weights are undefined until loaded.

    Args:
        config: from `build_transformer_config` with the layout of `groups`.
        batch_invariant: whether a token's bits in an expert are independent of other tokens.
        adapters: trained instead of the model, if any.

    Returns:
        `vpp_size` models; `ScoreModel`s if the shape has a score head.
    """
    layout = groups.layout
    specs = {
        sort: build_layer_spec(shape, config, transformer_impl, batch_invariant, adapters, layer)
        for sort, layer in {shape.sort_of(layer): layer for layer in range(shape.num_layers)}.items()
    }
    config.pipeline_model_parallel_layout = cast(Any, ChunkStarts(shape.num_layers, groups))
    is_whole = not shape.mtp_layer  # has an embedding and an output layer
    model_class: type[HiddenStatesModel] = HiddenStatesModel
    if shape.has_score_head or not is_whole:
        from megatron_rl.models.other_stages import MtpModel, ScoreModel

        model_class = ScoreModel if is_whole else MtpModel
    chunks = []
    for chunk in range(layout.vpp_size):
        layers = stage_layers(shape.num_layers, layout, groups.at.pp, chunk)
        layer_specs = [specs[shape.sort_of(layer)] for layer in layers]
        first: Any = next(iter(specs.values())).submodules
        # Annotated as ModuleSpec, but megatron-core also accepts the submodules of a block.
        block: Any = TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=first.input_layernorm)
        model = model_class(
            config,
            block,
            vocab_size=padded_vocab_size(shape.vocab_size, layout.tp_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=is_whole and groups.at.pp == 0 and chunk == 0,
            post_process=groups.is_last_stage and chunk == layout.vpp_size - 1,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",  # PackedAttention rotates, by explicit positions
            pg_collection=groups.collection,
            vp_stage=chunk if layout.vpp_size > 1 else None,
        )
        if model.pre_process and FAMILIES[shape.family].scales_embedding:
            # Rounded as in the reference code. A tied output layer uses the unscaled weight.
            scale = torch.tensor(shape.hidden_size**0.5).to(config.params_dtype).item()
            model.embedding.register_forward_hook(lambda module, inputs, output, scale=scale: output * scale)
        _complete_weights(model, current_device())
        chunks.append(model)
    return torch.nn.ModuleList(chunks)


def _complete_weights(model: GPTModel, device: torch.device) -> None:
    """Move weights to `device`, and mark TP shards: the gradient norm counts unmarked weights on TP rank 0 only."""
    # megatron-core creates router weights on the host, and marks only weights that it initializes.
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if not weight.is_meta and weight.device.type != device.type:
                moved = torch.nn.Parameter(weight.to(device))
                vars(moved).update({mark: x for mark, x in vars(weight).items() if mark not in vars(moved)})
                module.register_parameter(name, moved)
        if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear, RowParallelLinear)):
            weight = module.weight
            if isinstance(weight, torch.nn.Parameter) and not hasattr(weight, "tensor_model_parallel"):
                split_dim = 1 if isinstance(module, RowParallelLinear) else 0
                set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=split_dim, stride=1)


def choose_mixer(shape: ModelShape, layer: int) -> tuple[type, dict[str, Any]]:
    """Return a layer's class of self-attention (or delta net), and arguments of it that megatron-core does not pass."""
    if layer in shape.delta_layers:
        from megatron_rl.models.layer_variants import GatedDeltaNet

        return GatedDeltaNet, {"sizes": shape.delta_net}
    if shape.latent is not None or shape.full_heads is not None:
        from megatron_rl.models.layer_variants import LatentSelfAttention, SizedSelfAttention

        own = {"sizes": shape.latent} if shape.latent else {"shape": shape}
        return LatentSelfAttention if shape.latent else SizedSelfAttention, own
    if "q.norm" in shape.layer_kinds(layer).values():
        from megatron_rl.models.layer_variants import NormedSelfAttention

        return NormedSelfAttention, {}
    return BlockedSelfAttention, {}
