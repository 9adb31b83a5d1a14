# SPDX-License-Identifier: Apache-2.0
"""Prompts drawn by outcomes: chances, passing over, levels, resume, and refusals.

Ranks and schedules are in tests/rollout/test_drawn_stream.py, runs in tests/run/test_curriculum_in_loop.py.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import ActorConfig, DataConfig, ModelConfig, RunConfig
from megatron_rl.config.sections import CurriculumConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.data.curriculum import ENOUGH, Curriculum, DrawnPrompts, _unpack, open_curriculum
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.run.inputs import localize
from megatron_rl.types import Prompt, UserError


def make_prompts(count: int, sources: int = 1) -> list[Prompt]:
    """Prompts of three levels, whose ids are not their indices."""
    nothing = np.zeros(1, np.int32)
    return [
        Prompt(3 * i, nothing, "", "", data_source=f"set{i % sources}", row={"level": i // sources % 3})
        for i in range(count)
    ]


def draw(prompts: list[Prompt], batch: int, weights: Any = None, sizes: Any = (), **settings: Any) -> DrawnPrompts:
    curriculum = CurriculumConfig(**settings)
    return DrawnPrompts(prompts, batch, True, 5, curriculum=curriculum, weights=weights, file_sizes=sizes)


def tell(stream: DrawnPrompts, prompts: list[Prompt], right: dict[int, float], n: int = 4) -> None:
    """Report n responses to each prompt, of which the share `right` by prompt_id has passed."""
    stream.observe(prompts, [np.arange(n) < n * right.get(prompt.prompt_id, 0.0) for prompt in prompts])


@given(
    size=st.integers(3, 12),
    batch=st.integers(1, 3),
    shares=st.none() | st.tuples(st.integers(1, 3), st.integers(1, 3)),
    shuffle=st.booleans() | st.just(lambda epoch: np.roll(np.arange(12), epoch)),
    kind=st.sampled_from(["window", "prioritized"]),
    choice=st.randoms(),
)
def test_with_chances_of_one_nothing_changes(size: int, batch: int, shares: Any, shuffle: Any, kind: str, choice: Any):
    """A window of all pass rates, or explore = 1: the order is that of a run without a curriculum."""
    size = 12 if callable(shuffle) else size
    weights, sizes = (None, [size]) if shares is None or callable(shuffle) else ([*map(float, shares)], [2, size - 2])
    prompts, least = make_prompts(size), float(kind == "prioritized")
    settings = CurriculumConfig(kind=kind, window=[0.0, 1.0], explore=least)
    more: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "weights": weights, "file_sizes": sizes}
    order = PromptBatches(prompts, batch, **more)
    drawn = DrawnPrompts(prompts, batch, curriculum=settings, **more)
    for _ in range(3 * size):
        found = next(drawn)
        assert found == next(order)
        tell(drawn, found, {prompt.prompt_id: choice.random() for prompt in found})
    assert drawn.describe()["curriculum/passed_over"] == 0
    assert {name: drawn.state_dict()[name] for name in order.state_dict()} == order.state_dict()


def test_pass_rates_halve_the_weight_of_earlier_steps():
    curriculum = open_curriculum(CurriculumConfig(kind="window"), make_prompts(4))
    curriculum.observe([1, 2, 1], [np.array([True, False]), np.zeros(0, bool), np.array([True] * 4)])
    curriculum.observe([1], [np.array([False] * 3)])
    assert curriculum.tries.tolist() == [0, 0.5 * 6 + 3, 0, 0]
    assert curriculum.rates[1] == 0.5 * 5 / 6 and np.isnan(curriculum.rates[[0, 2, 3]]).all()
    assert curriculum.describe() == {"curriculum/pass_rate": 2.5 / 6}


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"kind": "window", "window": [0.25, 0.5]}, [0.1, 1, 1, 0.1, 0.1, 1]),
        ({"kind": "prioritized"}, [0.1, 0.1 + 0.9 * 0.75, 1, 0.1 + 0.9 * 0.75, 0.1, 1]),
        ({"kind": "prioritized", "explore": 0.0}, [0, 0.75, 1, 0.75, 0, 1]),
    ],
)
def test_chances(settings, expected):
    """Of prompts with pass rates of 0, 1/4, 1/2, 3/4 and 1, and of an unseen one."""
    curriculum = open_curriculum(CurriculumConfig(**settings), make_prompts(6))
    curriculum.observe(range(5), [np.arange(4) < right for right in range(5)])
    assert curriculum.chances().tolist() == pytest.approx(expected)


def test_prompts_of_one_value_share_a_pass_rate():
    curriculum = open_curriculum(CurriculumConfig(kind="window", column="level"), make_prompts(6))
    curriculum.observe([0, 1], [np.array([False] * 4), np.array([True, False])])
    assert curriculum.chances().tolist() == [0.1, 1, 1, 0.1, 1, 1]


def test_a_prompt_that_loses_its_chance_is_passed_over():
    """As a loop draws them: after the first epoch only the prompts in the window, until there are too few."""
    prompts = make_prompts(10)
    right = {0: 0.5, 3: 0.5, 12: 0.25, 27: 0.5}
    stream = draw(prompts, 5, kind="window", explore=0.0)
    first = [next(stream), next(stream)]
    assert Counter(p.prompt_id for batch in first for p in batch) == Counter(range(0, 30, 3))
    for batch in first:
        tell(stream, batch, right)
    assert stream.describe() == {
        "curriculum/passed_over": 0,
        "curriculum/unseen": 10,
        "curriculum/filled": 0,
        "curriculum/pass_rate": pytest.approx(0.175),
    }
    order = [int(i) for epoch in range(1, 4) for i in np.random.default_rng([5, epoch]).permutation(10)]
    end = [place for place, i in enumerate(order) if 3 * i in right][4] + 1
    assert [p.prompt_id for p in next(stream)] == [3 * i for i in order[:end] if 3 * i in right]
    assert stream.describe()["curriculum/passed_over"] == len({3 * i for i in order[:end]} - {*right})
    for _ in range(2):
        tell(stream, prompts, {})  # now nothing is in the window: the next ones in the order
    assert [p.prompt_id for p in next(stream)] == [3 * i for i in dict.fromkeys(order[end:])][:5]
    assert stream.describe()["curriculum/filled"] == 5


def test_the_likeliest_fill_a_batch():
    """One prompt has a chance of 6 %: it is drawn, or nothing is, and then it is the likeliest."""
    prompts = make_prompts(4)
    stream = draw(prompts, 1, kind="prioritized", explore=0.0)
    tell(stream, prompts, {0: 0.0, 3: 1.0, 6: 1 / 64, 9: 0.0}, n=64)
    assert {next(stream)[0].prompt_id for _ in range(50)} == {6}
    assert 30 < stream.describe()["curriculum/filled"] < 50


def test_two_epochs_for_a_whole_batch():
    """The only prompt in the window is drawn in both, and the others fill the batch; each costs no epoch of its own."""
    prompts = make_prompts(10)
    stream = draw(prompts, 8, kind="window", explore=0.0)
    tell(stream, prompts, {6: 0.5})
    found = [p.prompt_id for p in next(stream)]
    assert found[:2] == [6, 6] and len({*found}) == 7 and 6 not in found[2:]
    assert stream._turns == [20]
    assert stream.describe()["curriculum/filled"] == 6


def test_explored_prompts_have_their_share():
    """Outside of the window 400 of 2000 passes are drawn, up to four standard deviations."""
    prompts = make_prompts(10)
    stream = draw(prompts, 1, kind="window", explore=0.2)
    tell(stream, prompts, {})
    drawn = [next(stream)[0].prompt_id for _ in range(400)]
    passes = 400 + stream.describe()["curriculum/passed_over"]
    assert abs(400 - 0.2 * passes) < 4 * (passes * 0.2 * 0.8) ** 0.5 and len({*drawn}) == 10


def test_files_keep_their_shares():
    """Three to one, though nothing of the first file is in the window."""
    prompts = make_prompts(14)
    stream = draw(prompts, 4, weights=[3.0, 1.0], sizes=[4, 10], kind="window", explore=0.0)
    tell(stream, prompts, {prompt.prompt_id: 0.5 for prompt in prompts[4:9]})
    found = [p.prompt_id // 3 for _ in range(10) for p in next(stream)]
    assert sum(i < 4 for i in found) == 30 and {i for i in found if i >= 4} == {4, 5, 6, 7, 8}


def test_levels_rise_and_fall_for_each_source():
    prompts = make_prompts(12, sources=2)
    curriculum = open_curriculum(CurriculumConfig(kind="levels", window=[0.25, 0.75]), prompts)

    def levels(chance: float) -> set[tuple[str, int]]:
        return {
            (prompt.data_source, prompt.row["level"])
            for prompt, found in zip(prompts, curriculum.chances(), strict=True)
            if found == chance
        }

    def tell_one(source: str, level: int, right: int, of: int) -> None:
        index = next(i for i, p in enumerate(prompts) if (p.data_source, p.row["level"]) == (source, level))
        curriculum.observe([index], [np.arange(of) < right])

    assert levels(1) == {("set0", 0), ("set1", 0)} and levels(0.1) == set()
    tell_one("set0", 0, 12, ENOUGH - 1)  # too few
    assert levels(1) == {("set0", 0), ("set1", 0)}
    tell_one("set0", 0, 9, 9)
    assert levels(1) == {("set0", 1), ("set1", 0)} and levels(0.1) == {("set0", 0)}
    assert curriculum.describe()["curriculum/level"] == 0.5
    tell_one("set0", 2, 50, 50)  # begun under another level: not the present one
    tell_one("set0", 1, 8, 16)  # between the bounds
    assert levels(1) == {("set0", 1), ("set1", 0)}
    state = json.loads(json.dumps(curriculum.state_dict()))
    tell_one("set0", 1, 0, 100)
    assert levels(1) == {("set0", 0), ("set1", 0)} and levels(0.1) == set()
    tell_one("set0", 0, 3, 3)  # of the earlier visit nothing is left
    assert levels(1) == {("set0", 0), ("set1", 0)}
    tell_one("set1", 0, 0, 100)  # there is no lower one
    assert levels(1) == {("set0", 0), ("set1", 0)}
    curriculum.load_state_dict(state)
    assert levels(1) == {("set0", 1), ("set1", 0)}


def play(stream: DrawnPrompts, steps: range) -> list[list[int]]:
    found = []
    for step in steps:
        batch = next(stream)
        found.append([prompt.prompt_id for prompt in batch])
        tell(stream, batch, {prompt.prompt_id: (prompt.prompt_id * step) % 5 / 4 for prompt in batch})
    return found


@pytest.mark.parametrize("settings", [{"kind": kind} for kind in ("window", "prioritized", "levels")])
@pytest.mark.parametrize("before", [0, 1, 4, 11])
def test_a_resumed_stream_goes_on(settings, before):
    prompts = make_prompts(14)
    weights: dict[str, Any] = {"weights": [2.0, 1.0], "sizes": [4, 10]}
    whole = play(draw(prompts, 4, **weights, **settings), range(20))
    assert whole != play(draw(prompts, 4, **weights, kind="window", window=[0.0, 1.0]), range(20))
    first = draw(prompts, 4, **weights, **settings)
    play(first, range(before))
    state = json.loads(json.dumps(first.state_dict()))
    play(first, range(3))  # a state is a copy
    resumed = draw(prompts, 4, **weights, **settings)
    resumed.load_state_dict(state)
    assert play(resumed, range(before, 20)) == whole[before:]
    assert [resumed.prompt(i).prompt_id for i in range(80)] == sum(whole, [])


def test_the_state_is_small_and_earlier_ones_are_read():
    """A few bytes for each prompt seen; earlier checkpoints have lists of numbers."""
    prompts, random = make_prompts(2000), np.random.default_rng(0)
    stream = draw(prompts, 50, kind="window")
    for _ in range(40):
        batch = next(stream)
        stream.observe(batch, [random.random(8) < 0.5 for _ in batch])
    state = stream.state_dict()
    assert len(json.dumps(state)) < 10 * len(prompts)
    own = state["curriculum"]
    kinds = {"seen": "<i4", "tries": "<f8", "passes": "<f8"}
    lists = {name: _unpack(own["rates"][name], kind).tolist() for name, kind in kinds.items()}
    assert lists["seen"] == [*range(2000)] and lists["tries"] == [8.0] * 2000 and 7000 < sum(lists["passes"]) < 9000
    drawn = _unpack(own["drawn"], "<i4").tolist()
    earlier = state | {"curriculum": own | {"rates": lists, "drawn": drawn}}
    resumed = draw(prompts, 50, kind="window")
    resumed.load_state_dict(json.loads(json.dumps(earlier)))
    assert resumed.state_dict() == state and play(resumed, range(3)) == play(stream, range(3))


def test_another_batch_size_begins_where_the_last_batch_ended():
    prompts = make_prompts(14)
    first = draw(prompts, 4, kind="prioritized")
    seen = sum(play(first, range(3)), [])
    resumed, twin = (draw(prompts, 5, kind="prioritized") for _ in range(2))
    for stream in (resumed, twin):
        stream.load_state_dict(first.state_dict())
    begun = [resumed.prompt(i).prompt_id for i in range(12)]
    play(twin, range(1))  # outcomes after the load do not change the rest of a batch that has begun
    assert begun == seen and [resumed.prompt(i) for i in range(12, 15)] == [twin.prompt(i) for i in range(12, 15)]


@pytest.mark.parametrize("weights", [None, [2.0, 1.0]])
def test_a_curriculum_begins_in_the_middle(weights):
    """Of a run that had none; prompts that have begun stay the same."""
    prompts, sizes = make_prompts(14), [4, 10]
    order = PromptBatches(prompts, 4, True, 5, weights=weights, file_sizes=sizes)
    stream = [order.prompt(i) for i in range(60)]
    order.advance(22)
    resumed = draw(prompts, 4, weights, sizes, kind="window", window=[0.0, 1.0])
    resumed.load_state_dict(order.state_dict())
    assert [resumed.prompt(i) for i in range(60)] == stream
    with pytest.raises(UserError, match="the checkpoint's prompts were drawn by a curriculum"):
        order.load_state_dict(resumed.state_dict())


def test_pass_rates_of_other_groups_are_refused():
    prompts = make_prompts(6)
    state = draw(prompts, 2, kind="window").state_dict()
    draw(prompts, 2, kind="prioritized", explore=0.0).load_state_dict(state)
    for settings in ({"kind": "window", "column": "level"}, {"kind": "levels", "column": "level"}):
        with pytest.raises(UserError, match="pass rates are of data.curriculum.column = None"):
            draw(prompts, 2, **settings).load_state_dict(state)


CODE = """
import numpy as np
from megatron_rl.data.curriculum import Curriculum

