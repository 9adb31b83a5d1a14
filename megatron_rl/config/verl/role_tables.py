# SPDX-License-Identifier: Apache-2.0
"""The names of verl's that several roles have; see `tables.py`."""

from __future__ import annotations

from dataclasses import fields

from megatron_rl.config.schema import LayoutConfig
from megatron_rl.config.verl.kinds import Alias, Ignored, Only, Renamed

OFF = ((-1, 0),)
BUDGET = "max_tokens_per_microbatch bounds every forward pass"
MEGATRON = "the models run on megatron-core"
FSDP = f"{MEGATRON}; zero_stage=3 of a role shares its weights as FSDP does"
_SHARED = "the engine uses the actor's weights while it generates, there is nothing to gain"
STAGES = ((True, 3), (False, 1))  # of `reshard_after_forward`
FUSED = "kernels are chosen by what is installed"
_LR_STYLE = (("constant", "constant"), ("linear", "linear"), ("cosine", "cosine"))
LAYOUT_LEAVES = tuple(item.name for item in fields(LayoutConfig) if item.name.endswith("_parallel_size"))


def megatron_names(role: str) -> dict[str, Alias]:
    """`megatron.*` of a role that has a layout of its own."""
    return {f"megatron.{leaf}": Renamed(f"{role}.{leaf}") for leaf in LAYOUT_LEAVES} | {
        "megatron.use_mbridge": Ignored("weights are converted by this package"),
        "megatron.vanilla_mbridge": Ignored("weights are converted by this package"),
        "megatron.use_dist_checkpointing": Ignored("the first weights are read in HF format"),
        "megatron.dist_checkpointing_path": Ignored("the first weights are read in HF format"),
        "megatron.dist_checkpointing_prefix": Ignored("the first weights are read in HF format"),
        "megatron.forward_only": Ignored(MEGATRON),
        "megatron.dtype": Ignored("model.dtype decides"),
        "megatron.seed": Ignored("trainer.seed decides"),
        "megatron.use_distributed_optimizer": Ignored("this role has no optimizer"),
        "megatron.override_transformer_config.recompute_granularity": Ignored("only a backward pass recomputes"),
        "megatron.override_transformer_config.recompute_modules": Ignored("selective recomputes the core attention"),
        "megatron.override_transformer_config.recompute_method": Ignored("full recomputes every layer"),
        "megatron.override_transformer_config.recompute_num_layers": Ignored("full recomputes every layer"),
        "megatron.override_transformer_config.attention_backend": Ignored(FUSED),
        **dict.fromkeys(("fsdp_config.param_offload", "megatron.param_offload"), Ignored(_SHARED)),
        "strategy": Ignored(FSDP),
        "fsdp_config.reshard_after_forward": Renamed(f"{role}.zero_stage", STAGES, closed=True),
        "load_weight": Only((True,), "weights are always read"),
        "ulysses_sequence_parallel_size": Renamed(f"{role}.context_parallel_size"),
    }


def lora_names(role: str) -> dict[str, Alias]:
    """Adapters of a role, below `model`."""
    names = {
        **dict.fromkeys(("lora_rank", "lora.rank"), "rank"),
        **dict.fromkeys(("lora_alpha", "lora.alpha"), "alpha"),
        **dict.fromkeys(("lora_adapter_path", "lora.adapter_path"), "path"),
        "target_modules": "target_modules",
    }
    renamed: dict[str, Alias] = {name: Renamed(f"{role}.lora.{leaf}") for name, leaf in names.items()}
    return renamed | {
        "exclude_modules": Only((), f"name the matrices that get adapters in {role}.lora.target_modules"),
        "lora.dropout": Only((0,), "dropout would make the policy that is trained another one than is sampled from"),
        "lora.merge": Only((True,), "adapters are merged on their way to the engine"),
    }


def trainable_names(role: str) -> dict[str, Alias]:
    """A role with an optimizer."""
    return megatron_names(role) | {
        "optim.lr": Renamed(f"{role}.lr"),
        "optim.min_lr": Renamed(f"{role}.min_lr"),
        "optim.min_lr_ratio": Only((0,), f"give the final learning rate itself: {role}.min_lr"),
        "optim.lr_warmup_steps": Renamed(f"{role}.lr_warmup_steps", OFF),
        "optim.lr_warmup_steps_ratio": Only((0,), f"give the warm-up in steps: {role}.lr_warmup_steps"),
        "optim.lr_warmup_init": Only((0,), "the warm-up starts from 0"),
        "optim.lr_decay_steps": Only((), "the decay ends with the run"),
        "optim.lr_decay_style": Renamed(f"{role}.lr_decay_style", _LR_STYLE, True),
        "optim.lr_scheduler_type": Renamed(f"{role}.lr_decay_style", _LR_STYLE, True),
        "optim.warmup_style": Renamed(f"{role}.lr_decay_style", _LR_STYLE, True),
        "optim.num_cycles": Only((0.5,), "a cosine decay is half a period"),
        **dict.fromkeys(("optim.lr_wsd_decay_style", "optim.lr_wsd_decay_steps"), Ignored("there is no such schedule")),
        "optim.weight_decay": Renamed(f"{role}.weight_decay"),
        "optim.weight_decay_incr_style": Only(("constant",), "weight decay is constant"),
        "optim.clip_grad": Renamed(f"{role}.clip_grad"),
        "optim.optimizer": Only(("adam", "AdamW", "adamw"), "the optimizer is AdamW"),
        "optim.optimizer_impl": Ignored("the optimizer is megatron-core's AdamW"),
        "optim.total_training_steps": Ignored("it follows from the batch plan"),
        "optim.use_checkpoint_opt_param_scheduler": Ignored("schedules come from the config"),
        "grad_clip": Renamed(f"{role}.clip_grad"),
        "shuffle": Only((False,), "minibatches keep the order of the rollouts"),
        "data_loader_seed": Ignored("trainer.seed decides"),
        "ppo_micro_batch_size": Ignored(BUDGET),
        "fsdp_config.optimizer_offload": Renamed(f"{role}.offload_optimizer"),
        "megatron.optimizer_offload": Renamed(f"{role}.offload_optimizer"),
        "megatron.grad_offload": Renamed(f"{role}.offload_gradients"),
        "megatron.override_transformer_config.recompute_granularity": Renamed(
            f"{role}.recompute_granularity", (("selective", "selective"), ("full", "full")), closed=True
        ),
        "megatron.use_distributed_optimizer": Renamed(f"{role}.use_distributed_optimizer"),
    }
