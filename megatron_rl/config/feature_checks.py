# SPDX-License-Identifier: Apache-2.0
"""Checks of features that are off by default, and the arguments of vLLM's `EngineArgs` that are refused.

`checks.py` imports this module if a config uses one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.checked import CheckedConfig
from megatron_rl.config.fields import FieldInfo, coerce
from megatron_rl.config.schema import FULLY_SHARDED, NOT_OWN, TRAINED, RewardModelConfig
from megatron_rl.config.sections import ALL_SETS, LONGEST_PERIOD, MISSING, reduce_weights
from megatron_rl.extension.registry import name_engines
from megatron_rl.types import UserError


def check_features(config: CheckedConfig) -> None:
    """Record the mistakes in the settings of features that are off by default."""
    config.apply(_check_validation_sets)
    for rule in (_check_step_mode, _check_streaming):
        for section in TRAINED:
            config.apply(rule, section)
    for rule in _RULES:
        config.apply(rule)


# Reason -> names of the arguments; every other argument passes.
_REASONS = {
    "set model.path": "model",
    "set model.tokenizer": "tokenizer",
    "set model.dtype": "dtype",
    "set trainer.seed": "seed",
    "set data.max_prompt_length and data.max_response_length": "max_model_len",
    "set rollout.max_num_seqs": "max_num_seqs",
    "set rollout.tensor_model_parallel_size": "tensor_parallel_size",
    "set rollout.expert_parallel_size": "enable_expert_parallel",
    "set rollout.gpu_memory_utilization": "gpu_memory_utilization",
    "set rollout.kv_cache_gib": "kv_cache_memory_bytes num_gpu_blocks_override",
    "set rollout.enforce_eager": "enforce_eager",
    "set actor.lora.rank and hybrid.lora": ("enable_lora max_lora_rank max_cpu_loras lora_dtype fully_sharded_loras"),
    "set rollout.quantization": "quantization quantization_config",
    "set actor.lora.target_modules": "lora_target_modules",
    "set rollout.data_parallel_size": "data_parallel_size",
    "the ranks of the job are the engines: rollout.tensor_model_parallel_size and placement.rollout decide": (
        "distributed_executor_backend pipeline_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size data_parallel_rank data_parallel_size_local "
        "data_parallel_address data_parallel_backend nnodes node_rank master_addr master_port device_ids "
        "enable_elastic_ep enable_fault_tolerance"
    ),
    "weights are written into vLLM's own parameters, shard to shard, in model.dtype": (
        "load_format model_loader_extra_config weight_transfer_config cpu_offload_gb cpu_offload_params "
        "offload_backend offload_params enable_sleep_mode enable_cumem_allocator "
        "enable_eplb eplb_config expert_placement_strategy moe_backend linear_backend"
    ),
    "the engine runs the policy's own model, whose shape is that of model.path": (
        "model_weights hf_config_path hf_overrides model_class_overrides model_impl runner convert "
        "trust_remote_code revision disable_sliding_window"
    ),
    "it changes what is sampled, and training would score another distribution": (
        "generation_config override_generation_config logprobs_mode logits_processors structured_outputs_config "
        "reasoning_config watermark_config diffusion_config enable_batch_sharded_sampling"
    ),
    "it keeps keys and values that outlive a weight update": (
        "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config"
    ),
    "this program reaches into vLLM's own classes": "worker_cls worker_extension_cls scheduler_cls skip_tokenizer_init",
    "set rollout.draft_tokens: weights are written into the model's own layer that drafts, and no other": (
        "speculative_config spec_method spec_model spec_tokens"
    ),
}
REFUSED: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}


def _check_weights(config: CheckedConfig) -> None:
    name, weights, files = "data.weights", config.get("data.weights"), config.get("data.train_files")
    if weights is None:
        return
    is_right = config.require(
        len(weights) == len(files),
        name,
        f"has {len(weights)} numbers for {len(files)} files",
        expected="a number per file of data.train_files, in their order",
        hint="a file without prompts in the mixture is left out of both",
    )
    config.require(
        isinstance(config.get("data.shuffle"), bool),
        name,
        "beside data.shuffle, whose function decides how often each prompt occurs",
        expected="one of the two",
        hint="leave out data.weights, or set data.shuffle to true or false",
    )
    is_right &= config.require(
        min(weights, default=1) > 0,
        name,
        "has a number that is not positive",
        expected="> 0",
        hint="leave the file out",
    )
    period = sum(reduce_weights(weights)) if is_right else 0
    config.require(
        period <= LONGEST_PERIOD,
        name,
        f"repeats after {period} prompts",
        expected=f"numbers whose proportions repeat within {LONGEST_PERIOD} prompts",
        hint="write fewer digits; they need not add up to 1: [2, 1] for thirds",
    )


def _check_curriculum(config: CheckedConfig) -> None:
    kind, window = config.get("data.curriculum.kind"), config.get("data.curriculum.window")
    config.require(
        kind in ("off", "window", "prioritized", "levels") or ".py:" in kind,
        "data.curriculum.kind",
        "is no curriculum",
        expected="off, window, prioritized, levels or path.py:name",
        hint="docs/curriculum.md describes them",
    )
    config.require(
        len(window) == 2 and 0 <= window[0] <= window[1] <= 1,
        "data.curriculum.window",
        "is no range of pass rates",
        expected="two numbers, 0 <= low <= high <= 1",
        hint="the default is [0.1, 0.9]",
    )


def _check_step_mode(config: CheckedConfig, section: str) -> None:
    """Check the settings that fixed shapes and CUDA graphs restrict; `training/optimizer.py` checks for a GPU."""
    mode, budget = config.get(f"{section}.step_mode"), config.get(f"{section}.max_tokens_per_microbatch")
    if mode == "eager":
        return
    sizes = config.get("actor.bucket_tokens")
    config.require(
        not sizes or (min(sizes) > 0 and max(sizes) >= budget),
        "actor.bucket_tokens",
        f"has no bucket for a microbatch of {section}.max_tokens_per_microbatch = {budget} tokens",
        expected=f"sizes above 0, the largest at least {budget}",
        hint=f"add {budget} to the list",
    )
    if mode != "graph":
        return
    routes = "how many tokens experts of other ranks get depends on the routes, and the host reads it"
    uncaptured: dict[str, tuple[Any, str]] = {"expert_model_parallel_size": (1, routes)}
    if config.get(f"{section}.recompute_granularity") == "offload":
        uncaptured["recompute_granularity"] = "full", "copies to memory of the host that differs by microbatch"
    if config.get(f"{section}.pipeline_model_parallel_size") > 1:
        uncaptured["overlap_grad_reduce"] = False, "the reduction during the backward of a pipeline stage"
    graph, static = f"{section}.step_mode = 'graph'", f"{section}.step_mode=static: the same step without capture"
    for leaf, (value, what) in uncaptured.items():
        config.allow(f"{section}.{leaf}", value, f"is not captured yet ({what}): {graph} cannot take it", static)


def _check_streaming(config: CheckedConfig, section: str) -> None:
    """Refuse to stream the moments of Muon."""
    if config.get(f"{section}.offload_optimizer") == "stream":
        why = f"with {section}.offload_optimizer = 'stream', which updates a few parameters at a time as Adam"
        config.allow(f"{section}.optimizer", "adam", why, f"{section}.offload_optimizer=true")


def _check_quantization(config: CheckedConfig) -> None:
    """Refuse four-bit weights without adapters, or with a separate (unquantized) reference of the same model."""
    if config.get("actor.quantization") == "none":
        return
    config.require(
        config.get("actor.lora.rank") > 0,
        "actor.quantization",
        "without adapters: there would be nothing to train",
        expected="actor.lora.rank above 0",
        hint="set actor.lora.rank=16",
    )
    is_shared = config.get("placement.reference") == config.get("placement.actor")
    is_own = config.get("reference.path") not in (None, config.get("model.path"))
    config.require(
        is_shared or is_own or config.get("algorithm.kl_coef") == 0,
        "placement.reference",
        "differs from placement.actor, with actor.quantization: a reference of its own is not quantized, and so "
        "another model than the actor starts from",
        expected="the ranks of the actor",
        hint="leave placement.reference out, or give both the same ranks",
    )


def _check_zero_stages(config: CheckedConfig) -> None:
    """Refuse settings that do not work with weights sharded over DP (`zero_stage` 3)."""
    further = [f"reward_model.further.{name}" for name in config.get("reward_model.further")]
    for section in (*TRAINED, "reward_model", *further, *(f"teachers.{name}" for name in config.config.teachers)):
        cause = f"{section}.zero_stage={FULLY_SHARDED}"
        if section in TRAINED:
            config.exclude(
                cause,
                (f"{section}.step_mode", "eager", "weights are gathered for every layer, at other addresses"),
                (f"{section}.optimizer", "adam", "Muon's momentum is exchanged through the gradient buffers of ZeRO-1"),
                ("actor.overlap_grad_reduce", False, "gradients are always reduced during the backward"),
                ("actor.overlap_shared_experts", False, "gradients of their weights would come from another stream"),
                (f"{section}.lora.rank", 0, "adapters are trained on weights that every rank has"),
            )
        if section != "critic":
            frozen = "reference" if section == "actor" else section  # the reference has the actor's layout
            config.exclude(cause, (f"{frozen}.offload", False, "the ranks share these weights already"))
    config.require(
        config.get("actor.zero_stage") != FULLY_SHARDED or not config.supports("is_actor"),
        "rollout.engine",
        "runs the actor's modules, whose weights are in parts with actor.zero_stage = 3",
        expected="an engine with weights of its own",
        hint="choose another rollout.engine, or set actor.zero_stage=1",
    )


def _check_layers(config: CheckedConfig) -> None:
    """Refuse updates of router biases with adapters, and settings that do not work with training of the MTP layer."""
    config.exclude("actor.lora.rank", ("actor.router_bias_rate", 0, "the weights of the model stay as they are"))
    why = "its layer is trained beside the policy's whole weights, microbatch by microbatch"
    needed = (("actor.step_mode", "eager"), ("actor.lora.rank", 0), ("actor.zero_stage", 1))
    config.exclude("actor.mtp_lr", *((name, value, why) for name, value in needed))


def _check_drafts(config: CheckedConfig) -> None:
    """Refuse settings that do not work with drafted tokens."""
    name = "rollout.draft_tokens"
    if not config.get(name):
        return
    config.need("drafts", name, 0, "which does not draft with that layer")
    config.require(
        not config.get("rollout.is_ever_truncated"),
        name,
        "with top_p, top_k, min_p or min_tokens: the sets that drafts are verified with are not recorded",
        expected="0",
        hint=f"leave them out, in validation too, or leave out {name}",
    )
    why = f"with {name}: drafts are drawn with a request's random numbers in the first runner"
    if config.get("rollout.model_runner") != "auto":
        config.allow("rollout.model_runner", "v1", why, f"leave out {name}")
    config.require(
        not config.get("rollout.engine_options").get("async_scheduling"),
        "rollout.engine_options",
        why,
        expected="async_scheduling: false",
        hint=f"leave async_scheduling out, or leave out {name}",
    )
    config.exclude(
        name,
        ("rollout.bitwise", False, "a forward verifies several tokens of a sequence, whose bits are not tried"),
        ("rollout.expert_parallel_size", 1, "the layer is not written into ranks with experts of their own"),
        ("rollout.data_parallel_size", 1, "parts that step together do not draft"),
        ("schedule.elastic", False, "engines outside the job have no layer that drafts"),
        ("hybrid.lora", "merge", "adapters beside the weights are not tried with it"),
        ("actor.zero_stage", 1, "the layer's weights are not gathered from parts"),
    )
    if config.get("actor.router_replay") == "engine":
        why = f"with {name}: the experts of rejected tokens would be recorded"
        config.allow("actor.router_replay", "off", why, f"leave out {name}")


def check_engine(config: CheckedConfig) -> None:
    """Refuse settings that the engine does not support."""
    supports, engine = config.supports, config.get("rollout.engine")
    for ability, name, value, why in (
        ("adapters", "hybrid.lora", "merge", "which has no place for adapters"),
        ("options", "rollout.engine_options", {}, "which takes none"),
        ("coded_weights", "rollout.quantization", "none", "whose weights are in model.dtype"),
        ("min_tokens", "rollout.min_tokens", 0, "which does not hold stop tokens back"),
    ):
        config.apply(CheckedConfig.need, ability, name, value, why)
    config.require(
        config.get("actor.expert_tensor_parallel_size") in (None, config.get("actor.tensor_model_parallel_size"))
        or not supports("is_actor"),
        "actor.expert_tensor_parallel_size",
        f"with rollout.engine = {engine!r}, whose engines are made of whole tensor parallel groups",
        expected="actor.tensor_model_parallel_size",
        hint="leave it out, or choose another rollout.engine",
    )
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


def _check_server(config: CheckedConfig) -> None:
    """Check the settings of rollout servers: addresses, shared directory, update hook and interpreter."""
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


def _check_precision(config: CheckedConfig) -> None:
    """Refuse the engine options in `REFUSED`, and low-precision engines without importance sampling.

    With `rollout.quantization`, also refuse adapters that are not merged into the weights.
    """
    options, is_coded = config.get("rollout.engine_options"), config.get("rollout.quantization") != "none"
    for name in [name for name in options if name in REFUSED]:
        config.require(
            False,
            "rollout.engine_options",
            f"has {name}, which is not the user's to set: {REFUSED[name]}",
            expected="arguments of vLLM that break no contract (docs/sampling.md has the others)",
            hint=f"leave {name} out",
        )
    config.require(
        options.get("async_scheduling") in (None, False, True),
        "rollout.engine_options",
        "has an async_scheduling that is no truth value",
        expected="true or false",
        hint="leave it out: vLLM on a GPU plans the next step early if possible",
    )
    why = f"with rollout.quantization = {config.get('rollout.quantization')!r}: weights are rounded with adapters added"
    if is_coded:
        config.allow("hybrid.lora", "merge", why, "rollout.quantization=none")
    is_low = {"rollout.quantization": is_coded}
    is_low["rollout.engine_options"] = str(options.get("kv_cache_dtype", "auto")).startswith("fp8")
    for name in is_low:
        config.require(
            not is_low[name] or config.get("algorithm.importance_sampling") != "none",
            name,
            "with algorithm.importance_sampling = 'none': the engine samples from another policy than the one that "
            "learns, and nothing would correct it",
            expected="a correction",
            hint="set algorithm.importance_sampling=token-truncate, or compute in model.dtype",
        )


def _check_further(config: CheckedConfig) -> None:
    """Check the settings of further reward models, which default to the section `reward_model`."""
    setting = "reward_model.further"
    for name, given in config.get(setting).items():
        section = FieldInfo(f"{setting}.{name}", RewardModelConfig, MISSING, "", "")
        source = f"{setting}.{name}" + (f" ({config.sources[setting]})" if setting in config.sources else "")
        with config.mistakes.collect(setting):
            coerce(section, given, source)
            refused = sorted({"further", *NOT_OWN} & given.keys())
            if given.get("path") is None or refused or not re.fullmatch(r"[\w-]+", name):
                raise UserError(
                    f"{section.name} = {given!r} is no reward model",
                    source=source,
                    expected="a name of letters, digits, _ and -, a path, and settings of the section reward_model",
                    hint=f"e.g. {setting}={{safety: {{path: models/safety, offload: true}}}}",
                )
    for name in config.get(setting):
        part = f"{setting}.{name}.sequence_parallel"
        config.require(
            not config.get(part) or config.get(f"{setting}.{name}.tensor_model_parallel_size") > 1,
            part,
            "with one tensor parallel rank",
            expected="false",
            hint=f"set {part}=false",
        )


def _check_validation_sets(config: CheckedConfig) -> None:
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


_EPISODES = ("agents.environment", "agents.tools", "agents.program")


def check_thinking(config: CheckedConfig) -> None:
    """Refuse a thinking budget, which inserts tokens into responses, with episodes or `trainer.capture_step`."""
    name, budget = "rollout.thinking_budget", config.get("rollout.thinking_budget")
    sets = (config.get("rollout.for_validation")(one) for one in (ALL_SETS, *config.get("rollout.validation_sets")))
    if budget is None and all(one.thinking_budget is None for one in sets):
        return
    for other in _EPISODES:
        config.require(
            not config.get(other),
            name,
            f"with {other}: the transcript of an episode, and what its program is told, are the tokens that the engine "
            "sampled",
            expected="null",
            hint=f"leave out {other} or the budget; agents.max_turns and data.max_response_length bound episodes",
        )
    why = f"with {name}: a capsule holds the tokens that were sampled"
    config.allow("trainer.capture_step", None, why, f"leave out {name}")


def check_sampling(config: CheckedConfig) -> None:
    """Check `top_k` and `min_tokens`; refuse truncated sampling if the step mode or the engine does not support it."""
    name, top_k = "rollout.top_k", config.get("rollout.top_k")
    config.require(top_k == -1 or top_k > 0, name, "is no number of tokens", expected="> 0, or -1", hint="-1: all")
    longest = config.get("data.max_response_length")
    config.require(
        0 <= config.get("rollout.min_tokens") <= longest,
        "rollout.min_tokens",
        "is not a number of tokens that a response can have",
        expected=f"0 to {longest} (data.max_response_length)",
        hint="0 switches it off",
    )
    config.require(
        not config.get("rollout.is_truncated") or config.get("actor.step_mode") != "graph",
        "actor.step_mode",
        "with rollout.top_p, top_k, min_p or min_tokens: the sets of tokens have no fixed size, which a graph needs",
        expected="eager or static",
        hint="set actor.step_mode=static: the same step without capture",
    )
    if config.get("rollout.is_ever_truncated") and config.supports("vllm_modes"):
        why = "with rollout.top_p, top_k, min_p or min_tokens: its sampler does not tell what it draws from"
        if config.get("rollout.model_runner") == "v2":
            config.allow("rollout.model_runner", "v1", why, "leave these out")


def _check_routes(config: CheckedConfig) -> None:
    """Refuse to replay the engine's expert choices in training unless the engine can report them for each forward."""
    if config.get("actor.router_replay") != "engine":
        return
    trainer = "actor.router_replay=trainer, which asks nothing of the engine"
    config.require(
        config.supports("routes"),
        "actor.router_replay",
        f"with rollout.engine = {config.get('rollout.engine')!r}, which does not tell which experts it chooses",
        expected="off or trainer",
        hint=f"set {trainer}, or rollout.engine={name_engines('routes')}",
    )
    if config.supports("vllm_modes") and config.get("rollout.model_runner") != "auto":
        why = "with actor.router_replay = 'engine': expert choices are read after each forward of the first runner"
        config.allow("rollout.model_runner", "v1", why, trainer)


