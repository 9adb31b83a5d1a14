#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up the environment when needed, then run pytest; other arguments go to pytest:
#   bash tests/run.sh                  the fast tests, on CPU; two processes share them, a third has the static checks
#   bash tests/run.sh --all            the fast tests, then all slow ones
#   bash tests/run.sh --ci             the fast tests, then a quarter of the slow ones, within 40 minutes in all
#   bash tests/run.sh -k reshard -x    some of the fast ones
#   bash tests/run.sh -m gpu           those that need a GPU
# The quarter is the number of commits modulo four, or of days where that number is not known. A slow test that would
# not end in time is not begun, and is named at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$(date +%s)

bash launch/setup.sh
export PATH="${MEGATRON_RL_VENV:-$PWD/.venv}/bin:$PATH"

export OMP_NUM_THREADS=1         # one thread per rank: the multi-rank tests run several ranks on few cores
export HF_HUB_OFFLINE=1          # tests make their models and data; nothing is downloaded
export TOKENIZERS_PARALLELISM=false

case "${1:-}" in
    "" | --all | --ci) ;;
    *) exec python -m pytest --durations=15 "$@" ;;
esac

STATIC_CHECKS=(tests/test_types.py tests/test_house.py tests/docs)
SLOW_SECONDS=720     # of the quarter; no slow test is to end later
BEGIN_SECONDS=2160   # after the start, the same
LIMIT_SECONDS=3600   # after the start: a process of the quarter that still runs hangs; it is ended, and has failed
scratch="$(mktemp -d)"
limit=()
processes=()
status=0
trap 'kill "${processes[@]}" 2>/dev/null || true; rm -rf "$scratch"' EXIT

# Run pytest as the process NAME of a tier, with further arguments.
run() {
    local claims=$1 name=$2
    "${limit[@]}" python -m pytest "${@:3}" --durations=15 --claims "$claims" --sign "$claims/finished-$name"
}

# Run a tier with the arguments given. Most tests keep one core busy; the processes behind print at the end.
share() {
    local claims name
    local -A running=()
    claims="$(mktemp -d "$scratch/XXXXXX")"
    if (($# == 0)); then
        run "$claims" checks "${STATIC_CHECKS[@]}" >"$claims/log-checks" 2>&1 &
        running[checks]=$!
    fi
    run "$claims" behind tests "$@" --backwards >"$claims/log-behind" 2>&1 &
    running[behind]=$!
    processes=("${running[@]}")
    run "$claims" in-front tests "$@" || status=$?
    for name in "${!running[@]}"; do
        wait "${running[$name]}" || status=$?
        cat "$claims/log-$name"
    done
    processes=()
    for name in in-front "${!running[@]}"; do
        if [[ ! -e "$claims/finished-$name" ]]; then
            echo "tests/run.sh: the process $name ended before its last test" >&2
            ((status)) || status=1
        fi
    done
}

# Print a number that grows by one per commit, or per day.
count_commits() {
    if [[ "$(git rev-parse --is-shallow-repository 2>/dev/null)" == false ]]; then
        git rev-list --count HEAD
    else
        echo $((started / 86400))
    fi
}

share
if [[ "${1:-}" == --all ]]; then
    share -m slow
elif [[ "${1:-}" == --ci ]]; then
    now=$(date +%s)
    deadline=$((now + SLOW_SECONDS < started + BEGIN_SECONDS ? now + SLOW_SECONDS : started + BEGIN_SECONDS))
    left=$((started + LIMIT_SECONDS - now))
    limit=(timeout --kill-after=10 "$((left > 60 ? left : 60))")
    share -m slow --part "$(($(count_commits) % 4 + 1))/4" --deadline "$deadline" -o faulthandler_timeout=400
fi
exit "$status"
