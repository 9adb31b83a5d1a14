# SPDX-License-Identifier: Apache-2.0
"""A world of its own for a vLLM engine that is on some ranks of a job.

In-process vLLM makes its groups over all ranks of the job, each of them together with all ranks: an engine on some of
the ranks would wait for the others forever. Here the engine's ranks are the world while it is built, and its groups
are made by their members alone; ranks without an engine never hear of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from megatron_rl.engines.protocol import EngineSpec


def find_world(spec: EngineSpec, parallel_state: Any) -> AbstractContextManager[None]:
    """What vLLM is built in: the job; the ranks of this engine, where only a part of the job has engines.

    Args:
        spec: of the engine.
        parallel_state: vLLM's module of that name.
    """
    if spec.ranks is None or len(spec.ranks) == spec.process.world_size:
        return nullcontext()
    first = spec.process.rank - spec.find_place(spec.process.rank)
    return _own_world(range(first, first + spec.config.tensor_model_parallel_size), parallel_state)


@contextmanager
def _own_world(ranks: range, parallel_state: Any) -> Iterator[None]:
    """While vLLM is built in the block, it sees these ranks only, which all enter it after `align_group_names`."""
    new_group, get_world_size = dist.new_group, dist.get_world_size
    init_world_group, init_model_parallel_group = (
        parallel_state.init_world_group,
        parallel_state.init_model_parallel_group,
    )

    def make_group(members: Sequence[int], **options: Any) -> Any:
        if dist.get_rank() not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(members, use_local_synchronization=True, **options)

    def count_ranks(group: dist.ProcessGroup | None = None) -> int:
        return len(ranks) if group is None else get_world_size(group)

    def make_world(_: Sequence[int], *arguments: Any) -> Any:
        return init_world_group(list(ranks), *arguments)

    def make_groups(places: Sequence[Sequence[int]], *arguments: Any, **options: Any) -> Any:
        return init_model_parallel_group([[ranks[place] for place in some] for some in places], *arguments, **options)

    with ExitStack() as patches:
        for module, name, stand_in in (
            (dist, "new_group", make_group),
            (dist, "get_world_size", count_ranks),
            (parallel_state, "init_world_group", make_world),
            (parallel_state, "init_model_parallel_group", make_groups),
        ):
            patches.enter_context(patch.object(module, name, stand_in))
        yield
