# SPDX-License-Identifier: Apache-2.0
"""Loops written with primitives: the one of docs/primitives.md, a loss given as a function, and a single process.

Not covered: a critic's calls and CUDA graphs of a given loss (both use the step that the trainer uses).
"""

from __future__ import annotations

import contextlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import megatron_rl
from distributed import run_ranks
from launch_runs import ROOT, assert_succeeded, fork_ranks, run_script
from megatron_rl.samples.experience import Experience
from megatron_rl.types import Prompt, UserError
from rl_runs import load_nested, overrides_for, read_records

LAYOUT = ["actor.tensor_model_parallel_size=2", "data.validation_files=[]"]


def read_loop() -> str:
    """The program of the page."""
    return re.findall(r"```python\n(# my_grpo.*?)```", (ROOT / "docs/primitives.md").read_text(), re.DOTALL)[0]


def test_the_loop_of_the_page_is_the_trainer(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """TP 2 with vLLM, two minibatches a step: records, weights and optimizer states, bit for bit."""
    (tmp_path / "my_grpo.py").write_text(read_loop())
    assert len(read_loop().splitlines()) <= 36
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            load_nested(overrides_for(task, tmp_path / "run", *LAYOUT, "checkpoint.contents=[optimizer,huggingface]"))
        )
    )
    (tmp_path / "first").mkdir()
    entry = partial(run_script, ROOT / "launch/pretrain_grpo.py", recipe)
    assert_succeeded(fork_ranks(entry, 2, tmp_path / "first"))
    loop = partial(run_script, tmp_path / "my_grpo.py", f"{task}/model", recipe, f"{tmp_path}/own")
    result = fork_ranks(loop, 2, tmp_path)
    assert_succeeded(result)
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"step"')]
    records = read_records(tmp_path / "run")
    assert len(found) == len(records) == 2 and len(found[0]) >= 9
    for mine, theirs in zip(found, records, strict=True):
        assert mine == {name: theirs[name] for name in mine}
    here, there = tmp_path / "own/step_2", tmp_path / "run/checkpoints/step_2"
    states = sorted(path.relative_to(there) for path in (there / "actor").glob("*.distcp"))
    assert len(states) == 2
    for path in states:
        assert (here / path).read_bytes() == (there / path).read_bytes()
    exported = tmp_path / "own/model/model.safetensors"
    assert exported.read_bytes() == (there / "huggingface/model.safetensors").read_bytes()


def list_rows(name: str) -> list[dict[str, str]]:
    """Rows of one of the programs on own data: an answer of one digit, which a random model gives now and then."""
    prompts = [f"{a}+{a + 3}=" for a in range(8)]
    if name == "my_dpo":
        return [{"prompt": prompt, "chosen": "11", "rejected": "2"} for prompt in prompts]
    return [{"prompt": prompt, "answer": "1"} for prompt in prompts]


