# SPDX-License-Identifier: Apache-2.0
"""vLLM inside the training processes (`external_launcher`), on GPU and on CPU.

Requirements beyond the patches in `engines.vllm.vllm_library`:

* torch.distributed is initialized first, otherwise world size > tp fails;
* on CPU, fused experts are packed in place for their kernels after each weight update, and then have another order than
  the placement table;
* on CPU, no chunked prefill, for which vLLM rewinds random numbers, which CPU generators do not support.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, share_params
from megatron_rl.engines.token_requests import Scores
from megatron_rl.engines.vllm.vllm_library import (
    KEPT_SETS,
    AdapterSlots,
    KeptSetRecorder,
    RouteRecorder,
    keep_memory_pools,
    own_world,
    pack_experts,
    prepare_vllm,
    register_codes,
    register_loader,
    register_model,
)
from megatron_rl.engines.vllm.vllm_settings import (
    list_engine_arguments,
    list_engine_environment,
    records_kept_sets,
)
from megatron_rl.models.attention import attend, build_segments
from megatron_rl.models.segments import Segments
from megatron_rl.parallel.batch_invariant import compute_all_logprobs, multiply
from megatron_rl.parallel.collectives import keep_random_streams
from megatron_rl.samples.batch import SegmentKeys
from megatron_rl.weights.megatron_layout import padded_vocab_size
from megatron_rl.weights.packed_experts import is_packed, list_weights, split_experts, split_turns
from megatron_rl.weights.quantization import SCALE_SUFFIX
from megatron_rl.weights.rollout_layout import VLLM_PADDED_PARAMETERS, vllm_placements
from megatron_rl.weights.shard_box import ShardBox, check_placements


class VllmEngine:
    """One rank of a vLLM engine; `params` are vLLM's own, written in place."""

    def __init__(self, spec: EngineSpec) -> None:
        assert dist.is_initialized(), "vLLM must join the job's process groups, not make its own"
        self._tp_size, self._ep_size = spec.config.tensor_model_parallel_size, spec.config.expert_parallel_size
        self._shape, self._draft_tokens = spec.shape, spec.config.draft_tokens
        self.shard_key = spec.find_place  # ranks with equal places have equal tables
        vllm = prepare_vllm(spec.process.device)
        register_model(vllm, spec)
        self.code_format = register_codes(spec)
        launcher_world = os.environ.get("LOCAL_WORLD_SIZE")
        self.padded_params = VLLM_PADDED_PARAMETERS
        shareable, shared = spec.shareable(self.placements(spec.process.rank)), set[str]()
        if spec.process.device.type == "cpu":  # packing in place would corrupt the actor's experts
            shareable = {name: tensor for name, tensor in shareable.items() if ".experts." not in name}
        self._routes: RouteRecorder | None = None

        def bind(model: torch.nn.Module) -> None:
            shared.update(share_params(list_weights(model), shareable))
            self._routes = None if spec.route_shape is None else RouteRecorder(model, spec.route_shape)

        register_loader(bind)
        os.environ |= list_engine_environment(spec)
        with keep_random_streams(), own_world(spec, import_module("vllm.distributed.parallel_state")):
            self._llm = vllm.LLM(**list_engine_arguments(spec))
        self._sampling_params = vllm.SamplingParams
        if launcher_world is not None:  # the CPU platform overwrites it with tp
            os.environ["LOCAL_WORLD_SIZE"] = launcher_world
        engine = self._llm.llm_engine
        self.dp_group: Any = engine.dp_group  # of the ranks that step together
        self._names: dict[int, str] = {}  # key of a request -> vLLM's name
        self._requests: dict[str, Request] = {}  # by vLLM's name
        scheduler: Any = engine.engine_core.engine_core.scheduler
        self._responses = ResponseRecorder(scheduler, skip_block_searches(scheduler))
        engine.output_processor, self.load = self._responses, self._responses.load
        self._stop = spec.stop
        self._can_sleep = spec.process.device.type == "cuda"
        worker = engine.model_executor.driver_worker.worker
        drafter = [worker.model_runner.drafter.model] if self._draft_tokens else []
        models = torch.nn.ModuleList([worker.get_model(), *drafter])
        self.params: dict[str, torch.Tensor] = list_params(models, spec)
        # Expert kernels that need another order have allocated tensors of their own.
        self.shared_params = frozenset(n for n in shared if self.params[n].data_ptr() == shareable[n].data_ptr())
        if spec.config.bitwise:
            columns = padded_vocab_size(spec.shape.vocab_size, self._tp_size) // self._tp_size
            make_batch_invariant(worker.get_model(), worker.model_runner.sampler, columns)
        self._runner = worker.model_runner if records_kept_sets(spec) else None
        self._kept: KeptSetRecorder | None = None  # from the first truncated request on
        if self._routes is not None:
            self._routes.follow(worker.model_runner)
        self._absorbing = list_absorbing(models)
        self._dtype = getattr(torch, spec.dtype)
        self._packed_experts = find_packed_experts(models, spec.process.device)
        self._check_params(spec.process.rank)
        self.slots = AdapterSlots(worker, spec.adapters) if spec.adapters is not None else None
        for name, tensor in self.params.items():  # no transfer writes the vocabulary padding
            if name not in self.shared_params:
                tensor.zero_()
        self.params |= self.slots.params if self.slots else {}

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """Return the placement table (the boxes of HF tensors) of any rank of the job."""
        place = self.shard_key(rank)
        return vllm_placements(self._shape, tp_size=self._tp_size, place=place, ep_size=self._ep_size)

    def _check_params(self, rank: int) -> None:
        table = [*self.placements(rank)]
        if self._draft_tokens:
            table += vllm_placements(self._shape.mtp, tp_size=self._tp_size, place=self.shard_key(rank))
        sizes = {name: tuple(p.shape) for name, p in self.params.items() if not name.endswith(SCALE_SUFFIX)}
        check_placements(table, sizes, where=f"vLLM on rank {rank}", padded=VLLM_PADDED_PARAMETERS)

    def begin_weight_update(self) -> None:
        """Reallocate parameters at the same addresses after a sleep."""
        if self._can_sleep and self._llm.llm_engine.is_sleeping():
            self._llm.wake_up(tags=["weights"])
            if self.slots is not None:
                self.slots.clear()

    def end_weight_update(self) -> None:
        """Bring derived weights up to date, reallocate the KV cache, reset the prefix cache.

        These are fused experts in the order of the CPU kernel, and products of latent attention.
        """
        for module in self._absorbing:
            module.process_weights_after_loading(self._dtype)  # writes in place, where CUDA graphs read
        for param, instructions in self._packed_experts:
            pack_experts(param, instructions)
        if self._can_sleep and self._llm.llm_engine.is_sleeping():
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests, which start at the next step."""
        arguments = [list_sampling_arguments(str(request.key), request) for request in requests]
        for one, extras in zip(arguments, (request.extras for request in requests), strict=True):
            if extras is not None:
                one |= dict(logprobs=extras.top, prompt_logprobs=extras.prompt_top)
        params = [self._sampling_params(skip_clone=True, **one) for one in arguments]  # requests do not share them
        if self._kept is None and any(request.sampling.is_truncated for request in requests):
            assert self._runner is not None, "config.feature_checks refuses it"
            self._kept = KeptSetRecorder(self._runner)
        adapters = None
        if self.slots is not None:
            versions, running = (
                [one.extras and one.extras.version for one in x] for x in (requests, self._requests.values())
            )
            adapters = self.slots.select(versions, running)
        with self._running():
            names = self._llm.enqueue(
                [{"prompt_token_ids": request.tokens.tolist()} for request in requests],
                params,
                adapters,
                use_tqdm=False,
            )
        for request, name in zip(requests, names, strict=True):
            self._names[request.key], self._requests[name] = name, request
            if self._routes is not None:
                self._routes.expect(name, request)

    def step(self) -> list[Sampled]:
        """Run one forward, of a dummy batch if only other DP ranks have requests; return the responses it finishes."""
        with self._running():
            if not self._requests and self.dp_group is not None:
                self._llm.llm_engine.engine_core.execute_dummy_batch()
                return []
            ended: Any = self._llm.llm_engine.step()
        if self._routes is not None:
            queue: Any = self._llm.llm_engine.engine_core.engine_core.batch_queue or ()  # of async scheduling
            self._routes.collect(sum(scheduled.total_num_scheduled_tokens > 0 for _, scheduled, _ in queue))
        finished = [self._end(name, response) for name, response in ended]
        if self._stop is None and not any(request.extras for request in self._requests.values()):
            return finished
        # vLLM without a tokenizer cannot detect stop strings.
        running = self._responses.running.items()
        stopped = self.interrupt([self._requests[n].key for n, r in running if self._completes_text(n, r)])
        return finished + [replace(one, finish_reason="stop") for one in stopped]

    def _completes_text(self, name: str, response: Response) -> bool:
        """Return whether a token of the last step completes a stop string; if so, drop the tokens after it."""
        tokens = response.tokens
        for length in range(max(1, len(tokens) - self._draft_tokens), len(tokens) + 1):
            sampled = tokens if length == len(tokens) else tokens[:length]
            if self._requests[name].ends_by(self._stop, sampled):
                for column in (tokens, response.logprobs, response.likeliest):
                    del column[length:]
                return True
        return False

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests, but keep their prefix-cache blocks for continuations; return partial responses."""
        names = [self._names[key] for key in keys if key in self._names]
        partial = [self._end(name, self._responses.running[name], "interrupted") for name in names]
        self._llm.llm_engine.abort_request(names, internal=True)
        return partial

    def _end(self, name: str, response: Response, finish_reason: str = "") -> Sampled:
        request = self._requests[name]
        if not finish_reason:
            ends = self._completes_text(name, response) or response.is_stopped
            finish_reason = "stop" if ends else "length"
        tokens = np.array(response.tokens, np.int32)
        del self._requests[name], self._names[request.key]
        kept = None
        if request.sampling.is_truncated:
            assert self._kept is not None
            kept = self._kept.take(str(request.key), len(request.tokens), len(tokens))
        routes = None if self._routes is None else self._routes.take(name, len(request.tokens) + len(tokens))
        logprobs, cached = np.array(response.logprobs, np.float32), response.num_cached if len(tokens) else None
        scores = None if request.extras is None else Scores.read(request.extras, response.likeliest, response.prompt)
        return Sampled(request.key, tokens, logprobs, finish_reason, kept, cached, routes, scores=scores)

    def has_requests(self) -> bool:
        """Return whether any request runs or waits."""
        return bool(self._requests)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Preserve the trainer's random numbers; abort all requests after an error."""
        engine = self._llm.llm_engine
        with keep_random_streams():
            try:
                yield
            except BaseException:
                engine.abort_request(list(self._responses.running), internal=True)
                self._llm.reset_prefix_cache()  # some blocks may have been registered but not computed
                self._names, self._requests = {}, {}
                for recorder in (self._kept, self._routes):
                    if recorder is not None:
                        recorder.clear()
                raise

    def tokens_in_flight(self) -> int:
        """Count the tokens of unfinished responses."""
        return sum(len(response.tokens) for response in list(self._responses.running.values()))

    def sleep(self) -> None:
        """Release weights and KV cache (no-op on CPU)."""
        if self._can_sleep:
            self._llm.sleep(level=2)

    def close(self) -> None:
        """Shut down; process groups survive (see `prepare_vllm`), and on a GPU the addresses of sleeping memory."""
        self.sleep()
        if self._can_sleep:
            keep_memory_pools()
        self._llm.llm_engine.engine_core.shutdown()


