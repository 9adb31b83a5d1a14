# SPDX-License-Identifier: Apache-2.0
"""Parts of engines: the queue of local ones, whole batches, thinking budgets, stop strings, and stand-ins.

The token that completes a stop string ends the response; all its tokens are trained on, and rewards read the text
before the string. Special tokens and incomplete UTF-8 characters decode to no text.

With a thinking budget, a response has two parts, the first of at most `thinking_budget` tokens. If the first ends
inside a thought, closing tokens are inserted, which the loss excludes. Decisions depend on tokens only, so an engine's
ranks agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat, takewhile
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.engines.protocol import ClosedBatches, EngineWeights, Request, RolloutEngine, Sampled, derive_seed
from megatron_rl.types import KeptSets, UserError, complete_routes
from megatron_rl.weights.placement_tables import PlacementTable, as_table

if TYPE_CHECKING:
    import torch

    from megatron_rl.data.tokenizer import Tokenizer
    from megatron_rl.weights.shard_box import ShardBox


class WaitingRequests:
    """A queue with the request methods of a `RolloutEngine` except `step`."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._waiting += requests

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests and return empty responses for them."""
        asked, nothing = set(keys), (np.empty(0, np.int32), np.empty(0, np.float32))
        removed = [request for request in self._waiting if request.key in asked]
        self._waiting = [request for request in self._waiting if request.key not in asked]
        return [Sampled(request.key, *nothing, "interrupted") for request in removed]

    def has_requests(self) -> bool:
        """Return whether a request waits."""
        return bool(self._waiting)

    def tokens_in_flight(self) -> int:
        """Return 0: nothing runs between two steps."""
        return 0

    def take_batch(self, size: int | None = None) -> list[Request]:
        """Dequeue the leading requests that have equal sampling settings, at most `size`."""
        first = self._waiting[:size]
        batch = list(takewhile(lambda request: request.sampling == first[0].sampling, first))
        del self._waiting[: len(batch)]
        return batch


class OneTurn(WaitingRequests):
    """A `RolloutEngine` over an engine that only has `generate`: each step answers one batch of waiting requests."""

    def __init__(self, engine: ClosedBatches) -> None:
        super().__init__()
        self._engine = engine
        self.tokens_in_flight, self.close = engine.tokens_in_flight, engine.close

    def step(self) -> list[Sampled]:
        """Generate the responses to a batch of waiting requests.

        Surplus responses repeat the last key, so that the caller refuses them.
        """
        batch = self.take_batch()
        if not batch:
            return []
        responses = self._engine.generate([r.tokens for r in batch], [r.seed for r in batch], batch[0].sampling)
        keys = chain((r.key for r in batch), repeat(batch[-1].key))
        return [replace(response, key=key) for key, response in zip(keys, responses, strict=False)]


class AbsentEngine(WaitingRequests, EngineWeights):
    """A stand-in on ranks without an engine.

    Args:
        keys: engine rank -> identifier of its placement table (`shard_key`).
        tables: identifier -> boxes of that table.
    """

    def __init__(self, keys: Mapping[int, Hashable], tables: Mapping[Hashable, Iterable[ShardBox]]) -> None:
        super().__init__()
        self._keys, self._tables = keys, {key: as_table(boxes) for key, boxes in tables.items()}
        self.params: Mapping[str, torch.Tensor] = {}

    def shard_key(self, rank: int) -> Hashable:
        """Return the identifier of an engine rank's placement table."""
        return self._keys[rank]

    def placements(self, rank: int) -> PlacementTable:
        """Return the placement table (the boxes of HF tensors) of an engine rank."""
        return self._tables[self._keys[rank]]

    def step(self) -> list[Sampled]:
        """Return no responses."""
        return []

    def close(self) -> None:
        """Do nothing."""


