# SPDX-License-Identifier: Apache-2.0
import megatron_rl.parallel  # noqa: F401  installs the CPU runtime before this room imports megatron.core
