"""What clients of HTTP/1.1 and 1.0 do to a connection: each rule of docs/ecu.md, byte for byte, against a real agent.

Infer requests of a plain head are answered by the fast lane, all others by aiohttp; who asks cannot tell them apart. So
what either could do is asked of both.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from targets.tensor import DType
from tests.support import agents, bundles
from tests.support.agents import Agent, serving, until
from tests.support.peers import Answer, Peer

# Means nothing, and makes a head one that the fast lane leaves to aiohttp.
ODD = ("Content-Encoding: identity",)
LANES = {"fast": (), "aiohttp": ODD}
both_lanes = pytest.mark.parametrize("lane", LANES.values(), ids=LANES)

ADDING = "/v2/models/adding/infer"
STREAM = "/v2/models/adding/stream"
CLOSE = "Connection: close"
EXPECT = "Expect: 100-continue"
BIG = (256, 1024)
SETTINGS = """
[requests]
queue_length = 2
timeout_s = 120
[engine]
hang_s = 120
[streams]
heartbeat_s = 0.5
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with _agent(tmp_path_factory.mktemp("peers"), SETTINGS) as agent:
        yield agent


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent that takes every FIN for the end of what is sent."""
    with _agent(tmp_path_factory.mktemp("patient"), f"half_close = true\n{SETTINGS}") as agent:
        yield agent


@contextmanager
def _agent(folder: Path, settings: str) -> Iterator[Agent]:
    """`adding` and `big`, on IPv4, IPv6 and a Unix socket."""
    bundles.adding(folder / "adding.tfb")
    bundles.identity(folder / "big.tfb", DType.FLOAT32, BIG)
    models = "".join(f'[[models]]\nbundle = "{folder / name}.tfb"\n' for name in ("adding", "big"))
    listen = f'[http]\nlisten = ["127.0.0.1:0", "[::1]:0", "unix:{folder / "s"}"]\n'
    (folder / "agent.toml").write_text(listen + settings + models)
    with serving(None, folder / "log", "--config", str(folder / "agent.toml"), free_port=False) as agent:
        yield agent
        assert "Traceback" not in agent.log


def peer(agent: Agent, receive: int = 0) -> Peer:
    return Peer(("127.0.0.1", agent.port), receive)


def body_of(id_: str = "", value: float = 1.0) -> bytes:
    """Asks `adding` for value + 2."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, 2.0]}
    return json.dumps({**({"id": id_} if id_ else {}), "inputs": [tensor]}).encode()


def head(line: str, *fields: str, host: str = "Host: ecu") -> bytes:
    return "\r\n".join([line, *([host] if host else []), *fields, "", ""]).encode()


def asks(*fields: str, id_: str = "", value: float = 1.0, version: str = "1.1") -> bytes:
    """A whole infer request."""
    body = body_of(id_, value)
    return head(f"POST {ADDING} HTTP/{version}", f"Content-Length: {len(body)}", *fields) + body


def chunked(data: bytes, size: int, extension: bytes = b"") -> list[bytes]:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return [b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces]


def assert_sum(answer: Answer, value: float = 1.0) -> None:
    assert answer.status == 200, answer
    assert answer.json["outputs"][0]["data"] == [value + 2.0]


@contextmanager
def stopped(agent: Agent) -> Iterator[None]:
    """The engines stand still meanwhile."""
    with ExitStack() as stack:
        for pid in agent.engine_pids:
            stack.enter_context(agents.stopped(pid))
        yield


def running(agent: Agent, count: int) -> None:
    until(lambda: agent.metric("tightfit_in_flight", model="adding") == count)


def waiting(agent: Agent, count: int) -> None:
    until(lambda: agent.metric("tightfit_door_depth", model="adding") == count)


def disconnected(agent: Agent) -> float:
    return agent.metric("tightfit_requests_total", model="adding", reason="disconnected")


# --- connections


@both_lanes
def test_ipv4_ipv6_and_a_unix_socket(agent: Agent, lane: Sequence[str]) -> None:
    four, six, unix = agent.urls
    ports = [int(url.rpartition(":")[2]) for url in (four, six)]
    for address in (("127.0.0.1", ports[0]), ("::1", ports[1]), unix.removeprefix("unix:")):
        with Peer(address) as client:
            for value in (1.0, 2.0):
                client.send(asks(*lane, value=value))
                assert_sum(client.answer(), value)


