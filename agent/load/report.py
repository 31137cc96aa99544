"""What was measured, as values for JSON and as a table for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from agent.load.histogram import Histogram
from agent.load.tally import Measured, Tally
from targets.errors import TightfitError
from targets.tensor import human

PERCENTILES = (50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99)
_SHOWN = ("p50", "p90", "p99", "p99.9", "max")
# A generator that is busy for longer of its time is late with what it sends and what it reads.
_BUSY = 0.9
# Of the latency at p99 the generator's own lateness may be so much before it is said.
_LATE = 0.1
_SLO = re.compile(r"(?:p(\d{1,2}(?:\.\d{1,4})?)|max)=(\d{1,9}(?:\.\d{1,6})?)(ms|s)", re.ASCII)


@dataclass(frozen=True)
class Slo:
    """A promise: `share` of all requests are answered 200 within `limit_s`."""

    text: str
    share: float
    limit_s: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`p99=50ms`, `p99.9=0.2s`, `max=1s`; raises TightfitError for anything else."""
        match = _SLO.fullmatch(text.strip())
        if match is None or float(match[2]) == 0:
            raise TightfitError(f"--slo {text!r} is not a promise", "write p99=50ms, p99.9=0.2s or max=1s")
        return cls(text.strip(), float(match[1]) / 100 if match[1] else 1.0, float(match[2]) / _PER_SECOND[match[3]])

    def kept(self, tally: Tally) -> bool:
        """A request that was refused, failed or given up is one that was never answered."""
        value = tally.quantile_s(self.share)
        return value is not None and value <= self.limit_s


_PER_SECOND = {"ms": 1000, "s": 1}


class Group(msgspec.Struct, frozen=True):
    """Requests of one kind, or of all. `latency_ms` (p50 .. max, mean) is of answers of status 200 and, at the least
    that they took, of requests given up; None where there are none. `failures` is by reason."""

    name: str
    requests: int
    answered: int
    in_time: int
    offered_per_s: float
    answered_per_s: float
    goodput_per_s: float
    latency_ms: dict[str, float] | None
    failures: dict[str, int]
    sent_bytes: int
    received_bytes: int


class Promise(msgspec.Struct, frozen=True):
    """An --slo at one rate; `ms` is what was kept, None where too many requests were never answered."""

    slo: str
    kept: bool
    ms: float | None


class Run(msgspec.Struct, frozen=True):
    """One rate. `load` is its share of the capacity, where it was given so.

    `late_p99_ms`: how late the generator was for what a connection was free for, and for ticks of its own. `waited`:
    the share of requests for which none was free, and `waited_p99_ms` how long these waited. Both are in the latency.
    """

    rate: float
    load: float | None
    span_s: float
    elapsed_s: float
    all: Group
    kinds: list[Group]
    late_p99_ms: float
    cpu_share: float
    waited: float
    waited_p99_ms: float
    slowest: list[tuple[str, float]]
    promises: list[Promise]
    warnings: list[str]
    cut_off: int


class Report(msgspec.Struct, frozen=True):
    """Everything. `trace` is what every X-Request-Id begins with; `mix` the weights of the kinds."""

    url: str
    model: str
    versions: list[str]
    tensors: str
    stream: bool
    arrivals: str
    seed: int
    connections: int
    timeout_s: float
    deadline_ms: float | None
    trace: str
    mix: dict[str, float]
    capacity_per_s: float | None
    capacity_connections: int | None
    runs: list[Run]
    interrupted: bool

    @property
    def passed(self) -> bool:
        """Whether all that was asked for was measured, something was answered, and every --slo was kept."""
        measured = bool(self.runs) and not self.interrupted
        return measured and all(run.all.answered and all(p.kept for p in run.promises) for run in self.runs)


def run_of(
    rate: float, load: float | None, duration_s: float | None, names: Sequence[str], measured: Measured,
    slos: Sequence[Slo],
) -> tuple[Run, Tally]:  # fmt: skip
    """(a rate's figures, the tally of all its requests). Without a duration the span is that of the arrivals."""
    total = Tally()
    for tally in measured.tallies:
        total.merge(tally)
    late = Histogram()
    for histogram in (total.lateness, measured.lag):
        late.merge(histogram)
    span_s = measured.last_offset_s + 1 / rate if duration_s is None else duration_s
    if measured.stopped:
        span_s = max(min(span_s, measured.end_s), 1 / rate)
    elapsed_s = max(measured.end_s, span_s)
    kinds = [_group(n, t, span_s, elapsed_s) for n, t in zip(names, measured.tallies, strict=True)]
    run = Run(
        rate=rate,
        load=load,
        span_s=span_s,
        elapsed_s=elapsed_s,
        all=_group("all", total, span_s, elapsed_s),
        kinds=kinds if len(kinds) > 1 else [],
        late_p99_ms=_ms(late, 0.99),
        cpu_share=measured.cpu_share,
        waited=total.waiting.count / max(total.requests, 1),
        waited_p99_ms=_ms(total.waiting, 0.99),
        slowest=[(trace, seconds * 1e3) for seconds, trace in sorted(total.slowest, reverse=True)],
        promises=[_promise(slo, total) for slo in slos],
        warnings=list(_warnings(measured.cpu_share, _ms(late, 0.99), total.latency)),
        cut_off=measured.cut_off,
    )
    return run, total


