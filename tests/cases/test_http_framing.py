"""Requests that broke other servers by how they are framed. What is asked where, and what is proven elsewhere:

| what | reported at | proven by |
|---|---|---|
| a length and chunks at once, or two lengths: a second request within the first | aiohttp#6182, aiohttp#4223 | here |
| a body far past the limit, announced with Expect: 100-continue | aiohttp#267, oven-sh/bun#34960, seanmonstar/warp#383, pallets/werkzeug#1174 | here, and tests/agent/http/test_peers.py |
| half a head, or nothing, and then silence | xorbitsai/inference#5213, emmett-framework/granian#508 | here |
| HTTP/0.9, 1.0 and what is neither, pipelining, HEAD, OPTIONS, large heads | RFC 9112 | here; 1.0, HEAD, OPTIONS and sizes in tests/agent/http/test_peers.py |
| names that are paths | | here |
"""  # noqa: E501

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import bundles
from tests.support.agents import Agent, serving, until
from tests.support.peers import Answer, Peer
from tests.support.wire import LANES as HEADERS

LANES = {name: tuple(f"{key}: {value}" for key, value in headers.items()) for name, headers in HEADERS.items()}
both_lanes = pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
INFER = "/v2/models/adding/infer"
ALONE = b"GET /v2/health/live HTTP/1.1\r\nHost: ecu\r\n\r\n"


def body_of(id_: str) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    return json.dumps({"id": id_, "inputs": [tensor]}).encode()


def request(*fields: str, body: bytes = b"", line: str = f"POST {INFER} HTTP/1.1") -> bytes:
    """Framed by `fields` alone."""
    return "\r\n".join([line, "Host: ecu", *fields, "", ""]).encode("latin-1") + body


def asks(id_: str, *fields: str) -> bytes:
    body = body_of(id_)
    return request(f"Content-Length: {len(body)}", *fields, body=body)


SECOND = asks("smuggled")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("framing")
    with serving(bundles.adding(folder / "adding.tfb"), folder / "log") as agent:
        yield agent
        assert "Traceback" not in agent.log
        until(lambda: agent.metric("tightfit_in_flight") == 0)


def peer(agent: Agent) -> Peer:
    return Peer(("127.0.0.1", agent.port))


def all_of(agent: Agent, data: bytes) -> list[Answer]:
    """Every answer to `data`, on a connection that the agent closes."""
    answers = []
    with peer(agent) as client:
        client.send(data)
        while not answers or not answers[-1].closes:
            answers.append(client.answer())
        assert client.ended()
    return answers


# --- two requests in one


@both_lanes
@pytest.mark.parametrize(
    "fields",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ("Content-Length: 5", "Content-Length: 0"),
        ("Content-Length: 5, 5",),
        ("Content-Length: +5",),
        ("Content-Length: -5",),
        ("Content-Length: 0x5",),
        ("Content-Length: 5_0",),
        ("Content-Length: \xb2",),
        ("Content-Length : 5",),
        ("Content-Length: 99999999999999999999999",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: identity, chunked, identity",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: \x0bchunked",),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("X: a\r\n Transfer-Encoding: chunked", "Content-Length: 5"),
        ("X: a\nContent-Length: 5",),
        ("X: a\rTransfer-Encoding: chunked", "Content-Length: 5"),
        ("X: a\0", "Content-Length: 5"),
    ],
)
def test_a_body_whose_length_can_be_read_in_two_ways(agent: Agent, lane: Sequence[str], fields: Sequence[str]) -> None:
    (answer,) = all_of(agent, request(*fields, *lane, body=b"0\r\n\r\n" + SECOND))
    assert answer.status == 400
    assert answer.json["error"]


@pytest.mark.parametrize(
    "chunks",
    [
        b"-1\r\n", b"0x5\r\nabcde\r\n", b"5 \r\nabcde\r\n0\r\n\r\n", b"+5\r\nabcde\r\n", b"fffffffffffffffff\r\n",
        b"\r\n",
        b"5\nabcde\r\n0\r\n\r\n", b"5\r\nabcdeX\r\n0\r\n\r\n", b"5\r\nabcde0\r\n\r\n", b"g\r\n", b"1_0\r\n",
        b"0\r\nno trailer\r\n\r\n", b"0\r\n trailer: folded\r\n\r\n", b"0\r\n\n",
    ],
)  # fmt: skip
def test_chunks_that_are_none(agent: Agent, chunks: bytes) -> None:
    """The request that they belong to is refused, once, and what follows it is not taken for another."""
    (answer,) = all_of(agent, request("Transfer-Encoding: chunked", body=chunks + b"\r\n" + SECOND))
    assert answer.status == 400
    assert answer.json["error"]