class ThinkingBudget:
    """A `RolloutEngine` that wraps another and enforces `SamplingConfig.thinking_budget`."""

    def __init__(self, engine: RolloutEngine, thoughts: Thoughts) -> None:
        self._engine, self._thoughts = engine, thoughts
        self.has_requests, self.close = engine.has_requests, engine.close
        self._thinking: dict[int, Request] = {}  # original requests whose first part runs
        self._begun: dict[int, Sampled] = {}  # first parts of responses whose second part runs

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests, limited to their thinking budgets."""
        self._engine.add([self._limit(request) for request in requests])

    def step(self) -> list[Sampled]:
        """Advance the engine; return finished responses."""
        finished, continued = [], []
        for sampled in self._engine.step():
            request = self._thinking.pop(sampled.key, None)
            if request is None:
                finished.append(self._complete(sampled))
            elif sampled.finish_reason == "length":
                continued.append(self._continue(request, sampled))
            else:
                finished.append(sampled)
        if continued:
            self._engine.add(continued)
        return finished

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests; return partial responses."""
        for key in keys:
            self._thinking.pop(key, None)
        return [self._complete(sampled) for sampled in self._engine.interrupt(keys)]

    def tokens_in_flight(self) -> int:
        """Count the tokens of unfinished responses, both within the thinking budget and after it."""
        return self._engine.tokens_in_flight() + sum(len(begun.tokens) for begun in [*self._begun.values()])

    def _limit(self, request: Request) -> Request:
        """Limit a request to its remaining thinking budget.

        Return it unchanged if the budget is spent or the closing tokens would not fit.
        """
        budget, most = request.sampling.thinking_budget, request.sampling.max_tokens
        left = most if budget is None else budget - request.num_sampled
        if left < 1 or left + len(self._thoughts.closing) >= most:
            return request
        self._thinking[request.key] = request
        return replace(request, sampling=replace(request.sampling, max_tokens=left))

    def _continue(self, request: Request, sampled: Sampled) -> Request:
        if self._thoughts.are_open([*request.tokens.tolist(), *np.asarray(sampled.tokens).tolist()]):
            closing, logprobs = self._thoughts.closing, np.zeros(len(self._thoughts.closing), np.float32)
            inserted = np.ones(len(closing), bool)
            sampled = join(sampled, Sampled(sampled.key, closing, logprobs, sampled.finish_reason, inserted=inserted))
        self._begun[request.key] = sampled
        seed = derive_seed(request.seed, 0, 0, 0, position=len(sampled.tokens))
        return request.continued(np.asarray(sampled.tokens, np.int32), seed)

    def _complete(self, sampled: Sampled) -> Sampled:
        begun = self._begun.pop(sampled.key, None)
        return sampled if begun is None else join(begun, sampled)


def join(first: Sampled, later: Sampled) -> Sampled:
    """Join a response and its continuation."""
    marks = [np.zeros(len(part.tokens), bool) if part.inserted is None else part.inserted for part in (first, later)]
    has_inserted = first.inserted is not None or later.inserted is not None
    return replace(
        later,
        tokens=np.concatenate([np.asarray(first.tokens, np.int32), np.asarray(later.tokens, np.int32)]),
        logprobs=np.concatenate([np.asarray(part.logprobs, np.float32) for part in (first, later)]),
        kept=KeptSets.join_known([(part.kept, len(part.tokens)) for part in (first, later)]),
        num_cached=first.num_cached,
        routes=complete_routes(first.routes, later.routes),
        inserted=np.concatenate(marks) if has_inserted else None,
    )


_CLOSING_TAG = re.compile(r"</\w+>|\[/\w+\]")


class Thoughts:
    """The tags around a thought, and the tokens that close it.

    Args:
        closing: text with the closing tag, such as </think>.

    Attributes:
        closing: [s] int32 tokens of that text.

    Raises:
        UserError: no closing tag, or the tokenizer cannot encode it.
    """

    def __init__(self, closing: str, tokenizer: Tokenizer) -> None:
        found = _CLOSING_TAG.search(closing)
        tag = found.group() if found else ""
        self._tags, self._tokenizer = (tag.replace("/", ""), tag), tokenizer
        self.closing = np.array(tokenizer.encode(closing), np.int32)
        if not tag or tag not in self._read(self.closing.tolist()):
            raise UserError(
                f"the text {closing!r} ends no thought: its tokens are {self.closing.tolist()}",
                source="rollout.thinking_end",
                expected="a text with a closing tag, such as </think> or [/THINK], that the tokenizer writes and reads",
                hint="take the tag from the model's chat template, or set rollout.thinking_budget=null",
            )

    def are_open(self, tokens: Sequence[int]) -> bool:
        """Return whether prompt and response end inside a thought."""
        text = self._read(tokens)
        opening, closing = map(text.rfind, self._tags)
        return opening > closing

    def _read(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, keep=self._tags)


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MORE_TOKENS = 8  # special tokens, and the first token, whose leading space some tokenizers drop


class StopStrings:
    """A detector of stop strings.

    Args:
        strings: at least one, all non-empty.
        decode: token ids -> text.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._strings, self._decode = tuple(strings), decode
        self._most_tokens = max(len(text.encode()) for text in strings) + _MORE_TOKENS

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string."""
        return bool(len(tokens)) and self._find([*map(int, tokens[-self._most_tokens :])]) is not None

    def read(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without a stop string that its last token completes."""
        tokens = [*map(int, tokens)]
        end = self._find(tokens) if self.ends(tokens) else None
        return self._decode(tokens)[:end]

    def _find(self, tokens: list[int]) -> int | None:
        """Return the start (character index) of the stop string that the last token completes, or `None`.

        Of several completed strings, the first to end counts.
        """
        before, text = len(self._decode(tokens[:-1]).rstrip(_BROKEN)), self._decode(tokens)
        starts = {string: text.find(string, max(0, before - len(string) + 1)) for string in self._strings}
        found = [string for string, start in starts.items() if start >= 0]
        return starts[min(found, key=lambda string: starts[string] + len(string))] if found else None
