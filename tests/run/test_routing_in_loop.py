# SPDX-License-Identifier: Apache-2.0
"""Runs of a mixture of experts whose engine chooses other experts than the trainer would.

The engine's choice (not its shares) comes from gates with noise of 1e-3, as rounding in half precision makes it.
tests/training/test_routing.py tests the replay itself. Not covered: GPUs.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from distributed import run_ranks
from rl_runs import make_task, overrides_for, read_records, train
from tiny_models import ENGINE_SIZES, engine_sizes, save_tiny_model

ENGINES: dict[str, list[str]] = {
    "hf": ["rollout.engine=hf"],
    "carried": [
        "rollout.engine=megatron",
        "schedule.max_staleness=1",
        "schedule.updates=in_flight",
        "schedule.steps_per_update=3",
        "algorithm.importance_sampling=token-truncate",
        "rollout.max_num_seqs=12",
    ],
}


@pytest.fixture(scope="module")
def moe_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task with a model of 32 experts, four per token, whose gates are flat: many are nearly equal."""
    directory = tmp_path_factory.mktemp("task")
    make_task(directory)
    sizes = ENGINE_SIZES | dict(vocab_size=16, num_hidden_layers=2, num_experts=32, num_experts_per_tok=4)
    save_flat(directory / "moe", "qwen3_moe", **sizes)
    return directory


def save_flat(path: Path, family: str, **sizes: Any) -> None:
    """A model with nearly equal gates, beside the tokenizer of the task."""
    model = save_tiny_model(path, family, **sizes)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
                tensor *= 0.05
    model.save_pretrained(path)
    shutil.copy(path.parent / "tokenizer.model", path)


def train_with_noise(rank: int, world_size: int, overrides: Sequence[str]) -> str | None:
    """A rank of the program whose transformers engine chooses experts by noisy gates."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    generator = torch.Generator().manual_seed(rank)

    def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        noise = 1e-3 * torch.randn(logits.shape, generator=generator)
        chosen = (logits + noise).topk(self.top_k, -1).indices
        return logits, logits.gather(1, chosen).softmax(-1), chosen

    def add_noise_to_biases(router: type[Any]) -> None:
        plain = router.forward

        def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            bias, rows = self.e_score_correction_bias, hidden.flatten(0, -2)
            self.e_score_correction_bias = bias + 1e-3 * torch.randn(len(rows), len(bias), generator=generator)
            found = plain(self, rows)
            self.e_score_correction_bias = bias
            return found

        router.forward = forward

    Qwen3MoeTopKRouter.forward = forward  # pyright: ignore[reportAttributeAccessIssue]  # in this process only
    add_noise_to_biases(Glm4MoeTopkRouter)
    add_noise_to_biases(DeepseekV3TopkRouter)
    return train(rank, world_size, overrides)


def run(task: Path, run_dir: Path, world_size: int, *extra: str, model: str = "moe") -> list[dict[str, Any]]:
    """The records of a run's steps."""
    overrides = overrides_for(task, run_dir, f"model.path={task}/{model}", "trainer.val_before_train=false", *extra)
    assert run_ranks(train_with_noise, world_size, overrides, timeout=150) == [None] * world_size
    return [record for record in read_records(run_dir) if "mismatch/max" in record]


def test_replay_closes_the_gap_of_a_noisy_engine(moe_task: Path, tmp_path: Path) -> None:
    """Without replay log-probs are off by more than 1e-2; with it by as much as a dense model's, in EP2.

    The noise differs for each response, also in the prompt, which is not shared then. The metrics show that more than 5
    % of the tokens would have had other experts.
    """
    layout = [*ENGINES["hf"], "actor.expert_model_parallel_size=2"]
    off = run(moe_task, tmp_path / "off", 2, *layout)
    replayed = run(moe_task, tmp_path / "engine", 2, *layout, "actor.router_replay=engine", "trainer.capture_step=2")
    assert off[0]["mismatch/max"] > 1e-2 and "moe/agreement" not in off[0]
    for record in replayed:
        assert record["mismatch/max"] < 2e-6
        assert record["moe/flipped_tokens"] > 0.05 and 0 < record["moe/agreement"] < 0.99
    assert (tmp_path / "engine/capsules/step_2").is_dir()


