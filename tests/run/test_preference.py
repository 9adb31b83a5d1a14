# SPDX-License-Identifier: Apache-2.0
"""Preference learning in small: layouts, adapters, packing and resuming give the numbers of one rank and one run.

Formulas are in tests/algorithms/test_preference_losses.py, rows in tests/data/test_preference_rows.py, TRL's numbers in
tests/run/test_preference_vs_trl.py. Not covered: several features at once, which the actor's tests cover.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from preference_runs import LAYOUTS, keep_compared, learn, list_pairs, read_weights, train_on_rank
from storage_watch import measure_peak
from transformers import AutoModelForSequenceClassification

import megatron_rl.run.preference as preference_module
from distributed import run_ranks
from launch_runs import ROOT, assert_succeeded, fork_ranks, run_script
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.run.loading import load_config
from megatron_rl.run.preference_inputs import plan_preferences
from megatron_rl.types import UserError
from rl_runs import load_nested, overrides_for
from tiny_models import ENGINE_SIZES, save_tiny_model

PAGE = ROOT / "docs/preferences.md"


def _learn(task: Path, directory: Path, world_size: int, *extra: str) -> list[dict[str, float]]:
    rows = [{**pair, "margin": 0.01 * i} for i, pair in enumerate(list_pairs(task))]
    return keep_compared(learn(task, directory, rows, "data.train_batch_size=6", *extra, world_size=world_size))


def _check_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [*map(set, found)] == [*map(set, expected)]
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        # Before the first update all rewards are 0 but for rounding, which decides who is right.
        ties = {name for name in mine if name.endswith(("accuracy", "calibration_error")) and step < 2}
        assert {k: v for k, v in mine.items() if k not in ties} == pytest.approx(
            {k: v for k, v in theirs.items() if k not in ties}, rel=2e-5, abs=2e-6
        )


@pytest.fixture(scope="module")
def one_rank(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Records of the runs that others are compared with, by loss."""
    return {
        loss: _learn(task, tmp_path_factory.mktemp(loss), 1, f"preference.loss={loss}")
        for loss in ("dpo", "kto", "bradley_terry")
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["dpo", "kto", "bradley_terry"])
def test_layouts_give_the_numbers_of_one_rank(
    loss: str, layout: str, task: Path, tmp_path: Path, one_rank: dict[str, list[dict[str, float]]]
) -> None:
    _check_close(_learn(task, tmp_path, 2, f"preference.loss={loss}", LAYOUTS[layout]), one_rank[loss])


