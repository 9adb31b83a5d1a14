# SPDX-License-Identifier: Apache-2.0
"""A server on the task of sixteen sums, over loopback HTTP, by messages as the client writes them.

Not covered: the client itself, which the test environment does not have (docs/serving_programs.md lists what was tried
with it), and GPUs.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distributed import find_free_port, run_ranks
from launch_runs import ROOT, run_script
from megatron_rl.run.primitives import Policy
from megatron_rl.types import UserError
from rl_runs import layout_overrides, load_nested, overrides_for
from tools.serving import http_api, starting
from tools.serving.wire import MESSAGES

Post = Callable[..., Any]
SUMS = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13], [4, 4, 4]]
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def be_server(
    rank: int, world_size: int, port: int, recipe: Path, arguments: list[str], log: Path, prepare: Callable[[], None]
) -> None:
    """Be one rank of a server, with its output in a file."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    http_api.LONG_POLL_SECONDS = 0.2
    prepare()
    os._exit(run_script(ROOT / "tools/serve.py", recipe, *arguments))


@contextmanager
def served(
    task: Path, directory: Path, world_size: int = 1, *extra: str, prepare: Callable[[], None] = lambda: None
) -> Iterator[tuple[Post, Any]]:
    """Start a server, with `prepare` on each rank; yield a function that posts to it, and its first rank's process."""
    directory.mkdir(exist_ok=True)
    recipe, log, port = directory / "recipe.yaml", directory / "log", find_free_port()
    overrides = overrides_for(task, directory / "run", "rollout.engine=hf", "data.max_prompt_length=16")
    recipe.write_text(json.dumps(load_nested([*overrides, "actor.max_tokens_per_microbatch=32"])))
    log.write_text("")
    arguments = ["serve.port=0", "serve.name=toy", *extra]
    context = get_context("fork")
    ranks = [
        context.Process(target=be_server, args=(rank, world_size, port, recipe, arguments, log, prepare))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"serving on (\S+)", log.read_text())):
            assert time.monotonic() < deadline and ranks[0].is_alive(), log.read_text()
            time.sleep(0.05)
        yield make_post(found[1]), ranks[0]
        if ranks[0].is_alive():
            os.kill(ranks[0].pid or 0, signal.SIGTERM)
        for rank in ranks:
            rank.join(60)
        if ranks[0].exitcode == 0:
            assert [rank.exitcode for rank in ranks] == [0] * world_size, log.read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def make_post(url: str) -> Post:
    def post(path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"x-api-key": "tml-test", "content-type": "application/json"} | (headers or {})
        request = urllib.request.Request(f"{url}/api/v1/{path}", data, given)
        try:
            with urllib.request.urlopen(request) as answer:
                raw = answer.read()
                return json.loads(raw) if "json" in answer.headers["content-type"] else raw
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return post


def wait_for(post: Post, promise: Any) -> Any:
    """Fetch the answer of a promise, as often as it takes."""
    while (found := post("retrieve_future", {"request_id": promise["request_id"]})) == (408, '{"detail":"not yet"}'):
        pass
    return found


class Client:
    """A training client: numbers its requests; `number` of a call overrides the next one."""

    def __init__(self, post: Post, session: str, index: int, **load: Any) -> None:
        self.post, self.session, self.next = post, session, 1
        body = {"session_id": session, "model_seq_id": index, "base_model": "toy"}
        path = "load_weights" if "path" in load else "create_model"
        self.model = wait_for(post, post(path, body | load))["model_id"]

    def number(self, given: int | None) -> int:
        self.next += given is None
        return self.next - 1 if given is None else given

    def forward_backward(self, rows: list[list[int]], number: int | None = None, forward_only: bool = False) -> Any:
        return self.post("forward_backward", self.write_rows(rows, number, forward_only))

    def write_rows(self, rows: list[list[int]], number: int | None = None, forward_only: bool = False) -> bytes:
        request = MESSAGES["ForwardBackwardRequest"](
            model_id=self.model, seq_id=self.number(number), loss_fn="cross_entropy", forward_only=forward_only
        )
        for row in rows:
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(row[:-1], "<i4").tobytes()
            for name, values, dtype in (("target_tokens", row[1:], "<i8"), ("weights", [1.0] * (len(row) - 1), "<f4")):
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = np.array(values, dtype).tobytes(), 2 if dtype == "<i8" else 1
                tensor.shape.append(len(values))
        return request.SerializeToString()

    def call(self, path: str, number: int | None = None, /, **body: Any) -> Any:
        return self.post(path, {"model_id": self.model, "seq_id": self.number(number), **body})

    def optim_step(self, number: int | None = None) -> Any:
        return self.call("optim_step", number, adam_params=ADAM)

    def train(self, rows: list[list[int]]) -> None:
        self.forward_backward(rows)
        assert "metrics" in wait_for(self.post, self.optim_step())

    def logprobs(self, rows: list[list[int]]) -> list[np.ndarray]:
        answer = wait_for(self.post, self.forward_backward(rows, forward_only=True))
        return read_logprobs(answer)


