# SPDX-License-Identifier: Apache-2.0
"""Captures one step of a run, to repeat it elsewhere and compare it number by number (docs/replay.md)."""

import megatron_rl.parallel  # noqa: F401  installs the CPU runtime before this room imports megatron.core
