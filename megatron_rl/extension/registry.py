# SPDX-License-Identifier: Apache-2.0
"""Registries of named functions that users extend, and the rollout engines with their abilities.

Checks of a config test an engine's abilities, never its name. Engines are imported when they are built, so a config is
checked without their libraries.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_rl.types import Deferred, UserError

Entry = TypeVar("Entry")
GYM = "reasoning-gym:"  # prefix of data sets of the package reasoning-gym
HUB = "hub:"  # prefix of data sets of the Hugging Face hub
OBJECT = "object:"  # prefix of rows that a program passes (data/passed_rows.py)


class Registry(dict[str, Entry]):
    """The accepted values of the setting `setting` by name; reading an unknown one is a UserError."""

    def __init__(self, setting: str, /, **entries: Entry) -> None:
        super().__init__(entries)
        self.setting = setting

    def __missing__(self, name: str) -> Any:
        self.check(name)

    def check(self, name: str, place: str | None = None) -> None:
        """Refuse an unknown name (UserError); `place`: origin of the setting, such as file:line, for the error."""
        if name in self:
            return
        close = difflib.get_close_matches(name, self, n=1)
        meant = f'did you mean "{close[0]}"? ' if close else ""
        raise UserError(
            f'{self.setting} = "{name}" is not known',
            source=f"{self.setting} ({place})" if place else self.setting,
            expected=", ".join(sorted(self)),
            hint=f"{meant}one of yours needs its file in algorithm.plugins",
        )

    def add(self, name: str, entry: Entry, function: Callable[..., Any]) -> None:
        """Add an entry under a new name (UserError if taken, with file:line of `function`).

        What a program or notebook defines again, under the same name, replaces the former.
        """
        known = self.get(name)
        is_again = any(
            getattr(x, "__module__", "") == "__main__" for x in (known, *getattr(known, "__dict__", {}).values())
        )
        if name in self and not (is_again and function.__module__ == "__main__"):
            raise UserError(
                f'"{name}" is registered already',
                source=describe_place(function),
                expected=f"a name other than {', '.join(sorted(self))}",
                hint=f"choose another name and set {self.setting} to it",
            )
        self[name] = entry

    def enter(self, entry: Entry, function: Callable[..., Any]) -> str:
        """Return the name of an equal entry, or add `entry` under the function's name (UserError if taken)."""
        name = next((name for name, known in self.items() if known == entry), None)
        if name is None:
            self.add(name := name_of(function), entry, function)
        return name


def name_of(function: Any) -> str:
    """Return the `__name__` of a function; for another callable object, the name of its class."""
    return getattr(inspect.unwrap(function), "__name__", type(function).__name__)


