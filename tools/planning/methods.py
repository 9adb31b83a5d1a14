# SPDX-License-Identifier: Apache-2.0
"""Training methods that fit a cluster: full (ZeRO-1, ZeRO-3), LoRA, QLoRA (adapters on NF4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import FULLY_SHARDED, RunConfig
from megatron_rl.planning.admission import Candidate, check_job, list_candidates
from megatron_rl.planning.cluster import GIB, Job
from megatron_rl.types import UserError
from tools.planning.communication import Assumptions, predict_seconds

_RANK = 32  # adapter rank if the recipe has no adapters


@dataclass(frozen=True)
class Method:
    """A training method in its fastest layout.

    Attributes:
        settings: of the trained roles, by setting.
        is_recipe: whether the recipe uses it.
        overrides: command-line changes to the recipe; empty if nothing fits.
        num_layouts: number of layouts that fit.
        fastest: `None` if none fits.
        refusal: why the run's checks refuse it in the recipe's layout.
    """

    name: str
    settings: dict[str, Any]
    is_recipe: bool
    overrides: list[str]
    num_layouts: int
    fastest: Candidate | None
    refusal: str | None


def compare_methods(job: Job, assumed: Assumptions, resolve: Callable[[RunConfig], RunSpec]) -> list[Method]:
    """Plan each training method on a job's cluster.

    Args:
        resolve: derives the roles of a config; a reference without own weights depends on adapters.
    """
    rank = job.config.actor.lora.rank or _RANK
    ways: dict[str, dict[str, Any]] = {
        "full, ZeRO-1": {"lora.rank": 0, "quantization": "none", "zero_stage": 1},
        "full, ZeRO-3": {"lora.rank": 0, "quantization": "none", "zero_stage": FULLY_SHARDED},
        "LoRA": {"lora.rank": rank, "quantization": "none", "zero_stage": 1},
        "QLoRA": {"lora.rank": rank, "quantization": "nf4", "zero_stage": 1},
    }
    return [_judge_method(job, name, settings, assumed, resolve) for name, settings in ways.items()]


def _judge_method(
    job: Job, name: str, settings: dict[str, Any], assumed: Assumptions, resolve: Callable[[RunConfig], RunSpec]
) -> Method:
    now = _read_settings(job.config)
    sections = [role.name for role in job.spec.trained]
    config = replace(job.config, **{section: _apply(getattr(job.config, section), settings) for section in sections})
    stays = config.reference.offload and settings["zero_stage"] == FULLY_SHARDED  # its ranks share the reference
    config = config.with_sections({"reference": {"offload": False}}) if stays else config
    other = replace(job, config=config, spec=resolve(config))
    candidates = list_candidates(other, partial(predict_seconds, assumed))
    fastest, refusal, overrides = next(iter(candidates), None), None, []
    if fastest is None:
        try:
            check_job(other)
        except UserError as error:
            refusal = error.found
    else:
        changed = {key: value for key, value in settings.items() if value != now[key]}
        pairs = ((section, key) for section in sections for key in _select(getattr(config, section), changed))
        overrides = [f"{section}.{key}={changed[key]}" for section, key in pairs] + fastest.choice.overrides(other)
        overrides += ["reference.offload=false"] * stays
    return Method(name, settings, settings == now, overrides, len(candidates), fastest, refusal)


def _read_settings(config: RunConfig) -> dict[str, Any]:
    actor = config.actor
    return {"lora.rank": actor.lora.rank, "quantization": actor.quantization, "zero_stage": actor.zero_stage}


def _select(section: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Select the settings that a section has: a critic is not quantized."""
    return {key: value for key, value in settings.items() if hasattr(section, key.partition(".")[0])}


def _apply(section: Any, settings: dict[str, Any]) -> Any:
    rest = _select(section, settings)
    return replace(section, lora=replace(section.lora, rank=rest.pop("lora.rank")), **rest)


def methods_to_dict(methods: list[Method]) -> list[dict[str, Any]]:
    """Convert for JSON."""
    return [
        {
            "name": method.name,
            "is_recipe": method.is_recipe,
            "fits": method.fastest is not None,
            "layouts": method.num_layouts,
            "overrides": method.overrides,
            "refusal": method.refusal,
            **(
                {}
                if method.fastest is None
                else asdict(method.fastest.choice)
                | {"seconds": method.fastest.seconds, "peak_bytes": method.fastest.worst_phase.total}
            ),
        }
        for method in methods
    ]


def format_methods(methods: list[Method]) -> str:
    """Format a table."""
    lines = [
        "what can be trained on this cluster, each way in its fastest layout",
        f"  {'':14}{'layouts':>8}{'s/step':>9}{'peak GiB':>10}  settings",
    ]
    for method in methods:
        mark = "  <- this recipe" if method.is_recipe else ""
        if method.fastest is None:
            why = f"refused: {method.refusal}" if method.refusal else "does not fit in any layout"
            lines.append(f"  {method.name:14}{0:>8}{'-':>9}{'-':>10}  {why}{mark}")
            continue
        peak = method.fastest.worst_phase.total / GIB
        settings = " ".join(method.overrides) or "as in the recipe"
        lines.append(
            f"  {method.name:14}{method.num_layouts:>8}{method.fastest.seconds:>9.1f}{peak:>10.1f}  {settings}{mark}"
        )
    return "\n".join(lines)
