# SPDX-License-Identifier: Apache-2.0
"""Advantages, losses and KL in pure torch. `catalog.py` lists all named algorithms."""
