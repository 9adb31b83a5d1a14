# SPDX-License-Identifier: Apache-2.0
"""The cluster and the job that a plan describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.run_spec import RoleSpec, RunSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.role_layouts import build_layout
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.model_config import find_adapters

GIB = 1 << 30
RESERVE = 0.05  # share of the memory


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal accelerators."""

    nodes: int
    gpus_per_node: int
    memory_bytes: int
    reserve_bytes: int  # memory for driver context, communication buffers and fragmentation
    within_node: float = 400e9  # link bandwidth, bytes per second and direction of one accelerator
    across_nodes: float = 50e9
    flops: float = 990e12  # peak dense operations per second of one accelerator in the training dtype
    memory_bandwidth: float = 3.35e12  # bytes per second of one accelerator's memory
    host_bandwidth: float = 50e9  # bytes per second between an accelerator and the host
    host_memory_bytes: int | None = None  # per node; `None` disables the check of offloaded state
    has_fused_attention: bool = True  # whether attention stores no intermediate results (CUDA)

    def __post_init__(self) -> None:
        speeds = ("within_node", "across_nodes", "flops", "memory_bandwidth", "host_bandwidth")
        for name in ("nodes", "gpus_per_node", "memory_bytes", *speeds):
            if getattr(self, name) <= 0:
                raise UserError(
                    f"{name} = {getattr(self, name)}",
                    source="the cluster",
                    expected="more than 0",
                    hint="see --help for the units",
                )
        if not 0 <= self.reserve_bytes < self.memory_bytes:
            raise UserError(
                f"a reserve of {self.reserve_bytes / GIB:g} GiB of {self.memory_bytes / GIB:g} GiB",
                source="the cluster",
                expected="a part of the memory",
                hint="lower --reserve-gib",
            )

    @property
    def world_size(self) -> int:
        """Accelerators, one rank each."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Job:
    """A configured run on a cluster, with the shapes of its models."""

    config: RunConfig
    spec: RunSpec
    shapes: Mapping[str, ModelShape]  # role -> shape, for roles with a layout of their own
    cluster: Cluster

    @property
    def shape(self) -> ModelShape:
        """Shape of the policy."""
        return self.shapes["actor"]

    @property
    def engine_is_actor(self) -> bool:
        """Whether the engine runs the actor's modules in its layout, without weights of its own (`megatron`)."""
        return self.config.rollout.supports("is_actor")

    @property
    def engine_tp(self) -> int:
        """Tensor parallel size of an engine."""
        if self.config.schedule.elastic:
            return 1  # the front's
        section = self.config.actor if self.engine_is_actor else self.config.rollout
        return section.tensor_model_parallel_size

    @property
    def engine_ep(self) -> int:
        """Expert parallel size of an engine with weights of its own."""
        return 1 if self.engine_is_actor else self.config.rollout.expert_parallel_size

    @property
    def engine_width(self) -> int:
        """Ranks of an engine with weights of its own."""
        return max(self.engine_tp, self.engine_ep)

    @property
    def engine_dp(self) -> int:
        """Data parallel size of an engine: the parts that have a KV cache each."""
        return self.engine_width // self.engine_tp

    def describe_engine(self) -> str:
        """Return e.g. `engine tp=2 dp=4 ep=8`."""
        experts = f" dp={self.engine_dp} ep={self.engine_ep}" if self.engine_ep > 1 else ""
        return f"engine tp={self.engine_tp}{experts}"

    @property
    def others(self) -> list[RoleSpec]:
        """Roles with a layout of their own, except the actor."""
        return [role for role in self.spec.laid_out if role.name != "actor"]

    @property
    def layout(self) -> ParallelLayout:
        """The actor's layout."""
        return self.layout_of(self.spec.roles["actor"])

    @property
    def rollout_ranks(self) -> range:
        """Ranks of the engines."""
        return self.ranks_of("rollout")

    def ranks_of(self, name: str) -> range:
        """Return the ranks of a role, or of the engines ("rollout")."""
        return self.config.placement.ranks_of(name, self.cluster.world_size)

    def layout_of(self, role: RoleSpec) -> ParallelLayout:
        """Return a role's layout on its ranks."""
        ranks = self.ranks_of(role.name)
        return build_layout(role.settings, len(ranks), ranks.start)

    def adapters_of(self, role: RoleSpec) -> AdapterShape | None:
        """Return a role's adapters, or `None` if it trains all weights or is frozen."""
        return find_adapters(self.shape_of(role), role.lora, role.section, is_quantized=role.is_quantized)

    def shape_of(self, role: RoleSpec) -> ModelShape:
        """Return the shape of a role's model; the reference has the policy's."""
        return self.shapes.get(role.name, self.shape)

    def with_config(self, **sections: Mapping[str, Any]) -> Job:
        """Return the job with changed settings, e.g. `actor={"offload_optimizer": True}`."""
        config = self.config.with_sections(sections).share_settings()
        return replace(self, config=config, spec=self.spec.with_config(config))


def build_job(
    config: RunConfig,
    spec: RunSpec,
    cluster: Cluster,
    shape: ModelShape,
    scoring: Mapping[str, ModelShape] | None = None,
) -> Job:
    """Assign a shape to each model of a run: `shape` of the policy, or in `scoring` by role."""
    scores = replace(shape, has_score_head=True, tied_embeddings=False)
    default = {role.name: shape if role.head == "logprob" else scores for role in spec.laid_out}
    shapes = default | dict(scoring or {})
    return Job(config, spec, shapes | {"actor": shape}, cluster)


def describe_cluster(
    world_size: int, memory_gib: float, gpus_per_node: int | None = None, host_memory_bytes: int | None = None
) -> Cluster:
    """Build a cluster of a given size, with default links and memory reserve.

    Args:
        memory_gib: GiB per accelerator.
        gpus_per_node: by default 8, or all if fewer.

    Raises:
        UserError: the nodes would be unequal.
    """
    per_node = gpus_per_node or min(8, world_size)
    if per_node < 1 or world_size % per_node:
        raise UserError(
            f"{world_size} ranks on nodes of {per_node} GPUs",
            source="--gpus-per-node",
            expected="equal nodes",
            hint="give --gpus-per-node N with N a divisor of the number of ranks",
        )
    memory = int(memory_gib * GIB)
    return Cluster(
        nodes=world_size // per_node,
        gpus_per_node=per_node,
        memory_bytes=memory,
        reserve_bytes=int(RESERVE * memory),
        host_memory_bytes=host_memory_bytes,
    )


def find_cluster(world_size: int, ranks_per_node: int, memory_bytes: int | None) -> Cluster:
    """Return the cluster of a run; `memory_bytes`: of the smallest GPU, `None` without GPUs (rough speeds)."""
    import psutil

    per_node = ranks_per_node if world_size % ranks_per_node == 0 else world_size
    host_bytes = psutil.virtual_memory().total
    if memory_bytes is not None:
        return describe_cluster(world_size, memory_bytes / GIB, per_node, host_bytes)
    found = describe_cluster(world_size, host_bytes / per_node / GIB, per_node)
    speeds = {"flops": 1e11, "memory_bandwidth": 2e10, "within_node": 5e9, "across_nodes": 1e9}
    return replace(found, has_fused_attention=False, **speeds)
