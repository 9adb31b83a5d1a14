# SPDX-License-Identifier: Apache-2.0
"""Calls of reward functions: their arguments; batches for TRL's signature, groups, and async functions.

    def trl(prompts, completions, **columns) -> list[float | None]      # lists, one element per response
    def group(prompt, completions, ground_truth) -> list[float | None]  # all responses to one prompt
    async def ours(data_source, solution_str, ground_truth, extra_info) -> float | dict

A batch is all responses that this rank has begun to score when the first score is awaited; in a reward worker, one
response; for a function of a group, which runs in the rank, a prompt's responses of one step. TRL's functions also
receive `completion_ids` and `trainer_state` (with `global_step`); chats have completions that are lists of one message.
A score of `None` counts as 0, as in TRL's sum.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_rl.extension.user_code import ProcessExit, locate, refuse_exit
from megatron_rl.rewards.scoring import RewardFunction, Rule, Score, parse_returned, refuse_score
from megatron_rl.types import Prompt, Rollout, UserError, text_of

FURTHER_ARGUMENTS = ("prompt", "response_tokens", "finish_reason", "step", "row")
_OF_GROUP = ("prompt", "completions", "completion_ids", "data_source", "ground_truth", "extra_info", "step", "row")
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state")


def takes_completions(function: RewardFunction) -> bool:
    """Return whether a reward function has TRL's signature."""
    return "completions" in inspect.signature(function).parameters


def takes_group(function: RewardFunction) -> bool:
    """Return whether a reward function scores all responses to a prompt in one call."""
    return takes_completions(function) and "prompt" in inspect.signature(function).parameters


def is_batched(function: RewardFunction) -> bool:
    """Return whether a reward function is called on batches: TRL's signature, or async."""
    call = function if inspect.isroutine(function) else type(function).__call__
    is_async = inspect.iscoroutinefunction(getattr(function, "func", call)) or inspect.iscoroutinefunction(call)
    return not isinstance(function, Rule) and (is_async or takes_completions(function))


def find_further_arguments(function: RewardFunction) -> list[str]:
    """Return the optional `FURTHER_ARGUMENTS` that a reward function takes."""
    # A callable object may have no hash.
    return (_read_further_arguments if inspect.isfunction(function) else _read_further_arguments.__wrapped__)(function)


@cache  # reading a signature is as slow as a rule
def _read_further_arguments(function: RewardFunction) -> list[str]:
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in FURTHER_ARGUMENTS if takes_all or name in parameters]


def file_of(function: Any) -> str:
    """Return the file that defines a function, or a callable object's class."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code.co_filename if code is not None else repr(function)


def list_arguments(function: RewardFunction, rollout: Rollout, step: int) -> dict[str, Any]:
    """Return the arguments of a function with verl's signature, with the further ones that it takes."""
    prompt = rollout.prompt
    tellable: dict[str, Callable[[], Any]] = {
        "prompt": lambda: prompt.text,
        "response_tokens": lambda: rollout.response_tokens.tolist(),
        "finish_reason": lambda: rollout.finish_reason,
        "step": lambda: step,
        "row": lambda: dict(prompt.row),
    }
    return {
        "data_source": prompt.data_source,
        "solution_str": rollout.response,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        **{name: tellable[name]() for name in find_further_arguments(function)},
    }


class BatchSource:
    """A reward source that calls its function once for all responses, or all of a group, whose scores are missing.

    The rollouts of a group begin one after another, in the order of their samples.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function, self._takes_group = function, takes_group(function)
        self._waiting: dict[int, list[tuple[Rollout, int, list[Score]]]] = {}
        self._batch = 0  # number of the batch

    def begin(self, rollout: Rollout, step: int) -> Callable[[], Score]:
        """Add a decoded rollout to the batch; the returned function waits for its score."""
        entry: tuple[Rollout, int, list[Score]] = (rollout, step, [])
        if self._takes_group and self._batch in self._waiting:
            last, its_step, _ = self._waiting[self._batch][-1]
            is_same = (last.prompt.prompt_id, its_step) == (rollout.prompt.prompt_id, step)
            self._batch += not (is_same and last.sample_index < rollout.sample_index)  # a prompt may occur twice
        self._waiting.setdefault(self._batch, []).append(entry)
        return partial(self._wait, self._batch, entry[2])

    def _wait(self, number: int, score: list[Score]) -> Score:
        if not score:
            rollouts, steps, slots = zip(*self._waiting.pop(number), strict=True)
            for slot, found in zip(slots, score_batch(self._function, rollouts, steps), strict=True):
                slot.append(found)
        return score[0]


def score_batch(function: RewardFunction, rollouts: Sequence[Rollout], steps: Sequence[int]) -> list[Score]:
    """Call a function on a batch of decoded rollouts (step 0: validation).

    Raises:
        UserError: the function raised, or did not return a finite score per response.
    """
    try:
        with refuse_exit():
            if takes_completions(function):
                of = _list_group if takes_group(function) else _list_columns
                found: Any = function(**of(function, rollouts, steps))
                scores = _run(found) if inspect.isawaitable(found) else found
                scores = list(scores) if isinstance(scores, Iterable) else scores
            else:
                calls = [function(**list_arguments(function, *each)) for each in zip(rollouts, steps, strict=True)]
                scores = _run(_gather(calls))
    except (Exception, SystemExit, ProcessExit) as error:
        place, count = locate(error, file_of(function)), f" on a batch of {len(rollouts)}, of which the first is"
        raise refuse_score(f"raised {type(error).__name__}: {text_of(error)}{count}", rollouts[0], place) from error
    if not isinstance(scores, list) or len(scores) != len(rollouts):
        found = f"{len(scores)} scores" if isinstance(scores, list) else f"{scores!r} ({type(scores).__name__})"
        found = f"returned {found} for {len(rollouts)} completions, of which the first is"
        raise refuse_score(found, rollouts[0], file_of(function))
    return [
        Score(0.0)
        if score is None and takes_completions(function)
        else parse_returned(score, rollout, file_of(function))
        for score, rollout in zip(scores, rollouts, strict=True)
    ]


async def _gather(calls: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*calls)


def _run(awaitable: Any) -> Any:
    """Wait for an awaitable in a thread of its own, because a notebook's thread has a running event loop."""

    async def wait() -> Any:
        return await awaitable

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, wait()).result()


