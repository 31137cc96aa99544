"""Who may do what: every kind of caller, role and endpoint, on both lanes of a real agent."""

from __future__ import annotations

import grp
import json
import os
import pwd
import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from agent.access.tokens import line_of, make
from targets.bundle import read_manifest
from tests.support import bundles
from tests.support.agents import Agent, run_agent, serving, until
from tests.support.certificates import Authority, Pair
from tests.support.peers import Answer, Peer
from tests.support.streams import LINES, Exchange, line
from tests.support.wire import LANES, post, tensors

ROLES = ("infer", "observe", "admin")
ONES = np.ones((1, 8), np.float32)
SUM, SUM_HEADERS = tensors({"a": ONES, "b": ONES}, binary=True)


def asking(method: str, path: str, body: bytes = b"") -> bytes:
    length = [f"Content-Length: {len(body)}"] if method == "POST" else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *length, "", ""]).encode() + body


def pair_of(id_: str) -> bytes:
    return line(id_, a=("FP32", ONES.tolist()), b=("FP32", ONES.tolist()))


ENDPOINTS = {
    "live": (asking("GET", "/v2/health/live"), set(ROLES) | {""}),
    "model ready": (asking("GET", "/v2/models/add/ready"), set(ROLES) | {""}),
    "server": (asking("GET", "/v2"), {"infer", "observe"}),
    "openapi": (asking("GET", "/v2/openapi.json"), {"infer", "observe"}),
    "metadata": (asking("GET", "/v2/models/add"), {"infer", "observe"}),
    "infer": (post("add", SUM, *SUM_HEADERS), {"infer"}),
    "stream": (asking("POST", "/v2/models/add/stream"), {"infer"}),
    "generate": (asking("POST", "/v2/models/add/generate", b"{}"), {"infer"}),
    "metrics": (asking("GET", "/metrics"), {"observe"}),
    "statistics": (asking("GET", "/v2/models/add/stats"), {"observe"}),
    "all statistics": (asking("GET", "/v2/models/stats"), {"observe"}),
    "index": (asking("POST", "/v2/repository/index"), {"observe"}),
    "logging": (asking("GET", "/v2/logging"), {"observe"}),
    "load": (asking("POST", "/v2/repository/models/none/load"), {"admin"}),
    "unload": (asking("POST", "/v2/repository/models/none/unload"), {"admin"}),
    "set logging": (asking("POST", "/v2/logging", b"{}"), {"admin"}),
}
"""Requests, and the roles that may send each; "" is nobody's."""


@dataclass(frozen=True)
class Known:
    """Callers by role, each with a token and a certificate, and one who has `infer` for another model alone."""

    authority: Authority
    tokens: dict[str, str]
    pairs: dict[str, Pair]

    @staticmethod
    def make(folder: Path) -> Known:
        authority = Authority(folder / "ca")
        names = (*ROLES, "other")
        return Known(
            authority, {name: make() for name in names}, {name: authority.issue(f"{name}.vehicle") for name in names}
        )

    def configure(self, folder: Path, anonymous: tuple[str, ...] = (), more: str = "") -> Path:
        shown = self.authority.server()
        (folder / "tokens").write_text("".join(f"{line_of(*each)}\n" for each in self.tokens.items()))
        granted = {**{role: f'{role} = ["*"]' for role in ROLES}, "other": 'infer = ["another"]'}
        callers = "".join(
            f'[[callers]]\nname = "{name}"\ncertificates = ["CN:{name}.vehicle"]\n{grants}\n'
            for name, grants in granted.items()
        )
        path = folder / "agent.toml"
        path.write_text(
            f'[http]\nlisten = ["127.0.0.1:0", "unix:{folder / "socket"}"]\n'
            f'[tls]\ncertificate = "{shown.certificate}"\nkey = "{shown.key}"\n'
            f'client_ca = "{self.authority.own.certificate}"\n'
            f'[access]\nanonymous = {json.dumps(anonymous)}\ntokens = "{folder / "tokens"}"\nwatch_s = 0.05\n'
            f"[repository]\ncontrol = true\n{callers}{more}",
            encoding="utf-8",
        )
        return path


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known.make(tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, known: Known) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("access")
    arguments = ("--config", str(known.configure(folder)))
    with serving(bundles.add(folder / "add.tfb"), folder / "log", *arguments, free_port=False) as agent:
        agent.tls = known.authority.trusting()
        yield agent
        assert "Traceback" not in agent.log
        for token in known.tokens.values():
            assert token not in agent.log


