# SPDX-License-Identifier: Apache-2.0
"""Loads prompts from data files, and puts them in an endless order.

Rows have the plain schema (`prompt`, `answer`; names from the config) or verl's (`prompt` as chat messages,
`data_source`, `reward_model.ground_truth`, `extra_info`). Text prompts are used verbatim, including special tokens.
Chat messages are rendered by the chat template; truncation shortens contents only. Special tokens in contents stay
text.

Each prompt occurs once per epoch, of all files together or, with `data.weights`, of its file, unless a function of the
user decides (`data.shuffle`) or a curriculum does.

Invariants: `prompt_id` is the row index over all files, before any row is dropped. The training prompt at position i
depends only on (seed, i), unless a curriculum draws it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from megatron_rl.config.schema import DataConfig
from megatron_rl.config.sections import reduce_weights
from megatron_rl.data.rows import Row, as_text, read_rows, wrong_type
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.extension.registry import GYM, HUB, OBJECT
from megatron_rl.types import Prompt, UserError

T = TypeVar("T")


def read_tools(row: Row) -> list[Any]:
    """Return the column `tools`, if present: a list in OpenAI format, or its JSON text (UserError otherwise)."""
    value = tools = row.columns.get("tools")
    if isinstance(value, str):
        with suppress(ValueError):
            tools = json.loads(value)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise wrong_type("tools", value, row.location, "a list of objects, one per tool, or that as JSON text")
    return tools or []


_OPTIONS = "chat_template_kwargs"  # column with template arguments for its row


@dataclass(frozen=True)
class PromptSet:
    """Prompts of a list of files, with counts of truncated and dropped ones."""

    prompts: list[Prompt]
    num_truncated: int
    num_dropped: int
    file_starts: list[int]  # `prompt_id` of each file's first row

    @property
    def file_sizes(self) -> list[int]:
        """Return the number of prompts per file."""
        edges = np.searchsorted([prompt.prompt_id for prompt in self.prompts], self.file_starts)
        return np.diff([*edges, len(self.prompts)]).tolist()

    def find_order(self, shuffle: bool | str) -> bool | Callable[[int], np.ndarray]:
        """Return `data.shuffle`, or the function that it names: epoch -> indices of the prompts."""
        if isinstance(shuffle, bool):
            return shuffle
        from megatron_rl.data.chosen_order import find_order

        return find_order(shuffle, self.prompts)


def name_files(files: Sequence[str]) -> dict[str, str]:
    """Name each file for metrics: its stem, with as many parent directories as needed ("gsm8k-test", "math-test")."""
    stems = list(map(_name_parts, files))
    for depth in range(1, max(map(len, stems), default=0) + 1):
        names = ["-".join(stem[-depth:]) for stem in stems]
        if len(set(names)) == len(names):
            return dict(zip(names, files, strict=True))
    return {file: file for file in files}


def _name_parts(file: str) -> tuple[str, ...]:
    if file.startswith(HUB):
        from megatron_rl.data.hub import name_dataset

        return name_dataset(file)
    if file.startswith((GYM, OBJECT)):
        return (file.partition("?")[0].rpartition(":")[2],)
    return Path(file).with_suffix("").parts


def load_prompts(
    files: list[str],
    tokenizer: Tokenizer,
    cfg: DataConfig,
    limit: int | None = None,
    tools: Sequence[dict[str, Any]] = (),
    needs_truth: bool = True,
) -> PromptSet:
    """Read, check and tokenize prompts.

    Args:
        limit: keep only the first N prompts.
        needs_truth: refuse rows without a ground truth; else the first row decides whether all have one.
        tools: default for rows without a column `tools`.

    Raises:
        UserError: a file or row is invalid, a prompt is too long under the policy "error", or no prompt is left.
    """
    prompts, counts, starts = list[Prompt](), Counter[str](), list[int]()
    known = {cfg.prompt_key, cfg.answer_key, _OPTIONS, "data_source", "reward_model", "extra_info"}

    def fit(row: Row) -> tuple[Prompt | None, bool]:
        truth = _ground_truth(row, cfg, needs_truth or bool(prompts) and prompts[0].ground_truth is not None)
        prompt, is_too_long = tokenize_prompt(row, tokenizer, cfg, read_tools(row) or list(tools))
        found = prompt and replace(
            prompt,
            ground_truth=truth,
            data_source=row.optional("data_source", str, "default"),
            extra_info={name: value for name, value in row.columns.items() if name not in known}
            | row.optional("extra_info", dict, {}),
            row={name: value for name, value in row.columns.items() if name != cfg.prompt_key},
        )
        return found, is_too_long

    prompts.extend(fit_rows(files, cfg, counts, starts, fit, limit))
    return PromptSet(prompts, counts["truncated"], counts["dropped"], starts)


def fit_rows(
    files: list[str],
    cfg: DataConfig,
    counts: Counter[str],
    starts: list[int],
    fit: Callable[[Row], tuple[T | None, bool]],
    limit: int | None = None,
    prepare: Callable[[Row], None] = lambda row: None,
) -> Iterator[T]:
    """Read rows and yield what `fit` makes of them (UserError if nothing is kept).

    Args:
        counts: receives the numbers of "kept", "dropped" and "truncated" rows.
        starts: receives the index of the first row of each file.
        fit: returns what a row becomes, `None` to drop it, and whether it is too long.
        limit: keep only the first N.
        prepare: writes columns that a row lacks.
    """
    for row in read_rows(files):
        if limit is not None and counts["kept"] >= limit:
            break
        if row.file == len(starts):
            starts.append(row.index)
        prepare(row)
        row.columns[cfg.prompt_key] = parse_messages(row.require(cfg.prompt_key))
        if cfg.system_prompt is not None:
            from megatron_rl.data.chats import add_system_prompt

            add_system_prompt(row, cfg.prompt_key, cfg.system_prompt)
        found, is_too_long = fit(row)
        counts["dropped" if found is None else "kept"] += 1
        if found is not None:
            counts["truncated"] += is_too_long
            yield found
    if not counts["kept"]:
        raise UserError(
            f"no prompt is left: all {counts['dropped']} are longer than {cfg.max_prompt_length} tokens",
            source=", ".join(files),
            expected="at least one prompt",
            hint="raise data.max_prompt_length",
        )


def parse_messages(value: Any) -> Any:
    """Parse chat messages that are written as JSON text; return any other prompt unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            messages = json.loads(value)
            if messages and all(isinstance(message, dict) and "role" in message for message in messages):
                return messages
    return value


