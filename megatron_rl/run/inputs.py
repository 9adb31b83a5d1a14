# SPDX-License-Identifier: Apache-2.0
"""Read and check everything a run needs before it starts: models, tokenizer, prompts, rewards, plugins, passed objects.

The start and the dry run call the same functions, on every rank alike and before any process group exists.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithms.catalog import LOSS_AGGREGATIONS, POLICY_LOSSES, AdvantageEstimator, PolicyLoss
from megatron_rl.checkpoint.files import find_model_files
from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import REWARD_MODEL, RunConfig
from megatron_rl.config.sections import ALL_SETS, DataConfig
from megatron_rl.data.prompts import PromptSet, load_prompts, name_files
from megatron_rl.data.tokenizer import Tokenizer, check_stop_strings, find_stop_tokens
from megatron_rl.extension.registry import HUB
from megatron_rl.rewards.plan import build_reward_plan, check_truths
from megatron_rl.rewards.scoring import RewardFunction, RewardPlan, Rule
from megatron_rl.run.models import HAS_TORCH, RoleInputs, note_models, read_models, read_rl_models, resolve, resolve_sft
from megatron_rl.types import Rollout, UserError

if TYPE_CHECKING:  # a dry run imports no torch
    from megatron_rl.algorithms.catalog import AdvantageEstimator, PolicyLoss, RegisteredEstimator
    from megatron_rl.config.sft_plan import SftPlan
    from megatron_rl.data.sft_examples import SftSet
    from megatron_rl.engines.endings import StopStrings, Thoughts
    from megatron_rl.engines.protocol import EngineMaker
    from megatron_rl.extension.registry import RegisteredEngine
    from megatron_rl.planning.cluster import Cluster
    from megatron_rl.training.setup import RoleSetup


@dataclass(frozen=True)
class Parts:
    """User objects; `None` leaves the choice to the config."""

    # A function with verl's signature or TRL's `(prompts, completions, **columns)`, also async, called in the rank; a
    # source of `reward.components` by name; a reward model by its path; or a list of these.
    reward: RewardFunction | str | Sequence[RewardFunction | str] | None = None
    weights: Sequence[float] | None = None  # of several rewards; default: 1 each
    # `(AdvantageInputs, AlgorithmConfig)` -> advantages per token; a `RegisteredEstimator` if it needs a critic's
    # values or greedy responses.
    adv_estimator: AdvantageEstimator | RegisteredEstimator | None = None
    # `(PolicyLossInputs, AlgorithmConfig)` -> per token, a loss and whether it was clipped.
    policy_loss: PolicyLoss | None = None
    # See `EngineMaker` in `engines.protocol`; a `RegisteredEngine` if it supports more than plain sampling.
    engine: EngineMaker | RegisteredEngine | None = None
    # All rollouts of a step -> one score each, called on every rank with the same result; the reward, or added to the
    # sum of `reward.components`.
    reward_model: Callable[[Sequence[Rollout]], Sequence[float]] | None = None
    rollouts: Any = None  # replaces engine, generation and rewards (see `tools.replay.recording.RecordedRollouts`)
    # For `layout.mode` auto: config, roles, cluster and recipe -> the config with a layout, and a line on each choice;
    # `tools.planning.automatic.choose_layout`.
    choose_layout: Callable[[RunConfig, RunSpec, Cluster, Path | None], tuple[RunConfig, list[str]]] | None = None
    # actor, critic, reference: `RoleSetup` -> the role, such as a subclass of `Actor`, `Critic`, `Reference`.
    actor: Callable[[RoleSetup], Any] | None = None
    critic: Callable[[RoleSetup], Any] | None = None
    reference: Callable[[RoleSetup], Any] | None = None


NO_PARTS = Parts()
_NEED_TRUTH = (Rule, type(None))  # rules and services; functions receive `None`
_HUB_NAME = re.compile(r"(?!models/|checkpoints/)[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")  # both are our directories
_DATA_NAME = re.compile(rf"{HUB}.*|[^?]*\.py:\w+")


def localize(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Download what a config names in the Hugging Face hub, and call functions of data; a local path of that name wins.

    Returns:
        The config with local directories for names of models, tokenizers and adapters, and commits or digests in names
        of data; a line on each, which must be the same on every rank.

    Raises:
        UserError: neither the hub nor its cache has it, or a function fails.
    """
    notes = []

    def find(setting: str, name: Any) -> Any:
        is_dataset = setting.startswith("data.")
        is_name = isinstance(name, str) and (_DATA_NAME if is_dataset else _HUB_NAME).fullmatch(name)
        if not is_name or os.path.exists(name):
            return name
        from megatron_rl.data.hub import fetch_model, pin_dataset

        found = pin_dataset(name, setting) if is_dataset else str(fetch_model(name, setting))
        if not setting.startswith("data.sources."):  # data.train_files has the same names
            notes.append(f"{setting}: {name} is {found if is_dataset else f'commit {Path(found).name} of the hub'}")
        return found

    def walk(section: Any, prefix: str) -> Any:
        changed = {}
        for leaf, value in vars(section).items():
            if is_dataclass(value):
                changed[leaf] = walk(value, f"{prefix}{leaf}.")
            elif leaf == "teachers" and not prefix or leaf == "sources":
                changed[leaf] = {name: walk(one, f"{prefix}{leaf}.{name}.") for name, one in value.items()}
            elif leaf == "further":
                paths = {name: find(f"{prefix}{leaf}.{name}.path", given["path"]) for name, given in value.items()}
                changed[leaf] = {name: {**given, "path": paths[name]} for name, given in value.items()}
            elif leaf in ("path", "tokenizer", "shuffle") or (leaf == "kind" and prefix.startswith("data.")):
                changed[leaf] = find(f"{prefix}{leaf}", value)
            elif leaf in ("train_files", "validation_files", "files"):
                changed[leaf] = [find(f"{prefix}{leaf}", file) for file in value]
        return replace(section, **changed)

    return walk(config, ""), notes


