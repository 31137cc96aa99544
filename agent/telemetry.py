"""What the gateway counts, for Prometheus (docs/observability.md). Labels come from fixed sets, so nothing here grows
with traffic.

What happens with every request is counted in plain numbers, by the event loop alone; they become series when somebody
asks for them, in a thread.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as Shown

from agent.calls import Call
from agent.config import DEFAULT_PRIORITY
from agent.errors import TABLE, Reason
from agent.histogram import Exemplar, Histogram, histogram_of
from agent.memory import pss_by_kind

TEXT, OPEN_METRICS = "text/plain", "application/openmetrics-text"
_CONTENT_TYPES = {
    TEXT: f"{TEXT}; version=0.0.4; charset=utf-8",
    OPEN_METRICS: f"{OPEN_METRICS}; version=1.0.0; charset=utf-8",
}
_QUALITY = re.compile(r"q=([01](?:\.[0-9]{0,3})?)", re.ASCII)
# A `_created` series beside every counter would double the text and tell nothing that a scraper uses.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From what a tiny model needs (half a millisecond) to what nobody waits for.
BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_BUCKETS_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

# Urgencies 0 to 2, 3 (the default) and 4 to 7 of RFC 9218, as `agent.http.hints` has them.
_BANDS = ("high", "normal", "low")
_BAND = bytes(0 if 0 < priority <= 96 else 1 if priority < 160 else 2 for priority in range(256))
_CLASS = {reason: f"{answer.status // 100}xx" for reason, answer in TABLE.items()}
_CLASSES = tuple(dict.fromkeys(_CLASS.values()))

Readings = Callable[[], Iterable[tuple[str, float]]]
"""Of models, by name. Two versions of one are added up."""
Parts = Callable[[], Iterable[tuple[tuple[str, ...], float]]]
"""The same with further labels behind the name."""
Sizes = Callable[[], Iterable[tuple[str, Mapping[int, int]]]]
"""How often each size came, of models by name."""


class _Counts:
    """Of one model. Latencies are by status class and band of priorities."""

    __slots__ = (
        "answered",
        "executed",
        "latency_s",
        "latency_s_of_answers",
        "pass_s",
        "queue_s",
        "refused",
        "streamed",
    )

    def __init__(self) -> None:
        self.answered = self.executed = self.streamed = 0
        self.refused = {reason: 0 for reason in Reason if reason is not Reason.OK}
        self.latency_s = {each: [Histogram(BUCKETS_S) for _ in _BANDS] for each in _CLASSES}
        # Enumerations are slow keys.
        self.latency_s_of_answers = self.latency_s[_CLASS[Reason.OK]]
        self.queue_s, self.pass_s = Histogram(BUCKETS_S), Histogram(BUCKETS_S)


class Telemetry:
    """What the gateway counts, by model. Gauges are read when asked for, from the functions given to `watch`.

    A model has its series from when it is added, at zero; "" are requests for models that are not there.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._of_models = {"": _Counts()}
        self._registry.register(_Counted(self._of_models))
        self._stood_in = Counter(
            "tightfit_stood_in",
            "Requests that went to the model's lighter variant.",
            ["model"],
            registry=self._registry,
        )
        self._degradations = Counter(
            "tightfit_degradations",
            "Changes of the level of degradation, by what pressed.",
            ["cause", "to"],
            registry=self._registry,
        )
        self._cut = Counter(
            "tightfit_connections_cut",
            "Connections that were ended outside any request, by why.",
            ["reason"],
            registry=self._registry,
        )
        began = time.monotonic()
        self.watch_one("tightfit_uptime_seconds", "Since the agent was started.", lambda: time.monotonic() - began)

    def add(self, model: str) -> None:
        """Begin the series of a model, unless it has them."""
        if model not in self._of_models:
            self._of_models[model] = _Counts()

    def built(self, version: str) -> None:
        """Say which version of the agent counts here."""
        info = Gauge("tightfit_build_info", "Always 1.", ["version", "python"], registry=self._registry)
        info.labels(version, platform.python_version()).set(1)

    def settled(self, model: str, call: Call, reason: Reason, now: float) -> None:
        """One request has ended, at `now` of the monotonic clock."""
        counts = self._of_models.get(model) or self._of_models[""]
        if reason is Reason.OK:
            counts.answered += 1
            latency_s = counts.latency_s_of_answers[_BAND[call.priority]]
            if call.began:
                counts.queue_s.add(call.queue_s)
        else:
            counts.refused[reason] += 1
            latency_s = counts.latency_s[_CLASS[reason]][_BAND[call.priority]]
        seconds = now - call.arrived
        latency_s.add(seconds)
        if call.echo and call.is_traced:
            latency_s.show(Exemplar(call.trace_id, seconds, time.time()))

    def cut(self, reason: Reason) -> None:
        """A connection was ended while it asked for nothing."""
        self._cut.labels(reason.value).inc()

    def answered(self) -> dict[str, list[int]]:
        """Of each model, how many answers took at most each of `BUCKETS_S`, but more than the one before; and more."""
        return {
            model: [sum(each) for each in zip(*(band.counts() for band in counts.latency_s_of_answers), strict=True)]
            for model, counts in self._of_models.items()
            if model
        }

    def refused(self) -> dict[Reason, int]:
        """How many requests ended with each reason but `ok`."""
        of_models = self._of_models.values()
        return {
            reason: sum(counts.refused[reason] for counts in of_models) for reason in Reason if reason is not Reason.OK
        }

    def passed(self, model: str, requests: int, seconds: float, streamed_bytes: int) -> None:
        """One pass of the engine, of so many requests, has ended."""
        counts = self._of_models[model]
        counts.pass_s.add(seconds)
        counts.executed += requests
        counts.streamed += streamed_bytes

    def watch(self, name: str, text: str, read: Readings) -> None:
        """Show what `read` gives as a gauge."""
        self._registry.register(_Watched(name, text, ("model",), _parts(read), GaugeMetricFamily))

    def watch_count(self, name: str, text: str, read: Readings) -> None:
        """Show what `read` gives as a counter, which begins again where a model is loaded anew."""
        self._registry.register(_Watched(name, text, ("model",), _parts(read), CounterMetricFamily))

    def watch_parts(self, name: str, text: str, labels: Sequence[str], read: Parts) -> None:
        """Show what `read` gives as a gauge that has these labels beside the model."""
        self._registry.register(_Watched(name, text, ("model", *labels), read, GaugeMetricFamily))

    def watch_rows(self, name: str, text: str, read: Sizes) -> None:
        """Show what `read` gives, numbers of rows, as a histogram."""
        self._registry.register(_Rows(name, text, read))

    def watch_one(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show `read()` as a gauge of the agent as a whole."""
        Gauge(name, text, registry=self._registry).set_function(read)

    def watch_one_count(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show `read()`, which only grows, as a counter of the agent as a whole."""
        self._registry.register(_One(name, text, read))

    def watch_series(self, name: str, text: str, labels: Sequence[str], read: Parts, *, count: bool = False) -> None:
        """Show what `read` gives, of the agent as a whole, as a gauge with these labels, or as a counter."""
        family = CounterMetricFamily if count else GaugeMetricFamily
        self._registry.register(_Watched(name, text, labels, read, family))

    def degraded(self, cause: str, up: bool) -> None:
        """The level of degradation has changed."""
        self._degradations.labels(cause, "up" if up else "down").inc()

    def stood_in(self, model: str) -> None:
        """A lighter variant answers for the model."""
        self._stood_in.labels(model).inc()

    def watch_memory(self, engines: Callable[[], Iterable[tuple[str, int | None]]]) -> None:
        """Show the PSS of gateway and engines by kind; `engines` gives (model, process)."""
        self._registry.register(_Memory(engines))

    def text(self, form: str = TEXT) -> tuple[bytes, str]:
        """(everything, its Content-Type). Takes milliseconds on a large engine (the kernel walks its pages)."""
        generate = openmetrics.generate_latest if form == OPEN_METRICS else generate_latest
        return generate(self._registry), _CONTENT_TYPES[form]


def form_of(accept: str) -> str:
    """The form that a scraper asks for with `Accept`: OpenMetrics where it says that it likes it no less than text."""
    liked: dict[str, float] = {}
    for item in accept.lower().split(","):
        kind, *parameters = [part.strip() for part in item.split(";")]
        quality = next((float(found[1]) for each in parameters if (found := _QUALITY.fullmatch(each))), 1.0)
        liked[kind] = max(quality, liked.get(kind, 0.0))
    return OPEN_METRICS if 0 < liked.get(OPEN_METRICS, 0.0) >= liked.get(TEXT, 0.0) else TEXT


def _parts(read: Readings) -> Parts:
    return lambda: [((model,), value) for model, value in read()]


class _Counted(Collector):
    """The counts of all models."""

    def __init__(self, of_models: Mapping[str, _Counts]) -> None:
        self._of_models = of_models

    def collect(self) -> Iterable[Metric]:
        of_models = dict(self._of_models)
        yield _requests(of_models)
        yield _request_s(of_models)
        # Nothing waits or runs for a model that is not there.
        del of_models[""]
        yield _histograms(
            "tightfit_queue_seconds",
            "Waiting of answered requests, at the door and in the queue.",
            {model: counts.queue_s for model, counts in of_models.items()},
        )
        yield _histograms(
            "tightfit_pass_seconds",
            "In the engine, once through all segments; requests that wait go together where weights are streamed.",
            {model: counts.pass_s for model, counts in of_models.items()},
        )
        yield _counters(
            "tightfit_executed_requests",
            "Requests that were part of a pass, whether or not anybody still waited for the answer.",
            {model: counts.executed for model, counts in of_models.items()},
        )
        yield _counters(
            "tightfit_streamed_bytes",
            "Weights brought in for a segment's turn.",
            {model: counts.streamed for model, counts in of_models.items()},
        )


def _requests(of_models: Mapping[str, _Counts]) -> Metric:
    family = CounterMetricFamily(
        "tightfit_requests", "Inference requests by how they ended.", labels=["model", "reason"]
    )
    for model, counts in of_models.items():
        family.add_metric([model, Reason.OK.value], counts.answered)
        for reason, count in counts.refused.items():
            family.add_metric([model, reason.value], count)
    return family


def _request_s(of_models: Mapping[str, _Counts]) -> Metric:
    family = HistogramMetricFamily(
        "tightfit_request_seconds", "From a request's head to its end.", labels=["model", "status", "priority"]
    )
    for (model, counts), status in itertools.product(of_models.items(), _CLASSES):
        for band, histogram in zip(_BANDS, counts.latency_s[status], strict=True):
            # Most of them stay empty. One is there from the beginning, so that no rate misses the first requests.
            if histogram.count or (model and histogram is counts.latency_s_of_answers[_BAND[DEFAULT_PRIORITY]]):
                _add(family, (model, status, band), histogram)
    return family


def _histograms(name: str, text: str, histograms: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["model"])
    for model, histogram in histograms.items():
        _add(family, (model,), histogram)
    return family


def _counters(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["model"])
    for model, count in counts.items():
        family.add_metric([model], count)
    return family


def _add(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    buckets: list[tuple[str, float] | tuple[str, float, Shown]] = []
    for bound, count, exemplar in histogram.cumulated():
        name = "+Inf" if math.isinf(bound) else str(float(bound))
        if exemplar is None:
            buckets.append((name, count))
        else:
            trace = {"trace_id": exemplar.trace_id}
            buckets.append((name, count, Shown(trace, exemplar.value, round(exemplar.wall_s, 3))))
    family.add_metric(labels, buckets, histogram.total)


class _Watched(Collector):
    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        read: Parts,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    ) -> None:
        self._name, self._text, self._labels, self._read, self._family = name, text, labels, read, family

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        sums: dict[tuple[str, ...], float] = {}
        for labels, value in self._read():
            sums[labels] = sums.get(labels, 0.0) + value
        family = self._family(self._name, self._text, labels=self._labels)
        for labels, value in sums.items():
            family.add_metric(labels, value)
        yield family


class _One(Collector):
    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())


class _Rows(Collector):
    def __init__(self, name: str, text: str, read: Sizes) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[Metric]:
        sums: dict[str, dict[int, int]] = {}
        for model, sizes in self._read():
            of_model = sums.setdefault(model, {})
            for rows, count in sizes.items():
                of_model[rows] = of_model.get(rows, 0) + count
        histograms = {model: histogram_of(_BUCKETS_ROWS, of_model) for model, of_model in sums.items()}
        yield _histograms(self._name, self._text, histograms)


class _Memory(Collector):
    def __init__(self, engines: Callable[[], Iterable[tuple[str, int | None]]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "tightfit_memory_bytes", "Proportional set size by process and kind.", labels=["process", "model", "kind"]
        )
        sums: dict[tuple[str, str, str], int] = {}
        processes = [("gateway", "", os.getpid()), *(("engine", *engine) for engine in self._engines())]
        for process, model, pid in processes:
            for kind, nbytes in pss_by_kind(pid).items() if pid else ():
                sums[process, model, kind] = sums.get((process, model, kind), 0) + nbytes
        for labels, nbytes in sums.items():
            family.add_metric(labels, nbytes)
        yield family
