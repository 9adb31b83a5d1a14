# SPDX-License-Identifier: Apache-2.0
"""Translation table of single verl names; data only.

Each name is `Renamed` (with a value table if values differ), `Ignored` with a reason, accepted `Only` with matching
values, or the `SameAs` another setting. `PATTERNS` cover whole sections on Ray, FSDP or profilers. Names that depend on
each other are in `name_groups.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from megatron_rl.compat.kinds import Alias, Ignored, Only, Renamed, SameAs, each
from megatron_rl.compat.name_groups import AGGREGATIONS
from megatron_rl.config.schema import STAGE_SETTINGS, LayoutConfig

OFF, ONE = ((-1, 0),), ((1, None),)
BUDGET = "max_tokens_per_microbatch bounds every forward pass"
MEGATRON = "the models run on megatron-core"
FSDP = f"{MEGATRON}; zero_stage=3 of a role shares its weights as FSDP does"
_SHARED = "the engine uses the actor's weights while it generates, there is nothing to gain"
CHECKPOINTING = ((True, "full"), (False, "none"))
STAGES = ((True, 3), (False, 1))  # of `reshard_after_forward`
SHARD_SIZE = Renamed("actor.zero_shard_size", ((-1, None),))
FUSED = "the program chooses its kernels"
_LR_STYLE = (("constant", "constant"), ("linear", "linear"), ("cosine", "cosine"))
PACKED = "sequences are always packed"
_NO_FP8 = "there is no training in FP8"
_NO_QAT = "there is no quantization-aware training"
_NO_DROPOUT = "there is no dropout"
_TRANSFORMER: dict[str, Alias] = {
    **each(
        "attention_backend apply_rope_fusion bias_activation_fusion bias_dropout_fusion masked_softmax_fusion "
        "gradient_accumulation_fusion moe_permute_fusion moe_grouped_gemm persist_layer_norm use_flash_attn "
        "apply_dsa_kernel_fusion use_fused_mhc use_arbitrary_attention_mask",
        Ignored(FUSED),
    ),
    **each("moe_token_dispatcher_type moe_enable_deepep", Ignored("tokens reach their experts by all-to-all")),
    "moe_shared_expert_overlap": Ignored("the actor's setting decides for all trained roles"),
    "moe_router_dtype": Only(("fp32",), "there is no router in another type than float32"),
    "moe_router_load_balancing_type": Only(("none",), "there is no auxiliary loss"),
    **each("moe_aux_loss_coeff moe_z_loss_coeff dsa_indexer_loss_coeff", Only((0,), "there is no auxiliary loss")),
    "moe_router_enable_expert_bias": Ignored("config.json decides whether routers have biases"),
    **each(
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        Ignored("layers are split evenly over the stages, or as pipeline_model_parallel_layout says"),
    ),
    "deallocate_pipeline_outputs": Ignored("outputs of a stage are freed"),
    **each("attention_dropout hidden_dropout", Only((0,), _NO_DROPOUT)),
    "fp8": Only((), _NO_FP8),
    "fp8_recipe": Ignored("it belongs to fp8"),
    "dsa_indexer_use_sparse_loss": Ignored("it belongs to dsa_indexer_loss_coeff"),
}
# Names of Megatron-Lite's layout; AutoModel's have "_size" behind them.
_SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
LAYOUT_LEAVES = tuple(item.name for item in fields(LayoutConfig) if item.name.endswith("_parallel_size"))


def refuse_stages(role: str) -> dict[str, Alias]:
    """Return the refusals of the actor's settings of pipeline stages in another role, by name."""
    example = f"{role.replace('*', 'NAME')}.pipeline_model_parallel_layout=Ett|tt|tt|ttL"
    why = f"write the layers of all model chunks, e.g. {example} for 8 layers, PP 2 and 2 chunks per stage"
    return {f"{role}.{leaf}": Only((1,) if leaf == _SHORT["vpp"] else (), why) for leaf in STAGE_SETTINGS[:-1]}


