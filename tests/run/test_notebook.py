# SPDX-License-Identifier: Apache-2.0
"""Mistakes at the prompt of a notebook: each is answered by a UserError, or understood; cells that are run again.

Not covered: several ranks, and an actual notebook.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_rl
from distributed import run_ranks
from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS, RegisteredEstimator
from megatron_rl.extension.registry import Registry
from megatron_rl.run.opening import RunLock
from megatron_rl.types import UserError
from rl_runs import overrides_for

MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a prompt without tokens": (lambda p, s: p.sample(1, [""]), "prompt 0 has 0 tokens"),
    "a long prompt": (lambda p, s: p.sample(1, ["1+4=" * 3]), "prompt 0 has 12 tokens"),
    "an unknown token": (lambda p, s: p.sample(1, ["1", [99999]]), "prompt 1 has the token id 99999"),
    "a negative token": (lambda p, s: p.sample(1, [[-3]]), "prompt 0 has the token id -3"),
    "no list": (lambda p, s: p.sample(1, 5), "prompts = 5"),
    "n without prompts": (lambda p, s: p.sample(1, n=2), "prompts = None"),
    "a step in words": (lambda p, s: p.sample("one"), "a str: 'one'"),
    "no validation sets": (lambda p, s: p.validate([1]), "a list: [1]"),
    "log-probs of a text": (lambda p, s: p.logprobs("x"), "a str: 'x'"),
    "values in words": (lambda p, s: p.expand(s, ["a"] * 4), "values of shape [] for 4 rollouts: ['a'"),
    "one value": (lambda p, s: p.expand(s, 1.0), "values of shape [] for 4 rollouts: 1.0"),
    "no values": (lambda p, s: p.expand(s, None), "values of shape [] for 4 rollouts: None"),
    "a table": (lambda p, s: p.expand(s, s.rewards.reshape(2, 2)), "values of shape [2, 2] for 4 rollouts"),
    "values of a text": (lambda p, s: p.expand("x", [1.0]), "a str: 'x'"),
    "an array as a column": (lambda p, s: setattr(s, "advantages", s.rewards), "a ndarray: "),
    "a tensor as a column": (lambda p, s: setattr(s, "old_logprobs", torch.zeros(4)), "a Tensor: "),
    "minibatches of a text": (lambda p, s: [*p.minibatches("x")], "a str: 'x'"),
    "one of the samples": (lambda p, s: s[0], "a Experience: <4 samples of 2 prompts: "),
    "all samples": (lambda p, s: list(s), "a Experience: <4 samples of 2 prompts: "),
    "passes in words": (lambda p, s: [*p.minibatches(s, "two")], "a str: 'two'"),
}
RETURNED = (3, None, (torch.zeros(2), {}), (torch.zeros(()), 3), torch.zeros(()))
VALUES = [0.1, 2.0, -3.0, 1e30]


def use(rank: int, world_size: int, task: Path) -> dict[str, Any]:
    """Make every mistake, in rollout mode, and return the error's parts by mistake, and other findings."""
    given = overrides_for(task, task, "rollout.engine=hf", "data.validation_files=[]", "algorithm.kl_coef=0")
    run = megatron_rl.load(f"{task}/model", {}, given)
    found: dict[str, Any] = {}
    with run.policy.rollout_mode():
        samples = run.policy.sample(1, ["1+4=", "2+5="], n=2)
        found["samples"] = repr(samples)
        ids = run.inputs.tokenizer.encode("1+4=")
        kinds = ("1+4=", ["1+4="], [ids], [np.array(ids)], [torch.tensor(ids)])
        prompts = [run.policy.sample(1, given, n=1).prompts[0] for given in kinds]
        found["prompts"] = ids, [(prompt.tokens.tolist(), prompt.text) for prompt in prompts]
        for mistake, (call, _) in MISTAKES.items():
            found[mistake] = catch(lambda call=call: call(run.policy, samples))
    (minibatch,) = run.policy.minibatches(samples)
    for kind in RETURNED:
        found[f"loss {kind}"] = catch(
            lambda kind=kind: run.policy.forward_backward(minibatch, lambda *given: kind)  # type: ignore[misc]
        )
    found["columns"] = [run.policy.expand(samples, kind(VALUES)).values for kind in (list, np.array, torch.tensor)]
    run.policy.close()
    return found


def catch(call: Callable[[], Any]) -> list[str]:
    """The parts of the call's UserError."""
    try:
        call()
    except UserError as error:
        return [error.found, error.source, error.expected, error.hint]
    return []


def test_a_notebook_answers_every_mistake(task: Path) -> None:
    (found,) = run_ranks(use, 1, task, timeout=120)
    text = r"<4 samples of 2 prompts: \d+ response tokens, mean reward \S+; texts: fetch_rollouts; columns: none yet>"
    assert re.fullmatch(text, found["samples"])
    cell = UserError("3 cells", source="a notebook", expected="2", hint="remove one")
    assert cell._render_traceback_() == ["UserError: " + str(cell)], "IPython calls it in place of its traceback"
    ids, prompts = found["prompts"]
    assert prompts == [(ids, "1+4=")] * 5
    for mistake, (_, words) in MISTAKES.items():
        assert len(found[mistake]) == 4 and all(found[mistake]) and words in found[mistake][0], (
            mistake,
            found[mistake],
        )
    for kind in RETURNED:
        assert found[f"loss {kind}"][:1] == [f"the loss function returned {kind!r:.80}"]
    columns = found["columns"]
    assert all(column.equal(columns[0]) for column in columns)
    assert sorted(set(columns[0].tolist())) == sorted({0.0, *torch.tensor(VALUES).tolist()})


def define(module: str) -> Callable[..., Any]:
    """A function of a name that no other has, as a cell of `module` defines it."""
    space: dict[str, Any] = {"__name__": module}
    exec("def of_a_cell(inputs, config): return inputs", space)
    return space["of_a_cell"]


def test_a_cell_that_is_run_again_replaces_its_function() -> None:
    """Only if both are of the program itself; other names stay taken."""
    table = Registry[Any]("setting")
    for _ in range(2):
        table.add("mine", cell := define("__main__"), cell)
        assert table["mine"] is cell
    with pytest.raises(UserError, match='"mine" is registered already'):
        table.add("mine", other := define("plugin"), other)
    assert table["mine"] is cell
    with pytest.raises(UserError, match='"grpo" is registered already'):
        ADVANTAGE_ESTIMATORS.add("grpo", RegisteredEstimator(cell), cell)


def test_an_estimator_of_a_cell_is_replaced_too() -> None:
    table = Registry[Any]("setting")
    for _ in range(2):
        cell = define("__main__")
        assert table.enter(RegisteredEstimator(cell), cell) == "of_a_cell"
        assert table["of_a_cell"].estimate is cell


def test_a_directory_that_this_program_holds_says_so(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    with pytest.raises(UserError, match="is in use") as caught:
        RunLock(tmp_path).acquire()
    assert caught.value.hint == "a Trainer of this program holds it: call its close() before you make another one"
    lock.release()
    again = RunLock(tmp_path)
    again.acquire()
    again.release()
