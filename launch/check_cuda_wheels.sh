#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Check the package's calls against the GPU wheels, on a machine without a GPU: makes an environment with them (10 GB,
# some minutes), imports the GPU-only modules, checks every call, and prints vLLM's GPU configuration.
#   bash launch/check_cuda_wheels.sh
#   bash launch/check_cuda_wheels.sh launch/recipes/qwen3_30b_a3b_math.yaml rollout.tensor_model_parallel_size=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export MEGATRON_RL_VENV="${MEGATRON_RL_VENV:-$PWD/.venv-cuda}" MEGATRON_RL_DEVICE=gpu
bash launch/setup.sh
python="$MEGATRON_RL_VENV/bin/python"

# Optional kernels without compilation: the functions of flash-attn, and of Transformer Engine with its core library.
pin() { sed -nE "s/^# $1(\[.*\])?(==.*)$/\2/p" requirements.txt; }
engine="$(pin transformer-engine)"
export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE
"$python" -m pip install --quiet --no-deps --no-build-isolation einops "flash-attn$(pin flash-attn)" \
    "transformer-engine$engine" "transformer-engine-cu13$engine" onnx onnxscript onnx-ir

"$python" tools/check_signatures.py
exec "$python" tools/check_signatures.py --engine "${1:-launch/recipes/qwen2.5_7b_gsm8k.yaml}" "${@:2}"
