# SPDX-License-Identifier: Apache-2.0
"""Every setting of a run: nested frozen dataclasses, one section per role or topic.

A field is declared with `option(default, "help text", unit=...)`, the source of `--help`. `checks.py` checks the config
alone, `batch_plan.py` against the world size, `run/inputs.py` against the files. Leaves are spelled as in Megatron.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from megatron_rl.config.algorithm import AlgorithmConfig, PreferenceConfig
from megatron_rl.config.sections import (
    MISSING,
    AgentsConfig,
    AutoLayoutConfig,
    CheckpointConfig,
    DataConfig,
    HybridConfig,
    LoraConfig,
    ObservabilityConfig,
    PlacementConfig,
    SamplingSettings,
    ScheduleConfig,
    ServerConfig,
    option,
)
from megatron_rl.extension.registry import ENGINES

TRAINED = ("actor", "critic")  # sections of roles with an optimizer
REWARD_RULES = ("math", "math_any", "exact", "format", "by_data_source")  # functions of this program
REWARD_MODEL = "model"  # the source of rewards; NAME of `reward_model.further` is model:NAME
FULLY_SHARDED = 3  # the `zero_stage` in which ranks share weights
STREAMED_BYTES = 512 << 20  # moments on a GPU at a time with `offload_optimizer: stream`; one parameter may have more
# Settings of the actor that the critic and teachers take over; the reward model takes over the last, else the default.
ACTOR_DECIDES = (
    *("share_prompts", "logprob_chunk_tokens", "adam_beta1", "adam_beta2", "adam_eps", "bucket_tokens"),
    *("graph_memory_gib", "offload_gradients", "overlap_grad_reduce", "overlap_shared_experts", "zero_shard_size"),
)
# Without effect where a pipeline has one stage; roles besides the actor have the last alone.
STAGE_SETTINGS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)
NOT_OWN = (*ACTOR_DECIDES, *STAGE_SETTINGS[:-1])  # in the actor's section only


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: shapes come from its HF config.json and are never restated here."""

    path: str = option(
        MISSING,
        "Directory of the policy in HF format (config.json, *.safetensors), or OWNER/NAME[@REVISION] of the hub.",
    )
    tokenizer: str | None = option(None, "Tokenizer directory or sentencepiece .model file; default: model.path.")
    dtype: Literal["float32", "bfloat16"] = option(
        "bfloat16", "Type of parameters and activations; use float32 on CPU (bfloat16 is very slow there)."
    )
    transformer_impl: Literal["local", "transformer_engine"] = option(
        "local", "Linear layers and norms: megatron-core's and torch's, or Transformer Engine's, which needs a GPU."
    )


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Distribution of one role's model over the ranks, and its batch limits."""

    tensor_model_parallel_size: int = option(1, "Ranks that share each matrix (TP).", "ranks", ge=1)
    pipeline_model_parallel_size: int = option(1, "Pipeline stages (PP).", "ranks", ge=1)
    virtual_pipeline_model_parallel_size: int | None = option(
        None, "Model chunks per pipeline stage (VPP, interleaved schedule).", "chunks", ge=1
    )
    num_layers_in_first_pipeline_stage: int | None = option(
        None, "Layers of the first stage; default: an equal share.", "layers", ge=1
    )
    num_layers_in_last_pipeline_stage: int | None = option(
        None, "Layers of the last stage; default: an equal share.", "layers", ge=1
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "Layers of all chunks, and so VPP, as megatron-core has them, Ettt|(tttt|)*14ttL; default: equal numbers.",
    )
    context_parallel_size: int = option(1, "Ranks that share each sequence (CP).", "ranks", ge=1)
    expert_model_parallel_size: int = option(1, "Ranks that share the experts (EP).", "ranks", ge=1)
    expert_tensor_parallel_size: int | None = option(
        None, "Ranks that share each matrix of an expert (ETP), 1 or TP; default: TP.", "ranks", ge=1
    )
    sequence_parallel: bool = option(False, "Megatron's TP sequence parallelism of norms and residuals.")
    max_tokens_per_microbatch: int = option(4096, "Token budget of a forward/backward on a DP rank.", "tokens", ge=1)
    logprob_chunk_tokens: int | None = option(
        None, "Tokens whose logits exist at once; default: 512, on GPUs up to 8192 by their memory.", "tokens", ge=1
    )
    share_prompts: Literal[True, False, "tree"] = option(
        True, "Compute a group's prompt once per microbatch; tree: also what branches of a rollout share."
    )
    zero_stage: Literal[0, 1, 3] = option(
        1, "Sharded over DP and CP: 0, nothing; 1, optimizer states; 3, weights and gradients as well (FSDP)."
    )
    zero_shard_size: int | None = option(
        None, "Stage 3 of any role: ranks that a replica is sharded over (HSDP); default: all.", "ranks", ge=1
    )


