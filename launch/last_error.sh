#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Print again the error that ended a run, which torchrun follows with some forty lines of its own.
#   bash launch/last_error.sh FILE
# FILE is the launcher's stderr, with or without srun's labels. Prints nothing if it contains no error message.
set -euo pipefail

awk '
    { label = match($0, /^ *[0-9]+: /) ? substr($0, 1, RLENGTH) : ""; line = substr($0, length(label) + 1) }
    line ~ /^error(:| on rank )/ { block = line; from = label; is_open = 1; is_bare = line ~ /^error: *$/; next }
    label != from || !is_open { next }
    line ~ /^[EW][0-9][0-9][0-9][0-9] / || !(is_bare || line ~ /^ /) { is_open = 0; next }
    { block = block "\n" line }
    END { if (block != "") print "\nThe run ended with this error:\n" block }
' "$1" >&2
