# SPDX-License-Identifier: Apache-2.0
"""Advantages, losses, KL: pure torch. Importing the room registers the estimators and losses that come with it."""

from megatron_rl.algorithms import estimators, policy_losses  # noqa: F401
