# SPDX-License-Identifier: Apache-2.0
"""Runs that learn from teachers: of another architecture, in layouts and on ranks of their own, one and several.

Divergences and their gradients are held against float64 loops in tests/parallel/test_chunked_divergence.py. Not
covered: GPUs, and how much is learned (docs/distillation.md has figures).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from distributed import run_ranks
from megatron_rl.run.inputs import read_rl_inputs
from megatron_rl.run.loading import load_config
from megatron_rl.run.opening import find_dependencies
from megatron_rl.types import UserError
from rl_runs import make_task, overrides_for, read_records, train
from tiny_models import ENGINE_SIZES, save_tiny_model

ALONE = ["rollout.engine=hf", "data.validation_files=[]", "algorithm.adv_estimator=distill", "algorithm.kl_coef=0"]
KINDS = {
    "sampled": [],
    "top_k": ["algorithm.distillation.kind=top_k", "algorithm.distillation.k=4"],
    "forward top_k": [
        "algorithm.distillation.kind=top_k",
        "algorithm.distillation.k=4",
        "algorithm.distillation.direction=forward",
    ],
    "full": ["algorithm.distillation.kind=full"],
}
LAYOUTS = {
    # Actor, teacher, ranks.
    "tensor and context": (
        4,
        [
            "actor.tensor_model_parallel_size=2",
            "actor.sequence_parallel=true",
            "actor.context_parallel_size=2",
            "teachers.wide.pipeline_model_parallel_size=2",
            "teachers.wide.max_tokens_per_microbatch=48",
            "teachers.wide.offload=true",
        ],
    ),
    "pipeline, apart": (
        4,
        [
            "actor.pipeline_model_parallel_size=2",
            "actor.step_mode=static",
            "teachers.wide.tensor_model_parallel_size=2",
            "teachers.wide.sequence_parallel=true",
            "placement.actor=0-1",
            "placement.teachers.wide=2-3",
            "placement.rollout=2-3",
        ],
    ),
}


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task of sixteen sums in two data sources, and two teachers."""
    directory = tmp_path_factory.mktemp("lesson")
    make_task(directory)
    vocab = json.loads((directory / "model/config.json").read_text())["vocab_size"]
    wide = dict(hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    save_tiny_model(directory / "wide", "qwen3", vocab_size=vocab, num_hidden_layers=2, **wide)
    save_tiny_model(directory / "other", "qwen2", **ENGINE_SIZES, vocab_size=vocab, num_hidden_layers=4)
    for name in ("wide", "other"):
        shutil.copy(directory / "tokenizer.model", directory / name)
    rows = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
    rows = [row | {"data_source": "plus" if i % 4 else "rare"} for i, row in enumerate(rows)]
    (directory / "sources.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def run(lesson: Path, run_dir: Path, world_size: int, *extra: str) -> list[dict]:
    """Train, and return the records."""
    overrides = overrides_for(lesson, run_dir, *ALONE, *extra)
    assert run_ranks(train, world_size, overrides, timeout=150) == [None] * world_size
    return [record for record in read_records(run_dir) if "policy/grad_norm" in record]


def read_weights(run_dir: Path) -> dict:
    return load_file(run_dir / "checkpoints/latest/huggingface/model.safetensors")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "full")) for kind in KINDS])
def test_every_layout_gives_the_numbers_of_one_rank(kind: str, lesson: Path, tmp_path: Path) -> None:
    """The policy comes closer to a teacher of another family and width, which may live anywhere."""
    settings = [f"teachers.wide.path={lesson}/wide", *KINDS[kind], "trainer.total_steps=3"]
    expected = run(lesson, tmp_path / "one", 1, *settings)
    assert all(record["policy/grad_norm"] > 1e-3 for record in expected)
    if kind != "sampled":  # an estimate from 32 responses to other prompts in each step
        assert expected[-1]["distill/kl"] < 0.6 * expected[0]["distill/kl"] > 0
    for name, (world_size, layout) in LAYOUTS.items():
        found = run(lesson, tmp_path / name, world_size, *settings, *layout)
        for before, after in zip(expected, found, strict=True):
            for key in ("distill/kl", "policy/grad_norm", "policy/loss", "reward/mean"):
                assert after[key] == pytest.approx(before[key], rel=2e-4, abs=1e-6), (name, key)
        theirs = read_weights(tmp_path / name)
        gaps = [(theirs[key] - value).abs().max() for key, value in read_weights(tmp_path / "one").items()]
        assert float(max(gaps)) < 2e-4, name


@pytest.mark.slow
def test_a_teacher_twice_is_the_teacher_once(lesson: Path, tmp_path: Path) -> None:
    """Bit for bit: metrics and weights. A term beside rewards; then a teacher of weight 0 changes nothing."""
    beside = ["algorithm.adv_estimator=grpo", "algorithm.distillation.coef=0.3", f"teachers.one.path={lesson}/wide"]
    twice = [f"teachers.two.path={lesson}/wide", "teachers.one.weight=0.3", "teachers.two.weight=0.6"]
    once, both = run(lesson, tmp_path / "once", 2, *beside), run(lesson, tmp_path / "both", 2, *beside, *twice)
    for before, after in zip(once, both, strict=True):
        assert after.pop("distill/one") == after.pop("distill/two") == before["distill/kl"]
        assert {**after, "samples/bytes_per_rank": 0} == {**before, "samples/bytes_per_rank": 0}
    theirs = read_weights(tmp_path / "both")
    assert all(value.equal(theirs[name]) for name, value in read_weights(tmp_path / "once").items())
    silent = run(lesson, tmp_path / "silent", 2, *beside, "algorithm.distillation.coef=0")
    alone = run(lesson, tmp_path / "alone", 2, "algorithm.adv_estimator=grpo", "algorithm.old_logprobs=recompute")
    for before, after in zip(alone, silent, strict=True):
        assert after.pop("distill/kl") != 0
        assert {**after, "samples/bytes_per_rank": 0} == {**before, "samples/bytes_per_rank": 0}


