# SPDX-License-Identifier: Apache-2.0
"""Training of packed megatron-core models: heads, optimizers, and the roles built on them."""

import megatron_rl.parallel  # noqa: F401  installs the CPU runtime before this room imports megatron.core
