# SPDX-License-Identifier: Apache-2.0
"""The ladder of a first run on a GPU: a rung that breaks is a sentence and takes along those that need it; the probes
find planted faults.

A whole rehearsal of it is slow: about a dozen runs of the program. Not covered: a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.models import attention
from megatron_rl.run.loading import load_config
from tools import _gpu_figures as figures
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


def test_ladder_goes_on_without_the_rungs_that_need_a_broken_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.md"
    rungs = [
        say("print('first said')", "first", figures=lambda said: [("words", str(len(said.split())))]),
        say("import sys; print('reading'); sys.exit('error: the weights are wrong')", "second"),
        say(f"open({str(tmp_path / 'reached')!r}, 'w')", "third", needs=["first", "second"]),
        say("pass", "fourth", needs=["third"]),
        say("pass", "fifth", packages=["no-such.thing", "megatron-core", "json.nothing"], needs=["second"]),
        say("pass", "sixth", packages=["megatron-core"], needs=["not listed"]),
    ]
    found = ladder.climb(rungs, report, os.environ)
    assert found == ["second: status 1: error: the weights are wrong. Try: something else."]
    assert not (tmp_path / "reached").exists()
    out, text = capsys.readouterr().out, report.read_text()
    assert re.findall(r"(\d)/6 (\w+): (\w+)", out) == re.findall(r"(\d)/6 (\w+): (\w+)", text)
    assert re.findall(r"(\d)/6 (\w+): (\w+)", out) == [
        ("1", "first", "holds"),
        ("2", "second", "BREAKS"),
        ("6", "sixth", "holds"),
    ]
    assert "first said" in text and f"**{found[0]}**" in text
    for said in (out, text):
        lost = ["third (needs second)", "fourth (needs third)", "fifth (needs no-such.thing, json.nothing)"]
        assert re.findall(r"left out: (.*)", said) == lost
        end = "| first | words | 2 |\n\n2 hold, 1 break, 3 left out\n\n" + found[0]
        assert said.strip().endswith(end)


def test_hung_rung_and_wrong_numbers_break_it(tmp_path: Path) -> None:
    slow = say("import time; print('waiting for rank 1', flush=True); time.sleep(60)", seconds=3)
    found = ladder.climb([slow], tmp_path / "report.md", os.environ)
    assert found == ["rung: no end after 3 s; last: waiting for rank 1. Try: something else."]
    wrong = say("pass", check=lambda: "the loss is 3, and 2 on a CPU")
    assert ladder.climb([wrong], tmp_path / "report.md", os.environ) == [
        "rung: the loss is 3, and 2 on a CPU. Try: something else."
    ]
    assert ladder.climb([say("pass")], tmp_path / "report.md", os.environ) == []


def test_sentence_is_about_what_happened(tmp_path: Path) -> None:
    """Not torchrun's last word."""
    said = "Traceback\n[rank1]: ValueError: a wrong shape\nraise ChildFailedError(\n====="
    assert ladder._describe_failure(1, said, 60) == "status 1: [rank1]: ValueError: a wrong shape"
    assert ladder._describe_failure(1, f"error: no disk\n{said}", 60) == "status 1: error: no disk"
    assert ladder._describe_failure(1, "", 60) == "status 1: it said nothing"


@pytest.mark.slow
def test_group_that_sums_wrong_breaks_its_rung(tmp_path: Path) -> None:
    """Both ranks take part in it; here the second of them adds something else in the group of TP."""
    faulty = tmp_path / "faulty.py"
    faulty.write_text(FAULTY_GROUP)
    torchrun = ladder._torchrun(2)
    rungs = [
        ladder.Rung("groups", [*torchrun, "tools/_gpu_probes.py", "groups"], "nothing", figures=figures.read_probe),
        ladder.Rung("faulty groups", [*torchrun, str(faulty)], "another cable"),
    ]
    found = ladder.climb(rungs, tmp_path / "report.md", os.environ)
    assert found == [
        "faulty groups: status 1: error: an all-reduce over tp [0, 1] gave 5.0 instead of 1. Try: another cable."
    ]
    report = (tmp_path / "report.md").read_text()
    assert "1/2 groups: holds" in report and re.search(r"\| groups \| all-reduce \| [\d.]+ GB/s \|", report)


