# SPDX-License-Identifier: Apache-2.0
"""Weights from Megatron into the engine: its outputs then equal transformers on the same weights.

Real megatron-core, real vLLM, real transformers, gloo. Not covered here: bytes and load of the plan
(tests/transfer), GPU sleep and wake.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from role_setups import take_step
from safetensors.torch import load_file
from sample_rollouts import gather_rollouts
from tiny_adapters import adapted, save_adapted

import megatron_rl.parallel  # noqa: F401 (before megatron.core)
from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    HybridConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megatron_rl.config.sections import LoraConfig
from megatron_rl.engines.protocol import EngineSpec, SamplingConfig
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.observability.progress import PhaseTimers, RolloutProgress
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rollout.episodes import SampleGroups
from megatron_rl.run import building
from megatron_rl.run.building import build_role, build_rollout
from megatron_rl.run.checkpoints import actor_export
from megatron_rl.run.models import RoleInputs, resolve
from megatron_rl.samples.batch import Padding, build_train_batch
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.transfer.computed import ScaledParam
from megatron_rl.transfer.executor import CertificateError, Resharder
from megatron_rl.transfer.hybrid_engine import HybridEngine
from megatron_rl.types import Prompt, Rollout
from megatron_rl.weights.adapters import make_adapter_shape
from megatron_rl.weights.family import FAMILIES
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.rollout_layout import huggingface_placements
from megatron_rl.weights.shard_box import box_slices
from tiny_models import ENGINE_SIZES, engine_sizes, save_tiny_model

ENGINE_AXES = ("tensor_model_parallel_size", "expert_parallel_size", "data_parallel_size")
Engine = int | tuple[int, ...]  # TP size of an engine, or its sizes along the axes
GREEDY = SamplingConfig(temperature=0.0, max_tokens=12, stop_token_ids=(2,))
SAMPLED = SamplingConfig(temperature=1.0, max_tokens=12, stop_token_ids=(2,))


def make_prompts() -> list[Prompt]:
    """Five prompts; two share a prefix longer than a cache block of 32, so that the prefix cache is used."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(3, 517, 70)
    tokens = [rng.integers(3, 517, n) for n in (3, 17, 40)] + [np.append(prefix, 5), np.append(prefix, 9)]
    return [Prompt(i, t.astype(np.int32), "", "") for i, t in enumerate(tokens)]


def make_config(
    path: Path, layout: dict[str, Any], rollout: Engine, engine: str, hybrid: dict[str, Any], lora: LoraConfig
) -> RunConfig:
    tp, sizes = layout.get("tp_size", 1), dict(zip(ENGINE_AXES, rollout if isinstance(rollout, tuple) else (rollout,)))
    return RunConfig(
        model=ModelConfig(path=str(path), dtype="float32"),
        data=DataConfig(train_files=[], train_batch_size=5, max_prompt_length=80, max_response_length=12),
        actor=ActorConfig(
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            lr=1e-2,
            lora=lora,
            pipeline_model_parallel_size=layout.get("pp_size", 1),
            virtual_pipeline_model_parallel_size=layout.get("vpp_size"),
            num_layers_in_last_pipeline_stage=layout.get("chunk_layers", (None,))[-1],
            context_parallel_size=layout.get("cp_size", 1),
            expert_model_parallel_size=layout.get("ep_size", 1),
            expert_tensor_parallel_size=layout.get("etp_size"),
            zero_stage=layout.get("zero_stage", 1),
        ),
        rollout=RolloutConfig(engine=engine, **sizes, max_num_seqs=16, n=2),
        hybrid=HybridConfig(**{"verify": "full", **hybrid}),
        trainer=TrainerConfig(seed=3),
    )


def reference_tokens(directory: Path) -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time; of adapters by PEFT."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    results = []
    for prompt in make_prompts():
        ids = torch.from_numpy(prompt.tokens.astype(np.int64))[None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        results.append(out[0, ids.shape[1] :].tolist())
    return results


def count_equal_elements(path: Path, hybrid: HybridEngine) -> tuple[int, int]:
    """Elements of this rank's engine that are bitwise the checkpoint's, and elements that are placed."""
    engine, equal, placed = hybrid.engine, 0, 0
    full = {name: torch.zeros(size) for name, size in load_model_shape(path).logical_tensors().items()}
    load_huggingface(path, huggingface_placements(load_model_shape(path)), full)
    for p in engine.placements(dist.get_rank()):
        found = engine.params[p.param][box_slices(p.local_box)]
        equal += int((found.view(torch.int32) == full[p.hf_name][box_slices(p.hf_box)].view(torch.int32)).sum())
        placed += found.numel()
    return equal, placed


def list_absorbed(engine: Any) -> list[bool]:
    """Whether each product that vLLM keeps of latent attention is that of the matrix of now."""
    equal = []
    for module in engine._absorbing:
        heads = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank)
        keys, values = heads.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        equal += [torch.equal(module.W_UK_T, keys), torch.equal(module.W_UV, values.transpose(1, 2))]
    return equal