def test_who_sends_broken_chunks_and_leaves_holds_no_slot(agent: Agent) -> None:
    clients = [peer(agent) for _ in range(8)]
    for client in clients:
        client.send(request("Transfer-Encoding: chunked", body=b'5\r\n{"inp\r\n0\r\nbroken\r\n'))
        client.fin()
    with peer(agent) as client:
        client.send(asks("good"))
        assert client.answer().json["id"] == "good"
    for client in clients:
        with client:
            assert client.answer().status == 400


@both_lanes
def test_a_request_within_a_body_is_none(agent: Agent, lane: Sequence[str]) -> None:
    body = b"{}\r\n\r\n" + SECOND
    chunk = b"%x;x=%b\r\n%b\r\n0\r\nX: %b\r\n\r\n" % (len(body), b"a" * 20, body, b"b" * 20)
    for sent in (
        request(f"Content-Length: {len(body)}", *lane, body=body),
        request("Transfer-Encoding: chunked", *lane, body=chunk),
        request(f"Content-Length: {len(body)}", *lane, body=body, line="GET /v2/health/live HTTP/1.1"),
        request(f"Content-Length: {len(body)}", *lane, body=body, line="POST /v2/models/none/infer HTTP/1.1"),
    ):
        with peer(agent) as client:
            client.send(sent + asks("next", *lane))
            assert client.answer().status in (200, 400, 404)
            assert client.answer().json["id"] == "next"


def test_what_follows_a_tunnel_that_is_refused(agent: Agent) -> None:
    for sent in (
        request("Content-Length: 0", line="CONNECT ecu:80 HTTP/1.1"),
        request(f"Content-Length: {len(SECOND)}", line="CONNECT / HTTP/1.1"),
    ):
        (answer,) = all_of(agent, sent + SECOND)
        assert answer.status == 400


# --- a body that will not be taken


@both_lanes
@pytest.mark.parametrize("nbytes", [(1 << 20) + 1, 10 << 30, 10**17])
def test_a_body_past_the_limit_is_refused_by_its_head(agent: Agent, lane: Sequence[str], nbytes: int) -> None:
    """And no `100 Continue` asks for it."""
    for expect in (("Expect: 100-continue",), ()):
        with peer(agent) as client:
            client.send(request(f"Content-Length: {nbytes}", *expect, *lane))
            answer = client.answer()
            assert (answer.status, answer.closes) == (413, True)


