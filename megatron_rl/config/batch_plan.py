# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic: derives every rank's numbers from the user's, before any process group exists.

The user gives prompts per step, responses per prompt, prompts per optimizer step and a token budget; `BatchPlan.build`
derives the rest and refuses sizes that do not divide, with the nearest values that do. Invariants: nothing is floored,
dropped or repeated; batches continue across the end of an epoch, so every prompt is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import DataConfig, LayoutConfig, RunConfig
from megatron_rl.types import UserError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Every number that follows from the config and the world size."""

    world_size: int
    actor_ranks: int  # ranks of the actor, and its layout
    tp_size: int
    pp_size: int
    cp_size: int
    dp_size: int
    engine_ranks: int  # ranks per rollout engine
    num_engines: int
    engine_is_actor: bool  # the engine runs the actor's modules, in the actor's layout
    train_batch_size: int  # prompts per step of the main loop
    group_size: int  # responses per prompt (`rollout.n`)
    rollouts_per_step: int  # responses
    rollouts_per_engine_min: int  # the numbers of two engines differ by one at most, or one group (`rollout.dispatch`)
    rollouts_per_engine_max: int
    ppo_mini_batch_size: int  # prompts per optimizer step
    ppo_epochs: int  # passes over a rollout batch
    minibatches_per_epoch: int  # optimizer steps per pass
    optimizer_steps_per_step: int  # per step of the main loop
    rollouts_per_minibatch: int  # responses per optimizer step
    rollouts_per_rank: float  # the same on one DP rank, as a mean (balanced by tokens)
    longest_sequence: int  # tokens of the longest prompt and response
    max_prompt_length: int
    max_response_length: int
    max_tokens_per_microbatch: int  # budget of one forward/backward
    total_epochs: int | None
    num_train_prompts: int | None  # None before they are read
    steps_per_epoch: float | None  # possibly a fraction
    total_steps: int | None  # of the main loop; None if they depend on unread data
    total_optimizer_steps: int | None

    @classmethod
    def build(cls, cfg: RunConfig, world_size: int, spec: RunSpec, num_train_prompts: int | None = None) -> BatchPlan:
        """Derive the plan; refuse sizes that do not divide (UserError).

        Args:
            num_train_prompts: training prompts after filtering; `None` before the data is read.
        """
        _check_placement(cfg, spec, world_size)
        for role in spec.roles.values():
            check_ranks(role.settings, cfg.placement.ranks_of(role.name, world_size), role.section)
            check_longest_sequence(cfg.data, role.settings, role.section)
        rollout_ranks = len(cfg.placement.ranks_of("rollout", world_size))
        engine_ranks = _count_engine_ranks(cfg, rollout_ranks)
        actor, data, group_size = cfg.actor, cfg.data, cfg.rollout.n
        tp_size, pp_size = actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size
        actor_ranks = len(cfg.placement.ranks_of("actor", world_size))
        dp_size = actor_ranks // (tp_size * pp_size * actor.context_parallel_size)
        part = group_size if cfg.rollout.dispatch == "groups" else 1  # unit of assignment
        parts = data.train_batch_size * group_size // part
        mini_batch_size = actor.ppo_mini_batch_size or data.train_batch_size
        minibatches = data.train_batch_size // mini_batch_size
        _check_batches(cfg, spec, dp_size, num_train_prompts)
        total_steps = count_steps(cfg, num_train_prompts)
        optimizer_steps = minibatches * actor.ppo_epochs
        return cls(
            world_size=world_size,
            actor_ranks=actor_ranks,
            tp_size=tp_size,
            pp_size=pp_size,
            cp_size=actor.context_parallel_size,
            dp_size=dp_size,
            engine_ranks=engine_ranks,
            num_engines=rollout_ranks // engine_ranks,
            engine_is_actor=cfg.rollout.supports("is_actor"),
            train_batch_size=data.train_batch_size,
            group_size=group_size,
            rollouts_per_step=data.train_batch_size * group_size,
            rollouts_per_engine_min=parts * engine_ranks // rollout_ranks * part,
            rollouts_per_engine_max=-(-parts * engine_ranks // rollout_ranks) * part,
            ppo_mini_batch_size=mini_batch_size,
            ppo_epochs=actor.ppo_epochs,
            minibatches_per_epoch=minibatches,
            optimizer_steps_per_step=optimizer_steps,
            rollouts_per_minibatch=mini_batch_size * group_size,
            rollouts_per_rank=mini_batch_size * group_size / dp_size,
            longest_sequence=data.max_prompt_length + data.max_response_length,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            max_tokens_per_microbatch=actor.max_tokens_per_microbatch,
            total_epochs=None if cfg.trainer.total_steps is not None else cfg.trainer.total_epochs,
            num_train_prompts=num_train_prompts,
            steps_per_epoch=None if num_train_prompts is None else num_train_prompts / data.train_batch_size,
            total_steps=total_steps,
            total_optimizer_steps=None if total_steps is None else total_steps * optimizer_steps,
        )

    def formulas(self) -> list[str]:
        """Return each derived number as "name = formula = formula with numbers = value"."""
        n, batch, mini = self.group_size, self.train_batch_size, self.ppo_mini_batch_size
        low, high = self.rollouts_per_engine_min, self.rollouts_per_engine_max
        together = " (responses of a prompt stay together)" if high > low + 1 else ""
        rollout_ranks = self.num_engines * self.engine_ranks
        lines = [
            f"dp_size = {'world_size' if self.actor_ranks == self.world_size else 'ranks of the actor'} / "
            f"(tp * pp * cp) = {self.actor_ranks} / "
            f"({self.tp_size} * {self.pp_size} * {self.cp_size}) = {self.dp_size}",
            f"num_engines = {'world_size' if rollout_ranks == self.world_size else 'ranks of the engines'} / "
            f"{'(tp * pp * ep)' if self.engine_is_actor else 'engine_ranks'} = "
            f"{rollout_ranks} / {self.engine_ranks} = {self.num_engines}",
            f"rollouts_per_step = train_batch_size * n = {batch} * {n} = {self.rollouts_per_step}",
            f"rollouts_per_engine = train_batch_size / num_engines * n = {batch} / {self.num_engines} * {n} = "
            f"{low if low == high else f'{low} to {high}{together}'}",
            f"minibatches_per_epoch = train_batch_size / ppo_mini_batch_size = {batch} / {mini} = "
            f"{self.minibatches_per_epoch}",
            f"optimizer_steps_per_step = minibatches_per_epoch * ppo_epochs = {self.minibatches_per_epoch} * "
            f"{self.ppo_epochs} = {self.optimizer_steps_per_step}",
            f"rollouts_per_minibatch = ppo_mini_batch_size * n = {mini} * {n} = {self.rollouts_per_minibatch}",
            f"rollouts_per_rank = rollouts_per_minibatch / dp_size = {self.rollouts_per_minibatch} / {self.dp_size} = "
            f"{self.rollouts_per_rank:g} (mean; balanced by tokens)",
            f"longest_sequence = max_prompt_length + max_response_length = {self.max_prompt_length} + "
            f"{self.max_response_length} = {self.longest_sequence} <= max_tokens_per_microbatch = "
            f"{self.max_tokens_per_microbatch}",
        ]
        if (prompts := self.num_train_prompts) is not None:
            lines.append(
                f"steps_per_epoch = num_train_prompts / train_batch_size = {prompts} / {batch} = "
                f"{self.steps_per_epoch:g}"
            )
        if self.total_epochs is None:
            lines.append(f"total_steps = trainer.total_steps = {self.total_steps}")
        elif prompts is None:
            lines.append("total_steps = ceil(total_epochs * num_train_prompts / train_batch_size): data not read yet")
        else:
            lines.append(
                f"total_steps = ceil(total_epochs * num_train_prompts / train_batch_size) = "
                f"ceil({self.total_epochs} * {prompts} / {batch}) = {self.total_steps}"
            )
        if self.total_steps is not None:
            lines.append(
                f"total_optimizer_steps = total_steps * optimizer_steps_per_step = {self.total_steps} * "
                f"{self.optimizer_steps_per_step} = {self.total_optimizer_steps}"
            )
        return lines


def count_steps(cfg: RunConfig, num_train_prompts: int | None) -> int | None:
    """Return the number of steps of a run; None if it depends on data that is not read yet."""
    if cfg.trainer.total_steps is not None or num_train_prompts is None:
        return cfg.trainer.total_steps
    return -(-cfg.trainer.total_epochs * num_train_prompts // cfg.data.train_batch_size)  # ceil, exact


def check_ranks(layout: LayoutConfig, ranks: range, section: str = "actor") -> int:
    """Return the number of replicas of a section's model; refuse ranks that its layout does not divide (UserError)."""
    tp_size, pp_size = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    cp_size, world_size = layout.context_parallel_size, len(ranks)
    model_size = tp_size * pp_size * cp_size
    if world_size % model_size:
        raise UserError(
            f"world_size {world_size} is no multiple of tp * pp * cp = {tp_size} * {pp_size} * {cp_size} = "
            f"{model_size}",
            source=f"world size (torchrun) or placement, and {section}.tensor_model_parallel_size and its neighbors",
            expected=f"a world size of {_nearest_multiples(world_size, model_size)}",
            hint=f"change --nproc-per-node, or {section}.tensor_model_parallel_size and its neighbors",
        )
    return world_size // model_size


