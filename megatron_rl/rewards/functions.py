# SPDX-License-Identifier: Apache-2.0
"""Loads, checks and calls the user's reward functions, in the rank or, like rules, in worker processes beside it.

A reward function has verl's signature (data_source, solution_str, ground_truth, extra_info), is called by keyword, and
returns a number, or a dict with "score" and further numbers to log. It also receives the `FURTHER_ARGUMENTS` that it
takes (`calls.py`). Errors name the rollout and the line that raised.

A worker is a new interpreter (`child.py`) that imports this file, the rules and the user's file, but neither torch nor
transformers; module state persists between calls. One thread per worker sends it one rollout at a time. Each rollout
gets a score or a UserError that names it, even if the function hangs (the worker is killed with its children) or the
worker dies. No worker outlives its rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatron_rl.extension.registry import name_of
from megatron_rl.extension.user_code import ProcessExit, import_file, locate, refuse_exit
from megatron_rl.rewards.calls import (
    file_of,
    find_further_arguments,
    is_batched,
    list_arguments,
    score_batch,
    takes_completions,
)
from megatron_rl.rewards.child import ChildProcess
from megatron_rl.rewards.scoring import (
    RULES,
    RewardFunction,
    Rule,
    Score,
    describe_rollout,
    parse_returned,
    refuse_score,
    score_by_rule,
)
from megatron_rl.types import Rollout, UserError, text_of

if TYPE_CHECKING:
    from megatron_rl.config.schema import RewardConfig

_START_SECONDS = 120.0  # includes imports of the user's file
_GRACE_SECONDS = 1.0
_END_SECONDS = 5.0  # for processes that functions left behind
_SIGNATURE = (
    "def name(data_source, solution_str, ground_truth, extra_info) -> float | dict, or TRL's: "
    "def name(prompts, completions, **columns) -> list"
)
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(name: str, setting: str = "reward.function") -> RewardFunction:
    """Load a built-in rule of `RULES` by name, or a user's function "path.py:name", relative to the working directory.

    Args:
        setting: config setting that holds the name, for errors.

    Raises:
        UserError: the file or name is missing, the import fails, or the signature is wrong.
    """
    if name in RULES:
        return Rule(name)
    path, separator, attribute = name.rpartition(":")
    if not separator or not path or not attribute:
        raise UserError(
            f'"{name}" names no function',
            source=setting,
            expected=f"path.py:name, or one of the rules {', '.join(RULES)}",
            hint="write the file and the function, e.g. rewards/my_reward.py:compute_score",
        )
    module = import_file(path, setting, "path.py:name")
    return check_reward_function(getattr(module, attribute, None), attribute, f"{setting} = {name}")


def check_reward_function(function: Any, name: str, source: str) -> RewardFunction:
    """Return the object if it is a valid reward function (UserError otherwise)."""
    if function is None:
        raise _refuse(f'the file defines no "{name}"', source, "check the name")
    if not callable(function):
        raise _refuse(f'"{name}" is a {type(function).__name__} and cannot be called', source, "name a function")
    try:
        if takes_completions(function):
            return function
        inspect.signature(function).bind(**dict.fromkeys((*_ARGUMENTS, *find_further_arguments(function))))
    except (TypeError, ValueError) as error:
        hint = "rename the parameters; further ones need defaults"
        raise _refuse(f'"{name}" does not accept the four arguments by name: {error}', source, hint) from error
    return function


def _refuse(found: str, source: str, hint: str) -> UserError:
    return UserError(found, source=source, expected=_SIGNATURE, hint=hint)


def name_models(rewards: Any) -> dict[str, str]:
    """Name the reward models that a program passes: path or name of the hub -> model:NAME."""
    named: dict[str, str] = {}
    for reward in rewards if isinstance(rewards, list | tuple) else [rewards]:
        if isinstance(reward, str) and (
            Path(reward).is_dir() or ("/" in reward and ":" not in reward and not reward.endswith(".py"))
        ):
            target = "model:" + re.sub(r"[^\w-]", "_", Path(reward).name.partition("@")[0])
            targets = chain([target], (f"{target}_{number}" for number in count(2)))
            named[reward] = next(target for target in targets if target not in named.values())
    return named


def name_rewards(rewards: Any) -> dict[str, RewardFunction | None]:
    """Name the rewards that a program passes: functions as "file:name", other sources as in the config (`None`).

    Raises:
        UserError: one is no reward.
    """
    named: dict[str, RewardFunction | None] = {}
    models = name_models(rewards)
    for reward in rewards if isinstance(rewards, list | tuple) else [rewards]:
        if isinstance(reward, str):
            named[models.get(reward, reward)] = None
            continue
        name = name_of(reward)
        check_reward_function(reward, name, "the reward that was passed")
        targets = chain([f"{file_of(reward)}:{name}"], (f"{file_of(reward)}:{name}_{number}" for number in count(2)))
        named[next(target for target in targets if target not in named)] = reward
    return named


def enter_rewards(rewards: Any, weights: Sequence[float] | None, config: RewardConfig) -> RewardConfig:
    """Return the reward section with the names of passed rewards.

    Raises:
        UserError: a reward is wrong, weights are no numbers or have another count, or the config names rewards too.
    """
    named = name_rewards([] if rewards is None else rewards)
    for leaf in ("components", "workers"):
        if getattr(config, leaf):
            raise UserError(
                f"reward.{leaf} = {getattr(config, leaf)!r} beside a reward that was passed as an object",
                source=f"reward.{leaf}",
                expected="one of the two",
                hint="name the function in the config as path.py:name, or remove the setting",
            )
    if weights is None and len(named) == 1 and None not in named.values():
        return replace(config, function=next(iter(named)))
    factors = [1.0] * len(named) if weights is None else [*weights] if isinstance(weights, list | tuple) else [weights]
    if len(factors) != len(named) or not named or not all(isinstance(factor, int | float) for factor in factors):
        raise UserError(
            f"the weights {factors} for {len(named)} reward(s)",
            source="weights",
            expected="one number per reward",
            hint="write reward=[f, g], weights=[1.0, 0.5]",
        )
    return replace(config, components=[f"{weight} {target}" for weight, target in zip(factors, named, strict=True)])


def compute_score(function: RewardFunction, rollout: Rollout, step: int = 0) -> Score:
    """Call a reward function on a decoded rollout (step 0: validation).

    Raises:
        UserError: the function raised, or returned no finite score.
    """
    if isinstance(function, Rule):
        return score_by_rule(function, rollout)
    if is_batched(function):
        return score_batch(function, [rollout], [step])[0]
    try:
        with refuse_exit():
            result = function(**list_arguments(function, rollout, step))
    except (Exception, SystemExit, ProcessExit) as error:
        place = locate(error, file_of(function))
        raise refuse_score(f"raised {type(error).__name__}: {text_of(error)}", rollout, place) from error
    return parse_returned(result, rollout, file_of(function))


class LeftBehind:
    """Child processes that user functions in the rank leave running."""

    def __init__(self) -> None:
        self._found: set[psutil.Process] = set()

    @contextlib.contextmanager
    def notice(self) -> Iterator[None]:
        """Record the child processes that begin in a `with` block and outlive it."""
        before = {*psutil.Process().children()}
        try:
            yield
        finally:
            self._found |= {*psutil.Process().children()} - before

    def kill(self) -> None:
        """Kill the recorded processes and their children."""
        for left in self._found:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*left.children(recursive=True), left]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        psutil.wait_procs(self._found, timeout=_END_SECONDS)


class WorkerPool:
    """The worker processes of one rank, started on demand.

    Args:
        functions: (name, setting) pairs for `load_reward_function`.
        timeout_seconds: limit for one rollout.
        secrets: see `ChildProcess`.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, str]],
        num_workers: int,
        timeout_seconds: float,
        secrets: Collection[str] = (),
    ) -> None:
        self._functions, self._timeout_seconds, self._secrets = list(functions), timeout_seconds, secrets
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward-worker")
        self._of_this_thread = threading.local()
        self._workers: set[ChildProcess] = set()
        self._lock, self._is_closed = threading.Lock(), False

    def submit(self, function: int, rollout: Rollout, step: int = 0) -> Future[Score]:
        """Score a rollout with the function at this index; the future raises UserError on failure."""
        return self._threads.submit(self._score, function, rollout, step)

    def close(self) -> None:
        """Drop queued rollouts and end the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.dismiss()
        deadline = time.monotonic() + _GRACE_SECONDS
        for worker in workers:
            worker.end(deadline - time.monotonic())
        self._threads.shutdown(wait=True)

    def _score(self, function: int, rollout: Rollout, step: int) -> Score:
        worker = getattr(self._of_this_thread, "worker", None) or self._start_worker()
        self._of_this_thread.worker = worker
        try:
            reply = worker.ask((function, rollout, step), self._timeout_seconds)
        except (EOFError, OSError) as error:
            self._of_this_thread.worker = None  # the thread's next rollout starts a new worker
            is_late = isinstance(error, TimeoutError)
            end = _describe_end(self._end(worker, 0.0 if is_late else _GRACE_SECONDS))
            name, setting = self._functions[function]
            reply = UserError(
                "the reward function "
                f"{f'was not done after {self._timeout_seconds:g} s' if is_late else f'ended its process ({end})'}\n"
                f"{describe_rollout(rollout)}",
                source=f"{setting} = {name}",
                expected=f"a score within reward.timeout_seconds = {self._timeout_seconds:g}",
                hint="make the function accept every text that a policy can write, and bound its waiting",
            )
        if isinstance(reply, UserError):
            raise reply
        return reply

    def _start_worker(self) -> ChildProcess:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool is closed")
            worker = ChildProcess("megatron_rl.rewards.functions", self._secrets)
            self._workers.add(worker)
        try:
            error = worker.ask(self._functions, _START_SECONDS)
        except (EOFError, OSError) as caught:
            code = self._end(worker, _GRACE_SECONDS)
            error = UserError(
                f"a worker process did not start: {type(caught).__name__}, {_describe_end(code)}",
                source=", ".join(setting for _, setting in self._functions),
                expected=f"a file that is imported within {_START_SECONDS:g} s",
                hint="look at its messages on stderr; reward.workers=0 scores in the rank itself",
            )
        if error is not None:
            raise error
        return worker

    def _end(self, worker: ChildProcess, grace: float) -> int:
        code = worker.end(grace)
        with self._lock:
            self._workers.discard(worker)
        return code


def _describe_end(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve(connection: Connection) -> None:
    """Run a worker: load the functions in the first message, then score rollouts."""
    faulthandler.enable()
    os.set_inheritable(connection.fileno(), False)  # processes started by the user's function must not hold it open
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()
    try:
        functions = [load_reward_function(name, setting) for name, setting in messages.get()]
    except UserError as error:
        connection.send(error)
        return
    connection.send(None)
    for function, rollout, step in iter(messages.get, None):
        try:
            reply: Score | UserError = compute_score(functions[function], rollout, step)
        except UserError as error:
            reply = error
        connection.send(reply)


def _receive(connection: Connection, messages: queue.SimpleQueue[Any]) -> None:
    """Queue the rank's messages; when the rank is gone, kill this worker and its children."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            messages.put(connection.recv())
    messages.put(None)
    time.sleep(_GRACE_SECONDS)
    os.kill(0, signal.SIGKILL)  # the worker's own session


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
