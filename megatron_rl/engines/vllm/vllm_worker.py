# SPDX-License-Identifier: Apache-2.0
"""The extension of each worker of a vLLM server, imported before it loads a model (`--worker-extension-cls`).

Servers need the patches of the in-process engine: on CPU, linear layers must keep their weight. Without them, a weight
update of a server changes only embeddings and norms, and still reports success.
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
    """A mixin of vLLM's worker with methods for `/collective_rpc`."""

    model_runner: Any
    kept_sets: KeptSetRecorder | None = None

    def record_kept_sets(self) -> None:
        """Start recording the kept sets of truncated sampling, and drop earlier ones."""
        if self.kept_sets is None:
            self.kept_sets = KeptSetRecorder(self.model_runner)
        self.kept_sets.clear()

    def take_kept_sets(self, requests: Sequence[tuple[str, int, int]]) -> list[list[str]]:
        """Return the encoded kept sets of (name, position of the first token, number of tokens) for each request."""
        assert self.kept_sets is not None, "record_kept_sets comes first"
        return [write_kept_sets(self.kept_sets.take(*request)) for request in requests]
