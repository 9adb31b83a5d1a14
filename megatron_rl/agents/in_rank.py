# SPDX-License-Identifier: Apache-2.0
"""Runs the environments of a rank: each in its own process with deadlines, or all in the rank's process.

Invariant of processes: each `open` or `send_reply` yields one `Answer`, possibly a failure. Failed episodes are killed
at once. No process outlives its rank. In the rank's own process a debugger stops in the environments: random numbers
are the same, but there are no deadlines, module variables are shared, and an environment's exit ends the run.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
import time
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.agents.environment import Environment
from megatron_rl.agents.episode import Answer, Opening, Setup, find_environments, play_environment, read_tokenizer
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.parallel.collectives import keep_random_streams
from megatron_rl.rewards.child import ChildProcess
from megatron_rl.types import Prompt, UserError

if TYPE_CHECKING:
    from megatron_rl.agents.sandbox import Sandbox


class EpisodesInRank:
    """The episodes of a rank under a debugger, run in the rank's process; not for `agents.program`."""

    def __init__(self, setup: Setup) -> None:
        self._given = setup
        self._found: tuple[Callable[[], Environment], Setup, Tokenizer] | None = None
        # Each with the states of its random generators in Python and numpy.
        self._episodes: dict[Hashable, tuple[Generator[Answer, tuple[list[int], str]], tuple[Any, Any]]] = {}
        self._answers: dict[Hashable, Answer] = {}
        self._boxes: dict[Hashable, Sandbox] = {}

    def open(self, key: Hashable, prompt: Prompt) -> None:
        """Start an episode and compute its first answer (UserError if the environment cannot be imported)."""
        if self._found is None:
            self._found = find_environments(self._given), *read_tokenizer(self._given)
        opening = Opening.of(prompt, self._given.run_seed)
        if self._given.sandbox is not None:
            from megatron_rl.agents.sandbox import start_sandbox

            box = self._boxes[key] = start_sandbox(self._given.sandbox)
            opening = replace(opening, task=replace(opening.task, sandbox=box))
        seed = opening.task.seed
        states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        self._episodes[key] = play_environment(*self._found, opening), states
        self._advance(key, None)

    def send_reply(self, key: Hashable, tokens: list[int], logprobs: list[float], finish_reason: str) -> None:
        """Pass the policy's reply to an episode and compute its answer."""
        self._advance(key, (tokens, finish_reason))

    def _advance(self, key: Hashable, reply: Any) -> None:
        with keep_random_streams():
            episode, (python, numpy) = self._episodes[key]
            random.setstate(python)
            np.random.set_state(numpy)
            try:
                self._answers[key] = episode.send(reply)
            except (Exception, SystemExit):  # environments can raise anything
                self._answers[key] = Answer.of_error()
            finally:
                self._episodes[key] = episode, (random.getstate(), np.random.get_state())

    def wait(self) -> dict[Any, Answer]:
        """Return the answers computed since the last call, by key."""
        found, self._answers = self._answers, {}
        return found

    def close(self, key: Hashable) -> None:
        """Drop an episode."""
        self._episodes.pop(key, None)
        self._answers.pop(key, None)
        if (box := self._boxes.pop(key, None)) is not None:
            box.close()

    def close_all(self) -> None:
        """Drop all episodes."""
        for key in [*self._boxes]:
            self.close(key)
        self._episodes.clear()
        self._answers.clear()


_START_SECONDS = 120.0  # includes imports of the user's file
_GRACE_SECONDS = 5.0  # for a worker to end its episodes' processes on a busy machine
_LARGEST_ANSWER = 64 << 20  # bytes


class _Running:
    """The rank's side of one episode's process."""

    def __init__(self, worker: ChildProcess) -> None:
        self.origin = worker
        self.pid: int | None = None
        self.asked = 0.0
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs:
            worker.tell("begin", theirs.fileno())

    def ask(self, message: object) -> None:
        self.asked = time.monotonic()
        self.connection.send(message)

    def receive(self) -> Answer | None:
        """Receive a message: an answer, or before the first answer the process id, for which `None` is returned."""
        message = pickle.loads(self.connection.recv_bytes(_LARGEST_ANSWER))
        if isinstance(message, int):
            self.pid = message
            return None
        return message


