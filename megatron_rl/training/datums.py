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
from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch
from megatron_rl.samples.experience import check_kind
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.samples.pack import Packer
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
        if getattr(packer.config, "mtp_lr", 0.0):
            raise _refuse("actor.mtp_lr > 0", "0: the MTP layer learns from responses that the policy samples")
        self._role, self._packer = role, packer
        self._loss = StepLoss("datums", self._compute_loss, packer.device)

    def run(
        self, datums: Sequence[Datum], loss: str | DatumLoss, config: Mapping[str, float], *, backward: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Run a pass, and add its gradients if it is `backward`; see `ActorOnSamples.forward_backward_datums`."""
        if callable(loss):
            return self._run_function(datums, loss, backward=backward)
        check_kind(loss, str, "forward_backward_datums(datums, loss)", "the name of a loss, or a function")
        found = find_summed_loss(loss)
        table = _Table.read(datums, found, config, self._packer)
        batch = self._pack(table)
        model = self._packer.model
        logprobs = torch.zeros(batch.column("targets").shape, dtype=torch.float32, device=batch.tokens.device)
        if model.dp_rank is not None:
            self._loss.set_settings((loss, table.names))
            if backward:
                batch = replace(batch, update_logprobs=logprobs, update_entropy=torch.zeros_like(batch.loss_weights))
                self._role.forward_backward(batch, self._loss)
            else:
                logprobs = model.compute_forward(batch, self._role.head, *table.targets.shape[1:])
        return self._answer(table, batch, logprobs, found)

    def _run_function(
        self, datums: Sequence[Datum], function: DatumLoss, *, backward: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Differentiate a function of the log-probs on rank 0, and use its gradient as weights of cross entropy."""
        bare = [Datum(datum.tokens, datum.targets) for datum in datums]
        answers, _ = self.run(bare, "cross_entropy", {}, backward=False)
        error, loss, metrics, weights = None, math.nan, {}, []
        if world().rank() == 0:
            logprobs = [torch.tensor(answer, requires_grad=True) for answer in answers]
            try:
                value, metrics = function(datums, logprobs)
                gradients = torch.autograd.grad(value, logprobs, allow_unused=True, materialize_grads=True)
                loss, weights = float(value), [-gradient.numpy() for gradient in gradients]
            except Exception as caught:
                error = UserError(
                    f"the loss function failed: {type(caught).__name__}: {caught}",
                    source=getattr(function, "__name__", "loss"),
                    expected="(datums, logprobs) -> a tensor without dimensions, and a dict of metrics",
                    hint="logprobs are tensors in the order of the datums, [n] or [n, k] each",
                )
        error, loss, metrics, weights = share_object((error, loss, dict(metrics), weights), world())
        if error is not None:
            raise error
        if backward:
            pairs = zip(bare, weights, strict=True)
            self.run([replace(datum, columns={"weights": w}) for datum, w in pairs], "cross_entropy", {}, backward=True)
        return answers, {**metrics, "loss:sum": loss}

    def _compute_loss(
        self, settings: tuple[str, tuple[str, ...]], microbatch: TrainBatch, logprobs: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert microbatch.update_logprobs is not None
        microbatch.update_logprobs.copy_(logprobs.detach())
        loss = _sum_loss(find_summed_loss(settings[0]), settings[1], microbatch, logprobs)
        return loss, {"loss": loss.detach(), "tokens": microbatch.loss_mask.sum().float()}

    def _pack(self, table: _Table) -> TrainBatch:
        model, config, device = self._packer.model, self._packer.config, self._packer.device
        lengths = (table.lengths + 1).tolist()
        plan = plan_microbatches(
            lengths,
            dp_size=model.layout.dp_size,
            max_tokens=config.max_tokens_per_microbatch,
            count_multiple=model.microbatch_count_multiple,
            attention_ratio=model.attention_ratio,
        )
        tokens = np.split(table.tokens, np.cumsum(table.lengths)[:-1])
        batch = build_train_batch(
            [Branch.of_response(np.append(part, 0), 1) for part in tokens],
            np.ones(len(lengths)),
            [(range(len(lengths)), plan)],
            dp_rank=model.dp_rank,
            padding=Padding(model.pad_multiple, model.buckets, self._packer.plan.longest_sequence),
            device=device,
        )
        rows, places = table.find_places(batch)

        def spread(values: np.ndarray) -> torch.Tensor:
            found = torch.zeros(len(batch.tokens), *values.shape[1:], dtype=torch.from_numpy(values).dtype)
            found[rows] = torch.from_numpy(values[places])
            return found.to(device)

        return replace(
            batch,
            targets=spread(table.targets),
            columns=spread(table.columns),
            loss_weights=spread(table.weights),
            names=[f"datum {index}" for index in range(len(lengths))],
        )

    def _answer(
        self, table: _Table, batch: TrainBatch, logprobs: torch.Tensor, loss: SummedLoss
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Bring log-probs and the sums of the loss to all ranks, in the order of the datums."""
        model, device = self._packer.model, self._packer.device
        found = torch.zeros(table.targets.shape, dtype=torch.float32, device=device)
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        is_last = model.dp_rank is not None and model.groups.is_last_stage
        if is_last and model.groups.at.tp == model.groups.at.cp == 0:  # one rank per replica
            rows, places = table.find_places(batch)
            found[places] = logprobs[rows]
            with torch.no_grad():
                sums[0] = _sum_loss(loss, table.names, batch, logprobs)
            sums[1] = len(rows)
        for values in (found, sums):
            dist.all_reduce(values, group=world())
        parts = np.split(found.cpu().numpy(), np.cumsum(table.lengths)[:-1])
        answers = [part[:, :k] if k else part.reshape(len(part), -1)[:, 0] for part, k in zip(parts, table.widths)]
        return answers, {"loss:sum": float(sums[0]), "tokens:sum": float(sums[1])}


def _sum_loss(loss: SummedLoss, names: Sequence[str], batch: TrainBatch, logprobs: torch.Tensor) -> torch.Tensor:
    assert batch.columns is not None
    columns = dict(zip(names, batch.columns.unbind(1), strict=True)) | {"weights": batch.loss_weights}
    token_loss = loss.compute(logprobs, columns, batch.sequence_ids)
    mask = batch.loss_mask.view(-1, *(1 for _ in token_loss.shape[1:]))
    return torch.where(mask, token_loss, 0.0).sum()


@dataclass(frozen=True)
class _Table:
    """All datums of a call, concatenated: t tokens.

    Attributes:
        lengths: tokens of each datum.
        widths: k of each datum; 0 for targets [n].
        targets, weights: [t] or [t, k].
        columns: [t, c] float32, in the order of `names`.
    """

    lengths: np.ndarray
    widths: list[int]
    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    names: tuple[str, ...]
    columns: np.ndarray

    @classmethod
    def read(cls, datums: Sequence[Datum], loss: SummedLoss, config: Mapping[str, float], packer: Packer) -> _Table:
        """Check datums and settings, the same on every rank, and concatenate them (UserError)."""
        settable = [name for name in loss.defaults if name != "weights"]
        for name, value in config.items():
            if name not in settable or not _is_number(value):
                raise _refuse(f"config {name} = {value!r:.40}", f"numbers named {', '.join(settable) or '(none)'}")
        if not isinstance(datums, Sequence) or not datums:
            raise _refuse(f"{datums!r:.40}", "a list of Datum, not empty")
        names = tuple(name for name in (*loss.needed, *loss.defaults) if name != "weights")
        values = {**loss.defaults, **config}
        rows = [_read_datum(index, datum, loss, values, packer) for index, datum in enumerate(datums)]
        widths = [targets.shape[1] if targets.ndim > 1 else 0 for _, targets, _, _ in rows]
        tokens, targets, weights, columns = zip(*rows, strict=True)
        return cls(
            np.array([len(part) for part in tokens]),
            widths,
            np.concatenate(tokens),
            _join(targets, max(widths)),
            _join(weights, max(widths)),
            names,
            np.concatenate(columns),
        )

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
    tokens, targets = (np.asarray(values) for values in (datum.tokens, datum.targets))
    for name, ids, sizes in (("tokens", tokens, (1,)), ("targets", targets, (1, 2))):
        is_shaped = ids.ndim in sizes and len(ids) == len(tokens) and ids.size
        if not is_shaped or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocabulary:
            expected = f"{' or '.join(['[n]', '[n, k]'][: len(sizes)])} token ids below {vocabulary}"
            raise _refuse(f"{name} of datum {index}: {ids.dtype} {list(ids.shape)}", expected)
    if len(tokens) > most:
        raise _refuse(f"datum {index} has {len(tokens)} tokens", f"at most {most} (actor.max_tokens_per_microbatch)")
    known = (*loss.needed, *loss.defaults)
    if strange := sorted({*datum.columns} - {*known}):
        raise _refuse(f"column {strange[0]!r} of datum {index}", f"columns that the loss reads: {', '.join(known)}")
    found = {}
    for name in known:
        if name in loss.needed and name not in datum.columns:
            raise _refuse(f"no column {name!r} in datum {index}", f"columns {', '.join(loss.needed)}")
        shape = targets.shape if name == "weights" else tokens.shape
        given = np.asarray(datum.columns[name]) if name in datum.columns else np.full(shape, values[name])
        if given.shape != shape or given.dtype.kind not in "fiub" or not np.isfinite(given).all():
            message = f"column {name!r} of datum {index}: {given.dtype} {list(given.shape)}"
            raise _refuse(message, f"finite numbers {list(shape)}")
        found[name] = given.astype(np.float32)
    if targets.ndim > 1 and loss.needed:
        raise _refuse(f"targets of datum {index}: {list(targets.shape)}", "[n] for this loss; [n, k] for cross_entropy")
    weights = found.pop("weights", np.ones(targets.shape, np.float32))
    columns = np.stack([*found.values()], 1) if found else np.empty((len(tokens), 0), np.float32)
    return tokens.astype(np.int32), targets.astype(np.int64), weights, columns


def _join(parts: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Concatenate [n] or [n, k] arrays, zero-padded to `width` columns if any has columns."""
    if not width:
        return np.concatenate(parts)
    columns = [part.reshape(len(part), -1) for part in parts]
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in columns])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(found: str, expected: str) -> UserError:
    return UserError(found, source="forward_backward_datums", expected=expected, hint="docs/primitives.md, Datums")


_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("at least 0", lambda x: x >= 0),
    "eps": ("above 0", lambda x: x > 0),
    "weight_decay": ("at least 0", lambda x: x >= 0),
    "grad_clip_norm": ("at least 0; 0 is off", lambda x: x >= 0),
}


def check_step_settings(given: Mapping[str, Any], config: Any) -> None:
    """Refuse settings of one optimizer step that are no settings, out of range, or part of a captured graph."""
    for name, value in given.items():
        expected, is_valid = _RANGES.get(name, ("", None))
        if name == "betas":
            expected = "two numbers from 0 to below 1"
            is_right = (
                isinstance(value, Sequence) and len(value) == 2 and all(_is_number(x) and 0 <= x < 1 for x in value)
            )
        elif is_valid is None:
            expected, is_right = f"settings betas, {', '.join(_RANGES)}", False
        else:
            is_right = _is_number(value) and is_valid(value)
        if is_right and name != "lr" and config.step_mode == "graph":
            expected, is_right = "only lr with step_mode = graph, whose graphs hold the other settings", False
        if not is_right:
            raise UserError(
                f"{name} = {value!r:.40}", source="optim_step", expected=expected, hint="docs/primitives.md, Datums"
            )
