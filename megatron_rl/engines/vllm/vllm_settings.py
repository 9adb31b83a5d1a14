# SPDX-License-Identifier: Apache-2.0
"""Arguments, environment and execution modes with which vLLM is started, and its limits; vllm is not imported."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.model_config import read_json
from megatron_rl.weights.rollout_layout import LARGEST_RANK

if TYPE_CHECKING:  # a dry run imports no torch
    import torch

LOAD_FORMAT = "megatron_rl"
CODED_METHOD = "megatron_rl"  # name of 8-bit matrices in vLLM's registry
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_EXPERT_MULTIPLE = 32  # vLLM pads smaller slices of experts; placement tables have no padding there
CPU_BLOCK_SIZE = 32
# Families whose multi-token prediction layer drafts -> vLLM's class of the layer.
DRAFTERS = {
    "deepseek_v3": "DeepSeekMTPModel",
    "glm4_moe": "Glm4MoeMTPModel",
    "glm4_moe_lite": "Glm4MoeLiteMTPModel",
}
_CPU_LATENT_BLOCK_SIZE = 16
_MODES_ON_CPU: dict[str, Any] = {"enforce_eager": True, "async_scheduling": False, "model_runner": "v1"}
_MAX_CPU_CACHE_BYTES = 1 << 30
_CPU_STEP_TOKENS = 4096  # vLLM's default
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)  # buffer sizes of vLLM


def fit_to_device(config: RolloutConfig, device: torch.device, records_routes: bool) -> RolloutConfig:
    """Choose vLLM's execution modes: those that a CPU supports, and on a GPU the default ones."""
    if device.type == "cpu":
        return _use(config, **_MODES_ON_CPU)
    chosen = "v1" if records_routes or config.is_ever_truncated else "v2"
    # Parts that step together need a forward in each step.
    if config.data_parallel_size > 1 or config.draft_tokens:
        chosen = "v1"
    runner = chosen if config.model_runner == "auto" else config.model_runner
    is_early = runner == "v2"
    if records_routes or config.data_parallel_size > 1:
        is_early = not config.is_ever_truncated and not config.draft_tokens
    given = config.engine_options.get("async_scheduling")
    return _use(config, is_early if given is None else given, model_runner=runner)


def _use(config: RolloutConfig, async_scheduling: bool, **modes: Any) -> RolloutConfig:
    return replace(config, **modes, engine_options=config.engine_options | {"async_scheduling": async_scheduling})


def describe_modes(config: RolloutConfig, device: torch.device, records_routes: bool) -> str:
    """Describe active and ignored modes (CUDA graphs, async scheduling, model runner) for the log."""
    fitted = fit_to_device(config, device, records_routes)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = Path(os.environ.get("VLLM_CACHE_ROOT") or caches / "vllm").expanduser() / "torch_compile_cache"
    compiled = f"compiled with CUDA graphs ({len([*kept.glob('*')])} compiled models are kept in {kept})"
    eager = "eager" if fitted.enforce_eager else compiled
    runner = fitted.model_runner + (" with its Triton sampler" if fitted.model_runner == "v2" else "")
    if (config.model_runner, runner, device.type) == ("auto", "v1", "cuda"):
        truncates = "truncated sampling" if config.is_ever_truncated else "rollout.data_parallel_size"
        other = "rollout.draft_tokens" if config.draft_tokens else truncates
        runner += f", which {'router replay' if records_routes else other} needs"
    given, is_early = config.engine_options.get("async_scheduling"), fitted.engine_options["async_scheduling"]
    text = f"{eager}, async scheduling {'on' if is_early else 'off'}, model runner {runner}"
    ignored = [
        f"rollout.{name}={str(getattr(config, name)).lower()}"
        for name in ("enforce_eager", "model_runner")
        if getattr(config, name) not in ("auto", getattr(fitted, name))
    ]
    if given not in (None, is_early):
        ignored.append("rollout.engine_options.async_scheduling")
    return f"{text}; no effect on CPU: {', '.join(ignored)}" if ignored else text