def read_prompts(
    config: RunConfig, tokenizer: Tokenizer, reward_plan: RewardPlan
) -> tuple[PromptSet, dict[str, PromptSet], list[str]]:
    """Read and check all prompts; return training prompts, validation prompts by set, and notes, one line each.

    Raises:
        UserError: a file, row or pass rate is wrong or missing, the reward cannot use a ground truth, or a prompt has
            no teacher.
    """
    data, tools, has_episodes = config.data, [], config.agents.has_episodes
    if has_episodes:
        from megatron_rl.agents.program import check_episodes, list_tools

        tools = list_tools(config.agents)
    needs_truth = not reward_plan.sources or any(type(source.function) in _NEED_TRUTH for source in reward_plan.sources)
    load = partial(load_prompts, needs_truth=needs_truth)
    validation = {
        name: load([file], tokenizer, data, limit=data.validation_limit, tools=tools)
        for name, file in name_files(data.validation_files).items()
    }
    train = load(data.train_files, tokenizer, data, tools=tools)
    trained = {prompt.text for prompt in train.prompts}
    notes = [
        f"validation set {name}: each of its {len(part.prompts)} prompts is a training prompt, too"
        for name, part in validation.items()
        if trained.issuperset(prompt.text for prompt in part.prompts)
    ]
    check_mixture(data, train)
    if config.teachers:
        from megatron_rl.data.chosen_order import choose_teachers

        choose_teachers(config, train.prompts)
    if data.curriculum.kind != "off":
        from megatron_rl.data.curriculum import open_curriculum

        open_curriculum(data.curriculum, train.prompts)
    prompts = [prompt for part in (train, *validation.values()) for prompt in part.prompts]
    notes += check_truths(reward_plan, prompts, has_episodes)
    if has_episodes:
        notes += check_episodes(config, tokenizer, train)
    return train, validation, notes


def read_reward(config: RunConfig, parts: Parts) -> RewardPlan:
    """Read the reward of a run, or of one source of prompts (UserError: see `build_reward_plan`)."""
    reward = config.reward
    models = () if reward.components else config.reward_model.roles
    models = models if parts.reward_model is None else [REWARD_MODEL]
    reward = replace(reward, components=[*reward.components, *(f"1.0 {model}" for model in models)])
    functions = {}
    if parts.reward is not None:
        from megatron_rl.rewards.functions import name_rewards

        functions = name_rewards(parts.reward)
    return build_reward_plan(reward, config.data.max_response_length, functions)


