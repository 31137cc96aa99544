"""Clients of streams over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Any

from tests.support.agents import Agent

LINES = "application/x-ndjson"
FRAMES = "application/vnd.tightfit.frames"
EVENTS = "text/event-stream"
Record = dict[str, Any]


class Exchange:
    """One request whose body and answer go on. Without a content type it is a GET."""

    def __init__(
        self, agent: Agent, path: str, content_type: str = "", headers: dict[str, str] | None = None, receive: int = 0
    ) -> None:
        self.socket = socket.socket()
        if receive:
            # What the kernel takes for a client that does not read.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        self.socket.settimeout(60)
        self.socket.connect(("127.0.0.1", agent.port))
        if agent.tls is not None:
            self.socket = agent.tls.wrap_socket(self.socket, server_hostname="localhost")
        fields = {"Host": "localhost", **(headers or {})}
        if content_type:
            fields |= {"Content-Type": content_type, "Transfer-Encoding": "chunked"}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.socket.sendall(f"{'POST' if content_type else 'GET'} {path} HTTP/1.1\r\n{head}\r\n".encode())
        self.body = bytearray()
        """What was received and not taken yet, the transfer coding undone."""
        self.ended = False
        self._raw = bytearray()
        self._head: bytes | None = None

    def send(self, data: bytes) -> None:
        self.socket.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    def send_all(self, records: Iterable[bytes]) -> None:
        for record in records:
            self.send(record)

    def end(self) -> None:
        """No more comes."""
        self.socket.sendall(b"0\r\n\r\n")

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def head(self) -> bytes:
        """Status line and headers of the answer."""
        while self._head is None:
            self.receive()
        return self._head

    @property
    def status(self) -> int:
        return int(self.head.split()[1])

    def receive(self) -> bool:
        """Wait for more; False when there is none."""
        if self.ended:
            return False
        data = self.socket.recv(1 << 16)
        self._raw += data
        if self._head is None and b"\r\n\r\n" in self._raw:
            head, _, rest = self._raw.partition(b"\r\n\r\n")
            self._head, self._raw = bytes(head), bytearray(rest)
        if self._head is not None:
            self._unchunk()
        self.ended = self.ended or not data
        return bool(data)

    def _unchunk(self) -> None:
        while (at := self._raw.find(b"\r\n")) >= 0:
            size = int(bytes(self._raw[:at]), 16)
            if len(self._raw) < at + 4 + size:
                return
            self.body += self._raw[at + 2 : at + 2 + size]
            del self._raw[: at + 4 + size]
            self.ended = self.ended or size == 0

    def line(self) -> bytes | None:
        """The next line with its end, None behind the last."""
        while b"\n" not in self.body:
            if not self.receive():
                return None
        line, _, rest = bytes(self.body).partition(b"\n")
        self.body = bytearray(rest)
        return line + b"\n"

    def record(self) -> Record | None:
        """The next record of lines, heartbeats left out."""
        while (line := self.line()) is not None:
            if line.strip():
                return dict(json.loads(line))
        return None

    def records(self, count: int | None = None) -> list[Record]:
        """So many records, or all to the end."""
        found: list[Record] = []
        while (count is None or len(found) < count) and (record := self.record()) is not None:
            found.append(record)
        return found

    def event(self) -> dict[str, str]:
        """The next server-sent event by its fields, comments left out."""
        while True:
            fields = {}
            while (line := self.line()) not in (None, b"\n"):
                name, _, value = (line or b"").decode().rstrip("\n").partition(": ")
                fields[name] = value
            if "data" in fields or line is None:
                return fields


def stream(
    agent: Agent, content_type: str = LINES, headers: dict[str, str] | None = None, receive: int = 0
) -> Exchange:
    """A stream of requests to the agent's model."""
    return Exchange(agent, f"/v2/models/{agent.name}/stream", content_type, headers, receive)


def line(id_: str, outputs: tuple[str, ...] = (), parameters: Record | None = None, **inputs: tuple[str, Any]) -> bytes:
    """A request on a line; inputs as (datatype, list of values, nested where there are more dimensions)."""
    tensors = []
    for name, (datatype, data) in inputs.items():
        shape, level = [], data
        while isinstance(level, list):
            shape.append(len(level))
            level = level[0]
        tensors.append({"name": name, "datatype": datatype, "shape": shape, "data": data})
    body: Record = {"id": id_, "inputs": tensors}
    if outputs:
        body["outputs"] = [{"name": name} for name in outputs]
    if parameters:
        body["parameters"] = parameters
    return json.dumps(body).encode() + b"\n"


def pick(id_: str, value: float, row: int) -> bytes:
    """A request to `bundles.picking`: its `picked` is 8 * row + column + value."""
    return line(id_, ("picked",), x=("FP32", [[value] * 8]), at=("INT64", [row]))


def turn(id_: str, turns: int, **parameters: int) -> bytes:
    """A request to `bundles.slow`, which takes the longer the more turns."""
    return line(id_, (), parameters, x=("FP32", [1.0, 2.0, 3.0, 4.0]), turns=("INT64", [turns]))
