# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of reward sources as the config gives it: read, checked against the prompts, and opened."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain, count, product
from typing import TYPE_CHECKING

from megatron_rl.config.schema import REWARD_MODEL, RewardConfig
from megatron_rl.rewards.answers import extract_answer
from megatron_rl.rewards.scoring import (
    RESERVED,
    RULES,
    RewardFunction,
    RewardPlan,
    RewardSource,
    Rule,
    Scorer,
    SourceSpec,
    list_truths,
    shorten,
)
from megatron_rl.types import Prompt, UserError

if TYPE_CHECKING:
    from megatron_rl.rewards.terms import Term


def build_reward_plan(
    config: RewardConfig, max_response_length: int, functions: Mapping[str, RewardFunction | None] = {}
) -> RewardPlan:
    """Read the reward section and load its functions.

    Args:
        config: `components`, or else `function`.
        functions: passed objects by target, used instead of loading it.

    Raises:
        UserError: a component is malformed, a function or URL is unusable, or a model is named twice.
    """
    if config.components:
        setting = "reward.components"
        weighted = [
            (*_parse_component(text, target, f"{setting}[{i}]"), target, f"{setting}[{i}]")
            for i, (text, target) in enumerate(zip(config.components, config.targets, strict=True))
        ]
    else:
        weighted = [(1.0, None, config.function, "reward.function")]
    repeated = next((model for model in config.models if config.models.count(model) > 1), None)
    if repeated is not None:
        raise UserError(
            f'the source "{repeated}" is given {config.models.count(repeated)} times',
            source="reward.components",
            expected="each reward model at most once",
            hint="add up the weights, or name another model of reward_model.further as 'model:NAME'",
        )
    sources: dict[str, SourceSpec] = {}
    for weight, term, target, setting in weighted:
        name = "service" if is_service(target) else target.rpartition(":")[2]
        name = name.removesuffix("_any") if target in RULES else name  # one metric for both rules of mathematics
        names = chain([name], (f"{name}_{number}" for number in count(2)))
        taken = {*RESERVED, *sources} - {target if target == REWARD_MODEL else ""}
        name = next(unique for unique in names if unique not in taken)
        loaded = functions.get(target)
        if loaded is None and target not in config.models:
            if target in RULES:
                loaded = Rule(target)
            elif is_service(target):
                from megatron_rl.rewards.service import check_url

                check_url(target, setting)
            else:
                from megatron_rl.rewards.functions import load_reward_function

                loaded = load_reward_function(target, setting)
        takes_group = False
        if loaded is not None and not isinstance(loaded, Rule):
            from megatron_rl.rewards.calls import takes_group as find_group

            takes_group = find_group(loaded)
        sources[name] = SourceSpec(name, weight, target, setting, loaded, takes_group, term)
    if any(term for _, term, *_ in weighted):
        from megatron_rl.rewards.terms import resolve_others

        sources = resolve_others(sources, config.models)
    models = tuple(source for source in sources.values() if source.target in config.models)
    local = tuple(source for source in sources.values() if source not in models)
    return RewardPlan(local, models, bool(config.components), config, max_response_length)


def is_service(target: str) -> bool:
    """Return whether a source is an HTTP service."""
    return target.startswith(("http://", "https://"))


def _parse_component(text: str, target: str, setting: str) -> tuple[float, Term | None]:
    weight, _, rest = text.strip().partition(" ")
    if "@" in weight or rest.strip() != target:
        from megatron_rl.rewards.terms import parse_term

        term = parse_term(text, target, setting)
        return term.weights[0], term
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not target:
        raise UserError(
            f'"{text}" is not a weight and a source',
            source=setting,
            expected="WEIGHT SOURCE",
            hint="write e.g. '1.0 math', '0.1 my_reward.py:brevity', '0.5 model' or '0.3 model:NAME'",
        )
    return value, None