def _check_expert_parallel(config: CheckedConfig) -> None:
    """Refuse to give whole experts to some ranks of an engine only, or to an engine that splits each expert."""
    name, parts = "rollout.expert_parallel_size", "rollout.data_parallel_size"
    ranks, is_split = config.get("rollout.ranks_per_engine"), config.get(parts) > 1
    if config.get(name) == 1 and not is_split:
        return
    config.require(
        config.get(name) == ranks,
        name,
        f"with engines of {ranks} rank(s): rollout.tensor_model_parallel_size x {parts}",
        expected=f"{ranks}, the ranks of an engine" if is_split else f"1, or {ranks}, the ranks of an engine",
        hint=f"set {name}={ranks}" + (f", or leave {parts} out" if is_split else " or 1"),
    )
    config.need("expert_parallel", name, 1, "which splits each expert over the ranks of an engine")
    config.exclude("schedule.elastic=true", (name, 1, "engines outside of the job split each expert"))
    if not is_split:
        return
    if config.get("rollout.model_runner") != "auto":
        config.allow("rollout.model_runner", "v1", f"with {parts}: each step has a forward", f"leave {parts} out")
    config.exclude(parts, ("hybrid.lora", "merge", "adapters beside the weights are not tried with it"))


def _check_schedule(config: CheckedConfig) -> None:
    """Refuse stale samples without importance sampling, and `schedule.replay` if settings fix the times of updates."""
    is_timed = config.get("schedule.updates") == "in_flight" and config.get("schedule.steps_per_update") is None
    config.require(
        config.get("schedule.replay") is None or is_timed and config.get("schedule.max_staleness") > 0,
        "schedule.replay",
        "without a clock: the ends of phases follow from the settings",
        expected="null",
        hint="set schedule.max_staleness > 0, updates=in_flight and steps_per_update=null, as the run had",
    )
    config.require(
        config.get("schedule.max_staleness") == 0 or config.get("algorithm.importance_sampling") != "none",
        "schedule.max_staleness",
        "with algorithm.importance_sampling = 'none': samples of older weights would be learned from as if the policy "
        "had made them",
        expected="0, or a correction",
        hint="set algorithm.importance_sampling=token-truncate",
    )


