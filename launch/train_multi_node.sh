#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on several machines: start this file with the same values on every node, by hand, with pdsh, or from SLURM
# (launch/slurm.sbatch).
#   NNODES=2 MASTER_ADDR=node0 RUN_DIR=/shared/runs/a bash launch/train_multi_node.sh RECIPE.yaml [key=value ...]
#
# Nodes find each other through torchrun's c10d rendezvous, in any order and without rank numbers. After the loss of a
# rank or a node, all ranks restart, up to MAX_RESTARTS times, from the newest checkpoint in RUN_DIR (trainer.save_freq
# limits the loss). torchrun waits for a lost node to return: the world size of a run does not change.
#
#   NNODES         machines
#   MASTER_ADDR    name or address of one machine, reachable from the others
#   MASTER_PORT    a free TCP port of it                             (default: 29400)
#   NPROC          ranks per node                                    (default: the GPUs that torch sees)
#   RUN_DIR        run directory on a disk shared by all nodes
#   JOB_ID         the same on all nodes, another one for each job   (default: the run directory's name)
#   MAX_RESTARTS   restarts of all ranks                             (default: 3)
#   GRACE_SECONDS  for saving after a signal                         (default: 150)
#   RDZV_CONF      further rendezvous settings of torchrun, e.g. join_timeout=1200,is_host=1
#   LOCAL_ADDR     this node's address, if its host name resolves to an unreachable one
#   MODEL_PATH, ENTRY, PYTHON_BIN   as in train_single_node.sh
#   ROLE           train, or engine for a further machine with rollout engines outside the job (schedule.elastic), which
#                  launch/engine.sh starts and starts again; needs RUN_DIR, and TP if an engine has several ranks
#                                                                    (default: train)
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '3,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'train_multi_node: error: %s\n' "$@" >&2
    exit 2
}

case "${ROLE:-train}" in
    train) ;;
    engine)
        [[ -n ${RUN_DIR:-} ]] || fail "RUN_DIR is not set" "ROLE=engine needs the directory of the run that engines join"
        exec bash launch/engine.sh "$RUN_DIR"
        ;;
    *) fail "ROLE is $ROLE" "expected: train or engine" ;;
esac
(($# > 0)) || fail "no recipe given" "usage: NNODES=2 MASTER_ADDR=node0 RUN_DIR=DIR bash $0 RECIPE.yaml [key=value ...]"
RECIPE=$1
shift
[[ -f $RECIPE ]] || fail "there is no recipe $RECIPE on $(hostname)" "every node needs the repository at the same place"
for name in NNODES MASTER_ADDR RUN_DIR; do
    [[ -n ${!name:-} ]] || fail "$name is not set" "see the head of launch/train_multi_node.sh"
done
export PATH="${PYTHON_BIN:-${MEGATRON_RL_VENV:-$PWD/.venv}/bin}:$PATH"
ENTRY="${ENTRY:-launch/pretrain_grpo.py}"
MASTER_PORT="${MASTER_PORT:-29400}"
MAX_RESTARTS="${MAX_RESTARTS:-3}"
JOB_ID="${JOB_ID:-$(basename "$RUN_DIR")}"
NPROC="${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count())')}"
((NPROC > 0)) || fail "torch sees no GPU on $(hostname)" "set NPROC to the number of ranks per node to train on CPU"

# Overrides of the recipe by topic.
MODEL_ARGS=(${MODEL_PATH:+"model.path=$MODEL_PATH"})
PARALLEL_ARGS=()                                            # actor.pipeline_model_parallel_size=4
ROLLOUT_ARGS=()                                             # rollout.tensor_model_parallel_size=8
ALGO_ARGS=()                                                # algorithm.kl_coef=0.001
CKPT_ARGS=("trainer.run_dir=$RUN_DIR" checkpoint.resume=auto)  # trainer.save_freq=20

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"                           # one thread per rank; ranks share the cores
export TOKENIZERS_PARALLELISM=false                                      # tokenizer threads do not survive a fork
# Network. NCCL and gloo choose an interface; on machines with several, name the one that reaches the other nodes (a
# prefix: eth, ib, bond0):
#   export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# RDMA: the adapters that NCCL may use, and their traffic class or GID index if the fabric needs one:
#   export NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_IB_GID_INDEX=3 NCCL_IB_TC=106
# NCCL's choices, and the reason for a hang:
#   export NCCL_DEBUG=INFO TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1

# On a signal the run saves and exits with 75; ranks still running after GRACE_SECONDS are killed.
SIGNAL_ARGS=(--signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" --shutdown-timeout "${GRACE_SECONDS:-150}")
RDZV_ARGS=(--nnodes "$NNODES" --nproc-per-node "$NPROC" --max-restarts "$MAX_RESTARTS"
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$JOB_ID"
    ${RDZV_CONF:+--rdzv-conf "$RDZV_CONF"} ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"})
TRAIN_ARGS=("$RECIPE" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${ALGO_ARGS[@]}"
    "${CKPT_ARGS[@]}" "$@")
for argument in "$@"; do
    [[ $argument != --dry-run ]] || exec python "$ENTRY" "${TRAIN_ARGS[@]}" --world-size "$((NNODES * NPROC))"
done
exec bash launch/supervise.sh "$RUN_DIR" torchrun "${SIGNAL_ARGS[@]}" "${RDZV_ARGS[@]}" "$ENTRY" "${TRAIN_ARGS[@]}"
