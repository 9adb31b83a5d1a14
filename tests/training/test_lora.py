# SPDX-License-Identifier: Apache-2.0
"""Adapters of rank 4 on any layout train like PEFT's on transformers, and everything else stays unchanged.

Compared with PEFT: log-probs before and after three updates, every metric of each, and the adapters after the first.
Adam divides by the size of a gradient, so that with its usual epsilon of 1e-8 an element whose gradient is only
rounding moves by the whole learning rate. Both sides take 1e-5 here, a hundredth of the typical gradient. Not covered:
CUDA, Transformer Engine, experts with adapters (there are none).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from role_setups import make_setup, take_step
from safetensors.torch import save_file
from tiny_adapters import adapted, save_adapted, save_dequantized
from transformers import AutoModelForCausalLM

from actor_runs import (
    ALGORITHM,
    Case,
    Measured,
    build_actor,
    build_batch,
    list_pieces,
    merge_rollouts,
    split_by_rollout,
    train_with_transformers,
)
from distributed import run_ranks
from megatron_rl.checkpoint.peft import check_adapters
from megatron_rl.config.schema import ActorConfig
from megatron_rl.config.sections import LoraConfig
from megatron_rl.training.roles.frozen import BaseOfActor, Reference
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import make_adapter_shape
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import save_tiny_model

SP, FULL = dict(sequence_parallel=True), dict(recompute_granularity="full")
LAYOUTS = {
    "tp1": Case(),
    "tp1-full": Case(actor=FULL),
    "tp2": Case(2, dict(tp_size=2)),
    "tp2-sp-full": Case(2, dict(tp_size=2), SP | FULL),
    "pp2-selective": Case(2, dict(pp_size=2), dict(recompute_granularity="selective")),
    "pp2-vpp2-full": Case(2, dict(pp_size=2, vpp_size=2), FULL),
    "dp2": Case(2),
    "dp2-replicated": Case(2, actor=dict(zero_stage=0)),
    "cp2": Case(2, dict(cp_size=2)),
    "tp2-pp2-sp-full": Case(4, dict(tp_size=2, pp_size=2), SP | FULL),
    "tp2-dp2-sp": Case(4, dict(tp_size=2), SP),
}
UPDATES, ADAM_EPS, TOLERANCE = 3, 1e-5, 1e-5


def with_lora(case: Case, directory: Path, **options: Any) -> Case:
    return replace(case, actor=case.actor | dict(lora=adapted(directory, **options), adam_eps=ADAM_EPS))


def train_on_rank(rank: int, world_size: int, case: Case, path: Path) -> dict[str, Any]:
    actor = build_actor(case, path)
    model = actor.model
    base = list_pieces(model)
    batch = build_batch(model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    minibatch = next(batch.minibatches())
    metrics = [take_step(actor, minibatch, ALGORITHM)]
    pieces = list_pieces(model.trained)
    metrics += [take_step(actor, minibatch, ALGORITHM) for _ in range(UPDATES - 1)]
    after = split_by_rollout(actor.compute_logprobs(batch), batch)
    assert is_equal(base, list_pieces(model)), "the model itself has moved"
    held = sum(p.numel() for p in model.trained.params.values())
    assert (
        sum(b.grad_data.numel() for ddp in model.ddp for b in ddp.buffers) < held + 64 * len(model.trained.params) + 256
    )
    return dict(
        at=model.groups.at,
        before=split_by_rollout(batch.old_logprobs, batch),
        after=after,
        metrics=metrics,
        pieces=pieces,
        base=base,
        shapes=model.trained.shape.logical_tensors(),
    )


def is_equal(a: Any, b: Any) -> bool:
    """Return whether all tensors are equal to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def train(case: Case, path: Path) -> Measured:
    ranks = run_ranks(train_on_rank, case.world_size, case, path, timeout=100)
    assert all(found["metrics"] == ranks[0]["metrics"] for found in ranks)
    full = {name: torch.full(size, float("nan")) for name, size in ranks[0]["shapes"].items()}
    for found in ranks:
        for name, index, values in found["pieces"]:
            known = full[name][index]
            assert known.isnan().all() or torch.equal(known, values), f"replicas of {name} have drifted apart"
            full[name][index] = values
    assert not any(x.isnan().any() for x in full.values())
    return Measured(
        before=merge_rollouts([(r["at"], r["before"]) for r in ranks]),
        after=merge_rollouts([(r["at"], r["after"]) for r in ranks]),
        metrics=ranks[0]["metrics"],
        weights=full,
        num_microbatches=0,
    )


