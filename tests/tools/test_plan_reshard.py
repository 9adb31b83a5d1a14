# SPDX-License-Identifier: Apache-2.0
"""The planning tool: numbers in the file, a table on the screen, one clear error and exit code 2 for bad input."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "plan_reshard.py"
SHAPES = ROOT / "docs" / "shapes"
CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 500,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("tools.plan_reshard")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def run(tool: ModuleType, config: Path, tmp_path: Path, **options: Any) -> dict[str, Any]:
    """The JSON of one call."""
    out = tmp_path / "out.json"
    options = {"source": "tp=2,pp=2,dp=2", "destination": "tp=2", "ranks-per-node": 4} | options
    arguments = [f"--{name}={value}" for name, value in options.items()]
    assert tool.main([f"--hf-config={config}", f"--json={out}", *arguments]) == 0
    return json.loads(out.read_text())


def test_result_holds_what_users_rely_on(tool, config, tmp_path, capsys):
    """Keys by name, bytes that add up, the table; bandwidths are only checked to matter."""
    result = run(tool, config, tmp_path)
    assert (result["source"], result["destination"]) == ("tp=2 pp=2 dp=2", "tp=2 dp=4")
    assert result["bytes_moved"] == result["bytes_within_node"] + result["bytes_across_nodes"] > 0
    assert result["transient_bytes"] == 2 * 16 << 20 and result["critical_path"] == "egress across nodes"
    assert result["predicted_seconds"] == pytest.approx(result["max_egress_across"] / 50e9)
    assert result["gather"]["bytes_received"] > result["max_ingress_across"] + result["max_ingress_within"]
    assert result["rank_0"]["receives_from"] > 0 and result["rank_0"]["planning_seconds"] > 0
    printed = capsys.readouterr().out
    assert "8 ranks, 4 per node: tp=2 pp=2 dp=2 -> tp=2 dp=4, bfloat16" in printed and "not measured" in printed
    # 2 stages of 2 layers: a rank keeps its own stage's share and fetches the other's from the other node.
    assert result["bytes_within_node"] == 0 and 0 < result["bytes_kept"] < result["bytes_moved"] * 1.2


def test_options_matter(tool, config, tmp_path):
    base = run(tool, config, tmp_path)
    assert run(tool, config, tmp_path, dtype="float32")["bytes_moved"] == 2 * base["bytes_moved"]
    assert run(tool, config, tmp_path, **{"inter-gb-s": 25})["predicted_seconds"] == 2 * base["predicted_seconds"]
    assert run(tool, config, tmp_path, **{"bucket-mib": 1})["transient_bytes"] == 2 << 20
    one_node = run(tool, config, tmp_path, **{"ranks-per-node": 8})
    assert one_node["bytes_across_nodes"] == one_node["transient_bytes"] == 0
    assert run(tool, config, tmp_path, source="tp=2,dp=4")["bytes_moved"] == 0
    assert run(tool, config.parent, tmp_path)["bytes_moved"] == base["bytes_moved"]  # a directory serves as well


def test_engines_may_have_whole_experts(tool, tmp_path):
    """Nothing moves if an engine has each expert where training has it; ep=1 is the engine without."""
    experts = {"source": "ep=4,dp=4", "ranks-per-node": 4}
    split, same = (run(tool, SHAPES / "671b.json", tmp_path, destination=d, **experts) for d in ("tp=2", "tp=2,ep=1"))
    assert {**split, "rank_0": 0} == {**same, "rank_0": 0} and split["bytes_moved"] > 0
    whole = run(tool, SHAPES / "671b.json", tmp_path, destination="ep=4", **experts)
    assert (whole["destination"], whole["bytes_moved"]) == ("tp=1 dp=1 ep=4", 0)
    both = run(tool, SHAPES / "671b.json", tmp_path, destination="tp=2,ep=4", **experts)
    assert both["bytes_moved"] == 0 and both["bytes_kept"] < whole["bytes_kept"]


@pytest.mark.parametrize(
    "options,found",
    [
        ({"source": "tp=2,pipeline=2"}, "cannot read 'pipeline=2' in --source"),
        ({"source": "tp=2,tp=2"}, "cannot read 'tp=2'"),
        ({"source": "tp=0"}, "cannot read 'tp=0'"),
        ({"source": ""}, "cannot read ''"),
        ({"destination": "tp=2,pp=2"}, "cannot read 'pp=2' in --destination"),
        ({"destination": "tp=2,dp=3"}, "does not fill the 8 ranks"),
        ({"source": "tp=1,pp=3"}, "does not divide the 4 layers"),
        ({"source": "tp=8"}, "does not divide the 4 KV heads"),
        ({"source": "dp=3", "destination": "tp=3"}, "does not fit 8 attention heads"),
        ({"ranks-per-node": 0}, "--ranks-per-node 0"),
        ({"inter-gb-s": 0}, "bandwidths"),
        ({"hf-config": "absent.json"}, "cannot read absent.json"),
        ({"destination": "tp=2,ep=3"}, "gives whole experts to some ranks of an engine only"),
        ({"destination": "tp=2,ep=4"}, "needs a mixture of experts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_one_error(tool, config, capsys, options, found):
    options = {"hf-config": config, "source": "tp=2,pp=2,dp=2", "destination": "tp=2"} | options
    assert tool.main([f"--{name}={value}" for name, value in options.items()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and found in printed.err
    assert "expected:" in printed.err and "hint:" in printed.err


@pytest.mark.parametrize("content", ["{", "[1]", '{"model_type": "unheard_of"}'])
def test_bad_configs_are_one_error(tool, tmp_path, capsys, content):
    file = tmp_path / "config.json"
    file.write_text(content)
    assert tool.main([f"--hf-config={file}", "--source=tp=1", "--destination=tp=1"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("name,num_billions", [("7b", 7.6), ("70b", 70.6), ("671b", 686)])
def test_shapes_of_the_table_in_the_documentation(tool, name, num_billions):
    shape = tool.read_shape(SHAPES / f"{name}.json")
    elements = sum(tool.math.prod(size) for size in shape.logical_tensors().values())
    assert elements / 1e9 == pytest.approx(num_billions, rel=0.01)


def test_neither_megatron_nor_vllm_is_imported(config):
    """In a process of its own; torch comes with megatron_rl.parallel, which is not covered here."""
    code = (
        f"import runpy, sys; sys.argv = ['plan_reshard', '--hf-config={config}', '--source=tp=2', "
        f"'--destination=tp=1,dp=2']\n"
        f"try: runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        f"except SystemExit as exit: assert exit.code == 0\n"
        f"assert not [name for name in ('megatron.core', 'vllm', 'transformers') if name in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110, capture_output=True)
