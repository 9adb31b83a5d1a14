# SPDX-License-Identifier: Apache-2.0
"""Check the package's calls of GPU libraries against the signatures of installed wheels; needs no GPU.

    bash launch/check_cuda_wheels.sh                                          # makes an environment that has them
    python tools/check_signatures.py                                          # checks the current environment
    python tools/check_signatures.py --engine RECIPE.yaml [section.key=value]

Not covered: methods of objects, and the meaning of arguments. With a CUDA build of torch, GPU-only modules are imported
as well, and --engine prints vLLM's GPU configuration instead. Exit status 1 if a module or name is missing or a call
does not fit; missing libraries are only listed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

import torch

from tools._absent_driver import choose_cuda_platform, stand_in_for_driver, stand_in_for_kernels
from tools._arguments import Arguments

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
GPU_MODULES = (
    "torch.cuda.nccl",
    "torch.nn.attention.varlen",
    "triton",
    "flashinfer",
    "bitsandbytes",
    "vllm.platforms.cuda",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.device_allocator.cumem",
    "vllm.distributed.device_communicators.cuda_communicator",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.vllm_flash_attn",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "flash_attn",
    "transformer_engine.pytorch",
    "megatron.core.extensions.transformer_engine",
)


@dataclass(frozen=True)
class Use:
    """A call, or an import without one.

    Attributes:
        name: dotted name of the callee.
        call: `None` for an import.
    """

    place: str
    name: str
    call: ast.Call | None


def list_uses(source: str, file: str) -> Iterator[Use]:
    """Yield a file's uses of the libraries."""
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
    """Describe a misfit; `None` if there is none, "" if the library is missing."""
    try:
        found = _resolve(use.name)
    except ModuleNotFoundError as error:
        return "" if error.name == use.name.partition(".")[0] else f"{use.name} is not there: {error}"
    except (AttributeError, ImportError, OSError) as error:
        return f"{use.name} is not there: {error}"
    if use.call is None or not callable(found):
        return None
    if any(isinstance(part, ast.Starred) for part in use.call.args):
        return None  # the length of *args is determined at run time
    named = {keyword.arg: keyword for keyword in use.call.keywords if keyword.arg is not None}
    try:
        signature = inspect.signature(found)
        is_whole = len(named) == len(use.call.keywords)  # **kwargs are determined at run time
        (signature.bind if is_whole else signature.bind_partial)(*use.call.args, **named)
    except ValueError:
        return None  # built-ins have no signature
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


def import_modules(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return missing libraries and import errors."""
    absent, problems = list[str](), []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken wheel raises anything
            library = name.partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and error.name == library:
                absent.append(library)
            else:
                problems.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    return absent, problems


def check_calls() -> tuple[set[str], list[str], int]:
    """Return missing libraries, misfits, number of fitting calls."""
    absent, misfits, fitting = set[str](), [], 0
    for path in sorted((ROOT / "megatron_rl").rglob("*.py")):
        for use in list_uses(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()):
            misfit = find_misfit(use)
            fitting += misfit is None
            if misfit == "":
                absent.add(use.name.partition(".")[0])
            elif misfit is not None:
                misfits.append(f"{use.place}: {misfit}")
    return absent, misfits, fitting


def _prepare_for_gpus() -> tuple[list[str], list[str]]:
    """Import GPU-only modules, as `import_modules`."""
    functions = stand_in_for_driver()
    if functions:
        print(f"no driver: {functions} functions stand in for it")
        choose_cuda_platform()
    for library in stand_in_for_kernels():
        print(f"no kernels of {library}: its functions are checked without them")
    absent, problems = import_modules(GPU_MODULES)
    print(f"{len(GPU_MODULES) - len(absent) - len(problems)} of {len(GPU_MODULES)} modules for GPUs are imported")
    return absent, problems


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--engine", type=Path, metavar="RECIPE", help="print vLLM's configuration on a GPU")
    options, overrides = parser.parse_known_args(arguments)
    for_gpus = torch.version.cuda is not None
    if overrides and options.engine is None:
        parser.error(f"{' '.join(overrides)} without --engine")
    if options.engine is not None and not for_gpus:
        parser.error(f"--engine with torch {torch.__version__}: it needs the wheels for CUDA")
    if options.engine is not None:
        from tools._engine_on_gpu import print_engine  # imports vLLM

        print_engine(options.engine, overrides)
        return 0
    unknown, broken = _prepare_for_gpus() if for_gpus else ([], [])
    absent, misfits, fitting = check_calls()
    print("\n".join(broken + misfits + [f"not installed: {name}" for name in sorted({*unknown, *absent})]))
    print(f"{fitting} uses fit, {len(misfits)} do not")
    return int(bool(misfits or broken))


if __name__ == "__main__":
    sys.exit(main())