def describe_place(function: Callable[..., Any]) -> str:
    """Return file:line of a function's definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


# A run that needs an ability which its engine lacks is refused before it starts.
ABILITIES = {
    "is_actor": "runs the actor's modules, in the actor's layout, and has no weights of its own",
    "is_server": "runs in a process of its own (rollout.server); its weights are probed after each update",
    "starts_server": "starts that process where rollout.server.endpoints is empty",
    "this_python": "starts it with the interpreter of the run where rollout.server.python is null",
    "reloads_server": "loads weights into its server without rollout.server.on_update",
    "tensor_parallel": "spans several ranks (rollout.tensor_model_parallel_size)",
    "expert_parallel": "gives whole experts to its ranks (rollout.expert_parallel_size)",
    "decode_steps": "counts its steps (schedule.steps_per_update, schedule.replay)",
    "truncation": "returns the sets that tokens were drawn from (top_p, top_k, min_p, min_tokens)",
    "min_tokens": "holds stop tokens back (rollout.min_tokens)",
    "adapters": "keeps adapters beside the model's weights (hybrid.lora=adapter)",
    "coded_weights": "keeps matrices in eight bits (rollout.quantization)",
    "latent_cache": "caches latents of the weights that it is given (rollout.latent_cache)",
    "drafts": "drafts with the model's layer for multi-token prediction (rollout.draft_tokens)",
    "bitwise": "computes the trainer's bits on a CPU (rollout.bitwise)",
    "routes": "returns the experts of each token (actor.router_replay=engine)",
    "scores": "takes stop strings per request, returns log-probs of prompts and top-k ones (policy.sample_requests)",
    "options": "takes rollout.engine_options",
    "vllm_modes": "runs as rollout.enforce_eager and model_runner choose",
    "delta_nets": "serves models with gated delta nets",
    "sinks": "serves models with attention sinks, as they are published",
    "any_sinks": "serves them with other windows, norms and scaling of positions, too",
    "reads_config": "reads the model's config.json with transformers",
    "builds_model": "builds transformers' own model",
    "elastic": "also runs outside the job, where it joins and leaves (schedule.elastic)",
}


@dataclass(frozen=True)
class RegisteredEngine:
    """A rollout engine: constructor, abilities (UserError if not in `ABILITIES`), and checks of models."""

    make: Callable[[Any], Any]  # builds the engine from an `EngineSpec`
    supports: Collection[str] = ()
    check_model: Callable[[Any, Any], None] | None = None  # refuses a model by its shape and section `rollout`
    check_on_cpu: Callable[[Any, Any], None] | None = None  # likewise, without a GPU

    def __post_init__(self) -> None:
        if unknown := sorted({*self.supports} - ABILITIES.keys()):
            raise UserError(
                f"an engine that supports {', '.join(unknown)}",
                source=describe_place(self.make),
                expected=f"of {', '.join(ABILITIES)}",
                hint="megatron_rl/extension/registry.py describes each ability",
            )

    def has(self, ability: str) -> bool:
        """Return whether the engine declares an ability."""
        assert ability in ABILITIES
        return ability in self.supports


_IN_RANKS = {"decode_steps", "truncation", "min_tokens", "bitwise", "routes", "sinks"}
_HF = _IN_RANKS | {"delta_nets", "any_sinks", "reads_config", "builds_model", "scores", "elastic"}
_SERVER = {"is_server", "tensor_parallel", "delta_nets"}
_STARTED = _SERVER | {"starts_server", "reloads_server", "truncation", "reads_config"}
_VLLM = {"tensor_parallel", "truncation", "min_tokens", "options", "vllm_modes", "delta_nets", "reads_config"}
ENGINES: Registry[RegisteredEngine] = Registry(
    "rollout.engine",
    vllm=RegisteredEngine(
        Deferred("megatron_rl.engines.vllm.vllm_engine", "VllmEngine"),
        _IN_RANKS
        | _VLLM
        | {"adapters", "coded_weights", "drafts", "elastic", "expert_parallel", "latent_cache", "scores"},
        check_model=Deferred("megatron_rl.engines.vllm.vllm_settings", "check_installed"),
        check_on_cpu=Deferred("megatron_rl.engines.vllm.vllm_settings", "check_cpu_limits"),
    ),
    hf=RegisteredEngine(Deferred("megatron_rl.engines.local.transformers", "HuggingFaceEngine"), _HF),
    megatron=RegisteredEngine(
        Deferred("megatron_rl.training.policy_engine", "PolicyEngine"),
        _IN_RANKS | {"is_actor", "adapters", "any_sinks"},
    ),
    vllm_server=RegisteredEngine(
        Deferred("megatron_rl.engines.servers.served", "ServedEngine"),
        _STARTED | _VLLM | {"this_python"},
        check_model=Deferred("megatron_rl.engines.vllm.vllm_settings", "check_installed"),
    ),
    openai=RegisteredEngine(Deferred("megatron_rl.engines.servers.served", "ServedEngine"), _SERVER),
    sglang=RegisteredEngine(Deferred("megatron_rl.engines.servers.served", "ServedEngine"), _STARTED),
)


def name_engines(ability: str) -> str:
    """Return the names of engines with an ability, for a message: "vllm, hf or megatron"."""
    *others, last = [name for name, engine in ENGINES.items() if engine.has(ability)]
    return f"{', '.join(others)} or {last}" if others else last
