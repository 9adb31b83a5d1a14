# SPDX-License-Identifier: Apache-2.0
"""The names that verl users know, and what they mean here.

One table: a verl name is `Renamed` to a setting of ours (with a value table where the values are
called differently), `Ignored` with the reason, or accepted `Only` with the values that mean what
this program does anyway. Names whose meaning depends on each other (`use_kl_loss` and
`kl_loss_coef`, ...) are read together in `alias_groups.py`. Invariant: nothing is dropped silently;
whatever has no effect comes back as a note, and whatever would change the result is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.alias_groups import GROUPS
from megatron_rl.config.fields import FieldInfo, unknown_key_error
from megatron_rl.config.sources import Setting
from megatron_rl.types import UserError


@dataclass(frozen=True)
class Renamed:
    """Another name for `target`. `values` maps (verl value, our value); with `closed`, no other value is known."""

    target: str
    values: tuple[tuple[Any, Any], ...] = ()
    closed: bool = False


@dataclass(frozen=True)
class Ignored:
    """A name without a meaning here, and why."""

    reason: str


@dataclass(frozen=True)
class Only:
    """A name that is accepted with the values that change nothing here, and why."""

    allowed: tuple[Any, ...]
    reason: str


Alias = Renamed | Ignored | Only

_OFF = ((-1, 0),)
_RUNS = "torchrun decides the number of ranks"
_BUDGET = "actor.max_tokens_per_microbatch bounds every forward pass"
_PACKED = "sequences are always packed"
_TRACKING = "metrics go to metrics.jsonl and TensorBoard"
_GRPO = "GRPO does not use it"
_REFERENCE = "the reference model has the layout of the actor"
_OFFLOAD = "offloading is not supported"
_KL_TYPES = (("low_var_kl", "k3"), ("k3", "k3"), ("kl", "k1"), ("k1", "k1"), ("mse", "k2"), ("k2", "k2"))
_AGGREGATIONS = (
    ("token-mean", "token-mean"), ("seq-mean-token-mean", "seq-mean-token-mean"),
    ("seq-mean-token-sum", "seq-mean-token-sum"), ("seq-mean-token-sum-norm", "constant"),
)
_LAYOUT_LEAVES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "sequence_parallel",
)

_ACTOR: dict[str, Alias] = {
    "ppo_mini_batch_size": Renamed("actor.ppo_mini_batch_size"),
    "ppo_epochs": Renamed("actor.ppo_epochs"),
    "ppo_max_token_len_per_gpu": Renamed("actor.max_tokens_per_microbatch"),
    "grad_clip": Renamed("actor.clip_grad"),
    "entropy_coeff": Renamed("algorithm.entropy_coef"),
    "kl_loss_type": Renamed("algorithm.kl_type", _KL_TYPES, closed=True),
    "loss_agg_mode": Renamed("algorithm.loss_agg_mode", _AGGREGATIONS, closed=True),
    "clip_ratio_low": Renamed("algorithm.clip_eps_low"),
    "clip_ratio_high": Renamed("algorithm.clip_eps_high"),
    "clip_ratio_c": Ignored("there is no dual clipping; the loss of negative advantages has no second bound"),
    "optim.lr": Renamed("actor.lr"),
    "optim.min_lr": Renamed("actor.min_lr"),
    "optim.lr_warmup_steps": Renamed("actor.lr_warmup_steps", _OFF),
    "optim.lr_warmup_steps_ratio": Only((0,), "give the warm-up in steps: actor.lr_warmup_steps"),
    "optim.lr_decay_style": Renamed("actor.lr_decay_style"),
    "optim.lr_scheduler_type": Renamed("actor.lr_decay_style"),
    "optim.warmup_style": Renamed("actor.lr_decay_style"),
    "optim.weight_decay": Renamed("actor.weight_decay"),
    "optim.clip_grad": Renamed("actor.clip_grad"),
    "optim.total_training_steps": Ignored("it follows from the batch plan"),
    "strategy": Ignored("the actor always runs on megatron-core"),
    "ppo_micro_batch_size": Ignored(_BUDGET),
    "ppo_micro_batch_size_per_gpu": Ignored(_BUDGET),
    "use_dynamic_bsz": Ignored(_BUDGET),
    "ulysses_sequence_parallel_size": Renamed("actor.context_parallel_size"),
    "use_torch_compile": Ignored("the actor is not compiled"),
    "fsdp_config.param_offload": Only((False,), _OFFLOAD),
    "fsdp_config.optimizer_offload": Only((False,), _OFFLOAD),
    "megatron.param_offload": Only((False,), _OFFLOAD),
    "megatron.grad_offload": Only((False,), _OFFLOAD),
    "megatron.optimizer_offload": Only((False,), _OFFLOAD),
    "megatron.use_distributed_optimizer": Renamed("actor.use_distributed_optimizer"),
    "megatron.use_mbridge": Ignored("weights are converted by this package"),
    "megatron.seed": Renamed("trainer.seed"),
} | {f"megatron.{leaf}": Renamed(f"actor.{leaf}") for leaf in _LAYOUT_LEAVES}

_ROLLOUT: dict[str, Alias] = {
    leaf: Renamed(f"rollout.{leaf}") for leaf in (
        "n", "temperature", "top_p", "top_k", "tensor_model_parallel_size", "gpu_memory_utilization",
        "enforce_eager", "max_num_seqs",
    )
} | {
    "name": Renamed("rollout.engine", (("vllm", "vllm"), ("hf", "hf")), closed=True),
    "mode": Ignored("rollout and training alternate in one program"),
    "val_kwargs.n": Only((1,), "one response per validation prompt"),
    "val_kwargs.top_p": Only((1.0,), "validation samples from the full softmax"),
    "val_kwargs.top_k": Only((-1,), "validation samples from the full softmax"),
    "dtype": Ignored("the engine takes model.dtype"),
    "load_format": Ignored("the engine takes the weights of the actor"),
    "free_cache_engine": Ignored("the engine decides"),
    "disable_log_stats": Ignored("the engine decides"),
    "enable_chunked_prefill": Ignored("the engine decides"),
    "max_num_batched_tokens": Ignored("the engine decides"),
    "log_prob_micro_batch_size": Ignored(_BUDGET),
    "log_prob_micro_batch_size_per_gpu": Ignored(_BUDGET),
    "log_prob_max_token_len_per_gpu": Ignored(_BUDGET),
    "log_prob_use_dynamic_bsz": Ignored(_BUDGET),
}

_REF: dict[str, Alias] = {
    "model.path": Renamed("reference.path"),
    "strategy": Ignored("the reference model always runs on megatron-core"),
    "log_prob_micro_batch_size": Ignored(_BUDGET),
    "log_prob_micro_batch_size_per_gpu": Ignored(_BUDGET),
    "log_prob_max_token_len_per_gpu": Ignored(_BUDGET),
    "log_prob_use_dynamic_bsz": Ignored(_BUDGET),
    "fsdp_config.param_offload": Only((False,), _OFFLOAD),
    "megatron.param_offload": Only((False,), _OFFLOAD),
} | {f"megatron.{leaf}": Ignored(_REFERENCE) for leaf in _LAYOUT_LEAVES}

ALIASES: Mapping[str, Alias] = {
    "actor_rollout_ref.model.path": Renamed("model.path"),
    "actor_rollout_ref.model.use_remove_padding": Ignored(_PACKED),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Renamed(
        "actor.recompute_granularity", ((True, "full"), (False, "none")), closed=True),
    "actor_rollout_ref.model.trust_remote_code": Only((False,), "code of a model directory is never run"),
    "actor_rollout_ref.hybrid_engine": Only((True,), "training and rollout share the ranks"),
    **{f"actor_rollout_ref.actor.{name}": alias for name, alias in _ACTOR.items()},
    **{f"actor_rollout_ref.rollout.{name}": alias for name, alias in _ROLLOUT.items()},
    **{f"actor_rollout_ref.ref.{name}": alias for name, alias in _REF.items()},
    "data.val_files": Renamed("data.validation_files"),
    "data.val_batch_size": Renamed("data.validation_batch_size"),
    "data.tokenizer": Renamed("model.tokenizer"),
    "data.seed": Renamed("trainer.seed"),
    "data.return_raw_chat": Ignored("the chat template is applied when the prompts are read"),
    "data.reward_fn_key": Only(("data_source",), "rewards are chosen by the column data_source"),
    "algorithm.norm_adv_by_std_in_grpo": Renamed("algorithm.norm_adv_by_std"),
    "algorithm.gamma": Ignored(_GRPO),
    "algorithm.lam": Ignored(_GRPO),
    "algorithm.kl_penalty": Ignored("the KL term is in the loss, not in the reward"),
    "algorithm.kl_ctrl.type": Only(("fixed",), "the KL coefficient is constant"),
    "trainer.total_training_steps": Renamed("trainer.total_steps"),
    "trainer.test_freq": Renamed("trainer.test_freq", _OFF),
    "trainer.save_freq": Renamed("trainer.save_freq", _OFF),
    "trainer.default_local_dir": Renamed("trainer.run_dir"),
    "trainer.critic_warmup": Only((0,), "there is no critic yet"),
    "trainer.val_only": Only((False,), "this program trains"),
    "trainer.resume_mode": Only(("disable",), "resuming is not supported yet"),
    "trainer.nnodes": Ignored(_RUNS),
    "trainer.n_gpus_per_node": Ignored(_RUNS),
    "trainer.device": Ignored("the device is found at start"),
    "trainer.balance_batch": Ignored("batches are always balanced over the DP ranks"),
    "trainer.project_name": Ignored("the run directory names the run"),
    "trainer.experiment_name": Ignored("the run directory names the run"),
    "trainer.logger": Ignored(_TRACKING),
    "trainer.log_val_generations": Ignored("trainer.log_rollouts decides"),
    "reward_model.enable": Only((False,), "rewards come from a rule or a function"),
}


def alias_names() -> list[str]:
    """Every accepted verl name, those read in groups included."""
    return [*ALIASES, *(name for group in GROUPS for name in group.names)]


def alias_target(name: str) -> str | None:
    """Our name of a verl name that is simply renamed, else None."""
    alias = ALIASES.get(name)
    return alias.target if isinstance(alias, Renamed) else None


def translate(settings: Sequence[Setting], fields: Mapping[str, FieldInfo]) -> tuple[list[Setting], list[str]]:
    """Turn verl names into ours.

    Args:
        settings: settings in order; of two with the same name the later one is valid.
        fields: our settings by full name.

    Returns:
        Settings with our names only, and one note for each setting that has no effect.

    Raises:
        UserError: an unknown name, or a value that means something this program does not do.
    """
    latest: dict[str, Setting] = {}
    for setting in settings:
        latest.pop(setting.name, None)  # the later one also takes the later place
        latest[setting.name] = setting
    translated: list[Setting] = []
    notes: list[str] = []
    for group in GROUPS:
        parts = {name: latest.pop(name) for name in group.names if name in latest}
        if parts:
            more, more_notes = group.combine(parts)
            translated += more
            notes += more_notes
    for setting in latest.values():
        alias = ALIASES.get(setting.name)
        if isinstance(alias, Renamed):
            translated.append(_rename(setting, alias))
        elif isinstance(alias, Ignored | Only):
            notes.append(_ignore(setting, alias))
        elif setting.name in fields:
            translated.append(setting)
        else:
            raise unknown_key_error(setting.name, setting.source, fields, alias_names())
    return translated, notes


def _rename(setting: Setting, alias: Renamed) -> Setting:
    for theirs, ours in alias.values:
        if _same(setting.value, theirs):
            return replace(setting, name=alias.target, value=ours, text=None)
    if alias.closed:
        known = ", ".join(repr(theirs) for theirs, _ in alias.values)
        raise UserError(
            f"{setting.name} = {setting.value!r} is not known", source=setting.source,
            expected=f"one of {known} (read as {alias.target})", hint=f"set {alias.target} instead, see --help",
        )
    return replace(setting, name=alias.target)


def _ignore(setting: Setting, alias: Ignored | Only) -> str:
    if isinstance(alias, Only) and not any(_same(setting.value, allowed) for allowed in alias.allowed):
        accepted = " or ".join(repr(allowed) for allowed in alias.allowed)
        raise UserError(
            f"{setting.name} = {setting.value!r} is not supported", source=setting.source,
            expected=f"{accepted}: {alias.reason}", hint=f"remove {setting.name}",
        )
    return f"ignored: {setting.name}={setting.value!r} ({setting.source}), {alias.reason}"


def _same(value: Any, other: Any) -> bool:
    """Equality in which True is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