def ask(address: tuple[str, int] | str, request: bytes, headers: dict[str, str], tls: ssl.SSLContext | None) -> Answer:
    line, _, rest = request.partition(b"\r\n")
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    with Peer(address, tls=tls) as peer:
        peer.send(line + b"\r\n" + fields + rest)
        return peer.answer(line.split()[0].decode())


def refusal_of(answer: Answer) -> int | None:
    """401 or 403, where it is for who asks; what comes of the request itself is of no concern."""
    return answer.status if answer.status in (401, 403) else None


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("role", [*ROLES, "other", ""])
@pytest.mark.parametrize("kind", ["token", "certificate"])
def test_the_matrix(agent: Agent, known: Known, kind: str, role: str, endpoint: str, lane: str) -> None:
    request, roles = ENDPOINTS[endpoint]
    headers, tls = dict(LANES[lane]), known.authority.trusting()
    if role and kind == "token":
        headers["Authorization"] = f"Bearer {known.tokens[role]}"
    elif role:
        tls = known.authority.trusting(known.pairs[role])
    answer = ask(("127.0.0.1", agent.port), request, headers, tls)
    allowed = role in roles or "" in roles or (role == "other" and endpoint in ("server", "openapi"))
    assert refusal_of(answer) == (None if allowed else 403 if role else 401), answer
    assert ("www-authenticate" in answer.headers) == (not allowed and not role)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("wrong", ["Bearer nobodys", "Basic QQ==", "Bearer", "x" * 500])
def test_a_token_that_is_nobodys(agent: Agent, known: Known, lane: str, wrong: str) -> None:
    """It is refused whatever the certificate says, and where anybody may ask it is not looked at."""
    request, _ = ENDPOINTS["infer"]
    tls = known.authority.trusting(known.pairs["infer"])
    headers = {**LANES[lane], "Authorization": wrong}
    answer = ask(("127.0.0.1", agent.port), request, headers, tls)
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert wrong.rsplit(maxsplit=1)[-1] not in answer.json["error"].replace("Bearer TOKEN", "")
    live, _ = ENDPOINTS["live"]
    assert ask(("127.0.0.1", agent.port), live, headers, tls).status == 200


def test_two_headers_are_one_too_many(agent: Agent, known: Known) -> None:
    token = f"Authorization: Bearer {known.tokens['infer']}"
    with Peer(("127.0.0.1", agent.port), tls=agent.tls) as peer:
        peer.send(post("add", SUM, *SUM_HEADERS, token, token))
        assert peer.answer().status in (400, 401)


@pytest.mark.parametrize("lane", LANES)
def test_callers_of_one_connection(agent: Agent, known: Known, lane: str) -> None:
    """Every request is judged by its own token, whatever the last one had."""
    lanes = [f"{name}: {value}" for name, value in LANES[lane].items()]

    def request(*names: str) -> bytes:
        return post("add", SUM, *SUM_HEADERS, *lanes, *[f"Authorization: Bearer {known.tokens[n]}" for n in names])

    with Peer(("127.0.0.1", agent.port), tls=agent.tls) as peer:
        for names, status in ((("infer",), 200), (("infer",), 200), ((), 401), (("other",), 403), (("infer",), 200)):
            peer.send(request(*names))
            assert peer.answer().status == status