def _check_elastic(config: CheckedConfig) -> None:
    """Refuse what engines outside the job do not support (`schedule.elastic`)."""
    steps, whole = "its engines do not step together", "its engines fetch the model's tensors"
    config.exclude(
        "schedule.elastic",
        ("schedule.steps_per_update", None, steps),
        ("schedule.replay", None, steps),
        ("hybrid.lora", "merge", whole),
        ("rollout.quantization", "none", whole),
    )
    is_elastic, engine = config.get("schedule.elastic"), config.get("rollout.engine")
    config.require(
        not is_elastic or config.supports("elastic"),
        "schedule.elastic",
        f"with rollout.engine = {engine!r}, which does not run outside the job",
        expected=f"rollout.engine={name_engines('elastic')}",
        hint="servers are restarted one by one without it (docs/servers.md): set schedule.elastic=false",
    )
    config.require(
        not is_elastic or config.get("trainer.run_dir") is not None,
        "schedule.elastic",
        "without trainer.run_dir, in which engines find the address of the run",
        expected="trainer.run_dir",
        hint="set trainer.run_dir to a directory that all hosts see",
    )


def check_agents(config: CheckedConfig) -> None:
    """Refuse settings that do not work with episodes of several turns."""
    names = [name for name in _EPISODES if config.get(name)]
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
    kind, is_harbor = config.get("agents.sandbox.kind"), (config.get("agents.environment") or "").startswith("harbor:")
    config.require(
        kind is not None or not is_harbor and "bash" not in config.get("agents.tools"),
        "agents.sandbox.kind",
        "runs no commands, which agents.tools = bash and agents.environment = harbor:... need",
        expected="local, docker, podman, or the URL of a service",
        hint="set agents.sandbox.kind=local",
    )
    config.require(
        kind in (None, "local", "docker", "podman") or kind.startswith(("http://", "https://")),
        "agents.sandbox.kind",
        "is no kind of sandbox",
        expected="local, docker, podman, or the URL of a service",
        hint="set agents.sandbox.kind=local",
    )
    config.require(
        kind not in ("docker", "podman") or config.get("agents.sandbox.image") is not None or is_harbor,
        "agents.sandbox.image",
        f"with agents.sandbox.kind = {kind}: a container has an image",
        expected="the name of an image with sh and timeout",
        hint="set agents.sandbox.image=debian:12",
    )
    config.exclude(source, ("trainer.capture_step", None, "a capsule holds one turn of each rollout"))
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
    """Check, for `rollout.bitwise`, that engine and trainer can compute the same bits; see also `run/models.py`."""
    if not config.get("rollout.bitwise"):
        return
    engine, tp_size = config.get("rollout.engine"), config.get("actor.tensor_model_parallel_size")
    is_actor = config.supports("is_actor")
    config.exclude(
        "rollout.bitwise",
        ("rollout.engine_options", {}, "an option may choose other kernels, with other bits"),
        ("rollout.quantization", "none", "training computes with the whole weights"),
        ("model.dtype", "float32", "only float32 is computed in the same order on both sides"),
    )
    config.require(
        config.supports("bitwise"),
        "rollout.engine",
        "computes in its own way, and rollout.bitwise asks for the bits of the trainer",
        expected=name_engines("bitwise"),
        hint="set rollout.bitwise=false",
    )
    config.require(
        tp_size <= 2,
        "actor.tensor_model_parallel_size",
        "with rollout.bitwise: a sum over more than two ranks has an order, which depends on the number of tokens",
        expected="1 or 2",
        hint="set it to 2, with more pipeline stages, or set rollout.bitwise=false",
    )
    config.require(
        is_actor or not config.get("actor.lora.rank"),
        "actor.lora.rank",
        f"with rollout.bitwise: rollout.engine = {engine!r} computes with the sum of the model and its adapters, and "
        "training with one after the other",
        expected=f"0, or rollout.engine={name_engines('is_actor')}, which does as training does",
        hint=f"set rollout.bitwise=false, or rollout.engine={name_engines('is_actor')}",
    )
    why = "with rollout.bitwise: products that are cut in another number of parts have sums of other parts"
    if not is_actor:
        config.allow("rollout.tensor_model_parallel_size", tp_size, why, "rollout.bitwise=false")


