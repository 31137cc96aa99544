"""Tokens: made, kept as digests, found, and never shown."""

from __future__ import annotations

import hashlib
import re

import pytest

from agent.access.tokens import Tokens, bearer, line_of, make, parse
from agent.errors import ConfigError
from tests.support.agents import run_agent

NAMES = ("camera", "dash")
SECRET = "A" * 43


def read(text: str, private: bool = False) -> Tokens:
    return parse(text.encode(), "the.file", NAMES, private)


def test_each_is_somebodys() -> None:
    one, two, three = make(), make(), make()
    tokens = read(f"# mine\n\n{line_of('camera', one)}\n  {line_of('dash', two)}  \n{line_of('camera', three)}\n")
    assert [tokens.name_of(each) for each in (one, two, three)] == ["camera", "dash", "camera"]
    assert len(tokens) == 3
    assert one != two
    for wrong in ("", make(), one[:-1], one + "A", one.upper(), "ÿ"):
        assert tokens.name_of(wrong) is None
    assert Tokens().name_of(one) is None


def test_tokens_as_such_are_for_files_that_nobody_else_reads() -> None:
    assert read(f"camera {SECRET}\n", private=True).name_of(SECRET) == "camera"
    with pytest.raises(ConfigError, match=r"line 1: a token as such, in a file that others can read"):
        read(f"camera {SECRET}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("camera", "is not NAME sha256:DIGEST"),
        (f"camera {SECRET} x", "is not NAME sha256:DIGEST"),
        ("camera short", "neither sha256: with 64"),
        ("camera sha256:00", "neither sha256: with 64"),
        (f"camera sha256:{'A' * 64}", "neither sha256: with 64"),
        (f"other sha256:{'0' * 64}", r"none of \[\[callers\]\] has that name.*available: camera, dash"),
        (f"{SECRET} camera", "neither sha256: with 64"),
        (f"camera sha256:{'0' * 64}\ndash sha256:{'0' * 64}", "line 2: this token is that of 'camera' already"),
        ("\n".join(f"camera sha256:{number:064x}" for number in range(1025)), "more than 1024"),
        ("ÿ", "are not ASCII"),
    ],
)
def test_what_is_wrong_is_named_and_not_shown(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(text, private=True)
    assert SECRET not in str(caught.value)
    assert "the.file" in str(caught.value)


def test_headers() -> None:
    assert bearer(f"Bearer {SECRET}") == bearer(f"bEARER  {SECRET} ") == SECRET
    assert bearer("Bearer a=") == "a="
    for wrong in ("", "Bearer", "Bearer ", f"Basic {SECRET}", SECRET, f"Bearer {SECRET} x", "Bearer ä", "Bearer a=b"):
        assert bearer(wrong) is None


def test_the_command_makes_one() -> None:
    code, out, err = run_agent("token", "camera")
    assert (code, err) == (0, "")
    _, token, _, line = out.splitlines()
    assert re.fullmatch(r"tightfit_[A-Za-z0-9_-]{43}", token)
    assert line == f"camera sha256:{hashlib.sha256(token.encode()).hexdigest()}"
    assert run_agent("token", "camera")[1] != out
    code, out, err = run_agent("token", "a b")
    assert (code, out) == (2, "")
    assert "cannot be a caller's name" in err
