# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server as an engine, against the engine in the process with the same weights: one server for all of it.

Servers that fail are in test_served_failures.py, the whole program in tests/run/test_served_in_loop.py. Not
covered: GPUs, servers on other nodes.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests
import torch

from distributed import run_ranks
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.config.sections import ServerConfig
from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, SamplingConfig
from megatron_rl.engines.servers.served import ServedEngine, Server
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.parallel.collectives import Process
from megatron_rl.rollout.generation import generate
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.shard_box import box_slices
from tiny_models import ENGINE_SIZES, save_tiny_model

HOT = SamplingConfig(temperature=1.0, max_tokens=24, stop_token_ids=(2, 7))
COLD = SamplingConfig(temperature=0.6, max_tokens=24, stop_token_ids=(2, 7))
LONG = SamplingConfig(temperature=1.0, max_tokens=1500, stop_token_ids=())
CUT = [replace(HOT, top_k=20, top_p=0.9), replace(COLD, min_p=0.02), replace(HOT, top_p=0.95, max_kept_tokens=7)]
# A server that loads weights for `openai`: its three calls are the user's hook.
HOOK = (
    "python -c \"import os, requests, sys; url, path = sys.argv[1:]; key = os.environ['MEGATRON_RL_SERVER_KEY']; "
    "told = dict(headers=dict(authorization='Bearer ' + key)); requests.post(url + '/collective_rpc', json=dict("
    "method='reload_weights', kwargs=dict(weights_path=path)), **told).raise_for_status(); "
    "requests.post(url + '/reset_prefix_cache', **told).raise_for_status()\" {url} {{directory}}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen2", **ENGINE_SIZES, num_hidden_layers=2, max_position_embeddings=2048)
    return directory


def make_spec(model: Path, **rollout: Any) -> EngineSpec:
    """Return the spec of an engine of one rank."""
    return EngineSpec(
        model_path=str(model),
        shape=load_model_shape(model),
        dtype="float32",
        max_prompt_length=100,
        max_response_length=1500,
        config=RolloutConfig(max_num_seqs=16, **rollout),
        process=Process(0, 1, 0, 1, torch.device("cpu")),
        seed=0,
    )


def draw_weights(served: ServedEngine, engine: VllmEngine | None, seed: int) -> None:
    """Write the same random weights into the server and the engine."""
    generator = torch.Generator().manual_seed(seed)
    for param in served.params.values():
        param.normal_(std=0.15, generator=generator)
    served.end_weight_update()
    if engine is not None:
        for box in engine.placements(0):
            engine.params[box.param][box_slices(box.local_box)] = served.params[box.hf_name][box_slices(box.hf_box)]
        engine.end_weight_update()


def make_requests(sampling: SamplingConfig, count: int = 12) -> list[Request]:
    """Prompts that share their first 40 tokens, more than a block of the prefix cache."""
    rng = np.random.default_rng(1)
    prefix = rng.integers(3, 517, 40)
    prompts = [np.append(prefix, rng.integers(3, 517, length)).astype(np.int32) for length in range(1, count + 1)]
    return [Request(key, prompt, (1 << 62) + key, sampling) for key, prompt in enumerate(prompts)]


def to_lists(sampled: list[Sampled]) -> list[tuple[list[int], list[float], str]]:
    return [(one.tokens.tolist(), one.logprobs.tolist(), one.finish_reason) for one in sampled]


def make_cut_requests(*samplings: SamplingConfig) -> list[Request]:
    """Each with one of several ways of drawing, the last ones with the whole vocabulary."""
    kinds = [*samplings, HOT]
    return [replace(one, sampling=kinds[one.key % len(kinds)]) for one in make_requests(HOT)]


def list_kept(sampled: list[Sampled]) -> list[list[list[int]] | None]:
    return [one.kept and [part.ids.tolist() for part in one.kept.split()] for one in sampled]


def interrupt_cut(engine: ServedEngine) -> tuple[list[int], list[list[list[int]] | None]]:
    """Numbers of tokens at an early end, and the sets that come with them."""
    engine.add([replace(one, sampling=replace(one.sampling, max_tokens=1500)) for one in make_cut_requests(*CUT)])
    deadline = time.monotonic() + 60
    while engine.tokens_in_flight() < 30:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    partial = engine.interrupt(range(12))
    return [len(one.tokens) for one in partial], list_kept(partial)


def probe_with_and_without_cache(served: ServedEngine) -> list[list[tuple[list[int], list[float], str]]]:
    """Return the server's log-probs of the probe after an update that keeps the prefix cache, and after a full one."""
    server, found = served._server, []
    for param in served.params.values():
        param.normal_(std=0.15, generator=torch.Generator().manual_seed(4))
    served.write(served._directory)

    def keep_cache(path: str, body: Any = None, method: str = "POST") -> Any:
        return {"success": True} if path == "/reset_prefix_cache" else server._ask(path, body, method)

    for ask in (keep_cache, server._ask):
        server._api.load(ask, served._directory, f"update {len(found)}")
        found.append(to_lists([one for _, one in server.probe()]))
    return found


