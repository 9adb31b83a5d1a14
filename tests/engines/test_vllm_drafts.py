# SPDX-License-Identifier: Apache-2.0
"""Tokens that vLLM's layer for multi-token prediction drafts (`rollout.draft_tokens`): their law, log-probs and ends.

Runs with drafts are in tests/run/test_drafts_in_loop.py. Not covered: GPUs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mtp_models import MtpReference, read_tensors, save_model_with_mtp

from distributed import run_ranks
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.endings import StopStrings
from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, SamplingConfig
from megatron_rl.engines.token_requests import Extras
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.engines.vllm.vllm_library import draw_drafts, repeat_for_drafts
from megatron_rl.parallel.collectives import Process
from megatron_rl.rollout.generation import generate
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.rollout_layout import vllm_placements
from megatron_rl.weights.shard_box import box_slices
from tiny_models import engine_sizes

SAMPLED = SamplingConfig(temperature=1.0, max_tokens=24, stop_token_ids=(2,))
BOUND = 5.0  # standard deviations: a false alarm in 2 million


def build(model: Path, draft_tokens: int, **rollout: Any) -> VllmEngine:
    """An engine of one rank with the weights of a model."""
    shape = load_model_shape(model)
    spec = EngineSpec(
        model_path=str(model),
        shape=shape,
        dtype="float32",
        max_prompt_length=49,
        max_response_length=24,
        config=RolloutConfig(draft_tokens=draft_tokens, **rollout),
        process=Process(0, 1, 0, 1, torch.device("cpu")),
        seed=0,
        stop=None,
    )
    engine, tensors = VllmEngine(spec), read_tensors(model)
    for box in [*engine.placements(0), *(vllm_placements(shape.mtp, tp_size=1, place=0) if draft_tokens else ())]:
        engine.params[box.param][box_slices(box.local_box)] = tensors[box.hf_name][box_slices(box.hf_box)]
    engine.end_weight_update()
    return engine


def make_requests(sampling: SamplingConfig, count: int = 12) -> list[Request]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 500, 5 + 4 * i, dtype=np.int32) for i in range(count)]
    return [Request(i, prompt, 100 + i, sampling) for i, prompt in enumerate(prompts)]


def to_lists(generations: list[Sampled]) -> list[tuple[list[int], list[float], str]]:
    return [(g.tokens.tolist(), g.logprobs.tolist(), g.finish_reason) for g in generations]


def interrupt(engine: VllmEngine, requests: list[Request]) -> list[tuple[list[int], list[float], str]]:
    """Responses that are interrupted after four steps, and continued."""
    engine.add(requests)
    finished = {one.key: one for _ in range(4) for one in engine.step()}
    parts = {one.key: one for one in engine.interrupt([request.key for request in requests])}
    assert not engine.has_requests() and len(parts) > 6
    rest = [request.continued(parts[request.key].tokens, 900 + i) for i, request in enumerate(requests) if i in parts]
    ends = {one.key: one for one in generate(engine, rest)}
    found = []
    for key in range(len(requests)):
        pieces = [finished[key]] if key in finished else [parts[key], ends[key]]
        tokens, logprobs = (sum((getattr(one, x).tolist() for one in pieces), []) for x in ("tokens", "logprobs"))
        found.append((tokens, logprobs, pieces[-1].finish_reason))
    return found


def work(rank: int, world_size: int, model: Path, draft_tokens: int) -> dict[str, Any]:
    """Responses at several temperatures, again, in halves, and interrupted."""
    engine = build(model, draft_tokens, max_num_seqs=8)
    result: dict[str, Any] = {}
    for temperature in (0.0, 1.0, 0.7):
        requests = make_requests(replace(SAMPLED, temperature=temperature))
        result[str(temperature)] = to_lists(generate(engine, requests))
    result["load"] = dict(engine.load)
    requests = make_requests(SAMPLED)
    result["again"] = to_lists(generate(engine, requests))
    halves = requests[::2], requests[1::2]
    found = {one.key: one for half in halves for one in generate(engine, half)}
    result["halves"] = to_lists([found[request.key] for request in requests])
    result["interrupted"] = interrupt(engine, requests)
    engine.close()
    return result


@pytest.fixture(scope="module", params=["glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MtpReference]:
    path = tmp_path_factory.mktemp(request.param) / "model"
    return path, save_model_with_mtp(path, request.param, **engine_sizes(request.param))


@torch.no_grad()
def score(reference: MtpReference, request: Request, tokens: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of a response in transformers."""
    ids = torch.tensor([*request.tokens.tolist(), *tokens])
    logits = reference.compute_logits(ids[None])[0, len(request.tokens) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[len(request.tokens) :, None])[:, 0]