def compare_metrics(found: Measured, expected: Measured) -> None:
    """Compare the metrics of every update, and the adapters' norm after the first, for scale 2."""
    w = found.weights
    products = [2.0 * w[name.replace("lora_A", "lora_B")] @ a for name, a in w.items() if "lora_A" in name]
    norm = torch.stack([product.square().sum() for product in products]).sum().sqrt().item()
    assert found.metrics[0]["lora/norm"] == pytest.approx(norm, rel=1e-5)
    for step, (got, want) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        known = {name: value for name, value in got.items() if not name.startswith("moe/")}
        assert known == pytest.approx(want | {"lora/norm": got["lora/norm"]}, rel=1e-5, abs=1e-5), f"update {step + 1}"


@pytest.fixture(scope="module")
def trained_by_peft(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Measured]:
    directory = tmp_path_factory.mktemp("qwen2")
    return directory, train_with_transformers(save_adapted(directory, "qwen2"), UPDATES, ADAM_EPS)


# By the layouts that combine them with another.
COVERED = {"tp1-full", "tp2", "tp2-sp-full", "dp2"}


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.slow] * (layout in COVERED)) for layout in LAYOUTS]
)
def test_every_layout_trains_adapters_as_peft_does(layout: str, trained_by_peft: tuple[Path, Measured]) -> None:
    directory, expected = trained_by_peft
    found = train(with_lora(LAYOUTS[layout], directory), directory / "model")
    for name in ("before", "after"):
        gap = max(
            (a - b).abs().max().item() for a, b in zip(getattr(found, name), getattr(expected, name), strict=True)
        )
        assert gap <= TOLERANCE, f"logprobs {name}: {gap}"
    compare_metrics(found, expected)
    prefix = "base_model.model."
    theirs = {n.removeprefix(prefix).replace(".default", ""): w for n, w in expected.weights.items() if "lora_" in n}
    assert theirs.keys() == found.weights.keys()
    gaps = {name: (found.weights[name] - x).abs().max().item() for name, x in theirs.items()}
    assert max(gaps.values()) <= TOLERANCE, {k: v for k, v in gaps.items() if v > TOLERANCE}


def score_on_rank(rank: int, world_size: int, case: Case, path: Path) -> list[torch.Tensor]:
    """Return log-probs [t] without adapters, with zero adapters, and with others that are switched off."""
    plain = build_actor(replace(case, actor={k: v for k, v in case.actor.items() if k != "lora"}), path)
    zeros = build_actor(replace(case, actor=case.actor | dict(lora=LoraConfig(rank=4))), path)
    others = build_actor(case, path)
    batch = build_batch(plain.model, case)
    assert not torch.equal(others.compute_logprobs(batch), plain.compute_logprobs(batch))
    return [
        plain.compute_logprobs(batch),
        zeros.compute_logprobs(batch),
        BaseOfActor(others).compute_logprobs(batch),
        Reference(make_setup("reference", path, ActorConfig(), others.model.groups)).compute_logprobs(batch),
    ]