@both_lanes
def test_a_connection_is_kept_until_the_client_says_otherwise(agent: Agent, lane: Sequence[str]) -> None:
    with peer(agent) as client:
        for value in range(3):
            client.send(asks(*lane, value=value))
            answer = client.answer()
            assert_sum(answer, value)
            assert not answer.closes
        client.send(asks(*lane, CLOSE))
        answer = client.answer()
        assert_sum(answer)
        assert answer.closes
        assert client.ended()


def test_http_1_0_with_and_without_keep_alive(agent: Agent) -> None:
    with peer(agent) as client:
        client.send(asks(version="1.0"))
        answer = client.answer()
        assert_sum(answer)
        assert answer.closes
        assert client.ended()
    with peer(agent) as client:
        for value in (1.0, 2.0):
            client.send(asks("Connection: keep-alive", version="1.0", value=value))
            answer = client.answer()
            assert_sum(answer, value)
            assert not answer.closes
        client.send(head("GET /v2/health/live HTTP/1.0", host=""))
        assert client.answer().json == {"live": True}
        assert client.ended()


def test_a_stream_over_http_1_0_ends_with_its_connection(agent: Agent) -> None:
    lines = b"".join(body_of(str(at), at) + b"\n" for at in range(5))
    with peer(agent) as client:
        length = f"Content-Length: {len(lines)}"
        client.send(head(f"POST {STREAM} HTTP/1.0", "Content-Type: application/x-ndjson", length) + lines)
        answer = client.answer()
    assert answer.closes
    assert "transfer-encoding" not in answer.headers
    assert [json.loads(line)["id"] for line in answer.body.splitlines() if line] == [str(at) for at in range(5)]


def test_pipelined_requests_are_answered_in_order(agent: Agent) -> None:
    """Through both lanes by turns, and all at once."""
    requests, methods = [], []
    for at in range(12):
        method = ("POST", "POST", "HEAD", "POST", "GET")[at % 5]
        odd = ODD if at % 5 == 3 else ()
        plain = asks(*odd, id_=str(at), value=at)
        requests.append(plain if method == "POST" else head(f"{method} /v2/health/live HTTP/1.1"))
        methods.append(method)
    with peer(agent) as client:
        client.send(b"".join(requests))
        for at, method in enumerate(methods):
            answer = client.answer(method)
            assert answer.status == 200
            if method == "POST":
                assert answer.json["id"] == str(at)
                assert_sum(answer, at)
        client.send(asks(id_="last"))
        assert client.answer().json["id"] == "last"


def test_a_request_byte_by_byte(agent: Agent) -> None:
    for lane in LANES.values():
        with peer(agent) as client:
            for byte in asks(*lane):
                client.send(bytes([byte]))
            assert_sum(client.answer())


@both_lanes
def test_the_next_request_behind_the_rest_of_a_body(agent: Agent, lane: Sequence[str]) -> None:
    with peer(agent) as client:
        for turn in range(3):
            first, second = asks(*lane, id_="1"), asks(*lane, id_="2")
            client.send(first[:-20])
            running(agent, 1)
            client.send(first[-20:] + second)
            assert [client.answer().json["id"] for _ in range(2)] == ["1", "2"], turn


@both_lanes
def test_what_is_no_request_behind_one_that_is(agent: Agent, lane: Sequence[str]) -> None:
    with peer(agent) as client:
        client.send(asks(*lane) + asks(*lane) + b"nothing\r\n\r\n" + asks())
        assert [client.answer().status for _ in range(3)] == [200, 200, 400]
        assert client.ended()
    with peer(agent) as client:
        client.send(asks(CLOSE, *lane) + asks())
        assert client.answer().status == 200
        assert client.ended()