class EpisodeProcesses:
    """A rank's episodes in separate processes; not thread-safe.

    Args:
        turn_seconds: limit for one answer.
    """

    def __init__(self, setup: Setup, turn_seconds: float) -> None:
        self._setup, self._turn_seconds = setup, turn_seconds
        self._worker: ChildProcess | None = None  # from which episodes are forked
        self._running: dict[Hashable, _Running] = {}
        self._waited_for: set[Hashable] = set()
        self._failed: dict[Hashable, Answer] = {}

    def open(self, key: Hashable, prompt: Prompt) -> None:
        """Start an episode (UserError if a worker cannot import the environment)."""
        try:
            self._running[key] = _Running(self._find_worker())
        except OSError:  # the worker was killed, and its running episodes with it
            self._end_worker()
            self._running[key] = _Running(self._find_worker())
        self._ask(key, Opening.of(prompt, self._setup.run_seed))

    def send_reply(self, key: Hashable, tokens: list[int], logprobs: list[float], finish_reason: str) -> None:
        """Send the policy's reply to an episode's process."""
        self._ask(key, (tokens, logprobs, finish_reason))

    def wait(self) -> dict[Any, Answer]:
        """Wait for the answers to all calls of `open` and `send_reply` since the last wait; return them by key.

        An episode beyond its deadline is killed, and its answer is a failure.
        """
        found, self._failed = self._failed, {}
        while self._waited_for:
            of = {self._running[key].connection: key for key in self._waited_for}
            first = min(self._running[key].asked for key in self._waited_for)
            for connection in wait(list(of), max(first + self._turn_seconds - time.monotonic(), 0.0)):
                assert isinstance(connection, Connection)
                if (answer := self._receive(of[connection])) is not None:
                    found[of[connection]] = answer
            latest = time.monotonic() - self._turn_seconds
            for key in [key for key in self._waited_for if self._running[key].asked <= latest]:
                why = f"no answer within agents.turn_timeout_seconds = {self._turn_seconds:g}"
                found[key] = self._fail(key, "timeout", why)
        return found

    def close(self, key: Hashable) -> None:
        """End an episode's process."""
        self._waited_for.discard(key)
        running = self._running.pop(key, None)
        if running is not None:
            running.connection.close()
            if running.pid is not None:
                with contextlib.suppress(OSError):  # if the worker is gone, so is the episode's process
                    running.origin.tell(running.pid)

    def close_all(self) -> None:
        """End all processes."""
        for key in [*self._running]:
            self.close(key)
        self._end_worker()

    def _find_worker(self) -> ChildProcess:
        worker = self._worker
        if worker is None:
            worker = self._worker = ChildProcess("megatron_rl.agents.worker")
            try:
                error = worker.ask(self._setup, _START_SECONDS)
            except (EOFError, OSError) as caught:
                error = UserError(
                    f"a process for environments did not start: {type(caught).__name__}",
                    source=self._setup.source,
                    expected=f"a file that is imported within {_START_SECONDS:g} s",
                    hint="look at its messages on stderr",
                )
            if error is not None:
                self._end_worker()
                raise error
        return worker

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.dismiss()
            worker.end(_GRACE_SECONDS)

    def _ask(self, key: Hashable, message: object) -> None:
        self._waited_for.add(key)
        try:
            self._running[key].ask(message)
        except OSError:
            self._failed[key] = self._fail(key, "error", "its process has ended")

    def _receive(self, key: Hashable) -> Answer | None:
        try:
            answer = self._running[key].receive()
        except (EOFError, OSError):
            return self._fail(key, "error", "its process has ended, or has answered more than 64 MiB")
        if answer is not None:
            self._waited_for.discard(key)
            if answer.finish_reason == "error":
                return self._fail(key, "error", answer.failure)
        return answer

    def _fail(self, key: Hashable, reason: str, failure: str) -> Answer:
        self.close(key)
        return Answer(finish_reason=reason, failure=failure)


class MixedEpisodes:
    """The episodes of a rank from several sources of prompts, each with an environment of its own."""

    def __init__(self, by_source: Mapping[str, EpisodeProcesses | EpisodesInRank]) -> None:
        self._by_source = by_source
        self._running: dict[Hashable, EpisodeProcesses | EpisodesInRank] = {}

    def open(self, key: Hashable, prompt: Prompt) -> None:
        """Start an episode of the prompt's source (UserError: see `EpisodeProcesses.open`)."""
        self._running[key] = self._by_source[prompt.source]
        self._running[key].open(key, prompt)

    def send_reply(self, key: Hashable, tokens: list[int], logprobs: list[float], finish_reason: str) -> None:
        """Send the policy's reply to an episode."""
        self._running[key].send_reply(key, tokens, logprobs, finish_reason)

    def wait(self) -> dict[Any, Answer]:
        """Wait for the answers of all sources since the last wait; return them by key."""
        found = [episodes.wait() for episodes in self._by_source.values()]
        return {key: answer for answers in found for key, answer in answers.items()}

    def close(self, key: Hashable) -> None:
        """End an episode."""
        if key in self._running:
            self._running.pop(key).close(key)

    def close_all(self) -> None:
        """End all episodes."""
        for episodes in self._by_source.values():
            episodes.close_all()
        self._running.clear()


AnyEpisodes = EpisodeProcesses | EpisodesInRank | MixedEpisodes


def choose_episodes(
    config: RunConfig, tokenizer: str, stop_token_ids: tuple[int, ...], is_debugged: bool
) -> AnyEpisodes:
    """Return the rank's episode runner; programs run in separate processes even on a debugged rank."""
    found: dict[str, EpisodeProcesses | EpisodesInRank] = {}
    for name, view in config.by_source.items():
        if view.agents.has_episodes:
            setup = _set_up(view, tokenizer, stop_token_ids)
            is_here = is_debugged and setup.program is None
            seconds = view.agents.turn_timeout_seconds
            found[name] = EpisodesInRank(setup) if is_here else EpisodeProcesses(setup, seconds)
    return found.get("") or MixedEpisodes(found)


def _set_up(config: RunConfig, tokenizer: str, stop_token_ids: tuple[int, ...]) -> Setup:
    agents, data = config.agents, config.data
    return Setup(
        environment=agents.environment,
        tokenizer=tokenizer,
        options=data.apply_chat_template_kwargs,
        stop_token_ids=stop_token_ids,
        follows_template=agents.history == "template",
        max_turns=agents.max_turns,
        run_seed=config.trainer.seed,
        program=agents.program_or_taskset,
        tools=tuple(agents.tools),
        temperature=config.rollout.temperature,
        context_length=data.max_prompt_length + data.max_response_length,
        tool_format=agents.tool_format,
        reads_marks=data.special_tokens_in_contents,
        sandbox=agents.sandbox if agents.sandbox.kind else None,
    )
