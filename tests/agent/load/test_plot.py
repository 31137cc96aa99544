"""The drawing is XML, its lines never fall, and they end where requests were not answered."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.load.histogram import Histogram
from agent.load.plot import Line, plot

SVG = "{http://www.w3.org/2000/svg}"


def line_of(name: str, milliseconds: list[float], unanswered: int = 0) -> Line:
    histogram = Histogram()
    for each in milliseconds:
        histogram.record(round(each * 1e6))
    return Line(name, histogram, unanswered)


def drawn(*lines: Line, deadline: float | None = None) -> list[list[tuple[float, float]]]:
    """The points of each line, without those of the legend."""
    root = ET.fromstring(plot("a < b & c", lines, deadline))  # noqa: S314 - our own
    paths = [path.attrib["points"].split() for path in root.iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in path)] for path in paths[::2]]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.integers(0, 50), st.none() | st.floats(0.01, 1e5))
def test_lines_rise_and_stay_inside(milliseconds: list[float], unanswered: int, deadline: float | None) -> None:
    (points,) = drawn(line_of("<rate>", milliseconds, unanswered), deadline=deadline)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert all(0 <= x <= 760 and 0 <= y <= 420 for x, y in points)


def test_a_line_ends_where_the_rest_was_refused() -> None:
    half, whole = drawn(line_of("half", [1] * 50, unanswered=50), line_of("whole", [1] * 100))
    root = ET.fromstring(plot("", [line_of("whole", [1] * 100)]))  # noqa: S314 - our own
    marks = {text.text: float(text.attrib["x"]) for text in root.iter(f"{SVG}text")}
    assert half[-1][0] == pytest.approx(marks["50"])
    assert whole[-1][0] > marks["99"]


def test_nothing_measured() -> None:
    assert drawn(line_of("none", [], unanswered=3)) == []
    assert drawn() == []
