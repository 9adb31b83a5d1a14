# SPDX-License-Identifier: Apache-2.0
"""Declaration of a setting, and the sections besides models: data, sampling, agents, servers, logs, ranks of roles."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from megatron_rl.types import UserError

MISSING = dataclasses.MISSING


def option(default: Any, doc: str, unit: str = "", **bounds: Any) -> Any:
    """Declare one setting.

    Args:
        default: `MISSING` if the user must give a value.
        doc: one sentence for `--help`.
        unit: "tokens", "prompts", "seconds", ...
        bounds: `ge`, `gt`, `le`, `lt`: limits of the value; optionally `wrong` and `hint`, which replace the fault and
            the remedy in the error about a value outside the limits.
    """
    metadata = {"doc": doc, "unit": unit, "bounds": bounds}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA, 2106.09685): they are trained, and the model stays frozen."""

    rank: int = option(0, "Rank of the adapters; 0: the model itself is trained.", ge=0)
    alpha: float | None = option(
        None,
        "Adapters are scaled by alpha / rank; default: twice the rank. rsLoRA (2312.03732): alpha times sqrt(rank).",
        gt=0,
    )
    target_modules: list[str] = option(
        [ALL_LINEAR],
        "Matrices with adapters, in PEFT's words: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj "
        "(Mixtral: w1, w3, w2; of every expert); all-linear: all, in a mixture of experts the first four.",
    )
    path: str | None = option(None, "Adapters to start from, as PEFT saves them; default: A random, B zero.")

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Engines in separate processes, called over HTTP."""

    endpoints: list[str] = option(
        [],
        "Running servers, such as http://host:8000, one per engine; default: the first rank of each engine starts "
        "and watches one (vllm_server, sglang).",
    )
    directory: str | None = option(
        None, "Directory of the weights for servers, on all nodes; default: /dev/shm, for servers started here."
    )
    on_update: str | None = option(
        None, "Engine openai: URL to post to, or command, that makes the server load new weights from {directory}."
    )
    python: str | None = option(None, "Interpreter of the servers; default: this one. sglang needs its own.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Staleness of samples, and times of weight updates (docs/schedules.md)."""

    max_staleness: int = option(
        0,
        "How many steps older than those that learn from it the weights may be that a response begins with. 0: a "
        "step generates its samples first. k: prompt i begins once i < (steps done + 1 + k) * "
        "data.train_batch_size; unfinished responses are carried over.",
        "steps",
        ge=0,
    )
    order: Literal["stream", "whole"] = option(
        "stream",
        "max_staleness > 0: a step learns from the next prompts of the data order (stream), or from the first "
        "whose responses are complete (whole).",
    )
    updates: Literal["drain", "in_flight"] = option(
        "in_flight",
        "max_staleness > 0: responses unfinished at the end of a step's generation continue with the next weights "
        "(in_flight), or are finished first (drain).",
    )
    steps_per_update: int | None = option(
        None,
        "updates in_flight: engines interrupt together after a multiple of N decode steps, reproducible bit "
        "by bit; null: as soon as the step has its samples.",
        "steps",
        ge=1,
    )
    replay: str | None = option(
        None,
        "Run directory with these settings and no steps_per_update, whose interruptions "
        "(schedule/engine_<i>.jsonl) are repeated.",
    )
    elastic: bool = option(
        False,
        "Engines are processes outside the job, which join and leave while it runs (launch/engine.sh); the rank "
        "of placement.rollout hands them requests and weights.",
    )


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Where an episode's commands run: one sandbox an episode, with limits (docs/agents.md#sandboxes)."""

    kind: str | None = option(
        None, "local (namespaces of this machine), docker, podman, or a service's URL; null: none."
    )
    image: str | None = option(None, "Image of the containers, with sh and timeout.")
    seconds: float = option(30.0, "Limit of a command.", "seconds", gt=0)
    memory_mib: int = option(1024, "Memory of all processes.", "MiB", ge=16)
    processes: int = option(64, "Processes and threads.", "processes", ge=1)
    disk_mib: int = option(256, "All files of a sandbox, and the output of a command.", "MiB", ge=1)
    network: bool = option(False, "Give the sandbox the machine's network, with its loopback.")
    warm: int = option(2, "Sandboxes that are started ahead, for each engine.", "sandboxes", ge=0)


