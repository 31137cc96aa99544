"""HTTP/1.1 as bytes on a socket."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

LANES = {"fast lane": {}, "aiohttp": {"TE": "trailers"}}
"""Headers by which the one or the other answers; they mean nothing else here."""
ODD = "TE: trailers"


def post(name: str, body: bytes, *headers: str) -> bytes:
    """An infer request."""
    lines = [f"POST /v2/models/{name}/infer HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def tensors(arrays: dict[str, np.ndarray[Any, Any]], binary: bool, **more: Any) -> tuple[bytes, tuple[str, ...]]:
    """(body, headers) of a request for FP32 inputs, and for outputs of the same form."""
    inputs: list[dict[str, Any]] = []
    for name, array in arrays.items():
        tensor = {"name": name, "datatype": "FP32", "shape": list(array.shape)}
        form = {"parameters": {"binary_data_size": array.nbytes}} if binary else {"data": array.ravel().tolist()}
        inputs.append({**tensor, **form})
    parameters = {"binary_data_output": binary, **more.pop("parameters", {})}
    text = json.dumps({"inputs": inputs, "parameters": parameters, **more}).encode()
    if not binary:
        return text, ()
    return text + b"".join(a.tobytes() for a in arrays.values()), (f"Inference-Header-Content-Length: {len(text)}",)


@dataclass(frozen=True)
class Answer:
    """One answer: `headers` by their names in lower case, without the date."""

    status: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """A connection, of TLS where there is a context for it."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._data = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> Answer:
        """The next answer; EOFError where the connection is closed instead."""
        while b"\r\n\r\n" not in self._data:
            self._receive()
        head, self._data = self._data.split(b"\r\n\r\n", 1)
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        assert "date" in headers
        del headers["date"]
        length = int(headers["content-length"])
        while len(self._data) < length:
            self._receive()
        body, self._data = self._data[:length], self._data[length:]
        return Answer(status, headers, body)

    def ask(self, data: bytes) -> Answer:
        self.send(data)
        return self.read()

    def is_closed(self) -> bool:
        """Whether the other side closes it, having said nothing more."""
        return not self._data and self.socket.recv(1) == b""

    def read_raw(self) -> bytes:
        """All that comes until the other side closes it."""
        with contextlib.suppress(EOFError):
            while True:
                self._receive()
        return self._data

    def _receive(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError(self._data)
        self._data += data


@contextlib.contextmanager
def wire(port: int, tls: ssl.SSLContext | None = None) -> Iterator[Wire]:
    connection = Wire(port, tls)
    try:
        yield connection
    finally:
        connection.socket.close()
