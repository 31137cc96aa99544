"""Listening sockets: where, of which mode, and what becomes of what was there."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest

from agent.config import Http
from agent.errors import AgentError
from agent.http.sockets import listening, url_of


def unix(path: Path, mode: int = 0o660) -> Http:
    return Http(listen=(f"unix:{path}",), unix_mode=mode)


def test_several_at_once(tmp_path: Path) -> None:
    http = Http(listen=("127.0.0.1:0", "[::1]:0", f"unix:{tmp_path / 's'}"))
    with listening(http) as listeners:
        urls = [url_of(listener) for listener in listeners]
        four, six = (listener.getsockname()[1] for listener in listeners[:2])
        for listener in listeners:
            with socket.socket(listener.family) as client:
                client.connect(listener.getsockname())
    assert urls == [f"http://127.0.0.1:{four}", f"http://[::1]:{six}", f"unix:{tmp_path / 's'}"]
    assert not (tmp_path / "s").exists()


def test_a_name_stands_for_all_its_addresses() -> None:
    found = {each[4][0] for each in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    with listening(Http(host="localhost", port=0)) as listeners:
        assert {listener.getsockname()[0] for listener in listeners} == found


def test_connections_inherit_what_finds_dead_peers() -> None:
    with listening(Http(port=0, tcp_keepalive_s=40)) as (listener,), socket.socket() as client:
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            tcp = ("TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            values = [accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in tcp]
    assert values == [1, 40, 10, 4, 80_000]


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_unix_socket_has_the_mode_whatever_the_mask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        with listening(unix(tmp_path / "s", mode)):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode
    finally:
        os.umask(before)


def test_the_socket_of_a_process_that_is_no_more_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with listening(unix(path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(AgentError, match="it is there, and no socket"), listening(unix(tmp_path / "file")):
        pass
    assert (tmp_path / "file").read_text() == "kept"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(AgentError, match="it is there, and no socket"), listening(unix(tmp_path / "link")):
        pass
    with listening(unix(tmp_path / "s")) as (listener,):
        with pytest.raises(AgentError, match="another process does"), listening(unix(tmp_path / "s")):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(listener.getsockname())


def test_the_socket_of_the_next_process_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with contextlib.ExitStack() as next_one:
        with listening(unix(path)) as (first,):
            first.close()
            next_one.enter_context(listening(unix(path)))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("unix:/nowhere/at/all.sock", "No such file or directory"),
        (f"unix:/tmp/{'x' * 200}", "AF_UNIX path too long"),
        ("192.0.2.1:0", "Cannot assign requested address"),
        ("nowhere.invalid:0", "cannot listen on nowhere.invalid:0"),
    ],
)
def test_what_cannot_be_had(listen: str, words: str) -> None:
    with pytest.raises(AgentError, match=words), listening(Http(listen=(listen,))):
        pass


def test_a_port_that_is_taken() -> None:
    with listening(Http(port=0)) as (listener,):
        port = listener.getsockname()[1]
        with pytest.raises(AgentError, match=f"cannot listen on 127.0.0.1:{port}: Address"), listening(Http(port=port)):
            pass


def test_tls_is_spoken_where_nothing_else_is_said() -> None:
    listen = ("127.0.0.1:0", "http://127.0.0.1:0", "https://127.0.0.1:0")
    for tls, secure in ((True, [True, False, True]), (False, [False, False, True])):
        with listening(Http(listen=listen), tls) as listeners:
            assert [listener.secure for listener in listeners] == secure
            schemes = [url_of(listener).partition(":")[0] for listener in listeners]
            assert schemes == ["https" if each else "http" for each in secure]
