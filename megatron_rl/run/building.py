# SPDX-License-Identifier: Apache-2.0
"""Build a run from its checked inputs: roles with process groups, rollout engines, prompts and rewards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from megatron_rl.checkpoint.files import MTP_ROLE, find_model_files
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import FULLY_SHARDED, RunConfig
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.engines.build import BuiltEngine, build_engine
from megatron_rl.engines.protocol import EngineSpec, EngineWeights
from megatron_rl.observability.progress import PhaseTimers, RolloutProgress
from megatron_rl.parallel.collectives import Process, align_group_names, gather_objects, share_object, world
from megatron_rl.parallel.groups import ParallelGroups, join_groups
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rewards.plan import open_scorer
from megatron_rl.rollout.collector import Collector, RewardSources, RolloutStream, open_stream
from megatron_rl.rollout.generation import RolloutGenerator, open_channel
from megatron_rl.run.inputs import NO_PARTS, Parts, RlInputs
from megatron_rl.run.models import RoleInputs
from megatron_rl.samples.batch import Packer
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.setup import LaidOutModel, LearnedTeacher, RoleSetup
from megatron_rl.transfer.hybrid_engine import HybridEngine
from megatron_rl.types import UserError
from megatron_rl.weights.shard_box import find_aliases

if TYPE_CHECKING:
    from megatron_rl.agents.in_rank import AnyEpisodes
    from megatron_rl.data.prompts import PromptSet
    from megatron_rl.engines.endings import StopStrings, Thoughts
    from megatron_rl.observability.run import Run
    from megatron_rl.parallel.layout import ParallelLayout
    from megatron_rl.rewards.scoring import SourceSpec
    from megatron_rl.samples.experience import Experience
    from megatron_rl.training.roles.actor import Actor
    from megatron_rl.weights.shard_box import ShardBox

T = TypeVar("T")
Starting = Callable[[str], AbstractContextManager[Any]]  # shows a part of the start by its name


def launched_sizes() -> tuple[int, int]:
    """Return the ranks that torchrun started, in all and on this node (1 without torchrun)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def order_kernels(config: RunConfig) -> None:
    """Give each GPU one queue of kernels if TP or CP ranks exchange activations; call before CUDA starts.

    Messages then start in the order of the kernels. ZeRO-3 gathers weights beside kernels, which takes several queues.
    """
    roles = config.actor, config.critic
    is_split = any(role.tensor_model_parallel_size * role.context_parallel_size > 1 for role in roles)
    if (is_split or config.layout.mode != "given") and FULLY_SHARDED not in [role.zero_stage for role in roles]:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def group_timeout(config: RunConfig) -> timedelta:
    """Return the process groups' time limit, longer than the watchdog's, so that the watchdog reports a stall."""
    return timedelta(seconds=config.trainer.collective_timeout + 30)


def check_agreement(chosen: list[str]) -> None:
    """Refuse ranks with different layouts, commits of the hub or objects (UserError on every rank); collective."""
    found = gather_objects(chosen, world())
    rank = next((rank for rank, lines in enumerate(found) if lines != found[0]), None)
    if rank is not None:
        mine, other = ("; ".join(line for line in found[r] if line not in found[rank - r]) for r in (0, rank))
        raise UserError(
            f"the ranks do not agree: {mine or 'none'} on rank 0, {other or 'none'} on rank {rank}",
            source="layout.mode, the settings with names of the hub, or objects that were passed (object:digest)",
            expected="equal memory and local directories on all nodes, one commit of each name, and the same objects",
            hint="set the layout (tools/plan.py lists those that fit), write ID@COMMIT, sort rows, or seed a new model",
        )


def list_engines(config: RunConfig, inputs: RlInputs) -> EngineRanks:
    """Return the ranks of each rollout engine of an RL run."""
    plan = inputs.plan
    if plan.engine_is_actor:
        return inputs.roles["actor"].layout.model_copies()
    return EngineRanks.consecutive(config.placement.ranks_of("rollout", plan.world_size), plan.engine_ranks)