def megatron_names(role: str) -> dict[str, Alias]:
    """Return the translations of verl's `megatron.*` settings of a role with its own layout, by name."""
    names = {f"engine.{short}{end}": leaf for short, leaf in _SHORT.items() for end in ("", "_size")}
    names |= {f"megatron.{leaf}": leaf for leaf in LAYOUT_LEAVES}
    names |= {f"megatron.override_transformer_config.{leaf}": leaf for leaf in STAGE_SETTINGS[1:]}
    refused = {} if role == "actor" else refuse_stages(role)
    return {
        "megatron.forward_only": Ignored(MEGATRON),
        "megatron.dtype": Ignored("model.dtype decides"),
        "megatron.use_distributed_optimizer": Ignored("this role has no optimizer"),
        "megatron.override_transformer_config.recompute_granularity": Ignored("only a backward pass recomputes"),
        "megatron.override_transformer_config.sequence_parallel": SameAs(f"{role}.sequence_parallel"),
        "megatron.use_megatron_fsdp": Ignored(FSDP),
        "megatron.dynamic_context_parallel": Only((False,), "there is no context parallelism by length"),
        **each("megatron.max_seqlen_per_dp_cp_rank megatron.pad_bshd_to_minibatch_max", Ignored(PACKED)),
        **each("megatron.qat.enable fsdp_config.qat.enable qat.enable", Only((False,), _NO_QAT)),
        **{f"megatron.override_transformer_config.{leaf}": alias for leaf, alias in _TRANSFORMER.items()},
        **each("megatron.param_offload engine.param_offload", Ignored(_SHARED)),
        **each("strategy model_engine", Ignored(FSDP)),
        "fsdp_config.reshard_after_forward": Renamed(f"{role}.zero_stage", STAGES, closed=True),
        "load_weight": Only((True,), "weights are always read"),
        **each(
            "ulysses_sequence_parallel_size fsdp_config.ulysses_sequence_parallel_size veomni.ulysses_parallel_size",
            Renamed(f"{role}.context_parallel_size"),
        ),
        "veomni.expert_parallel_size": Renamed(f"{role}.expert_model_parallel_size"),
        **{
            name: refused.get(f"{role}.{leaf}", Renamed(f"{role}.{leaf}", ONE if name == "engine.vpp" else ()))
            for name, leaf in names.items()
        },
    }


def lora_names(role: str) -> dict[str, Alias]:
    """Return the translations of a role's adapter settings, by name within verl's section `model`."""
    names = {
        **each("lora_adapter_path lora.adapter_path", "path"),
        "target_modules": "target_modules",
    }
    renamed: dict[str, Alias] = {name: Renamed(f"{role}.lora.{leaf}") for name, leaf in names.items()}
    return renamed | {
        "exclude_modules": Only((), f"name the matrices that get adapters in {role}.lora.target_modules"),
        "lora.dropout": Only((0,), "there is no dropout, which would train another policy than samples"),
    }