def list_sampling_arguments(name: str, request: Request) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` for a request, in the engine and in a server alike.

    If sampling is truncated, `extra_args` has `name` for the recorded sets, the position of the first response token,
    and the sampling limits.
    """
    cut, extra = request.sampling, {}
    if cut.is_truncated:
        limits = cut.stop_token_ids, cut.top_p, cut.top_k, cut.min_p, cut.max_kept_tokens, cut.min_tokens
        extra = {KEPT_SETS: [name, len(request.tokens) - request.num_sampled, *limits]}
    return dict(
        temperature=cut.temperature,
        max_tokens=cut.max_tokens,
        seed=request.seed,
        stop_token_ids=list(cut.stop_token_ids),
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
    )


_UNSCORED = -1, math.nan


@dataclass
class Response:
    """Sampled tokens with their log-probs, NaN if vLLM scored another token."""

    longest: int  # number of tokens, with the request's, at which the response ends
    stops: frozenset[int | None]  # tokens that end it
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached: int | None = None  # number of request tokens found in the prefix cache, once the first token is sampled
    is_stopped: bool = False
    # If other tokens' log-probs are wanted: ids and log-probs at each token, its own, then the likeliest; and likewise
    # [n, 1 + k] of consecutive parts of the prompt without its first token.
    likeliest: list[Any] = field(default_factory=list)
    prompt: list[Any] = field(default_factory=list)

    def append(self, output: Any, scored: Sequence[tuple[int, float]]) -> None:
        """Append a request's tokens of a step, whose log-probs are in `scored` beside the tokens that they are for."""
        self.tokens += output.new_token_ids
        for token, (other, logprob) in zip_longest(
            output.new_token_ids, scored[: len(output.new_token_ids)], fillvalue=_UNSCORED
        ):
            self.logprobs.append(logprob if token == other else math.nan)
        if self.num_cached is None and output.prefill_stats is not None:
            self.num_cached = output.prefill_stats.num_cached_tokens
        self.is_stopped = output.finish_reason is not None and str(output.finish_reason) == "stop"


class ResponseRecorder:
    """A replacement of vLLM's `OutputProcessor`, which also prepares text, statistics and log-probs of other tokens.

    Log-probs are read from the arrays of a step, before vLLM cuts them into an object per request. Most tokens neither
    end a response nor begin or fill a KV-cache block: they are recorded here, and vLLM's scheduler updates the others.

    Args:
        block_size: tokens of a KV-cache block; 0 lets the scheduler update all tokens.
    """

    def __init__(self, scheduler: Any, block_size: int) -> None:
        self.running: dict[str, Response] = {}  # by vLLM's name of the request
        # Of each token of the last step, by vLLM's name, for `process_outputs`.
        self._scored: dict[str, list[tuple[int, float]]] = {}
        self._likeliest: dict[str, list[Any]] = {}  # likewise, if a running request wants them
        self._requests, self._longest, self._block_size = scheduler.requests, scheduler.max_model_len, block_size
        self._is_async = bool(scheduler.scheduler_config.async_scheduling)
        self._scheduler, self.load = scheduler, {"cache": 0.0, "waiting": 0.0, "drafted": 0.0, "accepted": 0.0}
        self._update, scheduler.update_from_output = scheduler.update_from_output, self._take_tokens

    def _take_tokens(self, scheduled: Any, output: Any) -> Any:
        others, self._scored, self._likeliest = scheduled.num_scheduled_tokens, {}, {}
        used, waiting = self._scheduler.kv_cache_manager.usage, self._scheduler.get_request_counts()[1]
        self.load["cache"], self.load["waiting"] = max(self.load["cache"], used), max(self.load["waiting"], waiting)
        index = output.req_id_to_index
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            self.load["drafted"] += len(drafts)
            self.load["accepted"] += len(output.sampled_token_ids[index[name]]) - 1
        if output.logprobs is not None:
            ids, values = output.logprobs.logprob_token_ids, output.logprobs.logprobs
            scored = list(zip(ids[:, 0].tolist(), values[:, 0].tolist(), strict=True))
            if ids.shape[1] == 1 and self._block_size and not output.prompt_logprobs_dict:
                others = self._record_most(others, output, scored)
            # Rows of a request: one, or with drafts one per token.
            starts = output.logprobs.cu_num_generated_tokens or range(len(scored) + 1)
            rows = {n: slice(starts[index[n]], starts[index[n] + 1]) for n in others if n in index}
            self._scored = {name: scored[mine] for name, mine in rows.items()}
            if ids.shape[1] > 1:
                self._likeliest = {n: list(zip(ids[mine], values[mine], strict=True)) for n, mine in rows.items()}
            scheduled, output = replace(scheduled, num_scheduled_tokens=others), replace(output, logprobs=None)
        return self._update(scheduled, output)

    def _record_most(self, scheduled: dict[str, int], output: Any, scored: list[tuple[int, float]]) -> dict[str, int]:
        """Record tokens after the first that end neither a response nor a block; return the other requests."""
        # Equal to vLLM's update for these tokens: it appends them and counts down what is in flight.
        running, requests, size, others = self.running, self._requests, self._block_size, dict[str, int]()
        index, sampled, is_async = output.req_id_to_index, output.sampled_token_ids, self._is_async
        for name, count in scheduled.items():
            response, request = running.get(name), requests.get(name)
            if response and response.tokens and request and count == 1 and not request.num_stale_output_tokens:
                place, tokens = index[name], request._all_token_ids
                new, length = sampled[place], len(tokens)
                is_inside = 0 < length % size < size - 1 and length + 1 < response.longest
                if is_inside and len(new) == 1 and new[0] not in response.stops:
                    [token] = new
                    tokens.append(token)
                    request._output_token_ids.append(token)
                    request.num_in_flight_tokens -= 1
                    request.num_output_placeholders -= is_async
                    response.tokens.append(token)
                    scored_token, logprob = scored[place]
                    response.logprobs.append(logprob if token == scored_token else math.nan)
                    continue
            others[name] = count
        return others

    def add_request(self, request: Any, *text: Any) -> None:
        """Start an empty response."""
        params, length = request.sampling_params, len(request.prompt_token_ids)
        stops = frozenset({params.eos_token_id, *(params.stop_token_ids or ())})
        self.running[request.request_id] = Response(min(self._longest, length + params.max_tokens), stops)

    def process_outputs(self, outputs: Iterable[Any], **statistics: Any) -> Any:
        """Append each request's token; return finished ones with their names as `request_outputs`."""
        ended, running, scored = [], self.running, self._scored
        for output in outputs:
            name = output.request_id
            response = running.get(name)
            if response is None:  # interrupted during the step
                continue
            response.append(output, scored.get(name, ()))
            response.likeliest.extend(self._likeliest.get(name, [])[: len(output.new_token_ids)])
            if (part := output.new_prompt_logprobs_tensors) is not None:
                response.prompt.append((part.logprob_token_ids.numpy(), part.logprobs.numpy()))
            if output.finish_reason is not None:
                ended.append((name, running.pop(name)))
        return SimpleNamespace(request_outputs=ended, reqs_to_abort=[])

    def abort_requests(self, names: Sequence[str], internal: bool) -> Sequence[str]:
        """Drop responses; return the names for the scheduler."""
        for name in names:
            self.running.pop(name, None)
        return names

    def has_unfinished_requests(self) -> bool:
        """Return whether any request runs or waits."""
        return bool(self.running)

    def update_scheduler_stats(self, statistics: Any) -> None:
        """Ignore vLLM's statistics."""


def skip_block_searches(scheduler: Any) -> int:
    """Skip vLLM's search for KV-cache blocks for tokens that neither begin nor fill a block, 14 of 16; same blocks.

    Only where all layers attend to all tokens: other caches free blocks within one. Not with drafts, of which a step
    has several.

    Returns:
        Tokens of a block, 0 for other caches and with drafts.
    """
    manager = scheduler.kv_cache_manager
    (kind, *others), without = manager.coordinator.single_type_managers, manager.empty_kv_cache_blocks
    if others or type(kind).__name__ != "FullAttentionManager" or kind.block_size != kind.block_pool.hash_block_size:
        return 0
    if scheduler.num_spec_tokens:
        return 0
    size: int = kind.block_size
    allocate = manager.allocate_slots

    def allocate_slots(request: Any, num_new_tokens: int, **options: Any) -> Any:
        inside = num_new_tokens == 1 and 0 < request.num_computed_tokens % size < size - 1
        if inside and options == {"num_lookahead_tokens": 0}:  # a running request
            return without
        return allocate(request, num_new_tokens, **options)

    manager.allocate_slots = allocate_slots
    return size


def find_packed_experts(model: torch.nn.Module, device: torch.device) -> list[tuple[torch.Tensor, str]]:
    """Return each fused expert weight that a CPU kernel reads in another order, with the kernel's instruction set."""
    if device.type != "cpu":
        return []
    packed = []
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "w13_weight"):
            experts = module.quant_method.moe_kernel.fused_experts
            if not experts._use_zentorch:  # that kernel needs no packing
                packed += [(param.data, experts.isa) for param in (module.w13_weight, module.w2_weight)]
    return packed


def list_params(models: torch.nn.ModuleList, spec: EngineSpec) -> dict[str, torch.Tensor]:
    """Return vLLM's parameters by name, with a matrix per expert, without adapters.

    Args:
        models: the policy, and the layer that drafts, if any, which shares the policy's embedding and output layer.
    """
    shape, named = spec.shape, dict[str, torch.Tensor]()
    done = {id(p) for module in list_absorbing(models) for p in module.parameters(recurse=False)}  # derived
    for name, p in (pair for model in models for pair in list_weights(model).items()):
        if id(p) not in done:
            named[name.replace(".base_layer.", ".").replace(".mtp_block.", ".")] = p.data
            done.add(id(p))
    if shape.latent is not None:
        from megatron_rl.weights.head_sizes import split_latents

        named = split_latents(named, shape.latent)
    params = split_experts(named)
    if not is_packed(shape):
        return params
    if spec.config.expert_parallel_size == 1 and spec.find_place(spec.process.rank):
        # Results are summed over TP ranks, which share each expert: only the first one has this bias.
        for name in [name for name in params if ".w2_bias." in name]:
            params.pop(name).zero_()
    return split_turns(params)


def list_absorbing(model: torch.nn.Module) -> list[Any]:
    """Return vLLM's modules that keep up-projections in another form (`W_UK_T`, `W_UV`): latent attention."""
    return [module for module in model.modules() if hasattr(module, "W_UK_T")]


class _PagedAttention:
    """A replacement of vLLM's CPU attention by the trainer's `attend` on the paged KV cache.

    The cache is [blocks, heads, block size, 2 d]: keys, then values, of head dimension d.
    """

    def __init__(self) -> None:
        self._metadata: Any = None
        self._packed: tuple[torch.Tensor, torch.Tensor, Segments] | None = None

    def write(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write new keys and values [tokens, heads, d] to their slots of the cache; negative slots are padding."""
        slots = slots[: len(key)].long()
        is_real = slots >= 0
        block, place = slots[is_real] // kv_cache.shape[2], slots[is_real] % kv_cache.shape[2]
        kv_cache[block, :, place] = torch.cat([key, value], -1)[is_real]

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Attend from query [tokens, heads, d] to the cached keys and values; write and return options["output"].

        Args:
            metadata: vLLM's lengths and block table of the step; `None` in the warm-up, which computes nothing.
        """
        output: torch.Tensor = options["output"]
        if metadata is None:  # warming up
            return output
        if self._metadata is not metadata:
            self._metadata, self._packed = metadata, _pack(metadata, kv_cache.shape[2], query.dtype)
        assert self._packed is not None
        block, place, segments = self._packed
        keys, values = kv_cache[block, :, place].chunk(2, -1)
        count = metadata.num_actual_tokens
        output[:count].view(query[:count].shape).copy_(attend(query[:count], keys, values, segments, layer.impl.scale))
        return output


def _pack(metadata: Any, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """Return cache block and offset of every key [k], sequence by sequence, and the segments for `attend`."""
    lengths = metadata.seq_lens.tolist()
    positions = [torch.arange(length) for length in lengths]
    blocks = [
        table.long()[where // block_size]
        for table, where in zip(metadata.block_table[: len(lengths)], positions, strict=True)
    ]
    everywhere = torch.cat(positions)
    cu_k = torch.nn.functional.pad(metadata.seq_lens.cumsum(0), (1, 0)).int()
    keys = SegmentKeys(torch.arange(len(everywhere)), cu_k, max(lengths))
    segments = build_segments(metadata.query_start_loc, metadata.max_query_len, keys, dtype, "tiled")
    return torch.cat(blocks), everywhere % block_size, segments


def make_batch_invariant(model: torch.nn.Module, sampler: Any, shard_columns: int) -> None:
    """Replace attention, linear layers and log-softmax (of `shard_columns` logits per TP rank) by the trainer's."""
    # All else is bitwise equal already; rotary embeddings, without their C++ kernel (`list_engine_arguments`).
    attention = _PagedAttention()
    for module in model.modules():
        found: Any = module
        if hasattr(found, "cpu_linear"):
            found.cpu_linear = multiply
        implementation: Any = getattr(found, "impl", None)
        if hasattr(implementation, "do_kv_cache_update"):
            implementation.do_kv_cache_update = attention.write
            implementation.forward = attention.attend
    compute_logprobs = partial(compute_all_logprobs, num_columns=shard_columns)
    sampler.compute_logprobs = compute_logprobs
    sample = sampler.topk_topp_sampler.forward

    def sample_and_score(logits: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = compute_logprobs(logits)  # before vLLM's sampler overwrites the logits
        sampled, _ = sample(logits, *arguments)
        return sampled, logprobs

    sampler.topk_topp_sampler.forward = sample_and_score
