# SPDX-License-Identifier: Apache-2.0
"""Settings of the step mode that contradict each other. That graph needs CUDA is in tests/training/test_step.py."""

from __future__ import annotations

import pytest

from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

MINIMAL = ["model.path=policy", "data.train_files=train.jsonl", "data.train_batch_size=8"]
STATIC, GRAPH = "actor.step_mode=static", "actor.step_mode=graph"
PP, VPP = "actor.pipeline_model_parallel_size=2", "actor.virtual_pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("overrides", "name", "text"),
    [
        (["actor.step_mode=cuda"], "actor.step_mode", "eager"),
        ([STATIC, "actor.bucket_tokens=[512, 1024]"], "actor.bucket_tokens", "no bucket for a microbatch of"),
        ([STATIC, "actor.bucket_tokens=[0, 4096]"], "actor.bucket_tokens", "no bucket"),
        ([GRAPH, PP, "actor.overlap_grad_reduce=true"], "actor.overlap_grad_reduce", "not captured yet"),
        ([GRAPH, "actor.expert_model_parallel_size=2"], "actor.expert_model_parallel_size", "not captured yet"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], name: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [*MINIMAL, *overrides])
    assert name in str(caught.value) and text in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [STATIC],
        [STATIC, "actor.pipeline_model_parallel_size=2"],
        [GRAPH, "actor.graph_memory_gib=4"],
        [STATIC, "actor.context_parallel_size=2", "actor.share_prompts=false"],
        [STATIC, "actor.bucket_tokens=[512, 4096]"],
        [GRAPH, "actor.overlap_grad_reduce=true"],
        [GRAPH, PP],
        [GRAPH, "actor.offload_gradients=true", "actor.offload_optimizer=true"],
        ["critic.step_mode=graph", "critic.offload_optimizer=stream"],
        [STATIC, PP, f"{VPP}=2", "actor.overlap_grad_reduce=true"],
        ["critic.step_mode=static"],
    ],
)
def test_what_works_passes(overrides: list[str]) -> None:
    load_config(None, [*MINIMAL, *overrides])