@both_lanes
def test_a_large_answer_through_a_tiny_window(agent: Agent, lane: Sequence[str]) -> None:
    data = b"".join(struct.pack("<f", at) for at in range(BIG[0] * BIG[1]))
    tensor = {"name": "x", "datatype": "FP32", "shape": BIG, "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    fields = (f"Inference-Header-Content-Length: {len(text)}", f"Content-Length: {len(text) + len(data)}")
    with peer(agent, receive=2048) as client:
        for _ in range(2):
            client.send(head("POST /v2/models/big/infer HTTP/1.1", *fields, *lane) + text + data)
            answer = client.answer()
            assert answer.status == 200
            assert answer.body[int(answer.headers["inference-header-content-length"]) :] == data


# --- heads


@both_lanes
def test_a_host_and_a_length_are_all_that_is_needed(agent: Agent, lane: Sequence[str]) -> None:
    with peer(agent) as client:
        client.send(asks(*lane))
        answer = client.answer()
    assert_sum(answer)
    assert answer.headers["content-type"] == "application/json"
    assert (answer.headers["server"], "date" in answer.headers) == ("tightfit-agent", True)


@pytest.mark.parametrize("fields", [(), ("Host: a", "Host: b"), ("Host: ecu", "host: ecu")])
def test_one_host_is_named(agent: Agent, fields: Sequence[str]) -> None:
    """RFC 9112, section 3.2: 400, for HTTP/1.1."""
    body = body_of()
    with peer(agent) as client:
        client.send(head(f"POST {ADDING} HTTP/1.1", f"Content-Length: {len(body)}", *fields, host="") + body)
        answer = client.answer()
        assert (answer.status, answer.closes, client.ended()) == (400, True, True)
        assert "Host" in answer.json["error"]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (head(f"POST /{'v' * 9000} HTTP/1.1"), 414),
        (head("GET /v2 HTTP/1.1", f"X: {'a' * 9000}"), 431),
        (head("GET /v2 HTTP/1.1", *(f"X{at}: a" for at in range(200))), 431),
        (head(f"POST {ADDING} HTTP/1.1", f"X: {'a' * 9000}", "Content-Length: 1") + b"{", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a client that speaks TLS\r\n\r\n", 400),
        (head("GET /v2 HTTP/1.1", "Content-Length: 1", "Content-Length: 2"), 400),
        (head("GET /v2 HTTP/1.1", "Content-Length: 1", "Transfer-Encoding: chunked"), 400),
    ],
)
def test_heads_that_are_none(agent: Agent, request_: bytes, status: int) -> None:
    with peer(agent) as client:
        client.send(request_)
        answer = client.answer()
        assert (answer.status, answer.closes, client.ended()) == (status, True, True)
        assert answer.json["error"]


def test_head_and_options(agent: Agent) -> None:
    with peer(agent) as client:
        client.send(head("GET /v2/models/adding HTTP/1.1"))
        whole = client.answer()
        assert whole.headers["cache-control"] == "no-store"
        client.send(head("HEAD /v2/models/adding HTTP/1.1"))
        assert client.answer("HEAD").headers["content-length"] == str(len(whole.body))
        for path, allowed in (
            (ADDING, {"POST", "OPTIONS"}),
            ("/v2/health/live", {"GET", "HEAD", "OPTIONS"}),
            ("*", {"GET", "HEAD", "POST", "OPTIONS"}),
        ):
            client.send(head(f"OPTIONS {path} HTTP/1.1"))
            answer = client.answer()
            assert (answer.status, set(answer.headers["allow"].split(","))) == (204, allowed)
        client.send(head("OPTIONS /nothing HTTP/1.1"))
        assert client.answer().status == 404
        client.send(head(f"PUT {ADDING} HTTP/1.1", "Content-Length: 0"))
        answer = client.answer()
        assert (answer.status, answer.headers["allow"]) == (405, "POST")


# --- bodies


@pytest.mark.parametrize(("size", "extension"), [(1, b""), (7, b";name=value"), (10_000, b';q="a b"')])
def test_chunked_bodies(agent: Agent, size: int, extension: bytes) -> None:
    with peer(agent) as client:
        for end in (b"0\r\n\r\n", b"0\r\nX-Sum: 17\r\n\r\n"):
            client.send(head(f"POST {ADDING} HTTP/1.1", "Transfer-Encoding: chunked"))
            for piece in chunked(body_of(), size, extension):
                client.send(piece)
            client.send(end)
            assert_sum(client.answer())