@pytest.mark.parametrize("layout", ["tp1", "tp2-sp-full", "pp2-selective"])
def test_adapters_of_zeros_and_none_are_the_model(layout: str, trained_by_peft: tuple[Path, Measured]) -> None:
    """To the last bit: before the first update, and as a reference."""
    directory, _ = trained_by_peft
    case = with_lora(LAYOUTS[layout], directory)
    for found in run_ranks(score_on_rank, case.world_size, case, directory / "model", timeout=100):
        plain, *same = found
        assert all(torch.equal(plain, logprobs) for logprobs in same[: 2 if case.world_size > 1 else 3])


@pytest.fixture(scope="module")
def quantizable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks no layout cuts, and in `dequantized` its matrices as bitsandbytes restores them."""
    directory = tmp_path_factory.mktemp("quantizable")
    save_adapted(directory, "qwen2", hidden_size=128, intermediate_size=256)
    save_dequantized(directory / "model", directory / "dequantized")
    return directory


@pytest.mark.parametrize(
    "layout",
    ["tp1", "tp2-pp2-sp-full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2", "pp2-selective"))],
)
def test_quantized_models_train_as_what_they_stand_for(layout: str, quantizable: Path) -> None:
    """To the last bit: log-probs, metrics, adapters, and the matrices that the reshard reads, in each layout alike."""
    plain = with_lora(LAYOUTS[layout], quantizable)
    quantized = replace(plain, actor=plain.actor | dict(quantization="nf4"))
    expected = run_ranks(train_on_rank, plain.world_size, plain, quantizable / "dequantized", timeout=100)
    found = run_ranks(train_on_rank, plain.world_size, quantized, quantizable / "model", timeout=100)
    assert is_equal(found, expected)


class LoopedLinear(torch.nn.Module):
    """A frozen matrix and its adapter, as plainly as it can be written."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        draw = torch.Generator().manual_seed(weight.numel() + int(1e4 * weight.abs().sum()))
        self.lora_A = torch.nn.Parameter(0.1 * torch.randn(4, weight.shape[1], generator=draw))
        self.lora_B = torch.nn.Parameter(0.1 * torch.randn(weight.shape[0], 4, generator=draw))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + 2.0 * (x @ self.lora_A.T @ self.lora_B.T)


class LoopedExperts(torch.nn.ModuleList):
    """The experts of transformers, one after the other."""

    def __init__(self, experts: Any, names: dict[str, str]) -> None:
        super().__init__()
        self._names = names
        for fused, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
            matrices = dict(zip(("gate", "up", "down"), (*fused.chunk(2), down), strict=True))
            self.append(torch.nn.ModuleDict({names[key]: LoopedLinear(x.detach()) for key, x in matrices.items()}))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        for number, expert in enumerate(self):
            gate, up, down = (expert[self._names[key]] for key in ("gate", "up", "down"))
            share = (shares * (chosen == number)).sum(-1, keepdim=True)
            output = output + share * down(torch.nn.functional.silu(gate(x)) * up(x))
        return output


EXPERT_NAMES = {
    "qwen3_moe": dict(gate="gate_proj", up="up_proj", down="down_proj"),
    "mixtral": dict(gate="w1", up="w3", down="w2"),
}


def save_looped(directory: Path, family: str) -> tuple[torch.nn.Module, list[str]]:
    """A mixture with adapters on `o_proj` and on its experts, written as PEFT writes them; and their names."""
    names = EXPERT_NAMES[family]
    model: Any = save_tiny_model(directory / "model", family, num_hidden_layers=2)
    block = "mlp" if family == "qwen3_moe" else "block_sparse_moe"
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.experts = LoopedExperts(layer.mlp.experts, names)
        layer.self_attn.o_proj = LoopedLinear(layer.self_attn.o_proj.weight.detach())
    tensors = {name.replace("mlp", block): p.detach() for name, p in model.named_parameters() if "lora_" in name}
    (directory / "adapter").mkdir()
    save_file(
        {f"base_model.model.{name}.weight": p for name, p in tensors.items()},
        directory / "adapter/adapter_model.safetensors",
    )
    modules = ["o_proj", *names.values()]
    described = dict(peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=modules)
    (directory / "adapter/adapter_config.json").write_text(json.dumps(described))
    return model, modules


