# SPDX-License-Identifier: Apache-2.0
"""Models of the Hugging Face families, built from megatron-core: the pipeline stages of one rank."""

import megatron_rl.parallel  # noqa: F401  installs the CPU runtime before this room imports megatron.core
