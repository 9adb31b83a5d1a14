# SPDX-License-Identifier: Apache-2.0
"""Properties of vLLM on which the in-process engine relies.

tests/transfer/test_hybrid_engine.py compares its outputs.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import random
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config.feature_checks import REFUSED
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.build import build_engine, describe_engine
from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.engines.vllm.vllm_library import pack_experts, prepare_vllm, register_model
from megatron_rl.engines.vllm.vllm_settings import (
    CPU_HEAD_DIMS,
    check_cpu_limits,
    check_installed,
    cpu_cache_bytes,
    list_arguments,
    list_engine_arguments,
    list_engine_environment,
)
from megatron_rl.extension.registry import ENGINES
from megatron_rl.parallel.collectives import Process
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.head_sizes import LatentSizes
from megatron_rl.weights.special_parts import DeltaNetSizes

SHAPE = ModelShape(
    family="qwen2",
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=192,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=517,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=256,
)
SPEC = EngineSpec(
    model_path="",
    shape=SHAPE,
    dtype="float32",
    max_prompt_length=40,
    max_response_length=24,
    config=RolloutConfig(max_num_seqs=8),
    process=Process(0, 1, 0, 1, torch.device("cpu")),
    seed=0,
)

# Names that are replaced, by module.
PATCHED_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine.core": ("cleanup_dist_env_and_memory",),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
    "vllm.distributed.device_communicators.cpu_communicator": ("CpuCommunicator",),
    "vllm.logging_utils.dump_input": ("logger",),
    "vllm.distributed.parallel_state": ("init_world_group", "init_model_parallel_group"),
    "vllm.v1.sample.rejection_sampler": ("expand_batch_to_tokens",),
    "vllm.v1.spec_decode.llm_base_proposer": ("compute_probs_and_sample_next_token",),
    "vllm.model_executor.models.registry": ("_SPECULATIVE_DECODING_MODELS",),
}
EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"


@pytest.mark.parametrize("module", PATCHED_NAMES)
def test_patched_names_exist(module: str, vllm_imported: None) -> None:
    """A vLLM upgrade that renames them fails here, by name, and not in a training run."""
    for name in PATCHED_NAMES[module]:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name} is gone"


@pytest.mark.parametrize("family", ["smollm3", "olmo2"])
def test_families_that_vllm_does_not_implement_are_refused(family: str, vllm_imported: None) -> None:
    with pytest.raises(UserError, match="vLLM has no (SmolLM3|Olmo2)ForCausalLM of its own"):
        check_installed(replace(SHAPE, family=family), RolloutConfig())


def test_other_families_do_not_draft(vllm_imported: None) -> None:
    with pytest.raises(UserError, match="rollout.draft_tokens with a qwen2 model"):
        check_installed(SHAPE, RolloutConfig(draft_tokens=1))


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="the package is here")
def test_a_package_that_vllm_needs_for_a_family_is_named(vllm_imported: None) -> None:
    """Its file of Qwen3.5 has image-text models, too."""
    spec = replace(SPEC, shape=replace(SHAPE, family="qwen3_5_text"))
    with pytest.raises(UserError, match="vLLM's Qwen3_5ForCausalLM needs the package torchvision"):
        register_model(importlib.import_module("vllm"), spec)


def test_reached_names_exist(vllm_imported: None) -> None:
    """Names that are reached into without a patch; the chain from LLM to the model runs in test_hybrid_engine."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.worker.worker_base import WorkerBase

    assert hasattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name")
    assert hasattr(WorkerBase, "get_model")
    manager = inspect.getsource(importlib.import_module("vllm.lora.model_manager").LoRAModelManager)
    assert "self._registered_adapters" in manager and "def activate_adapter(" in manager
    assert hasattr(importlib.import_module("vllm._custom_ops"), "cpu_prepack_moe_weight")
    assert hasattr(importlib.import_module(CPU_EXPERTS).CPUUnquantizedExperts, "isa")
    assert hasattr(importlib.import_module(EXPERTS).UnquantizedFusedMoEMethod, "_setup_kernel")
    assert "init_cpu_memory_env" in vars(torch.ops._C), "cpu_worker calls it by this name; ours does nothing"
    assert "init_cpu_memory_env" in Path(importlib.import_module("vllm.v1.worker.cpu_worker").__file__).read_text()


