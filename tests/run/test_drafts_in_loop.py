# SPDX-License-Identifier: Apache-2.0
"""Runs whose engines draft with the trained layer for multi-token prediction (`rollout.draft_tokens`).

Samples and drafts of one engine are in tests/engines/test_vllm_drafts.py. Not covered: GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_models import save_model_with_mtp

import megatron_rl
from distributed import run_ranks
from golden_runs import observe
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.engines.vllm.vllm_library import prepare_vllm, register_model
from megatron_rl.engines.vllm.vllm_settings import list_engine_arguments, list_engine_environment
from megatron_rl.parallel.collectives import Process
from megatron_rl.weights.model_config import load_model_shape
from rl_runs import layout_overrides, load_nested, overrides_for, read_records, train
from tiny_models import engine_sizes

SETTINGS = ["data.validation_files=[]", "trainer.save_freq=null", "actor.share_prompts=false"]
DRAFTS, MTP = ["rollout.draft_tokens=2"], ["actor.mtp_lr=1e-2"]


@pytest.fixture(scope="module")
def models(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models for the task, with the layer."""
    found = {}
    for family in ("glm4_moe", "deepseek_v3"):
        found[family] = path = tmp_path_factory.mktemp(family) / "model"
        vocab_size = json.loads((task / "model/config.json").read_text())["vocab_size"]
        save_model_with_mtp(path, family, **engine_sizes(family) | dict(vocab_size=vocab_size))
        shutil.copy(task / "tokenizer.model", path)
    return found


def run(task: Path, model: Path, run_dir: Path, *extra: str, ranks: int = 1) -> list[dict[str, Any]]:
    """Train, and return the records."""
    overrides = overrides_for(task, run_dir, *SETTINGS, "trainer.total_steps=3", *extra, f"model.path={model}")
    assert run_ranks(train, ranks, overrides, timeout=170) == [None] * ranks
    return read_records(run_dir)


def read_engine(llm: Any) -> dict[str, torch.Tensor]:
    """All parameters of vLLM's policy and of its layer that drafts, as they are."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    models = torch.nn.ModuleList([worker.get_model(), worker.model_runner.drafter.model])
    return {name: param.detach().clone() for name, param in models.named_parameters()}


def learn_and_export(rank: int, world_size: int, overrides: list[str], model: Path, out: Path) -> Any:
    """The engine's parameters after two updates of policy and layer, whose weights are also exported."""
    os.environ["WORLD_SIZE"] = str(world_size)
    run = megatron_rl.load(model, load_nested(overrides))
    policy = run.policy
    for step in (1, 2):
        with policy.rollout_mode():
            samples = policy.sample(step)
        samples.old_logprobs = policy.logprobs(samples)
        samples.advantages = policy.expand(samples, samples.rewards - samples.rewards.mean())
        for minibatch in policy.minibatches(samples):
            policy.forward_backward(minibatch, run.config.algorithm)
            policy.optim_step()
    policy.export(out)
    with policy.rollout_mode():
        engine: Any = policy.hybrid.engine
        found = read_engine(engine._llm) if isinstance(engine, VllmEngine) else None
    policy.close()
    return found


def load_as_published(rank: int, world_size: int, model: Path) -> dict[str, torch.Tensor]:
    """The parameters of vLLM with the loader of its own."""
    spec = EngineSpec(
        model_path=str(model),
        shape=load_model_shape(model),
        dtype="float32",
        max_prompt_length=8,
        max_response_length=8,
        config=RolloutConfig(draft_tokens=2, max_num_seqs=32, tensor_model_parallel_size=world_size),
        process=Process(rank, world_size, rank, world_size, torch.device("cpu")),
        seed=0,
    )
    vllm = prepare_vllm(torch.device("cpu"))
    register_model(vllm, spec)
    os.environ |= list_engine_environment(spec)
    return read_engine(vllm.LLM(**list_engine_arguments(spec) | {"load_format": "auto"}))