class Hard(Curriculum):
    def chances(self):
        return np.where(self.rates > 0.5, self.settings.explore, 1.0)

class Draws(Curriculum):
    def chances(self):
        return np.random.default_rng().random(len(self.prompts))

class Few(Curriculum):
    def chances(self): return [1.0]

class Large(Curriculum):
    def chances(self): return np.full(len(self.prompts), 1.5)

class Nothing(Curriculum):
    def chances(self): return np.full(len(self.prompts), np.nan)

class Fails(Curriculum):
    def chances(self): return 1 / 0

class Other: pass
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


def make_config(**curriculum: Any) -> RunConfig:
    data = DataConfig(train_files=["a.jsonl"], train_batch_size=1, curriculum=CurriculumConfig(**curriculum))
    return RunConfig(model=ModelConfig(path="m"), data=data, actor=ActorConfig())


def test_a_class_of_the_user(code: str) -> None:
    config, notes = localize(make_config(kind=f"{code}:Hard"))
    pinned = config.data.curriculum.kind
    assert pinned.startswith(f"{code}:Hard?") and notes == [f"data.curriculum.kind: {code}:Hard is {pinned}"]
    check_config(config)
    curriculum = open_curriculum(config.data.curriculum, make_prompts(3))
    assert isinstance(curriculum, Curriculum)
    curriculum.observe([0, 1], [np.array([True]), np.array([False])])
    assert curriculum.chances().tolist() == [0.1, 1, 1]


