# SPDX-License-Identifier: Apache-2.0
"""Arguments and environment with which vLLM is started, in process or as a server."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_rl.engines.modes import fit_to_device
from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.engines.vllm.vllm_bitwise import ENGINE_ARGUMENTS
from megatron_rl.engines.vllm.vllm_coding import METHOD
from megatron_rl.engines.vllm.vllm_limits import CPU_BLOCK_SIZE, cpu_cache_bytes
from megatron_rl.engines.vllm.vllm_lora import list_arguments
from megatron_rl.weights.families import FAMILIES, ModelShape

LOAD_FORMAT = "megatron_rl"
_CPU_STEP_TOKENS = 4096  # vLLM's default


def list_engine_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the settings that vLLM reads from the environment."""
    runner = fit_to_device(spec.config, spec.process.device).model_runner
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        # MLA caches products of weights, which a weight update would leave stale.
        "VLLM_MLA_DISABLE": "1" if spec.shape.latent is not None else "0",
    }


def records_kept_sets(spec: EngineSpec) -> bool:
    """Return whether this engine can record which tokens survive top-k and top-p: only with runner v1."""
    return fit_to_device(spec.config, spec.process.device).model_runner == "v1"


def list_engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`, including `rollout.engine_options`."""
    config, rank = fit_to_device(spec.config, spec.process.device), spec.process.rank
    longest = spec.max_prompt_length + spec.max_response_length
    arguments: dict[str, Any] = dict(
        model=spec.model_path,
        load_format=LOAD_FORMAT,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=spec.dtype,
        max_model_len=longest,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=config.tensor_model_parallel_size,
        distributed_executor_backend="external_launcher",
        enforce_eager=config.enforce_eager,
        async_scheduling=config.async_scheduling,
        seed=(spec.seed + rank // config.tensor_model_parallel_size) % (1 << 32),  # NumPy's global seed has 32 bits
        # Log-probs after the temperature: the distribution that is sampled from.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    if config.quantization != "none":
        arguments["quantization"] = METHOD
    if spec.shape.latent is not None:  # transformers hard-codes these; vLLM defaults to DeepSeek-V2's
        arguments["hf_overrides"] = dict(topk_method="noaux_tc", scoring_func="sigmoid", moe_router_dtype="float32")
    if FAMILIES[spec.shape.family].has_sinks:  # weights arrive decoded
        arguments["hf_overrides"] = dict(quantization_config=None)
    if FAMILIES[spec.shape.family].image_text is not None:
        arguments["hf_overrides"] = partial(_take_text_part, spec.shape)
    if spec.adapters is not None:
        arguments |= list_arguments(spec.adapters)
    if spec.process.device.type == "cuda":
        arguments |= dict(enable_sleep_mode=True, gpu_memory_utilization=config.gpu_memory_utilization)
        if spec.shape.num_experts:
            arguments["moe_backend"] = "triton"  # other kernels reorder the fused weights
        if config.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * (1 << 30))
    else:
        arguments |= dict(
            block_size=CPU_BLOCK_SIZE,
            kv_cache_memory_bytes=cpu_cache_bytes(spec),
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(_CPU_STEP_TOKENS, longest),
        )
        if config.bitwise or spec.shape.latent is not None:  # the C++ kernel misreads strided views of heads
            arguments |= ENGINE_ARGUMENTS
    return arguments | config.engine_options


def _take_text_part(shape: ModelShape, config: Any) -> Any:
    """Reduce an image-text config to its text part, like `take_text_config`."""
    config = config.get_text_config()
    config.architectures = [FAMILIES[shape.family].architecture]
    config.tie_word_embeddings = shape.tied_embeddings
    return config
