# SPDX-License-Identifier: Apache-2.0
"""Names of the Hugging Face hub in a config: from a filled cache without network, and from a hub served on loopback.

Not covered: the hub itself (redirects to storage, Xet, gated models), limits of its rate, and caches shared by hosts.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from distributed import run_ranks
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import name_files
from megatron_rl.data.rows import read_rows
from megatron_rl.run.building import check_agreement
from megatron_rl.run.command_line import run_command
from megatron_rl.run.inputs import localize, plan_rl, read_rl_inputs
from megatron_rl.run.loading import load_config
from megatron_rl.run.opening import _digest
from megatron_rl.types import UserError
from rl_runs import overrides_for

ROOT = Path(__file__).resolve().parents[2]
RL = {"name": "", "description": "", "build_plan": plan_rl, "read_inputs": read_rl_inputs, "run": print}
OLD, NEW = "a" * 40, "b" * 40
CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]
- config_name: other
  data_files: other.jsonl
---
"""
SUMS = {
    "README.md": CARD.encode(),
    "main/train.jsonl": b"".join(b'{"question": "%d+1=", "solution": "%d"}\n' % (i, i + 1) for i in range(8)),
    "main/test.jsonl": b'{"question": "9+1=", "solution": "10"}\n',
    "other.jsonl": b'{"question": "0+0=", "solution": "0"}\n',
}


def fill_cache(cache: Path, repository: str, commits: Mapping[str, Mapping[str, bytes]], main: str) -> Path:
    """Fill a cache as the library does: files in blobs/, links to them in snapshots/COMMIT/, a branch in refs/."""
    folder = cache / repository
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(main)
    for commit, files in commits.items():
        for name, content in files.items():
            blob, link = (
                folder / "blobs" / f"{commit[:4]}{name.replace('/', '_')}",
                folder / "snapshots" / commit / name,
            )
            blob.parent.mkdir(exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(content)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return folder / "snapshots"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a process that may not use the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def make_config(*settings: str) -> RunConfig:
    """A config without local files."""
    return load_config(
        None, ["model.path=me/tiny", "data.train_files=[x]", "data.train_batch_size=4", *settings]
    ).config


def test_names_become_directories_and_commits(cache: Path) -> None:
    snapshots = fill_cache(cache, "models--me--tiny", {OLD: {"config.json": b"{}"}, NEW: {"config.json": b"{}"}}, NEW)
    fill_cache(cache, "datasets--me--sums", {OLD: SUMS}, OLD)
    config, lines = localize(
        make_config(
            f"model.tokenizer=me/tiny@{OLD}",
            "algorithm.kl_coef=0.1",
            "reference.path=me/tiny@main",
            "actor.lora.rank=1",
            "actor.lora.path=me/tiny",
            "data.train_files=[hub:me/sums/main:train, there.jsonl]",
            f"data.validation_files=['hub:me/sums/main@{OLD}:test']",
        )
    )
    assert config.model.path == config.reference.path == config.actor.lora.path == str(snapshots / NEW)
    assert config.model.tokenizer == str(snapshots / OLD)
    assert config.data.train_files == [f"hub:me/sums/main@{OLD}:train", "there.jsonl"]
    assert config.data.validation_files == [f"hub:me/sums/main@{OLD}:test"]
    assert lines[0] == f"model.path: me/tiny is commit {NEW} of the hub" and len(lines) == 6


def test_a_local_directory_wins_and_needs_no_library(tmp_path: Path) -> None:
    """In a process of its own: other tests import the library."""
    (tmp_path / "me/tiny").mkdir(parents=True)
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from megatron_rl.run.inputs import localize\n"
        "from megatron_rl.run.loading import load_config\n"
        "config = load_config(None, ['model.path=me/tiny', 'reference.path=/me/tiny', 'data.train_files=[me/x.jsonl]',"
        " 'data.train_batch_size=4', 'algorithm.kl_coef=0.1']).config\n"
        "assert localize(config) == (config, [])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_rows_of_a_data_set(cache: Path) -> None:
    fill_cache(cache, "datasets--me--sums", {OLD: SUMS}, OLD)
    rows = list(read_rows([f"hub:me/sums/main@{OLD}:train", "hub:me/sums/other:train"]))
    assert [row.columns["solution"] for row in rows] == [str(i + 1) for i in range(8)] + ["0"]
    assert rows[0].location == f"hub:me/sums/main@{OLD}:train:row 1" and rows[8].file == 1
    assert list(name_files([f"hub:me/sums/main@{OLD}:test", "data/test.jsonl"])) == ["main-test", "data-test"]
    names = [Path(f"hub:me/sums@{commit}:test") for commit in (OLD, OLD, NEW)]
    digests = [_digest([name], samples=False) for name in names]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("hub:me/sums/absent:train", ["absent", "its page on the hub lists both"]),
        ("hub:me/sums/main:dev", ["dev", "its page on the hub lists both"]),
        ("hub:me/sums/main", ["is no data set's name", "hub:openai/gsm8k/main:train"]),
        ("hub:me/none:train", ["me/none is neither", "hf download me/none --repo-type dataset --local-dir DIR"]),
        ("me/sums", ["me/sums does not exist", "hub:OWNER/NAME[/CONFIG]:SPLIT"]),
        ("data/*.jsonl", ["does not exist", "list the files, [A, B]: a pattern may match other files"]),
    ],
)
def test_data_that_is_not_there(file: str, words: list[str], cache: Path) -> None:
    fill_cache(cache, "datasets--me--sums", {OLD: SUMS}, OLD)
    with pytest.raises(UserError) as caught:
        list(read_rows([file]))
    assert all(word in str(caught.value) for word in words), caught.value