FEATURES = {
    "mixture": (["model.path={task}/moe"], "actor.expert_model_parallel_size=2"),
    "muon": (["actor.optimizer=muon"], LAYOUTS["tp2"]),
    "qlora": (["actor.lora.rank=4", "actor.lora.alpha=8", "actor.quantization=nf4"], LAYOUTS["dp2"]),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("loss", ["dpo", "bradley_terry"])
def test_features_give_the_numbers_of_one_rank(loss: str, feature: str, task: Path, tmp_path: Path) -> None:
    """Updates on one rank are checked in test_actor.py, test_muon.py and test_lora.py."""
    settings, layout = FEATURES[feature]
    if feature == "mixture" and not (task / "moe").exists():
        save_tiny_model(task / "moe", "qwen3_moe", **ENGINE_SIZES, vocab_size=16, num_hidden_layers=2)
        (task / "moe/tokenizer.model").write_bytes((task / "tokenizer.model").read_bytes())
    settings = [f"preference.loss={loss}", *(setting.format(task=task) for setting in settings)]
    one_rank = _learn(task, tmp_path / "one", 1, *settings)
    _check_close(_learn(task, tmp_path / "two", 2, *settings, layout), one_rank)
    assert one_rank[-1]["validation/rows/margin"] > 0


@pytest.mark.parametrize("setting", ["actor.share_prompts=false", "actor.max_tokens_per_microbatch=512"])
def test_packing_does_not_change_the_numbers(
    setting: str, task: Path, tmp_path: Path, one_rank: dict[str, list[dict[str, float]]]
) -> None:
    _check_close(_learn(task, tmp_path, 1, setting), one_rank["dpo"])


def test_what_is_learned(one_rank: dict[str, list[dict[str, float]]]) -> None:
    """Before training a policy is its reference: all rewards are 0, and a pair is right by half."""
    for loss in ("dpo", "bradley_terry"):
        first, *_, last = one_rank[loss]
        (accuracy,) = (name for name in first if name.endswith("accuracy"))
        assert first[accuracy] == 0.5 and last[accuracy] > 0.8
    first, _, _, last = one_rank["dpo"]
    assert first["validation/rows/margin"] == 0.0 < last["validation/rows/margin"]


def test_adapters_need_no_second_model(task: Path, tmp_path: Path) -> None:
    """The reference of a LoRA run is the base model of the policy; equal to a frozen copy, bit for bit."""
    adapters = ["actor.lora.rank=4", "actor.lora.alpha=8"]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (task / "model").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shared = _learn(task, tmp_path / "shared", 1, *adapters)
    assert shared == _learn(task, tmp_path / "frozen", 1, *adapters, f"reference.path={copy}")
    assert shared[-1]["validation/rows/margin"] > 0


def test_a_resumed_run_continues_bit_for_bit(task: Path, tmp_path: Path) -> None:
    whole = _learn(task, tmp_path / "whole", 1)
    _learn(task, tmp_path / "parts", 1, "trainer.total_steps=2", "checkpoint.resume=never")
    parts = _learn(task, tmp_path / "parts", 1)
    assert parts[-1] == whole[-1]
    mine, theirs = read_weights(tmp_path / "parts"), read_weights(tmp_path / "whole")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_reward_model_is_exported_for_transformers(task: Path, tmp_path: Path) -> None:
    """The scores of the exported model have the margins that the run reports for its validation set."""
    records = _learn(task, tmp_path, 1, "preference.loss=bradley_terry")
    (directory,) = (tmp_path / "run" / "checkpoints").glob("step_3/huggingface")
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    assert model.config.num_labels == 1
    config = load_config(
        None, [f"model.path={task}/model", f"data.train_files=[{tmp_path}/rows.jsonl]", "data.train_batch_size=6"]
    ).config
    from megatron_rl.data.preference_rows import load_preferences
    from megatron_rl.data.tokenizer import load_tokenizer

    examples = load_preferences(
        [f"{tmp_path}/rows.jsonl"], load_tokenizer(task / "model"), config.data, is_paired=True
    ).examples
    margins = []
    for example in examples:
        scores = []
        for response in example.responses:
            tokens = torch.from_numpy(response.branches[0].tokens).long()[None]
            hidden = model.model(tokens).last_hidden_state[0, -1]
            scores.append(model.score(hidden).item())
        margins.append(scores[0] - scores[1])
    assert records[-1]["validation/rows/margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4, abs=1e-6)


def test_the_own_loss_of_the_page_runs(task: Path, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(from torch.nn.functional.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "hinge.py").write_text(program)
    plugin = f"algorithm.plugins=[{tmp_path}/hinge.py]"
    first, *_, last = _learn(task, tmp_path, 1, "preference.loss=hinge", "data.shuffle=false", plugin)[1:]
    margins = [0.01 * i for i in range(6)]
    assert first["preference/loss"] == pytest.approx(1 + sum(margins) / 6, abs=1e-6) and first["policy/grad_norm"] > 0
    assert last["preference/margin"] > 0


def test_the_status_page_shows_validation_pairs(task: Path, tmp_path: Path) -> None:
    """The first two of the last validation, with the rewards that the viewer reads."""
    _learn(task, tmp_path, 1, "observability.status_port=0", "observability.trackers=[]")
    page = (tmp_path / "run/status.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="frozen">(.*?)</script>', page)
    status = json.loads(data)
    samples = status["samples"]
    assert status["places"] == [{"rank": 0, "roles": {"actor": ""}}]
    rows = [json.loads(x) for x in (tmp_path / "run/validation/rows/rollouts/step_3.jsonl").read_text().splitlines()]
    assert samples["step"] == 3
    assert [(row["label"], row["prompt"], row["response"], float(row["reward"])) for row in samples["rows"]] == [
        (row["label"], row["prompt"], row["response"], row["reward"]) for row in rows[:4]
    ]
    assert [row["label"] for row in samples["rows"]] == ["chosen", "rejected"] * 2
    better, worse = (float(row["reward"]) for row in samples["rows"][:2])
    assert better - worse == rows[0]["reward_components"]["margin"] != 0


def _measure_update(rank: int, world_size: int, overrides: Sequence[str]) -> int:
    """Return the bytes that one update's tensors hold at its peak."""
    peaks: list[int] = []

    class Watched(preference_module.PreferenceTrainer):
        def update(self, examples: Any) -> Any:
            samples: list[Any] = []
            update = super().update
            peaks.append(measure_peak(lambda: samples.append(update(examples))))
            return samples[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preference_module, "PreferenceTrainer", Watched)
        train_on_rank(rank, world_size, overrides)
    return peaks[0]


def test_logits_of_a_long_pair_are_computed_in_chunks(task: Path, tmp_path: Path) -> None:
    """DPO on a pair of 2 x 4096 tokens holds less than its logits once; all at once, it would hold them three times."""
    vocab_size, length, chunk = 8192, 4096, 512
    sizes = dict(vocab_size=vocab_size, num_hidden_layers=1, max_position_embeddings=2 * length)
    save_tiny_model(tmp_path / "model", "qwen2", **sizes)
    (tmp_path / "model/tokenizer.model").write_bytes((task / "tokenizer.model").read_bytes())
    pair = {"prompt": "1+4=", "chosen": "5" * (length - 5), "rejected": "6" * (length - 5)}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    settings = [
        *(f"model.path={tmp_path}/model", "model.dtype=float32", f"data.train_files=[{tmp_path}/pairs.jsonl]"),
        *("data.train_batch_size=1", "trainer.total_steps=1", "trainer.save_freq=null", "data.max_prompt_length=8"),
        *(f"data.max_response_length={length}", f"actor.max_tokens_per_microbatch={2 * length + 8}"),
    ]
    chunked, whole = (
        run_ranks(
            _measure_update,
            1,
            [*settings, f"actor.logprob_chunk_tokens={tokens}", f"trainer.run_dir={tmp_path}/{tokens}"],
            timeout=200,
        )[0]
        for tokens in (chunk, 2 * length)
    )
    logits = 4 * vocab_size * 2 * length
    assert chunked < 0.6 * logits < 3 * logits < whole  # seen: 0.51 and 3.37


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (["preference.loss=dpoo"], 'preference.loss = "dpoo" is not known'),
        (["preference.loss=kto", "data.train_batch_size=1"], "data.train_batch_size = 1 with preference.loss"),
        (["algorithm.kl_coef=0.2"], "algorithm.kl_coef = 0.2 with preferences"),
        (["actor.step_mode=static"], "actor.step_mode = 'static' with preferences"),
        (["actor.share_prompts=tree"], "actor.share_prompts = 'tree' with pairs"),
        (["actor.max_tokens_per_microbatch=40"], "a pair may have 1 * data.max_prompt_length"),
        (["preference.label_smoothing=0.5"], "preference.label_smoothing"),
        (["preference.loss=bradley_terry", "preference.nll_coef=1"], "preference.nll_coef = 1.0 with preference"),
        (["preference.loss=kto", "preference.kto_weights=[1, -1]"], "preference.kto_weights = .1.0, -1.0. are no"),
        (["preference.loss=kto", "preference.kto_weights=[1]"], "preference.kto_weights = .1.0. are no"),
    ],
)
def test_what_cannot_work_is_refused(changes: list[str], found: str, task: Path) -> None:
    settings = [f"model.path={task}/model", f"data.train_files=[{task}/train.jsonl]", "data.train_batch_size=4"]
    lengths = ["data.max_prompt_length=16", "data.max_response_length=16"]
    with pytest.raises(UserError, match=found.replace("*", r"\*")):
        plan_preferences(load_config(None, [*settings, *lengths, *changes]).config, 1)


def test_the_plan_counts_both_responses(task: Path) -> None:
    settings: list[Any] = [f"model.path={task}/model", f"data.train_files=[{task}/train.jsonl]"]
    config = load_config(None, [*settings, "data.train_batch_size=4"]).config
    assert plan_preferences(config, 1, 16).rollouts_per_minibatch == 8
    assert SftPlan.build(config, 1, 16).rollouts_per_minibatch == 4


@pytest.mark.parametrize("is_rejection", [False, True], ids=["DPO", "rejection sampling"])
def test_the_online_loop_of_the_page_runs(is_rejection: bool, task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Its weights are the derivatives of the loss, which tests/algorithms/test_preference_losses.py checks."""
    (program,) = re.findall(r"```python\n(# online_dpo.*?)```", PAGE.read_text(), re.DOTALL)
    if is_rejection:
        (weights,) = re.findall(r"with `(weights\[.*?)` and nothing else", PAGE.read_text())
        zeros = "    weights = np.zeros_like(rewards)\n"
        program, count = re.subn(r" +gap = .*?-= pull\n", f"{zeros}    {weights}\n", program, flags=re.DOTALL)
        assert count == 1
    (tmp_path / "online_dpo.py").write_text(program)
    recipe = tmp_path / "recipe.yaml"
    settings = ["algorithm.kl_coef=0.1", "data.validation_files=[]", "actor.lr=1e-2", "preference.beta=0.5"]
    recipe.write_text(yaml.safe_dump(load_nested(overrides_for(task, tmp_path / "run", *settings))))
    result = fork_ranks(partial(run_script, tmp_path / "online_dpo.py", f"{task}/model", recipe), 1, tmp_path)
    assert_succeeded(result)
    norms = [float(x) for x in re.findall(r"'policy/grad_norm': ([0-9.e+-]+)", result.stdout)]
    rewards = [float(line.split()[1]) for line in result.stdout.splitlines() if "'policy/grad_norm'" in line]
    assert len(norms) == 4 and min(norms) > 0 and rewards[-1] > rewards[0]