def read_logprobs(answer: bytes) -> list[np.ndarray]:
    found = MESSAGES["ForwardBackwardOutput"].FromString(answer)
    fields = [record.fields["logprobs"] for record in found.loss_fn_outputs]
    return [
        part
        for field in fields
        for part in np.split(np.frombuffer(field.data, "<f4"), np.frombuffer(field.offsets, "<i8")[1:-1] // 4)
    ]


def sample(post: Post, session: str, number: int, **more: Any) -> Any:
    body = {
        "sampling_session_id": session,
        "seq_id": number,
        "prompt": {"chunks": [{"tokens": [3, 4, 5], "type": "encoded_text"}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 6, "seed": 1, "stop": []},
        "prompt_logprobs": True,
    }
    promise = post("asample", body | more)
    assert len(promise["sample_sequence_ids"]) == 2
    found = MESSAGES["SampleResponse"].FromString(wait_for(post, promise))
    rows = [(np.frombuffer(x.tokens, "<i4"), np.frombuffer(x.logprobs, "<f4")) for x in found.sequences]
    return rows, np.frombuffer(found.prompt_logprobs, "<f4")


def equal(mine: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["actor.lora.rank=4", "actor.lora.alpha=8"]], ids=["all-weights", "adapters"])
def test_models_take_turns_and_outlive_the_server(task: Path, tmp_path: Path, extra: list[str]) -> None:
    """Chunks in any order, repetitions, three models, a kill and a stop: each equals its plain counterpart."""
    with served(task, tmp_path / "a", 1, *extra) as (post, process):
        session = post("create_session", {})["session_id"]
        plain, mixed, whole = (Client(post, session, index) for index in range(3))
        before = plain.logprobs(SUMS)
        for client in (plain, mixed):
            client.next = 2
        first = plain.forward_backward(SUMS[:2], 2), plain.forward_backward(SUMS[2:], 3), plain.optim_step(4)
        # The same, with the last ones first, a repetition, and another model's step in between.
        promise = mixed.optim_step(4)
        again = [mixed.forward_backward(rows, number) for number, rows in ((3, SUMS[2:]), (2, SUMS[:2]), (3, SUMS[2:]))]
        assert post("retrieve_future", promise)[0] == 408
        mixed.forward_backward(SUMS, 1, forward_only=True)
        whole.train(SUMS)
        assert again[0] == again[2] and wait_for(post, promise) == wait_for(post, first[2])
        plain.next = mixed.next = 5
        after = plain.logprobs(SUMS)
        assert equal(after, mixed.logprobs(SUMS)) and not equal(after, before)
        for mine, theirs in zip(after, whole.logprobs(SUMS), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)

        # Gradients of an unfinished step survive the turns of others.
        plain.forward_backward(SUMS[:2])
        whole.train(SUMS)
        mixed.forward_backward(SUMS[:2])
        for client in (plain, mixed):
            wait_for(post, client.optim_step())
        assert equal(plain.logprobs(SUMS), mixed.logprobs(SUMS))

        # A part of a batch is never learned from.
        refused = wait_for(post, plain.forward_backward([[3, 400]]))
        assert refused["category"] == "user" and "token ids below" in refused["error"]
        assert "gradients are incomplete" in wait_for(post, plain.optim_step())["error"]
        assert equal(plain.logprobs(SUMS), mixed.logprobs(SUMS))

        snapshot = wait_for(post, plain.call("save_weights_for_sampler", sampling_session_seq_id=0))[
            "sampling_session_id"
        ]
        rows, prompt = sample(post, snapshot, 0)
        own = plain.logprobs([[3, 4, 5, *rows[0][0].tolist()]])[0]
        assert np.isnan(prompt[0]) and np.allclose(prompt[1:], own[:2], atol=1e-6)
        assert np.allclose(rows[0][1], own[2:], atol=1e-5) and not np.array_equal(rows[0][0], rows[1][0])
        exported = wait_for(post, plain.call("save_weights_for_sampler", path="s"))["path"]
        assert equal(Client(post, session, 3, path=exported).logprobs(SUMS), plain.logprobs(SUMS))
        saved = wait_for(post, plain.call("save_weights", path="step-1", ttl_seconds=3600))["path"]
        plain.train(SUMS)
        again, _ = sample(post, snapshot, 1)
        assert all(np.array_equal(a[0], b[0]) for a, b in zip(rows, again, strict=True))  # the weights of the snapshot
        expected = plain.logprobs(SUMS)
        plain.call("save_weights", path="cut-off")
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    with served(task, tmp_path / "a", 1, *extra) as (post, process):
        session = post("create_session", {})["session_id"]
        listed = json.loads((tmp_path / "a/run/checkpoints.json").read_text())
        for index, path in enumerate(listed, 5):  # a save that was cut off is not listed, and breaks no other one
            assert Client(post, session, index, path=path, optimizer=False).logprobs(SUMS)
        resumed = Client(post, session, 0, path=saved, optimizer=True)
        resumed.train(SUMS)
        assert equal(resumed.logprobs(SUMS), expected)
        weights = Client(post, session, 1, path=saved, optimizer=False)
        weights.train(SUMS)  # without Adam's moments, another step
        assert not equal(weights.logprobs(SUMS), expected)
    index = json.loads((tmp_path / "a/run/checkpoints.json").read_text())
    stopped = [path for path in index if path.endswith("/weights/server-stopped")]
    assert saved in index and len(stopped) == 2 + len(listed)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "pp", "dp"])
