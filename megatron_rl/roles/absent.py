# SPDX-License-Identifier: Apache-2.0
"""A role on a rank that is not one of its own."""

from __future__ import annotations

from megatron_rl.training.laid_out import LaidOutModel


class AbsentRole:
    """Stands for a role where it is not: its model by shape and layout, no weights, and nothing to call.

    Args:
        model: without parameters here.
    """

    policy_version = -1  # of no weights

    def __init__(self, model: LaidOutModel) -> None:
        self.model, self.optimizer = model, self

    def release(self) -> None:
        """There is nothing that generation does not need."""