def read_options(row: Row, cfg: DataConfig, tools: list[Any]) -> dict[str, Any]:
    """Return the arguments of the chat template for a row."""
    own = row.optional(_OPTIONS, dict, {})  # parquet fills in keys from other rows with null
    options = cfg.apply_chat_template_kwargs | {name: x for name, x in own.items() if x is not None}
    return options | ({"tools": tools} if tools else {})


def tokenize_prompt(row: Row, tokenizer: Tokenizer, cfg: DataConfig, tools: list[Any]) -> tuple[Prompt | None, bool]:
    """Tokenize a prompt; refuse, cut or drop (`None`) a too long one, as configured; also return if it is too long."""
    value, limit, messages = row.require(cfg.prompt_key), cfg.max_prompt_length, None
    if isinstance(value, list):
        from megatron_rl.data.chats import read_messages, render_messages

        messages = read_messages(value, row, cfg.prompt_key)
    options = read_options(row, cfg, tools)
    if messages is not None:
        text, tokens = render_messages(messages, tokenizer, options)
    elif isinstance(value, str):
        text, tokens = value, tokenizer.encode(value)
    else:
        raise wrong_type(cfg.prompt_key, value, row.location, "a text, or a list of chat messages")
    if not tokens:
        raise UserError(
            f'the prompt in column "{cfg.prompt_key}" has no tokens',
            source=row.location,
            expected="at least one token",
            hint="correct or remove this row",
        )
    is_too_long = len(tokens) > limit
    if is_too_long and cfg.overlong_prompts == "drop":
        return None, True
    if is_too_long and cfg.overlong_prompts == "error":
        raise UserError(
            f"the prompt has {len(tokens)} tokens",
            source=row.location,
            expected=f"at most data.max_prompt_length = {limit} tokens",
            hint="raise data.max_prompt_length, or set data.overlong_prompts to truncate or drop",
        )
    if is_too_long:
        from megatron_rl.data.chats import keep_tokens, shorten_messages

        if messages is not None:
            text, tokens = shorten_messages(messages, limit, cfg.overlong_prompts, tokenizer, options, row.location)
        else:
            tokens = keep_tokens(tokens, limit, cfg.overlong_prompts)
            text = tokenizer.decode(tokens)
    tokens = np.asarray(tokens, dtype=np.int32)
    return Prompt(row.index, tokens, text, ground_truth=None, messages=messages, tools=tools), is_too_long


