# SPDX-License-Identifier: Apache-2.0
"""Show the contents of a checkpoint: kind, step, model, layout, recipe, versions, digest, tensors.

    python tools/inspect_checkpoint.py DIR [--tensors] [--recipe] [--verify] [--json FILE]

DIR is a run directory (newest checkpoint), a training checkpoint step_<N>, a converted checkpoint, one written by
megatron-core, or an HF model. Only --verify reads more than headers: it compares digests (exit code 1 if one differs).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools.conversion.inspection import describe_checkpoint, verify_checkpoint


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--recipe", action="store_true", help="print the config of the run that wrote it")
    parser.add_argument("--verify", action="store_true", help="compare the digests of all files")
    parser.add_argument("--json", type=Path, help="write everything here as well", metavar="FILE")
    return parser


def format_description(found: dict[str, Any], *, tensors: bool, recipe: bool) -> str:
    """Format the description."""
    lines = [f"{found['directory']}: {found['kind']}"]
    manifest = found["manifest"]
    if manifest is not None:
        lines += list(_format_manifest(manifest))
    if found["digest"] is not None:
        lines.append(f"digest       {found['digest']}")
    for part, listed in found["parts"].items():
        total, by_type = sum(t["bytes"] for t in listed), {}
        for tensor in listed:
            by_type[tensor["dtype"]] = by_type.get(tensor["dtype"], 0) + 1
        types = ", ".join(f"{count} {dtype}" for dtype, count in sorted(by_type.items()))
        chunks = sum(t["chunks"] for t in listed)
        lines.append(f"{part:12} {len(listed)} tensors ({types}), {total:,} bytes in {chunks} pieces")
        if tensors:
            width = max(len(t["name"]) for t in listed)
            lines += [f"  {t['name']:{width}}  {t['dtype']:9} {t['shape']}" for t in listed]
    if recipe:
        lines += ["", found["recipe"] or "no recipe"]
    return "\n".join(lines)


def _format_manifest(manifest: dict[str, Any]) -> Iterator[str]:
    yield f"{'written':12} {manifest['created']}, {manifest['num_bytes']:,} bytes in {len(manifest['files'])} files"
    if manifest["kind"] == "training":
        kept = "weights and optimizer" if manifest["has_optimizer"] else "weights only"
        yield f"{'step':12} {manifest['step']}, policy version {manifest['policy_version']}, {kept}"
        state = dict(manifest["state"])
        record = state.pop("record", None)
        yield f"{'state':12} {json.dumps(state)}"
        if record:
            yield f"{'record':12} {len(record)} metrics, the step's row of metrics.jsonl"
    for name, role in manifest.get("roles", {}).items():
        layout = " ".join(f"{key.removesuffix('_size')}={size}" for key, size in role["layout"].items())
        yield f"{name:12} {_format_model(role['model'])}, {role['dtype']}, {role['optimizer_steps']} steps; {layout}"
    if "model" in manifest:
        yield f"{'model':12} {_format_model(manifest['model'])} (from {manifest['source']})"
    yield f"{'packages':12} " + " ".join(f"{name}={number}" for name, number in manifest["packages"].items())


def _format_model(model: dict[str, Any]) -> str:
    if "base" in model:
        return f"adapters of rank {model['rank']} on {_format_model(model['base'])}"
    experts = f", {model['num_experts']} experts" if model["num_experts"] else ""
    return (
        f"{model['family']}, {model['num_layers']} layers of {model['hidden_size']}{experts}, "
        f"vocabulary {model['vocab_size']}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    try:
        found = describe_checkpoint(options.directory)
        problems = verify_checkpoint(options.directory) if options.verify else None
        if options.json:
            options.json.write_text(json.dumps(found | {"problems": problems}, indent=1) + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_description(found, tensors=options.tensors, recipe=options.recipe))
    if problems is not None:
        print("\n".join(f"damaged: {line}" for line in problems) or "all files are as they were written")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
