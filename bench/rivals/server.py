"""A running server of the Open Inference Protocol, whoever made it: processes, CPU time, memory, counters, control."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from agent.memory import pss_by_kind
from targets.errors import TightfitError

ANSWER_S = 60.0
_END_S = 20.0
_START_S = 60.0
_INSTALL_S = 1200.0
_TICKS = os.sysconf("SC_CLK_TCK")


class ServerError(TightfitError):
    """A server is not there, does not start, or does not do what it was told."""


@dataclass(frozen=True)
class Server:
    """`address` is http://HOST:PORT, and so is that of its metrics; `start_s` is how long the start took. `engine_mark`
    stands in the command line of the processes that run models; `executed` is the counter of requests that a model was
    run for; empty where nobody asks for them."""

    address: str
    pid: int
    start_s: float
    metrics_address: str = ""
    engine_mark: str = ""
    executed: str = ""

    def processes(self) -> list[int]:
        """The server's process id and those of all its descendants."""
        found, ahead = [], [self.pid]
        while ahead:
            pid = ahead.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    ahead += map(int, (task / "children").read_text().split())
        return found

    def engines(self) -> list[int]:
        """Process ids of those that run models."""
        return [pid for pid in self.processes() if self.engine_mark in _command(pid)]

    def pss(self) -> int:
        """Bytes, proportional set size of all its processes."""
        return sum(sum(pss_by_kind(pid).values()) for pid in self.processes())

    def cpu_seconds(self) -> float:
        """User and system time of all its processes until now, to a hundredth of a second."""
        return sum(map(cpu_seconds, self.processes()))

    def count_executed(self, model: str) -> int:
        """Requests that this model was run for, since the start. Raises ServerError."""
        text = self.call("GET", f"{self.metrics_address}/metrics")
        for line in text.splitlines():
            name, _, number = line.rpartition(" ")
            if name.partition("{")[0] == self.executed and ("{" not in name or f'"{model}"' in name):
                return int(float(number))
        raise ServerError(f"{self.metrics_address}/metrics has no {self.executed} of {model}")

    def control(self, model: str, action: str) -> None:
        """Load or unload a model. Raises ServerError."""
        self.call("POST", f"{self.address}/v2/repository/models/{model}/{action}")

    def call(self, method: str, url: str) -> str:
        """The body of an answer. Raises ServerError."""
        request = urllib.request.Request(url, b"{}" if method == "POST" else None, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310 - http, on this machine
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise ServerError(f"{method} {url}: {error.code} {error.read(300).decode(errors='replace')}") from None
        except OSError as error:
            raise ServerError(f"{method} {url}: {error}") from None


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process until now, to a hundredth of a second; 0 when it is gone."""
    with contextlib.suppress(OSError):
        # Fields 14 and 15 of proc(5)'s stat; the name, which may hold spaces, is in parentheses before them.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0


@contextlib.contextmanager
def process(
    command: Sequence[str], log: Path, piped: bool = True, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the context, politely first. Its errors go to `log`, and what it says to `stdout`, or to
    the log where it is not `piped`: nobody reads it then."""
    with log.open("w", encoding="utf-8") as errors:
        stdout = subprocess.PIPE if piped else errors
        child = subprocess.Popen(command, stdout=stdout, stderr=errors, env={**os.environ, **environment}, text=True)
    try:
        yield child
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            child.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
                break
        if child.stdout:
            child.stdout.close()


def last_words(log: Path) -> str:
    """What a log ends with, on one line: what is called an error there, if anything is."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return " / ".join((errors or lines)[-2:])[-500:]


@contextlib.contextmanager
def listening(
    name: str, command: Sequence[str], port: int, ready: str, log: Path, **environment: str
) -> Iterator[Server]:
    """A server from its start to its end, once GET `ready` on its port is answered 200. Raises ServerError."""
    began = time.monotonic()
    with process(command, log, piped=False, **environment) as child:
        url = f"http://127.0.0.1:{port}"
        while time.monotonic() < began + _START_S and child.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url + ready, timeout=1).close()  # noqa: S310 - http, on this machine
                break
            time.sleep(0.05)
        else:
            raise ServerError(f"{name} did not start: {last_words(log)}")
        yield Server(url, child.pid, time.monotonic() - began)


def free_ports(count: int) -> list[int]:
    """Different ones."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def script_listening(
    title: str, python: Path, script: Path, health: str, model: str, onnx: Path, log: Path
) -> Iterator[Server]:
    """A server that is a script of ours, which takes the model's name and file, and a port. Raises ServerError."""
    (port,) = free_ports(1)
    with listening(title, [str(python), str(script), model, str(onnx), str(port)], port, health, log) as server:
        yield server


# --- what a rival is installed with


def make_venv(venv: Path, package: str) -> None:
    """A virtual environment with this package and our onnxruntime from the index, where there is none yet; nothing is
    left of one that could not be made. Raises ServerError with pip's last words."""
    if venv.exists():
        return
    wanted = package, f"onnxruntime=={metadata.version('onnxruntime')}"
    run_once([sys.executable, "-m", "venv", str(venv)], f"cannot make {venv}", "choose a folder that can be written")
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        run_once([*command, *wanted], f"pip install {' '.join(wanted)}", "is the package index reachable?")
    except ServerError:
        shutil.rmtree(venv)
        raise


def run_once(command: Sequence[str], what: str, hint: str, folder: Path | None = None) -> str:
    """What a command prints. Raises ServerError with its last words."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{what}: {error}", hint) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ServerError(f"{what}: {last}", hint)
    return done.stdout


def install_command(name: str, doc: str | None, install: Callable[[Path], object]) -> int:
    """`python -m bench.rivals.NAME FOLDER`: exit code 2 and one line where that fails."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="made where it is not there yet")
    folder = parser.parse_args().folder
    try:
        install(folder.absolute())
    except (TightfitError, OSError) as error:
        print(f"bench.rivals.{name}: error: {error}", file=sys.stderr)
        return 2
    print(f"{name} is in {folder}")
    return 0