@pytest.mark.slow
def test_contest_without_trl_breaks_its_rung(tmp_path: Path) -> None:
    """The Python that is named has none; its own words are in the sentence."""
    faulty = tmp_path / "python"
    faulty.write_text("#!/bin/sh\necho ModuleNotFoundError: no trl >&2\nexit 1\n")
    faulty.chmod(0o755)
    rung = next(one for one in ladder.list_rungs(tmp_path, 1, True, str(faulty)) if one.name == "step against TRL")
    found = ladder.climb([rung], tmp_path / "report.md", os.environ | {"OMP_NUM_THREADS": "1"})
    assert found[0].startswith("step against TRL: status 2: error: the process of trl ended")
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
    right = attention._attend_sdpa
    monkeypatch.setattr(attention, "_attend_sdpa", lambda *args: right(*args[:4], 1.05 * args[4], args[5]))
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
    """A GPU and a rehearsal climb the same ladder; what a rung needs comes before it."""
    real, rehearsed = (ladder.list_rungs(tmp_path, 2, is_rehearsal, "python") for is_rehearsal in (False, True))
    names = [rung.name for rung in real]
    assert names == [rung.name for rung in rehearsed] and len(names) == len({*names}) == 25
    alone = [rung.name for rung in ladder.list_rungs(tmp_path, 1, False)]
    assert [name for name in names if name not in alone] == ["two ranks", "engine on two ranks", "fused sums"]
    assert all(rung.advice for rung in real)
    for number, rung in enumerate(real):
        assert {*rung.needs} <= {*names[:number]} and bool(rung.needs) is bool(number)
    assert "trl" not in real[-1].packages and "trl" in ladder.list_rungs(tmp_path, 1, False)[-1].packages


def read_loops(work: Path, is_rehearsal: bool) -> dict[str, tuple[ladder.Rung, RunConfig]]:
    """Return the rungs of the whole loop on up to two ranks, and their configs."""
    found = {}
    for rung in ladder.list_rungs(work, 2, is_rehearsal):
        if "launch/pretrain_grpo.py" in rung.command:
            recipe = rung.command.index("launch/pretrain_grpo.py") + 1
            settings = [part for part in rung.command[recipe + 1 :] if "=" in part]
            found[rung.name] = rung, load_config(ROOT / rung.command[recipe], settings).config
    return found


def test_loops_without_vllm(tmp_path: Path) -> None:
    """Only these are climbed where vLLM is missing."""
    loops = {name: pair for name, pair in read_loops(tmp_path, False).items() if "vllm" not in pair[0].packages}
    engines = {name: config.rollout.engine for name, (_, config) in loops.items()}
    assert engines == {
        "loop without vLLM": "megatron",
        "loop with transformers": "hf",
        "graph step, bfloat16 loop": "megatron",
    }
    for name, (rung, config) in loops.items():
        assert config.hybrid.verify == "full" and "megatron-core" in rung.packages
        assert config.trainer.run_dir == str(tmp_path / name)
    _, graph = loops["graph step, bfloat16 loop"]
    assert graph.model.dtype == "bfloat16" and graph.actor.step_mode == "graph"


def test_each_default_of_vllm_is_switched_on_by_itself(tmp_path: Path) -> None:
    """As vLLM reads it: the first rollout has none of them, and each rung after it one more than that."""
    from vllm.engine.arg_utils import EngineArgs

    loops = read_loops(tmp_path, True)
    found = {name: config.rollout for name, (rung, config) in loops.items() if "vllm" in rung.packages}
    first = found.pop("rollout and switch")
    assert first.enforce_eager and first.model_runner == "v1"
    assert first.engine_options == {"enable_flashinfer_autotune": False}
    assert not found["compiled engine"].enforce_eager and found["async scheduling"].engine_options["async_scheduling"]
    assert found["model runner v2"].model_runner == "v2"
    assert found["autotuned kernels"] == replace(first, engine_options={"enable_flashinfer_autotune": True})
    for name, is_fused in (("engine on two ranks", False), ("fused sums", True)):
        assert found[name].tensor_model_parallel_size == 2 and not found[name].enforce_eager
        compilation = EngineArgs(model=str(tmp_path), **found[name].engine_options).compilation_config
        assert compilation.pass_config.fuse_allreduce_rms is is_fused


@pytest.mark.parametrize("argument", ["--from", "--skip"])
def test_unknown_rung_is_named_before_anything_is_removed(
    argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ladder.main([argument, "nothing", "--work", str(tmp_path)]) == 2
    assert tmp_path.exists() and "no rung nothing; expected of: machine; " in capsys.readouterr().err


def test_skipped_rung_counts_as_holding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rungs = [say("1 / 0", "machine", needs=()), say("pass", "products"), say("1 / 0", "memory")]
    monkeypatch.setattr(ladder, "list_rungs", lambda *_: rungs)
    report = tmp_path / "report.md"
    paths = ["--work", str(tmp_path / "work"), "--report", str(report)]
    assert ladder.main([*paths, "--skip", "machine", "memory"]) == 0
    assert "1 hold, 0 break, 0 left out" in report.read_text()
    assert ladder.main(paths) == 1 and "left out: products (needs machine)" in report.read_text()


def test_figures_are_read_from_what_rungs_wrote(tmp_path: Path) -> None:
    said = 'warning\n{\n  "torch.float32 error": 1e-07,\n  "bfloat16 TFLOP/s": 712.3456\n}\n'
    assert figures.read_probe(said) == [("bfloat16", "712.3 TFLOP/s")]
    assert figures.read_probe("{}") == []
    row = {"shape": "100m", "size": 256, "milliseconds": 8.0, "mfu": 0.25, "speedup": 1.0, "difference": 0.0}
    rows = [row | {"mode": "eager"}, row | {"mode": "graph", "milliseconds": 2.0, "mfu": 1.0, "speedup": 4.0}]
    (tmp_path / "step.json").write_text(json.dumps({"rows": rows}))
    assert figures.read_speeds(tmp_path / "step.json") == [
        ("100m, 256 tokens, eager", "8 ms, mfu 0.250"),
        ("100m, 256 tokens, graph", "2 ms, mfu 1.000, 4.00 times as fast as eager, gradients' norm 0 from its"),
    ]
    (tmp_path / "switch.json").write_text(json.dumps({"bytes_total": 3e9, "seconds": 2.0}))
    assert figures.read_switch(tmp_path / "switch.json") == [("weights in the host's memory", "1.5 GB/s")]
    steps = [{"tokens/response": 1000, "time/rollout": seconds} for seconds in (9.0, 0.5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert figures.read_rollout(tmp_path) == [("sampled in the last rollout", "2,000 tokens/s")]


@pytest.mark.slow
def test_whole_ladder_is_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, "tools/first_gpu_run.py", "--rehearse", "--work", str(tmp_path / "work")]
    command += ["--trl-python", os.environ["TRL_PYTHON"]] if "TRL_PYTHON" in os.environ else []
    report = tmp_path / "report.md"
    done = subprocess.run([*command, "--report", str(report)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " hold, 0 break, " in done.stdout, done.stdout + report.read_text()
    lost = [] if find_spec("transformer_engine") else ["layers of Transformer Engine (needs transformer_engine)"]
    lost += [] if "TRL_PYTHON" in os.environ or find_spec("trl") else ["step against TRL (needs trl)"]
    assert re.findall(r"left out: (.*)", done.stdout) == lost
    measured = {"loop without vLLM", "two ranks", "speed of a step", "speed of the switch"}
    assert measured <= {*re.findall(r"^\| ([^|]+) \|", done.stdout, re.MULTILINE)}