def trainable_names(role: str) -> dict[str, Alias]:
    """Return the translations of verl's settings of a role with an optimizer, by name."""
    return megatron_names(role) | {
        "optim.lr": Renamed(f"{role}.lr"),
        **each("optim.min_lr optim.lr_min", Renamed(f"{role}.min_lr")),
        "optim.min_lr_factor": Only((0,), f"give the final learning rate itself: {role}.min_lr"),
        **each(
            "optim.lr_warmup_init optim.init_lr_ratio optim.lr_start",
            Only((0,), "there is no warm-up that starts above 0"),
        ),
        "optim.lr_decay_ratio": Only((1,), "there is no decay that ends before the run"),
        "optim.eps": Renamed("actor.adam_eps") if role == "actor" else SameAs("actor.adam_eps", strict=True),
        "optim.override_optimizer_config": Only((), "betas have a name of their own"),
        **each(
            "optim.lr_decay_style optim.lr_scheduler_type optim.lr_scheduler optim.warmup_style optim.decay_type",
            Renamed(f"{role}.lr_decay_style", _LR_STYLE, True),
        ),
        "optim.num_cycles": Only((0.5,), "there is no cosine decay but half a period"),
        **each("optim.lr_wsd_decay_style optim.lr_wsd_decay_steps", Ignored("there is no such schedule")),
        "optim.weight_decay": Renamed(f"{role}.weight_decay"),
        **each("optim.weight_decay_incr_style optim.wd_incr_style", Only(("constant",), "there is no growing decay")),
        **each("optim.clip_grad grad_clip", Renamed(f"{role}.clip_grad")),
        **each(
            "optim.optimizer optim.name",
            Only(("adam", "AdamW", "adamw", "FusedAdam"), f"AdamW, or {role}.optimizer=muon"),
        ),
        **each(
            "optim.optimizer_impl optim.master_weights optim.store_param_remainders",
            Ignored("the optimizer is megatron-core's AdamW, with float32 states"),
        ),
        "optim.total_training_steps": Ignored("it follows from the batch plan"),
        "optim.zero_indexed_step": Ignored("a step of the warm-up is one optimizer step"),
        "shuffle": Only((False,), "there is no shuffling of minibatches"),
        "ppo_micro_batch_size": Ignored(BUDGET),
        **each(
            "fsdp_config.optimizer_offload fsdp.optimizer_offload veomni.optimizer_offload engine.optimizer_offload",
            Renamed(f"{role}.offload_optimizer"),
        ),
        **each("megatron.grad_offload engine.grad_offload", Renamed("actor.offload_gradients")),
        "engine.activation_checkpointing": Renamed(f"{role}.recompute_granularity", CHECKPOINTING, closed=True),
        "engine.enable_fp8": Only((False,), _NO_FP8),
        "megatron.override_transformer_config.recompute_granularity": Renamed(
            f"{role}.recompute_granularity", (("selective", "selective"), ("full", "full")), closed=True
        ),
        "megatron.use_distributed_optimizer": Renamed(f"{role}.zero_stage", ((True, 1), (False, 0)), closed=True),
    }


_RUNS = "torchrun decides the number of ranks; a dry run plans for as many as this says"
_REFERENCE = "the reference model has the layout of the actor"
_NO_REUSE = "there is no reuse of rollouts, which are made in every step"
_ENGINE = "the engine decides"
_TEXT = "prompts are text"
_CLASSES = "there is no loader for verl's classes of tools and agent loops; see docs/agents.md"


_ACTOR: dict[str, Alias] = trainable_names("actor") | {
    **each("fsdp_config.fsdp_size fsdp.fsdp_size veomni.fsdp_size", SHARD_SIZE),
    "ppo_mini_batch_size": Renamed("actor.ppo_mini_batch_size"),
    "ppo_epochs": Renamed("actor.ppo_epochs"),
    "rollout_n": SameAs("rollout.n"),
    "entropy_coeff": Renamed("algorithm.entropy_coef"),
    "calculate_entropy": Ignored("the entropy is always measured"),
    "tau_pos": Renamed("algorithm.options.sapo.tau_pos"),
    "tau_neg": Renamed("algorithm.options.sapo.tau_neg"),
    "policy_loss.clip_cov_ratio": Renamed("algorithm.options.clip_cov.ratio"),
    "policy_loss.kl_cov_ratio": Renamed("algorithm.options.kl_cov.ratio"),
    "policy_loss.clip_cov_lb": Renamed("algorithm.options.clip_cov.low"),
    "policy_loss.clip_cov_ub": Renamed("algorithm.options.clip_cov.high"),
    "policy_loss.dro_beta": Renamed("algorithm.options.dro.beta"),
    "policy_loss.ppo_kl_coef": Renamed("algorithm.options.kl_cov.coef"),
    "loss_scale_factor": Renamed("algorithm.loss_scale_factor"),
    "clip_ratio_low": Renamed("algorithm.clip_eps_low"),
    "clip_ratio_high": Renamed("algorithm.clip_eps_high"),
    "megatron.override_transformer_config.moe_router_bias_update_rate": Renamed("actor.router_bias_rate"),
    "megatron.override_transformer_config.moe_shared_expert_overlap": Renamed("actor.overlap_shared_experts"),
    "calculate_sum_pi_squared": Ignored("optimal_token_baseline computes what it needs"),
    "use_prefix_grouper": Ignored("actor.share_prompts decides"),
    "tis_imp_ratio_cap": Only((-1,), "set algorithm.importance_sampling=token-truncate and importance_high"),
    "freeze_vision_tower": Ignored(_TEXT),
    "checkpoint.async_save": Renamed("checkpoint.async_save"),
    **each(
        "router_replay.mode megatron.router_replay.mode veomni.router_replay.mode",
        Renamed("actor.router_replay", (("disabled", "off"), ("R2", "trainer"), ("R3", "engine")), closed=True),
    ),
}

