# SPDX-License-Identifier: Apache-2.0
"""Do the libraries of GPUs have what the program calls, with these arguments? It needs their wheels, and no GPU.

    pip install -r requirements.txt flash-attn transformer-engine[pytorch]     # in an environment of its own
    python tools/check_signatures.py

Calls of torch.cuda, vLLM, flash-attn, Transformer Engine, bitsandbytes and SGLang in the package are read off its
source, and bound to the signatures of what is installed. Not seen: methods of objects, and what arguments mean.
Ends with status 1 if a name is missing or a call does not fit, and says which libraries are not installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation
LIBRARIES = (
    "torch.cuda",
    "torch.nn.attention.varlen",
    "torch.multiprocessing.reductions",
    "vllm",
    "flash_attn",
    "transformer_engine",
    "bitsandbytes",
    "sglang",
)


@dataclass(frozen=True)
class Use:
    """A call, or an import without one.

    Attributes:
        place: file and line.
        name: dotted, of what is called.
        call: its arguments; None: it is imported only.
    """

    place: str
    name: str
    call: ast.Call | None


def list_uses(source: str, file: str) -> Iterator[Use]:
    """What a file uses of the libraries."""
    tree, names = ast.parse(source), {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(LIBRARIES):
            for item in node.names:
                names[item.asname or item.name] = f"{node.module}.{item.name}"
                yield Use(f"{file}:{node.lineno}", f"{node.module}.{item.name}", None)
        elif isinstance(node, ast.Import):
            for item in node.names:
                names[item.asname or item.name.partition(".")[0]] = (
                    item.name if item.asname else item.name.split(".")[0]
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, _, rest = ast.unparse(node.func).partition(".")
            name = f"{names[first]}.{rest}".rstrip(".") if first in names else ""
            if name.startswith(LIBRARIES) and "(" not in name:
                yield Use(f"{file}:{node.lineno}", name, node)


def find_misfit(use: Use) -> str | None:
    """What is wrong with a use: None if it fits, "" if its library is not installed."""
    try:
        found = _resolve(use.name)
    except ModuleNotFoundError as error:
        return "" if error.name == use.name.partition(".")[0] else f"{use.name} is not there: {error}"
    except (AttributeError, ImportError, OSError) as error:
        return f"{use.name} is not there: {error}"
    if use.call is None or not callable(found):
        return None
    if any(isinstance(part, ast.Starred) for part in use.call.args) or any(k.arg is None for k in use.call.keywords):
        return None  # what they hold is known when it runs
    try:
        inspect.signature(found).bind(*use.call.args, **{str(k.arg): k for k in use.call.keywords})
    except ValueError:
        return None  # of a built-in
    except TypeError as error:
        return f"{use.name}: {error}"
    return None


def _resolve(name: str) -> Any:
    parts, count = name.split("."), 1
    found: Any = importlib.import_module(parts[0])
    while count < len(parts):
        if inspect.ismodule(found) and not hasattr(found, parts[count]):
            found = importlib.import_module(".".join(parts[: count + 1]))
        else:
            found = getattr(found, parts[count])
        count += 1
    return found


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    package, absent, misfits, fitting = ROOT / "megatron_rl", set[str](), [], 0
    for path in sorted(package.rglob("*.py")):
        for use in list_uses(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()):
            misfit = find_misfit(use)
            fitting += misfit is None
            if misfit == "":
                absent.add(use.name.partition(".")[0])
            elif misfit is not None:
                misfits.append(f"{use.place}: {misfit}")
    print("\n".join(misfits + [f"not installed: {name}" for name in sorted(absent)]))
    print(f"{fitting} uses fit, {len(misfits)} do not")
    return int(bool(misfits))


if __name__ == "__main__":
    sys.exit(main())