def _group(name: str, tally: Tally, span_s: float, elapsed_s: float) -> Group:
    latency = None
    if tally.latency.count:
        latency = {f"p{percent:g}": _ms(tally.latency, percent / 100) for percent in PERCENTILES}
        latency["max"] = tally.latency.max / 1e6
        latency["mean"] = tally.latency.total / tally.latency.count / 1e6
    return Group(
        name=name,
        requests=tally.requests,
        answered=tally.answered,
        in_time=tally.in_time,
        offered_per_s=tally.requests / span_s,
        answered_per_s=tally.answered / elapsed_s,
        goodput_per_s=tally.in_time / elapsed_s,
        latency_ms=latency,
        failures=dict(tally.failures.most_common()),
        sent_bytes=tally.sent_bytes,
        received_bytes=tally.received_bytes,
    )


def _ms(histogram: Histogram, share: float) -> float:
    return (histogram.quantile(share) or 0) / 1e6


def _promise(slo: Slo, tally: Tally) -> Promise:
    value = tally.quantile_s(slo.share)
    return Promise(slo.text, slo.kept(tally), None if value is None else value * 1e3)


def _warnings(cpu_share: float, late_ms: float, latency: Histogram) -> Iterable[str]:
    """What makes the figures the generator's rather than the server's."""
    if cpu_share > _BUSY:
        yield (
            f"the generator was busy {cpu_share:.0%} of the time and may be the limit: "
            "lower the rate, or run several on machines of their own"
        )
    if latency.count and late_ms > _LATE * _ms(latency, 0.99):
        yield (
            f"the generator was up to {late_ms:.2f} ms late (p99), which is in the latency: "
            "give it a core of its own, or another machine"
        )


# --- for people


def table(report: Report) -> str:
    """The report as text, without a newline at the end."""
    ways = "streams" if report.stream else "connections"
    lines = [f"{report.model} at {report.url}: {report.arrivals} arrivals, {report.connections} {ways}, "
             f"{report.tensors}, seed {report.seed}, request ids {report.trace}-..."]  # fmt: skip
    if report.capacity_per_s is not None:
        used = f"with {report.capacity_connections} of {report.connections} connections, the others were refused"
        if report.capacity_connections == report.connections:
            used = f"with {report.connections} connections"
        lines.append(f"capacity {report.capacity_per_s:.1f}/s in closed loop {used}")
    lines += ["latency in ms, from when a request was due", "", *_columns(report)]
    for run in report.runs:
        lines += _notes(report, run)
    if report.interrupted:
        lines += ["", "stopped by Ctrl-C: this is what was measured until then"]
    return "\n".join(lines)


def _columns(report: Report) -> list[str]:
    head = ["rate/s", "kind", "requests", "offered/s", "answered/s", "in time/s", *_SHOWN, "failed"]
    rows = [
        [f"{run.rate:.4g}" if group is run.all else "", *_cells(group)]
        for run in report.runs
        for group in (run.all, *run.kinds)
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    left = head.index("kind")
    return [
        "  ".join(
            cell.ljust(w) if at == left else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]


def _cells(group: Group) -> list[str]:
    shown = ["-"] * len(_SHOWN) if group.latency_ms is None else [_short(group.latency_ms[name]) for name in _SHOWN]
    rates = (group.offered_per_s, group.answered_per_s, group.goodput_per_s)
    return [group.name, str(group.requests), *(f"{r:.1f}" for r in rates), *shown, str(group.requests - group.answered)]


def _short(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _notes(report: Report, run: Run) -> Iterable[str]:
    title = f"at {run.rate:.4g}/s" + (f" ({run.load:.0%} of the capacity)" if run.load is not None else "")
    yield ""
    yield (
        f"{title}: the generator was {run.late_p99_ms:.2f} ms late (p99) and took {run.cpu_share:.0%} of a core; "
        f"{run.waited:.1%} waited for a connection ({_short(run.waited_p99_ms)} ms p99); "
        f"{human(run.all.sent_bytes)} sent, {human(run.all.received_bytes)} received"
    )
    for failure, count in run.all.failures.items():
        yield f"  {count} x {failure}"
    if run.all.answered > run.all.in_time:
        yield f"  {run.all.answered - run.all.in_time} x answered after the deadline of {report.deadline_ms:g} ms"
    if run.cut_off:
        yield f"  {run.cut_off} more were due and not answered yet when it was stopped"
    for promise in run.promises:
        kept = "never" if promise.ms is None else f"{_short(promise.ms)} ms"
        yield f"  {promise.slo} {'kept' if promise.kept else 'MISSED'}: {kept}"
    for warning in run.warnings:
        yield f"  warning: {warning}"
