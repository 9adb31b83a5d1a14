# SPDX-License-Identifier: Apache-2.0
"""GPUs that are not there: graphs recorded on a CPU, and jobs of fake tensors that are run and measured."""
