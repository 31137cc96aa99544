"""A connection to a broker, and how it comes to be: name, address, TLS. Nothing of MQTT but how long its packets are.

The library reads bytes one by one, writes packets one by one, and takes in whatever length a peer claims. What stands
between it and the socket reads ahead, writes together, and ends a connection whose peer claims too much.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from agent.mqtt.backoff import Trouble
from agent.mqtt.brokers import Broker

_READ_BYTES = 64 << 10
# More is not taken while the peer reads nothing; one packet may be beyond it.
_UNSENT_BYTES = 64 << 10
# What the kernel keeps beside it.
_KERNEL_BYTES = 256 << 10
_PUBLISH_QOS_2 = 0x34
# A peer that vanished is noticed by the keep-alive of MQTT; this only lets the kernel forget it as well.
_USER_TIMEOUT_MS = 60_000


class DialError(Exception):
    """No connection: at which step (dns, tcp, tls), and what kind of trouble that is. `verify_code` is OpenSSL's, where
    it was the broker's certificate."""

    def __init__(self, step: str, trouble: Trouble, text: str, verify_code: int = 0) -> None:
        super().__init__(text)
        self.step, self.trouble, self.verify_code = step, trouble, verify_code


def resolve(broker: Broker) -> list[str]:
    """Its addresses. Raises DialError."""
    try:
        found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise DialError("dns", Trouble.NETWORK, f"{broker.host}: {text}") from None
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def reach(broker: Broker, addresses: list[str], timeout_s: float) -> socket.socket:
    """A connection to the first address that takes one. Raises DialError."""
    problem = "no address"
    for address in addresses:
        try:
            sock = socket.create_connection((address, broker.port), timeout=timeout_s)
        except OSError as error:
            problem = f"{address} port {broker.port}: {error.strerror or error}"
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        return sock
    raise DialError("tcp", Trouble.NETWORK, problem)


def secure(sock: socket.socket, broker: Broker, context: ssl.SSLContext) -> ssl.SSLSocket:
    """TLS over it, within its timeout. Raises DialError, and then closes it."""
    try:
        return context.wrap_socket(sock, server_hostname=broker.host)
    except (OSError, ValueError) as error:
        sock.close()
        code = error.verify_code if isinstance(error, ssl.SSLCertVerificationError) else 0
        raise DialError("tls", tls_trouble(error), tls_words(error), code) from None


def dial(broker: Broker, context: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """All of it; `timeout_s` is for each step. Raises DialError."""
    sock = reach(broker, resolve(broker), timeout_s)
    if context is None:
        return sock
    return secure(sock, broker, context)


def tls_trouble(error: Exception) -> Trouble:
    """Whether a person has to see to a certificate, or it was the network."""
    if isinstance(error, ssl.SSLCertVerificationError | ValueError):
        return Trouble.CERTIFICATE
    reason = str(getattr(error, "reason", "") or "")
    if isinstance(error, ssl.SSLError) and ("ALERT" in reason or "CERTIFICATE" in reason):
        return Trouble.CERTIFICATE
    return Trouble.NETWORK


def tls_words(error: Exception) -> str:
    """What OpenSSL says, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the broker's certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return str(error.reason).replace("_", " ").lower()
    if isinstance(error, TimeoutError):
        return "no answer to the handshake in time"
    return str(getattr(error, "strerror", None) or error)[:200]


class Wire:
    """The socket, as the library wants one; it does not block. `problem` says why it ended, where that is known."""

    def __init__(self, sock: socket.socket, most_packet_bytes: int) -> None:
        self._sock, self._most = sock, most_packet_bytes
        self._in, self._at = b"", 0
        self._out = bytearray()
        self._head, self._length, self._shift, self._left = -1, 0, 0, 0
        self.problem: tuple[Trouble, str] | None = None

    @property
    def unread(self) -> bool:
        """Whether there is something that select does not know of."""
        return self._at < len(self._in) or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0)

    @property
    def unsent(self) -> int:
        """Bytes that the kernel did not take yet."""
        return len(self._out)

    def recv(self, buffer_size: int) -> bytes:
        """Raises BlockingIOError where nothing is there yet."""
        if self._at == len(self._in):
            self._in, self._at = self._read(), 0
        data = self._in[self._at : self._at + buffer_size]
        self._at += len(data)
        return data

    def send(self, buffer: bytes | bytearray) -> int:
        """Takes all of it. Raises BlockingIOError where too much is unsent."""
        if len(self._out) >= _UNSENT_BYTES:
            self.flush()
            if len(self._out) >= _UNSENT_BYTES:
                raise BlockingIOError
        self._out += buffer
        return len(buffer)

    def flush(self) -> None:
        """Give the kernel what it takes. Raises ConnectionError."""
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as error:
                raise self._failed(self._alert() or error) from None
            del self._out[:sent]

    def close(self) -> None:
        """What the kernel takes at once is still sent: a goodbye."""
        with contextlib.suppress(OSError):
            self.flush()
        self._sock.close()

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)

    def _read(self) -> bytes:
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except OSError as error:
            raise self._failed(error) from None
        if not data:
            self.problem = self.problem or (Trouble.CLOSED, "the broker closed the connection")
        self._scan(data)
        return data

    def _alert(self) -> ssl.SSLError | None:
        """Where a peer ended TLS it said why, in what was not read yet."""
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.recv(_READ_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError):
            return None
        except ssl.SSLError as error:
            return error
        except OSError:
            return None
        return None

    def _failed(self, error: OSError) -> ConnectionError:
        self.problem = self.problem or (tls_trouble(error), tls_words(error))
        return ConnectionError(self.problem[1])

    def _scan(self, data: bytes) -> None:
        """Find where packets begin, to know of one that is too long before it is kept."""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                skipped = min(self._left, end - at)
                self._left -= skipped
                at += skipped
            elif self._head < 0:
                self._head, self._length, self._shift = data[at], 0, 0
                at += 1
                if self._head & 0xF6 == _PUBLISH_QOS_2:
                    self._refuse("a message of QoS 2, which nobody asked for")
            else:
                self._length |= (data[at] & 0x7F) << self._shift
                self._shift += 7
                if data[at] < 0x80:
                    if self._length > self._most:
                        self._refuse(f"a packet of {self._length} bytes, where at most {self._most} may come")
                    self._left, self._head = self._length, -1
                elif self._shift > 21:
                    self._refuse("a packet without a length")
                at += 1

    def _refuse(self, what: str) -> None:
        self.problem = (Trouble.PROTOCOL, f"the broker sent {what}")
        raise ConnectionError(self.problem[1])
