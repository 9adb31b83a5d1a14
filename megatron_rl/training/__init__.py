# SPDX-License-Identifier: Apache-2.0
"""Roles that run megatron-core models: what is trained, and what only scores."""

import megatron_rl.parallel  # noqa: F401  installs the CPU runtime before this room imports megatron.core
