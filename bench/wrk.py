"""wrk, the load generator in C that takes least of the cores it shares with the server (Debian's package `wrk`)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.load.samples import Message
from bench.rivals.server import Server, ServerError

_SCRIPT = Path(__file__).with_suffix(".lua")
# An answer may take so long before it counts as an error, whatever the duration.
_TIMEOUT_S = 30
_GRACE_S = 30.0


class Counted(msgspec.Struct, frozen=True):
    """What wrk counted: answers of any status, of which `status` were 400 or more, and errors of connections."""

    requests: int
    seconds: float
    p50_us: float
    p99_us: float
    connect: int
    read: int
    write: int
    timeout: int
    status: int

    @property
    def per_s(self) -> float:
        """Answers of a good status a second."""
        return (self.requests - self.status) / self.seconds

    @property
    def errors(self) -> dict[str, int]:
        """Those that there were, by kind."""
        kinds = ("connect", "read", "write", "timeout", "status")
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind)}


def find() -> str:
    """The program. Raises ServerError."""
    program = shutil.which("wrk")
    if program is None:
        raise ServerError("there is no wrk", "apt-get install wrk")
    return program


def load(
    server: Server, message: Message, body: Path, connections: int, seconds: float, more: Mapping[str, str]
) -> Counted:
    """The message over and over, one at a time on each of so many kept-alive connections, from one thread; `body` is a
    file to hold its body, `more` are headers beside its own. wrk counts in whole seconds. Raises ServerError."""
    body.write_bytes(message.body)
    command = [
        *(find(), "--threads", "1", "--connections", str(connections), "--duration", f"{max(round(seconds), 1)}s"),
        *("--timeout", f"{_TIMEOUT_S}s", "--script", str(_SCRIPT), server.address + message.path, "--", str(body)),
    ]
    for name, text in {**message.headers, **more}.items():
        command += (name, text)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + _GRACE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ServerError(f"wrk did not end within {seconds + _GRACE_S:g} s") from None
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    if line is None:
        raise ServerError(f"wrk failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return msgspec.json.decode(line, type=Counted)