def place_roles(
    run: Run,
    roles: Mapping[str, RoleInputs],
    engines: EngineRanks | None,
    process: Process,
    sequences: int,
    updates: int = 1,
    epochs: int = 1,
) -> None:
    """Show which rank does what on the status page, and add the speed of each step to its record.

    Args:
        roles: by name, the updated one first.
        sequences: prompts with a response of a step.
        updates: optimizer steps of a step.
        epochs: passes of the update over the sequences.
    """
    if process.rank:
        return
    from megatron_rl.planning.throughput import Throughput, find_peak

    role = next(iter(roles.values()))
    ranks = {"update": len(role.layout.ranks), "step": process.world_size}
    if engines is not None:
        ranks["rollout"] = engines.num_ranks
    peak = find_peak(process.device)
    run.follow_speed(Throughput(role.shape, peak, sequences=sequences, epochs=epochs, ranks=ranks))
    if run.page is not None:
        run.page.place(roles, engines.of if engines is not None else (), updates)


def build_roles(config: RunConfig, inputs: RlInputs, parts: Parts, starting: Starting = nullcontext) -> dict[str, Any]:
    """Build the roles of an RL run by name; roles of equal layout share process groups. Collective."""
    groups: dict[ParallelLayout, ParallelGroups | None] = {}
    roles: dict[str, Any] = {}
    given = {"actor": parts.actor, "critic": parts.critic, "reference": parts.reference}
    distillation, warmup = config.algorithm.distillation, config.trainer.critic_warmup
    for name, role in inputs.roles.items():
        if role.layout not in groups:
            groups[role.layout] = join_groups(role.layout, group_timeout(config))
        mine, make = groups[role.layout], given.get(name)
        if mine is None:
            from megatron_rl.training.roles.frozen import AbsentRole

            roles[name] = AbsentRole(LaidOutModel(role.spec, role.shape, role.layout))
        elif role.spec.shares and make is None:
            from megatron_rl.training.roles.frozen import BaseOfActor

            roles[name] = BaseOfActor(roles[role.spec.shares])
        else:
            learned, teacher = None, next(iter(inputs.spec.teachers), None)
            if name == "actor" and teacher is not None and distillation.kind != "sampled":
                first = inputs.roles[f"teachers.{teacher}"]
                learned = LearnedTeacher(distillation, first.spec.path, first.shape)
            # Steps of `critic_warmup` do not update the policy.
            skipped = warmup if "critic" in inputs.roles and name != "critic" else 0
            updates = max((inputs.plan.total_steps or 0) - skipped, 0) * inputs.plan.optimizer_steps_per_step
            with starting(f"loading weights: {role.spec.title}"):
                roles[name] = build_role(config, role, mine, updates, make, learned)
    if config.actor.mtp_lr and MTP_ROLE in roles:
        from megatron_rl.training.roles.mtp import list_inputs

        roles["actor"].attach_mtp(roles[MTP_ROLE], partial(list_inputs, as_drafted=config.rollout.draft_tokens > 0))
    return roles


def _find_class(spec: RoleSpec) -> Callable[[RoleSetup], Any]:
    if spec.is_teacher:
        from megatron_rl.training.roles.frozen import Teacher as found
    elif spec.name == "actor":
        from megatron_rl.training.roles.actor import Actor as found
    elif spec.name == "reference" or (spec.name, spec.trainable) == (MTP_ROLE, False):
        from megatron_rl.training.roles.frozen import Reference as found
    elif spec.name == "critic":
        from megatron_rl.training.roles.critic import Critic as found
    elif spec.head == "score":
        from megatron_rl.training.roles.frozen import RewardModel as found
    else:
        from megatron_rl.training.roles.mtp import Mtp as found
    return found


def build_role(
    config: RunConfig,
    inputs: RoleInputs,
    groups: ParallelGroups,
    total_optimizer_steps: int,
    make: Callable[[RoleSetup], Any] | None = None,
    teacher: LearnedTeacher | None = None,
) -> Any:
    """Build one role with the weights of its path; collective.

    Args:
        total_optimizer_steps: length of the role's learning-rate schedule.
        make: a user's class for the role; `None` for the package's.
        teacher: whose distributions an actor learns.
    """
    from megatron_rl.planning.role_layouts import find_gpu_memory

    return (make or _find_class(inputs.spec))(
        RoleSetup(
            spec=inputs.spec,
            model=config.model,
            shape=inputs.shape,
            groups=groups,
            seed=config.trainer.seed,
            temperature=config.rollout.temperature,
            total_optimizer_steps=total_optimizer_steps,
            teacher=teacher,
            memory_bytes=min(gather_objects(find_gpu_memory() or 0, groups.world)) or None,
        )
    )