_CRITIC: dict[str, Alias] = trainable_names("critic") | {
    **each("megatron.grad_offload engine.grad_offload", Ignored("actor.offload_gradients decides for both")),
    "model.path": Renamed("critic.path"),
    **{f"model.{name}": alias for name, alias in lora_names("critic").items()},
    "model.enable_gradient_checkpointing": Renamed("critic.recompute_granularity", CHECKPOINTING, closed=True),
    "model.fsdp_config.optimizer_offload": Renamed("critic.offload_optimizer"),
    **each(
        "model.fsdp_config.reshard_after_forward fsdp.reshard_after_forward",
        Renamed("critic.zero_stage", STAGES, closed=True),
    ),
    "cliprange_value": Renamed("critic.value_clip"),
    "ppo_mini_batch_size": SameAs("actor.ppo_mini_batch_size"),
    "ppo_epochs": SameAs("actor.ppo_epochs"),
    "rollout_n": SameAs("rollout.n"),
    "loss_agg_mode": SameAs("algorithm.loss_agg_mode", AGGREGATIONS),
    "loss_scale_factor": SameAs("algorithm.loss_scale_factor"),
    **each("forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu", Ignored(BUDGET)),
    **each("kl_ctrl.type kl_ctrl.kl_coef", Ignored("the critic has no KL term")),
}

_SAME_NAMES = (
    "n temperature top_p tensor_model_parallel_size data_parallel_size expert_parallel_size gpu_memory_utilization "
    "enforce_eager max_num_seqs"
)
_ROLLOUT: dict[str, Alias] = {leaf: Renamed(f"rollout.{leaf}") for leaf in _SAME_NAMES.split()} | {
    "name": Renamed("rollout.engine", (("vllm", "vllm"), ("sglang", "sglang"), ("hf", "hf")), closed=True),
    "top_k": Renamed("rollout.top_k", ((0, -1),)),
    "mode": Ignored("rollout and training alternate in one program"),
    "val_kwargs.n": Renamed("rollout.validation_n"),
    "prompt_length": SameAs("data.max_prompt_length"),
    "response_length": SameAs("data.max_response_length"),
    "do_sample": Only((True,), "rollouts are sampled"),
    "ignore_eos": Only((False,), "there is no sampling beyond the EOS"),
    "max_model_len": Ignored("it follows from the longest prompt and response"),
    "dtype": Ignored("the engine takes model.dtype"),
    "load_format": Ignored("the engine takes the weights of the actor"),
    "pipeline_model_parallel_size": Only((1,), "there is no engine with pipeline stages"),
    "quantization": Renamed("rollout.quantization", ((None, "none"), (False, "none"), ("fp8", "fp8")), closed=True),
    "repetition_penalty": Only((1.0,), "there is no repetition penalty; training scores a token by itself"),
    "use_fire_sampling": Only((False,), "there is no FIRE sampling"),
    "over_sample_rate": Only((0,), "there is no over-sampling; every response is waited for"),
    "skip_rollout": Only((False,), _NO_REUSE),
    "chat_scheduler": Only((), "there is no chat scheduler; see docs/agents.md"),
    "calculate_log_probs": Ignored("the engine's log-probs are always measured against the actor's"),
    "update_weights_bucket_megabytes": Ignored("hybrid.bucket_bytes decides"),
    "multi_turn.enable": Only((False,), f"{_CLASSES}: agents.environment, agents.tools or agents.program"),
    **each(
        "multi_turn.tool_config_path multi_turn.function_tool_path multi_turn.interaction_config_path "
        "agent.agent_loop_config_path agent.custom_async_server.path",
        Only((), f"{_CLASSES}: agents.environment, agents.tools or agents.program"),
    ),
    "agent.default_agent_loop": Only(("single_turn_agent",), f"{_CLASSES}: agents.environment or agents.program"),
    "multi_turn.max_assistant_turns": Renamed("agents.max_turns"),
    "nnodes": Only((0,), "set placement.rollout and schedule.max_staleness"),
    "n_gpus_per_node": Ignored("placement.rollout names the ranks that generate"),
    "full_determinism": Ignored("schedule.updates and rollout.bitwise decide"),
    "logprobs_mode": Only(("processed_logprobs",), "log-probs are of the sampled distribution"),
    "scheduling_policy": Only(("fcfs",), "requests are served in the order of the data"),
    "mtp": Ignored("it repeats actor_rollout_ref.model.mtp"),
    "moe_tensor_parallel_size": Ignored("the engine splits experts over its TP ranks"),
    "enable_rollout_routing_replay": Ignored("actor.router_replay decides"),
    "disaggregation.enabled": Only((False,), "there is no engine for prompts beside one that decodes"),
    "moe_load_balance_metrics_interval": Ignored("moe/... metrics have every step"),
    **each(
        "free_cache_engine disable_log_stats enable_chunked_prefill enable_prefix_caching "
        "max_num_batched_tokens cudagraph_capture_sizes multi_stage_wake_up layered_summon "
        "skip_tokenizer_init skip_dump_dir use_block_quant_rollout enable_sleep_mode quantization_config_file "
        "standalone_gpu_memory_utilization",
        Ignored(_ENGINE),
    ),
}