@pytest.mark.parametrize("name", ["my_sft", "my_own_grpo", "my_dpo"])
def test_programs_on_own_data_learn(name: str, task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Two data parallel ranks print the same numbers, which improve."""
    program = re.findall(rf"```python\n(# {name}.*?)```", (ROOT / "docs/primitives.md").read_text(), re.DOTALL)[0]
    assert sum(bool(line.strip()) for line in program.splitlines()) <= 27
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in list_rows(name)))
    more = ["data.validation_files=[]", "algorithm.kl_coef=0", "trainer.total_steps=6", "actor.lr=3e-3"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(load_nested(overrides_for(task, tmp_path / "run", *more))))
    entry = partial(run_script, tmp_path / "program.py", f"{task}/model", recipe, tmp_path / "rows.jsonl")
    with contextlib.chdir(tmp_path):
        result = fork_ranks(entry, 2, tmp_path)
    assert_succeeded(result)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 12 and sorted(lines)[::2] == sorted(lines)[1::2]  # equal on both ranks
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    key, sign = {"my_sft": ("loss", -1), "my_own_grpo": ("reward", 1), "my_dpo": ("margin", 1)}[name]
    assert sign * (last[key] - first[key]) > {"loss": 0.5, "reward": 0.1, "margin": 0.05}[key], lines


def clipped(batch: Any, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = (logprobs - batch.old_logprobs).exp()
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    gain = torch.where(batch.loss_mask, gain, 0.0)
    return -(batch.loss_weights * gain).sum(), {"ratio": torch.where(batch.loss_mask, ratio, 0.0).sum()}


def describe(samples: Experience, decode: Any) -> list[tuple[str, float]]:
    found = samples.fetch_rollouts(range(len(samples.rewards)), decode)
    return [(rollout.response, float(rollout.rollout_logprobs.sum())) for rollout, _ in found]


def learn(policy: Any, samples: Experience, loss: Any) -> list[dict[str, float]]:
    samples.old_logprobs = policy.logprobs(samples)
    samples.advantages = policy.expand(samples, samples.rewards - samples.rewards.mean())
    updates = []
    for minibatch in policy.minibatches(samples):
        policy.forward_backward(minibatch, loss)
        updates.append(policy.optim_step())
    return updates


def sample(policy: Any, prompt: Prompt) -> Experience:
    with policy.rollout_mode():
        return policy.sample(1, [prompt], n=32)


def use_interactively(rank: int, world_size: int, task: Path, out: Path) -> None:
    """One process without torchrun: sample, update, sample again, go back, and take the same step another way."""
    run = megatron_rl.load(
        task / "model", load_nested(overrides_for(task, out, *LAYOUT[1:], "rollout.engine=hf", "algorithm.kl_coef=0"))
    )
    policy, decode, algorithm = run.policy, run.inputs.tokenizer.decode, run.config.algorithm
    assert run.reference is None and run.critic is None
    assert policy.optim_step() == {}  # there are no gradients
    with pytest.raises(UserError, match="prompt 0 has 9 tokens"):
        sample(policy, Prompt(0, np.zeros(9, np.int32), "", None))
    for call in (lambda: policy.sample(1), lambda: policy.validate({})):
        with pytest.raises(UserError, match=r"outside rollout mode(?s:.*)with policy.rollout_mode\(\)"):
            call()
    saved = policy.save(out, 0)
    prompt = Prompt(0, np.array(run.inputs.tokenizer.encode("1+4="), np.int32), "1+4=", ground_truth="5")
    first = sample(policy, prompt)
    before = describe(first, decode)
    assert len(before) == 32 and len({text for text, _ in before}) > 1

    with pytest.raises(UserError, match="without old_logprobs, and an epoch has 2 optimizer steps"):
        policy.forward_backward(next(policy.minibatches(first)), algorithm)
    updates = learn(policy, first, algorithm)
    assert len(updates) == 2 and all(update["policy/grad_norm"] > 0 for update in updates)
    second = sample(policy, prompt)
    after = describe(second, decode)
    assert after != before  # the engine has the new weights
    batch = policy.read(second)
    gap = (policy.logprobs(second).values - batch.rollout_logprobs)[batch.loss_mask].abs().max()
    assert gap < 1e-5
    weights = {name: value.clone() for name, value in policy.model.params.items()}

    assert policy.load(saved) == 0
    again = sample(policy, prompt)
    assert describe(again, decode) == before
    given = learn(policy, again, clipped)
    assert set(given[0]) == {"clipped/loss", "clipped/ratio", "policy/grad_norm", "policy/lr"}
    assert given[0]["clipped/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert [update["clipped/loss"] for update in given] == pytest.approx([u["policy/loss"] for u in updates], abs=1e-7)
    # The same loss written in another order of operations.
    for name, value in policy.model.params.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=2e-5)
    policy.close()


def test_a_single_process_samples_updates_and_samples_again(task: Path, tmp_path: Path) -> None:
    """As in a notebook: no torchrun, no reload in between; a saved state restores its responses bit for bit."""
    run_ranks(use_interactively, 1, task, tmp_path, timeout=200)
