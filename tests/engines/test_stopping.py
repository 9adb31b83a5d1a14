# SPDX-License-Identifier: Apache-2.0
"""The end of a response at a stop string: as in vLLM and transformers, and in each engine with every token kept.

Not covered: GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.data.tokenizer import HuggingFaceTokenizer, check_stop_strings, find_stop_tokens
from megatron_rl.engines.build import build_engine
from megatron_rl.engines.endings import StopStrings
from megatron_rl.engines.protocol import EngineSpec, Request, SamplingConfig
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rollout.generation import generate
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import ENGINE_SIZES, save_tiny_model
from tools.parity.check import build_policy

CORPUS = [
    "The answer is 42.\n\nQuestion: what is <code> and </code>? ```python\nprint(1)\n``` stop Stopped stopping."
] * 4
TEXT = (
    "Let me see: 17+25.\n\nThe answer is 42.\n\nQuestion: stop </code> naïve 漢字 🙂 done. Stopped stopping\n```\nend"
)
STOPS = [
    ["\n\n"],
    ["\nQuestion"],
    ["Question:"],
    ["stop"],
    ["</code>"],
    ["```"],
    ["42"],
    ["4"],
    ["2.\n"],
    ["漢"],
    ["字 🙂"],
    ["🙂"],
    ["ïve"],
    ["é"],
    [" "],
    ["e answer is 42.\n\nQ"],
    ["never", "done"],
    ["done", "never"],
    ["Stopped stopping", "stopping"],
    ["\n\n", "17"],
    ["17", "\n\n"],
    ["+25", "25", "5"],
    ["5", "25.", "+25."],
    ["is 42.\n\nQuestion: stop", "Question"],
    ["LET", "let"],
    ["L"],
    ["Let me"],
    ["\nend"],
    ["nd"],
    ["end of it"],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """Byte pairs, so that a character can be spread over tokens, and a string over parts of tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>", "<|end|>"]
    bpe.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=517, special_tokens=special, initial_alphabet=alphabet)
    )
    directory = tmp_path_factory.mktemp("tokenizer")
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|end|>"])
    PreTrainedTokenizerFast(tokenizer_object=bpe, **names).save_pretrained(directory)
    return HuggingFaceTokenizer(directory)


def end_by(stop: StopStrings, tokens: list[int]) -> tuple[int | None, str]:
    """Tokens of the response and the text that rewards read."""
    for length in range(1, len(tokens) + 1):
        if stop.ends(tokens[:length]):
            return length, stop.read(tokens[:length])
    return None, stop.read(tokens)


def end_by_vllm(strings: list[str], tokens: list[int], tokenizer: Any) -> tuple[int | None, str]:
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    request: Any = SimpleNamespace(
        request_id="1", prompt_token_ids=[1], prompt_embeds=None, sampling_params=SamplingParams(stop=strings)
    )
    detokenizer = FastIncrementalDetokenizer(tokenizer, request)
    for length, token in enumerate(tokens, start=1):
        if detokenizer.update([token], False) is not None:
            return length, detokenizer.output_text
    return None, detokenizer.get_next_output_text(True, False)


@pytest.mark.parametrize("strings", STOPS, ids=lambda strings: repr(strings)[:30])
def test_a_response_ends_where_vllm_and_transformers_end_it(
    strings: list[str], tokenizer: HuggingFaceTokenizer, vllm_imported: None
) -> None:
    """After each token, in 30 cases; the text also equals vLLM's. Special tokens in between change nothing."""
    tokens = tokenizer.encode(TEXT)
    for sampled in (tokens, [token for pair in zip(tokens, [3] * len(tokens), strict=True) for token in pair]):
        found = end_by(StopStrings(strings, tokenizer.decode), sampled)
        assert found == end_by_vllm(strings, sampled, tokenizer._tokenizer)
    criteria, length = StopStringCriteria(tokenizer._tokenizer, strings), None
    for length in range(1, len(tokens) + 1):
        if criteria(torch.tensor([tokens[:length]]), torch.empty(0))[0]:
            break
    else:
        length = None
    ours = end_by(StopStrings(strings, tokenizer.decode), tokens)[0]
    is_broken_by_them = any(ord(character) > 127 for character in "".join(strings))  # it has tokens, not bytes
    assert ours == length or is_broken_by_them
    assert (ours is None) == (not any(string in TEXT for string in strings))


