# SPDX-License-Identifier: Apache-2.0
"""A small client of the Debug Adapter Protocol, as an IDE is one: messages of JSON over a socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

Frame = Mapping[str, Any]


class DapClient:
    """Attached to the debugger that listens on a port of this host.

    Args:
        port: the debugger's.
        breakpoints: file -> lines.
        seconds: that one message may take.
    """

    def __init__(self, port: int, breakpoints: Mapping[Path, Sequence[int]], seconds: float = 60.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=seconds)
        self._file, self._number = self._socket.makefile("rb"), 0
        self._events: list[dict[str, Any]] = []
        self.request("initialize", adapterID="python", pathFormat="path", linesStartAt1=True)
        attach = self._send("attach", justMyCode=False)
        self.wait_for("initialized")
        for path, lines in breakpoints.items():
            self.set_breakpoints(path, lines)
        self.request("configurationDone")
        self._answer(attach)

    def set_breakpoints(self, path: Path, lines: Sequence[int]) -> None:
        """Replace the breakpoints of a file."""
        answer = self.request(
            "setBreakpoints", source={"path": str(path)}, breakpoints=[{"line": line} for line in lines]
        )
        assert all(found["verified"] for found in answer["breakpoints"]), answer

    def wait_for_stop(self) -> tuple[int, Frame]:
        """Wait until a thread stops; its number and its innermost frame."""
        thread = self.wait_for("stopped")["threadId"]
        return thread, self.request("stackTrace", threadId=thread)["stackFrames"][0]

    def evaluate(self, expression: str, frame: Frame) -> str:
        """The value of an expression in a frame of a stopped thread, as Python prints it."""
        return self.request("evaluate", expression=expression, frameId=frame["id"], context="repl")["result"]

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for the body of its answer."""
        return self._answer(self._send(command, **arguments))

    def wait_for(self, event: str) -> dict[str, Any]:
        """The body of the next event of that name; others before it are dropped."""
        while True:
            found = self._events.pop(0) if self._events else self._read()
            if found.get("event") == event:
                return found.get("body", {})

    def _send(self, command: str, **arguments: Any) -> int:
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        content = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        return self._number

    def _answer(self, number: int) -> dict[str, Any]:
        while True:
            message = self._read()
            if message["type"] == "event":
                self._events.append(message)
            elif message.get("request_seq") == number:
                assert message["success"], message
                return message.get("body", {})

    def _read(self) -> dict[str, Any]:
        length = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the debugger has closed the connection"
        return json.loads(self._file.read(length))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._socket.close()
