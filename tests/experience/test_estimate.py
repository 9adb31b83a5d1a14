# SPDX-License-Identifier: Apache-2.0
"""Baselines, KL and metrics count rollouts: cutting some of them into branches changes none of them.

The formulas are tested in tests/algorithms; sequence weights in test_pack.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sample_rollouts import make_prompt, make_rollout, split

from distributed import run_ranks
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.experience.describe import describe_rollouts, describe_sources
from megatron_rl.experience.estimate import compute_advantages, measure_kl
from megatron_rl.experience.experience import Column, replicate
from megatron_rl.experience.pack import Packer
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import Rollout

PROMPTS = [make_prompt(5), make_prompt(3)]
WHOLE = [(0, make_rollout(PROMPTS[0], i, 4, reward, digits=1.0)) for i, reward in enumerate([1.0, 1.0, 1.0, 0.0])]
WHOLE += [(1, make_rollout(PROMPTS[1], i, 3 + i, reward, digits=2.0)) for i, reward in enumerate([0.0, 2.0])]
CUT = [
    (0, split(WHOLE[0][1], (1, 1, 2))),
    WHOLE[1],
    (0, split(WHOLE[2][1], (1, 3))),
    WHOLE[3],
    (1, split(WHOLE[4][1], (2, 1))),
    WHOLE[5],
]
ESTIMATORS = ["grpo", "rloo", "dr_grpo", "opo", "gpg", "grpo_passk", "remax", "reinforce_plus_plus_baseline"]


def _estimate(rank: int, world_size: int, rollouts: list[tuple[int, Rollout]]) -> dict[str, object]:
    samples = replicate(rollouts, PROMPTS, dist.group.WORLD, baselines=np.array([0.25, 0.5]))
    model = SimpleNamespace(
        layout=ParallelLayout(1),
        dp_rank=0,
        pad_multiple=4,
        microbatch_count_multiple=1,
        attention_ratio=0.0,
        buckets=None,
    )
    plan = SimpleNamespace(rollouts_per_minibatch=6, max_response_length=8, longest_sequence=20)
    packing = samples.pack(Packer(model, ActorConfig(), plan, AlgorithmConfig(), torch.device("cpu")))
    batch = packing.batch
    samples.old_logprobs = Column(torch.where(batch.loss_mask, -0.5, 0.0), packing)
    batch = replace(
        batch, old_logprobs=samples.old_logprobs.values, ref_logprobs=torch.zeros_like(batch.rollout_logprobs)
    )
    rollout_of = torch.from_numpy(samples.headers["rollout"])[batch.sequence_ids]
    found: dict[str, object] = {}
    for name in ESTIMATORS:
        advantages = compute_advantages(
            samples, batch, AlgorithmConfig(adv_estimator=name), dist.group.WORLD
        ).advantages
        found[name] = [advantages[batch.loss_mask & (rollout_of == i)].tolist() for i in range(6)]
    found["kl"] = measure_kl(samples.headers, batch, "k1", dist.group.WORLD).tolist()
    assert describe_sources(samples.headers, ["a", "a"]) == {}, "one source is the mean of all"
    return found | describe_rollouts(samples.headers) | describe_sources(samples.headers, ["b", "a"])


def test_branches_change_no_baseline_and_no_metric() -> None:
    """Rewards 1, 1, 1, 0 have the mean 0.75, whether there are four sequences or seven."""
    (whole,), (cut,) = run_ranks(_estimate, 1, WHOLE), run_ranks(_estimate, 1, CUT)
    assert whole["dr_grpo"][0] == [0.25] * 4 and whole["dr_grpo"][3] == [-0.75] * 4
    assert whole["kl"] == pytest.approx([-0.5 * n for n in (4, 4, 4, 4, 3, 4)])
    assert whole["reward/b/mean"] == 0.75 and whole["reward/a/mean"] == 1.0
    assert whole.keys() == cut.keys()
    for name in whole.keys() - {"reinforce_plus_plus_baseline", "kl"}:
        assert cut[name] == whole[name], name
    assert cut["kl"] == pytest.approx(whole["kl"])
    np.testing.assert_allclose(
        np.concatenate(cut["reinforce_plus_plus_baseline"]),
        np.concatenate(whole["reinforce_plus_plus_baseline"]),
        rtol=1e-6,
    )
