"""Which results are worth a message."""

from __future__ import annotations

import pytest

from agent.mqtt.rules import ResultOptions, Rule, When, Withheld


def rule(**options: object) -> Rule:
    return Rule(ResultOptions("m", **{"most_per_s": 0.0, **options}))  # type: ignore[arg-type]


def taken(of: Rule, *figures: float | None) -> list[bool]:
    """Which of these figures are published, at one time."""
    return [of.takes(each, repr(each).encode(), 0.0) is not None for each in figures]


def test_all_are_told() -> None:
    assert taken(rule(), 1.0, 1.0, None) == [True, True, True]


def test_only_changes_are_told() -> None:
    changing = rule(when=When.CHANGE)
    assert taken(changing, 1.0, 1.0, 2.0, 2.0, 1.0) == [True, False, True, False, True]
    assert changing.takes(None, b"other", 0.0) == Withheld()


def test_small_changes_are_none() -> None:
    """Measured from what was told last, so that a slow drift is told too."""
    assert taken(rule(when=When.CHANGE, by=1.0), 0.0, 0.9, 0.5, 1.1, 1.9, 2.2) == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]


def test_a_figure_that_is_none_is_another() -> None:
    assert taken(rule(when=When.CHANGE, by=1.0), None, None, 1.0, None) == [True, False, True, True]


def test_beyond_a_threshold_and_the_first_that_is_back() -> None:
    assert taken(rule(when=When.THRESHOLD, above=0.5), 0.1, 0.6, 0.7, 0.4, 0.1) == [False, True, True, True, False]
    assert taken(rule(when=When.THRESHOLD, below=0.0), 0.1, -1.0, 0.1, 0.1) == [False, True, True, False]


def test_a_threshold_with_hysteresis() -> None:
    """0.45 is not back yet."""
    found = taken(rule(when=When.THRESHOLD, above=0.5, hysteresis=0.1), 0.45, 0.6, 0.45, 0.3, 0.45)
    assert found == [False, True, True, True, False]


def test_no_number_is_beyond_nothing() -> None:
    assert taken(rule(when=When.THRESHOLD, above=0.5), None, 0.6, None, None) == [False, True, True, False]


def test_a_rate_and_what_it_withheld() -> None:
    limited = rule(most_per_s=1.0, burst=2)
    assert [limited.takes(None, b"", at) is not None for at in (0.0, 0.1, 0.2, 0.3)] == [True, True, False, False]
    limited.missed(5)
    assert limited.takes(None, b"", 1.5) == Withheld(rule=0, rate=2, missed=5)
    assert limited.takes(None, b"", 3.0) == Withheld()


def test_what_the_rate_withheld_is_no_change_yet() -> None:
    """The change is told when the rate allows it."""
    limited = rule(when=When.CHANGE, most_per_s=1.0, burst=1)
    assert limited.takes(None, b"a", 0.0) is not None
    assert limited.takes(None, b"b", 0.1) is None
    assert limited.takes(None, b"b", 2.0) == Withheld(rate=1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"when": When.THRESHOLD}, "needs above or below"),
        ({"above": 1.0}, "above and below are for"),
        ({"by": 1.0}, "by, of 0 or more"),
        ({"when": When.CHANGE, "by": -1.0}, "by, of 0 or more"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        rule(**options)