def list_engine_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the settings that vLLM reads from the environment."""
    runner = fit_to_device(spec.config, spec.process.device, spec.records_routes).model_runner
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        "VLLM_MLA_DISABLE": "1" if spec.shape.latent is not None and not caches_latents(spec) else "0",
    }


def caches_latents(spec: EngineSpec) -> bool:
    """Return whether vLLM caches latents."""
    if spec.shape.latent is None:
        return False
    from megatron_rl.weights.head_sizes import has_latent_cache

    return has_latent_cache(spec.shape.latent, spec.config, spec.dtype, is_gpu=spec.process.device.type == "cuda")


def list_engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`, including `rollout.engine_options`."""
    config = fit_to_device(spec.config, spec.process.device, spec.records_routes)
    rank, longest = spec.process.rank, spec.max_prompt_length + spec.max_response_length
    arguments: dict[str, Any] = dict(
        model=spec.model_path,
        load_format=LOAD_FORMAT,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=spec.dtype,
        max_model_len=longest,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=config.tensor_model_parallel_size,
        data_parallel_size=config.data_parallel_size,
        enable_expert_parallel=config.expert_parallel_size > 1,
        distributed_executor_backend="external_launcher",
        enforce_eager=config.enforce_eager,
        seed=(spec.seed + rank // config.tensor_model_parallel_size) % (1 << 32),  # NumPy's global seed has 32 bits
        # Log-probs after the temperature: the distribution that is sampled from.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    if config.quantization != "none":
        arguments["quantization"] = CODED_METHOD
    if spec.shape.router is not None:
        from megatron_rl.weights.support import list_router_options

        arguments["hf_overrides"] = list_router_options(spec.shape)
    if _is_encoded(spec.model_path):  # weights arrive decoded
        arguments["hf_overrides"] = arguments.get("hf_overrides", {}) | dict(quantization_config=None)
    if FAMILIES[spec.shape.family].image_text is not None:
        arguments["hf_overrides"] = partial(_take_text_part, spec.shape)
    if adapters := spec.adapters:
        slot = next(size for size in _LORA_RANKS if size >= adapters.rank)
        arguments |= dict(enable_lora=True, max_loras=1, max_lora_rank=slot)
        arguments["lora_target_modules"] = adapters.modules
    if spec.process.device.type == "cuda":
        arguments |= dict(enable_sleep_mode=True, gpu_memory_utilization=config.gpu_memory_utilization)
        _check_all_to_all(config)
        if spec.shape.num_experts:
            arguments["moe_backend"] = "triton"  # other kernels reorder the fused weights
        if config.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * (1 << 30))
    else:
        arguments |= dict(
            block_size=_CPU_LATENT_BLOCK_SIZE if caches_latents(spec) else CPU_BLOCK_SIZE,
            kv_cache_memory_bytes=cpu_cache_bytes(spec),
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(_CPU_STEP_TOKENS, longest),
        )
        if caches_latents(spec):
            arguments["attention_backend"] = "CPU_MLA"  # AMX's takes bfloat16, and empties the weights
        if config.bitwise or spec.shape.latent is not None:  # the C++ kernel misreads strided views of heads
            arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    if config.draft_tokens:
        arguments |= _list_draft_arguments(spec, arguments)
    return arguments | config.engine_options


def _check_all_to_all(config: RolloutConfig) -> None:
    """Refuse DeepEP's exchange of tokens where DeepEP is not installed (UserError)."""
    backend = config.engine_options.get("all2all_backend", "")
    if backend.startswith("deepep") and importlib.util.find_spec("deep_ep") is None:
        raise UserError(
            f"rollout.engine_options has all2all_backend {backend!r}, and there is no package deep_ep",
            source="rollout.engine_options",
            expected="DeepEP on each node, or vLLM's own exchange",
            hint="install DeepEP (github.com/deepseek-ai/DeepEP), or leave all2all_backend out: each step takes longer",
        )


def _list_draft_arguments(spec: EngineSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that differ from `arguments` with drafts."""
    count = spec.config.draft_tokens
    speculative: dict[str, Any] = dict(method="mtp", num_speculative_tokens=count, draft_sample_method="probabilistic")
    # With a number for each size of a batch vLLM does not fill a new request of one token with drafts that are none,
    # after which it verifies no draft of the step by its distribution.
    speculative["num_speculative_tokens_per_batch_size"] = [(1, spec.config.max_num_seqs, count)]
    if "attention_backend" in arguments:
        speculative["attention_backend"] = arguments["attention_backend"]
    # A dict would not reach the layer's config. A batch drafts nothing if the drafts of one sequence, after those that
    # are verified, do not fit.
    longest = min(arguments["max_model_len"] + 2 * spec.config.draft_tokens, spec.shape.max_position_embeddings)
    found: dict[str, Any] = dict(
        speculative_config=speculative,
        hf_overrides=partial(_override, arguments["hf_overrides"]),
        max_model_len=longest,
    )
    if "max_num_batched_tokens" in arguments:  # a step has room for the drafts of all sequences
        rows = spec.config.max_num_seqs * (1 + spec.config.draft_tokens)
        found["max_num_batched_tokens"] = max(rows, arguments["max_num_batched_tokens"])
    return found


def _override(options: dict[str, Any], config: Any) -> Any:
    config.update(options)
    return config


def _is_encoded(model_path: str) -> bool:
    file = Path(model_path) / "config.json"
    return file.is_file() and "quantization_config" in read_json(file, "take the file from the model again")


def _take_text_part(shape: ModelShape, config: Any) -> Any:
    """Reduce an image-text config to its text part."""
    config = config.get_text_config()
    config.quantization_config = None
    if hasattr(config, "use_bidirectional_attention"):  # between tokens of images
        config.use_bidirectional_attention = None
    config.architectures = [FAMILIES[shape.family].architecture]
    config.tie_word_embeddings = shape.tied_embeddings
    return config


def records_kept_sets(spec: EngineSpec) -> bool:
    """Return whether vLLM can record the sets that tokens are drawn from: only with model runner v1, without drafts."""
    runner = fit_to_device(spec.config, spec.process.device, spec.records_routes).model_runner
    return runner == "v1" and not spec.config.draft_tokens


def check_cpu_limits(shape: ModelShape, config: RolloutConfig) -> None:
    """Refuse a model or option that vLLM does not support on CPU (UserError)."""
    if config.engine_options.get("enable_chunked_prefill"):
        raise UserError(
            "rollout.engine_options has enable_chunked_prefill",
            source="rollout.engine_options",
            expected="prompts that are computed whole: on a CPU vLLM cannot turn back the random numbers of a part",
            hint="leave it out",
        )
    if "all2all_backend" in config.engine_options:
        raise UserError(
            "rollout.engine_options has all2all_backend",
            source="rollout.engine_options",
            expected="vLLM's own exchange of tokens between experts: the other ones need GPUs",
            hint="leave it out on a CPU",
        )
    if wrong := {shape.head_dim, shape.full.head_dim}.difference(CPU_HEAD_DIMS):
        raise UserError(
            f"vLLM's CPU attention does not serve head_dim {', '.join(map(str, wrong))}",
            source="model.path config.json",
            expected=f"a head_dim of {CPU_HEAD_DIMS}",
            hint="use rollout.engine=hf for this model on CPU",
        )
    if shape.delta_net is not None:
        raise UserError(
            f"rollout.engine = vllm on a CPU with a {shape.family} model: its kernels of gated delta nets take "
            "bfloat16 only, and filters in an order of their own, which an update would not keep",
            source="rollout.engine and the model's config.json",
            expected="hf on a CPU",
            hint="set rollout.engine=hf",
        )
    parts = 1 if config.expert_parallel_size > 1 else config.tensor_model_parallel_size
    sizes = shape.hidden_size, shape.ffn_hidden_size // parts
    if shape.num_experts and any(n % CPU_EXPERT_MULTIPLE for n in sizes):
        raise UserError(
            f"vLLM's CPU experts do not serve hidden size {sizes[0]} with {sizes[1]} columns per rank",
            source="model.path config.json and rollout.tensor_model_parallel_size",
            expected=f"multiples of {CPU_EXPERT_MULTIPLE}",
            hint="use a smaller rollout.tensor_model_parallel_size, or rollout.engine=hf",
        )


def check_installed(shape: ModelShape, config: RolloutConfig) -> None:
    """Refuse a model or options that the installed vLLM, if any, lacks (UserError), unless a server has its own."""
    installed, family = importlib.util.find_spec("vllm"), FAMILIES[shape.family]
    is_elsewhere = config.supports("is_server") and (config.server.endpoints or config.server.python is not None)
    if installed is None or installed.origin is None or is_elsewhere:
        return
    package = Path(installed.origin).parent
    if not (package / f"model_executor/models/{family.vllm_module or shape.family}.py").is_file():
        raise UserError(
            f"rollout.engine = {config.engine!r}, and vLLM has no {family.architecture} of its own",
            source="rollout.engine and the model's config.json",
            expected="hf or megatron for this family",
            hint="set rollout.engine=hf",
        )
    if config.draft_tokens and shape.family not in DRAFTERS:
        raise UserError(
            f"rollout.draft_tokens with a {shape.family} model",
            source="rollout.draft_tokens and the model's config.json",
            expected=f"a model of {', '.join(DRAFTERS)}, whose layer for multi-token prediction vLLM takes",
            hint="leave out rollout.draft_tokens",
        )
    known = list_arguments(package) if config.engine_options else set()
    for name in config.engine_options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"this vLLM has no argument {name!r}",
                source="rollout.engine_options",
                expected="arguments of vllm.EngineArgs",
                hint=f"did you mean {close[0]!r}?" if close else "leave it out",
            )


def list_arguments(package: Path) -> set[str]:
    """Return the arguments of vLLM's `EngineArgs`, parsed from its source."""
    source = (package / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    body = next(node.body for node in classes if node.name == "EngineArgs")
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def cpu_cache_bytes(spec: EngineSpec) -> int:
    """Return the configured bytes of the KV cache on a CPU, or by default enough for `max_num_seqs` full sequences.

    The default is limited to 1 GiB, or to two full sequences if they need more.
    """
    if spec.config.kv_cache_gib is not None:
        return int(spec.config.kv_cache_gib * (1 << 30))
    from megatron_rl.weights.support import count_cached

    shape: ModelShape = spec.shape
    itemsize = 4 if spec.dtype == "float32" else 2
    layers = shape.num_layers + (spec.config.draft_tokens > 0)
    per_token = count_cached(shape, range(layers), spec.config.tensor_model_parallel_size) * itemsize
    if shape.latent is not None and caches_latents(spec):
        per_token = layers * shape.latent.cached * itemsize
    length = spec.max_prompt_length + spec.max_response_length
    blocks = -(-length // CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE
    wanted = per_token * blocks * (spec.config.max_num_seqs + 1)
    return min(max(wanted, 4 << 20), max(_MAX_CPU_CACHE_BYTES, 2 * per_token * blocks))