def interrupt(engine: ServedEngine) -> list[Any]:
    """Return twelve long responses interrupted near their first tokens, and whether any request is left."""
    engine.add(make_requests(LONG))
    deadline = time.monotonic() + 60
    while engine.tokens_in_flight() < 12:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    partial = engine.interrupt([0, 1, 2, 99])
    engine.interrupt(range(3, 12))
    return [to_lists(partial), engine.has_requests(), engine.tokens_in_flight()]


def ask_without_key(server: Server) -> dict[str, set[int]]:
    """Statuses of a server's routes without its key, with another one, and with it."""
    bodies = {"/collective_rpc": {"method": "get_model"}, "/v1/completions": {"model": "policy", "prompt": "a"}}
    paths = ["/health", "/v1/models", "/metrics", "/version", "/openapi.json", "/server_info", "/collective_rpc"]
    paths += ["/reset_prefix_cache", "/pause", "/inference/v1/generate", "/v1/completions", "/nowhere"]
    found: dict[str, set[int]] = {}
    for name, key in (("none", None), ("another", "x"), ("the key", server.client.key)):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        known = ("/health", "/v1/models") if name == "the key" else paths
        found[name] = {
            requests.request(
                method, server.title + path, json=bodies.get(path), headers=headers, timeout=20
            ).status_code
            for path in known
            for method in (("GET",) if name == "the key" else ("GET", "POST", "OPTIONS"))
        }
    return found


def find_key(server: Server) -> list[str]:
    """Return the places that expose a server's key: argument lists of its processes, or its log."""
    assert server._process is not None and server.client.key
    processes = [psutil.Process(pid) for pid in _list_session(server._process._process.pid)]
    shown = {f"arguments of {one.pid}": " ".join(one.cmdline()) for one in processes} | {
        "log": server._process.read_log()
    }
    assert len(processes) > 2
    return [place for place, text in shown.items() if server.client.key in text]


def work(rank: int, world_size: int, model: Path) -> dict[str, Any]:
    """Run every check on the server, and on the engine in the process."""
    engine, served = VllmEngine(make_spec(model)), ServedEngine(make_spec(model, engine="vllm_server"))
    server = served._server
    result: dict[str, Any] = {}
    draw_weights(served, engine, 1)
    result["ours"] = [to_lists(generate(engine, make_requests(sampling))) for sampling in (HOT, COLD)]
    result["theirs"] = [to_lists(generate(served, make_requests(sampling))) for sampling in (HOT, COLD)]
    result["statuses"], result["key seen"] = ask_without_key(server), find_key(server)
    os.environ["MEGATRON_RL_SERVER_KEY"] = server.client.key or ""  # for the engines that did not start it
    result["cached"] = [[one.num_cached for one in generate(e, make_requests(HOT))] for e in (engine, served)]
    cut = [generate(one, make_cut_requests(*CUT)) for one in (engine, served)]
    result["cut"], result["kept"] = [to_lists(one) for one in cut], [list_kept(one) for one in cut]
    result["cut short"] = interrupt_cut(served)
    result["whole"] = to_lists(generate(served, make_requests(LONG, 3)))
    result["interrupted"] = interrupt(served)
    draw_weights(served, engine, 2)
    result["ours"].append(to_lists(generate(engine, make_requests(HOT))))
    result["theirs"].append(to_lists(generate(served, make_requests(HOT))))
    result["probe"] = [to_lists([one for _, one in probed]) for probed in (served.probe(), served.probe()) if probed]
    result["cache"] = probe_with_and_without_cache(served)
    settings = ServerConfig(
        endpoints=[server.title], directory=str(model / "served"), on_update=HOOK.format(url=server.title)
    )
    foreign = ServedEngine(make_spec(model, engine="openai", server=settings))
    draw_weights(foreign, engine, 3)
    result["ours"].append(to_lists(generate(engine, make_requests(HOT))))
    result["theirs"].append(to_lists(generate(foreign, make_requests(HOT))))
    foreign.close()
    other = ServedEngine(make_spec(model, engine="vllm_server", server=settings))
    draw_weights(other, engine, 5)
    result["ours"].append(to_lists(generate(engine, make_requests(HOT))))
    result["theirs"].append(to_lists(generate(other, make_requests(HOT))))
    other.close()
    assert server._process is not None
    result["children"], result["directory"] = server._process._process.pid, str(served._directory)
    served.close()
    return result


@pytest.fixture(scope="module")
def found(model: Path, vllm_imported: None) -> dict[str, Any]:
    return run_ranks(work, 1, model, timeout=400.0)[0]


pytestmark = pytest.mark.slow
NAMES = [
    "temperature 1",
    "temperature 0.6",
    "after an update",
    "openai, after an update by a hook",
    "another trainer of a server that runs",
]


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_equal_seeds_give_the_samples_of_the_engine_in_the_process(found: dict[str, Any], index: int) -> None:
    """Tokens and reasons are equal; log-probs up to the batch that a token was computed in."""
    ours, theirs = found["ours"][index], found["theirs"][index]
    assert [one[0] for one in ours] == [one[0] for one in theirs]
    assert [one[2] for one in ours] == [one[2] for one in theirs]
    assert {reason for _, _, reason in theirs} <= {"stop", "length"}
    for (_, expected, _), (_, logprobs, _) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_nothing_is_answered_without_the_key(found: dict[str, Any]) -> None:
    """Neither vLLM's own routes nor those of its development mode, which load code."""
    assert found["statuses"] == {"none": {401}, "another": {401}, "the key": {200}}
    assert found["key seen"] == []


