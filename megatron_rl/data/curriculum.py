# SPDX-License-Identifier: Apache-2.0
"""Draws training prompts by earlier outcomes (`data.curriculum`): pass rates in a window, priorities, levels.

Prompts keep the order of `PromptBatches`. A curriculum gives each of them a chance, and one that loses is passed over
until its next epoch. With chances of 1 the order is that of a run without a curriculum, bit for bit.

A batch is drawn whole when its first prompt begins, `schedule.max_staleness` steps before its own. The chances depend
on the outcomes of all steps before that, which every rank has.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl.config.sections import CurriculumConfig
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.extension.user_code import call_function, find_function
from megatron_rl.types import Prompt, UserError

DECAY = 0.5  # weight of earlier responses when later ones are added
ENOUGH = 16  # responses, so weighted, by which a level rises or falls
_HISTORY = 1 << 16  # drawn prompts that a checkpoint names; all that have begun are among the last few batches
_COLUMN = "data.curriculum.column and data.train_files"


class Curriculum:
    """Running pass rates, and the chances of prompts, which a subclass computes of them.

    Args:
        prompts: all training prompts; arrays and indices follow their order.
        settings: `data.curriculum`.
    """

    def __init__(self, prompts: Sequence[Prompt], settings: CurriculumConfig) -> None:
        self.prompts, self.settings = prompts, settings
        self._key = self._find_keys()  # [prompts] number of the pass rate
        self._tries, self._passes = np.zeros((2, int(self._key.max()) + 1))

    def _find_keys(self) -> np.ndarray:
        if self.settings.column is None:
            return np.arange(len(self.prompts))
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(repr(value), len(numbers)) for value in self.read_column()])

    def read_column(self) -> list[Any]:
        """Return the prompts' values of `settings.column` (UserError if one has none)."""
        column, values = self.settings.column or "", []
        for prompt in self.prompts:
            value = {"data_source": prompt.data_source, **prompt.extra_info, **prompt.row}.get(column)
            if value is None:
                found = f'prompt_id {prompt.prompt_id} has no value in the column "{column}"'
                hint = "add the column, or name another one"
                raise UserError(found, source=_COLUMN, expected="a value in each row", hint=hint)
            values.append(value)
        return values

    @property
    def tries(self) -> np.ndarray:
        """Weighted number of earlier responses by prompt, or by its value of the column, [prompts]."""
        return self._tries[self._key]

    @property
    def rates(self) -> np.ndarray:
        """Pass rates of these responses, [prompts]; NaN before the first."""
        rates = np.full(len(self._tries), np.nan)
        return np.divide(self._passes, self._tries, out=rates, where=self._tries > 0)[self._key]

    def chances(self) -> np.ndarray:
        """Return the chance of each prompt to be drawn at its turn, [prompts] from 0 to 1; without random numbers."""
        raise NotImplementedError

    def observe(self, indices: Sequence[int], passed: Sequence[np.ndarray]) -> None:
        """Add outcomes, the same ones on every rank.

        Args:
            indices: prompts; one may occur twice.
            passed: [k] bool for each of them, of its responses that have a reward.
        """
        keys = self._key[np.asarray(indices, np.int64)]
        tries, passes = (
            np.bincount(keys, [count(group) for group in passed], len(self._tries)) for count in (len, np.sum)
        )
        weights = np.where(tries > 0, DECAY, 1.0)
        self._tries, self._passes = self._tries * weights + tries, self._passes * weights + passes

    def describe(self) -> dict[str, float]:
        """Return metrics `curriculum/...`."""
        rates = self.rates
        return {"curriculum/pass_rate": float(np.nanmean(rates))} if np.isfinite(rates).any() else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, as JSON of packed arrays."""
        seen = np.flatnonzero(self._tries)
        return {"seen": _pack(seen, "<i4"), "tries": _pack(self._tries[seen]), "passes": _pack(self._passes[seen])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        seen = _unpack(state["seen"], "<i4")
        self._tries[seen], self._passes[seen] = _unpack(state["tries"]), _unpack(state["passes"])


def _pack(values: np.ndarray | Sequence[int], kind: str = "<f8") -> str:
    return base64.b64encode(zlib.compress(np.asarray(values, kind).tobytes(), 1)).decode()


def _unpack(packed: str | list[float], kind: str = "<f8") -> np.ndarray:
    """Return the array of `_pack`, or of a list, as earlier checkpoints have it."""
    if isinstance(packed, list):
        return np.array(packed, kind)
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), kind)


class PassRateWindow(Curriculum):
    """`window`: prompts with a pass rate in the window, and unseen ones; others with the chance `explore`."""

    def chances(self) -> np.ndarray:
        """Return 1, or `explore` for a pass rate outside the window."""
        (low, high), rates = self.settings.window, self.rates
        return np.where((rates < low) | (rates > high), self.settings.explore, 1.0)


class OutcomeVariance(Curriculum):
    """`prioritized`: the larger the variance of a prompt's outcomes, p (1 - p), the larger its chance."""

    def chances(self) -> np.ndarray:
        """Return `explore` for certain outcomes to 1 for p = 0.5 and unseen prompts."""
        rates, least = self.rates, self.settings.explore
        return np.where(np.isnan(rates), 1.0, least + (1 - least) * 4 * rates * (1 - rates))


