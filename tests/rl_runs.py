# SPDX-License-Identifier: Apache-2.0
"""A task of sixteen sums, and runs of the whole program on it from inside a test."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import yaml

import megatron_rl.run.grpo as trainer_module  # heavy imports once, in the parent
import megatron_rl.run.sft as sft_module
from megatron_rl.engines.vllm.vllm_library import prepare_vllm
from megatron_rl.observability import curves
from megatron_rl.observability.metrics import find_metric
from megatron_rl.run.inputs import Parts
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from tiny_models import ENGINE_SIZES, save_tiny_model
from tools.planning.automatic import choose_layout

PARTS = Parts(choose_layout=choose_layout)


def make_task(directory: Path, tags: Sequence[str] = ()) -> None:
    """Write sixteen sums, a character tokenizer, a random model that fits it, and reward functions.

    Of tags, which are tokens too, the first one ends each prompt.
    """
    rows = [{"prompt": f"{a}+{a + 3}={''.join(tags[:1])}", "answer": str(2 * a + 3)} for a in range(16)]
    for name in ("train", "validation"):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(f"{r['prompt']}{r['answer']}" for r in rows))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "tokenizer"),
        model_type="char",
        vocab_size=16 + len(tags),
        user_defined_symbols=[*tags],
        add_dummy_prefix=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    vocab = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model")).vocab_size()
    save_tiny_model(directory / "model", "qwen2", **ENGINE_SIZES, vocab_size=vocab, num_hidden_layers=2)
    (directory / "model" / "tokenizer.model").write_bytes((directory / "tokenizer.model").read_bytes())
    # Any digit is worth something, so that rewards differ inside a group.
    (directory / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    digits = sum(c.isdigit() for c in solution_str)\n"
        "    return {'score': digits / 8.0, 'digits': digits}\n"
        "def broken(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1 / (0 if ground_truth == '17' else 1)\n"
    )


def overrides_for(task: Path, run_dir: Path, *extra: str) -> list[str]:
    """Command line of a run on the task."""
    return [
        f"model.path={task}/model",
        "model.dtype=float32",
        f"data.train_files=[{task}/train.jsonl]",
        f"data.validation_files=[{task}/validation.jsonl]",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "rollout.n=4",
        "rollout.max_num_seqs=32",
        "actor.ppo_mini_batch_size=4",
        "actor.max_tokens_per_microbatch=128",
        "actor.lr=1e-3",
        "algorithm.kl_coef=0.01",
        "trainer.total_steps=2",
        f"reward.function={task}/reward.py:score",
        f"trainer.run_dir={run_dir}",
        *extra,
    ]


def load_nested(overrides: list[str]) -> dict[str, dict[str, Any]]:
    """The sections of an override list, as a recipe has them."""
    nested: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, _, text = override.partition("=")
        section, _, leaf = name.partition(".")
        nested.setdefault(section, {})[leaf] = float(text) if text == "1e-3" else yaml.safe_load(text)
    return nested


def layout_overrides(tp: int, pp: int, rollout_tp: int) -> list[str]:
    """Command line of a layout; sequence parallelism wherever there is tensor parallelism."""
    return [
        f"actor.tensor_model_parallel_size={tp}",
        f"actor.pipeline_model_parallel_size={pp}",
        f"rollout.tensor_model_parallel_size={rollout_tp}",
        f"actor.sequence_parallel={str(tp > 1).lower()}",
    ]


def leave_out_curves() -> None:
    """Let runs in this process draw no curves.png, which takes as long as all else of a small run."""
    curves.plot_curves = lambda run_dir: run_dir / curves.CURVES_FILE


def train(rank: int, world_size: int, overrides: Sequence[str], draws: bool = False) -> str | None:
    """One rank of the program, as the entry point runs it, without its picture but for `draws`.

    Returns the error's text, if any.
    """
    if not draws:
        leave_out_curves()
    os.environ["WORLD_SIZE"] = str(world_size)
    try:
        trainer_module.Trainer.from_config(load_config(None, overrides).config, parts=PARTS).train()
    except UserError as error:
        return str(error)
    return None


def fine_tune(rank: int, world_size: int, overrides: Sequence[str]) -> None:
    """One rank of supervised fine-tuning, without its picture."""
    leave_out_curves()
    os.environ["WORLD_SIZE"] = str(world_size)
    sft_module.train_sft(load_config(None, overrides).config, None)


def sft_overrides(task: Path, *extra: str) -> list[str]:
    """Command line of supervised fine-tuning on the task."""
    return [
        f"model.path={task}/model",
        "model.dtype=float32",
        f"data.train_files=[{task}/train.jsonl]",
        "data.train_batch_size=6",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "trainer.total_steps=4",
        "actor.lr=1e-3",
        *extra,
    ]


def import_engine() -> None:
    """Import vllm and the lazy imports of a run; forked ranks inherit all of it."""
    prepare_vllm(torch.device("cpu"))
    for name in (
        "entrypoints.launchers.cli_args",
        "model_executor.layers.quantization.online.base",
        "model_executor.models.qwen2",
        "model_executor.models.qwen3",
        "model_executor.models.llama",
        "v1.attention.backends.cpu_attn",
        "v1.core.sched.scheduler",
    ):
        importlib.import_module(f"vllm.{name}")
    for name in ("figure", "projections", "backends.backend_agg"):  # of the picture of a run
        importlib.import_module(f"matplotlib.{name}")
    # An engine puts these in place when it is built, by a pass over all modules that takes most of its start.
    current_platform = importlib.import_module("vllm.platforms").current_platform
    if "_overrides_are_here" not in vars(type(current_platform)):  # as an attribute it has any name
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
        type(current_platform)._overrides_are_here = True


def read_log(run_dir: Path) -> str:
    """Return the messages of rank 0's log in one line, without their times and line breaks."""
    lines = (run_dir / "logs/rank0.log").read_text().splitlines()
    return " ".join(line.partition(" megatron_rl: ")[2].strip() for line in lines)


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without clock and allocator metrics; every metric must be documented."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    unnamed = {key for record in records for key in record if key != "step" and find_metric(key) is None}
    assert not unnamed, f"{unnamed}: give them rows in megatron_rl/observability/metrics.py"
    measured = ("time/", "memory/", "tokens/per_second", "throughput/", "mfu/", "schedule/engine_busy")
    measured += ("agents/environment_seconds", "agents/wait_share")
    return [{k: v for k, v in record.items() if not k.startswith(measured)} for record in records]
