# SPDX-License-Identifier: Apache-2.0
"""Megatron-core model over packed batches, the base of all roles, and the heads that follow its last stage.

A head maps hidden states [t/cp, 1, h] (with sequence parallelism [t/cp/tp, 1, h]) of a microbatch to tensors [t] of
log-probs, values or scores, equal on every context parallel rank, so that losses are independent of sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from megatron_rl.checkpoint.pieces import load_weights
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import TrainedConfig
from megatron_rl.models.attention import PackedSequences, build_packed_sequences, shard_rows
from megatron_rl.models.gpt import DTYPES, build_gpt_stages, build_transformer_config
from megatron_rl.models.stages import HiddenStatesModel, combine_shards, gather_for_shards, local_values
from megatron_rl.parallel.collectives import broadcast_tensors, find_pair
from megatron_rl.parallel.vocab_parallel import OutputSoftmax, compute_linear_logprobs_and_entropy
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.setup import LaidOutModel, RoleSetup
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS
from megatron_rl.weights.shard_box import check_placements

if TYPE_CHECKING:
    from megatron_rl.training.adapted_model import Adapters
    from megatron_rl.training.router_replay import Routing
    from megatron_rl.transfer.computed import SourceParams


def align(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes, rounded up to the alignment of tensors in one block."""
    return -(-tensor.nbytes // 512) * 512


class HostMemory:
    """Pinned host memory for one owner's offloaded tensors: page-locked once, reused, grown on demand."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8)

    def store(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to the host; the copies are complete on return and valid until the next call."""
        sizes = [align(tensor) for tensor in tensors]
        size, is_gpu = sum(sizes), self._device.type == "cuda"
        if size > len(self._block):
            if is_gpu and len(self._block):
                torch.cuda.synchronize(self._device)  # a copy may still be reading it
                unpin_memory(self._block.data_ptr())
            self._block = torch.empty(size, dtype=torch.uint8)
            if is_gpu:
                pin_memory(self._block.data_ptr(), size)  # `Tensor.pin_memory` would round up to a power of two
        copies = []
        for tensor, part in zip(tensors, self._block[:size].split(sizes), strict=True):
            copy = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=True))
        if is_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def load(self, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to new device tensors, asynchronously to the host."""
        return [copy.to(self._device, non_blocking=True, copy=True) for copy in copies]


# (hidden states of the last stage, microbatch) -> tensors [t, ...] of the whole microbatch
Head = Callable[[torch.Tensor, TrainBatch], tuple[torch.Tensor, ...]]
# (microbatch, *head outputs [t]) -> loss, and the sums (or maxima, "max/...") for its metrics
LossFunction = Callable[..., tuple[torch.Tensor, Any]]


class PackedModel(LaidOutModel):
    """This rank's stages of one model, with weights loaded; construction is collective over the role.

    Attributes:
        rank: within the layout.
        attention_backend: `None` for the fastest.
        stages: `vpp_size` model chunks.
        ddp: wrappers of trained stages; empty under ZeRO-3.
        routing: `None` without experts.
        stream: CUDA stream of gradient accumulation and graph capture; `None` is the current stream.
    """

    def __init__(self, setup: RoleSetup) -> None:
        spec, shape, groups = setup.spec, setup.shape, setup.groups
        assert shape.has_score_head == (spec.head != "logprob"), "the shape of another head"
        super().__init__(spec, shape, groups.layout, groups.at.dp)
        self.groups, at = groups, groups.at
        self.rank = self.layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp)
        self.attention_backend = "tiled" if self.batch_invariant else None
        # Dropout is 0, yet megatron-core forks these RNG streams on every forward.
        model_parallel_cuda_manual_seed(
            setup.seed, tp_rank=at.tp, ep_rank=groups.expert_at.ep, etp_rank=groups.expert_at.tp, force_reset_rng=True
        )
        self.transformer_impl = setup.model.transformer_impl
        self.config = build_transformer_config(
            shape,
            groups.layout,
            dtype=DTYPES[setup.model.dtype],
            sequence_parallel=spec.settings.sequence_parallel,
            recompute_granularity=spec.training.recompute_granularity if spec.trainable else "none",
            use_transformer_engine=self.transformer_impl == "transformer_engine",
            overlap_shared_experts=spec.trainable and spec.training.overlap_shared_experts,
        )
        build = partial(
            build_gpt_stages, shape, self.config, groups, self.transformer_impl, spec.batch_invariant, self.adapters
        )
        if self.is_fully_sharded:
            from megatron_rl.training.fully_sharded import build_sharded

            self.stages = build_sharded(build, groups, self.config.params_dtype, is_trained=spec.trainable)
        else:
            self.stages = build()
        if spec.trainable and spec.training.recompute_granularity == "offload":
            from megatron_rl.models.offloaded_inputs import InputStore

            InputStore(shape.hidden_size, self.count_rows(spec.training.max_tokens_per_microbatch)).watch(self.stages)
        self.device = next(self.stages.parameters()).device
        self._fill(spec, setup.seed)
        self.routing: Routing | None = None
        if shape.num_experts:
            from megatron_rl.training.router_replay import Routing

            self.routing = Routing(shape, groups, sequence_parallel=self._sequence_parallel, device=self.device)
        self.stream: torch.cuda.Stream | None = None
        self.ddp: list[DistributedDataParallel] = []
        if spec.trainable and not self.is_fully_sharded:
            self.stream = torch.cuda.Stream() if spec.training.step_mode == "graph" else None
            with _on_stream(self.stream):
                self.ddp = wrap_stages(self.stages, self.config, spec.training, groups.collection)
        elif not spec.trainable:
            self.stages.requires_grad_(False)
        self.params = self._list_params()
        trained = [p for p in self.stages.parameters() if p.requires_grad]
        for shard in map(local_values, trained) if self.is_fully_sharded else ():
            shard.copy_(shard.to(self.dtype))  # the optimizer starts from the values that the model computes with
        self._host_memory = HostMemory(self.device)
        self._on_host: list[torch.Tensor] = []  # copies of offloaded weights
        if spec.offload:
            self.offload()

    @property
    def reduces_early(self) -> bool:
        """Whether the last microbatch reduces the gradients."""
        return any(isinstance(stage, EarlyReduction) for stage in self.ddp)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Model chunks that the pipeline schedule runs: DDP wrappers, or bare stages."""
        return list(self.ddp or self.stages)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation; trained ZeRO-3 shards are float32."""
        return self.config.params_dtype

    def _fill(self, spec: RoleSpec, seed: int) -> None:
        params: dict[str, Any] = {**self._list_params()}
        placements = self.placements(self.rank)
        check_placements(
            placements,
            {name: tuple(p.shape) for name, p in params.items()},
            where=f"megatron {self.groups.at}",
            padded=[name for name in params if name.endswith(PADDED_PARAMETERS)],
        )
        if self.adapters is None:
            whole = {name: param for name, param in params.items() if isinstance(param, torch.Tensor)}
            load_weights(Path(spec.path), self.shape, placements, whole, may_lack=spec.may_lack)
            return
        from megatron_rl.training.adapted_model import fill_adapted

        fill_adapted(self, params, spec, seed)

    def _list_params(self) -> SourceParams:
        """Return the parameters by name, including NF4 matrices, excluding adapters."""
        if self.adapters is None and not self.shape.num_experts:
            return {name: local_values(p) for name, p in self.stages.named_parameters()}
        from megatron_rl.training.adapted_model import list_params

        return list_params(self.stages)

    @property
    def trained(self) -> PackedModel | Adapters:
        """Trained and checkpointed part: the model, or its adapters."""
        if self.adapters is None:
            return self
        from megatron_rl.training.adapted_model import Adapters

        return Adapters(self, self.adapters)

    def merge(self) -> SourceParams:
        """Return this rank's parameters, with adapters merged lazily on read."""
        if self.adapters is None:
            return self.params
        from megatron_rl.training.adapted_model import merge_adapters

        return {**self.params, **merge_adapters(self.stages, self.adapters.live_scale)}

    def offload(self) -> None:
        """Free the device memory of the weights until `restore`.

        Only for models whose weights do not change, since they are copied to the host once.
        """
        if not self._on_host:
            self._on_host = self._host_memory.store([p.data for p in self.stages.parameters()])
        for p in self.stages.parameters():
            p.data = torch.empty(0, dtype=p.dtype, device=p.device)
        self.params = {}

    def restore(self) -> None:
        """Reload offloaded weights, if any."""
        if self.params:
            return
        for p, weights in zip(self.stages.parameters(), self._host_memory.load(self._on_host), strict=True):
            p.data = weights
        self.params = self._list_params()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Reload offloaded weights for the duration of the block."""
        was_offloaded = not self.params
        self.restore()
        try:
            yield
        finally:
            if was_offloaded:
                self.offload()

    def own_rows(self, microbatch: TrainBatch) -> slice:
        """Return the rows of a microbatch that this context parallel rank computes."""
        return shard_rows(microbatch.num_computed, self.layout.cp_size, self.groups.at.cp)

    def count_rows(self, num_tokens: int) -> int:
        """Return the rows of hidden states that a rank passes to the next stage for `num_tokens`."""
        return num_tokens // (self.layout.cp_size * (self.layout.tp_size if self.config.sequence_parallel else 1))

    @torch.no_grad()
    def compute_forward(self, batch: TrainBatch, head: Head, *size: int) -> torch.Tensor:
        """Return the head's first output for a packed batch, [t, *size] float32, on every rank of the replica."""
        with self.on_device():
            results = self.run_microbatches(batch.microbatches(), head)
        if self.groups.is_last_stage:
            found = torch.cat(results)
        else:
            found = torch.empty(len(batch.tokens), *size, dtype=torch.float32, device=batch.tokens.device)
        broadcast_tensors([found], self.groups.last_stage_rank, self.groups.pp)
        return found

    def run_microbatches(
        self,
        microbatches: Sequence[TrainBatch],
        head: Head,
        loss_function: LossFunction | None = None,
        forward_step: Callable[..., Any] | None = None,
    ) -> list[Any]:
        """Run microbatches through the pipeline.

        Args:
            loss_function: forward only if `None`.
            forward_step: replacement for this model's `forward_step`.

        Returns:
            On the last stage, the loss's metrics or, forward only, the head's first output [t] per microbatch; else
            empty.
        """
        layout = self.layout
        is_forward_only = loss_function is None
        is_interleaved = layout.vpp_size > 1
        modules = self.modules
        iterators = [iter(microbatches) for _ in modules]
        forward_backward = get_forward_backward_func(layout.pp_size, layout.vpp_size if is_interleaved else None)
        for module in modules:
            module.train(not is_forward_only)
        pipeline: dict[str, Any] = {}
        if layout.pp_size > 1:
            shapes = [(self.count_rows(m.num_computed), 1, self.shape.hidden_size) for m in microbatches]
            make = P2PCommunicator if is_interleaved else partial(PlannedCommunicator, shapes)
            pipeline["p2p_communicator"] = make(self.groups.pp, self.config)
        found = forward_backward(
            forward_step_func=forward_step or partial(self.forward_step, head, loss_function),
            data_iterator=iterators if is_interleaved else iterators[0],
            model=modules if is_interleaved else modules[0],
            num_microbatches=len(microbatches),
            seq_length=max(m.num_computed for m in microbatches),
            micro_batch_size=1,
            forward_only=is_forward_only,
            collect_non_loss_data=is_forward_only,
            pg_collection=self.groups.collection,
            **pipeline,
        )
        if self.is_fully_sharded:
            from megatron_rl.training.fully_sharded import reshard

            reshard(self.stages)
        for stage in cast(Iterable[Any], self.stages):
            stage.set_input_tensor(None)  # frees the last received tensor and its gradient
        return found

    def forward_step(
        self, head: Head, loss_function: LossFunction | None, batches: Iterator[TrainBatch], module: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Run `module` on the next microbatch; return its output, and a function that applies head and loss to it."""
        microbatch = next(batches)
        position_ids = microbatch.computed(microbatch.position_ids)
        packed = build_packed_sequences(
            microbatch.slices[0],
            position_ids,
            self.shape,
            dtype=self.config.params_dtype,
            cp_size=self.layout.cp_size,
            cp_rank=self.groups.at.cp,
            backend=self.attention_backend,
        )
        if self.routing is not None:
            packed = replace(packed, routes=self.routing.describe(microbatch))
        output = self.call_stage(module, microbatch, packed)

        def finish(hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
            found = head(hidden, microbatch)
            if non_loss_data:
                return found[0]
            assert loss_function is not None
            loss, metrics = loss_function(microbatch, *found)
            # The loss already contains its global denominator, so there is no token count to divide by.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics

        return output, finish

    def call_stage(self, module: torch.nn.Module, microbatch: TrainBatch, packed: PackedSequences) -> torch.Tensor:
        """Run a pipeline stage on this context parallel rank's rows of a microbatch, and return its output."""
        mine = self.own_rows(microbatch)
        return module(
            microbatch.computed(microbatch.tokens)[None, mine],
            microbatch.computed(microbatch.position_ids)[None, mine],
            attention_mask=None,
            packed_seq_params=packed,
        )


class EarlyReduction(DistributedDataParallel):
    """DDP-wrapped stage whose gradients are reduced within the last microbatch."""

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """Send gradients during the backward in this block and wait for all of them at its end."""
        for part in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            part.reset()  # bucket counters: a captured function runs several times
        yield
        super().finish_grad_sync()

    def finish_grad_sync(self, *unused: Any, **options: Any) -> None:
        """Do nothing: `reduced` has already waited."""


def wrap_stages(
    stages: Iterable[torch.nn.Module],
    config: TransformerConfig,
    training: TrainedConfig,
    groups: ProcessGroupCollection,
) -> list[DistributedDataParallel]:
    """Wrap stages in DDP, which moves the parameters into contiguous buffers.

    Gradients are summed (not averaged) over microbatches and DP, in float32.
    """
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=training.use_distributed_optimizer,
        overlap_grad_reduce=training.overlap_grad_reduce,
    )
    is_early = training.overlap_grad_reduce and training.step_mode != "eager"
    wrap = EarlyReduction if is_early else DistributedDataParallel
    wrapped = [
        wrap(config, options, stage, disable_bucketing=index > 0, pg_collection=groups)
        for index, stage in enumerate(stages)
    ]
    if training.overlap_grad_reduce:
        no_sync: Any = [stage.no_sync for stage in wrapped]  # one or a list of them: annotated as one
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


class PlannedCommunicator(P2PCommunicator):
    """Stage-to-stage communication of a non-interleaved schedule, with shapes known in advance.

    megatron-core would send each shape ahead of its message and synchronize with the GPU. A pipeline of two stages on
    one host without GPUs uses shared memory (`parallel/pairs.py`).

    Args:
        shapes: shapes of hidden states and of their gradients, by microbatch.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], pp_group: dist.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group, config)
        self._hidden, self._gradients = iter(shapes), iter(shapes)
        self._dtype: torch.dtype = config.pipeline_dtype
        self._pair = find_pair(pp_group, max(map(math.prod, shapes)) * self._dtype.itemsize)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        return next(self._hidden) if recv_prev else (), next(self._gradients) if recv_next else ()

    def _communicate(self, **request: Any) -> tuple[Any, ...]:  # megatron-core annotates two values and returns three
        if self._pair is None:
            return super()._communicate(**request)
        for name in ("tensor_send_next", "tensor_send_prev"):
            if request[name] is not None:
                self._pair.send(request[name])
        shapes = self._communicate_shapes(None, None, request["recv_prev"], request["recv_next"])
        found = [torch.empty(shape, dtype=self._dtype) if shape else None for shape in shapes]
        for values in found:
            if values is not None:
                self._pair.receive(values)
                values.requires_grad_()
        return *found, None


@contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block on `stream`, ordered with the current stream."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        yield
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


class LogprobHead:
    """Head for token log-probs, with logits for `chunk_tokens` tokens at a time.

    Args:
        temperature: divisor of the logits.
        divergence: a `TeacherDivergence`, if a teacher's distributions are learned.
    """

    def __init__(
        self,
        model: PackedModel,
        temperature: float = 1.0,
        chunk_tokens: int = 512,
        divergence: Callable[..., torch.Tensor | None] | None = None,
    ) -> None:
        self._model, self._divergence = model, divergence
        self._multiple = 1  # rows are padded to it
        if model.batch_invariant:
            from megatron_rl.parallel.batch_invariant import MIN_ROWS

            self._multiple = MIN_ROWS
        self._softmax = OutputSoftmax(
            vocab_size=model.shape.vocab_size,
            temperature=temperature,
            tp_group=model.groups.tp,
            chunk_tokens=-(-chunk_tokens // self._multiple) * self._multiple,
            softcap=model.shape.logit_softcap,
        )

    def __call__(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor, ...]:
        """Return log-probs [t] or [t, k], entropies [t] and, with a teacher, divergences [t]; 0 outside of the loss."""
        places, rows, targets = _find_predicted(self._model, microbatch)
        states, count, kept = self._gather(hidden)[rows], len(targets), microbatch.find_kept(places)
        if padding := -count % self._multiple:
            states, targets = (
                F.pad(states, (0, 0, 0, padding)),
                torch.cat([targets, targets.new_zeros(padding, *targets.shape[1:])]),
            )
            kept = kept and kept.pad(padding)
        found = compute_linear_logprobs_and_entropy(states, self._output_weight, targets, self._softmax, kept)
        if self._divergence is not None:
            divergence = self._divergence(states, self._output_weight, self._softmax, microbatch, places)
            found = found if divergence is None else (*found, divergence)
        return tuple(_combine(self._model, values[:count], places, microbatch) for values in found)

    def compute_sum_pi_squared(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """Return the sum over the vocabulary of squared probabilities, [t]."""
        from megatron_rl.parallel.chunked_divergence import compute_linear_sum_pi_squared

        places, rows, _ = _find_predicted(self._model, microbatch)
        kept = microbatch.find_kept(places)
        squares = compute_linear_sum_pi_squared(self._gather(hidden)[rows], self._output_weight, self._softmax, kept)
        return (_combine(self._model, squares, places, microbatch),)

    def compute_top_k(
        self, k: int, vocab_size: int, hidden: torch.Tensor, microbatch: TrainBatch
    ) -> tuple[torch.Tensor]:
        """Return ids and log-probs [t, 2, k + 1]: k likeliest of the first `vocab_size` tokens, then all others."""
        from megatron_rl.parallel.chunked_divergence import compute_linear_top_k

        places, rows, _ = _find_predicted(self._model, microbatch)
        softmax = replace(self._softmax, vocab_size=vocab_size)
        found = compute_linear_top_k(self._gather(hidden)[rows], self._output_weight, k, softmax)
        return (_combine(self._model, found, places, microbatch),)

    def select_hidden(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """Return the hidden states [t, h] float32 that predict the tokens in the loss; 0 elsewhere."""
        places, rows, _ = _find_predicted(self._model, microbatch)
        return (_combine(self._model, self._gather(hidden)[rows].float(), places, microbatch),)

    @property
    def _output_weight(self) -> torch.Tensor:
        stage = self._model.stages[-1]
        assert isinstance(stage, HiddenStatesModel)
        return stage.output_weight

    def _gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather hidden states [t/cp, 1, h] or [t/cp/tp, 1, h] over TP to [t/cp, h]."""
        return gather_for_shards(
            hidden, sequence_parallel=self._model.config.sequence_parallel, tp_group=self._model.groups.tp
        )[:, 0]


def compute_values(model: PackedModel, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
    """Return values [t], the scores of the positions that predict the tokens in the loss; 0 elsewhere."""
    places, rows, _ = _find_predicted(model, microbatch)
    return (_combine(model, _score(model, hidden)[rows], places, microbatch),)


def compute_scores(model: PackedModel, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
    """Return the scores of all positions, [t]."""
    mine = model.own_rows(microbatch)
    places = torch.arange(mine.start, mine.stop, device=hidden.device)
    return (_combine(model, _score(model, hidden), places, microbatch),)


def _score(model: PackedModel, hidden: torch.Tensor) -> torch.Tensor:
    from megatron_rl.models.other_stages import ScoreModel

    stage = model.stages[-1]
    assert isinstance(stage, ScoreModel)
    return stage.score(hidden)


def _find_predicted(
    model: PackedModel, microbatch: TrainBatch
) -> tuple[torch.Tensor, torch.Tensor | slice, torch.Tensor]:
    """Find the tokens that this context parallel rank predicts: those in the loss, or all if shapes are fixed.

    Returns:
        Indices [k] of the tokens in the microbatch, where t is a dummy; rows [k] of this rank's hidden states that
        predict them; their targets, [k, ...] token ids.
    """
    mine, predecessors = model.own_rows(microbatch), microbatch.predecessors
    tokens, piece = microbatch.tokens if microbatch.targets is None else microbatch.targets, microbatch.slices[0]
    if not piece.is_bucketed:
        is_mine = microbatch.loss_mask & (predecessors >= mine.start) & (predecessors < mine.stop)
        places = is_mine.nonzero()[:, 0]
        return places, predecessors[places] - mine.start, tokens[places]
    if piece.keys is not None:
        assert model.groups.layout.cp_size == 1, "shared prompts have no fixed shape under context parallelism"
        return torch.arange(len(predecessors), device=tokens.device), predecessors, tokens
    places = torch.arange(mine.start + 1, mine.stop + 1, device=tokens.device)
    return places, slice(None), tokens.roll(-1, 0)[mine]


def _combine(model: PackedModel, values: torch.Tensor, places: torch.Tensor, microbatch: TrainBatch) -> torch.Tensor:
    """Combine each context parallel rank's values [k, ...] of the tokens `places` [k] into [t, ...]; collective."""
    length = len(microbatch.tokens)
    if not microbatch.slices[0].is_bucketed:
        return combine_shards(values, places, length, model.groups.cp)
    combined = combine_shards(values, places, length + 1, model.groups.cp)[:length]
    mask = microbatch.loss_mask.view(-1, *(1 for _ in combined.shape[1:]))
    return torch.where(mask, combined, 0.0)
