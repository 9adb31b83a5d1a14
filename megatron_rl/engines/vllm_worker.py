# SPDX-License-Identifier: Apache-2.0
"""What every worker of a vLLM server imports before it loads a model (`--worker-extension-cls`).

A server needs what the engine in the process needs: on CPU, linears must keep their weight. Without it a server that
is told to load new weights takes the embeddings and the norms, leaves the rest, and says that all went well.
"""

from __future__ import annotations

import torch

from megatron_rl.engines.vllm import prepare_vllm

prepare_vllm(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class ServedWorker:
    """Adds nothing to vLLM's worker: importing this file is the point."""
