# SPDX-License-Identifier: Apache-2.0
"""Stages with unequal numbers of layers: settings are read as megatron-core reads them, and bad ones are refused.

That such stages compute what one rank does is tested in tests/training/test_actor.py; checkpoints in
tests/checkpoint/test_resuming.py. Not covered: schedules on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import ActorConfig, CriticConfig, LayoutConfig, RewardModelConfig, TeacherConfig
from megatron_rl.planning.role_layouts import build_layout
from megatron_rl.types import UserError
from megatron_rl.weights.megatron_layout import divide_layers, stage_layers
from megatron_rl.weights.pipeline_stages import balance_stages, check_stages, read_stages, write_stages
from shards import make_shape

_LAYOUT, _ENDS = "pipeline_model_parallel_layout", "num_layers_in_{}_pipeline_stage"


def configure(pp: int, vpp: int | None = None, layout: str | None = None, **ends: int) -> LayoutConfig:
    """A role's section; `ends`: layers of the `first` and `last` stage."""
    settings: dict[str, Any] = {_LAYOUT: layout, **{_ENDS.format(end): count for end, count in ends.items()}}
    return LayoutConfig(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp, **settings)


@pytest.mark.parametrize(
    "pp,vpp,text", [(8, 1, "Et*7|t*7|(t*8|)*5t*7L"), (16, 2, "Et|t|(tt|)*28tt,|tL"), (2, 1, "E|t*4L")]
)
def test_layouts_are_read_as_by_megatron_core(pp: int, vpp: int, text: str) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    theirs, num_layers = PipelineParallelLayerLayout(text, pp), read_stages(text)
    layout = build_layout(configure(pp, vpp, text), pp)
    for stage in range(pp):
        for chunk in range(vpp):
            expected = theirs.layout[stage][chunk].count(LayerType.decoder)
            mine = stage_layers(sum(num_layers), layout, stage, chunk)
            assert (len(mine), mine.start) == (expected, sum(num_layers[: chunk * pp + stage]))


@pytest.mark.parametrize("section", [ActorConfig, CriticConfig, RewardModelConfig, partial(TeacherConfig, path="t")])
def test_a_string_gives_the_chunks_per_stage_of_every_role(section: Callable[..., LayoutConfig]) -> None:
    config = section(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ett|tt|tt|ttL")
    interleaved = build_layout(configure(2, 2), 4)
    assert build_layout(config, 4) == replace(interleaved, chunk_layers=(2, 2, 2, 2))
    assert divide_layers(8, build_layout(config, 4)) == divide_layers(8, interleaved) == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "ends"),
    [(61, 8, None, dict(first=6, last=7)), (61, 16, None, dict(last=1)), (14, 4, 2, dict(first=2, last=4))],
)
def test_ends_are_read_as_by_megatron_core(num_layers: int, pp: int, vpp: int | None, ends: dict[str, int]) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    names = {_ENDS.format(end): count for end, count in ends.items()}
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype="float32",  # pyright: ignore[reportArgumentType]
        **names,  # pyright: ignore[reportArgumentType]
    )
    layout = build_layout(configure(pp, vpp, **ends), pp)
    check_stages(make_shape(num_layers=num_layers), layout, "actor")
    for stage in range(pp):
        for chunk in range(vpp or 1):
            expected = get_num_layers_to_build(config, chunk if vpp else None, stage)
            assert len(stage_layers(num_layers, layout, stage, chunk)) == expected


@given(st.lists(st.integers(1, 12), min_size=2, max_size=40))
def test_written_layouts_are_read_back(counts: list[int]) -> None:
    assert read_stages(write_stages(tuple(counts))) == tuple(counts)


@given(st.integers(1, 130), st.integers(2, 64))
def test_a_proposal_has_every_layer_and_nearly_equal_chunks(num_layers: int, chunks: int) -> None:
    text = balance_stages(num_layers, chunks)
    assert (text is None) == (num_layers + 1 < chunks)
    if text is not None:
        *others, last = read_stages(text)
        loads = [*others, last + 1]  # the head counts as a layer
        assert len(loads) == chunks and sum(loads) == num_layers + 1 and max(loads) - min(loads) <= 1


def test_sixty_one_layers_over_eight_and_sixteen_stages() -> None:
    for pp, vpp, counts in ((8, 1, (7, 7, 8, 8, 8, 8, 8, 7)), (8, 2, (3, 3, *[4] * 13, 3)), (16, 4, None)):
        text = balance_stages(61, pp * vpp)
        assert (None if text is None else read_stages(text)) == counts
        if text is not None:
            layout = build_layout(configure(pp, vpp, text), pp)
            check_stages(make_shape(num_layers=61), layout, "actor")
            assert divide_layers(61, layout) == counts


@pytest.mark.parametrize(
    ("config", "found", "hint"),
    [
        (configure(3), "pp * vpp = 3 * 1 = 3 does not divide the 4 layers", "set actor.{layout}='Et|tt|tL'"),
        (configure(8), "does not divide the 4 layers", "use a smaller PP or VPP"),
        (configure(2, None, "Ett|ttL", first=2), "'Ett|ttL' beside", "leave out"),
        (configure(2, None, "tt|ttL"), "'tt|ttL'", "for example Ettt|"),
        (configure(2, None, "Ett|ttmL"), "'Ett|ttmL'", "no part of the pipeline"),
        (configure(2, None, "Ett|t*L"), "'Ett|t*L'", "for example Ettt|"),
        (configure(3, None, "Ett||ttL"), "'Ett||ttL'", "for example Ettt|"),
        (configure(2, None, "Et|t|ttL"), "3 model chunks for pp * vpp = 2 * 1 = 2", "set actor.{layout}='Ett|ttL'"),
        (configure(2, 3, "Et|t|t|tL"), "4 model chunks for pp * vpp = 2 * 3 = 6", "use a smaller PP or VPP"),
        (configure(2, None, "Ettt|ttL"), "chunks of 3, 2 layers for the 4 layers", "set actor.{layout}='Ett|ttL'"),
        (configure(3, None, first=1), "chunks of 1, the rest, the rest layers for the 4", "set actor.{layout}="),
        (configure(2, None, last=4), "chunks of the rest, 4 layers", None),
        (configure(2, None, last=5), "chunks of the rest, 5 layers for the 4 layers", "set actor.{layout}="),
        (configure(2, 2, first=3), "3 layers for 2 model chunks", "its own number of layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stages_without_each_layer_once_are_refused(config: LayoutConfig, found: str, hint: str | None) -> None:
    """`hint`: `None` for stages that work, whose first only embeds."""

    def check() -> None:
        check_stages(make_shape(), build_layout(config, config.pipeline_model_parallel_size), "actor")

    if hint is None:
        check()
        return
    with pytest.raises(UserError) as error:
        check()
    assert found in error.value.found and hint.format(layout=_LAYOUT) in error.value.hint
