# SPDX-License-Identifier: Apache-2.0
"""Requests with settings of their own, answered by vLLM and transformers: log-probs equal the trainer's and float64.

Not covered: GPUs, vLLM's model runner v2.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import megatron_rl
from distributed import run_ranks
from megatron_rl.engines.token_requests import TokenRequest
from megatron_rl.training.datums import Datum
from megatron_rl.types import UserError
from rl_runs import load_nested, overrides_for

SETTINGS = ["data.validation_files=[]", "algorithm.kl_coef=0"]
TOP = 3


def open_policy(task: Path, out: Path, *more: str) -> Any:
    return megatron_rl.load(task / "model", load_nested(overrides_for(task, out, *SETTINGS, *more)))


def ask(rank: int, world_size: int, task: Path, out: Path, more: tuple[str, ...]) -> Any:
    """Responses to a mixture of requests, and the trainer's log-probs of what they consist of."""
    run = open_policy(task, out, *more)
    encode, vocabulary = run.inputs.tokenizer.encode, run.policy.model.shape.vocab_size
    texts = ["1+4=", "2+2", "3", "9+9=18", "5+"]
    requests = [
        TokenRequest(encode(text), 5, index, temperature=0.7 + index / 10, stop_token_ids=(), prompt_logprobs=index - 1)
        if index
        else TokenRequest(encode(text), 5, 7, temperature=1.0, stop_token_ids=(), top_logprobs=TOP, prompt_logprobs=TOP)
        for index, text in enumerate(texts)
    ]
    plain = [TokenRequest(encode("1+4="), 5, 7, stop_token_ids=()), TokenRequest(encode("1+4="), 5, 7, temperature=0)]
    with run.policy.rollout_mode():
        found = run.policy.sample_requests([*requests, *plain])
        decode = run.inputs.tokenizer.decode
        letter = decode(chosen := found[0].tokens.tolist())[1]
        length = next(n for n in range(1, 6) if letter in decode(chosen[:n]))
        stopped = run.policy.sample_requests(
            [TokenRequest(requests[0].tokens, 5, 7, stop=[letter], stop_token_ids=()), plain[0]]
        )
        cut = run.policy.sample_requests([TokenRequest(requests[0].tokens, 5, 7, top_k=1, stop_token_ids=())])
        ended = run.policy.sample_requests([TokenRequest(requests[0].tokens, 5, 7, stop_token_ids=[chosen[2]])])
    first = found[0]
    tokens = np.concatenate([requests[0].tokens, first.tokens]).astype(np.int64)
    prompt = len(requests[0].tokens)
    own = Datum(tokens[:-1], tokens[1:])
    tops = np.concatenate([first.scores.prompt_top_ids[1:], first.scores.top_ids])
    (logprobs, likeliest), _ = run.policy.forward_backward_datums(
        [own, Datum(tokens[:-1], tops.astype(np.int64))], "cross_entropy", backward=False
    )
    run.policy.close()
    return found, stopped, cut, ended, length, (prompt, logprobs, likeliest), vocabulary, [r.tokens for r in requests]


def check(result: Any, task: Path) -> None:
    found, stopped, cut, ended, length, (prompt, logprobs, likeliest), vocabulary, prompts = result
    first = found[0]
    assert len(first.tokens) == 5 and first.finish_reason == "length" and first.scores.top_ids.shape == (5, TOP)
    np.testing.assert_allclose(first.scores.prompt_logprobs[1:], logprobs[: prompt - 1], atol=2e-5)
    np.testing.assert_allclose(first.logprobs, logprobs[prompt - 1 :], atol=2e-5)
    np.testing.assert_allclose(first.scores.prompt_top_logprobs[1:], likeliest[: prompt - 1], atol=2e-5)
    np.testing.assert_allclose(first.scores.top_logprobs, likeliest[prompt - 1 :], atol=2e-5)
    net = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float64)
    for one, tokens in zip(found[:5], prompts, strict=True):  # the prompts of all, at temperature 1
        logp = net(torch.tensor(tokens)[None]).logits[0].log_softmax(-1)[:-1].detach()
        expected = logp.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        scores = one.scores
        assert np.isnan(scores.prompt_logprobs[0]) and len(scores.prompt_logprobs) == len(tokens)
        np.testing.assert_allclose(scores.prompt_logprobs[1:], expected.numpy(), atol=2e-5)
        width = scores.prompt_top_ids.shape[1]
        np.testing.assert_allclose(scores.prompt_top_logprobs[1:], logp.topk(width)[0].numpy(), atol=2e-5)
        assert scores.prompt_top_ids.max(initial=0) < vocabulary and not scores.prompt_top_ids[0].any()
    assert [one.scores.prompt_top_ids.shape[1] for one in found[:5]] == [TOP, 0, 1, 2, 3]
    same, greedy = found[5:]
    assert same.scores is None and same.tokens.tolist() == first.tokens.tolist()  # a seed, a response
    assert cut[0].tokens.tolist() == greedy.tokens.tolist()[:5] or greedy.finish_reason == "stop"
    short, whole = stopped
    assert short.finish_reason == "stop" and whole.tokens.tolist() == first.tokens.tolist()
    assert length < 5 and short.tokens.tolist() == first.tokens.tolist()[:length]
    np.testing.assert_array_equal(short.logprobs, whole.logprobs[:length])
    assert ended[0].finish_reason == "stop" and len(ended[0].tokens) == first.tokens.tolist().index(first.tokens[2]) + 1


LAYOUTS = {
    "hf": (1, ("rollout.engine=hf",)),
    "vllm": (1, ()),
    "hf-dp2": (2, ("rollout.engine=hf",)),
    "vllm-tp2": (2, ("actor.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_responses_and_their_logprobs(layout: str, task: Path, tmp_path: Path, vllm_imported: None) -> None:
    world_size, more = LAYOUTS[layout]
    for result in run_ranks(ask, world_size, task, tmp_path, more, timeout=200):
        check(result, task)


def refuse(rank: int, world_size: int, task: Path, out: Path) -> None:
    run = open_policy(task, out, "rollout.engine=megatron")
    policy, make = run.policy, partial(TokenRequest, [1, 2])
    with pytest.raises(UserError, match="sample_requests outside rollout mode"):
        policy.sample_requests([make(1)])
    cases = [
        (make(0), "max_tokens 0"),
        (make(15), "2 tokens, max_tokens 15(?s:.*)at most 16 in all"),
        (TokenRequest([], 1), "at least one"),
        (TokenRequest([1, policy.model.shape.vocab_size], 1), "token ids below"),
        (make(1, seed=-1), "seed -1"),
        (make(1, top_p=0.0), "top_p 0.0"),
        (make(1, temperature=-1.0), "temperature -1.0"),
        (make(1, stop="end"), "a list of strings"),
        (make(1, stop=["end"]), "rollout.engine megatron"),
        (make(1, prompt_logprobs=0), "rollout.engine megatron"),
        ([1, 2], "a list"),
    ]
    with policy.rollout_mode():
        for request, message in cases:
            with pytest.raises(UserError, match=message):
                policy.sample_requests([make(1), request])
        assert [len(one.tokens) for one in policy.sample_requests([make(3, stop_token_ids=()), make(1)])] == [3, 1]
        assert policy.sample_requests([]) == []
    policy.close()


def test_wrong_requests_are_refused(task: Path, tmp_path: Path) -> None:
    run_ranks(refuse, 1, task, tmp_path, timeout=100)
