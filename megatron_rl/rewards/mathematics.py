# SPDX-License-Identifier: Apache-2.0
"""Comparison of an answer with the ground truth by meaning.

Equal texts and numbers with units (`quantities.py`) come first. If the ground truth is a number, the answer must be a
number without an operation left to compute. Everything else goes to math-verify in a child process with limits of time
and memory.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import resource
import signal
import sys
import threading
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, Literal

from megatron_rl.rewards.child import ChildProcess
from megatron_rl.rewards.quantities import CHANGED, clean, read_last_quantity, read_quantity

Verdict = Literal["equal", "different", "timeout", "unparsable truth"]

_LONGEST = 2000  # characters of an answer for math-verify, which looks for the last expression
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_MATH_WORDS = frozenset({"sqrt", "frac", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "infty", "cbrt"})
_RELATION = re.compile(r"^\s*(?=(?:\\(?:neq?|leq?|geq?|lt|gt)\b|[<>\u2260\u2264\u2265]))")
# Notations of which math-verify reads the first number only: 101_2, 5:1, --5.
_NOTATION = re.compile(rf"\d\s*(?:_|:\s*\d)|^--|{CHANGED.pattern}", re.IGNORECASE)
_UNIT_BEHIND = re.compile(r"(?<=[\d})\]])\s+[A-Za-z]{2,}(?:\s+[A-Za-z]{2,})*\.?$")
# Numbers too large to compute: towers of powers, large exponents, large factorials.
_HUGE = re.compile(r"\d\s*(?:\^|\*\*)\s*[{(]*\s*(?:\d+\s*[})]*\s*(?:\^|\*\*)|\d{5,})|\d{5,}\s*\)?\s*!|!\s*\)?\s*!")
_EXACT = 12  # decimal places: no rounded number equals an irrational one
_LIMIT_SECONDS = 5.0
_START_SECONDS = 120.0  # to import sympy
_LIMIT_BYTES = 4 << 30
_REMEMBERED = 4096  # cache size; responses of a group often give equal answers


def compare_answers(answer: str, truth: str, *, is_named: bool = True) -> Verdict:
    """Compare an answer with the ground truth.

    Args:
        answer: the marked answer if `is_named`, else the whole response.
        truth: the ground truth, without a box.
    """
    if not answer:
        return "different"
    ours, theirs = clean(answer), clean(truth)
    if ours == theirs or (_is_words(theirs) and ours.casefold() == theirs.casefold()):
        return "equal"
    gold, found = read_quantity(truth), read_quantity(answer, is_answer=True)
    if gold and gold.is_finished:  # math-verify would compute operations left in the answer
        found = found or (None if is_named else read_last_quantity(answer))
        return "equal" if found and found.is_finished and gold.equals(found) else "different"
    if gold and found:
        return "equal" if gold.equals(found) else "different"
    if (is_named and _NOTATION.search(ours)) or _NOTATION.search(theirs):
        given = ours if is_named else ours.rpartition(" ")[2]
        return "equal" if re.sub(r"[\s{}]", "", given) == re.sub(r"[\s{}]", "", theirs) else "different"
    if not gold and not is_readable(truth):
        return "unparsable truth"
    if is_named and (_is_words(ours) or _is_words(theirs)):
        return "different"  # as products of letters, "east" equals "seat"
    if _HUGE.search(answer):
        return "timeout"
    return judge(_as_latex(answer) if is_named else answer[-_LONGEST:], _as_latex(truth))


def is_readable(truth: str) -> bool:
    """Return whether a ground truth has content and balanced braces; else it is compared as text only."""
    depth = 0
    for character in re.sub(r"\\[{}]", "", truth):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0 and bool(re.search(r"\w|\\[a-z]+", truth))


def _is_words(text: str) -> bool:
    words = text.split()
    return any(len(word) > 3 for word in words) and all(
        word.isalpha() and word.casefold() not in _MATH_WORDS for word in words
    )


def _as_latex(answer: str) -> str:
    r"""Box an answer, because math-verify parses bare LaTeX such as x^2+1 only inside an environment.

    Sentences are left alone: in a box, words would be read as products.
    """
    answer = re.sub(r"(?<![\\A-Za-z])pi\b", r"\\pi", _RELATION.sub("x ", answer))
    answer = _UNIT_BEHIND.sub("", answer)
    words = [word for word in _WORD.findall(re.sub(r"\\[a-z]+\s*\{[^{}]*\}", "", answer)) if word not in _MATH_WORDS]
    is_marked = "$" in answer or "\\boxed" in answer
    return answer if is_marked or words else f"\\boxed{{{answer}}}"


class Judge:
    """A thread-safe comparison of texts by math-verify in a child process, started at first use."""

    def __init__(self, limit_seconds: float = _LIMIT_SECONDS) -> None:
        self._limit_seconds, self._lock = limit_seconds, threading.RLock()
        self._child: ChildProcess | None = None

    def compare(self, answer: str, truth: str) -> Verdict:
        """Compare two texts; return "timeout" beyond the limit of time or memory."""
        with self._lock:
            if self._child is None:
                self._child = ChildProcess("megatron_rl.rewards.mathematics")
                try:
                    self._child.ask(self._limit_seconds, _START_SECONDS)
                except BaseException:
                    self.close()  # or its late answer would be taken for the next verdict
                    raise
            try:
                return self._child.ask((answer, truth), 2 * self._limit_seconds)
            except (TimeoutError, EOFError, OSError):
                self.close()
                return "timeout"

    def close(self) -> None:
        """End the child."""
        with self._lock:
            if self._child is not None:
                self._child.end(0.0)
                self._child = None

    def forget(self) -> None:
        """Drop the child after a fork, because two processes must not share it."""
        self._lock, self._child = threading.RLock(), None


_JUDGE = Judge()
atexit.register(_JUDGE.close)
os.register_at_fork(after_in_child=_JUDGE.forget)
judge = lru_cache(_REMEMBERED)(_JUDGE.compare)


def serve(connection: Connection) -> None:
    """Run the child: receive the time limit in seconds, then (answer, truth) pairs."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that callers must set time limits
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
    limit_seconds = connection.recv()
    connection.send(None)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            answer, truth = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, limit_seconds)  # SIGALRM without a handler ends the process
            verdict = _compare(math_verify, answer, truth)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(verdict)


def _compare(math_verify: Any, answer: str, truth: str) -> Verdict:
    try:
        gold = math_verify.parse(truth, parsing_timeout=None)
        if all(isinstance(found, str) for found in gold):
            return "unparsable truth"
        found = math_verify.parse(answer, parsing_timeout=None)
        return "equal" if math_verify.verify(gold, found, float_rounding=_EXACT, timeout_seconds=None) else "different"
    except MemoryError:
        return "timeout"
    except Exception:  # sympy raises arbitrary errors on arbitrary texts
        return "different"


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
