# SPDX-License-Identifier: Apache-2.0
"""A second opinion on answers that are numbers, for launch/recipes/smollm2_sums.yaml."""

import re


def last_number(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    """Return 1.0 if the last integer of the response is the ground truth, else 0.0."""
    numbers = re.findall(r"-?\d+", solution_str.replace(",", ""))
    return float(numbers[-1:] == [ground_truth])