@pytest.mark.parametrize(
    ("family", "tp_size", "extra"),
    [
        ("glm4_moe", 1, []),
        pytest.param("deepseek_v3", 2, layout_overrides(1, 2, 1), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 1, ["placement.actor=0-0", "placement.rollout=1-1"], marks=pytest.mark.slow),
        pytest.param("glm4_moe", 2, layout_overrides(2, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_the_engine_has_what_vllm_loads_of_the_export(
    family: str, tp_size: int, extra: list[str], task: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    """Policy and layer, bit for bit, after updates of both; experts in the order of their kernel."""
    ranks = 2 if extra else 1
    extra = [*extra, *MTP, *DRAFTS, f"rollout.tensor_model_parallel_size={tp_size}", "algorithm.kl_coef=0"]
    overrides = overrides_for(task, tmp_path / "run", *SETTINGS, *extra)
    learned = run_ranks(learn_and_export, ranks, overrides, models[family], tmp_path / "model", timeout=170)
    published = run_ranks(load_as_published, tp_size, tmp_path / "model")
    found = [params for params in learned if params is not None]
    assert len(found) == tp_size
    for mine, theirs in zip(found, published, strict=True):
        assert mine.keys() == theirs.keys() and len([name for name in mine if name.startswith("1.")]) > 12
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    (first,) = run_ranks(load_as_published, 1, models[family]) if tp_size == 1 else ({},)
    for name, param in first.items():
        assert not torch.equal(param, found[0][name]) or "bias" in name, f"{name} was not trained"


def read_drafts(records: list[dict[str, Any]]) -> list[float]:
    return [record["rollout/draft_acceptance"] for record in records]


def test_a_run_with_drafts_samples_its_policy(task: Path, models: dict[str, Path], tmp_path: Path) -> None:
    """Log-probs of engine and trainer agree; a run is the same bit for bit when it is repeated; without drafts, too."""
    settings = [*MTP, "rollout.temperature=0.8", "trainer.total_steps=2"]
    records = run(task, models["glm4_moe"], tmp_path / "run", *settings, *DRAFTS)
    assert all(record["mismatch/max"] < 1e-5 for record in records)
    assert all(0.1 < share < 0.9 for share in read_drafts(records))
    assert all(0.1 < record["mtp/acceptance"] < 1 for record in records)
    assert run(task, models["glm4_moe"], tmp_path / "again", *settings, *DRAFTS) == records
    plain = run(task, models["glm4_moe"], tmp_path / "plain", *settings)
    assert not any("draft" in name for record in plain for name in record)
    for with_drafts, without in zip(records, plain, strict=True):
        assert with_drafts.keys() == {*without, "rollout/draft_acceptance"}


def train_and_look(rank: int, world_size: int, overrides: list[str]) -> tuple[Any, bool, list[bool]]:
    """Run `train`; return its result, whether the module for drafters is loaded, and the replaced functions of vLLM."""
    sys.modules.pop("megatron_rl.transfer.drafter", None)
    sampler = import_module("vllm.v1.sample.rejection_sampler")
    proposer = import_module("vllm.v1.spec_decode.llm_base_proposer")
    pairs = (sampler, "expand_batch_to_tokens"), (proposer, "compute_probs_and_sample_next_token")
    before = [getattr(module, name) for module, name in pairs]
    error = train(rank, world_size, overrides)
    is_replaced = [getattr(module, name) is not old for (module, name), old in zip(pairs, before, strict=True)]
    return error, "megatron_rl.transfer.drafter" in sys.modules, is_replaced


def test_a_run_of_no_drafts_is_a_run_without_the_setting(
    task: Path, models: dict[str, Path], tmp_path: Path, vllm_imported: None
) -> None:
    """Metrics, rollouts and weights bit for bit, without any code of drafts; tests/golden/mtp.json is older than it."""
    found = {}
    for name, drafts in (("absent", []), ("zero", ["rollout.draft_tokens=0"]), ("one", ["rollout.draft_tokens=1"])):
        settings = [*SETTINGS[:1], "trainer.log_rollouts=-1", "trainer.total_steps=2", *MTP, *drafts]
        overrides = overrides_for(task, tmp_path / name, *settings, f"model.path={models['glm4_moe']}")
        ((error, is_loaded, is_replaced),) = run_ranks(train_and_look, 1, overrides, timeout=170)
        assert error is None and {is_loaded, *is_replaced} == {name == "one"}
        found[name] = observe(tmp_path / name)
    assert found["absent"]["weights"].keys() >= {"actor", "mtp"}
    assert found["zero"] == found["absent"] != found["one"]


ASYNC = ["schedule.max_staleness=1", "schedule.updates=in_flight", "schedule.steps_per_update=3"]
ASYNC += ["placement.actor=0-0", "placement.rollout=1-1", "algorithm.importance_sampling=token-truncate"]


@pytest.mark.parametrize(
    ("family", "ranks", "extra"),
    [
        pytest.param(
            "deepseek_v3",
            2,
            [*layout_overrides(1, 2, 1), "rollout.tensor_model_parallel_size=2"],
            marks=pytest.mark.slow,
        ),
        pytest.param("glm4_moe", 2, [*MTP, *ASYNC], marks=pytest.mark.slow),
        pytest.param("glm4_moe", 2, [*MTP, "actor.expert_model_parallel_size=2"], marks=pytest.mark.slow),
        pytest.param(
            "glm4_moe", 1, ["actor.lora.rank=4", "actor.lora.target_modules=[q_proj]"], marks=pytest.mark.slow
        ),
    ],
)
def test_drafts_in_other_layouts(
    family: str, ranks: int, extra: list[str], task: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    """The layer as it was published, drafted by two ranks beside two stages; interrupted responses; adapters; EP."""
    records = run(task, models[family], tmp_path / "run", *DRAFTS, *extra, ranks=ranks)
    assert len(records) == 3 and all(0.02 < share < 0.9 for share in read_drafts(records))
    is_late = [*ASYNC[-1:]] == extra[-1:]
    gaps = [record.get("mismatch/lag0" if is_late else "mismatch/max", 0.0) for record in records]
    assert 0 < max(gaps) < 1e-5
    if is_late:
        assert all(record["schedule/carried_tokens"] > 0 for record in records)
    elif "actor.expert_model_parallel_size=2" not in extra:  # it has two engines, and other batches
        alone = run(task, models[family], tmp_path / "alone", *DRAFTS, *(extra if ranks == 1 else ()))
        assert read_drafts(alone)[0] == read_drafts(records)[0]
        assert alone[0]["reward/mean"] == records[0]["reward/mean"]