def verify_served(weights: EngineWeights, actor: Actor, config: RunConfig) -> Callable[[], None] | None:
    """Return the end of a weight update that compares log-probs of servers and actor; `None` for other engines."""
    if not config.rollout.supports("is_server"):
        return None
    from megatron_rl.training.roles.frozen import score_sequences
    from megatron_rl.transfer.probe import ProbedWeights

    layout = actor.model.layout

    def score(sequences: Sequence[np.ndarray], skip: Sequence[int], temperature: float) -> list[np.ndarray]:
        found = None
        if isinstance(actor.model, PackedModel):
            found = [scores.numpy() for scores in score_sequences(actor.model, sequences, skip, temperature)]
        return share_object(found, world(), layout.first_rank) if layout.world_size < world().size() else found or []

    probe = getattr(weights, "probe", lambda: None)
    return ProbedWeights(weights, probe, score, config.model.dtype, world()).end_weight_update


def build_rollout(
    config: RunConfig,
    actor: Actor,
    process: Process,
    timers: PhaseTimers,
    progress: RolloutProgress,
    stop: StopStrings | None = None,
    thoughts: Thoughts | None = None,
    processes: AnyEpisodes | None = None,
) -> tuple[HybridEngine, RolloutGenerator]:
    """Build the engine, the transfer of the actor's weights, and the generator; collective."""

    def find_shareable(wanted: Sequence[ShardBox]) -> dict[str, torch.Tensor]:
        pairs = find_shared(config, actor, process.rank, wanted)
        found = {name: actor.model.params[owned] for name, owned in pairs.items()}
        return {name: param for name, param in found.items() if isinstance(param, torch.Tensor)}

    engine = _build_engine(config, actor, process, find_shareable, stop, thoughts)
    hybrid = HybridEngine(
        actor,
        engine.weights,
        engines=engine.ranks,
        process=process,
        config=config.hybrid,
        timers=timers,
        end_update=verify_served(engine.weights, actor, config),
    )
    hybrid.release_first(actor.optimizer.release)
    return hybrid, RolloutGenerator(
        engine,
        hybrid,
        open_channel(engine.ranks, process.rank, group_timeout(config)),
        config=config,
        group=world(),
        progress=progress,
        processes=processes,
    )


def find_shared(config: RunConfig, actor: Actor, rank: int, wanted: Sequence[ShardBox]) -> dict[str, str]:
    """Return engine parameters (of `wanted`) that may share memory with the actor's on `rank`: engine -> actor name."""
    model = actor.model
    if rank not in model.layout.ranks:
        return {}
    merged = model.merged_params if config.hybrid.lora == "merge" else frozenset()
    changed = merged | model.quantized_params
    pairs = find_aliases(model.placements(rank), wanted)
    return {name: owned for name, owned in pairs.items() if owned not in changed}


def _build_engine(
    config: RunConfig,
    actor: Actor,
    process: Process,
    shareable: Callable[[Sequence[ShardBox]], dict[str, torch.Tensor]],
    stop: StopStrings | None,
    thoughts: Thoughts | None,
) -> BuiltEngine:
    """Build this rank's share of an engine, or a stand-in on ranks without an engine; collective."""
    ranks, built = config.placement.ranks_of("rollout", process.world_size), None
    if len(ranks) < process.world_size:
        align_group_names()  # an engine makes groups of its own ranks
    if process.rank in ranks:
        spec = EngineSpec(
            model_path=str(find_model_files(config.model.path)),
            shape=actor.model.shape,
            dtype=config.model.dtype,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
            config=config.rollout,
            process=process,
            seed=config.trainer.seed,
            shareable=shareable,
            model=actor.model,
            ranks=ranks,
            adapters=actor.model.adapters if config.hybrid.lora == "adapter" else None,
            stop=stop,
            records_routes=config.actor.router_replay == "engine",
            thoughts=thoughts,
        )
        make = None
        if config.schedule.elastic:
            from megatron_rl.engines.elastic.front import choose_front

            make = choose_front(config.trainer)
        built = build_engine(spec, make)
    if len(ranks) < process.world_size:
        absent = share_object(built and built.absent(), world(), ranks.start)
        built = built or absent
    assert built is not None
    return built


