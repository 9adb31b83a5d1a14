# SPDX-License-Identifier: Apache-2.0
"""Advantages, losses, KL: pure torch. What is known by name is listed in `catalog.py`."""
