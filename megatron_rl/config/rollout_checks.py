# SPDX-License-Identifier: Apache-2.0
"""Checks of a config about generation."""

from __future__ import annotations

from megatron_rl.config.checked import CheckedConfig
from megatron_rl.config.engine_options import REFUSED
from megatron_rl.extension.engines import name_engines


def _check_engine(config: CheckedConfig) -> None:
    """Check that the engine exists and supports the requested features."""
    engine, tp_size = config.get("rollout.engine"), config.get("rollout.tensor_model_parallel_size")
    supports = config.supports
    sizes = {1, config.get("actor.tensor_model_parallel_size") if supports("is_actor") else 1}
    config.require(
        tp_size in sizes or supports("tensor_parallel"),
        "rollout.tensor_model_parallel_size",
        f"is not supported by rollout.engine = {engine!r}",
        expected=" or ".join(map(str, sorted(sizes))),
        hint=f"leave it out, or set rollout.engine={name_engines('tensor_parallel')}",
    )
    config.require(
        config.get("hybrid.lora") == "merge" or supports("adapters"),
        "hybrid.lora",
        f"with rollout.engine = {engine!r}, which has no place for adapters",
        expected="merge",
        hint=f"set hybrid.lora=merge, or rollout.engine={name_engines('adapters')}",
    )


def _check_server(config: CheckedConfig) -> None:
    """Require the settings for servers that the run does not start."""
    engine, supports = config.get("rollout.engine"), config.supports
    if not supports("is_server"):
        return
    endpoints = config.get("rollout.server.endpoints")
    config.require(
        bool(endpoints) or supports("starts_server"),
        "rollout.server.endpoints",
        f"with rollout.engine = {engine!r}, which starts no server",
        expected="one address per engine",
        hint=f"name them, such as [http://127.0.0.1:8000], or set rollout.engine={name_engines('starts_server')}",
    )
    config.require(
        all(url.startswith(("http://", "https://")) for url in endpoints),
        "rollout.server.endpoints",
        "has an address that is none",
        expected="http://host:port",
        hint="write the scheme too",
    )
    config.require(
        not endpoints or config.get("rollout.server.directory") is not None,
        "rollout.server.directory",
        "with rollout.server.endpoints: servers on other nodes do not see the memory of this one",
        expected="a directory that this job and the servers see under the same path",
        hint="name one on a shared file system, or in /dev/shm if the servers are on this node",
    )
    config.require(
        supports("reloads_server") or config.get("rollout.server.on_update") is not None,
        "rollout.server.on_update",
        f"with rollout.engine = {engine!r}, which does not know how its server loads weights",
        expected="a URL or a command",
        hint="write what makes it load HF files, with {directory} where their path belongs",
    )
    config.require(
        supports("this_python") or bool(endpoints) or config.get("rollout.server.python") is not None,
        "rollout.server.python",
        f"with rollout.engine = {engine!r}, which has an environment of its own",
        expected="the interpreter of that environment, or rollout.server.endpoints",
        hint="sglang: bash launch/setup_sglang.sh makes one for machines without a GPU, .venv-sglang/bin/python",
    )


def _check_abilities(config: CheckedConfig) -> None:
    """Refuse settings that the engine does not support."""
    supports = config.supports
    config.require(
        supports("decode_steps")
        or config.get("schedule.steps_per_update") is None
        and config.get("schedule.replay") is None,
        "rollout.engine",
        "has no decode steps that this job could count, as schedule.steps_per_update and schedule.replay need",
        expected=name_engines("decode_steps"),
        hint="set schedule.steps_per_update=null and schedule.replay=null",
    )
    config.require(
        supports("truncation") or not config.get("rollout.is_ever_truncated"),
        "rollout.engine",
        "with top_p, top_k, min_p or min_tokens: it does not tell what it draws from, as training must know",
        expected=name_engines("truncation"),
        hint="leave them out, in validation too",
    )


def _check_options(config: CheckedConfig) -> None:
    """Check `rollout.engine_options`: no refused argument, an engine that takes options, and no `rollout.bitwise`."""
    options = config.get("rollout.engine_options")
    for name in options:
        config.require(
            name not in REFUSED,
            "rollout.engine_options",
            f"has {name}, which is not the user's to set: {REFUSED.get(name)}",
            expected="arguments of vLLM that break no contract (docs/sampling.md has the others)",
            hint=f"leave {name} out",
        )
    config.require(
        not options or config.supports("options"),
        "rollout.engine_options",
        f"with rollout.engine = {config.get('rollout.engine')!r}, which takes none",
        expected="{}",
        hint=f"remove it, or set rollout.engine={name_engines('options')}",
    )
    config.require(
        not options or not config.get("rollout.bitwise"),
        "rollout.engine_options",
        "with rollout.bitwise: an option may choose other kernels, with other bits",
        expected="{}",
        hint="remove it, or set rollout.bitwise=false",
    )