MIXTURES = {
    "tp1": Case(),
    "ep2-full": Case(2, dict(ep_size=2), FULL),
    "tp2-sp": Case(2, dict(tp_size=2), SP),
    "tp2-ep2-sp-full": Case(4, dict(tp_size=2, ep_size=2), SP | FULL),
    "pp2-ep2": Case(4, dict(pp_size=2, ep_size=2)),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("ep2-full", "tp2-sp"))) for name in MIXTURES]
)
def test_experts_with_adapters_train_as_a_plain_loop_does(layout: str, mixture: Any) -> None:
    """In every layout of experts; with an adapter on attention beside them."""
    directory, modules, expected = mixture
    found = train(with_lora(MIXTURES[layout], directory, target_modules=modules), directory / "model")
    for name in ("before", "after"):
        gap = max(
            (a - b).abs().max().item() for a, b in zip(getattr(found, name), getattr(expected, name), strict=True)
        )
        assert gap <= TOLERANCE, f"logprobs {name}: {gap}"
    compare_metrics(found, expected)
    theirs = {f"{name}.weight": p for name, p in expected.weights.items() if "lora_" in name}
    assert theirs.keys() == found.weights.keys() and len(theirs) == 2 * 2 * (1 + 4 * 3)
    assert max((found.weights[name] - p).abs().max().item() for name, p in theirs.items()) <= TOLERANCE


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], Measured]:
    directory = tmp_path_factory.mktemp("mixture")
    model, modules = save_looped(directory, "qwen3_moe")
    return directory, modules, train_with_transformers(model, UPDATES, ADAM_EPS)


@pytest.mark.parametrize("family", EXPERT_NAMES)
def test_peft_reads_adapters_of_experts(tmp_path: Path, family: str) -> None:
    """Under the names of published checkpoints, which PEFT converts into those of transformers 5."""
    looped, _ = save_looped(tmp_path, family)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "adapter")
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert (model.eval()(ids).logits - looped(ids).logits).abs().max() < 1e-5


def test_some_matrices_and_other_settings(tmp_path: Path) -> None:
    """A subset of a fused matrix, rsLoRA, in a layout that cuts both; PEFT agrees."""
    names = ["q_proj", "v_proj", "up_proj"]
    model = save_adapted(tmp_path, "qwen3", dict(target_modules=names, use_rslora=True))
    expected = train_with_transformers(model, UPDATES, ADAM_EPS)
    options = dict(target_modules=names, alpha=16.0)  # 8 / sqrt(4) = 16 / 4
    found = train(with_lora(LAYOUTS["tp2-pp2-sp-full"], tmp_path, **options), tmp_path / "model")
    gap = max((a - b).abs().max().item() for a, b in zip(found.after, expected.after, strict=True))
    assert gap <= TOLERANCE
    assert len(found.weights) == 2 * 3 * 4  # A and B of three matrices in four layers


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(rank=8), "rank 4 and scale 2, the run has 8"),
        (dict(alpha=4.0), "rank 4 and scale 2, the run has 4 and 1"),
        (dict(target_modules=["q_proj"]), "is in no adapter of the run"),
        (dict(path="nowhere"), "has no adapter_config.json"),
        (dict(target_modules=["w1"]), "'w1' is no matrix that can have an adapter"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    options: dict[str, Any], expected: str, trained_by_peft: tuple[Path, Measured]
) -> None:
    directory, _ = trained_by_peft
    config = adapted(directory, **options)
    with pytest.raises(UserError) as caught:
        shape = make_adapter_shape(load_model_shape(directory / "model"), config, "actor")
        assert shape is not None and config.path is not None
        check_adapters(config.path, shape, "actor.lora.path")
    assert expected in caught.value.found