def test_who_is_known_stays_in_the_fast_lane(agent: Agent, known: Known) -> None:
    observer = {"Authorization": f"Bearer {known.tokens['observe']}"}

    def in_lane() -> str:
        lines = agent.request("/metrics", headers=observer)[1].decode().splitlines()
        return next(line for line in lines if line.startswith("tightfit_lane_connections "))

    until(lambda: in_lane().endswith(" 0.0"))
    token = f"Authorization: Bearer {known.tokens['infer']}"
    with Peer(("127.0.0.1", agent.port), tls=agent.tls) as peer:
        for number in range(3):
            # The same head, and heads that differ.
            for headers in ((token,), (token, f"X-Request-Id: {number}")):
                peer.send(post("add", SUM, *SUM_HEADERS, *headers))
                assert peer.answer().status == 200
        assert in_lane().endswith(" 1.0")


def test_refused_requests_are_counted(agent: Agent, known: Known) -> None:
    observer = {"Authorization": f"Bearer {known.tokens['observe']}"}

    def counted(reason: str) -> int:
        text = agent.request("/metrics", headers=observer)[1].decode()
        lines = [line for line in text.splitlines() if line.startswith("tightfit_requests_total")]
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if f'reason="{reason}"' in line)

    before = counted("unauthenticated"), counted("forbidden")
    request, _ = ENDPOINTS["infer"]
    ask(("127.0.0.1", agent.port), request, {}, agent.tls)
    ask(("127.0.0.1", agent.port), request, {"Authorization": f"Bearer {known.tokens['other']}"}, agent.tls)
    assert (counted("unauthenticated"), counted("forbidden")) == (before[0] + 1, before[1] + 1)


def audited(agent: Agent) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in agent.log.splitlines()]
    return [line for line in lines if line["event"] == "audit"]


def test_what_administrators_do_is_written_down(tmp_path: Path, known: Known) -> None:
    arguments = ("--config", str(known.configure(tmp_path)))
    tls = known.authority.trusting()
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        for role, model, status in (
            ("admin", "add", 200),
            ("admin", "none", 404),
            ("infer", "add", 403),
            ("", "add", 401),
        ):
            headers = {"Authorization": f"Bearer {known.tokens[role]}"} if role else {}
            load = asking("POST", f"/v2/repository/models/{model}/load")
            assert ask(("127.0.0.1", agent.port), load, headers, tls).status == status
        assert ask(str(tmp_path / "socket"), load, {}, None).status == 401
    kept = ("what", "who", "where", "model", "outcome")
    assert [[line[key] for key in kept] for line in audited(agent)] == [
        ["load", "admin", "127.0.0.1", "add", "done"],
        ["load", "admin", "127.0.0.1", "none", "unknown_model"],
        ["load", "infer", "127.0.0.1", "add", "forbidden"],
        ["load", "anonymous", "127.0.0.1", "add", "unauthenticated"],
        ["load", "anonymous", "unix", "add", "unauthenticated"],
    ]
    loaded, *others = audited(agent)
    assert loaded["bundle"] == str(tmp_path / "add.tfb")
    assert loaded["version"] == read_manifest(tmp_path / "add.tfb").version
    assert not any("bundle" in each or "version" in each for each in others)


def test_the_bundle_that_was_asked_for_is_written_down(tmp_path: Path) -> None:
    """Whether or not it came to that."""
    config = tmp_path / "agent.toml"
    config.write_text(f'[repository]\ncontrol = true\nfolders = ["{tmp_path}"]\n')
    arguments = ("--config", str(config))
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments) as agent:
        body = json.dumps({"parameters": {"bundle": "no\n" + "x" * 1000}}).encode()
        load = asking("POST", "/v2/repository/models/add/load", body)
        assert ask(("127.0.0.1", agent.port), load, {}, None).status in (400, 404)
    (line,) = audited(agent)
    assert line["outcome"] != "done"
    assert line["bundle"] == "no\n" + "x" * 497


# --- pages of other sites