_REF: dict[str, Alias] = {
    "model": Only((), "give the reference's directory in reference.path"),
    "model.path": Renamed("reference.path"),
    **each("fsdp_config.param_offload megatron.param_offload veomni.param_offload", Renamed("reference.offload")),
    "sync_actor": Only((False,), "there is no mixing of the actor into the reference; see reference.reset_every"),
    **each(
        "strategy model_engine rollout_n ulysses_sequence_parallel_size use_torch_compile load_weight sync_actor_alpha "
        "sync_steps",
        Ignored(_REFERENCE),
    ),
}

MODEL: dict[str, Alias] = {
    "path": Renamed("model.path"),
    "enable_gradient_checkpointing": Renamed("actor.recompute_granularity", CHECKPOINTING, closed=True),
    "external_lib": Only((), "there is no loader for external_lib; see algorithm.plugins and reward.function"),
    "custom_chat_template": Only((), "there is no chat template but the tokenizer's own"),
    **lora_names("actor"),
    "use_shm": Ignored("weights are read by the ranks that need them"),
    "enable_activation_offload": Ignored("actor.recompute_granularity=offload does it"),
    **each(
        "return_last_hidden_state override_config.attn_implementation use_liger use_fused_kernels use_fused_loss",
        Ignored(FUSED),
    ),
    "override_config.moe_config.freeze_moe_router": Only((False,), "there is no freezing of routers"),
    **each("hf_config_path tokenizer_path", Only((), "one directory has the model; give model.tokenizer")),
    **each(
        "override_config.max_position_embeddings override_config.model_config.max_position_embeddings",
        Ignored("config.json limits the length of a sequence, and a longer one is refused"),
    ),
    **each(
        "override_config.attention_dropout override_config.embd_pdrop override_config.resid_pdrop",
        Only((0,), _NO_DROPOUT),
    ),
}

