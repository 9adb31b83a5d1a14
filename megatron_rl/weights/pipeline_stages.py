# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose stages have unequal numbers of layers: settings in Megatron's words, checks, and a proposal.

A layout string of megatron-core lists the model chunks in order: `E` is the embedding, `t` a layer, `L` the head, `|`
separates chunks, and `x*3` or `(...)*3` repeats. Of p * v chunks (PP p, VPP v), number c * p + s is chunk c of stage s.
"""

from __future__ import annotations

import re
from itertools import groupby

from megatron_rl.config.schema import STAGE_SETTINGS, LayoutConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import divide_layers

_VPP, _FIRST, _LAST, _LAYOUT = STAGE_SETTINGS
_REPEATED = re.compile(r"\(([^()]+)\)\*(\d{1,3})"), re.compile(r"([Et|L])\*(\d{1,3})")


def find_chunk_layers(config: LayoutConfig) -> tuple[int | None, ...]:
    """Return the layers of each model chunk as a role's settings give them; `None` for an equal share of the rest.

    Raises:
        UserError: settings that contradict each other, or an unreadable layout string.
    """
    ends = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    text, chunks = config.pipeline_model_parallel_layout, config.virtual_pipeline_model_parallel_size or 1
    if text is not None and ends != (None, None):
        raise UserError(
            f"{_LAYOUT} = {text!r} beside {_FIRST} = {ends[0]} and {_LAST} = {ends[1]}",
            source=f"{_LAYOUT} of a role",
            expected="the layers of all chunks, or of the first and last stage",
            hint=f"leave out {_FIRST} and {_LAST}",
        )
    if text is not None:
        return read_stages(text)
    for name, count in zip((_FIRST, _LAST), ends, strict=True):
        if count is not None and count % chunks:
            raise UserError(
                f"{name} = {count} layers for {chunks} model chunks",
                source=f"{name} and {_VPP} of a role",
                expected=f"a multiple of {chunks}",
                hint=f"{_LAYOUT} gives each chunk its own number of layers",
            )
    first, last = (None if count is None else count // chunks for count in ends)
    return (first, *(None,) * (config.pipeline_model_parallel_size - 2), last) * chunks


def read_stages(text: str) -> tuple[int, ...]:
    """Return the layers of each chunk of a layout string (UserError: unreadable)."""
    plain = text.replace(",", "")
    for pattern in _REPEATED:
        plain = pattern.sub(lambda match: match[1] * int(match[2]), plain)
    counts = tuple(chunk.count("t") for chunk in plain.split("|"))
    if not re.fullmatch(r"E[t|]*L", plain) or 0 in counts[1:-1]:
        raise UserError(
            f"{_LAYOUT} = {text!r}",
            source=f"{_LAYOUT} of a role",
            expected="E, chunks of layers t with | between them, and L; only the first and the last may lack layers",
            hint="for example Ettt|(tttt|)*14ttL; a layer of further tokens, m, is no part of the pipeline here",
        )
    return counts


def write_stages(counts: tuple[int, ...]) -> str:
    """Return the layout string of chunks with these numbers of layers."""
    first, *inner, last = (f"t*{count}" if count > 4 else "t" * count for count in counts)
    runs = [(chunk, len([*run])) for chunk, run in groupby(inner)]
    return f"E{first}|{''.join(f'({chunk}|)*{n}' if n > 1 else f'{chunk}|' for chunk, n in runs)}{last}L"


def balance_stages(num_layers: int, chunks: int) -> str | None:
    """Return a layout string of nearly equal chunks, the head counted as a layer; `None` for too few layers.

    The first chunks, whose stages keep the most activations, get no layer that is left over.
    """
    share, left = divmod(num_layers + 1, chunks)
    if share < 1 or chunks < 2:
        return None
    counts = [share] * (chunks - left) + [share + 1] * left
    return write_stages((*counts[:-1], counts[-1] - 1))


def check_stages(shape: ModelShape, layout: ParallelLayout, section: str) -> None:
    """Refuse model chunks that do not have each layer of the model once (UserError)."""
    pp_size, vpp_size, layers = layout.pp_size, layout.vpp_size, shape.num_layers
    chunks, proposed = pp_size * vpp_size, balance_stages(layers, pp_size * vpp_size)
    hint = f"set {section}.{_LAYOUT}='{proposed}'" if proposed else "use a smaller PP or VPP"
    if not layout.chunk_layers and layers % chunks:
        valid = [n for n in range(1, layers + 1) if layers % n == 0]
        raise UserError(
            f"pp * vpp = {pp_size} * {vpp_size} = {chunks} does not divide the {layers} layers of the model",
            source=f"{section}.pipeline_model_parallel_size and the model's config.json",
            expected=f"pp * vpp one of {valid}, or the layers of each chunk",
            hint=hint,
        )
    if len(layout.chunk_layers or (None,) * chunks) != chunks:
        raise UserError(
            f"{len(layout.chunk_layers)} model chunks for pp * vpp = {pp_size} * {vpp_size} = {chunks}",
            source=f"{section}.{_LAYOUT}",
            expected=f"{chunks} chunks, or with another VPP a multiple of {pp_size}",
            hint=hint,
        )
    counts = divide_layers(layers, layout)
    if sum(counts) != layers or min(counts[1:-1], default=1) < 1 or min(counts) < 0:
        given = ", ".join("the rest" if count is None else str(count) for count in layout.chunk_layers)
        raise UserError(
            f"model chunks of {given} layers for the {layers} layers of the model",
            source=f"{section}.{_LAYOUT}, {_FIRST}, {_LAST} and the model's config.json",
            expected=f"{layers} layers in all, the rest in equal shares of a layer or more",
            hint=hint,
        )
