# SPDX-License-Identifier: Apache-2.0
"""Models on megatron-core: their weights in a layout, what is made of their hidden states, and optimizer steps."""

import megatron_rl.parallel  # noqa: F401  installs the CPU runtime before this room imports megatron.core
