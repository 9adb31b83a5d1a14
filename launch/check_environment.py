# SPDX-License-Identifier: Apache-2.0
"""Check that installed packages match the requirements and can be imported.

Called by ``launch/setup.sh`` on a bare Python. The quick check compares versions with the pins; the full check also
imports the usual failures: torch of the wrong build, transformers beside a CUDA torchvision, vLLM.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

CUDA_ONLY_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
PIN = re.compile(r'([\w.-]+)==([\w.]+)(?:; python_version (<|>=) "3\.(\d+)")?')


def read_pins(path: Path, minor: int = sys.version_info.minor) -> dict[str, str]:
    """Parse ``name==version`` lines of a requirements file.

    Args:
        minor: Python 3.`minor`, for conditional lines.

    Raises:
        ValueError: an unpinned line.
    """
    pins: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        requirement = line.split("#")[0].strip()
        if not requirement:
            continue
        pin = PIN.fullmatch(requirement)
        if pin is None:
            raise ValueError(f"{path}:{number}: {requirement!r} is not pinned with ==")
        name, version, operator, bound = pin.groups()
        if operator is None or (minor < int(bound)) == (operator == "<"):
            pins[name] = version
    return pins


def find_version_problems(pins: dict[str, str], device: str) -> Iterator[str]:
    """Yield missing, wrong and forbidden packages."""
    for name, wanted in pins.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield f"{name} is not installed; expected {wanted}"
            continue
        # "2.13.0+cpu" satisfies the pin 2.13.0: a local version names the build, not the release.
        if found != wanted and found.partition("+")[0] != wanted:
            yield f"{name} is {found}; expected {wanted}"
    if device == "cpu":
        for name in CUDA_ONLY_BESIDE_CPU_TORCH:
            if find_spec(name) is not None:
                yield f"{name} is installed; its CUDA build beside a CPU torch breaks transformers: uninstall it"


def check_torch(device: str) -> str:
    """Import torch and check its build."""
    import torch

    cuda = torch.version.cuda
    if device == "cpu" and torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} is a CUDA {cuda} build; a CPU build was expected on this machine"
        )
    if device == "cpu":
        return f"{torch.__version__} (no CPU build was found)" if cuda else torch.__version__
    if device == "gpu" and cuda is None:
        raise RuntimeError(f"torch {torch.__version__} has no CUDA; pip's configured sources offer a CPU build first")
    if cuda and not torch.cuda.is_available():
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from megatron_rl.parallel.collectives import explain_unusable_gpus

        unusable = explain_unusable_gpus()
        if unusable is not None:
            raise RuntimeError(f"{unusable.found}; expected {unusable.expected}: {unusable.hint}")
    return f"{torch.__version__} (CUDA {cuda}, {torch.cuda.device_count()} devices)" if cuda else torch.__version__


def check_transformers() -> str:
    """Import the supported model classes; they load lazily, so a bare import proves nothing."""
    from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

    assert LlamaForCausalLM and Qwen2ForCausalLM and Qwen3ForCausalLM
    return metadata.version("transformers")


def check_vllm() -> str:
    """Import vLLM."""
    import vllm

    return vllm.__version__


def check_flashinfer() -> str:
    """Import vLLM's GPU kernels; fails if cuda-python and cuda-bindings differ in version."""
    import flashinfer

    return flashinfer.__version__


def check_megatron_core() -> str:
    """Find megatron.core without importing it, since the import on a CPU needs this package's runtime."""
    if find_spec("megatron.core") is None:
        raise RuntimeError("megatron.core is not importable")
    return metadata.version("megatron-core")


def run_import_checks(device: str) -> Iterator[str]:
    """Print working versions; yield broken parts."""
    checks: dict[str, Callable[[], str]] = {
        "torch": lambda: check_torch(device),
        "transformers": check_transformers,
        "megatron-core": check_megatron_core,
        "vllm": check_vllm,
    }
    if device == "gpu":
        checks["flashinfer"] = check_flashinfer
    for name, check in checks.items():
        try:
            print(f"setup:   {name} {check()}")
        except Exception as error:  # a broken wheel raises anything: OSError, RuntimeError, ImportError
            yield f"{name} does not work: {type(error).__name__}: {str(error).strip()[:500]}"


def main() -> int:
    """Print problems; exit status 1 if any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True, help="what the environment is for")
    parser.add_argument(
        "--requirements", type=Path, nargs="+", required=True, help="the files of pins it was made from"
    )
    parser.add_argument("--quick", action="store_true", help="compare versions only, import nothing")
    args = parser.parse_args()
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    pins = {name: version for file in args.requirements for name, version in read_pins(file).items()}
    problems = list(find_version_problems(pins, args.device))
    if not args.quick:
        print(f"setup:   python {sys.version.split()[0]}")
        problems += run_import_checks(args.device)
    for problem in problems:
        print(f"setup:   broken: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
