# SPDX-License-Identifier: Apache-2.0
"""The ladder of a first run on a GPU: it stops at a failure, with a sentence; the probes find planted faults.

A whole rehearsal of it is slow: about a dozen runs of the program. Not covered: a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl.models import attention_backends
from megatron_rl.run.loading import load_config
from tools import _gpu_probes as probes
from tools import first_gpu_run as ladder

ROOT = Path(__file__).resolve().parents[2]

FAULTY_GROUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from tools import _gpu_probes as probes
right = dist.all_reduce
def add(value, *arguments, **options):
    if dist.get_rank() == 1 and "group" in options:
        value += 4
    return right(value, *arguments, **options)
dist.all_reduce = add
sys.exit(probes.main("groups", False))
"""


def say(code: str, name: str = "rung", **options: object) -> ladder.Rung:
    return ladder.Rung(name, ["-c", code], "something else", **options)  # type: ignore[arg-type]


def test_ladder_stops_at_the_first_rung_that_breaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.md"
    rungs = [
        say("print('first said')", "first"),
        say("import sys; print('reading'); sys.exit('error: the weights are wrong')", "second"),
        say(f"open({str(tmp_path / 'reached')!r}, 'w')", "third"),
    ]
    found = ladder.climb(rungs, report, os.environ)
    assert found == "second: status 1: error: the weights are wrong. Try: something else."
    text = report.read_text()
    assert "1/3 first: holds" in text and "first said" in text and f"**{found}**" in text
    assert not (tmp_path / "reached").exists() and "third" not in text
    assert re.findall(r"(\d)/3 (\w+): (\w+)", capsys.readouterr().out) == [
        ("1", "first", "holds"),
        ("2", "second", "BREAKS"),
    ]


def test_hung_rung_and_wrong_numbers_break_it(tmp_path: Path) -> None:
    slow = say("import time; print('waiting for rank 1', flush=True); time.sleep(60)", seconds=3)
    found = ladder.climb([slow], tmp_path / "report.md", os.environ)
    assert found == "rung: no end after 3 s; last: waiting for rank 1. Try: something else."
    wrong = say("pass", check=lambda: "the loss is 3, and 2 on a CPU")
    assert ladder.climb([wrong], tmp_path / "report.md", os.environ) == (
        "rung: the loss is 3, and 2 on a CPU. Try: something else."
    )
    assert ladder.climb([say("pass")], tmp_path / "report.md", os.environ) is None


def test_sentence_is_about_what_happened(tmp_path: Path) -> None:
    """Not torchrun's last word."""
    said = "Traceback\n[rank1]: ValueError: a wrong shape\nraise ChildFailedError(\n====="
    assert ladder._describe_failure(1, said, 60) == "status 1: [rank1]: ValueError: a wrong shape"
    assert ladder._describe_failure(1, f"error: no disk\n{said}", 60) == "status 1: error: no disk"
    assert ladder._describe_failure(1, "", 60) == "status 1: it said nothing"


@pytest.mark.slow
def test_group_that_sums_wrong_stops_the_ladder(tmp_path: Path) -> None:
    """Both ranks take part in its rung; here the second of them adds something else in the group of TP."""
    faulty = tmp_path / "faulty.py"
    faulty.write_text(FAULTY_GROUP)
    torchrun = ladder._torchrun(2)
    reached = tmp_path / "reached"
    rungs = [
        ladder.Rung("groups", [*torchrun, "tools/_gpu_probes.py", "groups"], "nothing"),
        ladder.Rung("faulty groups", [*torchrun, str(faulty)], "another cable"),
        say(f"open({str(reached)!r}, 'w')", "after"),
    ]
    found = ladder.climb(rungs, tmp_path / "report.md", os.environ)
    assert found == (
        "faulty groups: status 1: error: an all-reduce over tp [0, 1] gave 5.0 instead of 1. Try: another cable."
    )
    assert "1/3 groups: holds" in (tmp_path / "report.md").read_text() and not reached.exists()


@pytest.mark.slow
def test_contest_without_trl_breaks_its_rung(tmp_path: Path) -> None:
    """The Python that is named has none; its own words are in the sentence."""
    faulty = tmp_path / "python"
    faulty.write_text("#!/bin/sh\necho ModuleNotFoundError: no trl >&2\nexit 1\n")
    faulty.chmod(0o755)
    rung = next(one for one in ladder.list_rungs(tmp_path, 1, True, str(faulty)) if one.name == "step against TRL")
    found = ladder.climb([rung], tmp_path / "report.md", os.environ | {"OMP_NUM_THREADS": "1"})
    assert found is not None and found.startswith("step against TRL: status 2: error: the process of trl ended")
    assert "ModuleNotFoundError: no trl" in (tmp_path / "report.md").read_text()