_KIND, _CHOICE = "algorithm.distillation.kind", "algorithm.distillation.choose_by"


def _check_gdpo(config: CheckedConfig) -> None:
    name = "algorithm.options.gdpo.rewards"
    if config.get("algorithm.adv_estimator") == "gdpo":
        rewards, weights = config.get(name), config.get("algorithm.options.gdpo.weights")
        named = bool(rewards or config.get("reward.components"))
        config.require(
            named and len(rewards) == len(rewards if weights is None else weights),
            name,
            f"with algorithm.options.gdpo.weights = {weights}",
            expected="names of reward components, as many as weights, or neither and reward.components",
            hint=f"set {name}=[accuracy,format]: numbers that the reward function returns beside score",
        )
        config.allow("algorithm.kl_in", "loss", "with gdpo: KL in the reward has no effect", "another estimator")


def _check_teachers(config: CheckedConfig) -> None:
    teachers = config.config.teachers
    config.require(
        bool(teachers) or config.get("algorithm.adv_estimator") != "distill",
        "algorithm.adv_estimator",
        "without a teacher: nothing would be learned",
        expected="a teacher in the section teachers",
        hint="set teachers.NAME.path, or choose an estimator that works on rewards",
    )
    for name in teachers:
        config.require(
            re.fullmatch(r"[\w-]+", name) is not None,
            f"teachers.{name}.path",
            f"belongs to a teacher with the name {name!r}",
            expected="letters, digits, _ and -",
            hint="the name becomes part of the names of settings and metrics",
        )
    for name in config.get("placement.teachers"):
        config.require(
            name in teachers,
            "placement.teachers",
            f"names {name!r}",
            expected=f"of the section teachers: {', '.join(teachers) or 'there is none'}",
            hint="a teacher without a place is on all ranks",
        )


