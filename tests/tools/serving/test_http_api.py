# SPDX-License-Identifier: Apache-2.0
"""Who may call a server and what is refused, over HTTP against the application itself; no model runs.

Not covered: TLS, which a proxy in front adds, and slow clients that hold connections open.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from megatron_rl.types import UserError
from tools.serving import http_api
from tools.serving.checkpoint_index import CheckpointIndex
from tools.serving.http_api import build_app, is_own_host, read_tokens
from tools.serving.ordering import Answer, RequestQueue
from tools.serving.request_checks import AdapterLimits, Limits, Lora
from tools.serving.server_state import Served, ServerState
from tools.serving.starting import check_access, open_socket

ADA, BOB = "tml-0123456789abcdef-ada", "tml-0123456789abcdef-bob"
LIMITS = Limits(vocab_size=16, context=32)
KINDS = "external_weights", "weights"
LORA = AdapterLimits(Lora(8, 0, ("q_proj", "o_proj", "up_proj")))
RUN = {"metadata": {}, "lora": LORA.most._asdict()}


@pytest.fixture
def state(tmp_path: Path) -> ServerState:
    queue = RequestQueue(most_samples=2)
    return ServerState(Served("toy", "toy", "qwen2", LORA, LIMITS), tmp_path, queue)


@pytest.fixture
def client(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(http_api, "LONG_POLL_SECONDS", 0.05)
    app = build_app(state, {ADA: "ada", BOB: "bob"}, "127.0.0.1")
    with TestClient(app, base_url="http://127.0.0.1:8000/api/v1", headers={"x-api-key": ADA}) as made:
        yield made


def begin(client: Any, state: ServerState) -> tuple[str, str]:
    """Create a session and a model, as if all ranks had built it."""
    session = client.post("create_session", json={}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 8}}
    model = client.post("create_model", json=body).json()["model_id"]
    for call in state.queue.take(0.0):
        state.queue.finish(call, Answer(json.dumps(call.reply(0)).encode(), "application/json"))
    return session, model


def make_sample(session: str, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"tokens": [3, 4], "type": "encoded_text"}]}
    return {"sampling_session_id": session, "seq_id": 0, "prompt": prompt, "sampling_params": {}} | more


@pytest.mark.parametrize("key", ["", "tml-x", "sk-0123456789abcdef-ada", ADA + "x", ADA[:-1]])
def test_without_a_known_key_nothing_is_answered(client: Any, key: str) -> None:
    for path in ("create_session", "telemetry", "nothing"):
        assert client.post(path, json={}, headers={"x-api-key": key}).status_code == 401
    assert client.get("healthz", headers={"x-api-key": key}).status_code == 401
    assert client.get("healthz").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("[::1]:8000", True),
        ("node7:80", True),
        ("evil.example", False),
        ("localhost.evil.example:8000", False),
        ("", False),
    ],
)
def test_a_foreign_host_header_is_refused(client: Any, host: str, is_own: bool) -> None:
    assert is_own_host(host, "node7") == is_own
    if not is_own:
        assert client.get("healthz", headers={"host": host}).status_code == 403


def test_long_bodies_are_refused_with_and_without_their_length(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "MOST_BYTES", 1000)
    assert client.post("forward_backward", content=b"x" * 1001).status_code == 413
    assert client.post("forward_backward", content=iter([b"x" * 600, b"x" * 600])).status_code == 413
    assert client.post("forward_backward", content=b"x", headers={"content-length": "many"}).status_code == 413


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000, b'{"session_id": {}}', b'{"session_id": "x"}'])
def test_broken_bodies_are_refused_for_good(client: Any, state: ServerState, body: bytes) -> None:
    for path in ("create_model", "optim_step", "asample", "save_weights", "load_weights", "create_sampling_session"):
        assert client.post(path, content=body).status_code in (400, 404)
    assert client.post("forward_backward", content=body).status_code in (400, 404)
    assert not state.models and state.queue.count() == {"ready": 0, "early": 0, "answers": 0}


def test_lists_are_answered_while_the_main_thread_closes_sessions_and_models(
    client: Any, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, model), (other, closed) = begin(client, state), begin(client, state)

    class Closing(dict[str, Any]):  # its owner is read while another session is closed
        def __getitem__(self, name: str) -> Any:
            state.sessions.pop(other, None)
            return super().__getitem__(name)

    def describe_late(given: ServerState, owner: str, run: str) -> dict[str, Any]:
        state.models.pop(closed, None)
        return describe(given, owner, run)

    describe = http_api.describe_run
    monkeypatch.setattr(http_api, "describe_run", describe_late)
    runs = client.get("training_runs")
    assert runs.status_code == 200 and [one["training_run_id"] for one in runs.json()["training_runs"]] == [model]
    state.sessions[first] = Closing(state.sessions[first])
    assert client.get("sessions").json() == {"sessions": [first, other]}
    assert client.get("sessions").json() == {"sessions": [first]}


@pytest.mark.parametrize("is_seen", [True, False], ids=["just after its owner is read", "just before"])
def test_a_silent_session_that_its_client_closes_meanwhile_is_closed_once(
    is_seen: bool, client: Any, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    (session, _), touch = begin(client, state), state.touch_session

    def close_meanwhile(owner: str, body: dict[str, Any]) -> str:
        name = touch(owner, body) if is_seen else session
        state.sessions.pop(session)
        return name if is_seen else touch(owner, body)

    state.sessions[session]["seen"] = 0.0
    monkeypatch.setattr(state, "touch_session", close_meanwhile)
    state.close_silent()
    assert not state.sessions and not state.queue.take(0.0), "the other thread sends the call"


def test_another_owner_sees_and_changes_nothing(client: Any, state: ServerState) -> None:
    session, model = begin(client, state)
    path = f"tinker://{model}/weights/a"
    state.checkpoints.directory_of(path).mkdir(parents=True)
    state.checkpoints.add(path, "ada", "toy", RUN, {})
    sampler = client.post("create_sampling_session", json={"session_id": session, "model_path": path}).json()
    sampler = sampler["sampling_session_id"]
    bob = {"x-api-key": BOB}
    for name, body in {
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "toy"},
        "get_info": {"model_id": model},
        "optim_step": {"model_id": model, "seq_id": 1, "adam_params": {}},
        "save_weights": {"model_id": model, "seq_id": 1, "path": "b"},
        "weights_info": {"tinker_path": path},
        "asample": make_sample(sampler),
        f"sessions/{session}/finish": {},
    }.items():
        assert client.post(name, json=body, headers=bob).status_code == 404, name
    mine = client.post("create_session", json={}, headers=bob).json()["session_id"]
    for name in ("load_weights", "create_sampling_session"):
        body = {"session_id": mine, "path": path, "model_path": path, "optimizer": False}
        assert client.post(name, json=body, headers=bob).status_code == 404
    assert client.post("retrieve_future", json={"request_id": f"{model}/0"}, headers=bob).status_code == 410
    assert client.post("retrieve_future", json={"request_id": f"{model}/0"}).status_code == 200
    one = f"training_runs/{model}/checkpoints/weights/a"
    assert (
        client.delete(one, headers=bob).status_code == client.put(f"{one}/ttl", json={}, headers=bob).status_code == 404
    )
    assert client.get(f"training_runs/{model}", headers=bob).status_code == 404
    assert client.get("checkpoints", headers=bob).json()["checkpoints"] == []
    assert [one["tinker_path"] for one in client.get("checkpoints").json()["checkpoints"]] == [path]
    assert state.queue.count()["ready"] == 0
    assert client.delete(one).status_code == 204 and client.get("checkpoints").json()["checkpoints"] == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 129, None, 5.5])
def test_a_checkpoint_name_is_no_path(client: Any, state: ServerState, name: Any) -> None:
    _, model = begin(client, state)
    promise = client.post("save_weights", json={"model_id": model, "seq_id": 1, "path": name}).json()
    (call,) = state.queue.take(0.0)  # it takes its place in the order, and is answered with the error
    assert promise["request_id"] == call.request_id and (isinstance(call.payload, UserError) or name in (None, 5.5))
    assert "/" not in str(name) or isinstance(call.payload, UserError)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"record_stability_info": True}, "stable_reinforce(?s:.*)loss_fn=importance_sampling"),
        ({"prompt": {"chunks": [{"tokens": [99]}]}}, "token 99"),
        ({"prompt": {"chunks": [{"tokens": [1 << 40]}]}}, "no token"),
        ({"prompt": {"chunks": [{"tokens": [3] * 32}]}}, "prompt tokens = 32"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "image"),
        ({"num_samples": 0}, "num_samples = 0"),
        ({"num_samples": True}, "num_samples"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 1.5}}, "top_p"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"sampling_params": {"max_tokens": 1e400}}, "not valid|max_tokens"),
        ({"prompt_logprobs_last_n": 3}, "last_n"),
    ],
)
def test_a_sample_that_cannot_be_served_says_why(client: Any, state: ServerState, more: Any, message: str) -> None:
    session, _ = begin(client, state)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = client.post("create_sampling_session", json=body).json()["sampling_session_id"]
    answer = client.post("asample", content=json.dumps(make_sample(sampler, **more)))
    assert answer.status_code == 400
    assert pytest.importorskip("re").search(message, answer.json()["detail"])
    assert state.queue.count()["ready"] == 0


def test_many_samples_are_put_off_and_promises_are_polled(client: Any, state: ServerState) -> None:
    session, _ = begin(client, state)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = client.post("create_sampling_session", json=body).json()["sampling_session_id"]
    found = [client.post("asample", json=make_sample(sampler, seq_id=number, num_samples=3)) for number in (0, 1, 2, 1)]
    assert [one.status_code for one in found] == [200, 200, 429, 200]
    assert len(found[0].json()["sample_sequence_ids"]) == 3 and found[1].json() == found[3].json()
    promise = {"request_id": found[0].json()["request_id"]}
    assert client.post("retrieve_future", json=promise).status_code == 408
    calls = state.queue.take(0.0)
    assert [call.payload.num_samples for call in calls] == [3, 3]
    state.queue.finish(calls[0], Answer(b"bytes"))
    answer = client.post("retrieve_future", json=promise)
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (
        200,
        b"bytes",
        "application/x-protobuf",
    )


def test_wrong_models_are_refused(client: Any, state: ServerState) -> None:
    session, _ = begin(client, state)
    given = {"session_id": session, "model_seq_id": 7, "base_model": "toy"}
    for more, message in (
        ({"base_model": "other"}, "pass base_model='toy'"),
        ({"lora_config": {"rank": 32}}, "actor.lora.rank=32"),
        ({"lora_config": {"rank": 0}}, "rank 1 to 8"),
        ({"lora_config": {"rank": 8, "train_unembed": True}}, "train_unembed=False"),
        ({"lora_config": {"rank": 8, "train_attn": False, "train_mlp": False}}, "adapters of no matrix"),
        ({"optimizer_config": {"type": "dimuon"}}, "dimuon"),
    ):
        answer = client.post("create_model", json=given | more)
        assert answer.status_code == 400 and message in answer.json()["detail"]
    assert len(state.models) == 1


def test_keys_and_addresses_are_checked_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{ADA} ada\n\n{BOB}\n")
    path.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        read_tokens(path)
    path.chmod(0o600)
    assert (
        read_tokens(path) == {ADA: "ada", BOB: "line-4"} == check_access({"token_file": str(path), "host": "0.0.0.0"})
    )
    for text, message in (("tml-short ada", "line 1"), ("sk-0123456789abcdefghij", "line 1"), ("", "no key")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_tokens(path)
    with pytest.raises(UserError, match="without serve.token_file"):
        check_access({"host": "0.0.0.0"})
    assert check_access({"host": "localhost"}) is None
    with pytest.raises(UserError, match="without serve.token_file"):
        check_access({"host": "node7"})
    with open_socket({"port": "0"}) as taken:
        for port in (str(taken.getsockname()[1]), "many", "-1"):
            with pytest.raises(UserError, match="serve.port=0"):
                open_socket({"port": port})


def test_files_are_sent_to_signed_addresses_only(
    client: Any, state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key: neither another file of the server, nor another checkpoint, nor after an hour."""
    paths = [f"tinker://run:train:0/{kind}/a" for kind in KINDS]
    for path in paths:
        directory = state.checkpoints.directory_of(path)
        directory.mkdir(parents=True)
        (directory / "a b.safetensors").write_bytes(b"1234")
        state.checkpoints.add(path, "ada", "toy", RUN, {})
    assert client.get("training_runs/run:train:0").json()["lora_rank"] == 8
    shown = client.post("weights_info", json={"tinker_path": paths[0]}).json()
    assert (shown["lora_rank"], shown["train_mlp"], shown["train_unembed"]) == (8, True, False)
    one, kept = (f"training_runs/run:train:0/checkpoints/{kind}/a/external_weights_urls" for kind in KINDS)
    assert client.get(one, headers={"x-api-key": BOB}).status_code == 404
    assert client.get(kept).status_code == 400
    address = client.get(one).json()["urls"]["a b.safetensors"]
    assert client.get(address, headers={"x-api-key": ""}).content == b"1234"
    for wrong in (
        address.replace("external_weights/a", "weights/a"),
        address.replace("run%3Atrain%3A0", "run%3Atrain%3A1"),
        re.sub("expires=[0-9]+", "expires=9999999999", address),
        re.sub("expires=[0-9]+", "expires=x", address),
        address.split("?")[0],
    ):
        assert client.get(wrong).status_code == 403, wrong
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    assert client.get(address).status_code == 403


def test_checkpoints_expire(tmp_path: Path) -> None:
    index = CheckpointIndex(tmp_path)
    for name, ttl in (("a", -1), ("b", 3600), ("c", None)):
        path = f"tinker://run/weights/{name}"
        index.directory_of(path).mkdir(parents=True)
        index.add(path, "ada", "toy", RUN, {"ttl_seconds": ttl})
    with pytest.raises(UserError, match="there is no checkpoint"):
        index.find("ada", "tinker://run/weights/a")
    index.expire()
    assert [one["checkpoint_id"] for one in CheckpointIndex(tmp_path).list("ada")] == ["weights/b", "weights/c"]
    assert not (tmp_path / "run/weights/a").exists() and (tmp_path / "run/weights/b").exists()
    index.limit("ada", "tinker://run/weights/b", None)
    assert index.list("ada")[0]["expires_at"] is None
