# SPDX-License-Identifier: Apache-2.0
"""SGLang's server (0.5.23) as an engine; on a CPU it computes with its own torch code (`launch/setup_sglang.sh`)."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_rl.engines.protocol import EngineSpec, Request, Sampled
from megatron_rl.engines.servers.served import ServedEngine
from megatron_rl.engines.servers.server_apis import Ask, check_event
from megatron_rl.engines.servers.server_client import ServerAnswer, ServerFailure
from megatron_rl.engines.servers.server_key import START_SGLANG

_ON_CPU = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--mem-fraction-static": "0.1",
}
_IDLE_SECONDS = 60
_ROOM_FOR_TIES = 2  # kernels keep all tokens tied at the boundary; a larger set aborts the request


class SglangServer:
    """The protocol of SGLang; on a CPU, seeds have no effect."""

    path, health = "/generate", "/health"

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._version = spec, ""

    def make_command(self, directory: Path, port: int) -> list[str]:
        """Use `rollout.server.python`, which `config.rollout_checks` requires."""
        spec, config = self._spec, self._spec.config
        assert config.server.python is not None
        seed = str(spec.seed % (1 << 32))  # NumPy's global seed has 32 bits
        longest = spec.max_prompt_length + spec.max_response_length
        command = [config.server.python, "-W", "ignore", "-c", START_SGLANG, "--model-path", str(directory)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", spec.dtype, "--skip-tokenizer-init"]
        command += ["--tp-size", str(config.tensor_model_parallel_size), "--context-length", str(longest)]
        command += ["--max-running-requests", str(config.max_num_seqs), "--random-seed", seed]
        command += ["--log-level", "warning", "--skip-server-warmup", "--incremental-streaming-output"]
        command += ["--sampling-mask-max-tokens", str(_ROOM_FOR_TIES * config.max_kept_tokens)]
        if spec.process.device.type == "cpu":
            tokens = str(longest * (config.max_num_seqs + 1))
            command += ["--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", tokens]
            return [*command, *chain.from_iterable(_ON_CPU.items())]
        return [*command, "--mem-fraction-static", str(config.gpu_memory_utilization)]

    def list_environment(self) -> dict[str, str]:
        """Set SGLang's CPU variables; without explicit cores, TP ranks must not outnumber NUMA nodes."""
        if self._spec.process.device.type != "cpu":
            return {}
        cores = "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * self._spec.config.tensor_model_parallel_size)
        return {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores}

    def make_body(self, request: Request) -> dict[str, Any]:
        """Build the body; SGLang's `ignore_eos` disables all stop tokens, and kept sets need `top_k`."""
        sampling = request.sampling
        limits: dict[str, Any] = {}
        if sampling.is_truncated:
            top_k = min(sampling.top_k, sampling.max_kept_tokens) if sampling.top_k > 0 else sampling.max_kept_tokens
            limits = {"top_p": sampling.top_p, "top_k": top_k, "min_p": sampling.min_p}
        return {
            "input_ids": request.tokens.tolist(),
            "stream": True,
            "return_logprob": True,
            "return_sampling_mask": sampling.is_truncated,
            "sampling_params": limits
            | {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_tokens,
                "sampling_seed": request.seed & 0x7FFFFFFF,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": not sampling.stop_token_ids,
            },
        }

    def read(self, event: Any, answer: ServerAnswer) -> None:
        """Append the new tokens of an event, whose lists may be cumulative."""
        check_event(event)
        meta, reason = event["meta_info"], event["meta_info"]["finish_reason"]
        if meta["weight_version"] != self._version:
            raise ServerFailure(f"a response of weights {meta['weight_version']!r} instead of {self._version!r}")
        if reason is not None and reason["type"] == "abort":
            raise ServerFailure(f"the server gave a request up: {reason}")
        answer.count_cached(meta.get("cached_tokens"))
        new = meta["completion_tokens"] - len(answer.tokens)
        tokens, logprobs, kept = [], [], []
        if new and answer.request.sampling.is_truncated:  # `output_token_logprobs` ignore truncation
            logprobs, kept = meta["output_token_sampling_logprobs"][-new:], meta["output_token_sampling_mask"][-new:]
        elif new:
            logprobs = [entry[0] for entry in meta["output_token_logprobs"][-new:]]
        if new:
            tokens = event["output_ids"][-new:]
        answer.extend(tokens, logprobs, reason and reason["type"], kept)

    def complete(self, ask: Ask, sampled: list[Sampled]) -> list[Sampled]:
        """Return the responses unchanged."""
        return sampled

    def load(self, ask: Ask, directory: Path, version: str) -> None:
        """Flush the prefix cache and load weights, which running requests block."""
        ask(f"/flush_cache?timeout={_IDLE_SECONDS}")  # waits for health checks and closed connections
        body = {"model_path": str(directory), "weight_version": version, "flush_cache": True}
        answer = ask("/update_weights_from_disk", body)
        if not answer["success"]:
            raise ServerFailure(f"the server did not load its weights: {answer['message']}")
        self._version = version


def build_sglang(spec: EngineSpec) -> ServedEngine:
    """Build `sglang`."""
    return ServedEngine(spec, SglangServer(spec))
