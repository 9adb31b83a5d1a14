# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts that a graph cannot hold are refused before anything is built, with the reason.

That the others are captured is in tests/rehearsal/test_recorded_experts.py; which GPUs can, in
tests/rehearsal/test_gpu_paths.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import ActorConfig
from megatron_rl.config.sections import LoraConfig
from megatron_rl.run.models import read_layout
from megatron_rl.types import UserError
from shards import make_shape

EXPERTS = ["gate_proj", "up_proj", "down_proj"]
NF4 = dict(quantization="nf4", lora=LoraConfig(rank=8), tensor_model_parallel_size=1, sequence_parallel=False)


def check(actor: dict[str, Any] | None = None, *, dtype: str = "bfloat16", bitwise: bool = False, **sizes: int) -> None:
    layout = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    config = ActorConfig(**layout | dict(step_mode="graph") | (actor or {}))
    spec = RoleSpec(
        name="actor",
        path="-",
        section="actor",
        settings=config,
        head="logprob",
        trainable=True,
        batch_invariant=bitwise,
    )
    shape = make_shape("qwen3_moe", **dict(hidden_size=64, ffn_hidden_size=48) | sizes)
    read_layout(spec, range(2), shape, dtype)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (dict(bitwise=True), "rollout.bitwise"),
        (dict(actor=NF4, ffn_hidden_size=64, head_dim=64), "actor.quantization=nf4"),
        (dict(ffn_hidden_size=40), "moe_intermediate_size / ETP = 20 is no multiple of 8"),
        (dict(hidden_size=60), "hidden_size = 60 is no multiple of 8"),
        (dict(hidden_size=62, dtype="float32"), "hidden_size = 62 is no multiple of 4"),
        (dict(actor=dict(lora=LoraConfig(rank=4, target_modules=EXPERTS))), "actor.lora.rank = 4 is no multiple of 8"),
    ],
)
def test_experts_in_turn_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        check(**arguments)
    assert caught.value.source == "actor.step_mode" and reason in str(caught.value)
    assert "the host reads" in str(caught.value) and "step_mode=static" in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        dict(dtype="float32", hidden_size=60, ffn_hidden_size=40),
        dict(actor=dict(lora=LoraConfig(rank=4))),  # on attention only
        dict(actor=dict(lora=LoraConfig(rank=8, target_modules=EXPERTS))),
        dict(actor=dict(step_mode="static"), bitwise=True),
        dict(actor=dict(step_mode="static"), hidden_size=62),
        dict(actor=dict(overlap_grad_reduce=True)),
    ],
)
def test_what_a_graph_holds_passes(arguments: dict[str, Any]) -> None:
    check(**arguments)