def test_a_body_is_asked_for_when_it_is_taken(agent: Agent) -> None:
    body = body_of()
    with peer(agent) as client:
        for lane in LANES.values():
            client.send(head(f"POST {ADDING} HTTP/1.1", f"Content-Length: {len(body)}", EXPECT, *lane))
            assert client.answer().status == 100
            client.send(body)
            assert_sum(client.answer())
        client.send(head(f"POST {STREAM} HTTP/1.1", "Content-Type: application/x-ndjson", "Content-Length: 0", EXPECT))
        assert client.answer().status == 200
        # HTTP/1.0 has no such thing.
        client.send(head(f"POST {ADDING} HTTP/1.0", f"Content-Length: {len(body)}", EXPECT) + body)
        assert_sum(client.answer())


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (ADDING, (f"Content-Length: {1 << 30}",), 413),
        ("/v2/models/nothing/infer", ("Content-Length: 9",), 404),
        ("/nothing", ("Content-Length: 9",), 404),
        ("/v2/health/live", ("Content-Length: 9",), 405),
        (ADDING, ("Content-Length: 9", "Request-Timeout-Ms: soon"), 400),
        (STREAM, ("Content-Length: 9", "Content-Type: text/plain"), 415),
    ],
)
def test_a_body_that_would_be_refused_is_not_asked_for(
    agent: Agent, path: str, fields: Sequence[str], status: int
) -> None:
    with peer(agent) as client:
        client.send(head(f"POST {path} HTTP/1.1", *fields, EXPECT))
        answer = client.answer()
        assert (answer.status, answer.closes) == (status, True)


def test_no_body_is_asked_for_when_there_is_no_room(agent: Agent) -> None:
    with ExitStack() as clients:
        with stopped(agent):
            busy = [clients.enter_context(peer(agent)) for _ in range(4)]
            for at, client in enumerate(busy):
                client.send(asks(id_=str(at)))
                running(agent, min(at + 1, 2))
                waiting(agent, max(at - 1, 0))
            with peer(agent) as late:
                late.send(head(f"POST {ADDING} HTTP/1.1", "Content-Length: 9", EXPECT))
                answer = late.answer()
                assert (answer.status, answer.closes, answer.headers["retry-after"]) == (503, True, "1")
        for client in busy:
            assert_sum(client.answer())


def test_who_leaves_when_asked_for_a_body(agent: Agent) -> None:
    for path in (ADDING, STREAM, "/v2/repository/models/adding/load"):
        fields = ("Content-Type: application/x-ndjson", "Content-Length: 9", EXPECT)
        with peer(agent) as client:
            client.send(head(f"POST {path} HTTP/1.1", *fields))
            assert client.answer().status == 100
    until(lambda: agent.metric("tightfit_in_flight") == agent.metric("tightfit_streams") == 0)


def test_what_else_is_expected_cannot_be_met(agent: Agent) -> None:
    with peer(agent) as client:
        client.send(head(f"POST {ADDING} HTTP/1.1", "Content-Length: 9", "Expect: the unexpected"))
        answer = client.answer()
        assert (answer.status, answer.closes) == (417, True)


# --- FIN


@both_lanes
@pytest.mark.parametrize("fields", [(CLOSE,), ("Connection: Close",)])
def test_fin_behind_the_last_request_is_the_end_of_what_is_sent(
    agent: Agent, lane: Sequence[str], fields: Sequence[str]
) -> None:
    with peer(agent) as client:
        client.send(asks(*fields, *lane))
        client.fin()
        answer = client.answer()
        assert_sum(answer)
        assert (answer.closes, client.ended()) == (True, True)
    with peer(agent) as client:
        with stopped(agent):
            client.send(asks(*fields, *lane))
            running(agent, 1)
            client.fin()
        assert_sum(client.answer())
        assert client.ended()


def test_fin_behind_a_request_of_http_1_0(agent: Agent) -> None:
    with peer(agent) as client:
        with stopped(agent):
            client.send(asks(version="1.0"))
            running(agent, 1)
            client.fin()
        assert_sum(client.answer())
        assert client.ended()


