# SPDX-License-Identifier: Apache-2.0
"""megatron-core models of the HF families, one rank's stages at a time."""

import megatron_rl.parallel  # noqa: F401  installs the CPU runtime before this room imports megatron.core
