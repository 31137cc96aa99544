"""TLS on both lanes: the same answers, connections that live on, and certificates that change while all goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, asking, run_agent, serving, until
from tests.support.certificates import Authority, Pair
from tests.support.streams import EVENTS, LINES, Exchange
from tests.support.wire import LANES, Wire, post, tensors, wire

SHAPE = (512, 512)
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def install(pair: Pair, folder: Path) -> None:
    """Put a certificate where the agent looks for it, each file at once as a whole."""
    for source, name in ((pair.certificate, "agent.pem"), (pair.key, "agent.key")):
        shutil.copy(source, folder / f"{name}.new")
        (folder / f"{name}.new").rename(folder / name)


def configured(folder: Path, more: str = "", tls: str = "") -> Path:
    path = folder / "agent.toml"
    files = f'certificate = "{folder / "agent.pem"}"\nkey = "{folder / "agent.key"}"\n'
    path.write_text(f"[tls]\n{files}{tls}\n{more}")
    return path


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ca")


@contextlib.contextmanager
def agent_of(bundle: Path, folder: Path, authority: Authority, more: str = "", tls: str = "") -> Iterator[Agent]:
    if not (folder / "agent.pem").exists():
        install(authority.server(), folder)
    with serving(bundle, folder / "log", "--config", str(configured(folder, more, tls))) as agent:
        agent.tls = authority.trusting()
        yield agent
        assert "Traceback" not in agent.log
        assert agent.metric("tightfit_in_flight") == 0


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("tls")
    bundle = bundles.identity(folder / "x.tfb", DType.FLOAT32, SHAPE, slots=2)
    more = "[http]\nsend_s = 60\nconnections = 20\n[requests]\nqueue_length = 64\n"
    with agent_of(bundle, folder, authority, more, "handshake_s = 1.0") as agent:
        yield agent


@pytest.fixture
def connection(agent: Agent) -> Iterator[Wire]:
    with wire(agent.port, agent.tls) as connection:
        yield connection


def asks(agent: Agent, seed: int, lane: str, *headers: str) -> tuple[bytes, bytes]:
    """A request for the identity, and what its answer ends with."""
    values = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
    body, more = tensors({"x": values}, binary=True)
    odd = [f"{name}: {value}" for name, value in LANES[lane].items()]
    return post(agent.name, body, *more, *odd, *headers), values.tobytes()


def test_it_says_where_it_is(agent: Agent) -> None:
    assert agent.url == f"https://127.0.0.1:{agent.port}"
    assert agent.request("/v2/health/ready")[0] == 200


@pytest.mark.parametrize("lane", LANES)
def test_one_connection_has_all_its_answers(agent: Agent, connection: Wire, lane: str) -> None:
    for seed in range(4):
        request, values = asks(agent, seed, lane)
        answer = connection.ask(request)
        assert answer.status == "HTTP/1.1 200 OK"
        assert answer.body.endswith(values)


@pytest.mark.parametrize("lane", LANES)
def test_requests_of_a_client_that_reads_late(agent: Agent, lane: str) -> None:
    """What it sends is more than anybody holds for it: reading and writing stop, and go on."""
    wanted = [asks(agent, seed, lane) for seed in range(8)]

    async def talk() -> None:
        # Two threads may not share a connection of TLS; a loop may send and receive at once.
        reader, writer = await asyncio.open_connection("localhost", agent.port, ssl=agent.tls)
        writer.writelines([request for request, _ in wanted])
        for _, values in wanted:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            (length,) = re.findall(rb"\r\ncontent-length: (\d+)\r\n", head)
            assert (await reader.readexactly(int(length))).endswith(values)
        writer.close()
        await writer.wait_closed()

    asyncio.run(asyncio.wait_for(talk(), 120))


@pytest.mark.parametrize("lane", LANES)
def test_a_connection_that_says_close(agent: Agent, connection: Wire, lane: str) -> None:
    request, values = asks(agent, 1, lane, "Connection: close")
    answer = connection.ask(request)
    assert answer.headers["connection"] == "close"
    assert answer.body.endswith(values)
    assert connection.is_closed()


def test_from_one_lane_to_the_other(agent: Agent, connection: Wire) -> None:
    until(lambda: agent.metric("tightfit_lane_connections") == 1)
    request, values = asks(agent, 1, "fast lane")
    assert connection.ask(request).body.endswith(values)
    assert connection.ask(GET).json == {"live": True}
    assert agent.metric("tightfit_lane_connections") == 0
    assert connection.ask(request).body.endswith(values)


def test_byte_by_byte(agent: Agent, connection: Wire) -> None:
    for byte in GET:
        connection.send(bytes([byte]))
    assert connection.read().json == {"live": True}


@pytest.mark.parametrize("lane", LANES)
def test_a_client_that_ends_tls_has_left(agent: Agent, lane: str) -> None:
    with wire(agent.port, agent.tls) as connection:
        request, _ = asks(agent, 1, lane, "Connection: close")
        connection.send(request[:-1])
        with contextlib.suppress(OSError):
            connection.socket.unwrap()  # type: ignore[attr-defined]
    until(lambda: agent.metric("tightfit_in_flight") == 0)
    assert "eof_received" not in agent.log


def test_streams(agent: Agent, tmp_path: Path) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(SHAPE), "data": [0.5] * (SHAPE[0] * SHAPE[1])}
    record = json.dumps({"inputs": [tensor]}).encode() + b"\n"
    with Exchange(agent, f"/v2/models/{agent.name}/stream", LINES) as exchange:
        exchange.send_all([record] * 3)
        exchange.end()
        assert [each["outputs"][0]["data"][:2] for each in exchange.records(3)] == [[0.5, 0.5]] * 3
    with Exchange(agent, "/v2/events", headers={"Accept": EVENTS}) as exchange:
        assert exchange.status == 200


def test_who_speaks_no_tls_is_told(agent: Agent) -> None:
    with wire(agent.port) as plain:
        plain.send(GET)
        answer = plain.read_raw()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"TLS is spoken here" in answer
    # More than fits the socket: what it still sends does not reset the answer.
    with wire(agent.port) as plain:
        request, _ = asks(agent, 1, "fast lane")
        plain.send(request)
        assert plain.read_raw().startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("data", [b"", b"\x16", b"\x16\x03\x01\x00\x05hello", b"\x16" * 1000])
def test_who_never_shakes_hands_is_let_go(agent: Agent, data: bytes) -> None:
    with wire(agent.port) as silent:
        silent.send(data)
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in silent.read_raw()


def test_those_that_shake_hands_count_as_connections(agent: Agent) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(wire(agent.port)) for _ in range(20)]
        with pytest.raises((ssl.SSLError, OSError)), wire(agent.port, agent.tls):
            pass
        del silent
    until(lambda: serves(agent))


def serves(agent: Agent) -> bool:
    with contextlib.suppress(OSError):
        return agent.request("/v2/health/live")[0] == 200
    return False


def context_of(authority: Authority, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = authority.trusting()
    context.minimum_version = context.maximum_version = version
    return context


def test_versions(agent: Agent, authority: Authority) -> None:
    for version, name in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
        with wire(agent.port, context_of(authority, version)) as connection:
            assert connection.socket.version() == name  # type: ignore[attr-defined]
            assert connection.ask(GET).json == {"live": True}
    old = context_of(authority, ssl.TLSVersion.TLSv1_2)
    old.set_ciphers("AES128-SHA:@SECLEVEL=0")
    with pytest.raises(OSError, match=r"."), wire(agent.port, old):
        pass


def test_the_oldest_version_can_be_raised(tmp_path: Path, authority: Authority) -> None:
    with agent_of(bundles.add(tmp_path / "add.tfb"), tmp_path, authority, tls='minimum = "1.3"') as agent:
        with pytest.raises(OSError, match=r"."), wire(agent.port, context_of(authority, ssl.TLSVersion.TLSv1_2)):
            pass
        assert agent.request("/v2/health/live")[0] == 200


# --- certificates that change


def shown(agent: Agent) -> bytes:
    """The certificate that who connects now is shown."""
    with wire(agent.port, agent.tls) as connection:
        der: bytes = connection.socket.getpeercert(True)  # type: ignore[attr-defined]
        return der


def der_of(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())


@pytest.mark.parametrize("told", [True, False])
def test_a_new_certificate_is_for_those_who_connect_from_then_on(
    tmp_path: Path, authority: Authority, told: bool
) -> None:
    first, second = authority.server(), authority.server()
    install(first, tmp_path)
    watch = f"[access]\nwatch_s = {3600 if told else 0.05}\n"
    with agent_of(bundles.add(tmp_path / "add.tfb"), tmp_path, authority, watch) as agent:
        with contextlib.ExitStack() as stack:
            old = [stack.enter_context(wire(agent.port, agent.tls)) for _ in range(3)]
            assert old[0].ask(GET).json == {"live": True}
            assert shown(agent) == der_of(first)
            install(second, tmp_path)
            if told:
                agent.process.send_signal(signal.SIGHUP)
            until(lambda: shown(agent) == der_of(second))
            for connection in old:
                assert connection.ask(GET).json == {"live": True}
        assert agent.log.count('"event": "certificate"') == 2


def test_a_broken_certificate_changes_nothing(tmp_path: Path, authority: Authority) -> None:
    first = authority.server()
    install(first, tmp_path)
    with agent_of(bundles.add(tmp_path / "add.tfb"), tmp_path, authority, "[access]\nwatch_s = 3600\n") as agent:
        for broken, words in (
            (Pair(first.certificate, authority.own.key), "is not that of the certificate"),
            (authority.server(ends="20210101000000Z"), "certificate has expired"),
        ):
            install(broken, tmp_path)
            agent.process.send_signal(signal.SIGHUP)
            until(lambda words=words: words in agent.log)  # type: ignore[misc]
            assert shown(agent) == der_of(first)
        lines = [json.loads(line) for line in agent.log.splitlines()]
        assert len([line for line in lines if line["event"] == "TLS goes on with the certificate that it has"]) == 2


class Reconnects:
    """A client that connects, asks and leaves, again and again."""

    def __init__(self, agent: Agent, request: bytes) -> None:
        self._agent, self._request = agent, request
        self.answered = 0
        self.certificates: set[bytes] = set()

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with wire(self._agent.port, self._agent.tls) as connection:
                self.certificates.add(connection.socket.getpeercert(True))  # type: ignore[attr-defined]
                assert connection.ask(self._request).status == "HTTP/1.1 200 OK"
                self.answered += 1


class Stays:
    """A client that asks on one connection."""

    def __init__(self, agent: Agent, request: bytes) -> None:
        self._connection, self._request = Wire(agent.port, agent.tls), request
        self.answered = 0

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            assert self._connection.ask(self._request).status == "HTTP/1.1 200 OK"
            self.answered += 1
        self._connection.socket.close()


@pytest.mark.parametrize("lane", LANES)
def test_certificates_change_under_load(tmp_path: Path, authority: Authority, lane: str) -> None:
    pairs = [authority.server() for _ in range(6)]
    install(pairs[0], tmp_path)
    with agent_of(bundles.add(tmp_path / "add.tfb"), tmp_path, authority, "[access]\nwatch_s = 0.02\n") as agent:
        ones = np.ones((1, 8), np.float32)
        body, more = tensors({"a": ones, "b": ones}, binary=True)
        request = post("add", body, *more, *[f"{name}: {value}" for name, value in LANES[lane].items()])
        come, stay = [Reconnects(agent, request) for _ in range(3)], [Stays(agent, request) for _ in range(2)]
        errors: list[BaseException] = []
        hook, threading.excepthook = threading.excepthook, lambda failed: errors.append(failed.exc_value)  # type: ignore[arg-type]
        try:
            with asking([*come, *stay]):
                for pair in pairs[1:]:
                    before = sum(each.answered for each in come)
                    install(pair, tmp_path)
                    agent.process.send_signal(signal.SIGHUP)
                    seen = der_of(pair)
                    until(lambda seen=seen: errors or any(seen in each.certificates for each in come))  # type: ignore[misc]
                    until(lambda before=before: errors or sum(each.answered for each in come) > before)  # type: ignore[misc]
        finally:
            threading.excepthook = hook
        assert errors == []
        assert all(each.answered for each in stay)


def lost(authority: Authority, folder: Path) -> None:
    (folder / "agent.key").unlink()


def swapped(authority: Authority, folder: Path) -> None:
    shutil.copy(authority.own.key, folder / "agent.key")


def expired(authority: Authority, folder: Path) -> None:
    install(authority.server(ends="20210101000000Z"), folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(lost, "agent.key is not there"), (swapped, "is not that of"), (expired, "certificate has expired")],
)
def test_starts_that_are_refused(
    tmp_path: Path, authority: Authority, damage: Callable[[Authority, Path], None], words: str
) -> None:
    install(authority.server(), tmp_path)
    damage(authority, tmp_path)
    bundle = bundles.add(tmp_path / "add.tfb")
    code, out, err = run_agent("serve", "--bundle", str(bundle), "--config", str(configured(tmp_path)))
    assert (code, out) == (2, "")
    assert err.startswith("tightfit-agent: error: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_plain_address_beside(tmp_path: Path, authority: Authority) -> None:
    with socket.socket() as free, socket.socket() as other:
        for each in (free, other):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (free, other)]
    listen = f'[http]\nlisten = ["http://127.0.0.1:{ports[0]}", "127.0.0.1:{ports[1]}"]\n'
    install(authority.server(), tmp_path)
    arguments = ("--config", str(configured(tmp_path, listen)))
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        assert agent.urls == (f"http://127.0.0.1:{ports[0]}", f"https://127.0.0.1:{ports[1]}")
        with wire(ports[0]) as plain:
            assert plain.ask(GET).json == {"live": True}
        with wire(ports[1], authority.trusting()) as secure:
            assert secure.ask(GET).json == {"live": True}
