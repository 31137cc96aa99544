"""What the kernel knows of who is at the other end of a connection."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct

# struct ucred, unix(7): process, user, group.
_UCRED = struct.Struct("iII")
# Linux 4.13 (asm-generic/socket.h); Python has no name for it, and no option longer than this.
_SO_PEERGROUPS, _MOST_BYTES = 59, 1024


def process_of(transport: asyncio.BaseTransport) -> tuple[int, tuple[int, ...]] | None:
    """User and groups of the process that connected to a Unix socket, as they were then."""
    end = transport.get_extra_info("socket")
    if end is None or end.family != socket.AF_UNIX:
        return None
    try:
        _, user, group = _UCRED.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    except OSError:
        return None
    try:
        data = end.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
    except OSError:
        # More groups than that, or a kernel that does not tell: the first of them counts alone.
        data = b""
    return user, (group, *struct.unpack(f"{len(data) // 4}I", data))


def is_local(transport: asyncio.BaseTransport) -> bool:
    """Whether it comes from this machine: over a Unix socket or the loopback."""
    end = transport.get_extra_info("socket")
    if end is not None and end.family == socket.AF_UNIX:
        return True
    peer = transport.get_extra_info("peername")
    try:
        address = ipaddress.ip_address(peer[0])
    except (TypeError, ValueError, IndexError):
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
