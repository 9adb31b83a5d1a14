# SPDX-License-Identifier: Apache-2.0
"""The worker extension of a vLLM server, imported before the model is loaded (`--worker-extension-cls`).

Its import patches vLLM; otherwise a weight update on a CPU would change only embeddings and norms.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.engines.vllm.vllm_library import prepare_vllm
from megatron_rl.engines.vllm.vllm_recorders import KeptSetRecorder

prepare_vllm(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class ServedWorker:
    """A mixin of vLLM's worker with methods for `/collective_rpc`."""

    model_runner: Any
    kept_sets: KeptSetRecorder | None = None

    def record_kept_sets(self) -> None:
        """Start recording the token sets that truncated sampling draws from; drop earlier ones."""
        if self.kept_sets is None:
            self.kept_sets = KeptSetRecorder(self.model_runner)
        self.kept_sets.clear()

    def take_kept_sets(self, requests: Sequence[tuple[str, int, int]]) -> list[list[str]]:
        """Remove and return the sets recorded for each request (name, first position, number of tokens).

        Each result is [token ids, set sizes], as base64 of little-endian int32.
        """
        assert self.kept_sets is not None, "record_kept_sets comes first"
        taken = [self.kept_sets.take(*request) for request in requests]
        return [[base64.b64encode(x.astype("<i4").tobytes()).decode() for x in (one.ids, one.counts)] for one in taken]
