# SPDX-License-Identifier: Apache-2.0
"""Pack megatron-core, vLLM and their requirements for a machine with torch and a GPU, but without a network.

    python tools/carry_wheels.py --out carry.tar.xz --python 3.12 --have have.txt

The archive fits where a gigabyte of wheels does not (54 MB for a machine with transformers): code of other GPU
generations, headers and kernels that the recipes do not need are left out. It does for `tools/first_gpu_run.py`, not
for vLLM's server. have.txt is the output of `pip list --format freeze` on that machine; without it only torch is
assumed there. Linux on x86-64.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import PathDistribution
from pathlib import Path, PurePosixPath
from zipfile import Path as ZipPath
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from megatron_rl.run.command_line import end_program
from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools._fatbins import blank_code

ROOTS = ("vllm", "megatron-core", "datasets", "math-verify", "matplotlib", "rich", "sentencepiece")
# Requirements that the other machine has with torch, or that vLLM imports in its server, for other models or GPUs.
_ABSENT = {
    *("torch", "torchaudio", "torchcodec", "torchvision", "triton"),
    *("anthropic", "mcp", "model-hosting-container-standards", "opentelemetry-exporter-otlp"),
    *("flashinfer-python", "humming-kernels", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "quack-kernels"),
    *("fastsafetensors", "instanttensor", "nvtx", "pynvvideocodec", "tilelang", "tokenspeed-mla"),
}
_LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator", "spinloop")  # of vLLM
_HEADERS = {".cuh", ".cu", ".h", ".hpp", ".inl", ".pxd", ".pyi", ".pyx"}
_PICTURES = {".css", ".gif", ".html", ".ico", ".jpg", ".js", ".png", ".svg"}
_FOLDERS = {"tests", "__pycache__"}
# Tokenizers; kernels of vLLM that are compiled on first use. vLLM takes others if the whole package is absent.
_TREES = ("mistral_common/data/", "vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/")
_GLIBC = range(35, 4, -1)  # minor versions
_ROUNDS = 20


def read_have(path: Path) -> set[str]:
    """Read package names from the output of `pip freeze`.

    Raises:
        UserError: the file is missing, or names no package.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    names = re.findall(r"^([A-Za-z0-9][\w.-]*) ?(?:==|@)", text, re.MULTILINE)
    if not names:
        raise UserError(
            f"{path} names no package" if text else f"{path} is empty or no file",
            source="command line: --have",
            expected="lines name==version",
            hint="pip list --format freeze, on the other machine",
        )
    return {str(canonicalize_name(name)) for name in names}