def test_samples_have_the_policys_log_probs(model: tuple[Path, MtpReference], vllm_imported: None) -> None:
    """At three temperatures, to the last token or a stop token; again, in other batches, and interrupted."""
    path, reference = model
    (found,), (plain,) = run_ranks(work, 1, path, 3), run_ranks(work, 1, path, 0)
    load = found.pop("load")
    assert 0.05 < load["accepted"] / load["drafted"] < 0.9 and not plain.pop("load")["drafted"]
    requests = make_requests(SAMPLED)
    for name, responses in found.items():
        temperature = float(name) or 1.0 if name[0].isdigit() else 1.0
        for request, (tokens, logprobs, reason) in zip(requests, responses, strict=True):
            expected = score(reference, request, tokens, temperature)
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)
            assert 2 not in tokens[:-1] and (reason == "stop") == (tokens[-1] == 2)
            assert len(tokens) == 24 if reason == "length" else len(tokens) <= 24
    assert {reason for _, _, reason in found["0.7"]} == {"stop", "length"}
    tokens = {name: [one for one, _, _ in responses] for name, responses in found.items()}
    assert tokens["0.0"] == [one for one, _, _ in plain["0.0"]]
    assert found["again"] == found["1.0"] and tokens["halves"] == tokens["1.0"]


def answer_single_tokens(rank: int, world_size: int, model: Path, max_num_seqs: int) -> Any:
    """Responses to prompts of one token, and the share of accepted drafts."""
    engine = build(model, 2, max_num_seqs=max_num_seqs)
    sampling = replace(SAMPLED, max_tokens=8, stop_token_ids=())
    requests = [Request(i, np.array([i % 8], np.int32), 10_000 + i, sampling) for i in range(60)]
    tokens, load = [one.tokens.tolist() for one in generate(engine, requests)], dict(engine.load)
    engine.close()
    return tokens, load["accepted"] / load["drafted"]


def test_requests_of_one_token_do_not_spoil_the_drafts_of_others(
    tiny: tuple[Path, MtpReference], vllm_imported: None
) -> None:
    """Requests that begin among others have the tokens and drafts of requests that begin together."""
    path, _ = tiny
    ((tokens, share),), ((others, same),) = (run_ranks(answer_single_tokens, 1, path, n) for n in (4, 60))
    assert tokens == others and share == same > 0.4