@both_lanes
def test_fin_behind_any_other_request_cancels_it(agent: Agent, lane: Sequence[str]) -> None:
    before = disconnected(agent)
    with peer(agent) as client, stopped(agent):
        client.send(asks(*lane))
        running(agent, 1)
        client.fin()
        until(lambda: disconnected(agent) == before + 1)
        assert client.ended()


@both_lanes
def test_fin_within_a_body_cancels_the_request(agent: Agent, lane: Sequence[str]) -> None:
    before = disconnected(agent)
    with peer(agent) as client:
        client.send(asks(CLOSE, *lane)[:-1])
        running(agent, 1)
        client.fin()
        until(lambda: disconnected(agent) == before + 1)
        assert client.ended()


def test_fin_behind_pipelined_requests_of_which_the_last_says_so(agent: Agent) -> None:
    with peer(agent) as client:
        client.send(asks(id_="1") + asks(*ODD, id_="2") + asks(CLOSE, id_="3"))
        client.fin()
        assert [client.answer().json["id"] for _ in range(3)] == ["1", "2", "3"]
        assert client.ended()


def test_fin_of_an_idle_connection_closes_it(agent: Agent) -> None:
    for request_ in (b"", asks(), asks(*ODD), asks(*ODD)[:20]):
        with peer(agent) as client:
            client.send(request_)
            if len(request_) > 20:
                assert_sum(client.answer())
            client.fin()
            assert client.ended()


@both_lanes
def test_by_option_every_fin_is_the_end_of_what_is_sent(patient: Agent, lane: Sequence[str]) -> None:
    for requests in (1, 3):
        with peer(patient) as client:
            with stopped(patient):
                client.send(b"".join(asks(*lane, value=at) for at in range(requests)))
                until(lambda: patient.metric("tightfit_in_flight", model="adding") == 1)
                client.fin()
            for at in range(requests):
                assert_sum(client.answer(), at)
            assert client.ended()
    before = disconnected(patient)
    with peer(patient) as client:
        client.send(asks(*lane)[:-1])
        until(lambda: patient.metric("tightfit_in_flight", model="adding") == 1)
        client.fin()
        until(lambda: disconnected(patient) == before + 1)
        assert client.ended()


def stream_head(*fields: str) -> bytes:
    return head(f"POST {STREAM} HTTP/1.1", "Content-Type: application/x-ndjson", "Transfer-Encoding: chunked", *fields)


def test_fin_behind_a_stream_that_says_so_is_the_end_of_what_is_sent(agent: Agent) -> None:
    lines = b"".join(body_of(str(at), at) + b"\n" for at in range(20))
    for fin_while in ("nothing is answered", "the rest is not read"):
        with peer(agent) as client:
            with stopped(agent):
                client.send(stream_head(CLOSE) + b"".join([*chunked(lines, 1000), b"0\r\n\r\n"]))
                if fin_while == "nothing is answered":
                    client.fin()
                    running(agent, 2)
                else:
                    running(agent, 2)
                    client.fin()
            answer = client.answer()
            assert client.ended()
        records = [json.loads(line) for line in answer.body.splitlines() if line.strip()]
        assert [record["id"] for record in records] == [str(at) for at in range(20)]
        assert {record["status"] for record in records} == {200}


def test_fin_of_any_other_stream_cancels_what_is_on_its_way(agent: Agent) -> None:
    whole = b"".join([*chunked(body_of() + b"\n", 1000), b"0\r\n\r\n"])
    for sent in (stream_head() + whole, stream_head(CLOSE) + whole[:-5]):
        before = disconnected(agent)
        with peer(agent) as client:
            with stopped(agent):
                client.send(sent)
                running(agent, 1)
                client.fin()
                until(lambda: disconnected(agent) == before + 1)  # noqa: B023 - ended before the next turn
            until(lambda: agent.metric("tightfit_streams") == 0)


def test_who_follows_with_a_closed_half_is_not_cut_off(agent: Agent) -> None:
    with peer(agent) as client:
        client.send(head("GET /v2/events?since=0 HTTP/1.1", CLOSE))
        client.fin()
        data = b""
        while data.count(b"event: activate") < 2 or not data.endswith(b"\r\n:\n\n\r\n"):
            # All that is there, and then a heartbeat.
            data += client.some()
    until(lambda: agent.metric("tightfit_streams") == 0)