def read_pins(text: str, python: str) -> dict[str, SpecifierSet]:
    """Read the pins of a requirements file."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    pins = [Requirement(line) for line in lines if line]
    return {canonicalize_name(pin.name): pin.specifier for pin in pins if _applies(pin, python)}


def _applies(requirement: Requirement, python: str) -> bool:
    place = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    linux = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    return requirement.marker is None or requirement.marker.evaluate(place | linux)


def open_wheel(path: Path) -> PathDistribution:
    """Open the metadata of a wheel."""
    name = next(name for name in ZipFile(path).namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
    return PathDistribution(ZipPath(path, name.removesuffix("METADATA")))  # type: ignore[arg-type]


def find_wanted(
    wheels: Mapping[str, Path], pins: Mapping[str, SpecifierSet], absent: Collection[str], python: str
) -> dict[str, SpecifierSet]:
    """Return versions by package: `ROOTS`, and all that the wheels among them require without extras.

    Args:
        absent: packages that are not to be carried, nor what only they require.
    """
    wanted = {name: pins[name] for name in ROOTS if name not in absent}
    queue = list(wanted)
    while queue:
        name = queue.pop()
        for line in (open_wheel(wheels[name]).requires or []) if name in wheels else []:
            requirement = Requirement(line)
            needed = canonicalize_name(requirement.name)
            if needed in absent or not _applies(requirement, python):
                continue
            if needed not in wanted:
                wanted[needed] = pins.get(needed, SpecifierSet())
                queue.append(needed)
            wanted[needed] &= requirement.specifier
    return wanted


def download(
    pins: Mapping[str, SpecifierSet], absent: Collection[str], python: str, directory: Path
) -> dict[str, Path]:
    """Download the wheels of `find_wanted`, by package.

    Raises:
        UserError: pip finds no wheel.
    """
    wheels: dict[str, Path] = {}
    for number in range(_ROUNDS):
        wanted = find_wanted(wheels, pins, absent, python)
        missing = [
            f"{name}{versions}"
            for name, versions in wanted.items()
            if name not in wheels or not versions.contains(open_wheel(wheels[name]).version, prereleases=True)
        ]
        if not missing:
            return {name: wheels[name] for name in wanted}
        place = directory / str(number)
        run_pip(missing, python, place)
        wheels |= {canonicalize_name(open_wheel(wheel).metadata["Name"]): wheel for wheel in place.glob("*.whl")}
    raise AssertionError(f"no versions after {_ROUNDS} rounds, at last of {', '.join(missing)}")


def run_pip(requirements: list[str], python: str, directory: Path) -> None:
    """Download wheels.

    Raises:
        UserError: pip fails.
    """
    print(f"downloading {', '.join(sorted(requirements))}", flush=True)
    command = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    target = ["--python-version", python, "--implementation", "cp", "--abi", f"cp{python.replace('.', '')}"]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["--platform=manylinux2014_x86_64"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, *target, *platforms, "--dest", str(directory), *requirements],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise UserError(
            f"pip download: {errors[-1][:400] if errors else f'status {done.returncode}'}",
            source=f"wheels for Python {python}",
            expected="a network, or a directory of wheels that pip is configured to search (PIP_FIND_LINKS)",
            hint="bash launch/setup.sh needs the same sources",
        )


def is_carried(name: str, libraries: Collection[str]) -> bool:
    """Whether a file of a wheel goes into the archive.

    Args:
        name: path after installation.
        libraries: vLLM's.
    """
    path = PurePosixPath(name)
    if path.suffix in _HEADERS | _PICTURES or _FOLDERS & {*path.parts} or path.name in ("RECORD", "vllm-rs"):
        return False
    return not name.startswith(_TREES) and (name in libraries or path.suffix != ".so" or not name.startswith("vllm/"))


def pack(wheels: Mapping[str, Path], capability: int, archive: Path) -> None:
    """Write the archive; print packages and sizes.

    Raises:
        UserError: vLLM has no code for the GPU.
    """
    attention = f"vllm_flash_attn/_vllm_fa{3 if capability == 90 else 2}_C"
    libraries = {f"vllm/{name}.abi3.so" for name in (*_LIBRARIES, attention)}
    packed = set()
    partial = archive.with_name(archive.name + ".partial")
    try:
        with tarfile.open(partial, "w:xz", preset=6) as tar:
            for name, path in sorted(wheels.items()):
                size = 0
                for place, data in _read_files(path, libraries):
                    if place in libraries:
                        _blank(data, place, capability)
                        packed.add(place)
                    entry = tarfile.TarInfo(place)
                    entry.size, entry.mode = len(data), 0o644
                    tar.addfile(entry, io.BytesIO(data))
                    size += len(data)
                print(f"{size / 1e6:8.1f} MB  {name} {open_wheel(path).version}", flush=True)
        if 0 < len(packed) < len(libraries):
            raise AssertionError(f"another vLLM than this was written for: no {', '.join(libraries - packed)}")
        partial.replace(archive)
    finally:
        partial.unlink(missing_ok=True)


def _read_files(wheel: Path, libraries: Collection[str]) -> Iterator[tuple[str, bytearray]]:
    with ZipFile(wheel) as file:
        for item in file.infolist():
            # Parts of some wheels are in NAME.data/purelib, and scripts beside that.
            place = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", item.filename)
            if not item.is_dir() and ".data/" not in place and is_carried(place, libraries):
                yield place, bytearray(file.read(item))


def _blank(library: bytearray, name: str, capability: int) -> None:
    kept, total = blank_code(library, capability, is_attention="_fa3_" in name)
    if total and not kept:
        raise UserError(
            f"{name} has no code for compute capability {capability / 10}",
            source="command line: --capability",
            expected="a GPU that vLLM's wheel supports",
            hint="python -c 'import torch; print(torch.cuda.get_device_capability())'",
        )
    if total:
        print(f"{kept / 1e6:8.1f} MB of {total / 1e6:.1f} MB of code for GPUs stay in {name}", flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar.xz", help="the archive")
    parser.add_argument(
        "--python", default="3.12", choices=("3.11", "3.12", "3.13"), help="Python of the other machine (3.12)"
    )
    parser.add_argument("--capability", type=float, default=9.0, help="compute capability of its GPU (9.0)")
    parser.add_argument("--have", type=Path, metavar="FILE", help="packages that it has")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    try:
        absent = _ABSENT | (read_have(options.have) if options.have else set())
        options.out.parent.mkdir(parents=True, exist_ok=True)
        pins = read_pins((ROOT / "requirements.txt").read_text(encoding="utf-8"), options.python)
        with tempfile.TemporaryDirectory() as directory:
            wheels = download(pins, absent, options.python, Path(directory))
            pack(wheels, round(options.capability * 10), options.out)
    except UserError as error:
        return end_program(error)
    print(f"""{options.out}: {options.out.stat().st_size / 1e6:.1f} MB. On the other machine:
    mkdir site && tar xf {options.out.name} -C site && export PYTHONPATH=$PWD/site
    python tools/first_gpu_run.py""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
