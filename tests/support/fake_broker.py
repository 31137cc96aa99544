"""A broker that does what it is told, however bad: it withholds answers, lies about limits, stalls, and refuses."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.support import mqtt_packets as mqtt
from tests.support.mqtt_packets import Connection, Packet, Published, Reader


class FakeBroker:
    """Each client has a thread. It lets everybody in with `announces` (properties of CONNACK), and acknowledges with
    success, unless what is set here says otherwise; what is set may be changed while it runs."""

    def __init__(self) -> None:
        self._listens = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listens.getsockname()[1])
        self.announces: dict[str, object] = {}
        self.refusals: list[bytes] = []
        """Answers to the next CONNECTs, in place of success; empty bytes: none."""
        self.acknowledges = True
        self.code_of: Callable[[Published], int] = lambda _: 0
        self.ends_at: Callable[[Published], bytes] = lambda _: b""
        """What is said, as the last, in place of an acknowledgement."""
        self.subscriptions_code = 1
        self.reads_after_connack = True
        """False: it stalls, and takes nothing more."""
        self.answers_pings = True
        self.greets: Sequence[bytes] = ()
        """What follows a CONNACK."""
        self.connects: list[Connection] = []
        self.published: list[Published] = []
        self.subscribed: list[str] = []
        self.goodbyes: list[int] = []
        self.most_unanswered = 0
        """How many messages of one connection were without an answer at once."""
        self.largest = 0
        """The longest packet, with its head."""
        self._conns: list[tuple[socket.socket, threading.Lock]] = []
        self._threads: list[threading.Thread] = []
        self._withheld: list[tuple[socket.socket, threading.Lock, int, int]] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def send(self, data: bytes) -> None:
        """To the client that came last."""
        conn, lock = self._conns[-1]
        with lock, contextlib.suppress(OSError):
            conn.sendall(data)

    def acknowledge_withheld(self) -> None:
        """What was not acknowledged is, and all that comes from now on."""
        self.acknowledges = True
        withheld, self._withheld = self._withheld, []
        for conn, lock, mid, protocol in withheld:
            with lock, contextlib.suppress(OSError):
                conn.sendall(mqtt.puback(mid, protocol=protocol))

    def drop(self) -> None:
        """All connections end."""
        conns, self._conns = self._conns, []
        for conn, _ in conns:
            with contextlib.suppress(OSError):
                conn.shutdown(socket.SHUT_RDWR)
            conn.close()

    def close(self) -> None:
        # What accepts is woken by this, and not by close.
        self._listens.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listens.close()
        self.drop()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                conn, _ = self._listens.accept()
            except OSError:
                return
            lock = threading.Lock()
            self._conns.append((conn, lock))
            thread = threading.Thread(target=self._serve, args=(conn, lock), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, conn: socket.socket, lock: threading.Lock) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._talk(conn, lock)

    def _talk(self, conn: socket.socket, lock: threading.Lock) -> None:
        first = self._read(conn)
        if first.kind != mqtt.CONNECT or first.body[2:6] != b"MQTT":
            conn.close()
            return
        client = mqtt.read_connect(first.body)
        self.connects.append(client)
        if self.refusals:
            answer = self.refusals.pop(0)
            conn.sendall(answer)
            conn.close()
            return
        with lock:
            conn.sendall(mqtt.connack(protocol=client.protocol, **self.announces))
            for each in self.greets:
                conn.sendall(each)
        if not self.reads_after_connack:
            return
        unanswered = 0
        while True:
            got = self._read(conn)
            answer = b""
            if got.kind == mqtt.PUBLISH:
                message = mqtt.read_publish(got, client.protocol)
                unanswered += message.qos > 0
                self.most_unanswered = max(self.most_unanswered, unanswered)
                self.published.append(message)
                if last := self.ends_at(message):
                    conn.sendall(last)
                    conn.shutdown(socket.SHUT_RDWR)
                    return
                if message.qos and self.acknowledges:
                    answer = mqtt.puback(message.mid, self.code_of(message), protocol=client.protocol)
                    unanswered -= 1
                elif message.qos:
                    self._withheld.append((conn, lock, message.mid, client.protocol))
            elif got.kind == mqtt.SUBSCRIBE:
                answer = self._subscribe(got, client.protocol)
            elif got.kind == mqtt.PINGREQ and self.answers_pings:
                answer = mqtt.packet(mqtt.PINGRESP)
            elif got.kind == mqtt.DISCONNECT:
                self.goodbyes.append(got.body[0] if got.body else 0)
                conn.close()
                return
            with lock:
                conn.sendall(answer)

    def _subscribe(self, got: Packet, protocol: int) -> bytes:
        reader = Reader(got.body)
        mid = reader.number(2)
        if protocol == 5:
            reader.properties()
        rest, count = Reader(reader.rest()), 0
        with contextlib.suppress(AssertionError):
            while True:
                self.subscribed.append(rest.string().decode())
                rest.number(1)
                count += 1
        return mqtt.suback(mid, [self.subscriptions_code] * count, protocol=protocol)

    def _read(self, conn: socket.socket) -> Packet:
        head = _exactly(conn, 1)[0]
        size = shift = 0
        count = 1
        while True:
            byte = _exactly(conn, 1)[0]
            size |= (byte & 0x7F) << shift
            shift += 7
            count += 1
            if byte < 0x80:
                break
        self.largest = max(self.largest, count + size)
        return Packet(head >> 4, head & 15, _exactly(conn, size))


def _exactly(conn: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = conn.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


@contextlib.contextmanager
def fake_broker(announces: Mapping[str, object] | None = None) -> Iterator[FakeBroker]:
    broker = FakeBroker()
    broker.announces.update(announces or {})
    try:
        yield broker
    finally:
        broker.close()
