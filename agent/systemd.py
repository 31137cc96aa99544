"""The one call that systemd wants of a service of Type=notify (sd_notify(3)), without its library."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> bool:
    """Send READY=1, STOPPING=1 ... to the service manager; False when there is none that listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        try:
            end.sendto(state.encode("utf-8"), address)
        except OSError:
            return False
    return True
