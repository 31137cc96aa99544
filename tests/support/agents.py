"""Real agent processes for tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "agent")


@dataclass
class Agent:
    """A `tightfit-agent serve` that is ready. `headers` go with every request for tensors, which over TLS has `tls`."""

    process: subprocess.Popen[str]
    name: str
    url: str
    log_file: Path
    urls: tuple[str, ...] = ()
    """Of all addresses, a Unix socket as `unix:PATH`; `url` is the first."""
    headers: dict[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None

    @property
    def address(self) -> str:
        return self.url.partition("://")[2]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def engine_pid(self) -> int:
        (pid,) = self.engine_pids
        return pid

    @property
    def engine_pids(self) -> list[int]:
        """Of all engines, the oldest first."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for children in threads for pid in children.read_text(encoding="ascii").split()]

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def post(
        self, body: bytes | dict[str, Any], headers: dict[str, str] | None = None, path: str = ""
    ) -> tuple[int, bytes, dict[str, str]]:
        """POST to the model's infer: (status, body, headers)."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        return self.request(path or f"/v2/models/{self.name}/infer", data, {**self.headers, **(headers or {})})

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the metric's series that have these labels."""
        lines = [
            line for line in self.request("/metrics")[1].decode().splitlines() if re.split("[{ ]", line)[0] == name
        ]
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))

    def request(
        self, path: str, data: bytes | None = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=120, context=self.tls) as response:  # noqa: S310
                return response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)


@contextlib.contextmanager
def serving(
    bundle: Path | None, log_file: Path, *arguments: str, env: dict[str, str] | None = None, free_port: bool = True
) -> Iterator[Agent]:
    """Start an agent on a free port, or where its configuration says; it is ended when the block is left. Without a
    bundle a configuration names it."""
    bundles = ["--bundle", str(bundle)] if bundle else []
    port = ["--port", "0"] if free_port else []
    command = [*COMMAND, "serve", *bundles, *port, "--threads", "1", *arguments]
    with log_file.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(env or {})}
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), f"the agent did not start: {log_file.read_text(encoding='utf-8')}"
        _, name, _, where = line.split(maxsplit=3)
        urls = tuple(where.strip().split(", "))
        yield Agent(process, name, urls[0], log_file, urls)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        process.stdout.close()


def run_agent(*arguments: str, timeout: float = 120, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run the command line to its end: (exit code, stdout, stderr)."""
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


class Asks(Protocol):
    """A client that asks until it is told to stop."""

    def run(self, stop: threading.Event) -> None: ...


@contextlib.contextmanager
def asking(clients: Sequence[Asks]) -> Iterator[None]:
    """All clients ask at once, each in a thread of its own, until the block ends; then all have ended."""
    stop = threading.Event()
    threads = [threading.Thread(target=client.run, args=(stop,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def until(check: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until it holds. How long at most only bounds what a hang costs."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still until the block is left, so that what it is about to do stays as it is: an engine's
    pass goes on, what is sent to an agent waits in its sockets. An engine needs a `hang_s` that outlasts the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: _threads_stand_still(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _threads_stand_still(pid: int) -> bool:
    # The name before the state may hold anything but ends with the last parenthesis.
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