def test_prepare_is_idempotent_and_keeps_process_groups(vllm_imported: None) -> None:
    """After it, vLLM's clean-up is ours, which does nothing, and CPU linears keep their weight."""
    prepare_vllm(torch.device("cpu"))
    from vllm.model_executor.layers import utils
    from vllm.v1.engine import core

    assert core.cleanup_dist_env_and_memory() is None
    layer = torch.nn.Linear(3, 2)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.numel() == 6 and layer.cpu_linear is torch.nn.functional.linear


def test_unsupported_head_dim_is_refused_on_cpu() -> None:
    """vLLM itself would fail at the first generate."""
    assert 16 not in CPU_HEAD_DIMS
    with pytest.raises(UserError, match="head_dim 16"):
        check_cpu_limits(replace(SHAPE, head_dim=16), RolloutConfig())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_gated_delta_nets_are_refused_on_cpu(family: str) -> None:
    """Its kernels there want bfloat16: in float32 they fail at the first token."""
    nets = replace(SHAPE, family=family, delta_net=DeltaNetSizes(2, 4, 16, 16, 4), delta_layers=(0,))
    with pytest.raises(UserError, match=f"vllm on a CPU with a {family} model"):
        check_cpu_limits(nets, RolloutConfig())


@pytest.mark.parametrize(("ffn", "tp_size", "columns"), [(80, 1, 80), (96, 2, 48)])
def test_expert_slices_that_vllm_would_pad_are_refused_on_cpu(ffn: int, tp_size: int, columns: int) -> None:
    experts = replace(SHAPE, family="mixtral", num_experts=4, experts_per_token=2)
    config = RolloutConfig(tensor_model_parallel_size=tp_size)
    check_cpu_limits(replace(experts, ffn_hidden_size=64 * tp_size), config)
    with pytest.raises(UserError, match=f"hidden size 128 with {columns} columns per rank"):
        check_cpu_limits(replace(experts, ffn_hidden_size=ffn), config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_reorders_in_place(dtype: torch.dtype, vllm_imported: None) -> None:
    """Per expert the same elements in another order; that the kernel wants this order shows in test_hybrid_engine."""
    plain = torch.arange(3 * 64 * 32).view(3, 64, 32).remainder(251).to(dtype)
    packed = plain.clone()
    address = packed.data_ptr()
    pack_experts(packed, "vec")
    assert packed.data_ptr() == address and not torch.equal(packed, plain)
    assert torch.equal(packed.flatten(1).sort(1).values, plain.flatten(1).sort(1).values)


def test_cache_holds_the_configured_number_of_sequences() -> None:
    """64 tokens in 2 blocks of 32, 9 sequences, 4 layers x (k, v) x 2 heads x 32 x 4 bytes; at least 4 MiB."""
    assert cpu_cache_bytes(replace(SPEC, config=RolloutConfig(max_num_seqs=127))) == 64 * 128 * 4 * 2 * 2 * 32 * 4
    assert cpu_cache_bytes(SPEC) == 4 << 20
    assert cpu_cache_bytes(replace(SPEC, config=RolloutConfig(kv_cache_gib=0.5))) == 1 << 29


ON_CPU = "eager, async scheduling off, model runner v1"
MODES = [  # settings; on a GPU: eager, async scheduling, VLLM_USE_V2_MODEL_RUNNER, description; description on CPU
    ({}, (True, True, "1"), "eager, async scheduling on, model runner v2 with its Triton sampler", ""),
    ({"model_runner": "v1"}, (True, False, "0"), ON_CPU, ""),
    (
        {"enforce_eager": False, "validation_sets": {"all": {"top_p": 0.9}}},
        (False, False, "0"),
        "compiled with CUDA graphs (1 compiled models are kept in CACHE/torch_compile_cache), async scheduling off, "
        "model runner v1, which truncated sampling needs",
        "; no effect on CPU: rollout.enforce_eager=false",
    ),
    (
        {"engine_options": {"async_scheduling": True}, "model_runner": "v2"},
        (True, True, "1"),
        "eager, async scheduling on, model runner v2 with its Triton sampler",
        "; no effect on CPU: rollout.model_runner=v2, rollout.engine_options.async_scheduling",
    ),
    (
        {"engine_options": {"async_scheduling": False}},
        (True, False, "1"),
        "eager, async scheduling off, model runner v2 with its Triton sampler",
        "",
    ),
]


@pytest.mark.parametrize(("settings", "on_gpu", "said", "ignored"), MODES)
def test_modes(
    settings: dict[str, Any],
    on_gpu: tuple[bool, bool, str],
    said: str,
    ignored: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's arguments on a GPU, all of them explicit, and on CPU; the directory that vLLM itself uses as a cache."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    (tmp_path / "torch_compile_cache/0123456789").mkdir(parents=True)
    config, gpu = RolloutConfig(**settings), torch.device("cuda", 0)
    for device, expected in ((gpu, on_gpu), (torch.device("cpu"), (True, False, "0"))):
        spec = replace(SPEC, config=config, process=Process(0, 1, 0, 1, device))
        arguments, environment = list_engine_arguments(spec), list_engine_environment(spec)
        found = arguments["enforce_eager"], arguments["async_scheduling"], environment["VLLM_USE_V2_MODEL_RUNNER"]
        assert found == expected
    assert describe_engine(config, gpu) == said.replace("CACHE", str(tmp_path))
    assert describe_engine(config, torch.device("cpu")) == ON_CPU + ignored
    assert describe_engine(replace(config, engine="hf"), gpu) == ""


@pytest.mark.parametrize(
    ("sizes", "settings", "dtype", "device", "cached"),
    [
        ((512, 64), {}, "bfloat16", "cuda", True),
        ((512, 64), {}, "float32", "cuda", False),
        ((512, 64), {}, "float32", "cpu", True),
        ((512, 64), dict(latent_cache=False), "bfloat16", "cuda", False),
        ((512, 64), dict(engine="vllm_server"), "bfloat16", "cuda", False),
        ((40, 12), {}, "bfloat16", "cuda", False),
        (None, {}, "bfloat16", "cuda", False),
    ],
)
def test_latents_are_cached_where_kernels_take_them(
    sizes: tuple[int, int] | None, settings: dict[str, Any], dtype: str, device: str, cached: bool
) -> None:
    """Elsewhere vLLM computes whole heads, as without latent attention."""
    latent = LatentSizes(24, *sizes, 32) if sizes else None
    process, config = Process(0, 1, 0, 1, torch.device(device)), RolloutConfig(max_num_seqs=127, **settings)
    spec = replace(SPEC, shape=replace(SPEC.shape, latent=latent), config=config, dtype=dtype, process=process)
    is_off = list_engine_environment(spec)["VLLM_MLA_DISABLE"] == "1"
    assert is_off == (sizes is not None and not cached)
    if device == "cpu":
        arguments = list_engine_arguments(spec)
        assert (arguments["attention_backend"], arguments["block_size"]) == ("CPU_MLA", 16)
        assert cpu_cache_bytes(spec) == 64 * 128 * 4 * (512 + 64) * 4  # tokens, sequences, layers, channels, bytes


def test_deepep_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself would fail in the first forward, when it builds its buffers."""
    config = RolloutConfig(engine_options={"all2all_backend": "deepep_high_throughput"})
    spec = replace(SPEC, config=config, process=Process(0, 1, 0, 1, torch.device("cuda", 0)))
    with pytest.raises(UserError, match="no package deep_ep"):
        list_engine_arguments(spec)
    with pytest.raises(UserError, match="need GPUs"):
        check_cpu_limits(SHAPE, config)
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    sys.modules["deep_ep"].__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    assert list_engine_arguments(spec)["all2all_backend"] == "deepep_high_throughput"


def test_router_replay_has_the_first_model_runner() -> None:
    """Routes are recorded by hooks on it; whether the settings admit router replay is checked before."""
    gpu = torch.device("cuda", 0)
    spec = replace(SPEC, config=RolloutConfig(), process=Process(0, 1, 0, 1, gpu), records_routes=True)
    assert list_engine_environment(spec)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert list_engine_arguments(spec)["async_scheduling"] is True
    said = "eager, async scheduling on, model runner v1, which router replay needs"
    assert describe_engine(spec.config, gpu, records_routes=True) == said
    truncated = replace(spec, config=RolloutConfig(top_p=0.9))
    assert list_engine_arguments(truncated)["async_scheduling"] is False


def test_drafts_have_the_first_model_runner() -> None:
    """The second one draws them with numbers of its own."""
    gpu = torch.device("cuda", 0)
    spec = replace(SPEC, config=RolloutConfig(draft_tokens=2), process=Process(0, 1, 0, 1, gpu))
    assert list_engine_environment(spec)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    said = "eager, async scheduling off, model runner v1, which rollout.draft_tokens needs"
    assert describe_engine(spec.config, gpu, records_routes=False) == said
    assert cpu_cache_bytes(spec) == cpu_cache_bytes(replace(spec, config=RolloutConfig())) * 5 / 4  # layers


def test_names_of_arguments_and_environment(vllm_imported: None) -> None:
    """Includes the GPU's, which no test gives to vLLM."""
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for device in ("cuda", "cpu"):
        for length in (24, 5000):
            config = RolloutConfig(kv_cache_gib=1.0)
            spec = replace(
                SPEC, config=config, max_response_length=length, process=Process(0, 1, 0, 1, torch.device(device))
            )
            assert set(list_engine_arguments(spec)) <= known
            assert set(list_engine_environment(spec)) <= set(envs.environment_variables)
    assert list_engine_arguments(spec)["max_num_batched_tokens"] == 5040, "the longest sequence is computed whole"


def test_seeds_are_those_that_vllm_takes(vllm_imported: None) -> None:
    """Of a run with a seed of 63 bits, too: vLLM hands its own to NumPy. Small ones are unchanged."""
    from vllm.utils.torch_utils import set_random_seed

    state = np.random.get_state(), random.getstate(), torch.get_rng_state()
    for seed, rank, expected in ((7, 0, 7), (7, 3, 10), ((1 << 32) - 1, 1, 0), ((1 << 63) - 1, 0, (1 << 32) - 1)):
        spec = replace(SPEC, seed=seed, process=Process(rank, 4, rank, 4, torch.device("cpu")))
        found = list_engine_arguments(spec)["seed"]
        assert found == expected
        set_random_seed(found)
    np.random.set_state(state[0])
    random.setstate(state[1])
    torch.set_rng_state(state[2])


def test_options_reach_vllm(vllm_imported: None) -> None:
    """They override our own arguments; a refused option is an argument of this vLLM, an unknown one is named."""
    from vllm.engine.arg_utils import EngineArgs

    known = list_arguments(Path(importlib.import_module("vllm").__file__).parent)
    assert known == {item.name for item in fields(EngineArgs)}, "the source says what the class has"
    assert REFUSED.keys() <= known, REFUSED.keys() - known
    options = {"kv_cache_dtype": "auto", "max_num_batched_tokens": 9000}
    spec = replace(SPEC, config=RolloutConfig(engine_options=options))
    check_installed(SHAPE, spec.config)
    assert list_engine_arguments(spec) | options == list_engine_arguments(spec)
    assert set(list_engine_arguments(SPEC)) - {"max_num_batched_tokens", "block_size", "enable_chunked_prefill"} <= (
        REFUSED.keys() | {"disable_log_stats", "async_scheduling"}
    ), "what this program needs is not the user's to set"
    with pytest.raises(UserError, match="did you mean 'kv_cache_dtype'"):
        check_installed(SHAPE, RolloutConfig(engine_options={"kv_cache_dtyp": 1}))
    check_cpu_limits(SHAPE, RolloutConfig(engine_options={"enable_chunked_prefill": False}))
    with pytest.raises(UserError) as caught:
        check_cpu_limits(SHAPE, RolloutConfig(engine_options={"enable_chunked_prefill": True}))
    assert "cannot turn back the random numbers" in caught.value.expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "vlm"}, 'rollout.engine = "vlm" is not known'),
        ({"tensor_model_parallel_size": 3}, "rollout.tensor_model_parallel_size 3"),
    ],
)
def test_engine_that_cannot_be_built(change: dict[str, object], message: str) -> None:
    """The name and the layout are checked before anything is imported."""
    with pytest.raises(UserError, match=message):
        build_engine(replace(SPEC, config=replace(SPEC.config, **change)))
    assert set(ENGINES) == {"vllm", "hf", "megatron", "vllm_server", "openai", "sglang"}
