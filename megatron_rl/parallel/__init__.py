# SPDX-License-Identifier: Apache-2.0
"""Who computes what with whom: layout arithmetic (pure), process groups, collectives, the CPU runtime.

Importing anything from this room installs the CPU runtime first (a no-op where CUDA is available), so
that no room above can import `megatron.core` without it.
"""

from megatron_rl.parallel import cpu_runtime

cpu_runtime.install()