def _check_kind(config: CheckedConfig) -> None:
    teachers, kind, chosen_by = config.config.teachers, config.get(_KIND), config.get(_CHOICE)
    config.require(
        kind == "sampled" or len(teachers) < 2 or chosen_by is not None,
        _KIND,
        f"with {len(teachers)} teachers at once",
        expected="sampled, whose log-probs are averaged",
        hint="set algorithm.distillation.choose_by=data_source, so that each prompt has one teacher",
    )
    config.require(
        kind != "full" or len(teachers) < 2,
        _KIND,
        f"with {len(teachers)} teachers: each would need its output weights beside the policy's",
        expected="one teacher, or top_k",
        hint="set algorithm.distillation.kind=top_k",
    )
    why = "tokens of the policy give the reverse divergence"
    config.exclude(f"{_KIND}=sampled", ("algorithm.distillation.direction", "reverse", why))

    values = [value for name in teachers for value in config.get(f"teachers.{name}.values") or [name]]
    repeated = sorted({value for value in values if values.count(value) > 1})
    config.require(
        chosen_by is None or not repeated,
        _CHOICE,
        f"finds two teachers for {', '.join(repeated)}",
        expected="one teacher for each value",
        hint="change teachers.NAME.values",
    )


def _check_reset(config: CheckedConfig) -> None:
    """Refuse `reset_every` for a reference that cannot copy the actor's weights in place."""
    config.exclude(
        "reference.reset_every",
        ("reference.offload", False, "it moves the weights that are written"),
        ("actor.lora.rank", 0, "the reference is the actor without adapters, and cannot be written"),
        ("placement.reference", config.get("placement.actor"), "it is apart from the actor that it becomes"),
    )