def test_two_ranks_serve_as_one_does(task: Path, tmp_path: Path, layout: str) -> None:
    """Losses, steps and greedy samples of two ranks, for two models in turns; an idle server stays up."""
    extra = {"tp": layout_overrides(2, 1, 1), "pp": layout_overrides(1, 2, 1), "dp": []}[layout]
    found = []
    for world_size, arguments in ((1, []), (2, [*extra, "trainer.collective_timeout=8"])):
        with served(task, tmp_path / str(world_size), world_size, *arguments) as (post, _):
            if world_size == 2:
                time.sleep(12)
            session = post("create_session", {})["session_id"]
            clients = [Client(post, session, index) for index in range(2)]
            for _ in range(2):
                for client in clients:
                    client.train(SUMS)
            name = wait_for(post, clients[0].call("save_weights_for_sampler", sampling_session_seq_id=0))
            params = {"max_tokens": 6, "temperature": 0.0, "stop": []}
            rows, prompt = sample(post, name["sampling_session_id"], 0, sampling_params=params)
            found.append((*clients[1].logprobs(SUMS), *(row[1] for row in rows), prompt[1:]))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


def look_for(rank: int, world_size: int, directories: list[Path], patience: float) -> str:
    """Be a rank of a server at its start."""
    starting._PATIENCE_SECONDS = patience
    try:
        starting.check_shared(directories[rank])
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_share_a_directory_are_refused(tmp_path: Path) -> None:
    """Two directories stand for two hosts' own disks; a file instead of a directory, for one that cannot be written."""
    (tmp_path / "file").touch()
    for names, message in (
        ("aa", ""),
        ("ab", "does not see the files that rank 0 writes"),
        (("file", "file"), "written"),
    ):
        found = run_ranks(look_for, 2, [tmp_path / name for name in names], 0.3)
        assert all(message in text and bool(text) == bool(message) for text in found)
        assert not message or all("trainer.run_dir" in text and "hosts share" in text for text in found)
    assert not [*(tmp_path / "a").iterdir()]


def break_third_step() -> None:
    """Let the third optimizer step of a server fail after it has changed the weights, as no client's mistake does."""
    plain, count = Policy.optim_step, itertools.count(1)

    def optim_step(self: Policy, **settings: Any) -> Any:
        found = plain(self, **settings)
        assert next(count) != 3, "the third step"
        return found

    Policy.optim_step = optim_step


