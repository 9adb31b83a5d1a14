#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a model on this machine to programs that train it with the Tinker API (docs/serving_programs.md).
#   bash launch/serve.sh launch/recipes/qwen2.5_7b_gsm8k.yaml
#   NPROC=2 bash launch/serve.sh RECIPE.yaml serve.port=8000 actor.tensor_model_parallel_size=2
#
#   RUN_DIR        checkpoints of the clients, on a file system of all hosts (default: the recipe's, or checkpoints/served/RECIPE)
#   NPROC          ranks                                     (default: the GPUs that torch sees)
#   GRACE_SECONDS  for saving every model after a signal     (default: 150)
#   PYTHON_BIN     directory of python and torchrun          (default: the environment of launch/setup.sh)
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '3,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
(($# > 0)) || {
    printf 'serve: error: no recipe given\nusage: bash launch/serve.sh RECIPE.yaml [key=value ...]\n' >&2
    exit 2
}
export PATH="${PYTHON_BIN:-${MEGATRON_RL_VENV:-$PWD/.venv}/bin}:$PATH"
NPROC="${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count())')}"
((NPROC > 0)) || {
    printf 'serve: error: torch sees no GPU\nset NPROC to the number of ranks to serve on CPU\n' >&2
    exit 2
}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"                           # one thread per rank; ranks share the cores
export TOKENIZERS_PARALLELISM=false
[[ -z ${RUN_DIR:-} ]] || set -- "$@" "trainer.run_dir=$RUN_DIR"
# The exit status is 0 if all models were saved after a signal. What is wrong in the recipe, the ranks report.
run_dir=$(python -c '
import sys
from pathlib import Path
from megatron_rl.run.loading import load_config
recipe, *rest = sys.argv[1:]
config = load_config(Path(recipe), [one for one in rest if not one.lstrip("-").startswith("serve.")]).config
print(config.trainer.run_dir or f"checkpoints/served/{Path(recipe).stem}")' "$@" 2>/dev/null || true)
exec bash launch/supervise.sh "$run_dir" torchrun --signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT" \
    --shutdown-timeout "${GRACE_SECONDS:-150}" --standalone --nproc-per-node "$NPROC" tools/serve.py "$@"
