# SPDX-License-Identifier: Apache-2.0
"""Translation of top-level settings named as in Hugging Face `TrainingArguments` and TRL `GRPOConfig` to our settings.

ms-swift uses most of these names as flags. docs/migrating.md lists the names and converts their units. Source:
trl/trainer/grpo_config.py at commit 006d32c.
"""

from __future__ import annotations

from megatron_rl.compat.kinds import (
    Alias,
    AliasGroup,
    Combined,
    Ignored,
    Only,
    Parts,
    Renamed,
    each,
    look_up,
    note,
    put,
    read_boolean,
)
from megatron_rl.compat.name_groups import CLIP_SIDES, split_clip, trackers_group
from megatron_rl.config.sources import ASSUMED
from megatron_rl.types import UserError

_ENGINE = "the engine decides"
_FORMAT = "checkpoints and logs have one form"
_DATA = "local files: set data.train_files and data.validation_files"
_READING = "prompts are read once, at the start"
_REWARDS = "set reward.components, which lists weights and sources"
_DTYPES = (("bfloat16", "bfloat16"), ("float32", "float32"))

ALIASES: dict[str, Alias] = {
    "model_name_or_path": Renamed("model.path"),
    **each("torch_dtype dtype", Renamed("model.dtype", _DTYPES, closed=True)),
    "bf16": Renamed("model.dtype", ((True, "bfloat16"), (False, "float32")), closed=True),
    "fp16": Only((False,), "model.dtype is bfloat16 or float32"),
    "max_prompt_length": Renamed("data.max_prompt_length"),
    "max_completion_length": Renamed("data.max_response_length"),
    "shuffle_dataset": Renamed("data.shuffle"),
    **each("dataset_name dataset_config dataset", Only((), _DATA)),
    "num_generations": Renamed("rollout.n"),
    "num_generations_eval": Renamed("rollout.validation_n"),
    "temperature": Renamed("rollout.temperature"),
    "top_p": Renamed("rollout.top_p"),
    "top_k": Renamed("rollout.top_k", ((0, -1),)),
    "min_p": Renamed("rollout.min_p"),
    "repetition_penalty": Only((1.0,), "training scores a token without counting the tokens before it"),
    "use_vllm": Renamed("rollout.engine", ((True, "vllm"), (False, "hf")), closed=True),
    "vllm_mode": Only(("colocate",), "set rollout.engine=vllm_server to generate in servers"),
    "vllm_gpu_memory_utilization": Renamed("rollout.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": Renamed("rollout.tensor_model_parallel_size"),
    "vllm_enforce_eager": Renamed("rollout.enforce_eager"),
    **each("vllm_max_model_length vllm_max_model_len", Ignored("it follows from the longest prompt and response")),
    "vllm_importance_sampling_cap": Renamed("algorithm.importance_high"),
    **each("vllm_enable_sleep_mode sleep_level use_transformers_paged", Ignored(_ENGINE)),
    "learning_rate": Renamed("actor.lr"),
    "lr_scheduler_type": Renamed(
        "actor.lr_decay_style",
        (("constant", "constant"), ("constant_with_warmup", "constant"), ("linear", "linear"), ("cosine", "cosine")),
        closed=True,
    ),
    "warmup_steps": Renamed("actor.lr_warmup_steps"),
    "warmup_ratio": Only((0,), "set actor.lr_warmup_steps, in optimizer steps"),
    "weight_decay": Renamed("actor.weight_decay"),
    "adam_beta1": Renamed("actor.adam_beta1"),
    "adam_beta2": Renamed("actor.adam_beta2"),
    "adam_epsilon": Renamed("actor.adam_eps"),
    "max_grad_norm": Renamed("actor.clip_grad"),
    "optim": Only(("adamw_torch", "adamw_torch_fused"), "set actor.optimizer"),
    "gradient_checkpointing": Renamed("actor.recompute_granularity", ((True, "full"), (False, "none")), closed=True),
    "gradient_checkpointing_kwargs.use_reentrant": Ignored("recomputation is megatron-core's"),
    "use_liger_kernel": Ignored("log-probs are computed in chunks of tokens, without full logits"),
    "attn_implementation": Ignored("attention runs on the fastest kernel that works"),
    "disable_dropout": Ignored("there is no dropout"),
    **each("lora_rank lora_r", Renamed("actor.lora.rank")),
    "lora_alpha": Renamed("actor.lora.alpha"),
    "num_iterations": Renamed("actor.ppo_epochs"),
    "beta": Renamed("algorithm.kl_coef"),
    "epsilon_high": Renamed("algorithm.clip_eps_high"),
    "delta": Renamed("algorithm.dual_clip"),
    "sapo_temperature_pos": Renamed("algorithm.options.sapo.tau_pos"),
    "sapo_temperature_neg": Renamed("algorithm.options.sapo.tau_neg"),
    "importance_sampling_level": Renamed(
        "algorithm.policy_loss", (("token", "ppo"), ("sequence", "gspo")), closed=True
    ),
    "loss_type": Renamed(
        "algorithm.loss_agg_mode",
        (("dapo", "token-mean"), ("grpo", "seq-mean-token-mean"), ("dr_grpo", "constant")),
        closed=True,
    ),
    "scale_rewards": Renamed(
        "algorithm.norm_adv_by_std", ((True, True), ("group", True), (False, False), ("none", False)), closed=True
    ),
    "mask_truncated_completions": Renamed("algorithm.mask_truncated"),
    "sync_ref_model": Only((False,), "set reference.reset_every"),
    "top_entropy_quantile": Only((1.0,), "every token in the loss has a policy-gradient term"),
    "use_bias_correction_kl": Only((False,), "the KL term has no importance weights"),
    **each("reward_weights reward_funcs", Only((), _REWARDS)),
    "num_train_epochs": Renamed("trainer.total_epochs"),
    "max_steps": Only((-1,), "it counts optimizer steps: set trainer.total_steps, which counts batches of prompts"),
    "output_dir": Renamed("trainer.run_dir"),
    "seed": Renamed("trainer.seed"),
    "eval_steps": Renamed("trainer.test_freq"),
    "save_steps": Renamed("trainer.save_freq"),
    "save_total_limit": Renamed("checkpoint.keep_last"),
    "resume_from_checkpoint": Renamed("checkpoint.resume", ((True, "auto"), (False, "never"))),
    "logging_steps": Ignored("each step has a line on the console and in metrics.jsonl"),
    "run_name": Renamed("observability.wandb_name"),
    "log_completions": Ignored("trainer.log_rollouts says how many rollouts are written"),
    "push_to_hub": Only((False,), "copy the directory huggingface of a checkpoint"),
    "rlhf_type": Only(("grpo",), "algorithm.adv_estimator and algorithm.policy_loss choose the algorithm"),
    **each("train_type tuner_type", Only(("full",), "set actor.lora.rank for adapters")),
    **each("save_strategy eval_strategy", Only(("steps", "no"), "set trainer.save_freq and test_freq")),
    **each("logging_first_step logging_strategy log_level save_only_model", Ignored(_FORMAT)),
    **each("dataloader_num_workers dataset_num_proc remove_unused_columns", Ignored(_READING)),
    **each("deepspeed ddp_timeout", Ignored("the layout of the section actor decides")),
    "fsdp": Only(
        (False, True, "", "full_shard", "full_shard auto_wrap"),
        "for hybrid_shard, set actor.zero_stage=3 and actor.zero_shard_size",
    ),
    "per_device_eval_batch_size": Ignored(_ENGINE),
}

_CORRECTION, _MODE = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
_MODES = (
    ("token_truncate", "token-truncate"),
    ("token_mask", "token-mask"),
    ("sequence_truncate", "product-truncate"),
    ("sequence_mask", "product-mask"),
)
_TRL_MODE, _TRL_CAP = "sequence_mask", 3.0
_PROMPTS, _MINIBATCH = "data.train_batch_size", "actor.ppo_mini_batch_size"


def _combine_correction(parts: Parts) -> Combined:
    """Translate TRL's importance-sampling correction, which has only an upper bound."""
    given = {name: setting for name, setting in parts.items() if setting.value is not None}
    switch, mode = given.get(_CORRECTION), given.get(_MODE)
    if switch is not None and not read_boolean(switch):
        yield put(switch, "algorithm.importance_sampling", "none")
        if mode is not None:
            yield note(mode, f"{_CORRECTION} is false")
        return
    if switch is not None and mode is None:
        mode = put(switch, _MODE, _TRL_MODE)
    if mode is not None:
        yield look_up(mode, "algorithm.importance_sampling", _MODES, "set algorithm.importance_sampling, see --help")
        yield put(mode, "algorithm.importance_high", _TRL_CAP, layer=ASSUMED)
        yield put(mode, "algorithm.importance_low", 0.0, layer=ASSUMED)


def _combine_batches(parts: Parts) -> Combined:
    """Ignore TRL's batch sizes, in completions, with a note if the recipe has sizes in prompts; else refuse them."""
    given = [part for name, part in parts.items() if name not in (_PROMPTS, _MINIBATCH) and part.value is not None]
    if given and not {_PROMPTS, _MINIBATCH} <= parts.keys():
        raise UserError(
            f"{given[0].name} = {given[0].value!r} counts completions",
            source=given[0].source,
            expected=f"{_PROMPTS} and {_MINIBATCH}, in prompts: the completions of a generation batch and of an "
            "optimizer step (per_device_train_batch_size * processes * gradient_accumulation_steps), each divided by "
            "num_generations",
            hint="give both beside it",
        )
    yield from (note(setting, f"{_PROMPTS} and {_MINIBATCH} decide") for setting in given)


GROUPS: tuple[AliasGroup, ...] = (
    AliasGroup(("epsilon",), CLIP_SIDES, lambda parts: split_clip(parts["epsilon"])),
    trackers_group("report_to", nothing="none"),
    AliasGroup((_CORRECTION, _MODE), "algorithm.importance_sampling", _combine_correction),
    AliasGroup(
        ("generation_batch_size", "steps_per_generation", "per_device_train_batch_size", "gradient_accumulation_steps"),
        f"{_PROMPTS} and {_MINIBATCH}, which must be given, in prompts",
        _combine_batches,
        reads=(_PROMPTS, _MINIBATCH),
    ),
)
