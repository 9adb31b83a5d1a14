#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lock the environments: launch/locks/{cpu,gpu}-3.{11,12,13}.txt hold every package that the pins bring, with hashes.
#
#   bash launch/lock.sh                                            # all six, again; needs uv on the PATH
#   pip install --no-deps --require-hashes -r launch/locks/gpu-3.12.txt
#
# The locks for CPUs have no torch, whose CPU build is installed first, and none of the packages that launch/setup.sh
# removes. If the package sources have no CPU build of torch for a Python, its lock stays as it was, which is printed, and
# the exit status is 1. For Linux on the architecture of this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NOT_IN_CPU=(--no-emit-package torch --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec)
options="$(python3 -m pip config list | python3 launch/pip_sources.py)"
status=0
new="$(mktemp)"
no_cpu_build="$(mktemp)" # a plain pin admits it, where the sources have one
trap 'rm -f "$new" "$no_cpu_build"' EXIT
sed -n 's/^torch==\([0-9.]*\).*/torch!=\1+cpu/p' requirements.txt >"$no_cpu_build"
for minor in 11 12 13; do
    for device in cpu gpu; do
        requirements=requirements.txt flags=(--constraint "$no_cpu_build")
        [[ $device == gpu ]] || requirements=requirements-cpu.txt flags=("${NOT_IN_CPU[@]}")
        if uv pip compile --quiet $options --python-version "3.$minor" --generate-hashes --no-header --no-annotate \
            --no-config "${flags[@]}" "$requirements" {tests,docs}/requirements.txt >"$new"; then
            cp "$new" "launch/locks/$device-3.$minor.txt"
        else
            echo "lock: launch/locks/$device-3.$minor.txt could not be made; see above" >&2
            status=1
        fi
    done
done
exit "$status"