# --- heads that do not come


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """It waits for a head no longer than a second."""
    folder = tmp_path_factory.mktemp("heads")
    config = folder / "agent.toml"
    config.write_text("[http]\nkeepalive_s = 1\n")
    with serving(bundles.adding(folder / "adding.tfb"), folder / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


def test_half_heads_are_ended_and_others_are_served_meanwhile(hasty: Agent) -> None:
    begun = (b"", b"G", b"GET / HTTP/1.1\r\nHo", f"POST {INFER} HTTP/1.1\r\nHost: ecu\r\n".encode(), b"\r\n",
             request("TE: trailers")[:-2])  # fmt: skip
    clients = [(peer(hasty), sent) for sent in begun * 9]
    for client, sent in clients:
        client.send(sent)
    with peer(hasty) as good:
        for at in range(20):
            good.send(asks(str(at)))
            assert good.answer().json["id"] == str(at)
    for client, _ in clients:
        with client:
            # Nothing, or why; and then the end.
            client.socket.settimeout(60)
            data = client.socket.recv(1 << 16)
            assert data == b"" or data.startswith((b"HTTP/1.1 408 ", b"HTTP/1.0 408 ")), data
    until(lambda: hasty.metric("tightfit_in_flight") == 0)


# --- versions of HTTP, and many requests at once


@both_lanes
@pytest.mark.parametrize(
    "version", ["HTTP/0.9", "HTTP/2.0", "HTTP/3.0", "HTTP/1.2", "HTTP/1", "HTTP/11", "http/1.1", ""]
)
def test_other_versions(agent: Agent, lane: Sequence[str], version: str) -> None:
    body = body_of("other")
    for line in (f"POST {INFER} {version}", f"GET /v2/health/live {version}"):
        (answer, *rest) = all_of(agent, request(f"Content-Length: {len(body)}", *lane, body=body, line=line))
        assert (answer.status, rest) == (400, [])
        assert answer.version in ("HTTP/1.0", "HTTP/1.1")


def test_a_line_without_a_version(agent: Agent) -> None:
    """As HTTP/0.9 was."""
    for line in (b"GET /v2/health/live\r\n", b"GET /i\r\n\r\n"):
        (answer,) = all_of(agent, line + ALONE)
        assert answer.status == 400


@both_lanes
def test_fifty_requests_at_once_are_answered_in_order(agent: Agent, lane: Sequence[str]) -> None:
    with peer(agent) as client:
        client.send(b"".join(asks(str(at), *lane) for at in range(50)))
        assert [client.answer().json["id"] for _ in range(50)] == [str(at) for at in range(50)]


@both_lanes
def test_a_request_cut_at_every_byte(agent: Agent, lane: Sequence[str]) -> None:
    whole = asks("cut", *lane)
    with peer(agent) as client:
        for at in range(1, len(whole)):
            client.send(whole[:at])
            client.send(whole[at:])
            assert client.answer().json["id"] == "cut", at


@both_lanes
def test_a_body_in_pieces_of_two_bytes(agent: Agent, lane: Sequence[str]) -> None:
    body = body_of("piecemeal")
    with peer(agent) as client:
        client.send(request(f"Content-Length: {len(body)}", *lane))
        for at in range(0, len(body), 2):
            client.send(body[at : at + 2])
        assert client.answer().json["id"] == "piecemeal"


# --- names that are paths


@both_lanes
@pytest.mark.parametrize(
    "name",
    [
        "..%2f..%2fetc", "../../etc/passwd", "..", ".", "%00", "adding%00", "adding%2f..", "a" * 300, "%2e%2e%2f%2e%2e",
        "..\\..\\etc", "%c0%ae%c0%ae", "adding/..", "%61dding%2finfer", "~root", "$(id)", "%ff", "adding;x=1", "",
        "adding.tfb", "/etc/passwd", "versions/1",
    ],
)  # fmt: skip
def test_names_that_are_paths(agent: Agent, lane: Sequence[str], name: str) -> None:
    body = body_of("path")
    with peer(agent) as client:
        for line in (f"POST /v2/models/{name}/infer HTTP/1.1", f"GET /v2/models/{name} HTTP/1.1"):
            if line.startswith("GET") and name in ("versions/1", "adding/..", ""):
                continue
            client.send(request(f"Content-Length: {len(body)}", *lane, body=body, line=line))
            answer = client.answer()
            assert answer.status == 404, (line, answer)
            assert "adding" in answer.json["error"] or "Not Found" in answer.json["error"]
        client.send(asks("next", *lane))
        assert client.answer().json["id"] == "next"


def test_nothing_is_read_where_models_are_loaded_by_a_path(tmp_path: Path) -> None:
    bundle = bundles.adding(tmp_path / "models" / "adding.tfb")
    bundles.adding(tmp_path / "secret.tfb")
    config = tmp_path / "agent.toml"
    config.write_text(f'bundle = "{bundle}"\n[repository]\ncontrol = true\nfolders = ["{tmp_path / "models"}"]\n')
    with serving(None, tmp_path / "log", "--config", str(config)) as agent:
        for name in ("..%2fsecret", "..%2Fsecret.tfb", "%2e%2e%2fsecret.tfb", "%2fetc", "..", "secret%00", "a" * 300):
            status, _, _ = agent.request(f"/v2/repository/models/{name}/load", b"{}")
            assert status in (400, 404), name
        assert json.loads(agent.request("/v2/repository/index", b"{}")[1])[0]["name"] == "adding"
        assert "Traceback" not in agent.log
