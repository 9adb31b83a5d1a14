# SPDX-License-Identifier: Apache-2.0
"""What every worker of a vLLM server imports before it loads a model (`--worker-extension-cls`).

A server needs what the engine in the process needs: on CPU, linears must keep their weight. Without it a server that
is told to load new weights takes the embeddings and the norms, leaves the rest, and says that all went well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.engines.servers.server_apis import write_kept_sets
from megatron_rl.engines.vllm.vllm_library import prepare_vllm
from megatron_rl.engines.vllm.vllm_truncation import KeptSetRecorder

prepare_vllm(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class ServedWorker:
    """What is added to vLLM's worker: methods that `/collective_rpc` calls."""

    model_runner: Any
    kept_sets: KeptSetRecorder | None = None

    def record_kept_sets(self) -> None:
        """From now on remember what truncated sampling draws from; forget what was remembered before."""
        if self.kept_sets is None:
            self.kept_sets = KeptSetRecorder(self.model_runner)
        self.kept_sets.clear()

    def take_kept_sets(self, requests: Sequence[tuple[str, int, int]]) -> list[list[str]]:
        """What tokens were drawn from: the name of each request, the place of its first token, their number."""
        assert self.kept_sets is not None, "record_kept_sets comes first"
        return [write_kept_sets(self.kept_sets.take(*request)) for request in requests]
