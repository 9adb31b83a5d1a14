# SPDX-License-Identifier: Apache-2.0
"""Wheels for a GPU without a network: other GPUs' code is blanked, the other machine's packages are left out.

pip is replaced by wheels that the test writes; one test runs it without a source. Not covered: vLLM's real libraries.
"""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_rl.types import UserError
from tools import _fatbins as fatbins
from tools import carry_wheels as tool

PTX, CODE = 1, 2
FA3 = "_ZN5flash25CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJNS7_ILi128EEEEELi{}ENS_{}_tEfNS_4arch4Sm90E"
LIBRARIES = [f"vllm/{name}.abi3.so" for name in (*tool._LIBRARIES, "vllm_flash_attn/_vllm_fa3_C")]


def make_elf(sections: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file of these sections and a table of their names."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".names"))
    body, headers = b"", struct.pack("<IIQQQQ24x", 0, 0, 0, 0, 0, 0)
    for name, data in {**sections, ".names": names}.items():
        headers += struct.pack("<IIQQQQ24x", names.index(name.encode()), 1, 0, 0, 64 + len(body), len(data))
        body += data + bytes(-len(data) % 8)
    head = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    return (head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(sections) + 2, len(sections) + 1)) + body + headers


def make_fatbin(entries: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Kind, architecture and code of each entry."""
    body = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 1, 64, len(code), architecture) + code for kind, architecture, code in entries
    )
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    return fatbin + bytes(-len(fatbin) % 8)


def blank(*binaries: Sequence[tuple[int, int, bytes]], capability: int = 90, is_attention: bool = False) -> list[bytes]:
    """The code that stays; its length, all headers and the counts are checked."""
    library = make_elf({".text": b"host", ".nv_fatbin": b"".join(map(make_fatbin, binaries)), ".data": b"more"})
    blanked = bytearray(library)
    counts = fatbins.blank_code(blanked, capability, is_attention)
    entries = [entry for binary in binaries for entry in binary]
    kept = [code for _, _, code in entries if code in blanked]
    expected = library
    for _, _, code in entries:
        expected = expected if code in kept else expected.replace(code, bytes(len(code)))
    assert blanked == expected
    assert counts == (sum(map(len, kept)), sum(len(code) for _, _, code in entries))
    return kept


GENERATIONS = [(CODE, 80, b"eighty.."), (CODE, 86, b"86"), (CODE, 90, b"ninety"), (CODE, 100, b"hundred!")]


@pytest.mark.parametrize(
    ("capability", "kept"), [(90, [b"ninety"]), (80, [b"eighty.."]), (89, [b"86"]), (103, [b"hundred!"]), (75, [])]
)
def test_code_of_other_generations_is_blanked(capability: int, kept: list[bytes]) -> None:
    assert blank(GENERATIONS, capability=capability) == kept


def test_ptx_stays_only_without_code_for_the_capability() -> None:
    old = [(PTX, 75, b"ptx of 75"), (CODE, 80, b"code 80"), (PTX, 80, b"ptx of 80"), (PTX, 100, b"ptx of 100")]
    new = [(PTX, 90, b"ptx of 90"), (CODE, 90, b"code 90"), (CODE, 90, b"code 90a")]
    assert blank(new, old) == [b"code 90", b"code 90a", b"ptx of 80"]


def test_attention_stays_for_bfloat16_and_usual_heads() -> None:
    kernels = {(64, "10bfloat16"), (128, "10bfloat16"), (256, "10bfloat16"), (64, "6half"), (128, "12float_e4m3")}
    codes = {make_elf({f".text.{FA3.format(*kernel)}": b"kernel"}): kernel for kernel in sorted(kernels)}
    shared = [make_elf({".text._ZN5flash19FlashAttnFwdCombine": b"kernel"}), b"compressed"]
    binaries = [[(CODE, 90, code)] for code in (*codes, *shared)]
    kept = blank(*binaries, is_attention=True)
    assert {codes[code] for code in kept[:-2]} == {(64, "10bfloat16"), (128, "10bfloat16")} and kept[-2:] == shared
    assert len(blank(*binaries)) == len(binaries)


def write_wheel(
    directory: Path, name: str, version: str, requires: Sequence[str] = (), files: Mapping[str, bytes] | None = None
) -> Path:
    path = directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    directory.mkdir(parents=True, exist_ok=True)
    about = f"{name.replace('-', '_')}-{version}.dist-info"
    with ZipFile(path, "w") as wheel:
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{about}/RECORD", "")
        for place, data in (files or {}).items():
            wheel.writestr(place, data)
    return path


ROOT_PINS = {name: SpecifierSet("==1") for name in tool.ROOTS}
# Version and requirements.
INDEX = {
    "vllm": [("1", ["Server>=2", "torch==2", 'new; python_version > "3.11"', 'x; extra == "all"', "here", "web[a]>1"])],
    "megatron-core": [("1", ["torch"])],
    "server": [("2", ["web<3,>=2", "pre_view>=1b1"])],
    "never": [("1", [])],
    "web": [("3", ["never"]), ("2", ["windows; sys_platform == 'win32'"])],
    "new": [("1", [])],
    "pre-view": [("1b2", [])],
}


def write_wheels(requirements: list[str], python: str, directory: Path) -> None:
    """Instead of pip: the first version of INDEX that fits."""
    for requirement in map(Requirement, requirements):
        fitting = (item for item in INDEX[requirement.name] if requirement.specifier.contains(item[0], True))
        write_wheel(directory, requirement.name, *next(fitting))


def test_what_the_wheels_require_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without absent packages and their own requirements; a version that a later wheel refuses is replaced."""
    monkeypatch.setattr(tool, "run_pip", write_wheels)
    absent = {"torch", "here", *tool.ROOTS} - {"vllm", "megatron-core"}
    for python, more in (("3.12", {"new"}), ("3.11", set())):
        wheels = tool.download(ROOT_PINS, absent, python, tmp_path / python)
        assert wheels.keys() == {"vllm", "megatron-core", "server", "web", "pre-view", *more}
        assert tool.open_wheel(wheels["web"]).version == "2"


def test_packages_that_are_there(tmp_path: Path) -> None:
    have = tmp_path / "have.txt"
    have.write_text("# made by pip\nPyYAML==6.0\nzope.event==5\nmine @ file:///mine\n-e git+https://e.org/e#egg=e\n")
    assert tool.read_have(have) == {"pyyaml", "zope-event", "mine"}
    have.write_text("Package Version\n------- -------\nnumpy   2.3\n")
    with pytest.raises(UserError, match=r"have\.txt names no package"):
        tool.read_have(have)


@pytest.mark.parametrize(("python", "version"), [("3.11", "0.16.1"), ("3.12", "0.19.2")])
def test_versions_are_those_of_the_checkout(python: str, version: str) -> None:
    pins = tool.read_pins((tool.ROOT / "requirements.txt").read_text(), python)
    assert pins["megatron-core"] == SpecifierSet(f"=={version}")
    assert {*tool.ROOTS} <= pins.keys() and {*ROOT_PINS} & tool._ABSENT == set()


def write_vllm(directory: Path, architecture: int, libraries: Sequence[str] = LIBRARIES) -> Path:
    library = make_elf({".nv_fatbin": make_fatbin([(CODE, architecture, b"kernel")])})
    left = ("_qutlass_C.abi3.so", "vllm-rs", "a.pyi", "tests/a.py", "third_party/deep_gemm/a.py")
    files = {**dict.fromkeys(libraries, library), "vllm/a.py": b"x = 1", **{f"vllm/{name}": b"" for name in left}}
    return write_wheel(directory, "vllm", "1", files=files)


def test_archive_holds_files_as_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"o-1.data/purelib/o/a.py": b"", "o-1.data/scripts/o": b"", "o/_o.so": b"", "o/deep/tests/a.py": b""}
    wheels = {"vllm": write_vllm(tmp_path, 90), "o": write_wheel(tmp_path, "o", "1", files=data)}
    tool.pack(wheels, 90, tmp_path / "out.tar.xz")
    with tarfile.open(tmp_path / "out.tar.xz") as archive:
        names = set(archive.getnames())
    about = {"vllm-1.dist-info/METADATA", "o-1.dist-info/METADATA"}
    assert names == {*LIBRARIES, "vllm/a.py", "o/a.py", "o/_o.so", *about}
    assert "MB  vllm 1" in capsys.readouterr().out and not (tmp_path / "out.tar.xz.partial").exists()


def test_nothing_is_left_of_a_refused_archive(tmp_path: Path) -> None:
    archive = tmp_path / "out" / "out.tar.xz"
    archive.parent.mkdir()
    with pytest.raises(UserError, match=r"has no code for compute capability 9\.0"):
        tool.pack({"vllm": write_vllm(tmp_path, 80)}, 90, archive)
    with pytest.raises(AssertionError, match=r"another vLLM .*: no vllm/cumem_allocator\.abi3\.so"):
        tool.pack({"vllm": write_vllm(tmp_path, 90, [name for name in LIBRARIES if "cumem" not in name])}, 90, archive)
    assert not list(archive.parent.iterdir())


def test_without_a_source_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    archive = tmp_path / "out" / "out.tar.xz"
    assert tool.main(["--out", str(archive), "--have", str(tmp_path / "none")]) == 2
    assert "none is empty or no file" in capsys.readouterr().err
    assert tool.main(["--out", str(archive)]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "pip download: ERROR: No matching distribution found for" in said
    assert not list(archive.parent.iterdir())
