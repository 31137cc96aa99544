"""Real brokers for tests: mosquitto as a process, with TLS and access lists where a test wants them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.agents import until
from tests.support.certificates import Authority, Pair

# Debian has it where only root looks.
MOSQUITTO = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
# Each device owns what is below its name, and only reads its commands.
ACL = "pattern readwrite edge/v1/%u/#\nuser fleet\ntopic readwrite #\n"


def free_port() -> int:
    """One that nobody listens on now. A broker cannot be given a listening socket."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Mosquitto:
    """A broker in `folder` that runs between `start` and `stop`; `lines` go into its configuration."""

    folder: Path
    lines: tuple[str, ...] = ("allow_anonymous true",)
    port: int = field(default_factory=free_port)
    shown: tuple[str, ...] = ()
    """Options of its own clients: how they show who they are."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def secure_url(self) -> str:
        return f"mqtts://localhost:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "mosquitto.log").read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # As root it would else become a user that cannot write here.
        user = ["user root"] if os.geteuid() == 0 else []
        file = self.folder / "mosquitto.conf"
        lines = [*user, "per_listener_settings false", f"listener {self.port} 127.0.0.1", *self.lines, "log_type all"]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        with (self.folder / "mosquitto.log").open("ab") as log:
            self.process = subprocess.Popen([MOSQUITTO, "-c", file], stdout=log, stderr=log)
        until(self._listens)

    def stop(self, number: int = signal.SIGTERM) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.wait(60)

    def publish(self, topic: str, payload: str, *more: str) -> None:
        """With mosquitto's own client, QoS 1."""
        command = ["mosquitto_pub", "-p", str(self.port), *self.shown, "-q", "1", "-t", topic, "-m", payload, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    def retained(self, topic: str) -> str:
        """The payload that is kept there; empty where none is."""
        command = ["mosquitto_sub", "-p", str(self.port), *self.shown, "-t", topic, "-C", "1", "-W", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.removesuffix("\n")

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5):
            return True
        return False


@contextlib.contextmanager
def mosquitto(folder: Path, *lines: str) -> Iterator[Mosquitto]:
    """One that lets everybody in, unless `lines` say otherwise; stopped when the block is left."""
    broker = Mosquitto(folder, lines or ("allow_anonymous true",))
    broker.start()
    try:
        yield broker
    finally:
        broker.stop(signal.SIGKILL)


@dataclass(frozen=True)
class Fleet:
    """A broker with TLS that knows its clients by certificates of `authority`; `fleet` may do all."""

    broker: Mosquitto
    authority: Authority

    def device(self, name: str, **more: str) -> Pair:
        return self.authority.issue(name, **more)


@contextlib.contextmanager
def fleet(folder: Path, *lines: str, server: Pair | None = None) -> Iterator[Fleet]:
    """mosquitto with TLS and an access list by the names in certificates."""
    authority = Authority(folder / "authority")
    server, operator = server or authority.server(), authority.issue("fleet")
    (folder / "acl").write_text(ACL, encoding="ascii")
    secure = (
        f"cafile {authority.own.certificate}", f"certfile {server.certificate}", f"keyfile {server.key}",
        "require_certificate true", "use_identity_as_username true", "allow_anonymous false",
        f"acl_file {folder / 'acl'}",
    )  # fmt: skip
    with mosquitto(folder, *secure, *lines) as broker:
        broker.shown = (
            "-h", "localhost", "--cafile", str(authority.own.certificate), "--cert", str(operator.certificate),
            "--key", str(operator.key),
        )  # fmt: skip
        yield Fleet(broker, authority)


class Subscriber:
    """mosquitto_sub in a process: what came, a line each, as `topic payload`."""

    def __init__(self, broker: Mosquitto, topic: str = "#", *more: str, qos: int = 1) -> None:
        command = ["mosquitto_sub", "-p", str(broker.port), *broker.shown, "-v", "-q", str(qos), "-t", topic, *more]
        self._process = subprocess.Popen(
            ["stdbuf", "-oL", *command, "-d"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._subscribed = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._subscribed.wait(60)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(60)
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def until(self, count: int, seconds: float = 60) -> list[str]:
        """Wait for so many."""
        end = time.monotonic() + seconds
        while len(self.lines) < count:
            assert time.monotonic() < end, f"{len(self.lines)} of {count} came"
            time.sleep(0.02)
        return self.lines

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("Subscribed"):
                self._subscribed.set()
            elif not line.startswith(("Client ", "Subscribed ")):
                self.lines.append(line.removesuffix("\n"))
