# SPDX-License-Identifier: Apache-2.0
"""Writes the capsule of a step, for replay, while the run continues; docs/replay.md lists its files.

The directory is `step_<N>.partial` until it is complete. A failed write is logged and the run continues.

Sections are in order of computation and independent of layout: tables of parameters or lists of quantities. Token
values are indexed by rollout and position in the response, never by position in a packed batch.

Parameters are recorded as fingerprints, which are compact, independent of layout, and sufficient to compare tensors and
locate differences. Of each logical tensor (HF names and shapes; optimizer states as `optimizer.exp_avg.<name>`):

    digest   sum of bits(x_i) * (2 i + 1) modulo 2^64, as in `transfer.executor`
    total    sum of bits(x_i)             modulo 2^64
    norm, highest |x_i|, and the values of 64 elements at positions derived from the name

If one element changed, totals differ by d and digests by d * (2 i + 1), which gives i and the previous value.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save as to_safetensors

from megatron_rl.checkpoint.directory import begin_manifest, seal
from megatron_rl.checkpoint.files import DIGESTS_FILE, FileRecord, explain_write_error, write_file
from megatron_rl.checkpoint.pieces import (
    MAIN_PARAM,
    MOMENTS,
    STATE_PREFIX,
    Piece,
    SavedRole,
    choose_saved,
    find_holders,
    make_state_pieces,
)
from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.fields import config_to_dict
from megatron_rl.config.schema import RunConfig
from megatron_rl.observability.run import Run
from megatron_rl.parallel.collectives import world
from megatron_rl.samples.experience import Experience
from megatron_rl.transfer.executor import CHUNK_ELEMENTS, compute_digest, view_bits
from megatron_rl.types import KeptSets, Rollout, UserError
from megatron_rl.weights.megatron_layout import ROUTER_BIAS
from megatron_rl.weights.shard_box import ShardBox, box_slices, box_volume

CAPSULE_KIND, ROLLOUTS_FILE, VALUES_FILE, STATE = "capsule", "rollouts.jsonl", "values.safetensors", "state"
# Sample columns, by the section that computes them.
_FORWARD = ("old_logprobs", "ref_logprobs", "values")
_ESTIMATE = ("importance_weights", "advantages", "returns")
_UPDATE = ("update_logprobs", "update_entropy")
_ESTIMATE_METRICS = ("kl/per_response", "kl/coef", "mismatch/", "estimator/")
_CRITIC_METRICS, _ACTOR_METRICS = ("value/",), ("policy/", "kl/mean", "loss/")
NUM_SAMPLES = 64
_STATES = (*MOMENTS, MAIN_PARAM)

Index = Literal["token", "rollout", "group", "update", "step"]


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of n logical tensors."""

    shapes: Mapping[str, tuple[int, ...]]  # by name, in checkpoint order
    bits: np.ndarray  # [n, 2] int64: digest and total
    sizes: np.ndarray  # [n, 2] float64: norm and highest magnitude
    samples: np.ndarray  # [n, 64] float64, see `sample_places`


