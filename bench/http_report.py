"""The tables of the benchmark of HTTP. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from bench.machine import measured_on

OURS, AIOHTTP = "ours", "ours, by aiohttp"
NATIVE, PYTHON = "Triton, ONNX Runtime", "Triton, Python"
STREAM = "ours, one stream"
FRAMES, LINES = "frames", "NDJSON"
GATEWAY_PER_S = 8500.0
_MIB = 1 << 20
_INTRODUCTION = """\
# HTTP, ours beside other servers of models

{rounds} rounds of {seconds} s for each figure ({long} s for mobilenet), interleaved; medians over the rounds, and of
ratios the median of the rounds' own. wrk shares the cores with the server that it loads; all others are idle. CPU is
user and system time of all processes of a server, and the figure that noise moves least. Every body was compared with
onnxruntime's answer first. Made by `python -m bench.http`, whose help says how.
"""


class Key(NamedTuple):
    """What a figure is of; `form` is JSON or binary, of a stream its framing."""

    model: str
    form: str
    connections: int
    server: str


@dataclass(frozen=True)
class Row:
    """One round: answers of a good status a second, latency and CPU time of a request (nan: not measured), errors."""

    per_s: float
    p50_us: float
    p99_us: float
    cpu_us: float
    errors: Counter[str]


@dataclass
class Figures:
    """All of a run. Memory is PSS in bytes, starts are in seconds, and `idle` is the share of a core that is taken
    while nobody asks, by (server, model); `floor_us` is session.run in the process of the benchmark, by model; `notes`
    say what was not measured, and why."""

    rounds: int
    seconds: float
    rows: dict[Key, list[Row]] = field(default_factory=dict)
    memory: dict[tuple[str, str], int] = field(default_factory=dict)
    starts: dict[tuple[str, str], float] = field(default_factory=dict)
    idle: dict[tuple[str, str], float] = field(default_factory=dict)
    floor_us: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def median(self, key: Key, name: str) -> float:
        """Over the rounds; nan where there are none."""
        return float(statistics.median([getattr(row, name) for row in self.rows.get(key, ())] or [float("nan")]))

    def ratio(self, key: Key, base: Key, name: str = "per_s") -> float:
        """The median of the rounds' ratios; nan where one of both is missing."""
        pairs = zip(self.rows.get(key, ()), self.rows.get(base, ()), strict=False)
        ratios = [getattr(one, name) / getattr(other, name) for one, other in pairs if getattr(other, name)]
        return float(statistics.median(ratios or [float("nan")]))

    @property
    def triton(self) -> str:
        """The quicker Triton that was measured."""
        return NATIVE if any(key.server == NATIVE for key in self.rows) else PYTHON


def report(figures: Figures, machine: Mapping[str, str], servers: Mapping[str, str]) -> str:
    """All tables; `servers` is what each server is."""
    text = _INTRODUCTION.format(
        rounds=figures.rounds, seconds=f"{figures.seconds:g}", long=f"{long_seconds(figures.seconds):g}"
    )
    lines = [text, *_goals(figures), ""]
    for (model, form), group in groupby(_sorted(figures), lambda key: (key.model, key.form)):
        lines += [
            f"## {model}, {form}",
            "",
            f"`session.run` alone, without a server: {figures.floor_us[model]:.0f} us.",
            "",
            f"| connections | server | requests/s | : {figures.triton} | p50 ms | p99 ms | CPU us/request | errors |",
            "|---|---|---|---|---|---|---|---|",
            *(_row(figures, key) for key in group),
            "",
        ]
    lines += [*_servers(figures, servers), "", *(f"- {note}" for note in figures.notes)]
    return "\n".join([*lines, "", measured_on(machine), ""])


def long_seconds(seconds: float) -> float:
    """Of a figure of the model of 10 ms, which answers so much less often."""
    return seconds * 1.5


def _sorted(figures: Figures) -> list[Key]:
    """As they were measured, but for the connections: all servers at one number of them stand together."""
    order = {key[:2]: at for at, key in reversed(list(enumerate(figures.rows)))}
    return sorted(figures.rows, key=lambda key: (order[key[:2]], key.connections))


def _row(figures: Figures, key: Key) -> str:
    ratio = figures.ratio(key, key._replace(server=figures.triton))
    cells = [str(key.connections), key.server, f"{figures.median(key, 'per_s'):.0f}", _plain(ratio, ".2f")]
    cells += [_plain(figures.median(key, name) / 1e3, ".2f") for name in ("p50_us", "p99_us")]
    errors: Counter[str] = sum((row.errors for row in figures.rows[key]), Counter())
    cells += [f"{figures.median(key, 'cpu_us'):.0f}", ", ".join(f"{count} {kind}" for kind, count in errors.items())]
    return f"| {' | '.join(cells)} |"


def _goals(figures: Figures) -> Iterator[str]:
    triton = figures.triton
    yield "| | ours | beside | ratio | goal |"
    yield "|---|---|---|---|---|"
    for connections, goal in ((8, 0.8), (32, 1.0)):
        ours = Key("tiny", "binary", connections, OURS)
        yield _goal(figures, f"tiny, binary, {connections} connections", ours, ours._replace(server=triton), "per_s",
                    f">= {goal:g}")  # fmt: skip
    for connections in (8, 32):
        ours = Key("tiny", "binary", connections, OURS)
        yield _goal(figures, f"CPU of such a request, {connections} connections", ours, ours._replace(server=triton),
                    "cpu_us", "<= 1")  # fmt: skip
    ours = Key("tiny", "JSON", 32, OURS)
    yield _goal(figures, "JSON of 1 KB through the gateway, 32 connections", ours, ours._replace(server="fastify"),
                "per_s", f">= {GATEWAY_PER_S:.0f}/s")  # fmt: skip
    for framing, form in ((FRAMES, "binary"), (LINES, "JSON")):
        one, eight = Key("tiny", framing, 1, STREAM), Key("tiny", form, 8, triton)
        yield _goal(figures, f"records of one stream ({framing}), and {form} at 8 connections", one, eight, "per_s",
                    ">= 1")  # fmt: skip
    for form in ("binary", "JSON"):
        ours = Key("tiny", form, 32, OURS)
        yield _goal(figures, f"tiny, {form}, 32 connections, by the fast lane", ours, ours._replace(server=AIOHTTP),
                    "per_s", "")  # fmt: skip


def _goal(figures: Figures, what: str, ours: Key, base: Key, name: str, goal: str) -> str:
    unit = {"per_s": "/s", "cpu_us": " us"}[name]
    shown = [_plain(figures.median(key, name), ".0f", unit) for key in (ours, base)]
    ratio = _plain(figures.ratio(ours, base, name), ".2f")
    return f"| {what} | {shown[0]} | {base.server}: {shown[1]} | {ratio} | {goal} |"


def _plain(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"


def _servers(figures: Figures, servers: Mapping[str, str]) -> Iterator[str]:
    models = list(figures.floor_us)
    yield "## Servers"
    yield ""
    yield f"| server | what | {' | '.join(f'{model}: PSS, start, idle CPU' for model in models)} |"
    yield f"|---|---|{'---|' * len(models)}"
    for name, what in servers.items():
        cells = []
        for model in models:
            memory, start, idle = (kind.get((name, model)) for kind in (figures.memory, figures.starts, figures.idle))
            shown = [f"{memory / _MIB:.0f} MiB"] if memory is not None else []
            shown += [f"{start:.1f} s"] if start is not None else []
            shown += [f"{idle:.1%}"] if idle is not None else []
            cells.append(", ".join(shown) or "-")
        yield f"| {name} | {what} | {' | '.join(cells)} |"
