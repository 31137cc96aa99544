"""The tables of `python -m bench.scheduler`, from its figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.machine import measured_on

Rows = Mapping[str, Mapping[str, float]]


def report(figures: Mapping[str, Any]) -> str:
    """Everything that was measured, as Markdown."""
    lines = ["# The scheduler beside Triton", "", *_setting(figures)]
    for name, section in _SECTIONS.items():
        if name in figures:
            lines += ["", *section(figures[name])]
    if figures["notes"]:
        lines += ["", *(f"- {note}" for note in figures["notes"])]
    return "\n".join([*lines, "", measured_on(figures["machine"]), ""])


def _setting(figures: Mapping[str, Any]) -> Iterator[str]:
    rounds = figures["effort"]["rounds"]
    yield (
        f"One thread in onnxruntime, clients on the same machine, HTTP with binary tensors; medians of {rounds} rounds "
        "in which all servers take turns. Made by `python -m bench.scheduler`."
    )
    yield ""
    for name, text in figures["servers"].items():
        yield f"- **{name}**: {text}"
    if any(name.startswith("Triton") for name in figures["servers"]):
        yield ""
        yield (
            "Where Triton's batcher has priorities or timeouts, some requests take 500 ms longer, more on a busy "
            "machine: it looks for a free instance a moment too early and sleeps for its `default_wait_microseconds` "
            "(`dynamic_batch_scheduler.cc`). Fixed and plain do not."
        )
    if "pass_ms" in figures:
        sizes = sorted({rows for costs in figures["pass_ms"].values() for rows in costs})
        yield ""
        yield "onnxruntime's own time by rows of a batch, ms:"
        yield ""
        yield from _table(
            ["model", *map(str, sizes)],
            [[model, *(_number(costs.get(rows)) for rows in sizes)] for model, costs in figures["pass_ms"].items()],
        )


def _load(models: Mapping[str, Any]) -> Iterator[str]:
    yield "## Load"
    yield ""
    yield (
        "Poisson arrivals, all with a deadline. The capacity is the most that any server answered in closed loop. In "
        "time: answered within the deadline, from when a request was due. p50 and p99 are of answered requests. "
        "Beside Triton: in time, by that of the best of its three forms at that load."
    )
    for name, model in models.items():
        capacities = ", ".join(f"{server} {_number(each)}" for server, each in model["capacities"].items())
        deadline = model["deadline_ms"]
        yield ""
        yield f"### {name}: deadline {deadline:.0f} ms, capacity {model['capacity']:.0f}/s"
        yield ""
        yield f"In closed loop, /s: {capacities}."
        yield ""
        rows = []
        for row in model["rows"]:
            peers = [r for r in model["rows"] if r["load"] == row["load"] and r["server"].startswith("Triton")]
            best = max((peer["goodput_per_s"] for peer in peers), default=math.nan)
            rows.append(
                [
                    f"{row['load']:.0%}",
                    row["server"],
                    *(_number(row[key]) for key in ("offered_per_s", "goodput_per_s")),
                    _ratio(row["goodput_per_s"], best),
                    *(_number(row[key]) for key in ("p50_ms", "p99_ms")),
                    _reasons(row["reasons"], row["all_requests"]),
                ]
            )
        head = ["load", "server", "offered/s", "in time/s", "beside Triton", "p50, ms", "p99, ms", "not answered, why"]
        yield from _table(head, rows)


def _flood(rows: Rows) -> Iterator[str]:
    yield "## Flood"
    yield ""
    yield (
        "16 low-priority clients in closed loop; one of high priority; one whose deadline is three times what a "
        "request takes alone; one whose deadline is once that, which nobody can keep here and which is to be refused. "
        "Alone: the high-priority client without the others. Throughput: all answers, by those to the 16 clients alone."
    )
    yield ""
    cells = [
        [
            name,
            *(
                _number(row[key])
                for key in ("high_unloaded_p50_ms", "high_unloaded_p99_ms", "high_p50_ms", "high_p99_ms")
            ),
            _ratio(row["high_p99_ms"], row["high_unloaded_p99_ms"]),
            _number(row["flood_per_s"]),
            _ratio(row["flood_per_s"], row["alone_per_s"]),
            _number(row["low_p99_ms"]),
            f"{row['deadline_kept_share']:.0%}",
            f"{row['hopeless_refused_share']:.0%}",
            f"{_number(row['refusal_p50_ms'])} / {_number(row['refusal_p99_ms'])}",
        ]
        for name, row in rows.items()
    ]
    head = ["server", "alone p50, ms", "alone p99", "high p50", "high p99", "p99 by alone", "answers/s", "throughput"]
    yield from _table([*head, "low p99", "deadline kept", "hopeless refused", "after, ms p50 / p99"], cells)


def _idle(rows: Rows) -> Iterator[str]:
    yield "## False refusals when idle"
    yield ""
    yield "One request after the other, each with the flood's deadline, right after the start; medians of the rounds."
    yield ""
    keys = ("tries", "refused", "late", "max_ms")
    yield from _table(["server", "tries", "refused", "late", "slowest, ms"], _cells(rows, keys))


def _abandon(rows: Rows) -> Iterator[str]:
    yield "## Clients that leave"
    yield ""
    yield (
        "60 clients send a request each and close, while others before them are served. Executed: by the server's own "
        "counter, less the live requests. Next: a live request when the others are done, beside one on an idle server."
    )
    yield ""
    keys = ("abandoned", "executed", "next_ms", "baseline_ms")
    yield from _table(["server", "left", "executed", "next, ms", "idle, ms"], _cells(rows, keys))


def _overhead(rows: Rows) -> Iterator[str]:
    yield "## One request at a time"
    yield ""
    rival = next((row for name, row in rows.items() if name.startswith("Triton")), None)
    cells = [
        [
            name,
            *(_number(row[key]) for key in ("p50_ms", "p99_ms")),
            *(_ratio(row[key], rival[key]) if rival else "-" for key in ("p50_ms", "p99_ms")),
        ]
        for name, row in rows.items()
    ]
    yield from _table(["server", "p50, ms", "p99, ms", "p50 by Triton's", "p99 by Triton's"], cells)


def _reload(rows: Mapping[str, Any]) -> Iterator[str]:
    yield "## Another model comes and goes"
    yield ""
    yield "200 requests a second for a tiny model, evenly spaced, while mobilenet is unloaded and loaded."
    yield ""
    cells = [
        [
            name,
            _number(row["reloads"]),
            _number(row["reload_s"]),
            *(_number(row[key]) for key in ("steady_p99_ms", "meanwhile_p99_ms")),
            _ratio(row["meanwhile_p99_ms"], row["steady_p99_ms"]),
            _number(row["meanwhile_max_ms"]),
            f"{row['failed']:.0f} of {row['requests']:.0f}",
            *(_number(row[key]) for key in ("pss_before_mib", "pss_after_mib")),
            _ratio(row["pss_after_mib"], row["pss_before_mib"]),
            _reasons(row["reasons"], row["requests"]),
        ]
        for name, row in rows.items()
    ]
    head = ["server", "reloads", "each, s", "steady p99, ms", "meanwhile p99", "ratio", "max", "failed"]
    yield from _table([*head, "PSS before, MiB", "after", "ratio", "failed, why"], cells)


def _fault(rows: Mapping[str, Any]) -> Iterator[str]:
    yield "## What runs the model dies, or stops"
    yield ""
    yield (
        "200 requests a second for a tiny model; the signal goes to the engine, or to Triton's stub. Ours takes a pass "
        "of more than 1 s for a hang here (`hang_s`). Back: from the signal to the first answer of status 200 to a "
        "request that was due after it. A process that is stopped and not noticed is let go on at the end."
    )
    yield ""
    cells = [
        [
            name,
            *(_number(row[key]) for key in ("requests", "ok", "refused", "unanswered", "lost")),
            "yes" if row["noticed"] else "no",
            *(_number(row[key]) for key in ("back_s", "start_s")),
            _reasons(row["reasons"], row["requests"]),
        ]
        for name, row in rows.items()
    ]
    head = ["signal, server", "requests", "200", "refused", "no answer", "connection lost", "noticed", "back, s"]
    yield from _table([*head, "whole start, s", "not answered, why"], cells)


_SECTIONS = {
    "load": _load,
    "flood": _flood,
    "idle": _idle,
    "abandon": _abandon,
    "overhead": _overhead,
    "reload": _reload,
    "fault": _fault,
}


# --- small parts


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"


def _cells(rows: Rows, keys: Sequence[str]) -> list[list[str]]:
    return [[name, *(_number(row[key]) for key in keys)] for name, row in rows.items()]


def _number(value: float | None) -> str:
    """Three digits that matter, whole numbers as they are."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _ratio(value: float, base: float) -> str:
    return "-" if math.isnan(value) or math.isnan(base) or not base else f"{value / base:.2f}x"


def _reasons(reasons: Mapping[str, int], requests: float) -> str:
    """The most frequent ones, by their share of all requests."""
    first = sorted(reasons.items(), key=lambda each: -each[1])[:2]
    return "; ".join(f"{count / requests:.1%} {text.replace('|', '/')}" for text, count in first)