def _check_watching(config: CheckedConfig) -> None:
    """Check that each tracker is named once, and that the status page has a port of TCP."""
    trackers, port = config.get("observability.trackers"), config.get("observability.status_port")
    config.require(
        len({name.removesuffix("-offline") for name in trackers}) == len(trackers),
        "observability.trackers",
        "names a tracker twice",
        expected="each once, and W&B as wandb or as wandb-offline",
        hint="leave one of the two out",
    )
    digits = "0" if port is None else str(port).rpartition(":")[2]
    config.require(
        digits.isdecimal() and len(digits) <= 5 and int(digits) < 1 << 16,
        "observability.status_port",
        "is no port",
        expected="a port of TCP, or ADDRESS:PORT",
        hint="0 takes any free port",
    )


_RULES = (
    _check_watching,
    _check_weights,
    _check_curriculum,
    _check_further,
    _check_quantization,
    _check_zero_stages,
    check_engine,
    check_sampling,
    check_thinking,
    _check_precision,
    _check_bitwise,
    _check_server,
    _check_routes,
    _check_expert_parallel,
    _check_schedule,
    _check_elastic,
    check_agents,
    _check_layers,
    _check_drafts,
    _check_gdpo,
    _check_teachers,
    _check_kind,
    _check_reset,
)
