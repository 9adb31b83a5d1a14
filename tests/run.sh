#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up the environment when needed, then run pytest; arguments go to pytest:
#   bash tests/run.sh                  the fast tests, on CPU; two processes share the files
#   bash tests/run.sh -k reshard -x    some of them
#   bash tests/run.sh -m gpu           those that need a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh
export PATH="${MEGATRON_RL_VENV:-$PWD/.venv}/bin:$PATH"

export OMP_NUM_THREADS=1         # one thread per rank: the multi-rank tests run several ranks on few cores
export HF_HUB_OFFLINE=1          # tests make their models and data; nothing is downloaded
export TOKENIZERS_PARALLELISM=false

(($# == 0)) || exec python -m pytest --durations=15 "$@"

# Most tests keep one core busy. The process that runs behind shows what it did at the end.
claims="$(mktemp -d)"
python -m pytest tests --durations=15 --claims "$claims" --backwards >"$claims/log" 2>&1 &
behind=$!
trap 'kill "$behind" 2>/dev/null || true; rm -rf "$claims"' EXIT
status=0
python -m pytest tests --durations=15 --claims "$claims" || status=$?
wait "$behind" || status=$?
cat "$claims/log"
for process in in-front behind; do
    if [[ ! -e "$claims/finished-$process" ]]; then
        echo "tests/run.sh: the process $process ended before its last test" >&2
        ((status)) || status=1
    fi
done
exit "$status"
