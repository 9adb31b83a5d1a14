# SPDX-License-Identifier: Apache-2.0
"""Rollouts with transformers' `generate`: slow and simple, for debugging and as the parity reference.

Each row has its own seed: sampling is greedy decoding of `logits / temperature + Gumbel noise` with a generator per row
(the Gumbel-max trick).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from megatron_rl.engines.protocol import EngineSpec, EngineWeights, Request, Sampled, share_params
from megatron_rl.engines.token_requests import Scores
from megatron_rl.engines.truncation import add_gumbel_noise, truncate
from megatron_rl.engines.wrappers import WaitingRequests
from megatron_rl.models.attention import attend, build_segments
from megatron_rl.models.segments import Segments
from megatron_rl.parallel.batch_invariant import compute_all_logprobs, multiply
from megatron_rl.parallel.collectives import keep_random_streams
from megatron_rl.samples.batch import SegmentKeys
from megatron_rl.types import KeptSets
from megatron_rl.weights.family import FAMILIES
from megatron_rl.weights.packed_experts import list_weights, split_huggingface_experts
from megatron_rl.weights.rollout_layout import huggingface_placements
from megatron_rl.weights.shard_box import ShardBox, check_placements

if TYPE_CHECKING:
    from megatron_rl.engines.endings import StopStrings


class _SeededGumbel(LogitsProcessor):
    """A logits processor that samples with one generator per row, and records log-probs and the sets drawn from."""

    def __init__(self, requests: Sequence[Request], bitwise: bool = False) -> None:
        self._requests, self._bitwise = requests, bitwise
        self._sampling, self._temperature = requests[0].sampling, requests[0].sampling.temperature
        self._generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        self.logprobs: list[torch.Tensor] = []
        self.kept: list[KeptSets] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scaled = scores.float() / (self._temperature or 1.0)
        if self._sampling.is_truncated:
            places = [request.num_sampled + len(self.kept) for request in self._requests]
            scaled, kept = truncate(scaled, self._sampling, places)
            self.kept.append(kept)
        exact = compute_all_logprobs(scaled, scaled.shape[1]) if self._bitwise else None
        self.logprobs.append(compute_logprobs(scaled) if exact is None else exact)
        if self._temperature == 0.0:
            return scaled
        return add_gumbel_noise(scaled, self._generators)

    def count_tokens(self) -> int:
        """Count the tokens sampled so far."""
        return len(self.logprobs) * len(self._requests)


def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Return float32 log-probs [..., v] to about 3e-6.

    On a CPU, `log_softmax` adds up the exponentials one by one, so that a likely token hides the tail: up to 2e-4 too
    large with 150,000 tokens.
    """
    return logits - logits.logsumexp(-1, keepdim=True)


class _Stopping(StoppingCriteria):
    """A criterion that ends rows at stop strings; `lengths` maps an ended row to its number of response tokens."""

    def __init__(self, stop: StopStrings | None, requests: Sequence[Request], width: int) -> None:
        self._stop, self._requests, self._width = stop, requests, width
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        sampled = input_ids[:, self._width :].tolist()
        for row, (request, tokens) in enumerate(zip(self._requests, sampled, strict=True)):
            if row not in self.lengths and request.ends_by(self._stop, tokens):
                self.lengths[row] = len(tokens)
        return torch.tensor([row in self.lengths for row in range(len(sampled))], device=input_ids.device)