@pytest.mark.parametrize("where", ["tcp", "unix"])
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_pages_of_other_sites_may_nothing(agent: Agent, known: Known, lane: str, endpoint: str, where: str) -> None:
    """Whoever has them open: here somebody who may do all."""
    request, roles = ENDPOINTS[endpoint]
    role = next(iter(roles - {""}))
    address = ("127.0.0.1", agent.port) if where == "tcp" else str(agent.log_file.parent / "socket")
    headers = {**LANES[lane], "Authorization": f"Bearer {known.tokens[role]}"}
    tls = known.authority.trusting() if where == "tcp" else None
    for origin in ("http://evil.example", "null", "https://x:8080"):
        answer = ask(address, request, {**headers, "Origin": origin}, tls)
        assert answer.status == 403, answer
        assert "a page of another site asks" in answer.json["error"]
    for origin in ("http://x", "https://x"):
        assert ask(address, request, {**headers, "Origin": origin}, tls).status != 403


def test_an_open_agent_refuses_them_too(tmp_path: Path) -> None:
    """Where nobody is asked who he is, and whatever came before on the same connection."""
    config = tmp_path / "agent.toml"
    config.write_text("[repository]\ncontrol = true\n")
    arguments = ("--config", str(config))
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments) as agent:
        evil = "Origin: http://evil.example"
        with Peer(("127.0.0.1", agent.port)) as peer:
            for more, status in (((), 200), ((evil,), 403), ((), 200), (("Origin: http://x",), 200), ((evil,), 403)):
                peer.send(post("add", SUM, *SUM_HEADERS, *more))
                assert peer.answer().status == status
        unload = asking("POST", "/v2/repository/models/add/unload", b"{}")
        headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
        assert ask(("127.0.0.1", agent.port), unload, headers, None).status == 403
        assert ask(("127.0.0.1", agent.port), ENDPOINTS["model ready"][0], {}, None).status == 200
    assert [line["outcome"] for line in audited(agent)] == ["forbidden"]


# --- certificates of clients


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_certificates_that_are_not_taken(tmp_path: Path, agent: Agent, known: Known, version: ssl.TLSVersion) -> None:
    stranger = Authority(tmp_path / "foreign")
    for pair in (
        known.authority.issue("infer.vehicle", ends="20210101000000Z"),
        known.authority.issue("infer.vehicle", begins="20800101000000Z"),
        stranger.issue("infer.vehicle"),
    ):
        context = known.authority.trusting(pair)
        context.minimum_version = context.maximum_version = version
        with pytest.raises((OSError, AssertionError)):
            ask(("127.0.0.1", agent.port), ENDPOINTS["live"][0], {}, context)


def test_a_certificate_of_nobody(agent: Agent, known: Known) -> None:
    tls = known.authority.trusting(known.authority.issue("nobody.vehicle", "DNS:infer.vehicle"))
    assert ask(("127.0.0.1", agent.port), ENDPOINTS["live"][0], {}, tls).status == 200
    assert ask(("127.0.0.1", agent.port), ENDPOINTS["infer"][0], {}, tls).status == 401


def test_certificates_that_are_needed_and_revoked(tmp_path: Path, known: Known) -> None:
    good, bad = known.authority.issue("infer.vehicle"), known.authority.issue("infer.vehicle")
    config = known.configure(tmp_path)
    crl = tmp_path / "crl.pem"
    crl.write_bytes(known.authority.revoked().read_bytes())
    more = f'[tls]\nclient_certificate = "required"\ncrl = "{crl}"\n'
    config.write_text(config.read_text().replace("[tls]\n", more))
    arguments = ("--config", str(config))
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        address = ("127.0.0.1", agent.port)
        request, _ = ENDPOINTS["infer"]

        def status(pair: Pair | None) -> int:
            try:
                return ask(address, request, {}, known.authority.trusting(pair)).status
            except (OSError, AssertionError):
                return 0

        assert [status(pair) for pair in (good, bad, None)] == [200, 200, 0]
        crl.write_bytes(known.authority.revoke(bad).read_bytes())
        until(lambda: status(bad) == 0)
        assert status(good) == 200


