# SPDX-License-Identifier: Apache-2.0
"""The check of verl's example scripts, on small scripts instead of a checkout.

Not covered: verl's own scripts; `python tools/check_verl_scripts.py CHECKOUT` runs them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.check_verl_scripts import main

# Arrays, an unset variable, a probe of the interpreter, and a launcher in front of the program, as verl's have them.
GOOD = """\
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
ulimit -n 1048576
DATA=(data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']" data.train_batch_size=64)
LAUNCH=(uv run --extra vllm python3)
echo "$DATASETS" > written_here
"${LAUNCH[@]}" -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer' "${DATA[@]}" \\
    actor_rollout_ref.model.path=policy actor_rollout_ref.rollout.name=vllm algorithm.adv_estimator=grpo \\
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.device=$DEVICE "$@"
"""
BAD = """\
python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.train_batch_size=256 \\
    actor_rollout_ref.model.path=policy actor_rollout_ref.rollout.name=trtllm actor_rollout_ref.actor.new_name=1
"""
FOLDED = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=policy {}\n"
# Four ranks, of which two share a sequence, and the arguments behind those that the script takes.
TUNING = """\
torchrun --nproc_per_node=$1 -m verl.trainer.sft_trainer data.train_files=a.parquet data.messages_key=messages \\
    engine=fsdp engine.ulysses_sequence_parallel_size=2 model=hf_model model.path=policy trainer.default_local_dir=$2 $@
"""
SCRIPTS = {
    "examples/sft/tuning.sh": TUNING,
    "examples/sft/too_long.sh": TUNING.replace("$@", "data.max_length=32768"),
    "examples/good.sh": GOOD,
    "recipe/dapo/bad.sh": BAD,
    "examples/refused.sh": FOLDED.format("actor_rollout_ref.rollout.multi_turn.enable=true"),
    "examples/run_qwen_vl_7b.sh": FOLDED.format(""),
    "examples/run_npu.sh": FOLDED.format(""),
    "recipe/own.sh": FOLDED.format("").replace("verl.trainer.main_ppo", "recipe.own.main"),
    "recipe/prepare.sh": "python3 prepare.py --out x\n",
}


def test_scripts_are_run_and_sorted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in SCRIPTS.items():
        path = tmp_path / "verl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert main([str(tmp_path / "verl"), "--json", str(tmp_path / "out.json")]) == 1
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "accepted": ["examples/good.sh", "examples/sft/tuning.sh"],
        "refused_for_capability": ["examples/refused.sh", "examples/sft/too_long.sh"],
        "unknown": ["recipe/dapo/bad.sh"],
    }
    text = capsys.readouterr().out
    assert "9 scripts, 5 of text on GPUs: 2 accepted, 2 refused, 1 with unknown names" in text
    table = text.partition("scripts, by missing capability:\n")[2].partition("\n\n")[0].splitlines()
    assert sorted(table) == [
        "   1 loader for verl's classes of tools and agent loops",
        "   1 no capability: see the reason above",
    ]
    assert "   1 actor_rollout_ref.actor.new_name" in text and "'trtllm' is not known" in text
    reasons = {line.split(" (")[0].split("/")[-1]: line.rpartition(" (")[2][:-1] for line in text.splitlines()[:16]}
    assert reasons["run_qwen_vl_7b.sh"] == "not text alone" and reasons["run_npu.sh"] == "for an NPU"
    assert reasons["own.sh"] == "a program of its own" and reasons["prepare.sh"] == "starts no trainer"
    assert sorted(path.name for path in (tmp_path / "verl").iterdir()) == ["examples", "recipe"]


def test_without_a_checkout_it_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and "skipped: no checkout" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2 and "there are no scripts" in capsys.readouterr().err
