# SPDX-License-Identifier: Apache-2.0
"""The front of elastic engines against members that the test plays by hand: dispatch, losses, weights, leftovers.

Not covered: engines (tests/run/test_elastic_in_loop.py has them), several hosts, and GPUs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.elastic.front import Front, list_members
from megatron_rl.engines.elastic.link import ADDRESS, FAILURES, Address, Link, as_bytes
from megatron_rl.engines.elastic.member import EngineProcess
from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, SamplingConfig
from megatron_rl.parallel.collectives import Process
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from rl_runs import overrides_for

SHAPE = ModelShape(
    family="qwen2",
    num_layers=1,
    hidden_size=8,
    ffn_hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=31,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=256,
)
NORM = "model.norm.weight"
SAMPLING = SamplingConfig(temperature=1.0, max_tokens=5, stop_token_ids=(2,))
REQUESTS = [Request(key, np.arange(3, 9, dtype=np.int32), 100 + key, SAMPLING) for key in range(8)]
ROOM, SILENT, STUCK = 3, 0.6, 5.0


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    config, process = RolloutConfig(engine="hf", max_num_seqs=ROOM), Process(0, 1, 0, 1, torch.device("cpu"))
    front = Front(
        EngineSpec(str(tmp_path), SHAPE, "float32", 40, 24, config, process, seed=0), tmp_path, SILENT, 0.3, STUCK
    )
    for number, param in enumerate(front.params.values()):
        param.fill_(number)
    yield front
    front.close()


class Player:
    """A member whose moves the test makes."""

    def __init__(self, directory: Path, front: Front) -> None:
        self.link = Address.read(directory).connect(5.0)
        self.link.send("join", "player")
        kind, self.silent_seconds, _, self.spec = self.link.receive()
        assert kind == "spec"
        self.link.send("built", True)
        self.version = 0
        wait_for(front, lambda: self.link.has_message(0.0))
        self.load(front)

    def load(self, front: Front) -> None:
        """Confirm the weights that the front announces."""
        kind, self.version = self.link.receive()
        assert kind == "weights"
        before = [member.is_ready for member in front._members]
        self.link.send("loaded", self.version)
        wait_for(front, lambda: all(member.is_ready for member in front._members) or all(before))

    def requests(self) -> list[Request]:
        """The next requests."""
        kind, requests = self.link.receive()
        assert kind == "add"
        return requests

    def answer(self, requests: list[Request], reason: str = "length") -> None:
        """Send a token each, which the seed decides."""
        self.link.send("sampled", [sample(request, reason) for request in requests])


def sample(request: Request, reason: str = "length") -> Sampled:
    return Sampled(request.key, np.array([request.seed % 31], np.int32), np.zeros(1, np.float32), reason)


def wait_for(front: Front, holds: Callable[[], bool]) -> None:
    """Let the front take its messages until something holds."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        front._hear(0.02)


def collect(front: Front, count: int) -> list[int]:
    """Keys of the next responses, in order of their arrival."""
    keys: list[int] = []
    deadline = time.monotonic() + 10
    while len(keys) < count:
        assert time.monotonic() < deadline
        for one in front.step():
            assert one.tokens.tolist() == [(100 + one.key) % 31]
            keys.append(one.key)
    return keys


def keys_of(requests: list[Request]) -> list[int]:
    return [request.key for request in requests]


def test_requests_go_to_the_least_loaded_in_order(front: Front, tmp_path: Path) -> None:
    """At most `max_num_seqs` each; the second turn of a sample to the member that has its prefix."""
    front.end_weight_update()
    first, second = Player(tmp_path, front), Player(tmp_path, front)
    front.add(REQUESTS)
    assert front.step() == [] and front.has_requests()
    mine, other = first.requests(), second.requests()
    assert (keys_of(mine), keys_of(other)) == ([0, 2, 4], [1, 3, 5])
    assert front.describe()["engines/members"] == 2
    second.answer(other[1:])
    assert collect(front, 2) == [3, 5]
    assert keys_of(second.requests()) == [6, 7] and not first.link.has_message(0.1)
    first.answer(mine)
    second.answer(other[:1])
    assert sorted(collect(front, 4)) == [0, 1, 2, 4]
    front.add([REQUESTS[4], REQUESTS[3], REQUESTS[5]])  # by load, all belong to the first
    front.step()
    assert keys_of(first.requests()) == [4, 5] and keys_of(second.requests()) == [3]


