#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a launcher, hand SIGTERM and SIGUSR1 on to it, and say by the exit code whether the run is to go on.
#   bash launch/supervise.sh RUN_DIR torchrun ...
# torchrun exits with 1 after a signal, whatever its ranks did. A run that was stopped by one and has saved leaves
# RUN_DIR/stopped.json; this script exits with 75 then: start the same command again (docs/checkpoints.md).
set -euo pipefail

run_dir=$1
shift
rm -f "${run_dir:+$run_dir/stopped.json}"
"$@" &
child=$!
# shellcheck disable=SC2064  # the number of the child is known now
for name in TERM USR1; do trap "kill -$name $child 2>/dev/null || true" "$name"; done
status=0
wait "$child" || status=$?
# A signal ends wait early with 128 + its number while the launcher is still running.
while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
done
if ((status != 0)) && [[ -n $run_dir && -f $run_dir/stopped.json ]]; then
    exit 75
fi
exit "$status"