class HuggingFaceEngine(WaitingRequests, EngineWeights):
    """An engine with a whole transformers model on every rank; `params` are its tensors by HF name."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        as_we_call_it = dict(return_dict=True, output_hidden_states=False, output_attentions=False)
        config = AutoConfig.from_pretrained(spec.model_path, local_files_only=True, **as_we_call_it)
        vars(config).pop("quantization_config", None)  # weights arrive decoded
        if FAMILIES[spec.shape.family].image_text is not None:
            config = config.get_text_config()
            config.tie_word_embeddings = spec.shape.tied_embeddings
        with keep_random_streams():
            self._model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype)).eval()
        self._model.to(spec.process.device).requires_grad_(False)
        self._placements = huggingface_placements(spec.shape)
        self._batch_size, self._device = spec.config.max_num_seqs, spec.process.device
        self._bitwise, self._stop = spec.config.bitwise, spec.stop
        self._running: _SeededGumbel | None = None  # sampler of the batch that runs
        self._route_shape, self._chosen = spec.route_shape, list[torch.Tensor]()  # experts by forward and layer
        if spec.route_shape is not None:  # record the experts [b * s, choices] of each router
            named, layers = self._model.named_modules(), spec.route_shape.layers
            routers = [module for name, module in named if name.endswith((".mlp.gate", ".mlp.router"))]
            assert len(routers) == layers, f"{len(routers)} routers in {layers} layers"
            for router in routers:
                router.register_forward_hook(lambda _, inputs, output: self._chosen.append(output[2]))
        self.shared_params = share_params(list_weights(self._model), spec.shareable(self._placements))
        if spec.config.bitwise:
            make_batch_invariant(self._model)
        self.params = split_huggingface_experts(
            spec.shape, {name: p.data for name, p in list_weights(self._model).items()}
        )
        check_placements(
            self._placements,
            {name: tuple(p.shape) for name, p in self.params.items()},
            where=f"transformers on rank {spec.process.rank}",
        )

    def shard_key(self, rank: int) -> int:
        """Return 0: all ranks have equal placement tables."""
        return 0

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """Return the placement table: whole HF tensors on every rank."""
        return self._placements

    def _take_routes(self, spans: Sequence[tuple[int, int]]) -> Sequence[np.ndarray | None]:
        """Return and clear the experts of tokens [start, stop) of each row, if recorded; unknown for the last token."""
        shape, chosen = self._route_shape, self._chosen
        if shape is None:
            return [None] * len(spans)
        self._chosen = []
        forwards = [torch.stack(chosen[i : i + shape.layers], 1) for i in range(0, len(chosen), shape.layers)]
        routes = torch.cat([x.view(len(spans), -1, shape.layers, shape.choices) for x in forwards], 1)
        found = []
        for row, (start, stop) in zip(routes.cpu().numpy().astype(shape.dtype), spans, strict=True):
            part = row[start : stop - 1]
            found.append(np.concatenate([part, shape.unknown(stop - start - len(part))]))
        return found

    def _score(self, request: Request) -> torch.Tensor | None:
        """Compute the log-probs [p, v] after each prompt token, if the request wants them."""
        if request.extras is None or request.extras.prompt_top is None:
            return None
        ids = torch.from_numpy(request.tokens.astype(np.int64))[None].to(self._device)
        logits = self._model(ids).logits[0].float()
        self._chosen = []
        return compute_all_logprobs(logits, logits.shape[1]) if self._bitwise else compute_logprobs(logits)

    @torch.no_grad()
    def step(self) -> list[Sampled]:
        """Generate the next `max_num_seqs` responses to their end."""
        batch = self.take_batch(self._batch_size)
        if not batch:
            return []
        prompts, sampling = [request.tokens for request in batch], batch[0].sampling
        width = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # left padding: generation continues at the right edge
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        after = [self._score(request) for request in batch]
        sampler = self._running = _SeededGumbel(batch, self._bitwise)
        has_stops = self._stop or any(request.extras and request.extras.stop for request in batch)
        stopping = _Stopping(self._stop, batch, width) if has_stops else None
        output = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            do_sample=False,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=list(sampling.stop_token_ids),
            pad_token_id=0,
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([stopping] if stopping else []),
        )
        self._running = None
        tokens = output[:, width:].cpu()  # [b, s]
        whole = torch.stack(sampler.logprobs, 1)  # [b, s, v]
        picked = whole.cpu().gather(2, tokens[..., None])[..., 0]  # [b, s]
        steps = [kept.split() for kept in sampler.kept]
        sets = [KeptSets.join(parts) for parts in zip(*steps, strict=True)] if steps else [None] * len(batch)
        lengths = [stopping.lengths.get(row) if stopping else None for row in range(len(batch))]
        found = [self._cut(*row) for row in zip(batch, tokens, picked, sets, lengths, strict=True)]
        for row, (one, request) in enumerate(zip(found, batch, strict=True)):
            if request.extras is not None:
                logprobs = whole[row, : len(one.tokens)]
                scores = Scores.compute(request.extras, request.tokens, logprobs, after[row])
                found[row] = replace(one, scores=scores)
        spans = [(width - len(prompt), width + len(one.tokens)) for one, prompt in zip(found, prompts, strict=True)]
        return [replace(one, routes=part) for one, part in zip(found, self._take_routes(spans), strict=True)]

    def tokens_in_flight(self) -> int:
        """Count the tokens of the batch that runs; of responses that have ended, its padding too."""
        running = self._running  # another thread may end it
        return 0 if running is None else running.count_tokens()

    @staticmethod
    def _cut(
        request: Request, tokens: torch.Tensor, logprobs: torch.Tensor, kept: KeptSets | None, stopped: int | None
    ) -> Sampled:
        tokens = tokens[:stopped]
        is_stop = torch.isin(tokens, torch.tensor(request.sampling.stop_token_ids))
        length = int(is_stop.nonzero()[0]) + 1 if is_stop.any() else len(tokens)
        reason = "stop" if is_stop.any() or stopped is not None else "length"
        return Sampled(
            request.key,
            tokens[:length].numpy().astype(np.int32),
            logprobs[:length].float().numpy(),
            reason,
            kept and kept.cut(length),
        )

    def close(self) -> None:
        """Drop the model."""
        self.params = {}
        del self._model


ATTENTION = "megatron_rl_tiled"


class _PaddedAttention:
    """An attention function for transformers that computes left-padded rows by the trainer's `attend`."""

    def __init__(self) -> None:
        self._mask: torch.Tensor | None = None
        self._packed: tuple[torch.Tensor, torch.Tensor, Segments] | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of b rows of s queries, as [b, s, heads, d].

        Args:
            query: [b, heads, s, d].
            key, value: [b, groups, k, d].
            attention_mask: [b, k], 0 for padding.
        """
        if self._packed is None or self._mask is not attention_mask:
            self._mask, self._packed = attention_mask, _pack(attention_mask, query.shape[2], query.dtype)
        rows, keys, segments = self._packed
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        output = torch.zeros_like(query)
        output[rows] = attend(query[rows], key[keys], value[keys], segments, scaling)
        return output.unflatten(0, (len(attention_mask), -1)), None


def _pack(mask: torch.Tensor, num_queries: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """Return flat indices of the queries [t] and keys [k] that are no padding, and their segments for `attend`."""
    is_key, is_query = mask.bool(), mask[:, -num_queries:].bool()
    cu_q, cu_k = (torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int() for real in (is_query, is_key))
    index = is_key.flatten().nonzero()[:, 0]
    keys = SegmentKeys(torch.arange(len(index)), cu_k, mask.shape[1])
    return is_query.flatten().nonzero()[:, 0], index, build_segments(cu_q, num_queries, keys, dtype, "tiled")


def _keep_padding(
    batch_size: int, q_length: int, kv_length: int, *_: Any, attention_mask: torch.Tensor | None = None, **__: Any
) -> torch.Tensor:
    """Return the padding mask [b, k] in place of transformers' causal mask."""
    if attention_mask is None:
        return torch.ones(batch_size, kv_length, dtype=torch.bool)
    return attention_mask[:, -kv_length:]


AttentionInterface.register(ATTENTION, _PaddedAttention())
AttentionMaskInterface.register(ATTENTION, _keep_padding)


def make_batch_invariant(model: Any) -> None:
    """Replace attention and linear layers by the trainer's kernels; all else is bitwise equal already."""
    model.set_attn_implementation(ATTENTION)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            linear: Any = module
            linear.forward = partial(multiply, weight=linear.weight, bias=linear.bias)