def check_truths(plan: RewardPlan, prompts: Sequence[Prompt], has_episodes: bool = False) -> list[str]:
    """Return notes on ground truths that can be compared as text only, not on an environment's blank ones.

    Raises:
        UserError: a data set has no scorer in the rule by_data_source, a ground truth is not text for a rule that
            needs it, or a function takes a column that no row has.
    """
    targets = {source.target: source.setting for source in plan.sources}
    for source in plan.sources:
        if source.function is not None and not isinstance(source.function, Rule):
            from megatron_rl.rewards.calls import check_columns

            check_columns(source.function, prompts, source.setting)
    if "by_data_source" in targets:
        from megatron_rl.rewards.public_sets import find_scorer

        for data_source in sorted({prompt.data_source for prompt in prompts}):
            find_scorer(data_source)
    for rule, prompt in product([rule for rule in ("math", "math_any", "exact") if rule in targets], prompts):
        if not all(isinstance(truth, str) for truth in list_truths(prompt.ground_truth)):
            raise UserError(
                f"the rule {rule} cannot compare with the ground truth {shorten(repr(prompt.ground_truth))} of "
                f'prompt_id {prompt.prompt_id}, data_source "{prompt.data_source}"',
                source=targets[rule],
                expected="a text, or a list of texts of which any is right",
                hint="use reward.function, which gets the ground truth unchanged",
            )
    if not targets.keys() & {"math", "math_any"}:
        return []
    from megatron_rl.rewards.mathematics import is_readable

    unread = [
        (prompt, truth)
        for prompt in prompts
        for truth in list_truths(prompt.ground_truth)
        if (truth.strip() or not has_episodes) and not is_readable(extract_answer(truth) or truth.strip())
    ]
    if not unread:
        return []
    prompt, truth = unread[0]
    return [
        f"ground truths: {len(unread)} cannot be read as mathematics and are compared as text, the first: "
        f"prompt_id {prompt.prompt_id}, {shorten(repr(truth))}"
    ]


def open_scorer(plan: RewardPlan, decode: Callable[[Sequence[int]], str]) -> Scorer:
    """Open the local reward sources of one rank: start workers, and clients of services.

    With reward.workers=0, rules and functions run during `Scorer.finish`, and a function that hangs blocks the run
    until the collective timeout.

    Args:
        decode: response tokens -> text.
    """
    config, sources, opened = plan.config, list[RewardSource](), ExitStack()
    functions = [(spec.target, spec.setting) for spec in plan.sources if spec.function and not spec.takes_group]
    pool = None
    if config.workers and functions:
        from megatron_rl.rewards.functions import WorkerPool

        pool = WorkerPool(functions, config.workers, config.timeout_seconds, config.worker_secrets)
        opened.callback(pool.close)
    here = [spec for spec in plan.sources if spec.function and (pool is None or spec.takes_group)]
    left = None
    if any(not isinstance(spec.function, Rule) for spec in here):  # user code runs in this process
        from megatron_rl.rewards.functions import LeftBehind, compute_score, is_batched

        left = LeftBehind()
    for spec in plan.sources:
        if spec.function is None:
            from megatron_rl.rewards.service import RewardService

            service = RewardService(spec.target, config, spec.setting)
            opened.callback(service.close)
            sources.append(service.begin)
        elif spec not in here:
            assert pool is not None
            submit = partial(pool.submit, functions.index((spec.target, spec.setting)))
            sources.append(lambda *sample, submit=submit: submit(*sample).result)
        elif isinstance(spec.function, Rule):  # runs when its score is awaited
            sources.append(spec.function.begin)
        elif is_batched(spec.function):
            from megatron_rl.rewards.calls import BatchSource

            sources.append(BatchSource(spec.function).begin)
        else:  # likewise, and cannot be interrupted
            sources.append(lambda *sample, score=spec.function: partial(compute_score, score, *sample))
    if left:
        opened.callback(left.kill)  # at the end, before requests in flight are waited for
    is_concurrent = any(spec.function is None or pool is not None for spec in plan.sources)
    notice_children = left.notice if left else nullcontext
    return Scorer(
        plan, sources, decode, is_concurrent=is_concurrent, notice_children=notice_children, close=opened.close
    )
