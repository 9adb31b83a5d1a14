# SPDX-License-Identifier: Apache-2.0
"""Log-probs of long sequences equal transformers', packed into one microbatch and cut over CP.

For the families with position-dependent layers: windows and sinks, states, latents. Not covered: gradients (short
sequences: tests/training), bfloat16, GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actor_runs import CPU, Case, build_actor
from distributed import run_ranks
from megatron_rl.samples.batch import Padding, build_train_batch
from megatron_rl.types import Branch
from tiny_models import draw_tokens, save_tiny_model

LENGTHS = [3001, 1777, 70]
NUM_PROMPT_TOKENS = 1000
FAMILIES = {
    "gpt_oss": dict(sliding_window=128),
    "qwen3_next": {},
    "qwen3_5_moe_text": {},
    "deepseek_v3": {},
}


def _score(rank: int, world_size: int, case: Case, path: Path) -> list[torch.Tensor]:
    """Log-probs of the tokens behind the prompt of each sequence, in one microbatch."""
    actor = build_actor(case, path)
    sequences = [Branch.of_response(x, min(NUM_PROMPT_TOKENS, len(x) // 2)) for x in draw_tokens(LENGTHS)]
    plan = [(range(len(LENGTHS)), [[[*range(len(LENGTHS))]]])]
    batch = build_train_batch(
        sequences, [1.0] * 3, plan, dp_rank=0, padding=Padding(actor.model.pad_multiple), device=CPU
    )
    assert len(batch.slices) == 1
    found = actor.compute_logprobs(batch)
    return [found[(batch.sequence_ids == i) & batch.loss_mask] for i in range(len(LENGTHS))]


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(), Case(2, dict(cp_size=2))], ids=["single", "cp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_transformers(family: str, case: Case, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, family, num_hidden_layers=4, max_position_embeddings=4096, **FAMILIES[family])
    case = Case(case.world_size, case.sizes, dict(max_tokens_per_microbatch=8192))
    ranks = run_ranks(_score, case.world_size, case, tmp_path, timeout=300)
    for ids, found in zip(map(torch.from_numpy, draw_tokens(LENGTHS)), ranks[0], strict=True):
        with torch.no_grad():
            logp = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = logp.gather(1, ids[1:, None])[:, 0][-len(found) :]
        assert expected.std() > 0.1 and len(found) > 30
        assert (found - expected).abs().max() < 1e-4