def test_one_member_gets_all_requests_at_once_and_in_order(front: Front, tmp_path: Path) -> None:
    """As an engine in the job does."""
    front.end_weight_update()
    player = Player(tmp_path, front)
    front.add(REQUESTS[:2])
    front.add(REQUESTS[2:3])
    front.step()
    assert keys_of(player.requests()) == [0, 1, 2]


@pytest.mark.parametrize("reason", ["closed", "failed", "silent", "unreadable"])
def test_a_loss_repeats_requests(front: Front, tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each is answered once, with its seed; a later answer of the lost member is not taken."""
    front.end_weight_update()
    lost, other = Player(tmp_path, front), Player(tmp_path, front)
    front.add(REQUESTS)
    front.step()
    theirs, mine = lost.requests(), other.requests()
    lost.answer(theirs[:1])
    assert collect(front, 1) == [0] and keys_of(lost.requests()) == [6]
    if reason == "closed":
        lost.link.end()
    elif reason == "failed":
        lost.link.send("failed", "ZeroDivisionError: by zero")
    elif reason == "unreadable":
        lost.link.send_tensor(torch.frombuffer(bytearray(b"cno_module\nname\n."), dtype=torch.uint8))
    began = time.monotonic()
    while len(front._members) > 1:
        other.link.send("beat", 0, 0)
        assert front.step() == [] and time.monotonic() - began < 10
    assert time.monotonic() - began < (3 * SILENT if reason == "silent" else SILENT)
    with pytest.raises(FAILURES):  # noqa: PT012 - the first of two sends may still pass
        lost.answer(theirs)
        time.sleep(0.1)
        lost.answer(theirs)
    other.answer(mine)
    assert collect(front, 3) == [1, 3, 5]
    repeated = other.requests()  # before those that wait
    assert [(one.key, one.seed) for one in repeated] == [(2, 102), (4, 104), (6, 106)]
    other.answer(repeated)
    assert collect(front, 3) == [2, 4, 6] and keys_of(other.requests()) == [7]
    assert front.describe() == {"engines/members": 1, "engines/lost": 1, "engines/seconds_to_rejoin": 0}
    words = {"closed": "the connection was closed", "failed": "by zero", "silent": "silence"}
    words |= {"unreadable": "No module named 'no_module'"}
    assert f"{words[reason]}): its 3 requests are repeated" in caplog.text
    again = Player(tmp_path, front)
    assert 0 < front.describe()["engines/seconds_to_rejoin"] < 10
    front.add(REQUESTS[:1])
    front.step()
    assert keys_of(again.requests()) == [0]


def test_a_member_that_hangs_is_lost(tmp_path: Path, front: Front, caplog: pytest.LogCaptureFixture) -> None:
    """It has requests, and its heartbeats do not change; one whose tokens or steps are counted is kept."""
    front.end_weight_update()
    hanging, slow = Player(tmp_path, front), Player(tmp_path, front)
    front.add(REQUESTS[:4])
    front.step()
    theirs, mine = hanging.requests(), slow.requests()
    idle = Player(tmp_path, front)
    hanging.link.send("beat", 7, 3)
    slow.link.send("beat", 1, 0)
    wait_for(front, lambda: [member.num_tokens for member in front._members] == [7, 1, 0])
    front._stuck_seconds, began = 0.5, time.monotonic()
    for count in range(3, 100):
        with suppress(*FAILURES):
            hanging.link.send("beat", 7, 3)
        slow.link.send("beat", count // 2, count - count // 2)  # one or the other moves
        idle.link.send("beat", 0, 0)
        assert front.step() == [] and time.monotonic() - began < 10
        if len(front._members) == 2:
            break
    assert [member.running.keys() for member in front._members] == [{1, 3}, {0, 2}]
    assert "is lost (no progress in 0 s): its 2 requests are repeated" in caplog.text
    with pytest.raises(FAILURES):
        hanging.link.receive()
    idle.answer(idle.requests())
    slow.answer(mine)
    assert sorted(collect(front, 4)) == [0, 1, 2, 3] and keys_of(theirs) == [0, 2]


def test_members_are_listed(tmp_path: Path, front: Front) -> None:
    """With weights, requests and silence; a loss until an engine makes it good; nothing without a front."""
    front.end_weight_update()
    player, lost = Player(tmp_path, front), Player(tmp_path, front)
    front.add(REQUESTS[:3])
    front.step()
    serving = {"name": "engine player on 127.0.0.1", "state": "serves", "version": 1, "newest_version": 1}
    found = list_members(tmp_path)
    assert all(one.pop("silent_seconds") < 5 for one in found)
    assert found == [serving | {"requests": 2}, serving | {"requests": 1}]
    lost.link.end()
    wait_for(front, lambda: len(front._members) == 1)
    player.answer(player.requests())
    collect(front, 2)
    assert [(one["name"], one["state"]) for one in list_members(tmp_path)] == [
        ("engine player on 127.0.0.1", "serves"),
        ("engine player on 127.0.0.1", "lost"),
    ]
    link = Address.read(tmp_path).connect(5.0)
    link.send("join", "new")
    wait_for(front, lambda: len(front._members) == 2)
    joining = list_members(tmp_path)[1]
    assert (joining["state"], joining["version"], joining["requests"]) == ("joins", None, 0)
    link.receive()
    link.send("built", True)
    wait_for(front, lambda: link.has_message(0.0))
    link.send("loaded", 1)
    wait_for(front, lambda: all(member.is_ready for member in front._members))
    assert [one["state"] for one in list_members(tmp_path)] == ["serves", "serves"]
    front.close()
    assert list_members(tmp_path) == []


def test_a_response_that_comes_twice_is_taken_once(front: Front, tmp_path: Path) -> None:
    """Also without a request."""
    front.end_weight_update()
    player = Player(tmp_path, front)
    front.add(REQUESTS[:2])
    front.step()
    requests = player.requests()
    player.answer([*requests, *requests, REQUESTS[7]])
    assert collect(front, 2) == [0, 1] and front.step() == [] and not front.has_requests()


def test_a_member_that_leaves_gives_its_requests_back(front: Front, tmp_path: Path) -> None:
    """It waits for the front's permission to end, and is no loss."""
    front.end_weight_update()
    leaving, other = Player(tmp_path, front), Player(tmp_path, front)
    front.add(REQUESTS[:2])
    front.step()
    assert keys_of(leaving.requests()) == [0] and keys_of(other.requests()) == [1]
    leaving.link.send("leaves")
    wait_for(front, lambda: len(front._members) == 1)
    assert leaving.link.receive() == ("end",)
    front.step()
    assert keys_of(other.requests()) == [0] and front.describe()["engines/lost"] == 0


def test_interrupts_return_each_request_once(front: Front, tmp_path: Path) -> None:
    """Partial responses, empty ones of waiting requests and of a lost member, and what had just finished."""
    front.end_weight_update()
    player, lost = Player(tmp_path, front), Player(tmp_path, front)
    front.add(REQUESTS)
    front.step()
    mine, theirs = player.requests(), lost.requests()
    assert len(mine) == len(theirs) == ROOM
    ended: list[Sampled] = []
    thread = threading.Thread(target=lambda: ended.extend(front.interrupt(range(8))))
    thread.start()
    assert player.link.receive() == ("interrupt", keys_of(mine))
    player.answer(mine[:1])
    player.answer(mine[1:], "interrupted")
    lost.link.end()
    thread.join(10)
    found = {one.key: (one.finish_reason, len(one.tokens)) for one in ended}
    assert len(ended) == 8 and not front.has_requests()
    assert [found[key] for key in keys_of(mine)] == [("length", 1), ("interrupted", 1), ("interrupted", 1)]
    assert {found[key] for key in (*keys_of(theirs), 6, 7)} == {("interrupted", 0)}
    assert front.interrupt([1, 99]) == []


def fetch(directory: Path, version: int, wanted: list[tuple[str, Any]]) -> tuple[list[torch.Tensor], Any]:
    """Pieces of the weights, and their digest by the front; no digest if the version is outdated."""
    link, pieces = Address.read(directory).connect(5.0), []
    link.send("fetch", version, wanted)
    for _, box in wanted:
        if not link.receive()[0]:
            return pieces, None
        pieces.append(torch.empty([stop - start for start, stop in box]))
        link.receive_into(pieces[-1])
    digest = link.receive()[0]
    link.close()
    return pieces, digest


def test_weights_are_those_of_the_version(front: Front, tmp_path: Path) -> None:
    """Pieces by boxes with a digest of their bytes; none while they are written, and none of another version."""
    wanted = [(NORM, ((2, 5),)), ("model.embed_tokens.weight", ((4, 6), (0, 8)))]
    assert fetch(tmp_path, 0, wanted) == ([], None)
    front.end_weight_update()
    front.params[NORM].copy_(torch.arange(8))
    pieces, digest = fetch(tmp_path, 1, wanted)
    assert pieces[0].tolist() == [2, 3, 4] and pieces[1].shape == (2, 8)
    assert digest == hashlib.blake2b(b"".join(bytes(as_bytes(piece)) for piece in pieces)).digest()
    player = Player(tmp_path, front)
    front.begin_weight_update()
    assert fetch(tmp_path, 1, wanted) == ([], None)
    front.end_weight_update()
    assert fetch(tmp_path, 1, wanted) == ([], None) and fetch(tmp_path, 2, wanted)[1] is not None
    player.load(front)
    assert player.version == 2


def test_a_late_member_waits_for_weights_and_gets_the_present_ones(front: Front, tmp_path: Path) -> None:
    """One that has confirmed old weights gets no requests before it has confirmed the new ones."""
    link = Address.read(tmp_path).connect(5.0)
    link.send("join", "early")
    link.receive()
    link.send("built", True)
    wait_for(front, lambda: any(member.is_built for member in front._members))
    assert not link.has_message(0.05)
    front.end_weight_update()
    assert link.receive() == ("weights", 1)
    front.begin_weight_update()
    link.send("loaded", 1)
    front.end_weight_update()
    assert link.receive() == ("weights", 2) and not front._members[0].is_ready
    link.send("loaded", 2)
    wait_for(front, lambda: front._members[0].is_ready)


def test_requests_wait_for_a_member_only_so_long(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    """0.3 seconds here."""
    front.add(REQUESTS)
    began = time.monotonic()
    with pytest.raises(UserError, match="8 requests, and no engine"):
        while True:
            front.step()
    assert 0.3 < time.monotonic() - began < 2
    assert caplog.text.count("no engine: 8 requests wait up to 0 s more for bash launch/engine.sh") == 1


def test_strangers_are_refused(front: Front, tmp_path: Path) -> None:
    """Without the key nothing is unpickled; the file with the key belongs to the user alone."""
    address = Address.read(tmp_path)
    assert stat.S_IMODE(os.stat(tmp_path / ADDRESS).st_mode) == 0o600
    with pytest.raises(FAILURES):
        address._replace(key="00" * 32).connect(1.0)
    stranger = socket.create_connection(("127.0.0.1", address.port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + pickle.dumps(os.getpid))
    reflected = socket.create_connection(("127.0.0.1", address.port))
    reflected.sendall(reflected.recv(36))  # the front's own question, which it will not answer for us
    answer = reflected.recv(36)
    reflected.sendall(answer)
    front.end_weight_update()
    Player(tmp_path, front)
    assert len(front._members) == 1 and reflected.recv(1) == b""
    stranger.close()
    reflected.close()


def test_a_member_is_told_what_its_engine_needs(front: Front, tmp_path: Path) -> None:
    """The engine's inputs without the trainer's objects."""
    front.end_weight_update()
    player = Player(tmp_path, front)
    spec = pickle.loads(player.spec)
    assert spec.shape == SHAPE and spec.config.engine == "hf" and player.silent_seconds == SILENT
    assert (spec.model, spec.ranks, spec.thoughts, spec.shareable([])) == (None, None, None, {})


def test_losses_leave_nothing_behind(front: Front, tmp_path: Path) -> None:
    """Threads and files after thirty members that joined, took requests and were lost."""

    front.end_weight_update()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    front.add(REQUESTS[:3])
    for _ in range(30):
        player = Player(tmp_path, front)
        front.step()
        assert keys_of(player.requests()) == [0, 1, 2]
        player.link.close()
        wait_for(front, lambda: not front._members)
    deadline = time.monotonic() + 5
    while threading.active_count() > threads or len(os.listdir("/proc/self/fd")) > files:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert front.describe()["engines/lost"] == 30
    assert len(front._losses) <= 1 and len(front._waiting) == 3 and not front._homes


def test_the_end_of_a_run(front: Front, tmp_path: Path) -> None:
    """Members end with it; after an error of the run they wait for its restart."""
    front.end_weight_update()
    player = Player(tmp_path, front)
    front.close()
    assert player.link.receive() == ("end",) and not (tmp_path / ADDRESS).exists()
    with pytest.raises(FAILURES):
        player.link.receive()


def test_members_wait_for_the_restart_of_a_run_that_failed(front: Front, tmp_path: Path) -> None:
    """No end is announced."""
    front.end_weight_update()
    player = Player(tmp_path, front)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        try:
            raise ZeroDivisionError
        finally:
            front.close()
    with pytest.raises(FAILURES):
        player.link.receive()


def test_no_run_to_join(tmp_path: Path) -> None:
    """After the patience."""
    process = Process(0, 1, 0, 1, torch.device("cpu"))
    with pytest.raises(UserError, match="no run answered for 0 seconds"):
        EngineProcess(tmp_path, process, 0.0)._join()


def test_both_sides_of_a_link_have_limits() -> None:
    """A side that neither answers nor reads fails the other within them."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = Address("elsewhere", ["127.0.0.1"], listener.getsockname()[1], "ab" * 32)
    with pytest.raises(FAILURES):  # accepted by the kernel, answered by nobody
        address.connect(0.2)
    listener.accept()[0].close()
    links: list[Link] = []
    thread = threading.Thread(target=lambda: links.append(address.connect(0.3)))
    thread.start()
    other = Link(listener.accept()[0], bytes.fromhex("ab" * 32), 0.3, b"front", b"engine")
    thread.join()
    with pytest.raises(BlockingIOError):
        other.receive()
    with pytest.raises(FAILURES):
        for _ in range(100):
            other.send_tensor(torch.zeros(1 << 20))
    listener.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rollout.engine=vllm_server"], "does not run outside the job"),
        (["rollout.engine=megatron"], "does not run outside the job"),
        (["trainer.run_dir=null"], "without trainer.run_dir"),
        (["schedule.max_staleness=1", "schedule.steps_per_update=4"], "its engines do not step together"),
        (["actor.lora.rank=4", "hybrid.lora=adapter", "rollout.engine=vllm"], "its engines fetch the model's tensors"),
        (["rollout.engine=vllm", "rollout.quantization=int8"], "its engines fetch the model's tensors"),
    ],
)
def test_settings_that_elastic_engines_exclude(tmp_path: Path, settings: list[str], words: str) -> None:
    """Each is refused before the run starts; without `schedule.elastic` it is not for this reason."""
    overrides = overrides_for(tmp_path, tmp_path / "run", "rollout.engine=hf", *settings)
    with pytest.raises(UserError, match=re.escape(words)):
        load_config(None, [*overrides, "schedule.elastic=true"])
    with suppress(UserError):
        load_config(None, overrides)


def test_one_rank_has_the_front(tmp_path: Path) -> None:
    """Two are refused; with one, an engine's ranks are not the job's."""
    settings = "schedule.elastic=true", "rollout.engine=vllm", "rollout.tensor_model_parallel_size=2"
    config = load_config(None, overrides_for(tmp_path, tmp_path / "run", *settings)).config
    spec = resolve(config)
    with pytest.raises(UserError, match="2 ranks of the job for engines"):
        BatchPlan.build(config, 2, spec)
    plan = BatchPlan.build(config, 1, spec)
    assert (plan.num_engines, plan.engine_ranks) == (1, 1)
