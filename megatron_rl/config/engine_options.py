# SPDX-License-Identifier: Apache-2.0
"""`rollout.engine_options`: refused arguments of vLLM's `EngineArgs`, with reasons; everything else passes."""

from __future__ import annotations

from collections.abc import Mapping

_RANKS = "the ranks of the job are the engines: rollout.tensor_model_parallel_size and placement.rollout decide"
_WEIGHTS = "weights are written into vLLM's own parameters, shard to shard, in model.dtype"
_MODEL = "the engine runs the policy's own model, whose shape is that of model.path"
_SAMPLING = "it changes what is sampled, and training would score another distribution"
_STALE = "it keeps keys and values that outlive a weight update"
_INSIDE = "this program reaches into vLLM's own classes"
_DRAFTS = (
    "the log-probs of drafted tokens are not proven; vLLM's CPU build draws them from memory that nobody has written"
)

REFUSED: Mapping[str, str] = {
    **{
        name: f"set {setting}"
        for name, setting in {
            "model": "model.path",
            "tokenizer": "model.tokenizer",
            "dtype": "model.dtype",
            "seed": "trainer.seed",
            "max_model_len": "data.max_prompt_length and data.max_response_length",
            "max_num_seqs": "rollout.max_num_seqs",
            "tensor_parallel_size": "rollout.tensor_model_parallel_size",
            "gpu_memory_utilization": "rollout.gpu_memory_utilization",
            "kv_cache_memory_bytes": "rollout.kv_cache_gib",
            "num_gpu_blocks_override": "rollout.kv_cache_gib",
            "enforce_eager": "rollout.enforce_eager",
            "async_scheduling": "rollout.async_scheduling",
            "enable_lora": "actor.lora.rank and hybrid.lora",
            "max_loras": "actor.lora.rank and hybrid.lora",
            "max_lora_rank": "actor.lora.rank and hybrid.lora",
            "max_cpu_loras": "actor.lora.rank and hybrid.lora",
            "quantization": "rollout.quantization",
            "quantization_config": "rollout.quantization",
            "lora_dtype": "actor.lora.rank and hybrid.lora",
            "lora_target_modules": "actor.lora.target_modules",
            "fully_sharded_loras": "actor.lora.rank and hybrid.lora",
        }.items()
    },
    **dict.fromkeys(
        (
            "distributed_executor_backend",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "data_parallel_size",
            "data_parallel_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_backend",
            "nnodes",
            "node_rank",
            "master_addr",
            "master_port",
            "device_ids",
            "enable_elastic_ep",
            "enable_fault_tolerance",
        ),
        _RANKS,
    ),
    **dict.fromkeys(
        (
            "load_format",
            "model_loader_extra_config",
            "weight_transfer_config",
            "cpu_offload_gb",
            "cpu_offload_params",
            "offload_backend",
            "offload_params",
            "enable_sleep_mode",
            "enable_cumem_allocator",
            "enable_expert_parallel",
            "enable_eplb",
            "eplb_config",
            "expert_placement_strategy",
            "moe_backend",
            "linear_backend",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(
        (
            "model_weights",
            "hf_config_path",
            "hf_overrides",
            "model_class_overrides",
            "model_impl",
            "runner",
            "convert",
            "trust_remote_code",
            "revision",
            "disable_sliding_window",
        ),
        _MODEL,
    ),
    **dict.fromkeys(
        (
            "generation_config",
            "override_generation_config",
            "logprobs_mode",
            "logits_processors",
            "structured_outputs_config",
            "reasoning_config",
            "watermark_config",
            "diffusion_config",
            "enable_batch_sharded_sampling",
        ),
        _SAMPLING,
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config"), _STALE
    ),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "scheduler_cls", "skip_tokenizer_init"), _INSIDE),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _DRAFTS),
}
