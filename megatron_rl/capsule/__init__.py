# SPDX-License-Identifier: Apache-2.0
"""One step of a run in a directory, to be done again elsewhere and compared number by number (docs/replay.md)."""

import megatron_rl.parallel  # noqa: F401  installs the CPU runtime before this room imports megatron.core