def read_text(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def work_on_ends(rank: int, world_size: int, model: Path, draft_tokens: int) -> Any:
    """Greedy responses; again, with stop strings of their own and the log-probs of other tokens."""
    engine = build(model, draft_tokens)
    greedy = replace(SAMPLED, temperature=0.0, stop_token_ids=())
    whole = [one.tokens.tolist() for one in generate(engine, make_requests(greedy))]
    cut = []
    for place in range(1, 6):  # among the tokens of a step
        stops = [StopStrings([read_text(tokens[place : place + 2])], read_text) for tokens in whole]
        requests = make_requests(greedy)
        requests = [replace(one, extras=Extras(stop, 2, 1)) for one, stop in zip(requests, stops, strict=True)]
        ends = [next(n for n in range(25) if stop.ends(t[:n])) for stop, t in zip(stops, whole, strict=True)]
        for tokens, end, one in zip(whole, ends, generate(engine, requests), strict=True):
            assert one.tokens.tolist() == tokens[:end] and one.finish_reason == "stop" and len(one.logprobs) == end
            cut.append(one.scores)
    engine.close()
    return whole, cut


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MtpReference]:
    """A model of eight tokens."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    return path, save_model_with_mtp(path, "glm4_moe", **engine_sizes("glm4_moe") | dict(vocab_size=8))


def test_stop_strings_end_among_the_tokens_of_a_step(tmp_path: Path, vllm_imported: None) -> None:
    """With the log-probs of the tokens up to there, of the likeliest tokens and of the prompt, as without drafts."""
    save_model_with_mtp(tmp_path / "model", "glm4_moe", **engine_sizes("glm4_moe"))
    ((whole, cut),), ((others, expected),) = (run_ranks(work_on_ends, 1, tmp_path / "model", n) for n in (3, 0))
    assert whole == others
    for found, right in zip(cut, expected, strict=True):
        for name, values in vars(right).items():
            np.testing.assert_allclose(getattr(found, name), values, atol=1e-5)


def deviate(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Standard deviations of Pearson's statistic from its mean, over cells of which at least ten are expected."""
    expected = probs * counts.sum()
    is_large = expected >= 10
    cells = [torch.cat([x[is_large], x[~is_large].sum()[None]]) for x in (counts.double(), expected.double())]
    freedom = len(cells[0]) - 1
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1].clamp(min=1e-9)).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drafts_are_accepted_by_the_ratio(
    temperature: float, vllm_imported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's sampler with given probabilities: each draft with min(1, p / q), and the tokens are samples of p."""
    sampler = import_module("vllm.v1.sample.rejection_sampler")
    monkeypatch.setattr(sampler, "expand_batch_to_tokens", repeat_for_drafts)
    torch.manual_seed(0)
    size, count = 6, 60_000
    logits, other = torch.randn(2, size) * 1.5
    p, q = (logits / temperature).softmax(-1), other.softmax(-1)
    metadata = SimpleNamespace(
        temperature=torch.full((count,), temperature), generators={}, all_greedy=False, all_random=True
    )
    metadata.top_k = metadata.top_p = None
    ends = torch.arange(1, count + 1, dtype=torch.int32)
    drafts = torch.multinomial(q, count, replacement=True).int()
    target = sampler.apply_sampling_constraints(logits.repeat(count, 1), ends, metadata)
    bonus = torch.full((count, 1), 7)
    found = sampler.rejection_sample(drafts, [1] * count, 1, ends, q.repeat(count, 1), target, bonus, metadata)
    is_accepted = found[:, 1] == 7
    assert (found[is_accepted, 0] == drafts[is_accepted]).all()
    for token, rate in enumerate((p / q).clamp(max=1).tolist()):
        mine = is_accepted[drafts == token].double()
        assert abs(mine.mean().item() - rate) <= BOUND * math.sqrt(rate * (1 - rate) / len(mine)) + 1e-9
    assert deviate(found[:, 0].bincount(minlength=size), p) < BOUND < deviate(drafts.bincount(minlength=size), p)


def test_drafts_are_drawn_by_the_requests_own_numbers() -> None:
    """From the layer's distribution at their temperature; the most likely one without; whatever the global stream."""
    logits, temperature = torch.randn(40_000, 6), torch.full((40_000,), 0.7)
    logits[:] = logits[0] * 2
    metadata = SimpleNamespace(temperature=temperature, generators={})
    tokens, probs = draw_drafts(logits, metadata)
    torch.testing.assert_close(probs[0], (logits[0] / 0.7).softmax(-1))
    assert deviate(tokens.bincount(minlength=6), probs[0]) < BOUND
    metadata.temperature = torch.tensor([0.0, 0.7, 0.7])
    found = set()
    for _ in range(4):
        metadata.generators = {1: torch.Generator().manual_seed(1), 2: torch.Generator().manual_seed(2)}
        tokens, probs = draw_drafts(logits[:3], metadata)
        found.add((*tokens.tolist(), metadata.generators[2].get_state().sum().item()))
    assert len(found) == 1 and tokens[0] == logits[0].argmax()


PROMPT = [1, 5, 3, 7, 4, 6, 0, 2, 3]


def draw_many(rank: int, world_size: int, model: Path, draft_tokens: int, sampling: SamplingConfig) -> Any:
    """Responses to one prompt with different seeds, [n, max_tokens], and the numbers of drafts and accepted ones."""
    engine = build(model, draft_tokens)
    requests = [Request(i, np.array(PROMPT, np.int32), 10_000 + i, sampling) for i in range(6000)]
    tokens = np.stack([one.tokens for one in generate(engine, requests)])
    load = dict(engine.load)
    engine.close()
    return torch.tensor(tokens), load["drafted"], load["accepted"]


@torch.no_grad()
def find_law(reference: MtpReference, temperature: float) -> torch.Tensor:
    """Probabilities of the next three tokens after `PROMPT`, [8, 8, 8]."""
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    logits = reference.compute_logits(torch.cat([torch.tensor(PROMPT).repeat(64, 1), pairs], 1))[:, len(PROMPT) - 1 :]
    first, second, third = (logits / temperature).softmax(-1).reshape(8, 8, 3, 8).unbind(2)
    return first[0, 0][:, None, None] * second[:, 0][:, :, None] * third


@pytest.mark.parametrize(("draft_tokens", "temperature"), [(2, 1.0), (2, 0.7), (0, 0.7)])
def test_samples_keep_the_policys_distribution(
    draft_tokens: int, temperature: float, tiny: tuple[Path, MtpReference], vllm_imported: None
) -> None:
    """The joint law of three tokens, of which drafts are the second and third; far from that of a temperature near."""
    path, reference = tiny
    sampling = SamplingConfig(temperature, max_tokens=3, stop_token_ids=())
    ((tokens, drafted, accepted),) = run_ranks(draw_many, 1, path, draft_tokens, sampling)
    counts = (tokens.long() @ torch.tensor([64, 8, 1])).bincount(minlength=512)
    assert deviate(counts, find_law(reference, temperature).flatten()) < BOUND
    assert deviate(counts, find_law(reference, {1.0: 0.7, 0.7: 0.9}[temperature]).flatten()) > BOUND
    assert (0.3 < accepted / drafted < 0.9) if draft_tokens else not drafted


def read_first_drafts(rank: int, world_size: int, model: Path) -> torch.Tensor:
    """The distribution [8] of the first draft after `PROMPT` and 4, in vLLM."""
    engine = build(model, 1)
    prompt = np.array([*PROMPT, 4], np.int32)
    # The first token is the prompt's next: of a few seeds, one gives 5.
    for seed in range(100):
        engine.add([Request(seed, prompt, seed, SamplingConfig(1.0, max_tokens=8, stop_token_ids=()))])
        engine.step()
        if engine._responses.running[engine._names[seed]].tokens == [5]:
            break
        engine.interrupt([seed])
    probs = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner._draft_probs[0, 0]
    engine.interrupt([seed])
    engine.close()
    return probs


def find_drafts(reference: MtpReference, tokens: list[int]) -> torch.Tensor:
    """The distribution [8] of the layer in transformers after these tokens."""
    ids = (torch.tensor([*tokens, token]) for token in range(8))
    return torch.stack([reference.score(one, as_served=True)[-1] for one in ids]).detach().exp()


def test_drafts_have_the_layers_distribution(tiny: tuple[Path, MtpReference], vllm_imported: None) -> None:
    """That of transformers, but for the second token's embedding, which vLLM leaves out."""
    path, reference = tiny
    (found,) = run_ranks(read_first_drafts, 1, path)
    torch.testing.assert_close(found, find_drafts(reference, [*PROMPT, 4, 5]), rtol=0, atol=1e-5)


def test_as_many_drafts_are_accepted_as_their_distribution_allows(
    tiny: tuple[Path, MtpReference], vllm_imported: None
) -> None:
    """The sum of min(p, q) over the second token of each response."""
    path, reference = tiny
    sampling = SamplingConfig(1.0, max_tokens=2, stop_token_ids=())
    ((_, drafted, accepted),) = run_ranks(draw_many, 1, path, 1, sampling)
    law = find_law(reference, 1.0).sum(2)
    q = torch.stack([find_drafts(reference, [*PROMPT, token]) for token in range(8)])
    rate = torch.minimum(law, law.sum(1, keepdim=True) * q).sum().item()
    assert drafted == 6000 and abs(accepted / drafted - rate) < BOUND * math.sqrt(rate * (1 - rate) / drafted)