def _count_engine_ranks(cfg: RunConfig, world_size: int) -> int:
    actor, width = cfg.actor, cfg.rollout.ranks_per_engine
    if cfg.rollout.supports("is_actor"):
        sizes = (actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size, actor.expert_model_parallel_size)
        return math.gcd(math.prod(sizes), world_size)  # the product; an EP size that does not fit is refused later
    if cfg.schedule.elastic:
        return 1  # which hands requests to engines of `width` ranks of their own
    if world_size % width:
        setting = "rollout.tensor_model_parallel_size" + " x data_parallel_size" * (cfg.rollout.data_parallel_size > 1)
        raise UserError(
            f"world_size {world_size} is no multiple of {setting} {width}",
            source=f"world size (torchrun), or placement.rollout, and {setting}",
            expected=f"{setting} of {_nearest_divisors(world_size, width)}"
            f", or a world size of {_nearest_multiples(world_size, width)}",
            hint="each rollout engine takes that many ranks, and no rank may be left over",
        )
    return width


def _check_batches(cfg: RunConfig, spec: RunSpec, dp_size: int, num_train_prompts: int | None) -> None:
    data, actor = cfg.data, cfg.actor
    batch, mini = data.train_batch_size, actor.ppo_mini_batch_size or data.train_batch_size
    if batch % mini:
        raise UserError(
            f"data.train_batch_size {batch} is no multiple of actor.ppo_mini_batch_size {mini}",
            source="data.train_batch_size and actor.ppo_mini_batch_size",
            expected=f"ppo_mini_batch_size of {_nearest_divisors(batch, mini)}, or train_batch_size of "
            f"{_nearest_multiples(batch, mini)}",
            hint="both are counted in prompts; each optimizer step takes the same number",
        )
    if spec.needs_group and cfg.rollout.n == 1:
        raise UserError(
            f"rollout.n = 1 with algorithm.adv_estimator = {cfg.algorithm.adv_estimator!r}: every advantage would be 0",
            source="rollout.n",
            expected="2 responses per prompt or more",
            hint="set rollout.n=8; the other responses of the group are the baseline",
        )
    check_data_size(cfg, num_train_prompts)
    if mini * cfg.rollout.n < dp_size:
        needed = math.ceil(dp_size / cfg.rollout.n)
        enough = [size for size in divisors(batch) if size >= needed]
        key = "actor.ppo_mini_batch_size" if enough else "data.train_batch_size"
        raise UserError(
            f"a minibatch has {mini * cfg.rollout.n} rollouts for {dp_size} DP ranks: some ranks would have none",
            source="actor.ppo_mini_batch_size, rollout.n and the world size",
            expected=f"ppo_mini_batch_size * rollout.n >= dp_size, e.g. {key}={enough[0] if enough else needed}",
            hint=f"raise {key}, or use fewer ranks",
        )


