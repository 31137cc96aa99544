"""A client of HTTP/1.x that sends what it is told, byte for byte, and reads answers strictly."""

from __future__ import annotations

import json
import socket
import ssl
from types import TracebackType
from typing import Any, NamedTuple

BIG_HEAD_BYTES = 1024
"""No answer has a larger head: small clients have one buffer for it."""


class Answer(NamedTuple):
    """One answer; names of headers are in lower case."""

    version: str
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def closes(self) -> bool:
        """Whether it says that the connection ends behind it."""
        connection = self.headers.get("connection", "")
        return connection == "close" or (self.version == "HTTP/1.0" and connection != "keep-alive")


class Peer:
    """One connection, to (host, port) or to the path of a Unix socket, with `tls` of TLS. `receive` bounds what the
    kernel takes in."""

    def __init__(self, address: tuple[str, int] | str, receive: int = 0, tls: ssl.SSLContext | None = None) -> None:
        if isinstance(address, str):
            family = socket.AF_UNIX
        else:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.socket(family)
        if receive:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        self.socket.settimeout(60)
        self.socket.connect(address)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def fin(self) -> None:
        """Send no more."""
        self.socket.shutdown(socket.SHUT_WR)

    def answer(self, method: str = "POST") -> Answer:
        """The next answer to a request of that method, whole."""
        line = self._line()
        version, status, _ = line.split(" ", 2)
        size, headers = len(line) + 4, {}
        while line := self._line():
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, line
            headers[name.lower()] = value
            size += len(line) + 2
        assert size < BIG_HEAD_BYTES, headers
        body = b""
        if method != "HEAD" and status not in ("100", "204"):
            body = self._body(version, headers)
        return Answer(version, int(status), headers, body)

    def some(self) -> bytes:
        """What comes next, as it comes."""
        data = self._file.read1()
        assert data, "the connection has ended"
        return data

    def ended(self) -> bool:
        """Whether the other side sends no more, and has sent nothing that was not read."""
        return self._file.read(1) == b""

    def _line(self) -> str:
        line = self._file.readline()
        assert line.endswith(b"\r\n"), line
        return line[:-2].decode("latin-1")

    def _body(self, version: str, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            assert "transfer-encoding" not in headers
            return self._exactly(int(headers["content-length"]))
        if "transfer-encoding" not in headers:
            return self._file.read()
        assert (version, headers["transfer-encoding"]) == ("HTTP/1.1", "chunked")
        body = b""
        while size := int(self._line(), 16):
            body += self._exactly(size)
            assert self._line() == ""
        assert self._line() == ""
        return body

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        assert len(data) == size, f"the answer ends after {len(data)} of {size} bytes"
        return data