_OWN_RANKS = "placement.reward_model names its ranks"
_NO_MANAGER = "there is no loader for reward managers; reward.workers computes rewards beside generation"
_MANAGERS = Only(("naive", "dapo", "prime", "gdpo"), _NO_MANAGER)
_REWARD: dict[str, Alias] = {
    "reward_manager.name": _MANAGERS,
    "reward_manager.source": Only(("register",), _NO_MANAGER),
    "reward_manager.module.path": Only((), _NO_MANAGER),
    "reward_manager.module.name": Ignored("no reward manager is loaded"),
    "reward_kwargs.max_resp_len": SameAs("data.max_response_length"),
    **each("reward_model.enable_resource_pool reward_model.n_gpus_per_node reward_model.nnodes", Ignored(_OWN_RANKS)),
}
_REWARD_MODEL: dict[str, Alias] = megatron_names("reward_model") | {
    "model.fsdp_config.reshard_after_forward": Renamed("reward_model.zero_stage", STAGES, closed=True),
    **each("model.fsdp_config.param_offload megatron.param_offload", Renamed("reward_model.offload")),
    **each("megatron.grad_offload megatron.optimizer_offload", Ignored("this role has no optimizer")),
    "forward_max_token_len_per_gpu": Renamed("reward_model.max_tokens_per_microbatch"),
    "reward_manager": _MANAGERS,
    "max_length": Ignored("the longest prompt and response decide"),
    "reward_kwargs.max_resp_len": SameAs("data.max_response_length"),
    **each("enable_resource_pool n_gpus_per_node nnodes", Ignored(_OWN_RANKS)),
    **each("reward_loop_source reward_loop_module_path reward_loop_class_name", Only((), _NO_MANAGER)),
    **each("micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz", Ignored(BUDGET)),
}

_DATA: dict[str, Alias] = {
    "val_files": Renamed("data.validation_files"),
    "val_batch_size": Ignored("the prompts of a validation set are generated together"),
    "val_max_samples": Renamed("data.validation_limit", ((-1, None),)),
    "train_max_samples": Only((-1,), "there is no limit of the training prompts"),
    "tokenizer": Renamed("model.tokenizer"),
    "seed": Renamed("trainer.seed"),
    "gen_batch_size": Ignored("dynamic sampling generates as many prompts as are missing"),
    "return_raw_chat": Ignored("the chat template is applied when the prompts are read"),
    "validation_shuffle": Only((False,), "there is no shuffling of validation prompts"),
    **each("tool_config_path function_tool_path", Only((), f"{_CLASSES}: agents.tools")),
    **each(
        "return_raw_input_ids return_full_prompt filter_overlong_prompts_workers use_shm dataloader_num_workers",
        Ignored("prompts are read once, at the start"),
    ),
    **each("image_key video_key audio_key image_patch_size return_multi_modal_inputs", Ignored(_TEXT)),
    **each(
        "custom_cls.path datagen.path",
        Only(
            (), "there is no loader for verl's data set classes; name a function that returns rows in data.train_files"
        ),
    ),
    "sampler.class_path": Only(
        (),
        "there is no loader for verl's samplers; name a function of (prompts, epoch) in data.shuffle, or a class in "
        "data.curriculum.kind",
    ),
    **each("custom_cls.name sampler.class_name datagen.name", Ignored("it belongs to a file that is given")),
}

_ALGORITHM: dict[str, Alias] = {
    "gdpo_reward_keys": Renamed("algorithm.options.gdpo.rewards"),
    "gdpo_reward_weights": Renamed("algorithm.options.gdpo.weights"),
    "norm_adv_by_std_in_grpo": Renamed("algorithm.norm_adv_by_std"),
    "lam": Renamed("algorithm.gae_lambda"),
    "use_pf_ppo": Only((False,), "there is no drawing of rollouts by their rewards (PF-PPO)"),
    "filter_groups.max_num_gen_batches": Renamed("algorithm.max_sampling_rounds", ((0, 1_000_000),)),
    "filter_groups.max_inflight_gen_batches": Ignored("a round draws as many prompts as are missing"),
    "rollout_correction.rollout_is_batch_normalize": Renamed("algorithm.importance_normalize"),
    **each(
        "rollout_correction.rollout_rs rollout_correction.rollout_token_veto_threshold",
        Only((), "there is no rejection by rollout_rs; see algorithm.reject_sequence_above and the mask modes"),
    ),
    **each(
        "rollout_correction.rollout_rs_threshold rollout_correction.rollout_rs_threshold_lower",
        Ignored("it belongs to rollout_rs"),
    ),
}

