#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Add this machine's rollout engines to a run with schedule.elastic=true, also while it runs (docs/elastic.md). An engine
# that fails is started again. All end when the run has ended; after SIGUSR1 or SIGTERM they give their requests back.
#   bash launch/engine.sh RUN_DIR
#
#   RUN_DIR        trainer.run_dir of the run, on a disk that this machine and the run's share
#   TP             ranks per engine, the run's rollout.tensor_model_parallel_size   (default: 1)
#   ENGINES        engines on this machine                   (default: the GPUs that torch sees / TP, without GPUs 1)
#   PATIENCE       seconds to wait for the run to start, or to come back            (default: 600)
#   MAX_RESTARTS   of each engine                                                   (default: 100)
#   PYTHON_BIN     as in train_single_node.sh
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '3,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
fi
[[ $# == 1 ]] || {
    printf 'engine: error: one argument is needed\nusage: bash launch/engine.sh RUN_DIR\n' >&2
    exit 2
}
RUN_DIR=$(realpath -m "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="${PYTHON_BIN:-${MEGATRON_RL_VENV:-$PWD/.venv}/bin}:$PATH"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
TP="${TP:-1}"
GPUS="${CUDA_VISIBLE_DEVICES:-$(python -c 'import torch; print(",".join(map(str, range(torch.cuda.device_count()))))')}"
IFS=, read -ra GPUS <<<"$GPUS"
ENGINES="${ENGINES:-$((${#GPUS[@]} < TP ? 1 : ${#GPUS[@]} / TP))}"
LAUNCHER=(python)
((TP == 1)) || LAUNCHER=(torchrun --standalone --nproc-per-node "$TP" --signals-to-handle "SIGTERM,SIGUSR1"
    --shutdown-timeout 60)

run_engine() {
    local child="" leaving="" restarts=0 status devices=("${GPUS[@]:$1 * TP:TP}")
    [[ -z ${devices[*]} ]] || export CUDA_VISIBLE_DEVICES="$(IFS=, && echo "${devices[*]}")"
    trap 'leaving=1; [[ -z $child ]] || kill -USR1 "$child" 2>/dev/null || true' TERM USR1
    while [[ -z $leaving ]]; do
        "${LAUNCHER[@]}" launch/engine.py "$RUN_DIR" --patience "${PATIENCE:-600}" &
        child=$!
        status=0
        wait "$child" || status=$?
        # A signal ends wait early with 128 + its number while the engine is still running.
        while kill -0 "$child" 2>/dev/null; do
            status=0
            wait "$child" || status=$?
        done
        ((status != 0)) || return 0
        # A mistake of the user, or too many failures: 2 is the status of the first.
        ((status != 2 && ++restarts <= ${MAX_RESTARTS:-100})) || break
        sleep 1
    done
    [[ -n $leaving ]] || return "$status"
}

engines=()
# shellcheck disable=SC2064  # the list is read when a signal comes
trap 'kill -USR1 "${engines[@]}" 2>/dev/null || true' TERM USR1
for ((number = 0; number < ENGINES; number++)); do
    run_engine "$number" &
    engines+=($!)
done
status=0
for engine in "${engines[@]}"; do
    while kill -0 "$engine" 2>/dev/null; do wait "$engine" 2>/dev/null || true; done
    wait "$engine" || status=$?
done
exit "$status"