@pytest.mark.parametrize("lane", LANES)
def test_who_is_connected_by_a_certificate_that_is_revoked(tmp_path: Path, known: Known, lane: str) -> None:
    """Is told so with the next request, while another who is connected goes on."""
    good, bad = known.authority.issue("infer.vehicle"), known.authority.issue("infer.vehicle")
    config, crl = known.configure(tmp_path), tmp_path / "crl.pem"
    crl.write_bytes(known.authority.revoked().read_bytes())
    config.write_text(config.read_text().replace("[tls]\n", f'[tls]\ncrl = "{crl}"\n'))
    arguments = ("--config", str(config))
    request = post("add", SUM, *SUM_HEADERS, *[f"{name}: {value}" for name, value in LANES[lane].items()])
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        address = ("127.0.0.1", agent.port)
        with (
            Peer(address, tls=known.authority.trusting(good)) as one,
            Peer(address, tls=known.authority.trusting(bad)) as other,
        ):

            def answer(peer: Peer) -> Answer:
                peer.send(request)
                return peer.answer()

            assert (answer(one).status, answer(other).status) == (200, 200)
            crl.write_bytes(known.authority.revoke(bad).read_bytes())
            until(lambda: answer(other).status == 401)
            assert "the certificate has been revoked" in answer(other).json["error"]
            assert answer(one).status == 200