def test_steps_are_compared_with_those_of_a_cpu(tmp_path: Path) -> None:
    steps = json.loads(ladder.NUMBERS.read_text())["steps"]
    assert len(steps) == 3 and all(set(step) == {"sft/loss", "policy/grad_norm"} for step in steps)
    check = ladder._Comparison(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert check() is None
    steps[1]["policy/grad_norm"] *= 1.01
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert str(check()).startswith("policy/grad_norm of step 2 is ")


def test_probes_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, and attention against the committed numbers; a scale that is forgotten is seen."""
    assert probes.probe_products()["torch.float32 error"] < 1e-5
    found = probes.probe_attention()
    assert found["sdpa torch.float32 error"] < 1e-5 < found["sdpa torch.bfloat16 error"]
    right = attention_backends._BACKENDS["sdpa"]
    wrong = {"sdpa": lambda query, key, value, segments, scale: right(query, key, value, segments, 1.05 * scale)}
    monkeypatch.setattr(attention_backends, "_BACKENDS", wrong)
    with pytest.raises(probes.WrongAnswer, match="attention by sdpa in torch.float32 is off by"):
        probes.probe_attention()


def test_machine_without_a_gpu_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "tools/_gpu_probes.py", "machine"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "sees no GPU" in done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build, which a rehearsal refuses")
def test_a_pretended_gpu_is_described() -> None:
    done = subprocess.run([sys.executable, "tools/_gpu_probes.py", "machine", "--pretend"], cwd=ROOT, stdout=-1)
    assert done.returncode == 0 and json.loads(done.stdout)["GPU 7"] == "no GPU, sm_90, 80.0 GiB"


def test_names_of_rungs(tmp_path: Path) -> None:
    """A GPU and a rehearsal climb the same ladder."""
    real, rehearsed = (ladder.list_rungs(tmp_path, 2, is_rehearsal, "python") for is_rehearsal in (False, True))
    names = [rung.name for rung in real]
    assert names == [rung.name for rung in rehearsed] and len(names) >= 20
    assert "two ranks" in names and names[-1] == "step against TRL"
    alone = [rung.name for rung in ladder.list_rungs(tmp_path, 1, False)]
    of_two = ["two ranks", "engine on two ranks", "fused sums"]
    assert [name for name in names if name not in alone] == [*of_two, "step against TRL"]
    assert all(rung.advice for rung in real)


def test_each_default_of_vllm_is_switched_on_by_itself(tmp_path: Path) -> None:
    """As vLLM reads it: the first rollout has none of them, and each rung after it one more than that."""
    from vllm.engine.arg_utils import EngineArgs

    found = {}
    for rung in ladder.list_rungs(tmp_path, 2, True):
        if "launch/pretrain_grpo.py" in rung.command:
            recipe = rung.command.index("launch/pretrain_grpo.py") + 1
            settings = [part for part in rung.command[recipe + 1 :] if "=" in part]
            found[rung.name] = load_config(ROOT / rung.command[recipe], settings).config.rollout
    first = found.pop("rollout and switch")
    assert first.enforce_eager and not first.async_scheduling and first.model_runner == "v1"
    assert first.engine_options == {"enable_flashinfer_autotune": False}
    assert not found["compiled engine"].enforce_eager and found["async scheduling"].async_scheduling
    assert found["model runner v2"].model_runner == "v2"
    assert found["autotuned kernels"] == replace(first, engine_options={"enable_flashinfer_autotune": True})
    for name, is_fused in (("engine on two ranks", False), ("fused sums", True)):
        assert found[name].tensor_model_parallel_size == 2 and not found[name].enforce_eager
        compilation = EngineArgs(model=str(tmp_path), **found[name].engine_options).compilation_config
        assert compilation.pass_config.fuse_allreduce_rms is is_fused
    assert ladder.main(["--from", "nothing", "--work", str(tmp_path)]) == 2


@pytest.mark.slow
def test_whole_ladder_is_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, "tools/first_gpu_run.py", "--rehearse", "--work", str(tmp_path / "work")]
    command += ["--trl-python", os.environ["TRL_PYTHON"]] if "TRL_PYTHON" in os.environ else []
    report = tmp_path / "report.md"
    done = subprocess.run([*command, "--report", str(report)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "all rungs hold" in done.stdout, done.stdout + report.read_text()