class RisingLevels(Curriculum):
    """`levels`: prompts of one level for each `data_source`, from the lowest up; easier ones with `explore`."""

    def __init__(self, prompts: Sequence[Prompt], settings: CurriculumConfig) -> None:
        super().__init__(prompts, replace(settings, column=settings.column or "level"))

    def _find_keys(self) -> np.ndarray:
        levels = self.read_column()
        for level in levels:
            if not isinstance(level, int | float):
                found, expected = f'the column "{self.settings.column}" holds {level!r:.80}', "a number in each row"
                raise UserError(found, source=_COLUMN, expected=expected, hint="number the levels, hard ones highest")
        names, sources = np.unique([prompt.data_source for prompt in self.prompts], return_inverse=True)
        found, keys = np.unique(np.column_stack([sources, levels]), axis=0, return_inverse=True)
        self._source, self._level = found[:, 0], found[:, 1]  # [pass rates], levels of a source in ascending order
        self._now = np.searchsorted(self._source, np.arange(len(names)))  # [sources] pass rate of the present level
        return keys.reshape(-1)

    def chances(self) -> np.ndarray:
        """Return 1 for the present level, `explore` below it and 0 above it."""
        keys, now = np.arange(len(self._source)), self._now[self._source.astype(np.int64)]
        return np.where(keys == now, 1.0, np.where(keys < now, self.settings.explore, 0.0))[self._key]

    def observe(self, indices: Sequence[int], passed: Sequence[np.ndarray]) -> None:
        """Add outcomes; a level then rises or falls by one if its pass rate says so."""
        super().observe(indices, passed)
        low, high = self.settings.window
        for source, key in enumerate(self._now):
            if self._tries[key] >= ENOUGH:
                rate = self._passes[key] / self._tries[key]
                other = key + int(rate >= high) - int(rate < low)
                if other != key and other in np.flatnonzero(self._source == source):
                    self._now[source] = other
                    self._tries[other] = self._passes[other] = 0.0  # an earlier visit would decide at once

    def describe(self) -> dict[str, float]:
        """Return metrics, with the mean level over the sources."""
        return super().describe() | {"curriculum/level": float(self._level[self._now].mean())}

    def state_dict(self) -> dict[str, Any]:
        """Return counts and levels, as JSON."""
        return super().state_dict() | {"now": self._now.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self._now[:] = state["now"]


_KINDS = {"window": PassRateWindow, "prioritized": OutcomeVariance, "levels": RisingLevels}


def open_curriculum(settings: CurriculumConfig, prompts: Sequence[Prompt]) -> Curriculum:
    """Build the curriculum that `data.curriculum.kind` names (UserError: no subclass of `Curriculum`, or it fails)."""
    kind, setting = settings.kind.partition("?")[0], "data.curriculum.kind"
    if kind in _KINDS:
        return _KINDS[kind](prompts, settings)
    expected = f"a subclass of {__name__}.Curriculum"
    found = find_function(kind, setting, expected)
    if not (isinstance(found, type) and issubclass(found, Curriculum)):
        raise UserError(f"{found!r:.80}", source=f"{setting} = {kind}", expected=expected, hint="name such a class")
    curriculum = call_function(found, f"{setting} = {kind}", prompts, settings)
    compute_chances(curriculum)
    return curriculum


def compute_chances(curriculum: Curriculum) -> np.ndarray:
    """Return the chances, [prompts]; refuse other arrays, and chances that differ at a second call (UserError)."""
    source = f"data.curriculum.kind = {curriculum.settings.kind}"
    first, again = (np.asarray(call_function(curriculum.chances, source)) for _ in range(2))
    size = len(curriculum.prompts)
    if first.shape != (size,) or first.dtype.kind not in "iufb" or not (first.min() >= 0 and first.max() <= 1):
        hint = "compute it from `self.rates`, whose order is that of the prompts"
        raise UserError(f"chances {first!r:.80}", source=source, expected=f"{size} numbers from 0 to 1", hint=hint)
    if not np.array_equal(first, again):
        expected, hint = "chances that depend on outcomes alone", "draw no random numbers: the order draws by chances"
        raise UserError("other chances at a second call", source=source, expected=expected, hint=hint)
    return first


class DrawnPrompts(PromptBatches[Prompt]):
    """Batches of prompts drawn by a curriculum; for the arguments, see `PromptBatches`.

    Where all prompts of a file are passed over, the likeliest is taken.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        shuffle: Any,
        seed: int,
        *,
        curriculum: CurriculumConfig,
        weights: Sequence[float] | None = None,
        file_sizes: Sequence[int] = (),
    ) -> None:
        super().__init__(prompts, batch_size, shuffle, seed, weights=weights, file_sizes=file_sizes)
        self._curriculum, self._seed = open_curriculum(curriculum, prompts), seed
        self._sizes = [len(prompts)] if weights is None else file_sizes
        self._turns = [0] * len(self._sizes)  # prompts of each file that were drawn or passed over
        self._drawn: list[int] = []  # indices of the last drawn prompts
        self._num_drawn = self._since = 0  # earlier positions come from a run without a curriculum
        self._indices = {prompt.prompt_id: index for index, prompt in enumerate(prompts)}
        self._counts = {"passed_over": 0, "unseen": 0, "filled": 0}

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at a position; the first of a batch draws the batch."""
        if position < self._since:
            return super().prompt(position)
        while position >= self._num_drawn:
            self._draw()
        place = position - self._num_drawn + len(self._drawn)
        assert place >= 0, f"prompt {position} has been forgotten"
        return self._prompts[self._drawn[place]]

    def _draw(self) -> None:
        """Draw up to the next whole batch."""
        first, chances = self._num_drawn, compute_chances(self._curriculum)
        rng, unseen = np.random.default_rng([self._seed, first, 0, 1]), self._curriculum.tries == 0
        left: list[list[int]] = [[] for _ in self._sizes]  # passed over in this batch, by file
        ends, spent = [0] * len(left), set[int]()  # turns after two epochs of a file; files that have come to the end
        self._num_drawn = (first // self._batch_size + 1) * self._batch_size
        for position in range(first, self._num_drawn):
            file = self._turn(position)[0]
            if not left[file] and self._turns[file] >= ends[file]:  # nothing could fill the batch: two further epochs
                ends[file] = self._turns[file] + 2 * self._sizes[file]
                spent.discard(file)
            if file not in spent:
                self._walk(file, chances, rng, left[file], ends[file], spent)
            self._counts["filled"] += int(file in spent)
            self._drawn.append(left[file].pop())
            self._counts["unseen"] += int(unseen[self._drawn[-1]])
        self._counts["passed_over"] += sum(len({*indices}) for indices in left)
        del self._drawn[:-_HISTORY]

    def _walk(
        self, file: int, chances: np.ndarray, rng: np.random.Generator, left: list[int], end: int, spent: set[int]
    ) -> None:
        """Append the prompts of a file to `left`, up to the next that does not lose its chance.

        If none is left before `end`, the file is spent: `left` then ends with the likeliest, each prompt once.
        """
        while self._turns[file] < end:
            left.append(self._locate(file, self._turns[file]))
            self._turns[file] += 1
            if chances[left[-1]] >= 1 or rng.random() < chances[left[-1]]:
                return
        spent.add(file)
        likeliest = sorted(dict.fromkeys(left), key=lambda index: -chances[index])  # first, and of equals the first
        left[:] = likeliest[::-1]

    def observe(self, prompts: Sequence[Prompt], passed: Sequence[np.ndarray]) -> None:
        """Add the outcomes of generated groups to the pass rates: whether each rewarded response passed."""
        self._curriculum.observe([self._indices[prompt.prompt_id] for prompt in prompts], passed)

    def describe(self) -> dict[str, float]:
        """Return the metrics of the batches drawn since the last call, and of the pass rates."""
        counts = {f"curriculum/{name}": float(count) for name, count in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return counts | self._curriculum.describe()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the order, the drawn prompts and the curriculum, as JSON."""
        own = {
            "column": self._curriculum.settings.column,
            "rates": self._curriculum.state_dict(),
            "turns": [*self._turns],
            "drawn": _pack(self._drawn, "<i4"),
            "num_drawn": self._num_drawn,
            "since": self._since,
        }
        return super().state_dict() | {"curriculum": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; with that of an order without a curriculum, continue at its position.

        Raises:
            UserError: the data set has another size, or the pass rates belong to other groups of prompts.
        """
        own = state.get("curriculum")
        super().load_state_dict({name: value for name, value in state.items() if name != "curriculum"})
        if own is None:
            self._since = self._num_drawn = position = self.position
            missing = {*range(len(self._turns))}
            while missing:
                file, turn = self._turn(position)
                if file in missing:
                    self._turns[file] = turn
                missing, position = missing - {file}, position + 1
        else:
            column, rates = self._curriculum.settings.column, self._curriculum.state_dict()
            if (own["column"], own["rates"].keys()) != (column, rates.keys()):
                raise UserError(
                    f"the checkpoint's pass rates are of data.curriculum.column = {own['column']}, with "
                    f"{', '.join(own['rates'])}; this run's of {column}, with {', '.join(rates)}",
                    source="data.curriculum",
                    expected="the settings of the run that is resumed",
                    hint="keep column, and levels or another kind",
                )
            self._curriculum.load_state_dict(own["rates"])
            self._turns, self._drawn = [*own["turns"]], _unpack(own["drawn"], "<i4").tolist()
            self._num_drawn, self._since = own["num_drawn"], own["since"]
        while self._num_drawn < self.position or self._num_drawn % self._batch_size:  # of other sizes of the batch
            self._draw()
