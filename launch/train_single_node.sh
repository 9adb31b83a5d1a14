#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on one machine: on all GPUs, or with NPROC ranks.
#   bash launch/train_single_node.sh launch/recipes/qwen2.5_7b_gsm8k.yaml
#   MODEL_PATH=/models/Qwen2.5-7B NPROC=4 bash launch/train_single_node.sh RECIPE.yaml actor.lr=2e-6
# Arguments after the recipe override the arrays below. With --dry-run nothing is started.
#
#   NPROC        ranks                                           (default: the GPUs that torch sees)
#   MODEL_PATH   model directory in HF format                    (default: the recipe's)
#   RUN_DIR      run directory; an existing one resumes          (default: a new one)
#   GRACE_SECONDS  for saving after a signal                     (default: 150)
#   ENTRY        launch/pretrain_grpo.py or pretrain_sft.py      (default: launch/pretrain_grpo.py)
#   PYTHON_BIN   directory of python and torchrun                (default: the environment of launch/setup.sh)
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '3,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'train_single_node: error: %s\n' "$@" >&2
    exit 2
}

(($# > 0)) || fail "no recipe given" "usage: bash launch/train_single_node.sh RECIPE.yaml [section.key=value ...]"
RECIPE=$1
shift
[[ -f $RECIPE ]] || fail "there is no recipe $RECIPE" "see launch/recipes/"
export PATH="${PYTHON_BIN:-${MEGATRON_RL_VENV:-$PWD/.venv}/bin}:$PATH"
ENTRY="${ENTRY:-launch/pretrain_grpo.py}"
NPROC="${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count())')}"
((NPROC > 0)) || fail "torch sees no GPU" "set NPROC to the number of ranks to train on CPU"

# Overrides of the recipe by topic.
MODEL_ARGS=(${MODEL_PATH:+"model.path=$MODEL_PATH"})     # model.dtype=float32 on CPU
PARALLEL_ARGS=()                                         # actor.tensor_model_parallel_size=4 --sequence-parallel
ROLLOUT_ARGS=()                                          # rollout.n=8 rollout.gpu_memory_utilization=0.6
ALGO_ARGS=()                                             # algorithm.adv_estimator=rloo actor.lr=1e-6
CKPT_ARGS=(${RUN_DIR:+"trainer.run_dir=$RUN_DIR"})       # trainer.save_freq=20

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"                           # one thread per rank; ranks share the cores
export TOKENIZERS_PARALLELISM=false                                      # tokenizer threads do not survive a fork
# PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is left unset: such memory cannot be opened by other ranks (CUDA IPC).

# On a signal the run saves and exits with 75; ranks still running after GRACE_SECONDS are killed.
SIGNAL_ARGS=(--signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" --shutdown-timeout "${GRACE_SECONDS:-150}")
TRAIN_ARGS=("$RECIPE" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${ALGO_ARGS[@]}"
    "${CKPT_ARGS[@]}" "$@")
for argument in "$@"; do
    [[ $argument != --dry-run ]] || exec python "$ENTRY" "${TRAIN_ARGS[@]}" --world-size "$NPROC"
done
exec bash launch/supervise.sh "${RUN_DIR:-}" torchrun "${SIGNAL_ARGS[@]}" --standalone --nproc-per-node "$NPROC" "$ENTRY" "${TRAIN_ARGS[@]}"
