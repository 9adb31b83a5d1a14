#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the Python environment of SGLang's server on a machine without a GPU (rollout.engine=sglang).
#
# It uses torch and transformers of the project's environment, which SGLang's other dependencies (above all torchvision)
# must not enter. SGLang's kernels are published for GPUs only: launch/sglang/sgl_kernel.py replaces them, and SGLang
# computes with its own torch code. On a GPU, install SGLang by its documentation in a separate environment, and set
# rollout.server.python to its interpreter.
#
#   MEGATRON_RL_VENV         the project's environment  (default: .venv in the repository)
#   MEGATRON_RL_SGLANG_VENV  this environment           (default: .venv-sglang in the repository)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
base="${MEGATRON_RL_VENV:-$root/.venv}/bin/python"
venv="${MEGATRON_RL_SGLANG_VENV:-$root/.venv-sglang}"
[[ -x $base ]] || { echo "setup_sglang: error: there is no $base: run launch/setup.sh first" >&2; exit 1; }

"$base" -m venv "$venv"
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/project.pth"
"$venv/bin/python" -m pip install --quiet --no-deps sglang==0.5.23 orjson==3.13.0 easydict==1.14 gguf==0.19.0 \
    ipython==9.18.1 traitlets==5.16.1 openai_harmony==0.0.4 outlines==0.1.11 soundfile==0.14.0 torchvision==0.29.2
: >"$site/torchvision/_meta_registrations.py" # the CUDA build registers operators that a CPU torch lacks
install -D "$root/launch/sglang/sgl_kernel.py" "$site/sgl_kernel/__init__.py"
SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -W ignore -c 'import sglang; print("setup_sglang: sglang", sglang.__version__)'
