# SPDX-License-Identifier: Apache-2.0
"""Connections between a run and engines outside it, and the file in which an engine finds the run.

Both sides prove possession of the run's key before either unpickles a message. Messages are not encrypted, like
torch.distributed's: the network must be trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import pickle
import secrets
import socket
import struct
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

ADDRESS = "engines/front.json"  # in the run directory
FAILURES = (EOFError, OSError, pickle.UnpicklingError)  # of a link
_NONCE_BYTES = 32
_SIOCGIFADDR = 0x8915  # Linux: address of a network interface
# Reasons in the words of a log instead of the system's.
_WORDS = {EOFError: "the connection was closed", BlockingIOError: "silence", TimeoutError: "silence"}


class Link:
    """A connection whose two sides have the same key; sends are thread-safe.

    Args:
        seconds: limit for each message of the handshake, for sends, and for bytes without acknowledgement.
        mine, theirs: names of the two sides.

    Raises:
        OSError, EOFError: the other side does not answer, or has another key.
    """

    def __init__(self, endpoint: socket.socket, key: bytes, seconds: float, mine: bytes, theirs: bytes) -> None:
        self._socket, self._lock = endpoint, threading.Lock()
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
        endpoint.settimeout(None)  # blocking, with the kernel's limits
        self._limit(socket.SO_SNDTIMEO, seconds)
        self.limit_silence(seconds)
        self._connection = Connection(os.dup(endpoint.fileno()))  # which it closes itself
        try:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            self._connection.send_bytes(nonce)
            asked = self._connection.recv_bytes(_NONCE_BYTES)
            self._connection.send_bytes(hmac.digest(key, mine + asked, "sha256"))
            proof = self._connection.recv_bytes(hashlib.sha256().digest_size)
            if not hmac.compare_digest(proof, hmac.digest(key, theirs + nonce, "sha256")):
                raise ConnectionRefusedError("the other side has another key")
        except BaseException:
            self.close()
            raise

    def _limit(self, option: int, seconds: float) -> None:
        whole, rest = divmod(seconds, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(1e6 * rest)))

    def limit_silence(self, seconds: float) -> None:
        """Set the seconds without a byte after which `receive` fails; 0 for never."""
        self._limit(socket.SO_RCVTIMEO, seconds)

    def send(self, *message: Any) -> None:
        """Send a message."""
        with self._lock:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> tuple[Any, ...]:
        """Wait for a message."""
        return pickle.loads(self._connection.recv_bytes())

    def send_tensor(self, tensor: torch.Tensor) -> None:
        """Send the bytes of a contiguous CPU tensor."""
        with self._lock:
            self._connection.send_bytes(as_bytes(tensor))

    def receive_into(self, tensor: torch.Tensor) -> None:
        """Wait for the bytes of a contiguous CPU tensor, and write them into it."""
        self._connection.recv_bytes_into(as_bytes(tensor))

    def has_message(self, seconds: float) -> bool:
        """Return whether a message, or the end of the connection, arrives within a time."""
        return self._connection.poll(seconds)

    def end(self) -> None:
        """End the connection; a thread that waits for a message fails and then calls `close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; no other thread may be receiving."""
        self.end()
        with self._lock:
            self._connection.close()
            self._socket.close()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def describe_failure(error: BaseException) -> str:
    """Return why a link failed."""
    return next((words for kind, words in _WORDS.items() if isinstance(error, kind)), f"{error}")


class Address(NamedTuple):
    """Address of the listener of a run, and its key."""

    host: str  # name
    addresses: list[str]  # IPv4, of every network interface
    port: int
    key: str  # hexadecimal

    @classmethod
    def here(cls, port: int) -> Address:
        """Return the address of a listener on all interfaces of this host, with a new key."""
        found = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an address
                    packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found.append(socket.inet_ntoa(packed[20:24]))
        found.sort(key=lambda address: address.startswith("127."))
        return cls(socket.gethostname(), found, port, secrets.token_hex(32))

    @classmethod
    def read(cls, directory: Path) -> Address:
        """Read the address of the run in `directory`; OSError or ValueError if there is none."""
        return cls(**json.loads((directory / ADDRESS).read_text()))

    def write(self, directory: Path) -> None:
        """Write the file in the run directory, readable by this user only."""
        file = directory / ADDRESS
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            json.dump(self._asdict(), opened)
        partial.replace(file)

    def connect(self, seconds: float) -> Link:
        """Connect an engine to the run over the first address that answers; OSError or EOFError if none does."""
        # On the host of the run the loopback works, whatever the firewall thinks of the others.
        local = self.host == socket.gethostname()
        addresses = sorted(self.addresses, key=lambda address: address.startswith("127.") != local)
        failure: Exception = ConnectionRefusedError(f"{self.host} has no address")
        for address in addresses:
            try:
                endpoint = socket.create_connection((address, self.port), timeout=seconds)
                return Link(endpoint, bytes.fromhex(self.key), seconds, b"engine", b"front")
            except FAILURES as error:
                failure = error
        raise failure