def check_data_size(cfg: RunConfig, num_train_prompts: int | None) -> None:
    """Refuse a batch that is larger than the data (UserError)."""
    batch = cfg.data.train_batch_size
    if num_train_prompts is not None and num_train_prompts < batch:
        raise UserError(
            f"data.train_batch_size {batch} is more than the {num_train_prompts} training prompts",
            source="data.train_batch_size and data.train_files",
            expected=f"data.train_batch_size of {num_train_prompts} or less",
            hint="a batch would hold a prompt twice; lower the batch size or add data",
        )


def check_longest_sequence(data: DataConfig, layout: LayoutConfig, section: str) -> None:
    """Refuse a section's token budget below the longest sequence (UserError)."""
    budget = layout.max_tokens_per_microbatch
    longest = data.max_prompt_length + data.max_response_length
    if longest > budget:
        name = f"{section}.max_tokens_per_microbatch"
        raise UserError(
            f"the longest sequence, max_prompt_length {data.max_prompt_length} + max_response_length "
            f"{data.max_response_length} = {longest} tokens, does not fit into {name} {budget}",
            source=name,
            expected=f"{longest} tokens or more",
            hint=f"set {name}={longest}, or shorten prompts or responses",
        )


def divisors(value: int) -> list[int]:
    """Return the divisors in ascending order."""
    return [size for size in range(1, value + 1) if value % size == 0]


