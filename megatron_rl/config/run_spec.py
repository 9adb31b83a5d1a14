# SPDX-License-Identifier: Apache-2.0
"""The models of a run and their properties, decided in `run/models.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megatron_rl.config.schema import LayoutConfig, RunConfig, TrainedConfig
from megatron_rl.config.sections import LoraConfig


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """One model of a run."""

    name: str  # of its section, also "teachers.NAME"; "reference"; or "mtp", a part of the actor
    path: str  # HF directory of its initial weights, or a checkpoint of this package
    section: str  # name of its config section; the reference uses the actor's
    settings: LayoutConfig  # that section: its layout and, if trained, its optimizer and step mode
    head: Literal["logprob", "value", "score"]  # log-probs of tokens, values of states, scores of all positions
    trainable: bool = False  # whether it has an optimizer; `settings` is then a `TrainedConfig`
    offload: bool = False  # keep its weights on the host except while it works
    is_reset: bool = False  # copies the actor's weights periodically, so its weights are saved like trained ones
    may_lack: tuple[str, ...] = ()  # tensors that are zero if the files lack them
    batch_invariant: bool = False  # the bits of a token do not depend on the rest of the batch
    shares: str | None = None  # the role whose model, without adapters, it reuses instead of own weights

    @property
    def training(self) -> TrainedConfig:
        """Settings of a trained role."""
        assert self.trainable and isinstance(self.settings, TrainedConfig)
        return self.settings

    @property
    def lora(self) -> LoraConfig | None:
        """Adapters on its model, or None; the reference has the actor's layout, but no adapters."""
        if self.name != self.section or not isinstance(self.settings, TrainedConfig):
            return None
        return self.settings.lora if self.settings.lora.rank else None

    @property
    def is_quantized(self) -> bool:
        """Whether its layer matrices are in NF4; a separate reference keeps the precision of its files."""
        return self.lora is not None and getattr(self.settings, "quantization", "none") == "nf4"

    @property
    def title(self) -> str:
        """Name in words."""
        role, _, name = self.name.rpartition(".")
        return f"{'teacher' if self.is_teacher else 'reward model'} {name}" if role else name.replace("_", " ")

    @property
    def is_teacher(self) -> bool:
        """Whether the policy learns from the role's log-probs."""
        return self.name.startswith("teachers.")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The models of a run, and requirements of its advantage estimator (see `RegisteredEstimator`)."""

    roles: Mapping[str, RoleSpec]  # by name, in the order in which they are built; the actor is the first
    needs_greedy_baseline: bool = False
    needs_group: bool = False
    needs_sum_pi_squared: bool = False
    needs_turns: bool = False
    why_recompute: str = ""  # reason for `old_logprobs` before the update; empty if its first pass gives them

    @property
    def num_scoring_passes(self) -> int:
        """Forward passes per step for log-probs alone, of policy and reference."""
        return bool(self.why_recompute) + ("reference" in self.roles)

    @property
    def trained(self) -> list[RoleSpec]:
        """Roles with an optimizer."""
        return [role for role in self.roles.values() if role.trainable]

    @property
    def laid_out(self) -> list[RoleSpec]:
        """Roles with a config section of their own, and so a layout of their own."""
        return [role for role in self.roles.values() if role.section == role.name]

    @property
    def laid_out_alike(self) -> list[RoleSpec]:
        """Roles to which the planner gives one common layout; roles with a name of the user's keep their own."""
        return [role for role in self.laid_out if "." not in role.name]

    @property
    def teachers(self) -> dict[str, RoleSpec]:
        """Teachers by the names of their sections."""
        return {role.name.partition(".")[2]: role for role in self.roles.values() if role.is_teacher}

    def with_config(self, config: RunConfig) -> RunSpec:
        """Return the same roles with the layouts and offloading of another config."""
        roles = dict(self.roles)
        for name, role in self.roles.items():
            offload = getattr(config.section(name), "offload", False)
            roles[name] = replace(role, settings=config.section(role.section), offload=offload)
        return replace(self, roles=roles)
