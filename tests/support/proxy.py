"""A proxy for TCP that is as bad as a network: it delays, lets a connection hang half open, or resets it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

_RESETS = struct.pack("ii", 1, 0)


class Proxy:
    """To 127.0.0.1 at `port`. What is set holds for connections that are there as well."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listens = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listens.getsockname()[1])
        self.delay_s = 0.0
        """Each piece, in each direction, is so late."""
        self.accepted = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._all: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._hung: list[threading.Event] = []
        self._flows = threading.Event()
        self._flows.set()
        self._refuses = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def hang(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._flows.clear()

    def flow(self) -> None:
        """What hung goes on."""
        self._flows.set()

    def refuse(self, refuses: bool = True) -> None:
        """New connections are reset."""
        self._refuses = refuses

    def reset(self) -> None:
        """All connections end with RST, at both ends."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                _reset(each)

    def abandon(self) -> None:
        """Connections that hang stay so for ever, while new ones flow: half open, as after a change of networks."""
        with self._lock:
            self._pairs = []
        self._hung.append(self._flows)
        self._flows = threading.Event()
        self._flows.set()

    def close(self) -> None:
        # What accepts is woken by this, and not by close.
        self._listens.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listens.close()
        for each in self._all:
            _reset(each)
        for flows in (*self._hung, self._flows):
            flows.set()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listens.accept()
            except OSError:
                return
            self.accepted += 1
            if self._refuses:
                _reset(near)
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target), 10)
            except OSError:
                _reset(near)
                continue
            with self._lock:
                self._pairs.append((near, far))
                self._all += near, far
            for one, other in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass, args=(one, other, self._flows), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, one: socket.socket, other: socket.socket, flows: threading.Event) -> None:
        try:
            while data := one.recv(1 << 16):
                if self.delay_s:
                    time.sleep(self.delay_s)
                flows.wait()
                other.sendall(data)
            flows.wait()
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_WR)
        except OSError:
            _reset(other)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
        # Whoever reads it elsewhere is woken, which close alone does not do.
        sock.shutdown(socket.SHUT_RD)
    sock.close()


@contextlib.contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    made = Proxy(port)
    try:
        yield made
    finally:
        made.close()
