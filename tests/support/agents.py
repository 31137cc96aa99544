"""Real agent processes for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "agent")


@dataclass
class Agent:
    """A `tightfit-agent serve` that is ready."""

    process: subprocess.Popen[str]
    name: str
    url: str
    log_file: Path

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="ascii")
        (pid,) = map(int, children.split())
        return pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def post(
        self, body: bytes | dict[str, Any], headers: dict[str, str] | None = None, path: str = ""
    ) -> tuple[int, bytes, dict[str, str]]:
        """POST to the model's infer: (status, body, headers)."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        return self.request(path or f"/v2/models/{self.name}/infer", data, headers)

    def request(
        self, path: str, data: bytes | None = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
                return response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)


@contextlib.contextmanager
def serving(bundle: Path, log_file: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Agent]:
    """Start an agent on a free port; it is ended when the block is left."""
    command = [*COMMAND, "serve", "--bundle", str(bundle), "--port", "0", "--threads", "1", *arguments]
    with log_file.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(env or {})}
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), f"the agent did not start: {log_file.read_text(encoding='utf-8')}"
        _, name, _, url = line.split()
        yield Agent(process, name, url, log_file)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        process.stdout.close()


def run_agent(*arguments: str, timeout: float = 60, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run the command line to its end: (exit code, stdout, stderr)."""
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr
