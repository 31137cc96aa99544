"""Errors are one line that any terminal can show."""

from __future__ import annotations

from targets.errors import TightfitError


def test_what_a_terminal_would_obey_is_shown_as_an_escape() -> None:
    error = TightfitError("node 'a\x1b[2J\0'", "its\nname")
    assert str(error) == r"node 'a\x1b[2J\x00' (its name)"


def test_text_of_any_language_stays_as_it_is() -> None:
    assert str(TightfitError("'é 名'  x")) == "'é 名'  x"
