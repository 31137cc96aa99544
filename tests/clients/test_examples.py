"""The clients in docs/examples, run as docs/ecu.md says, against a real agent."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import bundles
from tests.support.agents import ROOT, Agent, serving
from tests.support.streams import stream

EXAMPLES = ROOT / "docs" / "examples"
STRICT = ("gcc", "-std=c99", "-pedantic", "-O2", "-Wall", "-Wextra", "-Werror")
CHECKED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
STREAMS = 6
TURNS = 12
SUMS = [f"{turn} {turn + 0.5:g}" for turn in range(TURNS)]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("examples")
    (folder / "agent.toml").write_text(f"[streams]\nmost = {STREAMS}\nheartbeat_s = 0.05\n")
    config = ("--config", str(folder / "agent.toml"))
    with serving(bundles.adding(folder / "m.tfb"), folder / "log", *config) as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(scope="module")
def ecu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ecu.c, compiled as strictly as the compiler can, with its faults made fatal."""
    program = tmp_path_factory.mktemp("ecu") / "ecu"
    subprocess.run([*STRICT, *CHECKED, "-o", program, EXAMPLES / "ecu.c"], check=True)
    return program


def ask(program: Path, how: str, port: int, model: str = "m", turns: int = TURNS) -> tuple[int, list[str], str]:
    """Run ecu.c: (exit code, lines, what it complained of)."""
    command = [str(program), how, "127.0.0.1", str(port), model, str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


class Cutting:
    """Stands between, and cuts each of the first connections after so many bytes of the agent's."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._port, self._cuts = port, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.accepted = 0
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Cutting:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                agent = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [client, agent]
                left = self._cuts[self.accepted] if self.accepted < len(self._cuts) else 1 << 30
                self.accepted += 1
                for ends in ((client, agent, 1 << 30), (agent, client, left)):
                    self._threads.append(threading.Thread(target=self._copy, args=ends))
                    self._threads[-1].start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket, left: int) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(min(4096, left))):
                sink.sendall(data)
                left -= len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_what_goes_over_the_wire(agent: Agent) -> None:
    """The request in docs/ecu.md has the answer that is shown there, but for the time, the version, and its length."""
    request, shown = re.findall(
        r"```http\n(.*?)\n```", (ROOT / "docs" / "ecu.md").read_text(encoding="utf-8"), re.DOTALL
    )
    with socket.create_connection(("127.0.0.1", agent.port), 30) as client:
        client.sendall(request.replace("\n", "\r\n").encode())
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(4096)

    def steady(text: str) -> str:
        return re.sub(r'(Date: |Content-Length: |"model_version":")[^"\n]+', r"\1...", text)

    assert steady(answer.decode().replace("\r\n", "\n")) == steady(shown)


@needs_gcc
@pytest.mark.parametrize("how", ["infer", "stream"])
def test_the_embedded_client(agent: Agent, ecu: Path, how: str) -> None:
    assert ask(ecu, how, agent.port) == (0, SUMS, "")


@needs_gcc
@pytest.mark.parametrize(("how", "cuts"), [("infer", [700, 0, 500]), ("stream", [900, 0, 2000])])
def test_the_embedded_client_connects_anew(agent: Agent, ecu: Path, how: str, cuts: list[int]) -> None:
    with Cutting(agent.port, cuts) as between:
        assert ask(ecu, how, between.port) == (0, SUMS, "")
    assert between.accepted == len(cuts) + 1


@needs_gcc
def test_the_embedded_client_is_refused(agent: Agent, ecu: Path) -> None:
    for how in ("infer", "stream"):
        code, lines, complaint = ask(ecu, how, agent.port, "nothing")
        assert (code, lines) == (1, ["0 wrong"])
        assert "404" in complaint
    code, lines, _ = ask(ecu, "infer", port_of_nobody(), turns=1)
    assert (code, lines) == (1, ["0 lost"])


@needs_gcc
def test_the_embedded_client_waits_where_there_is_no_room(agent: Agent, ecu: Path) -> None:
    with contextlib.ExitStack() as others:
        assert {others.enter_context(stream(agent)).status for _ in range(STREAMS)} == {200}
        command = [str(ecu), "stream", "127.0.0.1", str(agent.port), "m", "3"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout is not None
            assert waiting.stderr is not None
            assert waiting.stderr.readline() == "503\n"
            others.close()
            assert waiting.stdout.read().splitlines() == SUMS[:3]
    assert waiting.returncode == 0


@needs_gcc
def test_the_embedded_client_has_no_heap(tmp_path: Path) -> None:
    subprocess.run([*STRICT, "-o", tmp_path / "ecu", EXAMPLES / "ecu.c"], check=True)
    used = subprocess.run(["nm", "-u", tmp_path / "ecu"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].partition("@")[0] for line in used.splitlines()}
    assert "recv" in names
    assert names & {"malloc", "calloc", "realloc", "free", "strdup", "getaddrinfo"} == set()


@needs_gcc
def test_libcurl(agent: Agent, tmp_path: Path) -> None:
    found = subprocess.run(["pkg-config", "--cflags", "--libs", "libcurl"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("libcurl's headers are not installed")
    program = tmp_path / "infer"
    subprocess.run([*STRICT, "-o", program, EXAMPLES / "infer.c", *found.stdout.split()], check=True)
    url = f"{agent.url}/v2/models/m/infer"
    done = subprocess.run([program, url, "1", "-2", "0.5"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["-1", "-1.5"]
    done = subprocess.run([program, f"{url}s", "1", "2"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith('404 {"error":')


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_fetch(agent: Agent) -> None:
    command = ["node", str(EXAMPLES / "ask.mjs"), f"{agent.url}/v2/models/m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["one -1", *(f"{turn} {turn + 1}" for turn in range(5))], done.stderr


def test_tritonclient(agent: Agent) -> None:
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "ask.py"), agent.address, "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["one -1.0", "several 1.0 2.0 3.0 4.0 5.0"], done.stderr


def port_of_nobody() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
