#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up the environment when needed, then run pytest; other arguments go to pytest:
#   bash tests/run.sh                  the fast tests, on CPU; two processes share them, a third has the static checks
#   bash tests/run.sh --all            the fast tests, then all slow ones
#   bash tests/run.sh --ci             the fast tests, then one of five parts, within 40 minutes in all
#   bash tests/run.sh -k reshard -x    some of the fast ones
#   bash tests/run.sh -m gpu           those that need a GPU
# The part is the number of commits modulo five, or of days where that number is not known: a quarter of the slow tests,
# or the fast tests of what imports megatron-core on Python 3.12, whose megatron-core is the one that GPU users have. A
# slow test that would not end in time is not begun, and is named at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$(date +%s)

bash launch/setup.sh
venv="${MEGATRON_RL_VENV:-$PWD/.venv}"
plain_path="$PATH"
export PATH="$venv/bin:$PATH"

export OMP_NUM_THREADS=1         # one thread per rank: the multi-rank tests run several ranks on few cores
export HF_HUB_OFFLINE=1          # tests make their models and data; nothing is downloaded
export TOKENIZERS_PARALLELISM=false

case "${1:-}" in
    "" | --all | --ci) ;;
    *) exec python -m pytest --durations=15 "$@" ;;
esac

STATIC_CHECKS=(tests/test_types.py tests/test_house.py tests/docs)
USE_MEGATRON_CORE=(tests/{parallel,models,training,checkpoint,transfer,weights})
SLOW_SECONDS=720     # of the part; no slow test is to end later
BEGIN_SECONDS=2160   # after the start, the same
LIMIT_SECONDS=3600   # after the start: a process of the part that still runs hangs; it is ended, and has failed
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

# Run a tier with the arguments given, by default the fast tests. Most tests keep one core busy; the processes behind print at the end.
share() {
    local claims name
    local -A running=()
    claims="$(mktemp -d "$scratch/XXXXXX")"
    if (($# == 0)); then
        set -- tests
        run "$claims" checks "${STATIC_CHECKS[@]}" >"$claims/log-checks" 2>&1 &
        running[checks]=$!
    fi
    run "$claims" behind "$@" --backwards >"$claims/log-behind" 2>&1 &
    running[behind]=$!
    processes=("${running[@]}")
    run "$claims" in-front "$@" || status=$?
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

# Print a Python 3.12 that works: the one on the PATH, or one of pyenv, whose commands are those of one version.
find_python_312() {
    local python
    for python in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3.12; do
        PATH="$plain_path" "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 && { echo "$python"; return; }
    done
    return 1
}

# Run the fast tests of what imports megatron-core on Python 3.12, in an environment of its own.
share_on_312() {
    PATH="$plain_path" MEGATRON_RL_PYTHON="$1" MEGATRON_RL_VENV="$venv-3.12" bash launch/setup.sh || { status=1; return; }
    PATH="$venv-3.12/bin:$plain_path" share "${USE_MEGATRON_CORE[@]}"
}

share
if [[ "${1:-}" == --all ]]; then
    share tests -m slow
elif [[ "${1:-}" == --ci ]]; then
    now=$(date +%s)
    deadline=$((now + SLOW_SECONDS < started + BEGIN_SECONDS ? now + SLOW_SECONDS : started + BEGIN_SECONDS))
    left=$((started + LIMIT_SECONDS - now))
    limit=(timeout --kill-after=10 "$((left > 60 ? left : 60))")
    part=$(($(count_commits) % 5))
    if ((part == 0)) && python="$(find_python_312)"; then
        share_on_312 "$python"
    else
        ((part)) || echo "tests/run.sh: no Python 3.12 was found for the tests of its megatron-core; slow part 4 runs instead" >&2
        share tests -m slow --part "$((part ? part : 4))/4" --deadline "$deadline" -o faulthandler_timeout=400
    fi
fi
exit "$status"
