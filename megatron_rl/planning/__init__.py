# SPDX-License-Identifier: Apache-2.0
"""What a run will take before it runs: memory per phase, bytes per link, seconds, and which layouts fit."""