def test_only_the_end_of_a_response_is_looked_at(tokenizer: HuggingFaceTokenizer) -> None:
    """A string that was completed earlier, and one that begins in the tokens of an interrupted response."""
    stop = StopStrings(["42.\n"], tokenizer.decode)
    tokens = tokenizer.encode("is 42.\n and more than a window of tokens")
    length, text = end_by(stop, tokens)
    assert (
        length is not None and text == "is " and not any(stop.ends(tokens[:n]) for n in range(length + 1, len(tokens)))
    )
    request = Request(0, np.array([9, 9, *tokens[: length - 1]], np.int32), 0, GREEDY, num_sampled=length - 1)
    assert stop.ends(request.response(tokens[length - 1 : length])) and not stop.ends(tokens[length - 1 : length])
    assert not stop.ends([])
    late = replace(request, sampling=replace(GREEDY, min_tokens=length))
    assert request.ends_by(stop, tokens[length - 1 : length]) and not late.ends_by(stop, tokens[length - 1 : length])


@pytest.mark.parametrize("string", ["", "</s>", "<|end|>"])
def test_texts_that_no_response_has_are_refused(string: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="never is in a response"):
        check_stop_strings(["fine", string], tokenizer)
    assert find_stop_tokens(tokenizer, tmp_path, 517, [3, 2, 9]) == (2, 3, 9)
    with pytest.raises(UserError, match="token id 517"):
        find_stop_tokens(tokenizer, tmp_path, 517, [517])


GREEDY = SamplingConfig(temperature=0.0, max_tokens=24, stop_token_ids=())
SAMPLED = SamplingConfig(temperature=1.0, max_tokens=24, stop_token_ids=(2,))


def as_letters(tokens: list[int]) -> str:
    """Every token is two letters, so that a string can end inside of one."""
    return "".join(chr(97 + token % 7) + chr(97 + token // 7 % 7) for token in tokens)


def work(rank: int, world_size: int, model: Path, name: str, stop: StopStrings | None) -> list[tuple[Any, ...]]:
    process, shape = init_distributed(2), load_model_shape(model)
    policy = None
    if name == "megatron":
        policy = build_policy(model, shape, "float32", ParallelLayout(1), sequence_parallel=False)
    engine = build_engine(
        EngineSpec(
            model_path=str(model),
            shape=shape,
            dtype="float32",
            max_prompt_length=80,
            max_response_length=24,
            process=process,
            seed=0,
            config=RolloutConfig(engine=name, max_num_seqs=4, tensor_model_parallel_size=world_size),
            model=policy,
            stop=stop,
        )
    )
    if policy is None:
        load_huggingface(model, engine.weights.placements(process.rank), engine.weights.params)
    engine.weights.end_weight_update()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 517, 10 + 7 * i, dtype=np.int32) for i in range(8)]
    requests = [Request(i, prompt, i, SAMPLED) for i, prompt in enumerate(prompts)]
    found = [(s.tokens.tolist(), s.logprobs.tolist(), s.finish_reason) for s in generate(engine.requests, requests)]
    assert not engine.requests.has_requests()
    engine.requests.close()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen2", **ENGINE_SIZES, num_hidden_layers=2, tie_word_embeddings=False)
    return directory


@pytest.mark.parametrize(("name", "ranks"), [("vllm", 1), ("vllm", 2), ("hf", 1), ("megatron", 1)])
def test_an_engine_keeps_every_token_up_to_the_end(model: Path, vllm_imported: None, name: str, ranks: int) -> None:
    """With stop strings, a response is the beginning of the one without: no token is lost, none is invented."""
    stop = StopStrings(["abc", "eg", "ff"], as_letters)
    whole = run_ranks(work, ranks, model, name, None, timeout=150)[0]
    ended = run_ranks(work, ranks, model, name, stop, timeout=150)
    assert all(other == ended[0] for other in ended)
    lengths = []
    for (tokens, logprobs, reason), (found, scores, how) in zip(whole, ended[0], strict=True):
        length = next((n for n in range(1, len(tokens) + 1) if stop.ends(tokens[:n])), None)
        assert found == tokens[:length] and how == ("stop" if length else reason)
        assert scores == pytest.approx(logprobs[:length], abs=1e-5)
        lengths.append(length)
    assert len({*lengths}) > 3, "some end early, at different tokens"