def order_prompts(config: RunConfig, train: PromptSet, prompts: Sequence[T]) -> PromptBatches[T]:
    """Return the batches of a run's training data, the prompts or examples of `train`."""
    data, sizes, weights = config.data, train.file_sizes, config.data.weights
    if len(data.sources) > 1:
        weights = [source.weight for source in data.sources.values()]
    order, seed = train.find_order(data.shuffle), config.trainer.seed
    make: Any = PromptBatches
    if data.curriculum.kind != "off":
        from megatron_rl.data.curriculum import DrawnPrompts

        make = partial(DrawnPrompts, curriculum=data.curriculum)
    return make(prompts, data.train_batch_size, order, seed, weights=weights, file_sizes=sizes)


@dataclass(frozen=True)
class RunSinks:
    """Timers, progress counter and directory of the schedule trace of a run; by default nothing is shown or written."""

    timers: PhaseTimers = field(default_factory=PhaseTimers)
    progress: RolloutProgress = field(default_factory=RolloutProgress)
    trace: Path | None = None
    starting: Starting = nullcontext


@dataclass(frozen=True)
class RolloutMembers:
    """Engine with the actor's weights, collector of scored samples, prompts, unfinished responses, reward models."""

    hybrid: Any
    collector: Any
    prompts: PromptBatches
    stream: RolloutStream | None
    reward_models: Mapping[SourceSpec, Callable[[Experience], Any]]


def _attach_roles(config: RunConfig, roles: Mapping[str, Any], hybrid: HybridEngine) -> None:
    """Release trained roles' memory before rollouts, and write the layer that drafts into the engines; collective."""
    for name in ("critic", MTP_ROLE) if config.actor.mtp_lr else ("critic",):
        if name in roles:
            hybrid.release_first(roles[name].optimizer.release)
    if config.rollout.draft_tokens:
        from megatron_rl.transfer.drafter import add_drafter

        add_drafter(hybrid, roles[MTP_ROLE].model, config.rollout.tensor_model_parallel_size)


def build_rollout_members(
    config: RunConfig,
    inputs: RlInputs,
    roles: Mapping[str, Any],
    process: Process,
    run: RunSinks,
    parts: Parts = NO_PARTS,
) -> RolloutMembers:
    """Build prompts, rewards, and an engine with the actor's weights; collective."""
    read, add_scores = inputs.stop.read if inputs.stop else inputs.tokenizer.decode, None
    models: dict[SourceSpec, Any] = {}
    plans = inputs.reward_plans
    first = next(iter(plans.values()))  # all sources share the reward models
    if first.models:
        from megatron_rl.training.roles.frozen import RewardModelOnSamples, score_all_rollouts, score_by_models

        for source in first.models:
            if parts.reward_model is not None:
                models[source] = partial(score_all_rollouts, parts.reward_model, read)
                break
            name = config.reward_model.roles[source.target]
            settings, role = inputs.spec.roles[name].settings, roles[name]
            packer = Packer(role.model, settings, inputs.plan, config.algorithm, process.device)
            models[source] = RewardModelOnSamples(role, packer, inputs.tokenizer)
        add_scores = partial(score_by_models, models)
    prompts = order_prompts(config, inputs.train, inputs.train.prompts)
    if parts.rollouts:
        return RolloutMembers(parts.rollouts, parts.rollouts, prompts, None, models)
    if config.data.sources:
        from megatron_rl.rollout.by_source import MixedScorer

        scorer = MixedScorer(plans, read)
    else:
        scorer = open_scorer(first, read)
    rewards = RewardSources(scorer, add_scores, inputs.spec.needs_greedy_baseline, inputs.spec.needs_turns)
    episodes = None
    if config.has_episodes:
        from megatron_rl.agents.in_rank import choose_episodes

        tokenizer = str(config.model.tokenizer or find_model_files(config.model.path))
        episodes = choose_episodes(config, tokenizer, inputs.stop_token_ids, config.flags.debug_rank == process.rank)
    further = inputs.stop, inputs.thoughts, episodes
    with run.starting(f"starting {config.rollout.engine}"):
        hybrid, generator = build_rollout(config, roles["actor"], process, run.timers, run.progress, *further)
    _attach_roles(config, roles, hybrid)

    stream = open_stream(
        generator, prompts, config, is_apart=hybrid.is_apart, timeout=group_timeout(config), trace=run.trace
    )
    collector = Collector(
        generator=generator,
        rewards=rewards,
        config=config,
        stop_token_ids=inputs.stop_token_ids,
        timers=run.timers,
        group=world(),
        stream=stream,
    )
    return RolloutMembers(hybrid, collector, prompts, stream, models)