def test_carried_responses_keep_their_routes(moe_task: Path, tmp_path: Path) -> None:
    """Parts of responses sampled by several versions, interrupted, saved and resumed; the engine is the policy.

    A continuation reads all of the response again: its tokens have the log-probs of the trainer, which replays the
    engine's choices of that pass, also for tokens sampled by older weights.
    """
    extra = [*ENGINES["carried"], "actor.router_replay=engine", "trainer.total_steps=3", "trainer.save_freq=1"]
    records = run(moe_task, tmp_path / "run", 1, *extra)
    assert len(records) == 3 and max(record["schedule/carried"] for record in records) > 0
    assert all(0 < record["moe/agreement"] <= 1 for record in records)
    fresh = [record["mismatch/lag0"] for record in records if "mismatch/lag0" in record]
    assert len(fresh) > 1 and max(fresh) < 1e-6 < max(record["mismatch/max"] for record in records)
    stale = [record["moe/replayed_stale"] for record in records]
    assert stale[0] == 0 < max(stale) < 1, "responses that were finished under older weights, and others"
    more = run(moe_task, tmp_path / "run", 1, *extra, "trainer.total_steps=4")
    assert len(more) == 4 and more[:3] == records


def test_the_trainers_own_routes_are_replayed(moe_task: Path, tmp_path: Path) -> None:
    """R2 needs a separate pass, and later minibatches use its choices: some routers would have left them."""
    records = run(moe_task, tmp_path / "run", 1, *ENGINES["hf"], "actor.router_replay=trainer", "trainer.total_steps=1")
    assert records[0]["mismatch/max"] > 1e-2, "it says nothing of the engine"
    assert 0.5 < records[0]["moe/agreement"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_biased_routers_replay_the_engine_and_themselves(moe_task: Path, tmp_path: Path, family: str) -> None:
    """Sigmoid routers behind a dense layer, in groups with DeepSeek: as the two tests of Qwen3-MoE above."""
    experts = dict(vocab_size=16, num_hidden_layers=2, n_routed_experts=32, num_experts_per_tok=4)
    save_flat(moe_task / family, family, **engine_sizes(family) | experts)
    layout = [*ENGINES["hf"], "actor.expert_model_parallel_size=2", "actor.router_replay=engine"]
    for record in run(moe_task, tmp_path / "engine", 2, *layout, model=family):
        assert record["mismatch/max"] < 2e-6
        assert record["moe/flipped_tokens"] > 0.05 and 0 < record["moe/agreement"] < 0.99
    own = [*ENGINES["hf"], "actor.router_replay=trainer", "trainer.total_steps=1"]
    (record,) = run(moe_task, tmp_path / "trainer", 1, *own, model=family)
    assert record["mismatch/max"] > 1e-3 and 0.5 < record["moe/agreement"] < 1


@pytest.mark.parametrize(
    ("family", "world_size", "zero_stage"),
    [
        ("glm4_moe", 1, 1),
        pytest.param("deepseek_v3", 1, 1, marks=pytest.mark.slow),
        *(pytest.param(family, 1, 1, marks=pytest.mark.slow) for family in ("glm4_moe_lite", "minimax_m2")),
        pytest.param("glm4_moe", 2, 3, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, 3, marks=pytest.mark.slow),
    ],
)
def test_biases_of_a_bfloat16_model_stay_float32(
    moe_task: Path, tmp_path: Path, vllm_imported: None, family: str, world_size: int, zero_stage: int
) -> None:
    """In the engine, in checkpoints and in HF files; they move by less than a bfloat16 number of their size can.

    vLLM keeps the whole router of GLM-4.5 in float32. A continued run has the same bits.
    """
    sizes = engine_sizes(family) | dict(vocab_size=16, num_hidden_layers=2)
    model = save_tiny_model(moe_task / f"{family}-bfloat16", family, **sizes)
    shutil.copy(moe_task / "tokenizer.model", moe_task / f"{family}-bfloat16")
    before = {
        name.replace("mlp.e_score", "block_sparse_moe.e_score"): x.clone()  # MiniMax-M2's name in files
        for name, x in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    extra = ["model.dtype=bfloat16", "actor.router_bias_rate=1e-5", "actor.router_replay=engine"]
    extra += ["hybrid.verify=full", "trainer.total_steps=3", "trainer.save_freq=1", "data.validation_files=[]"]
    extra.append(f"actor.zero_stage={zero_stage}")
    whole = run(moe_task, tmp_path / "whole", world_size, *extra, model=f"{family}-bfloat16")
    assert max(record["mismatch/max"] for record in whole) < 0.1  # 8 bits; flips would give more
    for name, start in before.items():
        with safe_open(next((tmp_path / "whole/checkpoints/latest/huggingface").glob("*.safetensors")), "pt") as file:
            moved = file.get_tensor(name) - start
        steps = moved / 1e-5
        assert moved.dtype == torch.float32 and 0 < moved.abs().max() < 1e-4
        assert (steps - steps.round()).abs().max() < 0.01, "whole steps"
    cut = [*extra, "trainer.total_steps=2"]
    assert run(moe_task, tmp_path / "cut", world_size, *cut, model=f"{family}-bfloat16") == whole[:2]
    assert run(moe_task, tmp_path / "cut", world_size, *extra, model=f"{family}-bfloat16") == whole