def _list_columns(function: RewardFunction, rollouts: Sequence[Rollout], steps: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a function with TRL's signature, those that it takes."""
    prompts = [rollout.prompt for rollout in rollouts]
    names = dict.fromkeys(name for prompt in prompts for name in prompt.row)
    columns = {name: [prompt.row.get(name) for prompt in prompts] for name in names}
    columns |= {
        "prompts": [prompt.text if prompt.messages is None else prompt.messages for prompt in prompts],
        "completions": [
            text if prompt.messages is None else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, (rollout.response for rollout in rollouts), strict=True)
        ],
        "completion_ids": [rollout.response_tokens.tolist() for rollout in rollouts],
        "trainer_state": SimpleNamespace(global_step=steps[0]),
    }
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return columns
    return {name: value for name, value in columns.items() if name in parameters}


def _list_group(function: RewardFunction, rollouts: Sequence[Rollout], steps: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a function that sees all responses to a prompt, those that it takes."""
    prompt = rollouts[0].prompt
    found: dict[str, Any] = {
        "prompt": prompt.text,
        "completions": [rollout.response for rollout in rollouts],
        "completion_ids": [rollout.response_tokens.tolist() for rollout in rollouts],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        "step": steps[0],
        "row": dict(prompt.row),
    }
    return {name: found[name] for name in _OF_GROUP if name in inspect.signature(function).parameters}


def check_columns(function: RewardFunction, prompts: Sequence[Prompt], setting: str) -> None:
    """Refuse a function of batches or groups with a parameter that has no value (UserError)."""
    if not takes_completions(function):
        return
    sees_group = takes_group(function)
    columns = {name: None for prompt in prompts for name in prompt.row} if not sees_group else {}
    given = _OF_GROUP if sees_group else _GIVEN
    missing = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in (*given, *columns)
    ]
    if missing:
        raise UserError(
            f"the reward function takes {', '.join(missing)}, and "
            + ("a group of responses has no such argument" if sees_group else "no row has such a column"),
            source=f"{setting} = {file_of(function)}:{getattr(function, '__name__', type(function).__name__)}",
            expected=f"of {', '.join([*given, *columns])}",
            hint="read columns from `row`" if sees_group else "rename parameter or column, or give it a default",
        )


def check_dispatch(dispatch: str, num_engines: int) -> None:
    """Refuse a function of a group if the responses to a prompt may be on several engines (UserError)."""
    if num_engines > 1 and dispatch != "groups":
        raise UserError(
            f"rollout.dispatch={dispatch} with {num_engines} engines, and a reward scores all responses to a prompt",
            source="rollout.dispatch and reward",
            expected="rollout.dispatch=groups",
            hint="set it: an engine then samples all responses to a prompt",
        )


def check_holders(prompt_id: np.ndarray, group: np.ndarray, holder: np.ndarray) -> None:
    """Refuse groups on several engines, which a resumed run may have begun (UserError); arrays [sequences]."""
    is_split = (group[1:] == group[:-1]) & (holder[1:] != holder[:-1])
    if is_split.any():
        raise UserError(
            f"the responses to prompt_id {prompt_id[is_split.argmax()]} are on several engines",
            source="reward and the resumed checkpoint",
            expected="all on one, for a reward that scores them in one call",
            hint="start from the checkpoint's weights: it has samples that were dispatched one by one",
        )
