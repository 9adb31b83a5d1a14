# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces with addresses and host names of their own, and a cable between them.

Needs root and Linux; `can_make_hosts` checks this. Files, CPUs and memory are shared: the program distinguishes hosts
by network and name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One namespace.

    Attributes:
        name: of the namespace, and the host's name.
        address: IPv4.
        interface: its end of the cable.
    """

    name: str
    address: str
    interface: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` on this host."""
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0" && exec "$@"',
            self.name,
            *words,
        ]

    def set_link(self, state: str) -> None:
        """Put this end of the cable "up" or "down"."""
        _run("ip", "-n", self.name, "link", "set", self.interface, state)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)


def can_make_hosts() -> str | None:
    """None if it works here, else the reason why not."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip (iproute2) or unshare is not installed"
    try:
        with two_hosts() as hosts:
            _run(*hosts[0].command("true"))
    except subprocess.CalledProcessError as error:
        return f"network namespaces do not work here: {error.stderr.strip()}"
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both hosts, connected; they are gone afterwards, processes in them are the caller's affair."""
    # Names of interfaces have 15 characters; the process id keeps tests that run at once apart.
    tag = f"{os.getpid() % 10**6}"
    hosts = tuple(Host(f"rl{tag}{end}", f"10.77.0.{number}", f"rl{tag}{end}") for number, end in ((1, "a"), (2, "b")))
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
        _run(
            "ip",
            "link",
            "add",
            hosts[0].interface,
            "netns",
            hosts[0].name,
            "type",
            "veth",
            "peer",
            "name",
            hosts[1].interface,
            "netns",
            hosts[1].name,
        )
        for host in hosts:
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _run("ip", "-n", host.name, "link", "set", interface, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
