"""Sockets to listen on: TCP over IPv4 and IPv6, and Unix sockets.

What is set on a listening socket is inherited by the connections that it accepts (socket(7), tcp(7)).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.config import Http, Limits
from agent.errors import AgentError

_BACKLOG = 128
# So many questions without an answer, each a quarter of the silence after the last, and the peer is taken for dead.
_PROBES = 4
# Most kernels count 250 a second.
_TICK_S = 0.004
_LIMITS = Limits()


class Listener(socket.socket):
    """A socket that listens."""

    secure = False
    """Whether those who connect speak TLS."""


@contextlib.contextmanager
def listening(http: Http, tls: bool = False, limits: Limits = _LIMITS) -> Iterator[list[Listener]]:
    """Sockets that listen, at least one for each address; with `tls` those speak it that do not say otherwise. When the
    block is left they are closed, and the files of Unix sockets removed. Raises AgentError when an address cannot be
    had."""
    send_bytes = limits.send_buffer_kib << 10
    with contextlib.ExitStack() as stack:
        listeners = []
        for address in http.addresses:
            if isinstance(address, Path):
                listeners.append(stack.enter_context(_unix(address, http.unix_mode)))
                continue
            for family, resolved in _resolved(address.host, address.port):
                listener = stack.enter_context(_tcp(family, resolved, http.tcp_keepalive_s, send_bytes))
                listener.secure = address.is_secure(tls)
                listeners.append(listener)
        yield listeners


def url_of(listener: Listener) -> str:
    """Where clients find it: a URL, or `unix:PATH`."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"{'https' if listener.secure else 'http'}://{_where(name)}"


def is_secure(transport: asyncio.BaseTransport | None) -> bool:
    """Whether it speaks TLS."""
    return transport is not None and transport.get_extra_info("ssl_object") is not None


def waited_s(transport: asyncio.BaseTransport | None) -> float:
    """How long what came last lay unread in the socket, in seconds, at the least; 0 where nobody knows.

    tcp(7), TCP_INFO: tcpi_last_data_recv of struct tcp_info (linux/tcp.h), which counts in ticks of the kernel.
    """
    if transport is None:
        return 0.0
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 56)
    except (AttributeError, OSError):
        # It is closed, or no TCP.
        return 0.0
    return max(int.from_bytes(info[52:56], sys.byteorder) / 1e3 - _TICK_S, 0.0)


def untaken(transport: asyncio.WriteTransport) -> int:
    """Bytes that wait for the client, here and in the kernel. That says that there is room only when a third of its
    buffer is free, which takes a reader longer that takes little at a time. TIOCOUTQ: tcp(7), unix(7)."""
    fd = transport.get_extra_info("socket").fileno()
    (queued,) = struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))
    return transport.get_write_buffer_size() + int(queued)


def _where(address: Any) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolved(host: str, port: int) -> list[tuple[int, Any]]:
    """Families and addresses that the host's name stands for."""
    with _explained(_where((host, port))):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, address) for family, _, _, _, address in found]


@contextlib.contextmanager
def _tcp(family: int, address: Any, keepalive_s: int, send_bytes: int) -> Iterator[Listener]:
    with Listener(family, socket.SOCK_STREAM) as listener:
        with _explained(_where(address)):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The kernel counts twice as much, for what it needs itself (socket(7)). A Unix socket has 208 KiB anyway.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes // 2)
            _keep_alive(listener, keepalive_s)
            listener.bind(address)
            listener.listen(_BACKLOG)
        yield listener


def _keep_alive(listener: socket.socket, idle_s: int) -> None:
    """Find out that a peer is gone, and show a NAT in between that the connection is not."""
    interval_s = max(idle_s // _PROBES, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # No peer is asked while something is on its way to it, and of that alone the kernel would despair in 15 minutes.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (idle_s + _PROBES * interval_s))


@contextlib.contextmanager
def _unix(path: Path, mode: int) -> Iterator[Listener]:
    with Listener(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with _explained(f"unix:{path}"):
            _remove_stale(path)
            # Before it has a name, so that it is at no time open to more; the process's mask may take from this.
            os.fchmod(listener.fileno(), mode)
            listener.bind(str(path))
            path.chmod(mode)
            listener.listen(_BACKLOG)
            made = _identity(path)
        try:
            yield listener
        finally:
            # Not that of an agent which has taken its place, while this one still answered what it had.
            with contextlib.suppress(OSError):
                if _identity(path) == made:
                    path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    """Of the file, not of its name. The number of one that was removed is given to another at once, its time is not."""
    found = path.stat()
    return found.st_ino, found.st_ctime_ns


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that is no more. Whatever else is there stays, and is an error."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AgentError(f"cannot listen on unix:{path}: it is there, and no socket", "name another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise AgentError(f"cannot listen on unix:{path}: another process does", "name another path, or end that")


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AgentError(
            f"cannot listen on {where}: {error.strerror or error}", "choose another --host or --port, or listen = [...]"
        ) from None