def test_without_network_the_command_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(UserError) as caught:
        localize(make_config("model.path=me/tiny@v1"))
    text = str(caught.value)
    assert "me/tiny@v1 is neither a local path nor a model" in text and "source:   model.path" in text
    assert "hf download me/tiny --revision v1 --local-dir DIR, and set model.path=DIR" in text
    assert "hf_secret" not in text


def _compare(rank: int, world_size: int, lines: list[list[str]]) -> str:
    try:
        check_agreement(lines[rank])
    except UserError as error:
        return str(error)
    return ""


def test_ranks_with_other_commits_are_refused_alike() -> None:
    """One whose branch has moved, and one that has a local directory, which gives no line."""
    same = [f"model.path: me/tiny is commit {OLD} of the hub"]
    moved = [f"model.path: me/tiny is commit {NEW} of the hub"]
    assert run_ranks(partial(_compare, lines=[same, same]), 2) == ["", ""]
    first, second = run_ranks(partial(_compare, lines=[same, moved]), 2)
    assert first == second and f"{same[0]} on rank 0, {moved[0]} on rank 1" in first and "write ID@COMMIT" in first
    first, second = run_ranks(partial(_compare, lines=[same, []]), 2)
    assert first == second and f"{same[0]} on rank 0, none on rank 1" in first


@dataclass
class Hub:
    """Repositories by API path, such as "models/me/tiny", and the requests."""

    files: dict[str, dict[str, bytes]]
    sent: Counter[str] = field(default_factory=Counter)
    tokens: set[str | None] = field(default_factory=set)

    @property
    def handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.tokens.add(self.headers.get("Authorization"))
                path = self.path.partition("?")[0].strip("/")
                kind = "datasets/" if path.startswith("datasets/") else "models/"
                place, _, name = path.removeprefix("datasets/").partition(f"/resolve/{NEW}/")
                content = hub.files.get(kind + place, {}).get(name)
                if path.startswith("api/"):
                    hub.sent[path] += 1
                    place, _, rest = path.removeprefix("api/").partition("/tree/")
                    place, _, revision = place.partition("/revision/")
                    if place in hub.files and revision in ("", "main"):
                        found = {"id": place.partition("/")[2], "sha": NEW, "siblings": []}
                        if rest:
                            found = [
                                {"type": "file", "path": name, "size": len(data), "oid": str(hash(data))}
                                for name, data in hub.files[place].items()
                            ]
                        content = json.dumps(found).encode()
                elif content is not None and self.command == "GET":
                    hub.sent[f"{kind}{place}/{name}"] += 1
                self.send_response(200 if content is not None else 404)
                if content is None:
                    self.send_header("X-Error-Code", "RepoNotFound" if path.startswith("api/") else "EntryNotFound")
                else:
                    self.send_header("X-Repo-Commit", NEW)
                    self.send_header("ETag", f'"{abs(hash(content))}"')
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content or b"")

        return Handler


