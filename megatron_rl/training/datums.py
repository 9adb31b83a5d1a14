# SPDX-License-Identifier: Apache-2.0
"""Passes over data as a caller gives it: tokens, targets that need not be the next tokens, and columns of a loss.

A datum of n tokens is packed as a sequence of n + 1 rows: row i + 1 holds target i, predicted by token i, so that all
layouts, step modes and heads treat it as a prompt of one token with its response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.summed_losses import SummedLoss, find_summed_loss
from megatron_rl.parallel.collectives import share_object, world
from megatron_rl.samples.batch import Packer, Padding, TrainBatch, build_train_batch
from megatron_rl.samples.experience import check_kind
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.training.optimizer import StepLoss
from megatron_rl.types import Branch, UserError


@dataclass(frozen=True)
class Datum:
    """A sequence to learn from.

    Attributes:
        tokens: [n] token ids that the model reads.
        targets: [n] or [n, k] token ids; `targets[i]` is predicted after `tokens[i]`.
        columns: inputs of the loss by name, [n] each; "weights" is like `targets`.
    """

    tokens: Sequence[int] | np.ndarray
    targets: Sequence[Any] | np.ndarray
    columns: Mapping[str, Sequence[Any] | np.ndarray] = field(default_factory=dict)


# (datums, their log-probs [n] or [n, k] with gradients) -> scalar loss, and metrics
DatumLoss = Callable[[Sequence[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]


class DatumPasses:
    """Passes of a trained policy over datums; its calls are collective over all ranks, with equal arguments."""

    def __init__(self, role: Any, packer: Packer) -> None:
        found = "actor.mtp_lr > 0: the MTP layer learns from responses that the policy samples"
        _require(not getattr(packer.config, "mtp_lr", 0.0), found, "0")
        self._role, self._packer = role, packer
        self._loss = StepLoss("datums", self._compute_loss, packer.device)

    def run(
        self, datums: Sequence[Datum], loss: str | DatumLoss, config: Mapping[str, float], *, backward: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Run a pass, and add its gradients if it is `backward`; see `ActorOnSamples.forward_backward_datums`."""
        if callable(loss):
            return self._run_function(datums, loss, backward=backward)
        table, model = _Table(datums, find_summed_loss(loss), config, self._packer), self._packer.model
        batch = self._pack(table)
        logprobs = torch.zeros(batch.column("targets").shape, dtype=torch.float32, device=batch.tokens.device)
        if model.dp_rank is not None and backward:
            self._loss.set_settings((loss, table.names))
            batch = replace(batch, update_logprobs=logprobs, update_entropy=torch.zeros_like(batch.rollout_logprobs))
            self._role.forward_backward(batch, self._loss)
        elif model.dp_rank is not None:
            logprobs = model.compute_forward(batch, self._role.head, *table.targets.shape[1:])
        return self._answer(table, batch, logprobs)

    def _run_function(
        self, datums: Sequence[Datum], function: DatumLoss, *, backward: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Differentiate a function of the log-probs on rank 0, and use its gradient as weights of cross entropy."""
        answers, _ = self.run([replace(datum, columns={}) for datum in datums], "cross_entropy", {}, backward=False)
        error, found = None, ()
        if world().rank() == 0:
            try:
                logprobs = [torch.tensor(answer, requires_grad=True) for answer in answers]
                loss, metrics = function(datums, logprobs)
                gradients = torch.autograd.grad(loss, logprobs, materialize_grads=True)
                found = {**metrics, "loss:sum": float(loss)}, [-gradient.numpy() for gradient in gradients]
            except Exception as caught:
                error = UserError(
                    f"the loss function failed: {type(caught).__name__}: {caught}",
                    source=getattr(function, "__name__", "loss"),
                    expected="(datums, logprobs) -> a tensor without dimensions, and a dict of metrics",
                    hint="logprobs are tensors in the order of the datums, [n] or [n, k] each",
                )
        error, found = share_object((error, found), world())
        if error is not None:
            raise error
        metrics, weights = found
        if backward:
            pairs = zip(datums, weights, strict=True)
            weighted = [replace(datum, columns={"weights": values}) for datum, values in pairs]
            self.run(weighted, "cross_entropy", {}, backward=True)
        return answers, metrics

    def _compute_loss(
        self, settings: tuple[str, tuple[str, ...]], microbatch: TrainBatch, logprobs: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        microbatch.column("update_logprobs").copy_(logprobs.detach())
        loss = _sum_loss(find_summed_loss(settings[0]), settings[1], microbatch, logprobs)
        return loss, {"loss": loss.detach(), "tokens": microbatch.loss_mask.sum().float()}

    def _pack(self, table: _Table) -> TrainBatch:
        model, device = self._packer.model, self._packer.device
        lengths = (table.lengths + 1).tolist()
        plan = plan_microbatches(
            lengths,
            dp_size=model.layout.dp_size,
            max_tokens=self._packer.config.max_tokens_per_microbatch,
            count_multiple=model.microbatch_count_multiple,
            attention_ratio=model.attention_ratio,
        )
        batch = build_train_batch(
            [Branch.of_response(np.append(tokens, 0), 1) for tokens in table.split(table.tokens)],
            np.ones(len(lengths)),
            [(range(len(lengths)), plan)],
            dp_rank=model.dp_rank,
            padding=Padding(model.pad_multiple, model.buckets, self._packer.plan.longest_sequence),
            device=device,
        )
        rows, places = table.find_places(batch)

        def spread(values: np.ndarray) -> torch.Tensor:
            found = np.zeros((len(batch.tokens), *values.shape[1:]), values.dtype)
            found[rows] = values[places]
            return torch.from_numpy(found).to(device)

        columns = {name: spread(getattr(table, name)) for name in ("targets", "columns")}
        names = [f"datum {index}" for index in range(len(lengths))]
        return replace(batch, **columns, loss_weights=spread(table.weights), names=names)

    def _answer(
        self, table: _Table, batch: TrainBatch, logprobs: torch.Tensor
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Bring log-probs and the sums of the loss to all ranks, in the order of the datums."""
        model, device = self._packer.model, self._packer.device
        found = torch.zeros(table.targets.shape, dtype=torch.float32, device=device)
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        is_last = model.dp_rank is not None and model.groups.is_last_stage
        if is_last and model.groups.at.tp == model.groups.at.cp == 0:  # one rank per replica
            rows, places = table.find_places(batch)
            found[places] = logprobs[rows]
            sums[0], sums[1] = _sum_loss(table.loss, table.names, batch, logprobs), len(rows)
        for values in (found, sums):
            dist.all_reduce(values, group=world())
        parts = zip(table.split(found.cpu().numpy()), table.widths, strict=True)
        answers = [part[:, :k] if k else part.reshape(len(part), -1)[:, 0] for part, k in parts]
        return answers, {"loss:sum": float(sums[0]), "tokens:sum": float(sums[1])}


def _sum_loss(loss: SummedLoss, names: Sequence[str], batch: TrainBatch, logprobs: torch.Tensor) -> torch.Tensor:
    columns = dict(zip(names, batch.column("columns").unbind(1), strict=True)) | {"weights": batch.loss_weights}
    token_loss = loss.compute(logprobs, columns, batch.sequence_ids)
    mask = batch.loss_mask.view(-1, *(1 for _ in token_loss.shape[1:]))
    return torch.where(mask, token_loss, 0.0).sum()


class _Table:
    """The datums of a call, checked and concatenated to t tokens.

    Attributes:
        widths: k of each datum; 0 for targets [n].
        targets, weights: [t] or [t, k].
        columns: [t, c] float32, in the order of `names`.
    """

    def __init__(self, datums: Sequence[Datum], loss: SummedLoss, config: Mapping[str, float], packer: Packer) -> None:
        settable = {*loss.defaults} - {"weights"}
        for name, value in config.items():
            is_right = name in settable and _is_number(value)
            _require(is_right, f"config {name} = {value!r:.40}", f"numbers named {', '.join(settable) or '(none)'}")
        if not isinstance(datums, Sequence) or not datums:
            _require(False, f"{datums!r:.40}", "a list of Datum, not empty")  # made for an error only: it shows arrays
        self.loss, values = loss, {**loss.defaults, **config}
        self.names = tuple(name for name in (*loss.needed, *loss.defaults) if name != "weights")
        rows = [_read_datum(index, datum, loss, values, packer) for index, datum in enumerate(datums)]
        tokens, targets, weights, columns = zip(*rows, strict=True)
        self.lengths = np.array([len(part) for part in tokens])
        self.widths = [0 if part.ndim == 1 else part.shape[1] for part in targets]
        self.tokens, self.columns = np.concatenate(tokens), np.concatenate(columns)
        self.targets, self.weights = (_join(parts, max(self.widths)) for parts in (targets, weights))

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Split [t, ...] by datum."""
        return np.split(values, np.cumsum(self.lengths)[:-1])

    def find_places(self, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a batch that hold targets, and their places in this table."""
        ids, positions = batch.sequence_ids.cpu().numpy(), batch.position_ids.cpu().numpy()
        rows = np.flatnonzero((ids >= 0) & (positions > 0))
        return rows, (np.cumsum(self.lengths) - self.lengths)[ids[rows]] + positions[rows] - 1


def _read_datum(
    index: int, datum: Datum, loss: SummedLoss, values: Mapping[str, float], packer: Packer
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens [n], targets and weights [n] or [n, k], and other columns [n, c] of a datum."""
    check_kind(datum, Datum, f"datums[{index}]", "a Datum")
    most, vocabulary = packer.config.max_tokens_per_microbatch - 1, packer.model.shape.vocab_size
    if packer.model.buckets is not None:
        most = min(most, packer.plan.longest_sequence - 1)
    tokens, targets = _as_array(datum.tokens), _as_array(datum.targets)
    for name, ids, sizes in (("tokens", tokens, ("[n]",)), ("targets", targets, ("[n]", "[n, k]"))):
        is_right = 0 < ids.ndim <= len(sizes) and len(ids) == len(tokens) and ids.size and ids.dtype.kind in "iu"
        is_right = is_right and ids.min() >= 0 and ids.max() < vocabulary
        found = f"{name} of datum {index}: {ids.dtype} {list(ids.shape)}"
        _require(is_right, found, f"{' or '.join(sizes)} token ids below {vocabulary}")
    found, expected = f"datum {index} has {len(tokens)} tokens", f"at most {most} (actor.max_tokens_per_microbatch)"
    _require(len(tokens) <= most, found, expected)
    found = f"targets of datum {index}: {list(targets.shape)}"
    _require(targets.ndim == 1 or not loss.needed, found, "[n] for this loss; [n, k] for cross_entropy")
    known = (*loss.needed, *loss.defaults)
    for name in datum.columns:
        _require(name in known, f"column {name!r} of datum {index}", f"what the loss reads: {', '.join(known)}")
    columns = {}
    for name in known:
        is_given, shape = name in datum.columns, targets.shape if name == "weights" else tokens.shape
        _require(is_given or name in values, f"no column {name!r} in datum {index}", ", ".join(loss.needed))
        given = _as_array(datum.columns[name]) if is_given else np.full(shape, values[name])
        is_right = given.shape == shape and given.dtype.kind in "fiub" and np.isfinite(given).all()
        found = f"column {name!r} of datum {index}: {given.dtype} {list(given.shape)}"
        _require(is_right, found, f"finite numbers {list(shape)}")
        columns[name] = given.astype(np.float32)
    weights = columns.pop("weights", np.ones(targets.shape, np.float32))
    table = np.stack([*columns.values()], 1) if columns else np.empty((len(tokens), 0), np.float32)
    return tokens.astype(np.int32), targets.astype(np.int64), weights, table


def _as_array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # rows of several lengths
        return np.empty(0, object)


def _join(parts: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Concatenate [n] or [n, k] arrays, zero-padded to `width` columns if any has columns."""
    if not width:
        return np.concatenate(parts)
    columns = [part.reshape(len(part), -1) for part in parts]
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in columns])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(is_right: Any, found: str, expected: str) -> None:
    if not is_right:
        source, hint = "forward_backward_datums, optim_step", "docs/primitives.md describes their arguments"
        raise UserError(found, source=source, expected=expected, hint=hint)


_SETTINGS = {"lr": math.inf, "betas": 1.0, "eps": math.inf, "weight_decay": math.inf, "grad_clip_norm": math.inf}


def check_step_settings(given: Mapping[str, Any], config: Any) -> None:
    """Refuse settings of one optimizer step that are none, out of range, or part of a captured graph (UserError)."""
    for name, value in given.items():
        parts: Sequence[Any] = value if name == "betas" and isinstance(value, Sequence) else [value]
        is_right = name in _SETTINGS and len(parts) == 1 + (name == "betas") and all(map(_is_number, parts))
        is_right = is_right and all(0 <= x < _SETTINGS[name] for x in parts) and (name != "eps" or parts[0] > 0)
        expected = "lr, eps, weight_decay, grad_clip_norm, or two betas below 1; none negative, eps above 0"
        _require(is_right, f"{name} = {value!r:.40}", expected)
        is_free = name == "lr" or config.step_mode != "graph"
        _require(is_free, f"{name} = {value!r:.40}", "only lr with step_mode = graph, whose graphs hold the others")
