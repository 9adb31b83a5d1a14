#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a launcher, hand SIGTERM and SIGUSR1 on to it, and say by the exit code whether the run is to continue.
#   bash launch/supervise.sh RUN_DIR torchrun ...
# torchrun exits with 1 after a signal, whatever its ranks did. A run that was stopped by one and has saved leaves
# RUN_DIR/stopped.json; this script exits with 75 then: start the same command again (docs/checkpoints.md). After a
# failure it says again what ended the run.
set -euo pipefail

run_dir=$1
shift
rm -f "${run_dir:+$run_dir/stopped.json}"
said="$(mktemp)" || said=/dev/null
# A copy of stderr. A signal to all processes of the job must not end the copying before them.
exec 3> >(trap '' TERM INT HUP QUIT USR1; exec tee "$said" >&2)
copying=${!:-}
"$@" 2>&3 3>&- &
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
exec 3>&-
for _ in {1..20}; do kill -0 "$copying" 2>/dev/null || break; sleep 0.1; done
if ((status != 0)) && [[ -n $run_dir && -f $run_dir/stopped.json ]]; then
    status=75
elif ((status != 0)); then
    bash "$(dirname "${BASH_SOURCE[0]}")/last_error.sh" "$said"
fi
[[ ! -f $said ]] || rm -f "$said"
exit "$status"