@pytest.fixture
def hub(task: Path) -> Iterator[tuple[Hub, str]]:
    """The model of the task of sixteen sums, with files that no run reads, and a data set."""
    model = {file.name: file.read_bytes() for file in (task / "model").iterdir()}
    extra = {"pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}
    served = Hub({"models/me/tiny": model | extra, "datasets/me/sums": SUMS})
    server = ThreadingHTTPServer(("127.0.0.1", 0), served.handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield served, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _dry_run(rank: int, world_size: int, command: list[str], hub: str, home: Path, is_offline: bool) -> list[Any]:
    """Status, stdout and stderr of a dry run with this hub and cache."""
    os.environ.update(HF_TOKEN="hf_secret", HF_HUB_DISABLE_XET="1")
    os.environ.pop("RANK", None)  # each prints
    found = {"HF_HUB_CACHE": str(home), "HF_HUB_OFFLINE": is_offline, "ENDPOINT": hub}
    vars(constants).update(found, HUGGINGFACE_CO_URL_TEMPLATE=hub + "/{repo_id}/resolve/{revision}/{filename}")
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as error:
        status = run_command(command, **RL)
    return [status, out.getvalue(), error.getvalue()]


def test_a_hub_on_loopback(hub: tuple[Hub, str], task: Path, tmp_path: Path) -> None:
    """Two ranks of a host ask once and take each file once; later runs need no network, and no output has the token."""
    served, address = hub
    settings = [setting for setting in overrides_for(task, tmp_path / "run") if not setting.startswith("data.v")]
    command = [*settings, "model.path=me/tiny", "data.train_files=['hub:me/sums/main:train']", "--world-size", "4"]
    command += ["data.prompt_key=question", "data.answer_key=solution", "actor.lr=2e-5", "--dry-run"]
    ranks = run_ranks(_dry_run, 2, command, address, tmp_path / "home", False)
    for status, out, error in ranks:
        assert status == 0, error
        assert f"note: model.path: me/tiny is commit {NEW} of the hub" in error
        assert f"note: data.train_files: hub:me/sums/main:train is hub:me/sums/main@{NEW}:train" in error
        assert "steps_per_epoch = num_train_prompts / train_batch_size = 8 / 8 = 1" in out
        assert out.splitlines()[-1].startswith("the run would start on 4 rank(s)") and "lr: 2.0e-05" in out
        assert "hf_secret" not in out + error
    assert "Bearer hf_secret" in served.tokens
    assert set(served.sent.values()) == {1}, served.sent
    assert {"api/models/me/tiny/revision/main", "models/me/tiny/model.safetensors"} <= served.sent.keys()
    assert {"models/me/tiny/pytorch_model.bin", "models/me/tiny/onnx/config.json"}.isdisjoint(served.sent)

    [(status, out, _)] = run_ranks(_dry_run, 1, command, "http://127.0.0.1:9", tmp_path / "home", True)
    assert (status, out) == (0, ranks[0][1])
    [(status, out, error)] = run_ranks(_dry_run, 1, [*command, "model.path=me/none"], address, tmp_path / "home", False)
    assert status == 2 and "me/none is neither a local path nor a model" in error
    assert "RepositoryNotFoundError: 404" in error and out.splitlines()[-1] == "the run would not start: see the error"
    assert "hf_secret" not in out + error
