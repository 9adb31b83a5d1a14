# SPDX-License-Identifier: Apache-2.0
"""The worker extension of a vLLM server, imported before the model is loaded (`--worker-extension-cls`).

Its import patches vLLM; otherwise a weight update on a CPU would change only embeddings and norms, and leave fused
experts in another order than their kernel reads.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from megatron_rl.engines.vllm.vllm_library import KeptSetRecorder, prepare_vllm

prepare_vllm(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _pack_reloaded_experts() -> None:
    """Patch vLLM to reorder fused experts for its CPU kernel at every weight load, not only at the first."""
    methods = import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    method = methods.UnquantizedFusedMoEMethod
    set_up = method._setup_kernel

    def set_up_and_pack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_first = self.moe_kernel is None
        set_up(self, layer, w13, w2)
        if not is_first:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = set_up_and_pack


if not torch.cuda.is_available():
    _pack_reloaded_experts()


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
        """Take the sets of requests (name, first position, tokens): [ids, sizes] as base64 of little-endian int32."""
        assert self.kept_sets is not None, "record_kept_sets comes first"
        taken = [self.kept_sets.take(*request) for request in requests]
        return [[base64.b64encode(x.astype("<i4").tobytes()).decode() for x in (one.ids, one.counts)] for one in taken]