@pytest.mark.parametrize("sampling", [[], ["rollout.top_k=3"]])
def test_the_policy_as_its_own_teacher_has_nothing_to_say(sampling: list[str], lesson: Path, tmp_path: Path) -> None:
    """Also with tokens drawn from truncated sets: both score over these. Before the first step, to the last bit."""
    settings = [f"teachers.self.path={lesson}/model", "trainer.total_steps=1", "actor.ppo_mini_batch_size=8"]
    (record,) = run(lesson, tmp_path / "run", 2, *settings, *sampling)
    assert record["distill/kl"] == 0 == record["policy/grad_norm"]


@pytest.mark.parametrize("kind", ["top_k", pytest.param("sampled", marks=pytest.mark.slow)])
def test_a_column_chooses_the_teacher(kind: str, lesson: Path, tmp_path: Path) -> None:
    """Two names of one teacher give the numbers of one; other teachers others. A step may have no prompt for one."""
    settings = [f"data.train_files=[{lesson}/sources.jsonl]", *KINDS[kind], "actor.ppo_mini_batch_size=8"]
    settings += ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "trainer.total_steps=4"]
    chosen = [
        "algorithm.distillation.choose_by=data_source",
        f"teachers.often.path={lesson}/wide",
        "teachers.often.values=[plus]",
        "teachers.rare.max_tokens_per_microbatch=64",
    ]
    one = run(lesson, tmp_path / "one", 2, *settings, f"teachers.wide.path={lesson}/wide")
    same = run(lesson, tmp_path / "same", 2, *settings, *chosen, f"teachers.rare.path={lesson}/wide")
    other = run(lesson, tmp_path / "other", 2, *settings, *chosen, f"teachers.rare.path={lesson}/other")
    for before, after in zip(one, same, strict=True):
        for key in ("distill/kl", "policy/grad_norm", "policy/loss"):
            assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-6)
    assert other[-1]["distill/kl"] != pytest.approx(one[-1]["distill/kl"], rel=1e-2)
    if kind == "sampled":
        asked = [{"distill/rare", "distill/often"} & record.keys() for record in other]
        assert {"distill/often"} in asked and any("distill/rare" in names for names in asked)


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        (
            ["algorithm.distillation.choose_by=data_source", "teachers.math.values=[plus]"],
            "'rare' of prompt_id 0 names no",
        ),
        (
            ["teachers.math.path={lesson}/foreign"],
            "of the policy's tokens have other ids in the tokenizer of teacher math",
        ),
        (["teachers.math.tensor_model_parallel_size=3"], "is no multiple of tp"),
        (["teachers.math.max_tokens_per_microbatch=8"], "does not fit into teachers.math.max_tokens_per_microbatch 8"),
        (["algorithm.distillation.direction=forward"], "tokens of the policy give the reverse divergence"),
        (["teachers.code.path={lesson}/other", "algorithm.distillation.kind=top_k"], "with 2 teachers at once"),
        (["placement.teachers.code=0"], "placement.teachers = {{'code': 0}} names 'code'"),
        (["teachers.math.pth=x"], "unknown setting 'teachers.math.pth'"),
    ],
)
def test_what_is_refused_before_anything_is_built(extra: list[str], found: str, lesson: Path, tmp_path: Path) -> None:
    foreign = lesson / "foreign"
    if not foreign.exists():
        shutil.copytree(lesson / "wide", foreign)
        data = (foreign / "tokenizer.model").read_bytes()
        (foreign / "tokenizer.model").write_bytes(data.replace(b"\x0a\x017", b"\x0a\x01x", 1))
    overrides = overrides_for(
        lesson,
        tmp_path,
        *ALONE,
        f"data.train_files=[{lesson}/sources.jsonl]",
        f"teachers.math.path={lesson}/wide",
        *(text.format(lesson=lesson) for text in extra),
    )
    with pytest.raises(UserError) as caught:
        read_rl_inputs(load_config(None, overrides).config, 2)
    assert found.format() in str(caught.value)


def test_a_checkpoint_depends_on_its_teachers(lesson: Path, tmp_path: Path) -> None:
    """Weights that have changed are found when a run is resumed."""
    digests = set()
    for name in ("wide", "other", "wide"):
        overrides = overrides_for(lesson, tmp_path, *ALONE, f"teachers.math.path={lesson}/{name}")
        digests.add(find_dependencies(load_config(None, overrides).config)["teachers"]["digest"])
    assert len(digests) == 2


def test_distillation_without_a_teacher_is_refused(lesson: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without a teacher"):
        load_config(None, overrides_for(lesson, tmp_path, *ALONE))