def test_truncated_sampling_brings_its_sets(found: dict[str, Any]) -> None:
    """As in the process, in one batch of several kinds; also for interrupted responses."""
    ours, theirs = found["cut"]
    assert [one[0] for one in ours] == [one[0] for one in theirs]
    for (_, expected, _), (_, logprobs, _) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    ours, theirs = found["kept"]
    assert [[{*part} for part in sets or []] for sets in ours] == [[{*part} for part in sets or []] for sets in theirs]
    assert [sets is None for sets in theirs] == [key % 4 == 3 for key in range(12)]
    assert max(len(part) for part in theirs[0]) <= 20 and max(len(part) for part in theirs[2]) == 7
    lengths, sets = found["cut short"]
    assert [len(one) for one in sets if one is not None] == [n for key, n in enumerate(lengths) if key % 4 != 3]
    assert sum(lengths) >= 30


def test_tokens_in_the_prefix_cache_are_counted(found: dict[str, Any]) -> None:
    """A block of 32 of the 40 shared prompt tokens, which an earlier request has cached."""
    assert found["cached"] == [[32] * 12] * 2


def test_stop_tokens_are_part_of_the_response(found: dict[str, Any]) -> None:
    stopped = [one for index in range(4) for one in found["theirs"][index] if one[2] == "stop"]
    assert stopped and all(one[0][-1] in (2, 7) and not {2, 7} & {*one[0][:-1]} for one in stopped)


def test_updates_change_what_is_sampled(found: dict[str, Any]) -> None:
    """Otherwise equality would prove nothing about the update or the prefix cache, which holds these prompts."""
    first, second, third = (found["theirs"][index] for index in (0, 2, 3))
    assert first != second != third


def test_interrupted_responses_are_the_beginning_of_whole_ones(found: dict[str, Any]) -> None:
    partial, *left = found["interrupted"]
    assert left == [False, 0] and any(tokens for tokens, _, _ in partial)
    for (tokens, logprobs, reason), (whole, expected, _) in zip(partial, found["whole"], strict=True):
        assert tokens == whole[: len(tokens)]
        assert (reason == "interrupted") == (len(tokens) < 1500), "on a busy machine one may be finished"
        np.testing.assert_allclose(logprobs, expected[: len(tokens)], atol=1e-5)


def test_prefix_cache_of_older_weights_shows_in_the_probe(found: dict[str, Any]) -> None:
    """vLLM keeps it when it loads weights: without a reset the first token is scored with keys of other weights."""
    stale, fresh = ([(tokens[0], logprobs[0]) for tokens, logprobs, _ in one] for one in found["cache"])
    for (old, before), (new, after) in zip(stale, fresh, strict=True):
        assert old != new or abs(before - after) > 1e-3, (stale, fresh)  # the bound of the probe


def test_probe_is_the_same_as_long_as_the_weights_are(found: dict[str, Any]) -> None:
    first, second = found["probe"]
    assert [one[0] for one in first] == [one[0] for one in second] and [len(one[0]) for one in first] == [8, 8]
    np.testing.assert_allclose(first[0][1], second[0][1], atol=1e-5)


def test_nothing_is_left(found: dict[str, Any]) -> None:
    """Neither the server with its children, which are a session, nor its files."""
    assert not Path(found["directory"]).parent.exists()
    deadline = time.monotonic() + 30
    while _list_session(found["children"]):  # processes that were killed take a moment
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _list_session(leader: int) -> list[int]:
    members = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if os.getsid(int(path.name)) == leader and "Z" not in (path / "stat").read_text().rsplit(")")[1][:3]:
                    members.append(int(path.name))
            except (ProcessLookupError, FileNotFoundError):
                pass
    return members


def test_settings_of_a_server_are_those_of_the_engine_in_the_process(model: Path) -> None:
    """As a command line, without settings of a single rank."""
    spec = make_spec(model)
    command = build_command(spec)
    pairs = dict(zip(command, command[1:], strict=False))
    assert pairs["--dtype"] == "float32" and pairs["--max-model-len"] == "1600" and pairs["--max-num-seqs"] == "16"
    assert pairs["--logprobs-mode"] == "processed_logprobs" and pairs["--tensor-parallel-size"] == "1"
    assert "--no-enable-chunked-prefill" in command and "--enforce-eager" in command
    assert not {"--load-format", "--distributed-executor-backend"} & {*command}
    two = build_command(replace(spec, config=replace(spec.config, tensor_model_parallel_size=2)))
    assert dict(zip(two, two[1:], strict=False))["--tensor-parallel-size"] == "2"


def build_command(spec: EngineSpec) -> list[str]:
    from megatron_rl.engines.servers.server_apis import VllmServer

    return VllmServer(spec).make_command(Path("/weights"), 8000)
