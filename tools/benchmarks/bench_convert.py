# SPDX-License-Identifier: Apache-2.0
"""Convert a random model there and back: seconds, peak memory of a process, bit equality.

    python tools/benchmarks/bench_convert.py --hf-config docs/shapes/3b.json --work DIR --processes 2 --json F

DIR needs space for three copies of the model. Peak memory is the largest resident set, including mapped files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

import torch

from megatron_rl.checkpoint.files import split_units
from megatron_rl.checkpoint.huggingface import name_safetensors
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import model_shape_from_config
from tools.conversion.conversion import DTYPES
from tools.conversion.safetensors_stream import SafetensorsWriter

TOOLS = Path(__file__).resolve().parents[1]
_CHUNK = 16 << 20  # elements drawn at once


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-config", type=Path, required=True, help="config.json of the model to make up")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="where to write")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of the weights (bfloat16)")
    parser.add_argument("--file-gib", type=float, default=4.0, metavar="GIB", help="size of a file (4)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of each conversion (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    return parser


def write_random_model(directory: Path, config: dict[str, Any], dtype: torch.dtype, file_bytes: int) -> list[Path]:
    """Write a random HF model; return its weight files."""
    sizes = model_shape_from_config(config, source="--hf-config").logical_tensors()
    num_bytes = {name: torch.Size(size).numel() * dtype.itemsize for name, size in sizes.items()}
    units, generator = split_units(num_bytes, file_bytes, name_safetensors), torch.Generator().manual_seed(0)
    directory.mkdir(parents=True)
    for unit in units:
        writer = SafetensorsWriter(directory / unit.file, {name: (sizes[name], dtype) for name in unit.tensors})
        for left in (torch.Size(sizes[name]).numel() for name in unit.tensors):
            for first in range(0, left, _CHUNK):
                writer.write(torch.empty(min(_CHUNK, left - first), dtype=dtype).normal_(generator=generator))
        writer.close()
    weight_map = {name: unit.file for unit in units for name in unit.tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))
    return [directory / unit.file for unit in units]


def run_tool(name: str, *arguments: object) -> dict[str, float]:
    """Run a tool; return seconds and peak resident bytes.

    Raises:
        UserError: it failed.
    """
    begun = time.monotonic()
    child = subprocess.Popen([sys.executable, str(TOOLS / name), *map(str, arguments)])
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise UserError(
            f"{name} ended with {child.returncode}", source=str(arguments), expected="0", hint="see its error above"
        )
    return {"seconds": time.monotonic() - begun, "peak_rss_bytes": usage.ru_maxrss * 1024}


def hash_file(path: Path) -> str:
    """Return the SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return all figures."""
    config = json.loads(options.hf_config.read_text(encoding="utf-8"))
    files = write_random_model(work / "hf", config, DTYPES[options.dtype], int(options.file_gib * 2**30))
    output = (f"--file-gib={options.file_gib}", f"--processes={options.processes}")
    found: dict[str, Any] = {
        "hf_config": str(options.hf_config),
        "dtype": options.dtype,
        "processes": options.processes,
        "model_bytes": sum(file.stat().st_size for file in files),
        "largest_shard_bytes": max(file.stat().st_size for file in files),
    }
    found["to_megatron"] = run_tool(
        "convert_hf_to_megatron.py", "--hf", work / "hf", "--out", work / "megatron", *output
    )
    found["to_huggingface"] = run_tool(
        "convert_megatron_to_hf.py", "--checkpoint", work / "megatron", "--out", work / "back", *output
    )
    for direction in ("to_megatron", "to_huggingface"):
        peak = found[direction]["peak_rss_bytes"]
        found[direction]["peak_rss_per_largest_shard"] = peak / found["largest_shard_bytes"]
    found["bit_identical"] = all(hash_file(file) == hash_file(work / "back" / file.name) for file in files)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    try:
        work = Path(tempfile.mkdtemp(prefix="bench_convert-", dir=options.work))
        try:
            found = measure(options, work)
        finally:
            shutil.rmtree(work)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["bit_identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
