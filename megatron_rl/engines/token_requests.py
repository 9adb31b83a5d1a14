# SPDX-License-Identifier: Apache-2.0
"""Requests of `policy.sample_requests`: token ids with sampling settings, stop strings and log-probs of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.endings import StopStrings
from megatron_rl.engines.protocol import Request, SamplingConfig
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.data.tokenizer import Tokenizer

_DEFAULT_TOP = 20  # vLLM's `max_logprobs`


@dataclass(frozen=True)
class TokenRequest:
    """A prompt to continue.

    Attributes:
        tokens: [p] token ids.
        seed: equal seeds give equal responses to equal prompts.
        stop: strings that end the response, which keeps the tokens of the string.
        stop_token_ids: token ids that end it, as part of it; `None` means the model's own.
        top_logprobs: number of likeliest tokens to return per sampled token, under the distribution sampled from.
        prompt_logprobs: `None` for none, or the number of likeliest tokens to return beside each prompt token, at
            temperature 1.
        version: name under which the engine keeps adapters (`AdapterSlots`); `None` means the policy's.
    """

    tokens: Sequence[int] | np.ndarray
    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    version: str | None = None

    @property
    def has_extras(self) -> bool:
        """Whether the engine needs ability "scores"."""
        return bool(self.stop) or self.top_logprobs > 0 or (self.prompt_logprobs, self.version) != (None, None)


@dataclass(frozen=True)
class Extras:
    """Parts of a `TokenRequest` that a `Request` lacks."""

    stop: StopStrings | None
    top: int
    prompt_top: int | None
    version: str | None = None


@dataclass(frozen=True)
class Scores:
    """Log-probs of prompt tokens and of the likeliest tokens.

    Attributes:
        top_ids, top_logprobs: [s, k] int32 and float32, the likeliest tokens at each sampled token.
        prompt_logprobs: [p] float32, NaN at the first token.
        prompt_top_ids, prompt_top_logprobs: [p, k], 0 and NaN at the first token.
    """

    top_ids: np.ndarray
    top_logprobs: np.ndarray
    prompt_logprobs: np.ndarray | None = None
    prompt_top_ids: np.ndarray | None = None
    prompt_top_logprobs: np.ndarray | None = None

    @classmethod
    def compute(
        cls, extras: Extras, tokens: np.ndarray, logprobs: torch.Tensor, prompt_logprobs: torch.Tensor | None
    ) -> Scores:
        """Select from log-probs of the whole vocabulary.

        Args:
            tokens: [p] prompt.
            logprobs: [s, v] at the sampled tokens.
            prompt_logprobs: [p, v] after each token of the prompt, if they are wanted.
        """
        values, ids = logprobs.float().topk(extras.top)
        found = [ids.cpu().numpy().astype(np.int32), values.cpu().numpy()]
        if prompt_logprobs is not None and extras.prompt_top is not None:
            before, own = prompt_logprobs[:-1].float(), torch.from_numpy(tokens[1:].astype(np.int64))
            values, ids = before.topk(extras.prompt_top)
            chosen = before.gather(1, own.to(before.device)[:, None])[:, 0]
            found += [_shift(chosen, math.nan), _shift(ids, 0).astype(np.int32), _shift(values, math.nan)]
        return cls(*found)

    @classmethod
    def read(cls, extras: Extras, likeliest: Sequence[Any], prompt: Sequence[Any]) -> Scores:
        """Select from an engine's arrays of ids and log-probs, whose rows are of the token itself, then the likeliest.

        Args:
            likeliest: ids and log-probs [at least 1 + top] at each sampled token; empty if no others are wanted.
            prompt: ids and log-probs [n, 1 + prompt_top] of parts of the prompt, without its first token.
        """
        ids, values = ([row[i][1 : 1 + extras.top] for row in likeliest] for i in range(2))
        shape = (-1, extras.top) if extras.top else (0, 0)
        found = [np.array(ids, np.int32).reshape(shape), np.array(values, np.float32).reshape(shape)]
        if extras.prompt_top is not None:
            ids, values = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*prompt, strict=True))
            top_ids = _shift(ids[:, 1:], 0).astype(np.int32)
            found += [_shift(values[:, 0], math.nan), top_ids, _shift(values[:, 1:], math.nan)]
        return cls(*found)


def _shift(values: torch.Tensor, first: float) -> np.ndarray:
    """Put a row in front that is filled with `first`."""
    return torch.cat([values.new_full((1, *values.shape[1:]), first), values]).cpu().numpy()


def build_requests(
    given: Sequence[TokenRequest], config: RunConfig, default: SamplingConfig, tokenizer: Tokenizer, vocab_size: int
) -> list[Request]:
    """Check requests, the same on every rank, and translate them for engines (UserError)."""
    requests = []
    for index, one in enumerate(given):
        for is_wrong, found, expected in _list_checks(one, config, vocab_size):
            if is_wrong:
                raise UserError(
                    f"request {index}: {found}",
                    source="policy.sample_requests(requests)",
                    expected=expected,
                    hint="docs/primitives.md, Requests",
                )
        stops = default.stop_token_ids if one.stop_token_ids is None else tuple(map(int, one.stop_token_ids))
        limits = one.temperature, one.max_tokens, stops, one.top_p, one.top_k, 0.0, config.rollout.max_kept_tokens
        extras = None
        if one.has_extras:
            stop = StopStrings(one.stop, tokenizer.decode) if one.stop else None
            extras = Extras(stop, one.top_logprobs, one.prompt_logprobs, one.version)
        tokens = np.asarray(one.tokens, np.int32)
        requests.append(Request(index, tokens, one.seed, SamplingConfig(*limits), extras=extras))
    return requests


def _list_checks(one: Any, config: RunConfig, vocab_size: int) -> Iterator[tuple[bool, str, str]]:
    """Yield whether a part of a request is wrong, the part, and what is expected."""
    yield not isinstance(one, TokenRequest), f"a {type(one).__name__}", "a TokenRequest"
    rollout, longest = config.rollout, config.data.max_prompt_length + config.data.max_response_length
    tokens, strings = np.asarray(one.tokens), one.stop
    is_bad = tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu"
    is_bad = is_bad or tokens.min() < 0 or tokens.max() >= vocab_size
    yield is_bad, f"{tokens.dtype} tokens {list(tokens.shape)}", f"[p] token ids below {vocab_size}, at least one"
    yield not 0 <= one.seed < 1 << 63, f"seed {one.seed}", "0 to 2^63 - 1"
    found = f"{tokens.size} tokens, max_tokens {one.max_tokens}"
    expected = f"at least 1 to sample, at most {longest} in all (data.max_prompt_length + data.max_response_length)"
    yield not 0 < one.max_tokens <= longest - tokens.size, found, expected
    is_valid = one.temperature >= 0 and 0 < one.top_p <= 1 and (one.top_k == -1 or one.top_k > 0)
    found = f"temperature {one.temperature}, top_p {one.top_p}, top_k {one.top_k}"
    yield not is_valid, found, "temperature >= 0, 0 < top_p <= 1, top_k above 0, or -1 for all"
    yield isinstance(strings, str) or not all(strings), f"stop {strings!r:.40}", "a list of strings, none empty"
    most = rollout.engine_options.get("max_logprobs", _DEFAULT_TOP) if rollout.supports("options") else -1
    most = vocab_size if most < 0 else most
    counts = one.top_logprobs, one.prompt_logprobs or 0
    is_valid, expected = all(0 <= k <= most for k in counts), f"0 to {most}; rollout.engine_options.max_logprobs"
    yield not is_valid, f"log-probs of {max(counts)} tokens", expected
    found = f"stop strings or further log-probs, and rollout.engine {rollout.engine}"
    yield one.has_extras and not rollout.supports("scores"), found, "vllm or hf"
    is_able = config.hybrid.lora == "adapter" and rollout.supports("vllm_modes")
    yield one.version is not None and not is_able, f"version {one.version!r}", "vllm with hybrid.lora adapter"
    is_cut = one.temperature > 0 and (one.top_p < 1 or one.top_k > 0)
    is_recorded = rollout.is_ever_truncated or rollout.model_runner == "v1" or not torch.cuda.is_available()
    is_able = rollout.supports("truncation") and (is_recorded or not rollout.supports("vllm_modes"))
    is_able = is_able and not rollout.draft_tokens
    yield is_cut and not is_able, "top_p or top_k", "vllm with rollout.model_runner v1, hf or megatron; no draft_tokens"
