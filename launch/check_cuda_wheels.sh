#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Do the wheels for GPUs have what the program calls? Makes an environment with them on a machine without a GPU (10 GB,
# some minutes), imports what only GPUs use, checks every call, and prints how vLLM configures itself on a GPU.
#   bash launch/check_cuda_wheels.sh
#   bash launch/check_cuda_wheels.sh launch/recipes/qwen3_30b_a3b_math.yaml rollout.tensor_model_parallel_size=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export MEGATRON_RL_VENV="${MEGATRON_RL_VENV:-$PWD/.venv-cuda}" MEGATRON_RL_DEVICE=gpu
bash launch/setup.sh
python="$MEGATRON_RL_VENV/bin/python"

# The optional kernels without compiling them: flash-attn's functions, and Transformer Engine's with its core library.
pin() { sed -nE "s/^# $1(\[.*\])?(==.*)$/\2/p" requirements.txt; }
engine="$(pin transformer-engine)"
export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE
"$python" -m pip install --quiet --no-deps --no-build-isolation einops "flash-attn$(pin flash-attn)" \
    "transformer-engine$engine" "transformer-engine-cu13$engine" onnx onnxscript onnx-ir

"$python" tools/check_signatures.py
exec "$python" tools/check_signatures.py --engine "${1:-launch/recipes/qwen2.5_7b_gsm8k.yaml}" "${@:2}"