def sample_places(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the row-major positions of a tensor's sampled elements, [64] int64."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(np.prod(shape), size=NUM_SAMPLES)


def fingerprint_weights(role: SavedRole, group: dist.ProcessGroup) -> Fingerprints:
    """Fingerprint a role's weights; collective over `group` (which may exceed the role's ranks), equal on all ranks."""
    shapes, rank = role.model.shape.logical_tensors(), group.rank()
    saved = choose_saved(role, find_holders(role), rank) if rank in role.model.layout.ranks else []

    def read(p: ShardBox) -> Piece:
        data = role.model.params[p.param][box_slices(p.local_box)]
        data = data if p.param.endswith(ROUTER_BIAS) else data.to(role.model.dtype)
        return Piece(p.hf_name, shapes[p.hf_name], tuple(start for start, _ in p.hf_box), data)

    return fingerprint_pieces(shapes, map(read, saved), group)


def fingerprint_optimizer(role: SavedRole, group: dist.ProcessGroup) -> Fingerprints:
    """Fingerprint a role's optimizer states (none before its first step); collective over `group`."""
    shapes = {
        f"{STATE_PREFIX}{state}.{name}": shape
        for name, shape in role.model.shape.logical_tensors().items()
        for state in _STATES
    }
    rank, is_here = group.rank(), group.rank() in role.model.layout.ranks
    return fingerprint_pieces(shapes, make_state_pieces(role, rank, find_holders(role)) if is_here else (), group)


def fingerprint_pieces(
    shapes: Mapping[str, tuple[int, ...]], pieces: Iterable[Piece], group: dist.ProcessGroup | None
) -> Fingerprints:
    """Compute fingerprints from pieces that cover each element once over `group`, or on this rank if it is `None`."""
    rows, names = {name: row for row, name in enumerate(shapes)}, list(shapes)
    places = {}
    bits = torch.zeros(len(names), 3, dtype=torch.int64)  # digest, total, elements
    numbers = torch.zeros(len(names), 1 + NUM_SAMPLES, dtype=torch.float64)  # squared norm, samples
    highest = torch.zeros(len(names), dtype=torch.float64)
    for piece in pieces:
        if not box_volume(piece.box):
            continue
        data = piece.data.detach()
        data, row = data[(None,) * (len(piece.shape) - data.ndim)], rows[piece.key]
        if row not in places:
            places[row] = np.stack(np.unravel_index(sample_places(piece.key, piece.shape), piece.shape))
        integers = view_bits(data)
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for part in integers.split(max(1, CHUNK_ELEMENTS // max(1, integers[0].numel()))):
            total += part.sum(dtype=torch.int64)
        bits[row] += torch.tensor([int(compute_digest(data, piece.box, piece.shape)), int(total), data.numel()])
        numbers[row, 0] += torch.linalg.vector_norm(data, dtype=torch.float64).cpu() ** 2
        inner = places[row] - np.array(piece.offset)[:, None]
        is_here = ((inner >= 0) & (inner < np.array(data.shape)[:, None])).all(0)
        if is_here.any():
            found = data[tuple(torch.from_numpy(i[is_here]) for i in inner)].double().cpu()
            numbers[row, 1:][torch.from_numpy(is_here)] += found
        highest[row] = torch.maximum(highest[row], data.abs().max().double().cpu())
    if group is not None:
        dist.all_reduce(bits, group=group)
        dist.all_reduce(numbers, group=group)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    seen = [row for row, count in enumerate(bits[:, 2].tolist()) if count]
    for row in seen:
        assert bits[row, 2] == np.prod(shapes[names[row]]), f"{names[row]}: each element counts once"
    bits, numbers, highest = bits[seen].numpy(), numbers[seen].numpy(), highest[seen].numpy()
    return Fingerprints(
        {names[row]: tuple(shapes[names[row]]) for row in seen},
        bits[:, :2],
        np.stack([np.sqrt(numbers[:, 0]), highest], axis=1),
        numbers[:, 1:],
    )


@dataclass(frozen=True)
class Values:
    """One quantity of a step, such as its log-probs or a metric."""

    name: str
    index: Index  # owner of each element: a response token, rollout, group, optimizer step of a role, or the step
    array: np.ndarray  # [k], one element per owner
    lengths: np.ndarray | None = None  # number of tokens of each rollout, if owners are tokens


@dataclass(frozen=True)
class Section:
    """Inputs or results of one part of the step."""

    name: str
    is_input: bool  # whether a replay must reproduce the content bitwise in any layout
    content: Fingerprints | list[Values]  # fingerprints of parameters, or quantities in order of computation


def observe_parameters(roles: Mapping[str, SavedRole], *, is_input: bool) -> list[Section]:
    """Record weights and optimizer states before a step (`is_input`), or the weights after it; collective.

    Args:
        roles: trained roles by name; the names are equal on all ranks.
    """
    found, group, when = [], world(), "before" if is_input else "after"
    for name, role in roles.items():
        found.append(Section(f"{name} weights {when}", is_input, fingerprint_weights(role, group)))
        if is_input:
            found.append(Section(f"{name} optimizer {when}", is_input, fingerprint_optimizer(role, group)))
    return found


def observe_results(
    roles: Mapping[str, SavedRole],
    samples: Experience,
    decode: Callable[[list[int]], str],
    counted: Mapping[str, Sequence[float]],
) -> tuple[list[Rollout], list[Section]]:
    """Record the results of a step after its last optimizer step; collective.

    Args:
        counted: metric -> its values in this step.

    Returns:
        On rank 0 the rollouts and all sections; on other ranks no rollouts and only the sections of parameters.
    """
    after = observe_parameters(roles, is_input=False)
    columns = {name: samples.columns[name] for name in (*_FORWARD, *_ESTIMATE, *_UPDATE) if name in samples.columns}
    found = samples.fetch_rollouts(range(len(samples.rewards)), decode, columns)
    if not found:
        return [], after
    lengths = np.array([len(next(iter(values.values()))) for _, values in found], np.int64)
    tokens = {name: Values(name, "token", np.concatenate([v[name] for _, v in found]), lengths) for name in columns}
    rollouts = [rollout for rollout, _ in found]

    def columns_of(names: Sequence[str]) -> list[Values]:
        return [tokens[name] for name in names if name in tokens]

    def metrics_of(prefixes: tuple[str, ...], index: Index) -> list[Values]:
        return [
            Values(name, index, np.array(values, np.float64))
            for name, values in counted.items()
            if name.startswith(prefixes)
        ]

    sections = [
        Section("rollouts", True, _describe_rollouts(samples, rollouts)),
        Section("forward", False, columns_of(_FORWARD)),
        Section("estimate", False, metrics_of(_ESTIMATE_METRICS, "step") + columns_of(_ESTIMATE)),
        Section("critic updates", False, metrics_of(_CRITIC_METRICS, "update")),
        Section("actor updates", False, metrics_of(_ACTOR_METRICS, "update") + columns_of(_UPDATE)),
    ]
    return rollouts, [*(s for s in sections if s.content), *after]


def _describe_rollouts(samples: Experience, rollouts: Sequence[Rollout]) -> list[Values]:
    headers = samples.headers.rollouts
    lengths = np.array([len(rollout.response_tokens) for rollout in rollouts], np.int64)
    found = [
        Values("group size", "group", headers.group_sizes.astype(np.int64)),
        Values(
            "prompt tokens",
            "token",
            np.concatenate([r.prompt.tokens for r in rollouts]),
            headers["num_prompt_tokens"].astype(np.int64),
        ),
        Values("response tokens", "token", np.concatenate([r.response_tokens for r in rollouts]), lengths),
        Values("rollout_logprobs", "token", np.concatenate([r.rollout_logprobs for r in rollouts]), lengths),
        Values("finish reason", "rollout", headers["finish_reason"].astype(np.int64)),
        *(
            Values(f"reward component {name}", "rollout", np.nan_to_num(headers.component(name)))
            for name in sorted(headers.names)
        ),
        Values("reward", "rollout", headers["reward"]),
    ]
    if samples.baselines is not None:
        found.append(Values("greedy baseline", "group", np.asarray(samples.baselines, np.float64)))
    return found


def encode_sections(sections: Sequence[Section]) -> tuple[list[dict[str, Any]], bytes]:
    """Return the sections' entries for manifest.json, and the bytes of values.safetensors with their arrays."""
    entries: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for number, section in enumerate(sections):
        entry: dict[str, Any] = {"name": section.name, "is_input": section.is_input}
        if isinstance(section.content, Fingerprints):
            entry["shapes"] = {name: list(shape) for name, shape in section.content.shapes.items()}
            for kind in ("bits", "sizes", "samples"):
                arrays[f"{number}.{kind}"] = getattr(section.content, kind)
        else:
            entry["values"] = [{"name": values.name, "index": values.index} for values in section.content]
            for place, values in enumerate(section.content):
                arrays[f"{number}.{place}"] = values.array
                if values.lengths is not None:
                    arrays[f"{number}.{place}.lengths"] = values.lengths
        entries.append(entry)
    return entries, to_safetensors({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def write_rollouts(path: Path, rollouts: Sequence[Rollout], samples: Experience) -> FileRecord:
    """Write the rollout data needed for training, one JSON object per rollout, group by group, with lossless floats.

    `prompt` and `answer` make it usable as training data; `extra_info`, which only rewards use, is omitted.
    `samples` supply groups and greedy baselines.
    """
    lines = []
    for number, rollout in zip(samples.headers.rollouts["group"].tolist(), rollouts, strict=True):
        baseline, prompt = None if samples.baselines is None else float(samples.baselines[number]), rollout.prompt
        further: dict[str, Any] = {}
        with_sets = [(branch.kept, branch.sampled) for branch in rollout.branches if branch.kept is not None]
        if with_sets:
            counts = [kept.counts[sampled] for kept, sampled in with_sets]
            further["kept_ids"] = KeptSets.join([kept for kept, _ in with_sets]).ids.tolist()
            further["kept_counts"] = np.concatenate(counts).tolist()
        if (routes := rollout.branches[0].routes) is not None:
            data = base64.b64encode(routes.tobytes()).decode()
            further["routes"] = {"shape": routes.shape, "dtype": str(routes.dtype), "data": data}
        lines.append(
            json.dumps(
                {
                    "group": number,
                    "prompt_id": prompt.prompt_id,
                    "sample_index": rollout.sample_index,
                    "prompt": prompt.text,
                    "response": rollout.response,
                    "answer": prompt.ground_truth,
                    "data_source": prompt.data_source,
                    "reward": rollout.reward,
                    "reward_components": rollout.reward_components,
                    "greedy_baseline": baseline,
                    "finish_reason": rollout.finish_reason,
                    "versions": rollout.versions.tolist(),
                    "prompt_tokens": prompt.tokens.tolist(),
                    "response_tokens": rollout.response_tokens.tolist(),
                    "rollout_logprobs": rollout.rollout_logprobs.tolist(),
                    **further,
                },
                ensure_ascii=False,
            )
            + "\n"
        )
    return write_file(path, "".join(lines).encode("utf-8", "backslashreplace"))  # escapes lone surrogates


class CapsuleRecorder:
    """A writer of the capsule (record for replay) of step `trainer.capture_step`; methods are collective.

    Args:
        save_state: writes the current state as a checkpoint into a directory; returns an error, if any.
        decode: response tokens -> text.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: BatchPlan,
        run: Run,
        roles: Mapping[str, SavedRole],
        save_state: Callable[[Path], UserError | None],
        decode: Callable[[list[int]], str],
    ) -> None:
        self._config, self._plan, self._run, self._roles = config, plan, run, roles
        self._save_state, self._decode = save_state, decode
        self._before: list[Section] | None = None  # in the captured step

    def begin(self, step: int) -> None:
        """Save the state before the captured step; do nothing in other steps."""
        if step != self._config.trainer.capture_step:
            return
        partial = self._partial(step)
        with self._run.timers.phase("capture", swallow=True):
            if self._run.is_writer:
                shutil.rmtree(partial, ignore_errors=True)
            error = self._save_state(partial / STATE)
            if error is not None:
                self._report_failure(step, error)
                return
            self._before = observe_parameters(self._roles, is_input=True)

    def end(self, step: int, samples: Experience) -> None:
        """Add the results of the captured step and publish the capsule."""
        if self._before is None:
            return
        with self._run.timers.phase("capture", swallow=True):
            rollouts, results = observe_results(self._roles, samples, self._decode, self._run.series)
            sections, self._before = [*self._before, *results], None
            if not self._run.is_writer:
                return
            partial = self._partial(step)
            try:
                entries, arrays = encode_sections(sections)
                state = partial / STATE / f"step_{step - 1}"
                sums = (state / DIGESTS_FILE).read_bytes()
                records = [
                    write_rollouts(partial / ROLLOUTS_FILE, rollouts, samples),
                    write_file(partial / VALUES_FILE, arrays),
                    FileRecord(state / DIGESTS_FILE, len(sums), hashlib.sha256(sums).hexdigest()),
                ]
                num_bytes = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
                manifest = begin_manifest(CAPSULE_KIND, step) | {
                    "state": f"{STATE}/step_{step - 1}",
                    "world_size": self._plan.world_size,
                    "device": "cuda" if torch.cuda.is_available() else "cpu",
                    "layouts": {name: role.model.layout.describe() for name, role in self._roles.items()},
                    "config": config_to_dict(self._config),
                    "plan": asdict(self._plan),
                    "metrics": self._run.counted(),
                    "sections": entries,
                }
                num_bytes += seal(partial, manifest, records)
                self._run.log.info("capsule: %s, %s bytes", partial.with_suffix(""), f"{num_bytes:,}")
            except (UserError, OSError) as error:
                self._report_failure(step, explain_write_error(error, partial))

    def _partial(self, step: int) -> Path:
        return self._run.dir / "capsules" / f"step_{step}.partial"

    def _report_failure(self, step: int, error: UserError) -> None:
        self._run.log.error("capsule of step %d failed, the run continues: %s", step, error)
        if self._run.is_writer:
            shutil.rmtree(self._partial(step), ignore_errors=True)