@dataclass(frozen=True, kw_only=True)
class AgentsConfig:
    """Episodes: an environment answers the policy's replies until it ends the episode."""

    environment: str | None = option(
        None,
        "calculator, textarena:GAME, gem:GAME, reasoning-gym:NAME, verifiers:TASKSET, openenv:URL,"
        " harbor:DIRECTORY, or your class, path.py:Name; null: one response a prompt.",
    )
    tools: list[str] = option(
        [],
        "Instead of an environment, tools that replies call: calculator, python, bash (in a sandbox),"
        " search:CORPUS.jsonl, mcp:COMMAND, or your path.py:function.",
    )
    tool_format: Literal["auto", "hermes", "qwen3_coder", "glm", "deepseek", "mistral", "llama3"] = option(
        "auto", "How replies write tool calls; auto: as the chat template writes earlier calls."
    )
    program: str | None = option(
        None,
        "Instead of an environment, your agent(task, base_url) as path.py:function or module:function, which talks"
        " to the policy by any OpenAI client.",
    )
    max_turns: int = option(8, "Replies of an episode; data.max_response_length bounds its tokens.", "replies", ge=1)
    turn_timeout_seconds: float = option(
        60.0,
        "Time of an environment or a program for an answer, the first with its set-up; then it is killed.",
        "seconds",
        gt=0,
    )
    episodes_in_flight: int | None = option(None, "Open episodes per engine; default: all of a step.", "episodes", ge=1)
    history: Literal["keep", "template"] = option(
        "keep",
        "Where the chat template renders earlier replies differently than they were sampled: keep the tokens, or "
        "follow the template, which forks the episode.",
    )

    sandbox: SandboxConfig = option(SandboxConfig(), "Where commands of episodes run, with limits (docs/agents.md).")

    @cached_property
    def has_episodes(self) -> bool:
        """Whether an environment, tools or a program make episodes of several turns."""
        return self.environment is not None or self.program is not None or bool(self.tools)

    @property
    def program_or_taskset(self) -> str | None:
        """Return `program`, or an environment that is a program, too: it asks for its replies."""
        is_taskset = self.environment is not None and self.environment.startswith("verifiers:")
        return self.environment if is_taskset else self.program


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Training checkpoints (written every trainer.save_freq steps) and resuming."""

    resume: str = option(
        "auto",
        "auto: from the newest valid checkpoint in trainer.run_dir, if any; must: end the run if there is none; "
        "never: begin a new run; or a checkpoint directory to start from.",
    )
    contents: list[Literal["optimizer", "huggingface"]] = option(
        ["optimizer", "huggingface"],
        "Beside the weights: optimizer: all that resuming needs; huggingface: the policy in HF format, "
        "step_<N>/huggingface (not on a signal).",
    )
    async_save: bool = option(True, "Write in the background while training continues (one copy in host memory).")
    save_every_minutes: float | None = option(
        30.0,
        "Save also so long after the last save, without the HF format, until the next one; null: off.",
        "minutes",
        gt=0,
    )
    keep_last: int | None = option(None, "Keep only the newest N checkpoints; null: all.", "checkpoints", ge=1)
    allow_changes: list[
        Literal["model", "critic", "reference", "reward_model", "teachers", "train_files", "reward", "plugins"]
    ] = option([], "Inputs that may differ on resuming; an error there says which name it takes.")


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Thresholds of the alarms on a run's curves, in the setting `observability.health`; null turns an alarm off."""

    window: int = option(10, "Steps whose mean is looked at.", "steps", ge=1)
    entropy_floor: float | None = option(0.1, "Alarm when the entropy is below this share of the first steps'.", ge=0)
    length_growth: float | None = option(
        1.5, "Alarm when responses are longer by this factor than four windows before, without more reward.", ge=0
    )
    mismatch_growth: float | None = option(
        10.0, "Alarm when engine and trainer differ by this factor more than in the first steps (and 1e-3 nats).", ge=0
    )
    gradient_growth: float | None = option(
        10.0, "Alarm when the gradient norm is larger by this factor than four windows before.", ge=0
    )
    clip_limit: float | None = option(0.2, "Alarm when a larger share of the tokens is clipped.", ge=0)
    truncated_limit: float | None = option(0.5, "Alarm when a larger share of the responses is truncated.", ge=0)
    uninformative_limit: float | None = option(0.9, "Alarm when a larger share of the groups has equal rewards.", ge=0)
    restating_limit: float | None = option(
        0.1, "Alarm when a larger share of the responses is rewarded for repeating a part of the prompt.", ge=0
    )
    failed_limit: float | None = option(
        0.1, "Alarm when this share of the episodes has failed, or a reward service on this share of responses.", ge=0
    )
    sample_size_floor: float | None = option(
        0.5, "Alarm when importance weights leave a smaller effective sample size, as a share.", ge=0
    )
    explained_variance_floor: float | None = option(
        0.0, "Alarm when the critic explains less of the returns' variance, after two windows."
    )
    dead_experts_limit: float | None = option(
        1.0, "Alarm when more experts, over all layers, get no token of an update.", "experts", ge=0
    )
    engines_floor: float | None = option(
        1.0, "Alarm when, after a loss, a smaller share of the most elastic engines so far serves for a window.", ge=0
    )
    components: bool = option(True, "Alarm when one component of the reward rises while another falls.")


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Logging: trackers, console, status page, alarms."""

    trackers: list[Literal["tensorboard", "wandb", "wandb-offline", "mlflow", "trackio", "swanlab", "otlp"]] = option(
        ["tensorboard"],
        "Trackers that get the metrics: tensorboard writes <run_dir>/tensorboard, wandb-offline <run_dir>/wandb; all "
        "but the first need their package (docs/watching.md#trackers). otlp: spans of steps, phases, requests, "
        "episodes and tools go to OpenTelemetry (docs/watching.md#traces).",
    )
    histograms_every: int = option(
        10,
        "TensorBoard histograms (lengths, rewards, advantages, log-prob gap) and sample texts in step 1 and every "
        "N steps (0: never).",
        "steps",
        ge=0,
    )
    wandb_project: str = option("megatron_rl", "Project in Weights & Biases and in the trackers.")
    wandb_name: str | None = option(None, "Name of the run there; default: that of the run directory.")
    trace_steps: list[int] = option(
        [], "Steps whose spans, and profile if there is one, are written to <run_dir>/traces/step_<N>.json.", "steps"
    )
    status_port: int | str | None = option(
        None,
        "Port of a read-only web page about the run (0: any free port, printed), for this machine; with an address, as "
        "0.0.0.0:8000, for others; null: off.",
    )
    health: HealthConfig = option(HealthConfig(), "Window and limits of alarms (docs/health.md); null: no alarm.")

    @property
    def status_address(self) -> tuple[str, int]:
        """Host and port of the status page."""
        host, _, port = str(self.status_port).rpartition(":")
        return host or "127.0.0.1", int(port)


LONGEST_PERIOD = 100_000  # prompts after which a mixture of files repeats


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Choice of training prompts by earlier outcomes (docs/curriculum.md)."""

    kind: str = option(
        "off",
        "off; window: prompts with a pass rate in the window; prioritized: with chances by their pass rate p, 4 p "
        "(1 - p); levels: of a level that rises; or your path.py:name, a subclass of data.curriculum.Curriculum.",
    )
    window: list[float] = option(
        [0.1, 0.9], "Lowest and highest pass rate of window; levels: below and from which the level falls and rises."
    )
    explore: float = option(0.1, "Least chance of any prompt (levels: of easier ones).", "share", ge=0, le=1)
    column: str | None = option(
        None, "Prompts with the same value of this column share a pass rate; default: each has its own (levels: level)."
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts: files and their columns, batch size, lengths, chat template."""

    sources: dict[str, Any] = option(
        {}, "A mixture of sources of prompts (docs/recipes.md), instead of train_files: a list, or by name."
    )
    train_files: list[str] = option(
        MISSING,
        "JSONL or parquet files with training prompts, reasoning-gym:NAME, "
        "hub:OWNER/NAME[/CONFIG][@REVISION]:SPLIT, or your path.py:name that returns rows.",
    )
    weights: list[float] | None = option(
        None,
        "Shares of the train files in the prompts, on any scale, each file with its own epochs; default: each "
        "prompt once per epoch.",
    )
    validation_files: list[str] = option(
        [], "JSONL or parquet; a set has its file's name (gsm8k/test.parquet: test, or gsm8k-test beside another test)."
    )
    train_batch_size: int = option(MISSING, "Prompts per rollout batch (one step of the main loop).", "prompts", ge=1)
    validation_limit: int | None = option(None, "Use the first N validation prompts; default: all.", "prompts", ge=1)
    max_prompt_length: int = option(1024, "Longest prompt.", "tokens", ge=1)
    max_response_length: int = option(1024, "Longest response.", "tokens", ge=1)
    overlong_prompts: Literal["error", "truncate", "truncate_right", "truncate_middle", "drop"] = option(
        "error",
        "Prompts longer than max_prompt_length: refuse, keep the end (truncate), the beginning (truncate_right) or"
        " both (truncate_middle), or drop. Chats lose messages, never the template.",
    )
    system_prompt: str | None = option(
        None, "System message of chats without one; plain text prompts are refused with it."
    )
    apply_chat_template_kwargs: dict[str, Any] = option(
        {}, "Options of the chat template, such as enable_thinking; a row's column chat_template_kwargs overrides them."
    )
    special_tokens_in_contents: bool = option(
        False,
        "Read the text of special tokens in messages, tools and their results as these tokens; default: as text. Plain "
        "text prompts may have them anyway.",
    )
    prompt_key: str = option(
        "prompt",
        "Column with the prompt: text, or a list of chat messages, also as JSON text; SFT: also a conversation, each "
        "reply of which is learned.",
    )
    answer_key: str = option("answer", "Column with the ground truth in the plain schema; SFT: the response to learn.")
    shuffle: bool | str = option(
        True, "Shuffle the prompts of each epoch (by trainer.seed); or your path.py:name, (prompts, epoch) -> indices."
    )
    curriculum: CurriculumConfig = CurriculumConfig()


def reduce_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the proportion of positive weights, taken as decimals: [0.5, 1.5] -> [1, 3]."""
    shares = [Fraction(repr(weight)) for weight in weights]
    unit = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * unit) for share in shares]
    return [share // math.gcd(*whole) for share in whole]


ALL_SETS = "all"  # stands for every validation set in `rollout.validation_sets`


@dataclass(frozen=True)
class ValidationSampling:
    """Sampling of one validation set."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    thinking_budget: int | None


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling of responses (docs/sampling.md)."""

    temperature: float = option(
        1.0,
        "Sampling temperature; also scales the logits in training.",
        gt=0,
        hint="greedy sampling gives every response of a group the same reward; use 1.0",
    )
    top_p: float = option(
        1.0,
        "Nucleus sampling; training scores the same sets.",
        gt=0,
        le=1,
        wrong="is no probability",
        hint="1.0 switches it off",
    )
    top_k: int = option(-1, "Draw from the top_k likeliest tokens; -1: all. Training scores the same sets.", "tokens")
    min_p: float = option(
        0.0,
        "Draw from tokens at least this fraction as likely as the likeliest; training scores the same sets.",
        ge=0,
        lt=1,
        wrong="is no fraction",
        hint="0 switches it off",
    )
    min_tokens: int = option(
        0,
        "Neither end-of-response tokens nor rollout.stop end a response before this length; training scores the same"
        " sets.",
        "tokens",
    )
    thinking_budget: int | None = option(
        None,
        "End a thought at this token of the response with rollout.thinking_end; null: never.",
        "tokens",
        gt=0,
        wrong="is no number of tokens",
        hint="null: no budget",
    )
    thinking_end: str = option(
        "\n</think>\n\n", "Text that ends a thought at thinking_budget, closing tag included; not learned from."
    )
    max_kept_tokens: int = option(
        1024,
        "top_p, min_p, min_tokens: most tokens to draw from, the likeliest ones (sampling/kept_at_limit).",
        "tokens",
        ge=1,
    )
    stop: list[int | str] = option(
        [], "Texts and token ids that end a response and stay in it; rewards read what is before such a text."
    )
    validation_temperature: float = option(0.0, "Temperature of validation responses (0: greedy).", ge=0)
    validation_n: int = option(1, "Responses per validation prompt; from 2: mean@k, pass@k, maj@k.", "responses", ge=1)
    validation_sets: dict[str, Any] = option(
        {}, "Name of a set, or all -> any of n, temperature, top_p, top_k, thinking_budget."
    )

    @cached_property
    def is_truncated(self) -> bool:
        """Whether rollouts are drawn from a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.min_tokens > 0

    @property
    def is_ever_truncated(self) -> bool:
        """Whether rollouts or validation responses are drawn from a part of the vocabulary."""
        sets = (self.for_validation(name) for name in (*self.validation_sets, ALL_SETS))
        return self.is_truncated or any(one.top_p < 1.0 or one.top_k > 0 for one in sets)

    def for_validation(self, name: str) -> ValidationSampling:
        """Return the sampling of a validation set: common settings, overridden by the set's own."""
        common = ValidationSampling(self.validation_n, self.validation_temperature, 1.0, -1, self.thinking_budget)
        return replace(common, **self.validation_sets.get(ALL_SETS, {}) | self.validation_sets.get(name, {}))


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """The switch between training and rollout: transfer of weights to the engine, and its verification."""

    transport: Literal["auto", "pull", "buckets"] = option(
        "auto", "pull: copy out of the memory of ranks on the same host; buckets: messages; auto: pull where possible."
    )
    bucket_bytes: int = option(32 << 20, "Size of a bucket; staging memory is at most two of them.", "bytes", gt=0)
    lora: Literal["merge", "adapter"] = option(
        "merge", "How adapters reach the engine at a switch: merge: summed with the model; adapter (vllm): alone."
    )
    verify: Literal["off", "sample", "full"] = option(
        "sample", "Compare digests of training and rollout weights after each switch: none, a rotating part, or all."
    )


@dataclass(frozen=True, kw_only=True)
class AutoLayoutConfig:
    """Choice of the layouts; `layout: auto` is short for `layout: {mode: auto}` (docs/planning.md)."""

    mode: str = option(
        "given",
        "given: by the sections; auto: the planner's fastest that fits; auto LENGTHS: with the schedule and placement "
        "that suit such responses (tools/plan.py --lengths).",
    )

    @property
    def lengths(self) -> str | None:
        """Lengths of responses by which schedule and placement are chosen, if they are."""
        return self.mode.partition(" ")[2].strip() or None


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Ranks of the roles. Roles on different ranks work at the same time."""

    actor: str | None = option(None, "Ranks of the actor, from rank 0 on: 0-3, or a share, 1/4; default: all.")
    critic: str | None = option(None, "Ranks of the critic, such as 4-7 or 1/2; default: all.")
    reference: str | None = option(None, "Ranks of the reference, which has the actor's layout; default: all.")
    reward_model: str | None = option(None, "Ranks of the reward models; default: all.")
    teachers: dict[str, Any] = option({}, "Ranks of teachers by name: math: 4-7 or math: 1/2; default: all.")
    rollout: str | None = option(None, "Ranks of the rollout engines, such as 2-7 or 3/4; default: all.")

    def ranks_of(self, role: str, world_size: int) -> range:
        """Return the ranks of a role.

        Raises:
            UserError: a role has no range, a range exceeds the job, or a share is no whole number of ranks.
        """
        return self._resolve(world_size).get(role.partition(".further.")[0], range(world_size))

    def _resolve(self, world_size: int) -> dict[str, range]:
        """Return the ranks of all roles in `placed`, by role."""
        found, end = {}, 0  # a share begins after the role named before it, or at rank 0 if too few ranks are left
        for role in self.placed:
            text = self.text_of(role).strip()
            if "/" in text:
                count = _count_share(role, text, world_size)
                first = end if end + count <= world_size else 0
                found[role] = range(first, first + count)
            else:
                found[role] = _read_range(role, text, world_size)
            end = found[role].stop
        return found

    @property
    def placed(self) -> list[str]:
        """Roles with explicit ranks; a teacher is `teachers.NAME`."""
        found: list[str] = []
        for item in fields(self):
            if item.name == "teachers":
                found += [f"teachers.{name}" for name in self.teachers]
            elif getattr(self, item.name) is not None:
                found.append(item.name)
        return found

    def text_of(self, role: str) -> str:
        """Return a placed role's ranks as the config gives them, such as "0-3" or "1/2"."""
        section, _, teacher = role.partition(".")
        return str(self.teachers[teacher] if teacher else getattr(self, section))

    def describe(self, world_size: int) -> str:
        """Return a line like `actor on 0-1, critic on 2-3, others on all ranks`; empty if no role is placed."""
        if not self.placed:
            return ""
        named = (f"{role} on {format_ranks(ranks)}" for role, ranks in self._resolve(world_size).items())
        return ", ".join([*named, "others on all ranks"])


def format_ranks(ranks: range) -> str:
    """Format ranks as `2-3`, or `2` for a single one."""
    return f"{ranks.start}-{ranks.stop - 1}" if len(ranks) > 1 else f"{ranks.start}"


def _read_range(role: str, text: str, world_size: int) -> range:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < world_size:
        raise UserError(
            f"placement.{role} = {text!r} in a job of {world_size} rank(s)",
            source=f"placement.{role}",
            expected=f"the first and the last of its ranks, such as 0-{world_size - 1}, or a share such as 1/2",
            hint="ranks count from 0; start more of them (--nproc-per-node), or name others",
        )
    return range(first, last + 1)


def _count_share(role: str, text: str, world_size: int) -> int:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, whole = (int(found[1]), int(found[2])) if found else (0, 1)
    if not 0 < part <= whole:
        raise UserError(
            f"placement.{role} = {text!r} is no share of the ranks",
            source=f"placement.{role}",
            expected="a fraction such as 1/4, more than 0 and at most 1",
            hint="write it with two whole numbers",
        )
    count, rest = divmod(world_size * part, whole)
    if rest:
        raise UserError(
            f"placement.{role} = {text!r} of {world_size} rank(s) is no whole number of ranks",
            source=f"placement.{role}",
            expected=f"a number of ranks that {whole // math.gcd(part, whole)} divides",
            hint="start another number of ranks (--nproc-per-node), or choose another share",
        )
    return count