def _nearest_divisors(value: int, wanted: int) -> str:
    """Name the divisors of `value` next to `wanted` on either side."""
    below = [size for size in divisors(value) if size < wanted]
    above = [size for size in divisors(value) if size > wanted]
    return " or ".join(map(str, below[-1:] + above[:1]))


def _nearest_multiples(value: int, base: int) -> str:
    """Name the positive multiples of `base` next to `value` on either side."""
    below = value // base * base
    return f"{below} or {below + base}" if below else f"{base}"


def _check_placement(cfg: RunConfig, spec: RunSpec, world_size: int) -> None:
    """Refuse a placement that does not fit the job or contradicts another setting (UserError)."""
    placement, num_ranks = cfg.placement, len(cfg.placement.ranks_of("rollout", world_size))
    endpoints, width = cfg.rollout.server.endpoints, cfg.rollout.tensor_model_parallel_size
    if endpoints and len(endpoints) * width != num_ranks:
        raise UserError(
            f"{len(endpoints)} server(s) for {num_ranks} rank(s), {width} per engine",
            source="rollout.server.endpoints",
            expected=f"{num_ranks // width} addresses, one per engine",
            hint="ranks that share a server are one engine: set rollout.tensor_model_parallel_size to their number",
        )
    if cfg.schedule.elastic and num_ranks != 1:
        raise UserError(
            f"{num_ranks} ranks of the job for engines outside it",
            source="placement.rollout and schedule.elastic",
            expected="one rank, which hands requests to all engines",
            hint=f"set placement.rollout={world_size - 1}-{world_size - 1}, or schedule.elastic=false",
        )
    if not placement.placed:
        return
    ranks = {role: placement.ranks_of(role, world_size) for role in (*spec.roles, "rollout")}
    if ranks["actor"].start:
        raise UserError(
            f"placement.actor = {placement.actor!r} leaves out rank 0",
            source="placement.actor",
            expected="ranks from 0 on",
            hint="rank 0 writes the actor's metrics: give the other roles the ranks behind the actor's",
        )
    idle = sorted(set(range(world_size)).difference(*ranks.values()))
    if idle:
        raise UserError(
            f"rank {idle[0]} has no role" if len(idle) == 1 else f"ranks {', '.join(map(str, idle))} have no role",
            source="placement",
            expected=f"a role for each of the {world_size} ranks",
            hint="start fewer ranks, or give these to a role; roles that are not named are on all ranks",
        )
    if ranks["rollout"] != ranks["actor"] and cfg.rollout.supports("is_actor"):
        raise UserError(
            f"rollout.engine = {cfg.rollout.engine!r} on other ranks than the actor, whose modules it runs",
            source="placement.rollout",
            expected="the ranks of the actor",
            hint="set placement.rollout to the ranks of placement.actor, or choose another rollout.engine",
        )