def load_again(engine: Any, directory: Path) -> list[str]:
    """Let vLLM's own loader read a checkpoint; return the names of the parameters that it changed, if only by a bit."""
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    before = {name: param.detach().clone() for name, param in worker.get_model().named_parameters()}
    for param in worker.get_model().parameters():
        if isinstance(loader := getattr(param, "weight_loader", None), partial):  # vLLM asks them for a name
            vars(loader)["__name__"] = loader.func.__name__
    tensors = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    worker.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
    return [name for name, param in worker.get_model().named_parameters() if not torch.equal(param, before.pop(name))]


def build(config: RunConfig, layout: ParallelLayout) -> tuple[Any, ParallelLayout, Any, Any, HybridEngine, Any]:
    """The process, its layout and groups, the actor, and its engine."""
    process, groups = init_distributed(2), build_groups(layout)
    inputs = RoleInputs(resolve(config).roles["actor"], load_model_shape(Path(config.model.path)), layout)
    actor = build_role(config, inputs, groups, total_optimizer_steps=4)
    return process, layout, groups, actor, *build_rollout(config, actor, process, PhaseTimers(), RolloutProgress())


def work(
    rank: int,
    world_size: int,
    path: Path,
    layout_sizes: dict[str, int],
    rollout_tp: Engine,
    engine: str,
    hybrid_options: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
) -> dict[str, Any]:
    """Reshard, generate, take an optimizer step, reshard, generate again, and load what was saved.

    Args:
        hybrid_options: of the section, and "is_apart": the engine shares no storage of the actor's.
    """
    hybrid_options = dict(hybrid_options or {})
    if hybrid_options.pop("is_apart", False):
        building.find_shared = lambda *_: {}
    if engine == "vllm":  # its loader then packs experts again
        import_module("megatron_rl.engines.vllm.vllm_worker")
    config = make_config(path, layout_sizes, rollout_tp, engine, hybrid_options, lora or LoraConfig())
    sizes = {name: size for name, size in layout_sizes.items() if name != "zero_stage"}
    process, layout, groups, actor, hybrid, generator = build(config, ParallelLayout(world_size, **sizes))
    prompts, result = make_prompts(), {"transport": hybrid.transport, "stats": hybrid.reshard_stats}

    def generate(sampling: SamplingConfig, group_size: int = 1) -> list[Rollout]:
        with hybrid.rollout_mode():
            return gather_rollouts(generator.generate(SampleGroups(prompts, group_size, sampling, step=1)))

    hybrid.reshard()
    result["bit_equal"] = count_equal_elements(path, hybrid)
    rng_before = torch.get_rng_state()
    result["before"] = [r.response_tokens.tolist() for r in generate(GREEDY)]
    sampled = generate(SAMPLED, group_size=2)
    result["rng_untouched"] = torch.equal(rng_before, torch.get_rng_state())
    result["sampled"] = [r.response_tokens.tolist() for r in sampled]

    sequences = [branch for r in sampled for branch in r.branches]
    plan = plan_microbatches(
        [len(s.tokens) for s in sequences],
        dp_size=layout.dp_size,
        max_tokens=200,
        count_multiple=actor.model.microbatch_count_multiple,
    )
    batch = build_train_batch(
        sequences,
        np.full(10, 0.01),
        [(range(10), plan)],
        dp_rank=groups.at.dp,
        padding=Padding(actor.model.pad_multiple),
        device=process.device,
    )
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    result["gap"] = float((batch.old_logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().max())
    batch = replace(batch, advantages=torch.where(batch.sequence_ids % 2 == 0, 1.0, -1.0))
    result["deviation"] = take_step(actor, batch, AlgorithmConfig())["policy/ratio_max_deviation"]

    actor_export(config, actor.model)(path.parent / "updated")
    rollouts_after = generate(GREEDY)
    result["after"] = [r.response_tokens.tolist() for r in rollouts_after]
    result["versions"] = {r.policy_version for r in rollouts_after}
    result["absorbed"] = list_absorbed(hybrid.engine) if engine == "vllm" else []
    is_plain = engine == "vllm" and lora is None
    result["changed"] = load_again(hybrid.engine, path.parent / "updated") if is_plain else []
    result["verified"] = hybrid.verified_tensors
    generator.close()
    ones = torch.ones(1)
    dist.all_reduce(ones)  # the job's process groups outlive the engine
    result["ranks_alive"] = int(ones)
    return result


MOE_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.experts is not None)
# Each family in one layout of two ranks, which its own matrices and layers are cut by; all axes at once in a few.
CASES = [
    ("vllm", "qwen2", 1, {}, 1),
    pytest.param(*("vllm", "qwen2", 4, {"tp_size": 2, "pp_size": 2}, 1), marks=pytest.mark.slow),
    pytest.param(*("vllm", "qwen3", 4, {"tp_size": 2}, 2), marks=pytest.mark.slow),
    ("vllm", "llama", 2, {"pp_size": 2}, 2),
    ("vllm", "qwen2", 4, {"pp_size": 2}, 4),  # more engine ranks than KV heads: replicated
    ("hf", "qwen2", 2, {"tp_size": 2}, 1),
    ("vllm", "mistral", 2, {"tp_size": 2}, 1),
    ("vllm", "gemma", 2, {"tp_size": 2}, 2),
    ("vllm", "qwen3_moe", 2, {"ep_size": 2}, 1),
    pytest.param(*("vllm", "qwen3_moe", 2, {"ep_size": 2}, 2), marks=pytest.mark.slow),
    ("vllm", "mixtral", 2, {"ep_size": 2}, 2),
    ("vllm", "glm4_moe", 2, {"tp_size": 2, "ep_size": 2, "etp_size": 1}, 2),
    pytest.param(*("hf", "qwen3_moe", 2, {"ep_size": 2}, 1), marks=pytest.mark.slow),
    ("vllm", "phi3", 2, {"tp_size": 2}, 1),
    ("vllm", "gemma3_text", 2, {"pp_size": 2}, 2),
    ("hf", "smollm3", 2, {"tp_size": 2}, 1),
    ("vllm", "gpt_oss", 2, {"tp_size": 2, "ep_size": 2, "etp_size": 1}, 2),
    ("hf", "gpt_oss", 2, {"ep_size": 2}, 1),
    pytest.param(*("megatron", "gpt_oss", 2, {"tp_size": 2}, 1), marks=pytest.mark.slow),
    ("hf", "olmo2", 2, {"tp_size": 2}, 1),
    ("hf", "qwen3_next", 2, {"tp_size": 2}, 1),
    ("hf", "qwen3_5_text", 2, {"pp_size": 2}, 1),
    ("hf", "qwen3_5_moe_text", 2, {"ep_size": 2}, 1),
    ("vllm", "glm4", 2, {"tp_size": 2}, 1),
    pytest.param(*("vllm", "glm4_moe", 4, {"tp_size": 2, "pp_size": 2}, 1), marks=pytest.mark.slow),
    pytest.param(*("vllm", "deepseek_v3", 4, {"tp_size": 2, "ep_size": 2}, 2), marks=pytest.mark.slow),
    pytest.param(*("megatron", "deepseek_v3", 4, {"tp_size": 2, "pp_size": 2}, 1), marks=pytest.mark.slow),
    ("vllm", "qwen2", 3, {"zero_stage": 3}, 1),
    pytest.param(*("vllm", "qwen3", 4, {"tp_size": 2, "zero_stage": 3}, 2), marks=pytest.mark.slow),
    ("vllm", "qwen3_moe", 4, {"ep_size": 2, "zero_stage": 3}, 1),
    pytest.param(*("vllm", "glm4_moe", 4, {"ep_size": 2, "zero_stage": 3}, 1), marks=pytest.mark.slow),
    pytest.param(*("vllm", "deepseek_v3", 2, {"zero_stage": 3}, 1), marks=pytest.mark.slow),
    pytest.param(*("megatron", "qwen2", 4, {"tp_size": 2, "pp_size": 2}, 1), marks=pytest.mark.slow),
    pytest.param(*("megatron", "llama", 4, {"tp_size": 2, "cp_size": 2}, 2), marks=pytest.mark.slow),
    ("megatron", "gemma", 2, {"pp_size": 2, "vpp_size": 2}, 1),
    ("megatron", "qwen3_moe", 2, {"ep_size": 2}, 1),
    ("vllm", "deepseek_v3", 2, {"ep_size": 2}, 2),
    pytest.param(*("vllm", "qwen2", 4, {"shard_size": 2, "zero_stage": 3}, 2), marks=pytest.mark.slow),
    pytest.param(*("vllm", "qwen3", 2, {"pp_size": 2, "chunk_layers": (3, 1)}, 2), marks=pytest.mark.slow),
    pytest.param(*("megatron", "qwen2", 2, {"pp_size": 2, "chunk_layers": (1, 3)}, 1), marks=pytest.mark.slow),
    pytest.param(*("vllm", "glm4_moe_lite", 2, {"pp_size": 2}, 2), marks=pytest.mark.slow),
    pytest.param(*("vllm", "minimax_m2", 4, {"tp_size": 2, "ep_size": 2, "etp_size": 1}, 4), marks=pytest.mark.slow),
    ("vllm", "qwen3_moe", 2, {"ep_size": 2}, (2, 2)),
    ("vllm", "gpt_oss", 2, {"pp_size": 2}, (2, 2)),
    ("vllm", "deepseek_v3", 2, {"tp_size": 2}, (2, 2)),
    ("vllm", "glm4_moe", 2, {"ep_size": 2}, (2, 2)),
    ("vllm", "mixtral", 2, {"tp_size": 2, "ep_size": 2, "etp_size": 1}, (2, 2)),
    ("vllm", "qwen3_moe", 2, {"ep_size": 2}, (1, 2, 2)),
    ("vllm", "gpt_oss", 2, {"tp_size": 2}, (1, 2, 2)),
    pytest.param(
        *("vllm", "deepseek_v3", 4, {"tp_size": 2, "ep_size": 4, "etp_size": 1}, (2, 4, 2)), marks=pytest.mark.slow
    ),
    pytest.param(*("vllm", "glm4_moe", 4, {"pp_size": 2, "ep_size": 2}, (2, 4, 2)), marks=pytest.mark.slow),
    pytest.param(*("vllm", "qwen3_moe", 4, {"pp_size": 2, "ep_size": 2}, (1, 2, 2)), marks=pytest.mark.slow),
    pytest.param(*("vllm", "qwen3_moe", 4, {"tp_size": 2, "ep_size": 2}, (2, 4, 2)), marks=pytest.mark.slow),
    pytest.param(*("vllm", "minimax_m2", 2, {"ep_size": 2}, (1, 2, 2)), marks=pytest.mark.slow),
    pytest.param(*("vllm", "glm4_moe_lite", 4, {"pp_size": 2, "ep_size": 2}, (2, 4, 2)), marks=pytest.mark.slow),
    ("vllm", "gemma4_text", 2, {"pp_size": 2}, 2),
    ("vllm", "gemma4_text", 2, {"tp_size": 2}, 1),
    ("hf", "gemma4_text", 2, {"tp_size": 2}, 1),
    pytest.param(*("vllm", "gemma4_text", 4, {"tp_size": 2, "zero_stage": 3}, 4), marks=pytest.mark.slow),
    pytest.param(*("megatron", "gemma4_text", 4, {"tp_size": 2, "pp_size": 2}, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("engine", "family", "world", "layout", "rollout_tp"), CASES)
def test_engine_speaks_for_the_actor(
    tmp_path: Path,
    vllm_imported: None,
    engine: str,
    family: str,
    world: int,
    layout: dict[str, int],
    rollout_tp: Engine,
) -> None:
    """Greedy tokens equal transformers' before and after an optimizer step (a stale cache or bucket shows)."""
    save_tiny_model(tmp_path / "model", family, **engine_sizes(family))
    results = run_ranks(work, world, tmp_path / "model", layout, rollout_tp, engine, timeout=150)
    before, after = reference_tokens(tmp_path / "model"), reference_tokens(tmp_path / "updated")
    assert before != after, "the optimizer step must change what is generated, or this test shows nothing"
    for result in results:
        assert result["before"] == before
        assert result["after"] == after
        assert result["sampled"] == results[0]["sampled"], "every rank knows the same rollouts"
        if family not in MOE_FAMILIES:  # vLLM repacks experts on CPU after the certificate has looked at them
            assert result["bit_equal"][0] == result["bit_equal"][1] > 0
        assert result["rng_untouched"], "the trainer's random numbers are its own"
        assert result["gap"] < 1e-4  # fp32, 4 layers; the acceptance bound of the project is 1e-3
        if engine == "megatron":  # the policy itself
            stats = result["stats"]
            assert result["gap"] < 1e-5 and stats.bytes_moved == stats.bytes_copied == 0 < stats.bytes_aliased
        assert result["deviation"] == 0.0, "on policy: the first ratio is exactly 1"
        assert result["versions"] == {1}
        assert result["ranks_alive"] == world
        assert result["changed"] == [], "vLLM's own loader finds the same bits in the checkpoint"
    pairs = zip(results[0]["sampled"][::2], results[0]["sampled"][1::2], strict=True)
    assert any(a != b for a, b in pairs), "two samples of a prompt have different seeds"


@pytest.mark.parametrize(
    ("world", "layout", "rollout_tp"),
    [
        (1, {}, 1),
        pytest.param(*(2, {"pp_size": 2, "chunk_layers": (1, 3)}, 2), marks=pytest.mark.slow),
        pytest.param(*(4, {"tp_size": 2, "ep_size": 2}, 2), marks=pytest.mark.slow),
    ],
)
def test_an_engine_with_a_latent_cache_speaks_for_the_actor(
    tmp_path: Path, vllm_imported: None, world: int, layout: dict[str, Any], rollout_tp: Engine
) -> None:
    """Latents of the published size, which vLLM's kernel on a CPU takes: decoding reads products of the new weights."""
    sizes = dict(kv_lora_rank=512, qk_rope_head_dim=64, head_dim=64, qk_nope_head_dim=32, v_head_dim=32)
    save_tiny_model(tmp_path / "model", "deepseek_v3", **engine_sizes("deepseek_v3") | sizes)
    results = run_ranks(work, world, tmp_path / "model", layout, rollout_tp, "vllm", timeout=150)
    before, after = reference_tokens(tmp_path / "model"), reference_tokens(tmp_path / "updated")
    assert before != after, "the optimizer step must change what is generated, or this test shows nothing"
    for result in results:
        assert (result["before"], result["after"]) == (before, after)
        assert result["absorbed"] == [True] * 2 * 4
        assert result["gap"] < 1e-4 and result["deviation"] == 0.0


@pytest.mark.parametrize(
    ("engine", "family", "world", "layout", "rollout_tp", "mode"),
    [
        pytest.param(*("vllm", "qwen2", 4, {"tp_size": 2, "pp_size": 2}, 1, "merge"), marks=pytest.mark.slow),
        ("vllm", "qwen3", 2, {"tp_size": 2}, 2, "merge"),
        ("vllm", "qwen3_moe", 2, {"ep_size": 2}, 1, "merge"),
        ("hf", "qwen2", 2, {"pp_size": 2, "vpp_size": 2}, 1, "merge"),
        ("megatron", "qwen2", 4, {"tp_size": 2, "cp_size": 2}, 2, "merge"),
        ("vllm", "qwen2", 2, {"pp_size": 2}, 1, "adapter"),
        ("vllm", "qwen3", 2, {"tp_size": 2}, 2, "adapter"),
        pytest.param(*("vllm", "qwen2", 4, {"pp_size": 2}, 4, "adapter"), marks=pytest.mark.slow),
    ],
)
def test_engine_speaks_for_an_actor_with_adapters(
    tmp_path: Path,
    vllm_imported: None,
    engine: str,
    family: str,
    world: int,
    layout: dict[str, int],
    rollout_tp: Engine,
    mode: str,
) -> None:
    """The same, and PEFT on transformers speaks so too, with the adapters that were saved."""
    save_tiny_model(tmp_path / "model", family, **ENGINE_SIZES)
    lora = LoraConfig(rank=4, alpha=64.0)
    options = {"lora": mode}
    results = run_ranks(work, world, tmp_path / "model", layout, rollout_tp, engine, options, lora, timeout=150)
    before, after = reference_tokens(tmp_path / "model"), reference_tokens(tmp_path / "updated")
    assert before != after, "the optimizer step must change what is generated, or this test shows nothing"
    for result in results:
        assert (result["before"], result["after"]) == (before, after)
        assert result["gap"] < (1e-5 if engine == "megatron" else 1e-4) and result["deviation"] == 0.0
        if rollout_tp == 1 and engine != "megatron":
            shape = make_adapter_shape(load_model_shape(tmp_path / "model"), lora, "actor")
            adapters, tensors = shape.logical_tensors(), shape.base.logical_tensors()
            if mode == "merge":  # the matrices with them, no more
                matrices = {name.replace("lora_A.", "") for name in adapters if "lora_A" in name}
                adapters = {name: size for name, size in tensors.items() if name in matrices}
            held = 4 * sum(int(np.prod(size)) for size in adapters.values())
            stats = result["stats"]
            assert stats.bytes_moved + stats.bytes_copied == world * held, "each engine gets the adapters, no more"
        if family != "qwen3_moe" and engine != "megatron":  # B is zero: the merged model is the model itself
            assert result["bit_equal"][0] == result["bit_equal"][1] > 0


SABOTAGES = ["stale adapters", "adapters of another layer", "A and B exchanged", "an unbound matrix", "another scale"]


def sabotage_resharder(patch: pytest.MonkeyPatch, what: str) -> None:
    """Let the adapters of this rank arrive wrong."""
    real_run = Resharder.run

    def run(self: Resharder) -> object:
        right: tuple[Any, Any, Any] = self._computed, self._targets, self._origins
        pieces: list[Any] = [*self._computed]
        self._computed = pieces
        for index, (target, origin, place) in enumerate(right[0]):
            wrong, content = origin, "weight" if isinstance(origin, ScaledParam) else "parts"
            if what == "another scale":
                wrong = replace(origin, scale=origin.scale / 2)
            elif what == "A and B exchanged" and content == "weight":
                others = (x.T for x in self._origins if x.T.shape == origin.weight.shape)
                wrong = replace(origin, weight=next(others, origin.weight))
            elif what == "A and B exchanged" and len({*origin.weight.shape}) == 1:
                wrong = replace(origin, parts=[(rows, b.T, a.T) for rows, a, b in origin.parts])
            elif what == "adapters of another layer":
                alike = [o for _, o, _ in right[0] if o.weight.shape == origin.weight.shape]
                other = next(o for o in alike if o.weight.data_ptr() != origin.weight.data_ptr())
                wrong = replace(origin, **{content: getattr(other, content)})
            pieces[index] = target, wrong, place
        if what == "an unbound matrix" and pieces:
            del pieces[2]
        if what == "stale adapters":
            self._computed, self._targets, self._origins = [], [], []
        try:
            return real_run(self)
        finally:
            self._computed, self._targets, self._origins = right

    patch.setattr(Resharder, "run", run)


def reshard_wrongly(rank: int, world_size: int, path: Path, mode: str, lora: LoraConfig) -> dict[str, str]:
    """Return the findings of each sabotage, after which an unsabotaged reshard is right again."""
    _, _, _, actor, hybrid, generator = build(
        make_config(path, {}, 1, "vllm", {"lora": mode}, lora), ParallelLayout(world_size)
    )
    hybrid.reshard()
    found = {}
    for what in SABOTAGES:
        for param in actor.model.stages.parameters():
            if param.requires_grad:
                param.data.add_(0.1 * torch.randn(param.shape))
        with pytest.MonkeyPatch.context() as patch:
            sabotage_resharder(patch, what)
            with pytest.raises(CertificateError) as caught:
                hybrid.reshard()
        found[what] = str(caught.value)
        hybrid.reshard()
    generator.close()
    return found


@pytest.mark.parametrize("mode", ["merge", "adapter"])
def test_adapters_that_the_engine_does_not_have_stop_the_run(tmp_path: Path, vllm_imported: None, mode: str) -> None:
    """The certificate names the matrix; it compares the weights that the engine computes with."""
    save_adapted(tmp_path, "qwen2", **ENGINE_SIZES)
    (messages,) = run_ranks(reshard_wrongly, 1, tmp_path / "model", mode, adapted(tmp_path), timeout=150)
    tensor = "_proj.weight" if mode == "merge" else "_proj.lora_B.weight"
    assert [*messages] == SABOTAGES
    for found in messages.values():
        assert "weights differ" in found and (f"{tensor}: training" in found or "lora_A.weight: training" in found)


OPTIONS: list[tuple[dict[str, Any], dict[str, int], int, str]] = [
    (
        {"transport": "buckets", "bucket_bytes": 1 << 16, "is_apart": True},
        {"tp_size": 2, "pp_size": 2},
        1,
        "buckets",
    ),
    ({"transport": "buckets"}, {"tp_size": 2, "pp_size": 2}, 2, "buckets"),
    ({"transport": "pull", "is_apart": True}, {"pp_size": 2}, 1, "pull"),
    ({"transport": "auto"}, {"tp_size": 2}, 2, "pull"),
]


@pytest.mark.parametrize(
    ("options", "layout", "rollout_tp", "transport"),
    [pytest.param(*row, marks=[pytest.mark.slow] * ("bucket_bytes" in row[0])) for row in OPTIONS],
)
def test_every_road_of_the_weights(
    tmp_path: Path,
    vllm_imported: None,
    options: dict[str, Any],
    layout: dict[str, int],
    rollout_tp: Engine,
    transport: str,
) -> None:
    """Buckets, pull and aliasing bring the same weights; every tensor is certified; bytes add up.

    With equal TP and no pipeline everything is aliased: in-place updates of the optimizer reach the
    engine although nothing moves.
    """
    save_tiny_model(tmp_path / "model", "qwen2", **ENGINE_SIZES)
    results = run_ranks(work, 4, tmp_path / "model", layout, rollout_tp, "vllm", options, timeout=150)
    before, after = reference_tokens(tmp_path / "model"), reference_tokens(tmp_path / "updated")
    shape = load_model_shape(tmp_path / "model")
    model_bytes = 4 * sum(int(np.prod(size)) for size in shape.logical_tensors().values())
    for result in results:
        assert (result["before"], result["after"], result["transport"]) == (before, after, transport)
        assert result["verified"] == len(shape.logical_tensors())
        stats = result["stats"]
        if layout == {"tp_size": 2}:
            assert stats.bytes_moved == stats.bytes_copied == 0 and stats.bytes_aliased > 0.99 * 2 * model_bytes
        else:
            assert stats.bytes_moved > 0
            assert (stats.bytes_aliased > 0) == ("is_apart" not in options)
        if transport == "buckets":
            assert stats.bytes_pulled == 0


def test_wrong_weights_stop_the_run(tmp_path: Path, vllm_imported: None) -> None:
    """A resharder that skips one piece is caught by the certificate on every rank, before a token is sampled."""
    save_tiny_model(tmp_path / "model", "qwen2", **ENGINE_SIZES)

    def work_with_stale_piece(rank: int, world_size: int) -> str:
        real_run = Resharder.run

        def run(self: Resharder) -> object:
            if rank == 1:
                del self._targets[5], self._origins[5]
            return real_run(self)

        Resharder.run = run
        try:
            work(rank, world_size, tmp_path / "model", {"tp_size": 2}, 1, "vllm", {"is_apart": True})
        except CertificateError as error:
            return str(error)
        return "not noticed"

    first, second = run_ranks(work_with_stale_piece, 2, timeout=150)
    assert first == second and "weights differ" in first and "rank 1" in first


def test_a_wrong_second_copy_of_keys_stops_the_run(tmp_path: Path, vllm_imported: None) -> None:
    """Gemma 4's keys that give the values, too, are in vLLM's parameter twice; its last rows are the second copy."""
    save_tiny_model(tmp_path / "model", "gemma4_text", **engine_sizes("gemma4_text"))

    def work_with_wrong_copy(rank: int, world_size: int) -> str:
        real_init, real_run, engines = VllmEngine.__init__, Resharder.run, list[VllmEngine]()

        def init(self: VllmEngine, spec: EngineSpec) -> None:
            real_init(self, spec)
            engines.append(self)

        def run(self: Resharder) -> object:
            result = real_run(self)
            if rank == 1:
                engines[0].params["model.layers.1.self_attn.qkv_proj.weight"][-1, 3] += 1
            return result

        VllmEngine.__init__, Resharder.run = init, run
        try:
            work(rank, world_size, tmp_path / "model", {"tp_size": 2}, 2, "vllm", {"is_apart": True})
        except CertificateError as error:
            return str(error)
        return "not noticed"

    first, second = run_ranks(work_with_wrong_copy, 2, timeout=150)
    assert first == second and "layers.1.self_attn.k_proj.weight" in first and "rank 1" in first
