#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a launcher, forward SIGTERM and SIGUSR1 to it, and exit with 75 if the run is to be continued.
#   bash launch/supervise.sh RUN_DIR torchrun ...
# torchrun exits with 1 after a signal, whatever its ranks did. A run that saved after a signal leaves
# RUN_DIR/stopped.json, for which this script exits with 75: start the same command again (docs/checkpoints.md). A server
# that saved all models leaves saved.json: 0. After a failure this script prints the error again.
set -euo pipefail

run_dir=$1
shift
rm -f "${run_dir:+$run_dir/stopped.json}" "${run_dir:+$run_dir/saved.json}"
said="$(mktemp)" || said=/dev/null
# A copy of stderr. A signal to all processes of the job must not end tee before the writers.
exec 3> >(trap '' TERM INT HUP QUIT USR1; exec tee "$said" >&2)
copying=${!:-}
"$@" 2>&3 3>&- &
child=$!
# shellcheck disable=SC2064  # $child is already set
for name in TERM USR1; do trap "kill -$name $child 2>/dev/null || true" "$name"; done
status=0
wait "$child" || status=$?
# A signal ends wait early with 128 + its number while the launcher is still running.
while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
done
exec 3>&-
for _ in {1..20}; do kill -0 "$copying" 2>/dev/null || break; sleep 0.1; done
if ((status != 0)) && [[ -n $run_dir && -f $run_dir/stopped.json ]]; then
    status=75
elif ((status != 0)) && [[ -n $run_dir && -f $run_dir/saved.json ]]; then
    status=0
elif ((status != 0)); then
    bash "$(dirname "${BASH_SOURCE[0]}")/last_error.sh" "$said"
fi
[[ ! -f $said ]] || rm -f "$said"
exit "$status"