def check_mixture(config: DataConfig, train: PromptSet) -> None:
    """Refuse `data.sources` here, `data.weights` if a file has no prompt left, and a `data.shuffle` that fails."""
    if config.sources:
        raise UserError(
            "a mixture of sources in a run without rollouts",
            source="data.sources",
            expected="data.train_files and data.weights",
            hint="name the files there",
        )
    if isinstance(order := train.find_order(config.shuffle), Callable):
        order(0)
    empty = [file for file, size in zip(config.train_files, train.file_sizes, strict=True) if not size]
    if config.weights is not None and empty:
        raise UserError(
            f"no prompt of {', '.join(empty)} is left",
            source="data.weights and data.train_files",
            expected="a prompt in each file that has a weight",
            hint="raise data.max_prompt_length, or leave out the file and its weight",
        )


_NOT_READ = [] if HAS_TORCH else ["not checked: the headers of the weights, because torch is not installed"]


@dataclass(frozen=True)
class RlInputs:
    """Everything an RL run reads before it starts."""

    spec: RunSpec
    roles: dict[str, RoleInputs]  # models by role, in the order of `spec`
    tokenizer: Tokenizer  # of the policy
    stop_token_ids: tuple[int, ...]
    train: PromptSet
    validation: dict[str, PromptSet]
    reward_plans: dict[str, RewardPlan]  # by source of prompts, see `RunConfig.by_source`
    plan: BatchPlan  # batch arithmetic for these prompts
    # A line for each setting without effect, prompt left out by its pass rate, ground truth that a rule cannot read,
    # and image-text model.
    notes: list[str]
    stop: StopStrings | None = None
    thoughts: Thoughts | None = None  # delimiters of reasoning; `None` without a budget for it


@dataclass(frozen=True)
class SftInputs:
    """Everything an SFT run reads before it starts."""

    actor: RoleInputs
    data: SftSet
    plan: SftPlan
    notes: list[str]


def plan_rl(config: RunConfig, world_size: int) -> BatchPlan:
    """Compute the batch arithmetic before prompts are read.

    Raises:
        UserError: a missing plugin or estimator, or sizes that do not divide.
    """
    return BatchPlan.build(config, world_size, resolve(config))


def read_rl_inputs(config: RunConfig, world_size: int, parts: Parts = NO_PARTS) -> RlInputs:
    """Read and check models, prompts, rewards and plugins after `enter_parts` (UserError if any is wrong)."""
    spec = resolve(config)
    check_paths(config)
    POLICY_LOSSES.check(config.algorithm.policy_loss)
    LOSS_AGGREGATIONS.check(config.algorithm.loss_agg_mode)
    BatchPlan.build(config, world_size, spec)  # before files are read, which takes longer
    if config.data.sources:
        from megatron_rl.run.mixed_inputs import read_rewards

        reward_plans = read_rewards(config, partial(read_reward, parts=parts))
    else:
        reward_plans = {"": read_reward(config, parts)}
    roles, tokenizer = read_rl_models(config, spec, world_size)
    noted = note_models(config, roles, config.rollout.engine)
    rollout, files = config.rollout, find_model_files(config.model.path)
    ids, texts = [s for s in rollout.stop if isinstance(s, int)], [s for s in rollout.stop if isinstance(s, str)]
    stop_token_ids = find_stop_tokens(tokenizer, files, roles["actor"].shape.vocab_size, ids)
    stop = _read_stop(texts, tokenizer)
    if config.data.sources:
        from megatron_rl.run.mixed_inputs import read_mixture

        read = partial(read_prompts, tokenizer=tokenizer)
        train, validation, notes = read_mixture(config, lambda name, one: read(one, reward_plan=reward_plans[name]))
    else:
        train, validation, notes = read_prompts(config, tokenizer, reward_plans[""])
    for name in rollout.validation_sets:
        if name not in (ALL_SETS, *validation):
            raise UserError(
                f"there is no validation set {name!r}",
                source="rollout.validation_sets",
                expected=f"of {', '.join(validation) or 'none: data.validation_files is empty'}",
                hint=f"a set is called after its file; {ALL_SETS} stands for all of them",
            )
    plan = BatchPlan.build(config, world_size, spec, len(train.prompts))
    if any(reward_plan.takes_groups for reward_plan in reward_plans.values()):
        from megatron_rl.rewards.calls import check_dispatch

        check_dispatch(rollout.dispatch, plan.num_engines)
    trainer, idle = config.trainer, []
    if trainer.critic_warmup and "critic" not in spec.roles:
        idle.append(f"ignored: trainer.critic_warmup={trainer.critic_warmup}, there is no critic")
    if trainer.capture_step is not None and trainer.capture_step > (plan.total_steps or 0):
        idle.append(f"ignored: trainer.capture_step={trainer.capture_step}, the run takes {plan.total_steps} steps")
    present = {"rollout", *(name.partition(".further.")[0] for name in spec.roles)}
    absent = [role for role in config.placement.placed if role not in present]
    idle += [f"ignored: placement.{role}={config.placement.text_of(role)}, there is no {role}" for role in absent]
    return RlInputs(
        spec=spec,
        roles=roles,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        train=train,
        validation=validation,
        reward_plans=reward_plans,
        plan=plan,
        notes=idle + _NOT_READ + notes + noted,
        stop=stop,
        thoughts=_read_thoughts(config, tokenizer),
    )


