"""Pages of other sites, told from the agent's own."""

from __future__ import annotations

import pytest

from agent.access.origins import is_foreign


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080"),
        ("https://board-1.local", "board-1.local"),
        ("https://board-1.local:8443", "Board-1.local:8443"),
        ("http://[::1]:8080", "[::1]:8080"),
    ],
)
def test_the_agents_own(origin: str, host: str) -> None:
    assert not is_foreign([origin], [host])


@pytest.mark.parametrize(
    "origin",
    ["null", "", "http://evil.example", "http://127.0.0.1", "http://127.0.0.1:80800", "http://127.0.0.1:8080.evil.example",
     "http://evil.example/127.0.0.1:8080", "http://x@127.0.0.1:8080", "file://127.0.0.1:8080", "127.0.0.1:8080",
     "chrome-extension://abc", "http://localhost:8080"],
)  # fmt: skip
def test_others(origin: str) -> None:
    assert is_foreign([origin], ["127.0.0.1:8080"])


def test_what_is_no_browser_has_no_origin() -> None:
    assert not is_foreign([], ["127.0.0.1:8080"])
    assert not is_foreign([], [])


def test_who_names_no_host_or_several_origins_is_no_browser() -> None:
    own = "http://x"
    assert is_foreign([own], [])
    assert is_foreign([own], [""])
    assert is_foreign(["http://"], [""])
    assert is_foreign([own, own], ["x"])
    assert is_foreign([own, "http://evil.example"], ["x"])
