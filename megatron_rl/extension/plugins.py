# SPDX-License-Identifier: Apache-2.0
"""Import of plugins, Python files that register advantage estimators, policy losses and rollout engines:

from megatron_rl.algorithms.advantages import register_advantage_estimator

@register_advantage_estimator("best_of_group")
def compute_best_of_group(inputs, config):
    return inputs.expand([float(s == scores.max()) for scores in inputs.grouped_scores() for s in scores])
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.extension.user_code import import_file


def load_plugins(paths: Sequence[str]) -> None:
    """Import plugins, once per process.

    Args:
        paths: relative to the working directory.

    Raises:
        UserError: missing file, failed import (with its line), or taken name.
    """
    for path in paths:
        import_file(path, "algorithm.plugins", "Python files")