@pytest.mark.parametrize(
    "name, found",
    [
        ("Draws", "other chances at a second call"),
        ("Few", r"chances array\(\[1.\]\)"),
        ("Large", "chances array"),
        ("Nothing", "chances array"),
        ("Fails", "ZeroDivisionError"),
        ("Other", "class 'user_file"),
        ("Absent", 'no function or class "Absent"'),
    ],
)
def test_other_classes_are_refused(code: str, name: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        open_curriculum(CurriculumConfig(kind=f"{code}:{name}"), make_prompts(3))


def test_rows_without_the_column_are_refused() -> None:
    prompts = make_prompts(3)
    with pytest.raises(UserError, match='prompt_id 0 has no value in the column "topic"'):
        open_curriculum(CurriculumConfig(kind="window", column="topic"), prompts)
    with pytest.raises(UserError, match="the column \"data_source\" holds 'set0'"):
        open_curriculum(CurriculumConfig(kind="levels", column="data_source"), prompts)


@pytest.mark.parametrize(
    "settings, found",
    [
        ({"kind": "windows"}, "data.curriculum.kind = 'windows' is no curriculum"),
        ({"kind": "window", "window": [0.9, 0.1]}, r"data.curriculum.window = .* is no range of pass rates"),
        ({"kind": "window", "window": [0.1]}, "is no range of pass rates"),
        ({"kind": "window", "explore": 1.5}, "data.curriculum.explore = 1.5"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(UserError, match=found):
        check_config(make_config(**settings))


def test_fine_tuning_has_no_outcomes() -> None:
    with pytest.raises(UserError, match="data.curriculum.kind"):
        SftPlan.build(make_config(kind="window"), 1)