def _ground_truth(row: Row, cfg: DataConfig, is_needed: bool) -> Any:
    """Return verl's `reward_model.ground_truth`, else the answer column; lists and dicts are kept."""
    value, column = row.optional("reward_model", dict, {}).get("ground_truth"), "reward_model.ground_truth"
    if value is None:
        is_needed = is_needed or cfg.answer_key != DataConfig.answer_key
        value, column = (row.require if is_needed else row.columns.get)(cfg.answer_key), cfg.answer_key
    return value if value is None or isinstance(value, list | dict) else as_text(value, column, row.location)


Order = Callable[[int], np.ndarray]  # epoch -> indices of the prompts


def _order_epochs(size: int, seed: Sequence[int], shuffle: bool | Order) -> Callable[[int], int]:
    """Return position -> number below `size`, each once per epoch: in random order with `shuffle`, its, or in order."""

    @lru_cache(maxsize=2)  # a batch may span the end of an epoch
    def permute(epoch: int) -> np.ndarray:
        return shuffle(epoch) if callable(shuffle) else np.random.default_rng([*seed, epoch]).permutation(size)

    def find(position: int) -> int:
        epoch, offset = divmod(position, size)
        return int(permute(epoch)[offset]) if shuffle else offset

    return find


class PromptBatches(Generic[T]):
    """Batches of an endless stream of prompts; a batch that spans two epochs may contain a prompt twice.

    Args:
        prompts: file after file.
        shuffle: in random order, in order, or as a function decides (then without weights).
        weights: relative share of each file; `None` treats all files as one set.
        file_sizes: prompts per file, needed with weights.

    Attributes:
        position: of the next prompt in the stream.

    Raises:
        UserError: the data set has fewer prompts than a batch.
    """

    def __init__(
        self,
        prompts: Sequence[T],
        batch_size: int,
        shuffle: bool | Order,
        seed: int,
        *,
        weights: Sequence[float] | None = None,
        file_sizes: Sequence[int] = (),
    ) -> None:
        self._prompts, self._batch_size, self.position = prompts, batch_size, 0
        if weights is None:
            self._turn: Callable[[int], tuple[int, int]] = lambda position: (0, position)
            self._orders, self._first = [_order_epochs(len(prompts), [seed], shuffle)], [0]
        else:
            from megatron_rl.data.chosen_order import Turns

            self._turn = Turns(reduce_weights(weights)).at
            self._orders = [_order_epochs(size, [seed, file], shuffle) for file, size in enumerate(file_sizes)]
            self._first = [0, *accumulate(file_sizes)]
        num_prompts = len(prompts)
        if not 1 <= batch_size <= num_prompts:
            raise UserError(
                f"{num_prompts} prompts cannot fill a batch of {batch_size}",
                source="data.train_batch_size",
                expected=f"a batch of 1 to {num_prompts} prompts",
                hint="lower data.train_batch_size, or add prompts",
            )

    def prompt(self, position: int) -> T:
        """Return the prompt at a position of the stream, from 0."""
        return self._prompts[self._locate(*self._turn(position))]

    def _locate(self, file: int, draw: int) -> int:
        return self._first[file] + self._orders[file](draw)

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        first, self.position = self.position, self.position + self._batch_size
        return [self.prompt(i) for i in range(first, self.position)]

    def advance(self, count: int) -> None:
        """Skip `count` prompts."""
        self.position += count

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, offset, and the data set size that defines an epoch."""
        epoch, offset = divmod(self.position, len(self._prompts))
        return {"epoch": epoch, "offset": offset, "num_prompts": len(self._prompts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` (UserError: that of another data set or of a curriculum); batch_size may differ."""
        if state["num_prompts"] != len(self._prompts):
            found = f"the checkpoint was made with {state['num_prompts']} prompts, there are {len(self._prompts)}"
            raise UserError(
                found,
                source="data.train_files",
                expected="the data set of the run that is resumed",
                hint="restore the files, or start a new run",
            )
        if "curriculum" in state:
            found, source = "off, and the checkpoint's prompts were drawn by a curriculum", "data.curriculum.kind"
            hint = "data.curriculum.window=[0,1] with kind=window draws every prompt"
            raise UserError(f"{source} = {found}", source=source, expected="that of the checkpoint", hint=hint)
        self.position = state["epoch"] * len(self._prompts) + state["offset"]