@dataclass(frozen=True, kw_only=True)
class TrainedConfig(LayoutConfig):
    """A role with an optimizer."""

    lora: LoraConfig = LoraConfig()
    recompute_granularity: Literal["none", "selective", "full", "offload"] = option(
        "none", "Recomputation: none, core attention only, whole layers, or these with inputs on the host (offload)."
    )
    optimizer: Literal["adam", "muon"] = option(
        "adam", "AdamW, or Muon for the layers' matrices and AdamW for the rest."
    )
    lr: float = option(1e-6, "Peak learning rate.", ge=0)
    min_lr: float = option(0.0, "Final learning rate of the decay.", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = option("constant", "Shape of the decay after warm-up.")
    lr_warmup_steps: float = option(0, "Linear warm-up; below 1: a share of all steps.", "optimizer steps", ge=0)
    weight_decay: float = option(0.01, "Decoupled weight decay (matrices only).", ge=0)
    adam_beta1: float = option(0.9, "First moment decay of Adam.", ge=0, lt=1)
    adam_beta2: float = option(0.95, "Second moment decay of Adam.", ge=0, lt=1)
    adam_eps: float = option(1e-8, "Epsilon of Adam.", gt=0)
    clip_grad: float = option(1.0, "Largest global gradient norm; 0 switches clipping off.", ge=0)
    offload_gradients: bool = option(False, "Give gradient buffers back while the engine generates.")
    offload_optimizer: Literal[False, True, "stream"] = option(
        False,
        "Keep optimizer states (bfloat16: and float32 weights) on the host while the engine generates; stream: Adam's "
        "moments always, and each update loads them in chunks (docs/optimizers.md).",
    )
    overlap_grad_reduce: bool = option(False, "Reduce gradients over DP during the backward of the last microbatch.")
    overlap_shared_experts: bool = option(False, "Compute shared experts while tokens travel between EP ranks.")
    step_mode: Literal["eager", "static", "graph"] = option(
        "eager",
        "eager: microbatches of any length; static: padded to few shapes; graph: static, replayed from CUDA graphs"
        " (experts: EP 1).",
    )
    bucket_tokens: list[int] = option(
        [], "static, graph: lengths to pad microbatches to; default: sixteenths of max_tokens_per_microbatch.", "tokens"
    )
    graph_memory_gib: float | None = option(
        None, "graph: once graphs hold so much memory, further shapes run uncaptured; default: no limit.", "GiB", gt=0
    )

    @property
    def use_distributed_optimizer(self) -> bool:
        """Whether optimizer states are sharded over DP (ZeRO-1)."""
        return self.zero_stage > 0


@dataclass(frozen=True, kw_only=True)
class ActorConfig(TrainedConfig):
    """The policy in training: its layout, its batches, its optimizer."""

    quantization: Literal["none", "nf4"] = option(
        "none", "nf4 (with lora): the matrices of the layers in four bits (QLoRA); the engine gets them dequantized."
    )
    ppo_mini_batch_size: int | None = option(
        None,
        "Prompts per optimizer step, with rollout.n responses each; default: data.train_batch_size.",
        "prompts",
        ge=1,
    )
    ppo_epochs: int = option(1, "Passes over each rollout batch.", "passes", ge=1)
    router_replay: Literal["off", "engine", "trainer"] = option(
        "off",
        "Experts of a token in log-probs and updates: the router's (off), the rollout engine's (engine, R3), or "
        "the old_logprobs pass's (trainer, R2).",
    )
    router_bias_rate: float = option(
        0.0,
        "Routers with biases: after each update the bias of an expert with more tokens than the mean falls by so "
        "much, others rise (2408.15664); 0: off.",
        ge=0,
        hint="0.001 is usual",
    )
    mtp_lr: float = option(
        0.0,
        "Peak learning rate of the layer behind the last one (MTP), which learns to draft what the policy samples; the "
        "policy is not changed by it. 0: the layer stays as it is.",
        ge=0,
    )


@dataclass(frozen=True, kw_only=True)
class CriticConfig(TrainedConfig):
    """The value model of estimators that need one (gae), in its own layout, with the actor's minibatches and passes."""

    path: str | None = option(
        None, "Initial weights in HF format, with their score head if any; default: model.path, a value head of zeros."
    )
    lr: float = option(1e-5, "Peak learning rate.", ge=0)
    value_clip: float | None = option(
        0.5, "Largest distance of new values from old ones in the value loss; null: no clipping.", gt=0
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(SamplingSettings):
    """Generation: engine, its servers, layout and memory, and sampling."""

    engine: str = option(
        "vllm",
        "vllm, hf (transformers; slow, for debugging and parity), megatron (the actor's own modules; slow, exact, "
        "for every family), or a server: vllm_server, sglang, openai.",
    )
    server: ServerConfig = ServerConfig()
    tensor_model_parallel_size: int = option(1, "Ranks per engine or part (not with engine megatron).", "ranks", ge=1)
    expert_parallel_size: int = option(1, "vLLM: 1, or all ranks of an engine, each with whole experts.", "ranks", ge=1)
    data_parallel_size: int = option(1, "vLLM: parts of an engine, which share only its experts.", "parts", ge=1)
    n: int = option(8, "Responses per prompt (group size).", "responses", ge=1)
    bitwise: bool = option(
        False,
        "Engine and trainer compute the same bits of every log-prob, or the run ends (CPU, float32, the same TP of"
        " 1 or 2 in both).",
    )
    dispatch: Literal["auto", "groups", "samples"] = option(
        "auto",
        "What an engine gets: whole groups, or samples of each group, which is evener. auto: groups with one "
        "engine or with prompts much longer than responses, else samples.",
    )
    max_num_seqs: int = option(256, "Sequences that an engine, or a part of it, decodes at once.", "sequences", ge=1)
    kv_cache_gib: float | None = option(
        None,
        "KV cache of an engine rank; default: gpu_memory_utilization, on CPU by max_num_seqs (at most 1); engine "
        "megatron: the smaller of the two.",
        "GiB",
        gt=0,
    )
    gpu_memory_utilization: float = option(
        0.5, "Share of GPU memory that the engine may use (GPU only).", gt=0, le=1, hint="use 0.5"
    )
    enforce_eager: bool = option(True, "Run the engine without torch.compile and CUDA graphs; on CPU always so.")
    model_runner: Literal["auto", "v1", "v2"] = option(
        "auto", "vLLM on a GPU; they draw other tokens. auto: v2, or v1 for what needs it (docs/performance.md)."
    )
    latent_cache: bool = option(
        True, "vLLM in ranks: cache latents (MLA), of 512 + 64 channels and on GPUs in bfloat16; false: whole heads."
    )
    draft_tokens: int = option(
        0, "vLLM in ranks: tokens per step that the model's MTP layer drafts; 0: none.", "tokens", ge=0, le=16
    )
    quantization: Literal["none", "int8", "fp8"] = option(
        "none", "vLLM keeps the matrices of attention and MLPs in eight bits (docs/sampling.md)."
    )
    engine_options: dict[str, Any] = option({}, "vLLM: further EngineArgs; some are refused (docs/sampling.md).")
    silent_seconds: float | None = option(
        None,
        "An engine outside of the ranks that gives no sign of life for so long is lost; default: 600 for a server, "
        "also while it starts, 15 with schedule.elastic.",
        "seconds",
        gt=0,
    )

    @property
    def ranks_per_engine(self) -> int:
        """Ranks of an engine with weights of its own."""
        return self.tensor_model_parallel_size * self.data_parallel_size

    def supports(self, ability: str) -> bool:
        """Whether the engine has one of `extension.registry.ABILITIES`; UserError for an unknown engine."""
        return ENGINES[self.engine].has(ability)


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen model of the KL term; built only when algorithm.kl_coef > 0. Layout and token budget: the actor's."""

    path: str | None = option(None, "Directory of the reference in HF format; default: model.path.")
    offload: bool = option(False, "Keep the reference's weights on the host except while it scores.")
    reset_every: int | None = option(None, "Copy the policy to it every N steps (ProRL); null: never.", "steps", ge=1)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(LayoutConfig):
    """A frozen language model that the policy learns from (algorithm.distillation), under a name of yours."""

    path: str = option(MISSING, "Directory of the teacher in HF format; its tokenizer has the policy's tokens.")
    offload: bool = option(False, "Keep its weights on the host except while it scores.")
    weight: float = option(1.0, "Its share among several teachers of a response.", gt=0, hint="leave it out")
    values: list[str] = option([], "Values of algorithm.distillation.choose_by that choose it; default: its name.")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Scoring of responses: a weighted sum of sources, each logged by its name."""

    function: str = option(
        "math",
        "A rule: math (equal to the truth, with a marked answer), math_any (any last answer counts), exact, format, or "
        "by_data_source (verl's for public sets); or your path.py:name, with verl's signature (data_source, "
        "solution_str, ground_truth, extra_info); or the URL of a service that batches of responses are posted to.",
    )
    components: list[str] = option(
        [],
        "Weighted sum of sources, each 'WEIGHT SOURCE': a rule, path.py:name, an http(s) URL, or 'model'; with a "
        "schedule (1@0,0.2@100 SOURCE) and thresholds (docs/rewards.md); overrules function.",
    )
    workers: int = option(0, "Processes per rank for rules and functions; 0: in the rank itself.", "processes", ge=0)
    worker_secrets: list[str] = option([], "Variables that workers get although their names say key, token or secret.")
    timeout_seconds: float = option(
        60.0,
        "Time limit of a function for one response, which ends the run (needs workers), and of a request to a service, "
        "its answer included.",
        "seconds",
        gt=0,
    )
    service_batch_size: int = option(64, "Responses per request.", "responses", ge=1)
    service_concurrency: int = option(4, "Requests of one rank at a time.", "requests", ge=1)
    service_retries: int = option(4, "Attempts after a failed request, with exponential backoff.", "attempts", ge=0)
    service_on_failure: Literal["stop", "fallback"] = option(
        "stop",
        "When all attempts failed: end the run, or continue without learning from the response, whose reward is "
        "logged as 0 (fallback).",
    )
    overlong_buffer_length: int = option(
        0,
        "DAPO's soft penalty: responses in the last N tokens before max_response_length lose reward linearly; 0: off.",
        "tokens",
        ge=0,
    )
    overlong_penalty: float = option(1.0, "Largest reward lost by the soft overlong penalty.", ge=0)

    @property
    def models(self) -> list[str]:
        """Reward models in `components`: model, model:NAME."""
        return [target for target in self.targets if target.partition(":")[0] == REWARD_MODEL]

    @property
    def targets(self) -> list[str]:
        """Sources in `components`, without their weights and conditions."""
        texts = [component.strip().partition(" ")[2] for component in self.components]
        return [text.partition(" if ")[0].partition(" >= ")[0].strip() for text in texts]


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(LayoutConfig):
    """An HF sequence-classification model with one label on megatron-core, the reward source 'model'."""

    path: str | None = option(None, "Directory of the reward model in HF format; null: none is built.")
    offload: bool = option(False, "Keep its weights on the host except while it scores.")
    step_separator: str | None = option(None, "End of a step; the reward is the lowest step's score; null: one step.")
    further: dict[str, Any] = option(
        {}, "Further reward models, the sources 'model:NAME': NAME -> path, and settings that differ from this section."
    )

    @property
    def roles(self) -> dict[str, str]:
        """Names of the reward models' roles by their sources in `reward.components`."""
        first = {} if self.path is None else {REWARD_MODEL: "reward_model"}
        return first | {f"{REWARD_MODEL}:{name}": f"reward_model.further.{name}" for name in self.further}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The main loop: its length, validation, saving, seeds and debugging."""

    total_steps: int | None = option(
        None, "Steps of the main loop; default: from total_epochs. 0: validate once and train nothing.", "steps", ge=0
    )
    total_epochs: int = option(1, "Passes over the prompts, when total_steps is not given.", "passes", ge=1)
    test_freq: int = option(
        0, "Validate every N steps (0: only before and after training).", "steps", ge=0, hint="0 switches it off"
    )
    val_before_train: bool = option(True, "Validate before the first step.")
    critic_warmup: int = option(
        0, "Steps in which only the critic is trained; the actor's decay is laid over the others.", "steps", ge=0
    )
    best_metric: str | None = option(
        None,
        "Metric whose best checkpoint is kept as checkpoints/best, e.g. validation/<set>/accuracy; higher is better.",
    )
    save_freq: int | None = option(
        0,
        "Save a permanent checkpoint every N steps and after the last one (0: only then; null: not even then).",
        "steps",
        ge=0,
        hint="null saves none",
    )
    max_failed_share: float = option(
        0.5,
        "End the run when a larger share of a step's episodes, or of a validation set's, has failed, or a reward "
        "service on a larger share of the responses (reward.service_on_failure fallback); 1: never.",
        ge=0,
        le=1,
    )
    max_silent_steps: int | None = option(
        None,
        "End the run after N steps in a row in which the responses to each prompt have equal rewards; null: never.",
        "steps",
        ge=1,
    )
    seed: int = option(1, "Seed of data order, sampling and initialization.", ge=0)
    run_dir: str | None = option(None, "Run directory; default: checkpoints/runs/<recipe>-<time>.")
    log_rollouts: int = option(
        1,
        "Groups of each step written to rollouts/, and the best, worst and longest rollout (0: none, -1: all).",
        "groups",
        ge=-1,
        hint="-1 writes all of them",
    )
    profile_steps: list[int] = option(
        [], "Steps whose torch profiler trace and memory snapshot are written to <run_dir>/profile.", "steps"
    )
    profile_ranks: list[int] = option([0], "Ranks that write them.", "ranks")
    capture_step: int | None = option(
        None,
        "Step written to <run_dir>/capsules/step_<N> for tools/replay_step.py; as large as a checkpoint.",
        "step",
        ge=1,
    )
    collective_timeout: float = option(
        1800.0, "A collective that waits longer ends the run, with a report of who waits for whom.", "seconds", gt=0
    )
    check_memory: bool = option(True, "On GPUs: refuse a run that is planned not to fit (tools/plan.py).")


@dataclass(frozen=True)
class Flags:
    """Flags of the command line for one start, which no file contains."""

    explain: bool = False  # print at the start how sizes follow from each other and which kernels are in use
    debug_rank: int | None = None  # rank that waits for a debugger; trainer.collective_timeout becomes a week


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, one YAML recipe."""

    model: ModelConfig
    data: DataConfig
    actor: ActorConfig
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    agents: AgentsConfig = dataclasses.field(default_factory=AgentsConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    hybrid: HybridConfig = dataclasses.field(default_factory=HybridConfig)
    layout: AutoLayoutConfig = dataclasses.field(default_factory=AutoLayoutConfig)
    placement: PlacementConfig = dataclasses.field(default_factory=PlacementConfig)
    reference: ReferenceConfig = dataclasses.field(default_factory=ReferenceConfig)
    teachers: dict[str, TeacherConfig] = dataclasses.field(default_factory=dict)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = dataclasses.field(default_factory=RewardModelConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    observability: ObservabilityConfig = dataclasses.field(default_factory=ObservabilityConfig)
    flags: Flags = Flags()

    def share_settings(self) -> RunConfig:
        """Return the config in which critic and teachers have the actor's values of the settings `ACTOR_DECIDES`."""
        changes: dict[str, dict[str, Any]] = {"reward_model": {"zero_shard_size": self.actor.zero_shard_size}}
        for name in ("critic", *(f"teachers.{teacher}" for teacher in self.teachers)):
            section = self.section(name)
            changes[name] = {leaf: getattr(self.actor, leaf) for leaf in ACTOR_DECIDES if hasattr(section, leaf)}
        return self.with_sections(changes)

    @cached_property
    def by_source(self) -> dict[str, RunConfig]:
        """Configs of the sources of prompts by name; without `data.sources`, this config by an empty name."""
        if not self.data.sources:
            return {"": self}
        from megatron_rl.config.source_settings import split_sources

        return split_sources(self)

    @cached_property
    def has_episodes(self) -> bool:
        """Whether a source of prompts has episodes of several turns."""
        return any(one.agents.has_episodes for one in self.by_source.values())

    @cached_property
    def is_truncated(self) -> bool:
        """Whether rollouts of a source of prompts are drawn from a part of the vocabulary."""
        return any(one.rollout.is_truncated for one in self.by_source.values())

    def section(self, name: str) -> Any:
        """Return a section by its name, also `teachers.NAME`, `reward_model.further.NAME` and `data.sources.NAME`."""
        first, _, inner = name.partition(".")
        section = getattr(self, first)
        if first == "data" and inner:
            return section.sources[inner.partition(".")[2]]
        if first == "reward_model" and inner:
            given = {"further": {}, **section.further[inner.partition(".")[2]]}
            if given.get("tensor_model_parallel_size") == 1:
                given.setdefault("sequence_parallel", False)
            return replace(section, **given)
        return section[inner] if inner else section

    def with_sections(self, changes: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """Return the config with other settings: section -> name in the section -> value."""
        changed = {name: replace(self.section(name), **values) for name, values in changes.items()}
        teachers = {name: changed.pop(f"teachers.{name}", teacher) for name, teacher in self.teachers.items()}
        return replace(self, **changed, teachers=teachers)
