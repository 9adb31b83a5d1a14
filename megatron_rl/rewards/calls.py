# SPDX-License-Identifier: Apache-2.0
"""Calls of reward functions: their arguments; batches for TRL's signature and for async functions of either signature.

    def trl(prompts, completions, **columns) -> list[float | None]      # lists, one element per response
    async def ours(data_source, solution_str, ground_truth, extra_info) -> float | dict

A batch is all responses that this rank has begun to score when the first score is awaited; in a reward worker, one
response. TRL's functions also receive `completion_ids` and `trainer_state` (with `global_step`). Chats have completions
that are lists of one message. A score of `None` counts as 0, as in TRL's sum.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from megatron_rl.extension.user_code import ProcessExit, locate, refuse_exit
from megatron_rl.rewards.scoring import RewardFunction, Rule, Score, parse_returned, refuse_score
from megatron_rl.types import Prompt, Rollout, UserError, text_of

FURTHER_ARGUMENTS = ("prompt", "response_tokens", "finish_reason", "step", "row")
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state")


def takes_completions(function: RewardFunction) -> bool:
    """Return whether a reward function has TRL's signature."""
    return "completions" in inspect.signature(function).parameters


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
    """A reward source that calls its function once for all responses whose scores are missing."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._waiting: list[tuple[Rollout, int, list[Score]]] = []

    def begin(self, rollout: Rollout, step: int) -> Callable[[], Score]:
        """Add a decoded rollout to the batch; the returned function waits for its score."""
        entry: tuple[Rollout, int, list[Score]] = (rollout, step, [])
        self._waiting.append(entry)
        return partial(self._wait, entry[2])

    def _wait(self, score: list[Score]) -> Score:
        if not score:
            batch, self._waiting = self._waiting, []
            rollouts, steps, slots = zip(*batch, strict=True)
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
                found: Any = function(**_list_columns(function, rollouts, steps))
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


def check_columns(function: RewardFunction, prompts: Sequence[Prompt], setting: str) -> None:
    """Refuse a function with TRL's signature that needs a column of no row (UserError)."""
    if not takes_completions(function):
        return
    columns = {name: None for prompt in prompts for name in prompt.row}
    missing = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in (*_GIVEN, *columns)
    ]
    if missing:
        raise UserError(
            f"the reward function takes {', '.join(missing)}, and no row has such a column",
            source=f"{setting} = {file_of(function)}:{getattr(function, '__name__', type(function).__name__)}",
            expected=f"of {', '.join([*_GIVEN, *columns])}",
            hint="rename the parameter or the column, or give the parameter a default",
        )
