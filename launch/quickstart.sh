#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a trained policy on a toy task, on any machine: environment, task, warm start, GRPO.
#   bash launch/quickstart.sh                            needs no GPU
#   NPROC=2 bash launch/quickstart.sh trainer.total_steps=5
# Arguments go to launch/pretrain_grpo.py. Steps whose result exists are skipped. If the recipe's TP2 x PP2 does not
# divide the number of ranks, the layout drops PP, then TP.
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '3,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NPROC="${NPROC:-4}"
TASK_DIR=checkpoints/toy_arithmetic
WARM_START_DIR=$TASK_DIR/warm_start
RUN_DIR=checkpoints/runs/quickstart-$(date +%Y%m%d-%H%M%S)

TASK_ARGS=(--out "$TASK_DIR")
SFT_NPROC=2
SFT_ARGS=(launch/recipes/toy_arithmetic_sft.yaml "trainer.run_dir=$WARM_START_DIR")
GRPO_ARGS=(launch/recipes/toy_arithmetic.yaml)
if ((NPROC % 2)); then
    GRPO_ARGS+=(actor.tensor_model_parallel_size=1 actor.pipeline_model_parallel_size=1 actor.sequence_parallel=false)
elif ((NPROC % 4)); then
    GRPO_ARGS+=(actor.pipeline_model_parallel_size=1)
fi

# A run directory on the command line overrides the default.
has_run_dir=false
for argument in "$@"; do
    case $argument in
        trainer.run_dir=*) RUN_DIR=${argument#trainer.run_dir=} has_run_dir=true ;;
    esac
done
$has_run_dir || GRPO_ARGS+=("trainer.run_dir=$RUN_DIR")

bash launch/setup.sh
export PATH="${MEGATRON_RL_VENV:-$PWD/.venv}/bin:$PATH"

export OMP_NUM_THREADS=1              # one thread per rank; the ranks share the cores
export TOKENIZERS_PARALLELISM=false   # tokenizer threads do not survive a fork
export HF_HUB_OFFLINE=1               # everything needed is made here
export VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_PLUGINS=""

if [[ -f $TASK_DIR/train.jsonl && -f $TASK_DIR/model/config.json ]]; then
    echo "quickstart: toy task is in $TASK_DIR"
else
    echo "quickstart: making the toy task in $TASK_DIR"
    python tools/make_toy_task.py "${TASK_ARGS[@]}"
fi

if [[ -f $WARM_START_DIR/summary.json ]]; then
    echo "quickstart: warm start is in $WARM_START_DIR"
else
    echo "quickstart: supervised warm start on $SFT_NPROC ranks"
    rm -rf "$WARM_START_DIR"   # left by an interrupted run
    bash launch/supervise.sh "" torchrun --standalone --nproc-per-node "$SFT_NPROC" launch/pretrain_sft.py "${SFT_ARGS[@]}"
fi

echo "quickstart: GRPO on $NPROC ranks"
bash launch/supervise.sh "" torchrun --standalone --nproc-per-node "$NPROC" launch/pretrain_grpo.py "${GRPO_ARGS[@]}" "$@"

if [[ -f $RUN_DIR/summary.json ]]; then
    echo "quickstart: done; a look at $RUN_DIR/curves.png shows what was learned"
else
    echo "quickstart: the run wrote no $RUN_DIR/summary.json (as expected with --dry-run)"
fi