def _check_precision(config: CheckedConfig) -> None:
    """Check the settings that engines with lower precision than training need."""
    options, name = config.get("rollout.engine_options"), "rollout.quantization"
    is_coded = config.get(name) != "none"
    config.require(
        not is_coded or config.supports("coded_weights"),
        name,
        f"with rollout.engine = {config.get('rollout.engine')!r}, whose weights are in model.dtype",
        expected="none",
        hint=f"leave it out, or set rollout.engine={name_engines('coded_weights')}",
    )
    config.require(
        not is_coded or not config.get("rollout.bitwise"),
        name,
        "with rollout.bitwise: training computes with the whole weights",
        expected="none",
        hint="leave it out, or set rollout.bitwise=false",
    )
    config.require(
        not is_coded or config.get("hybrid.lora") == "merge",
        "hybrid.lora",
        f"with {name} = {config.get(name)!r}: adapters are added to the weights before these are rounded",
        expected="merge",
        hint=f"set hybrid.lora=merge, or {name}=none",
    )
    cache = options.get("kv_cache_dtype", "auto")
    for setting, is_low in ((name, is_coded), ("rollout.engine_options", str(cache).startswith("fp8"))):
        config.require(
            not is_low or config.get("algorithm.importance_sampling") != "none",
            setting,
            "with algorithm.importance_sampling = 'none': the engine samples from another policy than the one that "
            "learns, and nothing would correct it",
            expected="a correction",
            hint="set algorithm.importance_sampling=token-truncate, or compute in model.dtype",
        )


def check_validation_sets(config: CheckedConfig) -> None:
    """Check the settings of single validation sets; their names are checked when the prompts are read."""
    bounds = {
        "n": lambda value: isinstance(value, int) and value >= 1,
        "temperature": lambda value: value >= 0,
        "top_p": lambda value: 0 < value <= 1,
        "top_k": lambda value: isinstance(value, int) and (value == -1 or value > 0),
        "thinking_budget": lambda value: isinstance(value, int) and value > 0,
    }
    for name, settings in config.get("rollout.validation_sets").items():
        is_right = isinstance(settings, dict) and all(
            leaf in bounds
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            and bounds[leaf](value)
            or (leaf, value) == ("thinking_budget", None)
            for leaf, value in settings.items()
        )
        is_known = config.require(
            is_right,
            "rollout.validation_sets",
            f"has {settings!r} for {name!r}",
            expected="n >= 1, temperature >= 0, 0 < top_p <= 1, top_k > 0 or -1, thinking_budget > 0 or null, and "
            "nothing else",
            hint="e.g. {aime: {n: 32, temperature: 0.6, top_p: 0.95}}",
        )
        config.mistakes.refused.update(() if is_known else ("rollout.validation_sets",))


def _check_thinking(config: CheckedConfig) -> None:
    """Refuse features that do not support inserted tokens inside a response."""
    name, budget = "rollout.thinking_budget", config.get("rollout.thinking_budget")
    sets = (config.get("rollout.for_validation")(one) for one in ("", *config.get("rollout.validation_sets")))
    if budget is None and all(one.thinking_budget is None for one in sets):
        return
    for other in ("agents.environment", "agents.tools", "agents.program"):
        config.require(
            not config.get(other),
            name,
            f"with {other}: the transcript of an episode, and what its program is told, are the tokens that the engine "
            "sampled",
            expected="null",
            hint=f"leave out {other} or the budget; agents.max_turns and data.max_response_length bound episodes",
        )
    config.require(
        config.get("trainer.capture_step") is None,
        "trainer.capture_step",
        f"with {name}: a capsule holds the tokens that were sampled",
        expected="null",
        hint="leave it out",
    )


def _check_top_k(config: CheckedConfig) -> None:
    for name in ("rollout.top_k", "rollout.validation_top_k"):
        value = config.get(name)
        config.require(value == -1 or value > 0, name, "is no number of tokens", expected="> 0, or -1", hint="-1: all")


def _check_min_tokens(config: CheckedConfig) -> None:
    name, longest = "rollout.min_tokens", config.get("data.max_response_length")
    config.require(
        0 <= config.get(name) <= longest,
        name,
        "is not a number of tokens that a response can have",
        expected=f"0 to {longest} (data.max_response_length)",
        hint="0 switches it off",
    )
    config.require(
        config.get(name) == 0 or config.supports("min_tokens"),
        name,
        f"with rollout.engine = {config.get('rollout.engine')!r}, which does not hold stop tokens back",
        expected="0",
        hint=f"leave it out, or set rollout.engine={name_engines('min_tokens')}",
    )