@pytest.mark.slow
def test_a_fault_of_the_server_saves_the_other_models(task: Path, tmp_path: Path) -> None:
    """On two ranks: the model whose step failed halfway is not saved, the other is; clients get the error."""
    with served(task, tmp_path / "a", 2, prepare=break_third_step) as (post, process):
        session = post("create_session", {})["session_id"]
        whole, broken = (Client(post, session, index) for index in range(2))
        for client in (whole, broken):
            client.train(SUMS)
        whole.forward_backward(SUMS)  # an unfinished step
        broken.forward_backward(SUMS)
        broken.optim_step()
        process.join(60)
    assert process.exitcode not in (0, None)
    log = (tmp_path / "a/log").read_text()
    assert f"saved tinker://{whole.model}/weights/server-stopped" in log
    assert f"not saved: {broken.model}: its last request failed halfway" in log
    assert log.count("AssertionError: the third step") >= 1 and not (tmp_path / "a/run/saved.json").exists()
    listed = json.loads((tmp_path / "a/run/checkpoints.json").read_text())
    assert [*listed] == [f"tinker://{whole.model}/weights/server-stopped"]


NUM_STEPS = 667  # of two passes and an optimizer step: 2,001 requests


class BadNetwork:
    """Sends each request of a client, and for about a third of them does so badly first.

    A tenth is sent twice, a tenth ends in the middle of the body, and of a tenth the answer is never read.
    """

    def __init__(self, address: str, seed: int) -> None:
        self._address, self._rng = address, random.Random(seed)
        self.counts = {"twice": 0, "half a body": 0, "no answer": 0}

    def send(self, path: str, body: bytes) -> None:
        draw = self._rng.random()
        name = "twice" if draw < 0.1 else "half a body" if draw < 0.2 else "no answer" if draw < 0.3 else None
        if name is not None:
            self.counts[name] += 1
            self._post(path, body, name)
        while self._post(path, body, "once") == 429:
            time.sleep(0.05)

    def fetch(self, promise: str) -> bytes:
        """Fetch an answer; a tenth of the polls is given up before the answer comes."""
        body = json.dumps({"request_id": promise}).encode()
        if self._rng.random() < 0.1:
            self._post("retrieve_future", body, "no answer")
        while (status := self._post("retrieve_future", body, "once")) == 408:
            pass
        assert status == 200
        return self._answer

    def _post(self, path: str, body: bytes, how: str) -> int:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        try:
            connection.putrequest("POST", f"/api/v1/{path}")
            for name, value in (("x-api-key", "tml-test"), ("content-length", str(len(body)))):
                connection.putheader(name, value)
            connection.endheaders()
            connection.send(body[: len(body) // 2] if how == "half a body" else body)
            if how in ("half a body", "no answer"):
                return 0
            answer = connection.getresponse()
            self._answer = answer.read()
            return answer.status
        finally:
            connection.close()


def list_requests(client: Client) -> list[tuple[str, bytes]]:
    """List the requests of all steps, in order; their numbers are 1, 2, 3, ..."""
    rng, found = random.Random(0), []
    for _ in range(NUM_STEPS):
        for _ in range(2):
            rows = [[rng.randrange(3, 15) for _ in range(rng.randrange(2, 7))]]
            found.append(("forward_backward", client.write_rows(rows)))
        adam = ADAM | {"learning_rate": 1e-4 * rng.random()}
        body = {"model_id": client.model, "seq_id": client.number(None), "adam_params": adam}
        found.append(("optim_step", json.dumps(body).encode()))
    return found


@pytest.mark.slow
def test_two_thousand_requests_over_a_bad_network_train_as_in_order(task: Path, tmp_path: Path) -> None:
    """A quiet client gets the same losses, gradient norms, weights and moments, bit for bit.

    Four threads send a client's requests out of order (within forty), repeated, cut off, or without reading answers.
    """
    with served(task, tmp_path / "a") as (post, _):
        session = post("create_session", {})["session_id"]
        address = re.search(r"//(\S+)", (tmp_path / "a/log").read_text())[1]  # pyright: ignore[reportOptionalSubscript]
        quiet, shaken = (Client(post, session, index) for index in range(2))
        answers = []
        for path, body in list_requests(quiet):
            promise = post(path, body)
            answers.append(wait_for(post, promise) if path == "optim_step" else promise)
        rng, requests = random.Random(1), list_requests(shaken)
        order = sorted(range(len(requests)), key=lambda index: index + rng.uniform(0, 40))
        networks = [BadNetwork(address, seed) for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:

            def send(network: BadNetwork, part: list[int]) -> None:
                for index in part:
                    network.send(*requests[index])

            list(pool.map(send, networks, [order[i::4] for i in range(4)]))
        for index, answer in enumerate(answers, 1):
            if index % 3 == 0:
                assert json.loads(networks[0].fetch(f"{shaken.model}/{index}")) == answer
        counts = [sum(network.counts[name] for network in networks) for name in networks[0].counts]
        assert min(counts) > 150
        pieces = []
        for client in (quiet, shaken):
            wait_for(post, client.call("save_weights", path="end"))
            directory = tmp_path / "a/run" / client.model.replace(":", "_") / f"weights/end/step_{NUM_STEPS}/actor"
            pieces.append({file.name: file.read_bytes() for file in directory.glob("*.distcp")})
        assert pieces[0] == pieces[1] and sum(map(len, pieces[0].values())) > 1 << 20


@pytest.mark.slow
def test_models_have_ranks_seeds_and_matrices_of_their_own(task: Path, tmp_path: Path) -> None:
    """A model of rank 2, another seed and attention only equals a server of that rank, and is read by PEFT.

    Beside it, one of the largest rank trains as alone, bit for bit.
    """
    lora = ["actor.lora.rank=6", "actor.lora.alpha=8"]
    small = {"lora_config": {"rank": 2, "seed": 5, "train_mlp": False}}
    attention = "actor.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
    with served(task, tmp_path / "a", 1, "actor.lora.rank=2", "actor.lora.alpha=8", "trainer.seed=5", attention) as (
        post,
        _,
    ):
        only = Client(post, post("create_session", {})["session_id"], 0)
        for _ in range(3):
            only.train(SUMS)
        expected = only.logprobs(SUMS)
    with served(task, tmp_path / "b", 1, *lora) as (post, _):
        session = post("create_session", {})["session_id"]
        alone = Client(post, session, 0)
        for _ in range(3):
            alone.train(SUMS)
        first, mine, other = Client(post, session, 1), Client(post, session, 2, **small), Client(post, session, 3)
        for _ in range(3):
            for client in (first, mine, other):
                client.train(SUMS)
        assert equal(first.logprobs(SUMS), alone.logprobs(SUMS)) and equal(other.logprobs(SUMS), first.logprobs(SUMS))
        found = mine.logprobs(SUMS)
        assert max(abs(a - b).max() for a, b in zip(found, first.logprobs(SUMS), strict=True)) > 1e-3
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-6)
        assert post("get_info", {"model_id": mine.model})["lora_rank"] == 2

        # A sampler's checkpoint has the adapters alone; another model continues with them, and a sampler has them.
        sampled = wait_for(post, mine.call("save_weights_for_sampler", path="s"))["path"]
        kept = wait_for(post, mine.call("save_weights", path="w"))["path"]
        exported = wait_for(post, mine.call("save_weights_external", path="x"))["path"]
        run = tmp_path / "b/run" / mine.model.replace(":", "_")
        tensors = load_file(run / "sampler_weights/s/adapter_model.safetensors")
        assert len(tensors) == 28 and all(2 in tensor.shape and "lora_" in name for name, tensor in tensors.items())
        assert not [*(run / "sampler_weights/s").rglob("*.distcp")] and [*(run / "weights/w").rglob("*.distcp")]
        assert wait_for(post, mine.call("load_weights", path=sampled))["path"] == sampled
        assert equal(mine.logprobs(SUMS), found)
        refused = wait_for(post, first.call("load_weights", path=kept))["error"]
        assert "rank 2 for q_proj" in refused and "new training client" in refused
        again = Client(post, session, 4, path=sampled, optimizer=False)
        assert equal(again.logprobs(SUMS), found) and post("get_info", {"model_id": again.model})["lora_rank"] == 2
        body = {"session_id": session, "model_path": sampled, "sampling_session_seq_id": 0}
        rows, prompt = sample(post, post("create_sampling_session", body)["sampling_session_id"], 0)
        own = again.logprobs([[3, 4, 5, *rows[0][0].tolist()]])[0]
        np.testing.assert_allclose([*prompt[1:], *rows[0][1]], own, atol=1e-5)
        assert "external_weights" in exported
    check_with_peft(task, run / "external_weights/x", found)


def check_with_peft(task: Path, directory: Path, expected: list[np.ndarray]) -> None:
    """Compare the log-probs of transformers with PEFT's adapters."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, directory)
    assert adapted.peft_config["default"].r == 2
    for row, ours in zip(SUMS, expected, strict=True):
        with torch.no_grad():
            logprobs = adapted(torch.tensor([row[:-1]])).logits[0].log_softmax(-1)
        theirs = logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["slots", "slots-tp", "slots-dp", "exchange"])
def test_vllm_samples_from_versions_together(task: Path, tmp_path: Path, engine: str) -> None:
    """Base, two snapshots of two models, a checkpoint and current weights, sampled together and in turns.

    Each sample has the log-probs that its model had, also after it was trained on. vLLM has room for two of them.
    """
    extra = ["rollout.engine=vllm", "actor.lora.rank=4", "actor.lora.alpha=32"]
    if engine == "slots-tp":
        extra += layout_overrides(2, 1, 1)
    if engine != "exchange":
        extra += ["hybrid.lora=adapter", "rollout.engine_options={max_loras: 3}"]
    params = {"sampling_params": {"max_tokens": 5, "temperature": 0.0, "stop": []}}
    with served(task, tmp_path / "a", 2 if "-" in engine else 1, *extra) as (post, _):
        session = post("create_session", {})["session_id"]
        clients = Client(post, session, 0), Client(post, session, 1, lora_config={"rank": 2, "seed": 3})
        body = {"session_id": session, "base_model": "toy", "sampling_session_seq_id": 100}
        samplers = [post("create_sampling_session", body)["sampling_session_id"]]
        scored = [score(clients[0], post, samplers[0], params)]
        number = 0
        for client in (*clients, clients[0]):
            client.train(SUMS)
            made = client.call("save_weights_for_sampler", sampling_session_seq_id=(number := number + 1))
            samplers.append(wait_for(post, made)["sampling_session_id"])
            scored.append(score(client, post, samplers[-1], params))
        path = wait_for(post, clients[1].call("save_weights_for_sampler", path="c"))["path"]
        body = {"session_id": session, "model_path": path, "sampling_session_seq_id": 101}
        samplers.append(post("create_sampling_session", body)["sampling_session_id"])
        made = clients[0].call("save_weights_for_sampler", sampling_session_seq_id=9, kind="inflight")
        inflight = wait_for(post, made)["sampling_session_id"]
        clients[1].train(SUMS)
        assert len({tuple(one[1].tolist()) for one in scored}) == 4
        for turn in range(2):
            promises = [request_sample(post, one, turn + 1, params) for one in (*samplers, inflight)]
            found = [read_sample(wait_for(post, promise)) for promise in promises]
            for mine, theirs in zip(found, [*scored, scored[2], scored[3]], strict=True):
                assert mine[0].tolist() == theirs[0].tolist()
                np.testing.assert_allclose(mine[1], theirs[1], atol=1e-6)
        clients[0].train(SUMS)
        after = score(clients[0], post, inflight, params, 7)
        assert abs(after[1] - scored[3][1]).max() > 1e-3


def request_sample(post: Post, session: str, number: int, more: dict[str, Any]) -> Any:
    prompt = {"chunks": [{"tokens": [3, 4, 5], "type": "encoded_text"}]}
    return post(
        "asample", {"sampling_session_id": session, "seq_id": number, "prompt": prompt, "num_samples": 1} | more
    )


def read_sample(answer: bytes) -> tuple[np.ndarray, np.ndarray]:
    (one,) = MESSAGES["SampleResponse"].FromString(answer).sequences
    return np.frombuffer(one.tokens, "<i4"), np.frombuffer(one.logprobs, "<f4")


def score(
    client: Client, post: Post, session: str, more: dict[str, Any], number: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Sample, and compare the log-probs with the model's of the same moment."""
    tokens, logprobs = read_sample(wait_for(post, request_sample(post, session, number, more)))
    own = client.logprobs([[3, 4, 5, *tokens.tolist()]])[0][2:]
    np.testing.assert_allclose(logprobs, own, atol=2e-5)
    return tokens, logprobs
