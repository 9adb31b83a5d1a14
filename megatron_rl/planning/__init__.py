# SPDX-License-Identifier: Apache-2.0
"""Predictions for a job before it runs: memory per phase, bytes per link, seconds, and layouts that fit."""