def test_streams_end_with_the_token_that_opened_them(tmp_path: Path, known: Known) -> None:
    config = known.configure(tmp_path)
    arguments = ("--config", str(config))
    tokens = tmp_path / "tokens"
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        agent.tls = known.authority.trusting()

        def bearer(role: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {known.tokens[role]}"}

        lines = {"Accept": LINES}
        with (
            Exchange(agent, "/v2/events", headers=lines | bearer("observe")) as events,
            Exchange(agent, "/v2/models/add/stream", LINES, headers=bearer("infer")) as records,
            Exchange(agent, "/v2/models/add/stream", LINES, headers=bearer("admin")) as never,
        ):
            assert (events.status, records.status, never.status) == (200, 200, 403)
            kept = [line for line in tokens.read_text().splitlines(True) if not line.startswith("observe ")]
            tokens.write_text("".join(kept))
            last = events.records()[-1]
            assert (last["status"], last["error"]) == (401, "the bearer token is nobody's")
            records.send(pair_of("1"))
            assert records.records(1)[0]["status"] == 200
            # A role that is taken away ends it as well.
            text = config.read_text()
            assert text.count('infer = ["*"]') == 1
            config.write_text(text.replace('infer = ["*"]', 'infer = ["another"]'))
            agent.process.send_signal(signal.SIGHUP)
            last = records.records()[-1]
            assert (last["status"], last["error"]) == (403, "caller 'infer' lacks the role infer for this")


def test_streams_end_with_the_certificate_that_opened_them(tmp_path: Path, known: Known) -> None:
    good, bad = known.authority.issue("observe.vehicle"), known.authority.issue("observe.vehicle")
    config, crl = known.configure(tmp_path), tmp_path / "crl.pem"
    crl.write_bytes(known.authority.revoked().read_bytes())
    config.write_text(config.read_text().replace("[tls]\n", f'[tls]\ncrl = "{crl}"\n'))
    arguments = ("--config", str(config))
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        opened = []
        for pair in (good, bad):
            agent.tls = known.authority.trusting(pair)
            opened.append(Exchange(agent, "/v2/events", headers={"Accept": LINES}))
        with opened[0] as stays, opened[1] as ends:
            assert (stays.status, ends.status) == (200, 200)
            crl.write_bytes(known.authority.revoke(bad).read_bytes())
            last = ends.records()[-1]
            assert (last["status"], last["error"]) == (401, "the certificate has been revoked")

            def count() -> bytes:
                metrics = ask(("127.0.0.1", agent.port), ENDPOINTS["metrics"][0], {}, known.authority.trusting(good))
                return next(line for line in metrics.body.splitlines() if line.startswith(b"tightfit_streams{"))

            until(lambda: count().endswith(b" 1.0"))
            assert not stays.ended


# --- Unix sockets


def test_processes_by_user_and_group(tmp_path: Path, known: Known) -> None:
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    caller = '[[callers]]\nname = "me"\n{} = ["{}"]\ninfer = ["*"]\n'
    config = known.configure(tmp_path, more=caller.format("users", user))
    arguments = ("--config", str(config))
    where = str(tmp_path / "socket")
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:

        def statuses() -> list[int]:
            return [
                ask(where, ENDPOINTS[each][0], lane, None).status
                for each in ("infer", "metrics")
                for lane in LANES.values()
            ]

        assert statuses() == [200, 200, 403, 403]
        for key, name, expected in (
            ("groups", group, [200, 200, 403, 403]),
            ("groups", str(os.getgid()), [200, 200, 403, 403]),
            ("users", str(os.getuid() + 1), [401] * 4),
        ):
            before = config.read_text()
            text = known.configure(tmp_path, more=caller.format(key, name)).read_text()
            config.write_text(text)
            agent.process.send_signal(signal.SIGHUP)
            if text != before:
                until(lambda expected=expected: statuses() == expected)  # type: ignore[misc]
        config.write_text(known.configure(tmp_path, more=caller.format("users", "no-such-user")).read_text())
        agent.process.send_signal(signal.SIGHUP)
        until(lambda: "this machine has no user 'no-such-user'" in agent.log)
        assert statuses() == [401] * 4


# --- nobody known


def test_who_is_anonymous_may_what_is_configured(tmp_path: Path, known: Known) -> None:
    config = known.configure(tmp_path, anonymous=("observe",))
    arguments = ("--config", str(config))
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        tls = known.authority.trusting()
        for endpoint, (request, roles) in ENDPOINTS.items():
            for address, context in ((("127.0.0.1", agent.port), tls), (str(tmp_path / "socket"), None)):
                allowed = "" in roles or "observe" in roles
                assert refusal_of(ask(address, request, {}, context)) == (None if allowed else 401), endpoint


def address_of_this_machine() -> str:
    """One that is no loopback, where it has any; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


@pytest.mark.skipif(not address_of_this_machine(), reason="this machine has no network")
def test_from_the_network_nobody_is_taken_for_local(tmp_path: Path, known: Known) -> None:
    host = address_of_this_machine()
    config = known.configure(tmp_path, anonymous=ROLES)
    config.write_text(config.read_text().replace("127.0.0.1:0", "0.0.0.0:0"))
    arguments = ("--config", str(config))
    request, tls = ENDPOINTS["infer"][0], known.authority.trusting()
    tls.check_hostname = False
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        for lane in LANES.values():
            assert ask(("127.0.0.1", agent.port), request, lane, tls).status == 200
            assert ask((host, agent.port), request, lane, tls).status == 401
            token = {"Authorization": f"Bearer {known.tokens['infer']}"}
            assert ask((host, agent.port), request, {**lane, **token}, tls).status == 200


# --- what changes


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("lane", LANES)
def test_tokens_come_and_go(tmp_path: Path, known: Known, lane: str, told: bool) -> None:
    config = known.configure(tmp_path)
    if told:
        config.write_text(config.read_text().replace("watch_s = 0.05", "watch_s = 3600"))
    arguments = ("--config", str(config))
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        new = make()
        headers = [f"{name}: {value}" for name, value in LANES[lane].items()]
        with Peer(("127.0.0.1", agent.port), tls=known.authority.trusting()) as peer:

            def status(token: str) -> int:
                peer.send(post("add", SUM, *SUM_HEADERS, *headers, f"Authorization: Bearer {token}"))
                return peer.answer().status

            def replace(text: str) -> None:
                (tmp_path / "new").write_text(text)
                (tmp_path / "new").rename(tmp_path / "tokens")
                if told:
                    agent.process.send_signal(signal.SIGHUP)

            assert (status(known.tokens["infer"]), status(new)) == (200, 401)
            replace(line_of("infer", new))
            until(lambda: status(known.tokens["infer"]) == 401)
            assert status(new) == 200
            replace("infer nonsense")
            until(lambda: "callers and tokens stay as they were" in agent.log)
            assert status(new) == 200
        if told:
            until(lambda: [each["outcome"] for each in audited(agent) if each["what"] == "reload"][-1:] == ["failed"])
            assert "done" in [each["outcome"] for each in audited(agent) if each["what"] == "reload"]
        tokens = [each for each in audited(agent) if each["what"] == "tokens"]
        assert [(each["new"], each["gone"]) for each in tokens] == [("infer", "admin,infer,observe,other")]
        assert new not in agent.log


def test_what_listens_is_as_it_was_at_the_start(tmp_path: Path, known: Known) -> None:
    """A reload lets nobody in by a section that takes effect at a restart."""
    host = address_of_this_machine()
    if not host:
        pytest.skip("this machine has no network")
    config = known.configure(tmp_path, anonymous=ROLES)
    config.write_text(config.read_text().replace("127.0.0.1:0", "0.0.0.0:0"))
    arguments = ("--config", str(config))
    request, tls = ENDPOINTS["infer"][0], known.authority.trusting()
    tls.check_hostname = False
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments, free_port=False) as agent:
        config.write_text(config.read_text().replace("[http]", "[http]\nallow_insecure_network = true"))
        agent.process.send_signal(signal.SIGHUP)
        until(lambda: "these sections take effect when the agent is started again" in agent.log)
        until(lambda: any(each["what"] == "reload" for each in audited(agent)))
        assert ask((host, agent.port), request, {}, tls).status == 401


@pytest.mark.parametrize("flag", ["--insecure", "--allow-insecure-network"])
def test_a_network_without_anything(tmp_path: Path, flag: str) -> None:
    host = address_of_this_machine() or "127.0.0.1"
    arguments = ("--host", "0.0.0.0", flag)  # noqa: S104
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments) as agent:
        for endpoint, (request, _) in ENDPOINTS.items():
            assert refusal_of(ask((host, agent.port), request, {}, None)) in (None, 403), endpoint
            answer = ask((host, agent.port), request, {"Authorization": "Bearer whatever"}, None)
            assert answer.status != 401


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('[access]\ntokens = "/nowhere"\n[[callers]]\nname = "a"\n', "the tokens /nowhere is not there"),
        ('[access]\ntokens = "credential:x"\n[[callers]]\nname = "a"\n', "systemd handed over no credentials"),
        ('[access]\ntokens = "x"\n', "and no [[callers]] whose they are"),
        ('[[callers]]\nname = "a"\n[[callers]]\nname = "a"\n', "two [[callers]] are named 'a'"),
        ('[[callers]]\nname = "a"\ncertificates = ["CN:a"]\n', "give client_ca under [tls]"),
        ('[[callers]]\nname = "a"\ncertificates = ["a"]\n', "is no name in a certificate"),
        ('[[callers]]\nname = "a b"\n', "cannot be a caller's name"),
        ('[[callers]]\nname = "a"\ninfer = ["a/b"]\n', "cannot be a model's name"),
        ('[[callers]]\nname = "a"\nusers = ["no-such-user"]\n', "this machine has no user 'no-such-user'"),
        ('[access]\nanonymous = ["root"]\n', "Invalid enum value 'root'"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: str, words: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f'bundle = "{tmp_path}"\n{config}')
    code, out, err = run_agent("serve", "--config", str(path), env={"CREDENTIALS_DIRECTORY": ""})
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
