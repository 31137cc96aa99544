"""Latency by percentile as a small SVG: one line a rate, both axes logarithmic. Pure text, no library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from agent.load.histogram import Histogram

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 40, 50
# From one hue to the other, told apart also without colours.
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5cab", "#c77f0a", "#4a4a4a")
_DASHES = ("", "6 3", "2 3", "9 3 2 3")
_LEAST_MS = 1e-3
_PERCENTS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)


@dataclass(frozen=True)
class Line:
    """Latencies in nanoseconds, and how many requests beside them were never answered."""

    name: str
    latency: Histogram
    unanswered: int = 0


def plot(title: str, lines: Sequence[Line], deadline_ms: float | None = None) -> str:
    """The drawing. x: percentile of all requests, each nine as wide as the one before; y: milliseconds. A line ends
    where the rest was not answered."""
    drawn = [(line.name, list(_points(line))) for line in lines if line.latency.count]
    shown = [ms for _, points in drawn for _, ms in points] + ([deadline_ms] if deadline_ms else [])
    marks = [max(ms, _LEAST_MS) for ms in shown]
    low = math.floor(math.log10(min(marks, default=1.0)))
    high = max(math.ceil(math.log10(max(marks, default=10.0))), low + 1)
    nines = max([_nines(percent / 100) for percent in _PERCENTS[:4]] + [p[-1][0] for _, p in drawn])

    def x(at: float) -> float:
        return _LEFT + at / nines * (_WIDTH - _LEFT - _RIGHT)

    def y(ms: float) -> float:
        share = (math.log10(max(ms, 10.0**low)) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for percent in _PERCENTS:
        if (at := _nines(percent / 100)) <= nines:
            parts.append(_rule(x(at), y(10.0**low), x(at), y(10.0**high)))
            parts.append(f'<text x="{x(at):.1f}" y="{_HEIGHT - 30}" text-anchor="middle">{percent:g}</text>')
    for power in range(low, high + 1):
        parts.append(_rule(x(0), y(10.0**power), x(nines), y(10.0**power)))
        parts.append(f'<text x="{_LEFT - 8}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    parts.append(
        f'<text x="{x(nines / 2):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">percentile of all requests</text>'
    )
    parts.append(f'<text x="12" y="{_TOP - 8}">ms</text>')
    if deadline_ms:
        parts.append(_rule(x(0), y(deadline_ms), x(nines), y(deadline_ms), "#d00"))
        parts.append(f'<text x="{x(0) + 6:.1f}" y="{y(deadline_ms) - 4:.1f}" fill="#d00">deadline</text>')
    for number, (name, points) in enumerate(drawn):
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
        style = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'
        path = " ".join(f"{x(at):.1f},{y(ms):.1f}" for at, ms in points)
        parts.append(f'<polyline points="{path}" {style}/>')
        at = _TOP + 16 + 18 * number
        parts.append(f'<polyline points="{_WIDTH - 150},{at - 4} {_WIDTH - 120},{at - 4}" {style}/>')
        parts.append(f'<text x="{_WIDTH - 114}" y="{at}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _points(line: Line) -> Iterator[tuple[float, float]]:
    """(nines, milliseconds) of every bucket. Where all were answered the last stands half a request before all."""
    total = line.latency.count + line.unanswered
    before = 0
    for value, below in line.latency.steps():
        yield _nines(before / total), value / 1e6
        before = below
        yield _nines(min(below, total - 0.5) / total), value / 1e6


def _nines(share: float) -> float:
    """0 at the least, 1 at 90 %, 2 at 99 %."""
    return -math.log10(1 - share)


def _rule(x0: float, y0: float, x1: float, y1: float, colour: str = "#ddd") -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'
