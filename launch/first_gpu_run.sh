#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The first hour on a GPU: environment, then checks from the driver to a run with all features on. Prints what broke with
# the next things to try, and writes one report to attach to an issue. Where torch is installed, python
# tools/first_gpu_run.py does without the environment, and leaves out what needs more than is there.
#   bash launch/first_gpu_run.sh
#   bash launch/first_gpu_run.sh --from "graph step"
#   bash launch/first_gpu_run.sh --rehearse           without a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh
export PATH="${MEGATRON_RL_VENV:-$PWD/.venv}/bin:$PATH"
exec python tools/first_gpu_run.py "$@"