_TRAINER: dict[str, Alias] = {
    "total_training_steps": Renamed("trainer.total_steps"),
    "test_freq": Renamed("trainer.test_freq", OFF),
    "save_freq": Renamed("trainer.save_freq", ((-1, None),)),
    "default_local_dir": Renamed("trainer.run_dir"),
    **each("nnodes n_gpus_per_node", Ignored(_RUNS)),
    "device": Ignored("the device is found at start"),
    "balance_batch": Ignored("batches are always balanced over the DP ranks"),
    "default_hdfs_dir": Only((), "there is no writing to HDFS; files are written to trainer.run_dir"),
    **each("use_legacy_worker_impl use_v1", Ignored(MEGATRON)),
    "v1.trainer_mode": Only(("sync",), "set schedule.max_staleness and placement.rollout"),
    "tensorboard_dir": Ignored("TensorBoard files are in trainer.run_dir"),
    "ray_wait_register_center_timeout": Ignored("there is no Ray in a run"),
    "esi_redundant_time": Ignored("trainer.save_freq decides when to save"),
    "project_name": Renamed("observability.wandb_project"),
    "experiment_name": Renamed("observability.wandb_name"),
    **each("log_val_generations rollout_data_dir validation_data_dir", Ignored("trainer.log_rollouts decides")),
    **each(
        "del_local_ckpt_after_load max_critic_ckpt_to_keep max_ref_ckpt_to_keep",
        Ignored("checkpoint.keep_last decides for all roles"),
    ),
    **each("max_actor_ckpt_to_keep max_ckpt_to_keep", Renamed("checkpoint.keep_last")),
}

_SECTIONS: dict[str, dict[str, Alias]] = {
    "actor_rollout_ref.model": MODEL,
    "actor_rollout_ref.actor": _ACTOR,
    "actor_rollout_ref.rollout": _ROLLOUT,
    "actor_rollout_ref.ref": _REF,
    "critic": _CRITIC,
    "reward_model": _REWARD_MODEL,
    "reward": _REWARD,
    "data": _DATA,
    "algorithm": _ALGORITHM,
    "trainer": _TRAINER,
}

_NO_DISTILLATION = (
    "there is no distillation loss like verl's, clamped or over the top k alone; see docs/distillation.md"
)
ALIASES: Mapping[str, Alias] = {
    "model_engine": Ignored(FSDP),
    "distillation.enabled": Only((False,), _NO_DISTILLATION),
    **{f"skip.{place}.enable": Only((False,), _NO_REUSE) for place in ("rollout", "rollout_tq", "async_rollout")},
    **{f"{section}.{name}": alias for section, names in _SECTIONS.items() for name, alias in names.items()},
}