def _check_truncation(config: CheckedConfig) -> None:
    """Refuse truncated sampling in step modes and model runners that cannot score a part of the vocabulary."""
    config.require(
        not config.get("rollout.is_truncated") or config.get("actor.step_mode") != "graph",
        "actor.step_mode",
        "with rollout.top_p, top_k, min_p or min_tokens: the sets of tokens have no fixed size, which a graph needs",
        expected="eager or static",
        hint="set actor.step_mode=static: the same step without capture",
    )
    config.require(
        not config.get("rollout.is_ever_truncated")
        or not config.supports("vllm_modes")
        or config.get("rollout.model_runner") == "v1",
        "rollout.model_runner",
        "with rollout.top_p, top_k, min_p or min_tokens: its sampler does not tell what it draws from",
        expected="v1",
        hint="set rollout.model_runner=v1",
    )


def _check_schedule(config: CheckedConfig) -> None:
    """Check the settings that samples of older weights need, and the replay of a schedule."""
    is_timed = config.get("schedule.updates") == "in_flight" and config.get("schedule.steps_per_update") is None
    config.require(
        config.get("schedule.replay") is None or is_timed and config.get("schedule.max_staleness") > 0,
        "schedule.replay",
        "without a clock: the ends of phases follow from the settings",
        expected="null",
        hint="set schedule.max_staleness > 0, updates=in_flight and steps_per_update=null, as the run had",
    )
    if config.get("schedule.max_staleness") == 0:
        return
    config.require(
        config.get("algorithm.importance_sampling") != "none",
        "schedule.max_staleness",
        "with algorithm.importance_sampling = 'none': samples of older weights would be learned from as if the policy "
        "had made them",
        expected="0, or a correction",
        hint="set algorithm.importance_sampling=token-truncate",
    )


def _check_agents(config: CheckedConfig) -> None:
    """Refuse features that do not support episodes with an environment."""
    names = [name for name in ("agents.environment", "agents.tools", "agents.program") if config.get(name)]
    if not names:
        return
    source = names[0]
    config.require(
        len(names) == 1,
        names[-1],
        f"with {source}: one of them makes the episodes",
        expected="one of agents.environment, agents.tools and agents.program",
        hint="leave out the others",
    )
    config.require(
        config.get("trainer.capture_step") is None,
        "trainer.capture_step",
        f"with {source} = {config.get(source)!r}: a capsule holds one turn of each rollout",
        expected="null",
        hint="leave it out",
    )
    name, most = "agents.turn_timeout_seconds", config.get("trainer.collective_timeout")
    config.require(
        config.get(name) < most,
        name,
        f"is not below trainer.collective_timeout = {most:g}: the other ranks of an engine wait as long as its "
        "environments",
        expected=f"below {most:g}",
        hint="raise trainer.collective_timeout, or lower this one",
    )


def _check_bitwise(config: CheckedConfig) -> None:
    """Check that engine and trainer can compute the same bits; see also `run/bitwise.py`."""
    if not config.get("rollout.bitwise"):
        return
    engine, tp_size = config.get("rollout.engine"), config.get("actor.tensor_model_parallel_size")
    supports = config.supports
    config.require(
        supports("bitwise"),
        "rollout.engine",
        "computes in its own way, and rollout.bitwise asks for the bits of the trainer",
        expected=name_engines("bitwise"),
        hint="set rollout.bitwise=false",
    )
    config.require(
        config.get("model.dtype") == "float32",
        "model.dtype",
        "with rollout.bitwise: only float32 is computed in the same order on both sides",
        expected="float32",
        hint="set model.dtype=float32, or rollout.bitwise=false",
    )
    config.require(
        tp_size <= 2,
        "actor.tensor_model_parallel_size",
        "with rollout.bitwise: a sum over more than two ranks has an order, which depends on the number of tokens",
        expected="1 or 2",
        hint="set it to 2, with more pipeline stages, or set rollout.bitwise=false",
    )
    config.require(
        supports("is_actor") or not config.get("actor.lora.rank"),
        "actor.lora.rank",
        f"with rollout.bitwise: rollout.engine = {engine!r} computes with the sum of the model and its adapters, and "
        "training with one after the other",
        expected=f"0, or rollout.engine={name_engines('is_actor')}, which does as training does",
        hint=f"set rollout.bitwise=false, or rollout.engine={name_engines('is_actor')}",
    )
    config.require(
        supports("is_actor") or config.get("rollout.tensor_model_parallel_size") == tp_size,
        "rollout.tensor_model_parallel_size",
        "with rollout.bitwise: products that are cut in another number of parts have sums of other parts",
        expected=f"{tp_size}, as actor.tensor_model_parallel_size",
        hint="give actor and engine the same, or set rollout.bitwise=false",
    )


ROLLOUT_RULES = (
    _check_engine,
    _check_top_k,
    _check_min_tokens,
    _check_truncation,
    _check_thinking,
    _check_options,
    _check_precision,
    _check_bitwise,
    _check_server,
    _check_abilities,
    _check_schedule,
    _check_agents,
)
