# SPDX-License-Identifier: Apache-2.0
"""Requests to SGLang's server, and the parsing of its responses; without a server.

The real one is in tests/run/test_served_in_loop.py, with and without truncated sampling.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.config.sections import ServerConfig
from megatron_rl.engines.endings import StopStrings
from megatron_rl.engines.protocol import EngineSpec, Request, SamplingConfig
from megatron_rl.engines.servers.server_apis import SglangServer
from megatron_rl.engines.servers.server_client import ServerAnswer, ServerFailure
from megatron_rl.parallel.collectives import Process
from megatron_rl.weights.families import ModelShape

WHOLE = SamplingConfig(temperature=0.7, max_tokens=9, stop_token_ids=(2,))
CUT = replace(WHOLE, top_k=3, top_p=0.9)
MASKS, SCORES = [[5, 8], [7], [9, 5, 6]], [-0.7, 0.0, -1.1]


def make_server(version: str = "a-1", seed: int = 0) -> SglangServer:
    """A server that has weights."""
    config = RolloutConfig(engine="sglang", max_kept_tokens=100, server=ServerConfig(python="python"))
    process, shape = Process(0, 1, 0, 1, torch.device("cpu")), cast(ModelShape, None)  # which it does not look at
    server = SglangServer(EngineSpec("model", shape, "float32", 40, 24, config, process, seed=seed))
    server.load(lambda path, body=None: {"success": True}, Path("weights"), version)
    return server


def make_request(sampling: SamplingConfig) -> Request:
    return Request(0, np.arange(3, 9, dtype=np.int32), 100, sampling)


def make_event(first: int, last: int, reason: dict[str, Any] | None = None, version: str = "a-1") -> dict[str, Any]:
    """Tokens 5, 7 and 9, of which the event brings those from `first` to `last`."""
    meta = {
        "weight_version": version,
        "finish_reason": reason,
        "completion_tokens": last,
        "cached_tokens": 4,
        "output_token_logprobs": [[-2.0 - i, None, None] for i in range(first, last)],
        "output_token_sampling_mask": MASKS[first:last],
        "output_token_sampling_logprobs": SCORES[first:last],
    }
    return {"output_ids": [5, 7, 9][first:last], "meta_info": meta}


@pytest.mark.parametrize("begins", [(0, 1), (0, 0)], ids=["new tokens", "all tokens so far"])
def test_truncated_answers_bring_what_was_drawn_from(begins: tuple[int, int]) -> None:
    """And the log-probs of that; whole ones the log-probs of the whole vocabulary, and no sets."""
    server = make_server()
    for sampling, logprobs, kept in ((CUT, SCORES, MASKS), (WHOLE, [-2.0, -3.0, -4.0], None)):
        answer = ServerAnswer(make_request(sampling))
        server.read(make_event(begins[0], 1), answer)
        server.read(make_event(begins[1], 3, {"type": "length", "length": 3}), answer)
        found = answer.to_sampled()
        assert found.tokens.tolist() == [5, 7, 9] and found.finish_reason == "length" and found.num_cached == 4
        assert found.logprobs.tolist() == pytest.approx(logprobs)
        assert (found.kept and [part.ids.tolist() for part in found.kept.split()]) == kept


def test_event_without_a_token() -> None:
    """The end of a response may come by itself."""
    server, answer = make_server(), ServerAnswer(make_request(CUT))
    server.read(make_event(0, 3), answer)
    server.read(make_event(0, 3, {"type": "stop", "matched": 9}), answer)
    assert answer.tokens == [5, 7, 9] and answer.finish_reason == "stop" and len(answer.kept) == 3


def test_sets_end_where_a_stop_string_ends_the_answer() -> None:
    server, answer = make_server(), ServerAnswer(make_request(CUT))
    server.read(make_event(0, 3), answer)
    assert answer.completes_text(StopStrings(["7"], lambda tokens: "".join(map(str, tokens))), 0)
    found = answer.to_sampled()
    assert found.tokens.tolist() == [5, 7] and found.kept is not None and found.kept.counts.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (WHOLE, None),
        (replace(CUT, temperature=0.0), None),
        (CUT, (3, 0.9, 0.0)),
        (replace(WHOLE, min_p=0.1), (1024, 1.0, 0.1)),
        (replace(CUT, top_k=30, max_kept_tokens=7), (7, 0.9, 0.0)),
    ],
)
def test_limits_are_asked_for_with_their_sets(
    sampling: SamplingConfig, expected: tuple[int, float, float] | None
) -> None:
    """SGLang returns only sets bounded by `top_k`, so `top_k` is always set."""
    body = make_server().make_body(make_request(sampling))
    drawn = body["sampling_params"]
    assert body["return_sampling_mask"] == (expected is not None) and drawn["stop_token_ids"] == [2]
    assert (drawn["top_k"], drawn["top_p"], drawn["min_p"]) == expected if expected else "top_k" not in drawn
    command = make_server().make_command(Path("weights"), 8000)
    assert command[command.index("--sampling-mask-max-tokens") + 1] == "200"


def test_the_key_is_no_argument_of_the_process(tmp_path: Path) -> None:
    """A module in place of SGLang's, which takes the key as an argument only, records its arguments."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import json, sys\nassert __name__ == '__main__'\n"
        "print(json.dumps([sys.argv[1:], open('/proc/self/cmdline').read()]))"
    )
    command = [sys.executable, *make_server().make_command(Path("weights"), 8000)[1:]]
    variables = {"MEGATRON_RL_SERVER_KEY": "the-key", "PYTHONPATH": str(tmp_path)}
    said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    arguments, shown = json.loads(said)
    assert arguments[:2] == ["--model-path", "weights"] and arguments[-2:] == ["--api-key", "the-key"]
    assert "the-key" not in shown and "--model-path" in shown


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (make_event(0, 1, version="a-0"), "a response of weights 'a-0' instead of 'a-1'"),
        (make_event(0, 1, {"type": "abort", "message": "full"}), "gave a request up"),
    ],
)
def test_answers_of_other_weights_and_given_up_ones_are_failures(event: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerFailure, match=message):
        make_server().read(event, ServerAnswer(make_request(WHOLE)))


def test_weights_that_are_refused_are_a_failure_at_once() -> None:
    """Files need no partner: no rank waits for a server that refuses them, as the sender of a broadcast would.

    The update is sent when nothing runs: SGLang refuses weights during the request of its own health check.
    """
    asked: list[Any] = []

    def refuse(path: str, body: Any = None) -> Any:
        asked.append((path, body and body["flush_cache"]))
        return {"success": False, "message": "no such file"}

    server = make_server()
    with pytest.raises(ServerFailure, match="no such file"):
        server.load(refuse, Path("weights"), "a-2")
    assert asked == [("/flush_cache?timeout=60", None), ("/update_weights_from_disk", True)]
    server.read(make_event(0, 1), ServerAnswer(make_request(WHOLE)))  # its weights are still the former


@pytest.mark.parametrize(("seed", "expected"), [(7, 7), (1 << 32, 0), ((1 << 63) - 1, (1 << 32) - 1)])
def test_seeds_are_those_that_sglang_takes(seed: int, expected: int) -> None:
    """It hands its own to NumPy, whose seeds have 32 bits; small ones are unchanged."""
    command = make_server(seed=seed).make_command(Path("weights"), 8000)
    assert command[command.index("--random-seed") + 1] == str(expected)