def _read_stop(strings: Sequence[str], tokenizer: Tokenizer) -> StopStrings | None:
    """Return a detector of stop strings, if there are any; UserError for one that never occurs in a response."""
    if not strings:
        return None
    from megatron_rl.engines.endings import StopStrings

    check_stop_strings(strings, tokenizer)
    return StopStrings(strings, tokenizer.decode)


def _read_thoughts(config: RunConfig, tokenizer: Tokenizer) -> Thoughts | None:
    """Return the delimiters of a response's reasoning; `None` without `rollout.thinking_budget`."""
    rollout, longest = config.rollout, config.data.max_response_length
    budgets = [rollout.for_validation(name).thinking_budget for name in (*rollout.validation_sets, ALL_SETS)]
    known = [budget for budget in (rollout.thinking_budget, *budgets) if budget is not None]
    if not known:
        return None
    from megatron_rl.engines.endings import Thoughts

    thoughts = Thoughts(rollout.thinking_end, tokenizer)
    room = longest - len(thoughts.closing)
    if max(known) >= room:
        raise UserError(
            f"rollout.thinking_budget = {max(known)} leaves no room for an answer",
            source="rollout.thinking_budget",
            expected=f"below {room}: data.max_response_length = {longest} less the {len(thoughts.closing)} tokens of "
            "rollout.thinking_end",
            hint="lower it, or raise data.max_response_length",
        )
    return thoughts


def read_sft_inputs(config: RunConfig, world_size: int) -> SftInputs:
    """Read and check the model and the examples (UserError if any is wrong)."""
    from megatron_rl.config.sft_plan import SftPlan
    from megatron_rl.data.sft_examples import load_sft_examples

    SftPlan.build(config, world_size)
    check_paths(config)
    LOSS_AGGREGATIONS.check(config.algorithm.loss_agg_mode)
    spec = resolve_sft(config)
    roles, tokenizer = read_models(config, spec, world_size)
    noted = note_models(config, roles)
    data = load_sft_examples(config.data.train_files, tokenizer, config.data)
    check_mixture(config.data, data)
    plan = SftPlan.build(config, world_size, len(data.examples))
    return SftInputs(roles["actor"], data, plan, _NOT_READ + noted)


def check_paths(config: RunConfig) -> None:
    """Refuse directories, checkpoints and programs that cannot be used (UserError)."""
    run_dir, resume, server = config.trainer.run_dir, config.checkpoint.resume, config.rollout.server
    try:
        os.stat(f"{run_dir or ''}/")  # the slash: of a file it is an error
    except FileNotFoundError:
        pass  # it will be made
    except OSError as error:
        raise UserError(
            f"{run_dir}: {error.strerror}",
            source="trainer.run_dir",
            expected="a directory",
            hint="choose another place",
        ) from None
    if HAS_TORCH and resume not in ("auto", "must", "never"):
        from megatron_rl.checkpoint.directory import find_step, list_steps, read_manifest

        if run_dir is None or not list_steps(Path(run_dir, "checkpoints")):
            read_manifest(find_step(Path(resume)), "checkpoint.resume")  # else the run continues from its own
    is_started = config.rollout.supports("starts_server") and not server.endpoints
    if is_started and server.python is not None and shutil.which(server.python) is None:
        raise UserError(
            f"rollout.server.python = {server.python}, which is no program",
            source="rollout.server.python",
            expected="the interpreter of the servers' environment",
            hint="correct the path, or run launch/setup_sglang.sh, which makes .venv-sglang/bin/python",
        )