# Shell patterns of sections ignored as a whole, with one note each; ALIASES takes precedence.
PATTERNS: Mapping[str, Ignored | Only] = {
    "*.log_prob_*": Ignored("log-probs are computed in microbatches of tokens"),
    "*.nccl_timeout": Ignored("trainer.collective_timeout decides"),
    "*.trust_remote_code": Ignored("code of a model directory is never run; a family that needs it is refused"),
    "*.use_remove_padding": Ignored(PACKED),
    **each("*.use_torch_compile *.use_fused_kernels", Ignored(FUSED)),
    **each(
        "*.use_mbridge *.vanilla_mbridge *dist_checkpointing* *.dist_ckpt_* *.distrib_optim_*",
        Ignored("weights are read in HF format, and checkpoints fit every layout"),
    ),
    **each(
        "*.recompute_modules *.recompute_method *.recompute_num_layers",
        Ignored("selective recomputes the core attention, full every layer"),
    ),
    **each("reward*.num_workers *.launch_reward_fn_async", Ignored("reward.workers decides")),
    **each("actor_rollout_ref.*seed critic.*seed reward_model.*seed", Ignored("trainer.seed decides")),
    "*sandbox_fusion.url": Only((), "give its URL as reward.function"),
    "*sandbox_fusion.*": Ignored("reward.service_concurrency and the service decide"),
    "*._target_": Ignored("it names a class of verl"),
    **each("*.profiler.* *.profile.* global_profiler.*", Ignored("there is nothing to configure about profiling")),
    **each("ray_init.* ray_kwargs.*", Ignored("there is no Ray in a run")),
    **each("hydra.* *@*", Ignored("it chooses files of verl's defaults, which compat has")),
    "async_training.*": Ignored("it belongs to other ways of sharing ranks"),
    **each("*.engine.impl_cfg.* *.engine.attention_*", Ignored(FUSED)),
    "actor_rollout_ref.actor.engine.*": Only((), "name the layout as verl does for Megatron, in actor.megatron"),
    "trainer.v1.*": Ignored("it belongs to other trainer modes"),
    "skip.*": Ignored("it belongs to what is skipped"),
    "distillation.*": Ignored("it belongs to distillation.enabled"),
    "actor_rollout_ref.model.mtp.*": Ignored("it belongs to the training of that layer"),
    "actor_rollout_ref.model.lora.*": Ignored("adapters start as PEFT's do, and act on language layers"),
    **each("*.qat.* actor_rollout_ref.rollout.qat", Ignored("it belongs to qat.enable")),
    **each("*.router_replay.*", Ignored("routes are not kept in files")),
    **each("*.veomni.* *.torchtitan.* *.fsdp.*", Ignored(FSDP)),
    **each(
        "*.pad_to_length* *.entropy_from_logits_* *.entropy_checkpointing", Ignored("batches are packed and chunked")
    ),
    "actor_rollout_ref.ref.megatron.*": Ignored(_REFERENCE),
    "*.override_transformer_config.*": Only((), "shapes come from config.json"),
    "actor_rollout_ref.ref.optim.*": Ignored(_REFERENCE),
    "*.optim.override_optimizer_config.*": Ignored("offload_optimizer of the role decides"),
    **each("*.optim.muon_* *.optim.*_dtype *.optim.use_*", Ignored("actor.optimizer decides; states are float32")),
    **each("*.model.tiled_mlp.* actor_rollout_ref.model.tiled_mlp.*", Ignored(FUSED)),
    "actor_rollout_ref.rollout.disaggregation.*": Ignored("it belongs to disaggregation.enabled"),
    "actor_rollout_ref.rollout.checkpoint_engine.*": Ignored("the section hybrid decides how weights move"),
    **each("reward.reward_model.rollout.* reward_model.rollout.*", Ignored("its forward passes are the trainer's")),
    "data.mm_processor_kwargs.*": Ignored(_TEXT),
    "*reward_kwargs.*": Only((), "there is no passing of arguments to reward functions; write them into the function"),
    "transfer_queue.*": Ignored("samples stay in the processes that made them"),
    "*.checkpoint.*": Ignored("trainer.save_freq decides what is written and when"),
    "*.fsdp_config.*": Ignored(FSDP),
    "*.gradient_checkpointing_kwargs.*": Ignored("recompute_granularity decides"),
    "actor_rollout_ref.model.fused_kernel_options.*": Ignored(FUSED),
    "actor_rollout_ref.actor.policy_loss.*": Ignored("it belongs to losses that are not served"),
    **each(
        "actor_rollout_ref.rollout.multi_turn.* actor_rollout_ref.rollout.agent.*",
        Ignored("the section agents has tools and environments of another form"),
    ),
    "actor_rollout_ref.rollout.engine_kwargs.*": Ignored(_ENGINE),
    "actor_rollout_ref.rollout.trace.*": Ignored("trainer.log_rollouts writes rollouts"),
    "actor_rollout_ref.rollout.prometheus.*": Ignored("metrics go to metrics.jsonl and TensorBoard"),
    "actor_rollout_ref.rollout.layer_name_map.*": Ignored("weights are placed by this package"),
    "critic.model.*": Ignored("the critic's shape and options are the policy's"),
    **each("critic.megatron.override_* reward_model.megatron.override_*", Ignored("shapes come from config.json")),
    "reward_model.model.*": Ignored("its shape comes from its config.json"),
    "algorithm.pf_ppo.*": Ignored("it belongs to algorithm.use_pf_ppo"),
}
