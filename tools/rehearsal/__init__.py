# SPDX-License-Identifier: Apache-2.0
"""Fake GPUs: graphs recorded on a CPU, and jobs of fake tensors that are run and measured."""
