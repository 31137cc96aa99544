"""Counters and gauges in Prometheus' text format. Labels come from fixed sets, so nothing here grows with traffic."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from agent.errors import Reason
from agent.memory import pss_by_kind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A `_created` series beside every counter would double the text and tell nothing that a scraper uses.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From what a tiny model needs (half a millisecond) to what nobody waits for.
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


Readings = Callable[[], Iterable[tuple[str, float]]]
"""Of models, by name. Two versions of one are added up."""


class Telemetry:
    """What the gateway counts, by model. Gauges are read when asked for, from the functions given to `watch`.

    A model has its series from when it is added, at zero; "" are requests for models that are not there.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tightfit_requests", "Inference requests by how they ended.", ["model", "reason"], registry=self._registry
        )
        self._request_s = Histogram(
            "tightfit_request_seconds",
            "From the request's head to its answer, answered requests only.",
            ["model"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._pass_s = Histogram(
            "tightfit_pass_seconds",
            "In the engine, once through all segments; requests that wait go together where weights are streamed.",
            ["model"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._executed = Counter(
            "tightfit_executed_requests",
            "Requests that were part of a pass, whether or not anybody still waited for the answer.",
            ["model"],
            registry=self._registry,
        )
        self._streamed = Counter(
            "tightfit_streamed_bytes", "Weights brought in for a segment's turn.", ["model"], registry=self._registry
        )
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
        # Looking a series up by its labels takes longer than counting in it.
        self._of_models: dict[str, tuple[Counter, Histogram, Histogram, Counter, Counter]] = {}
        self.add("")

    def add(self, model: str) -> None:
        """Begin the series of a model, unless it has them."""
        for reason in Reason:
            self._requests.labels(model, reason.value)
        if model:
            self._of_models[model] = (
                self._requests.labels(model, Reason.OK.value),
                self._request_s.labels(model),
                self._pass_s.labels(model),
                self._executed.labels(model),
                self._streamed.labels(model),
            )

    def settled(self, model: str, reason: Reason, seconds: float) -> None:
        """One request has ended."""
        if reason is Reason.OK and model in self._of_models:
            answered, request_s, *_ = self._of_models[model]
            answered.inc()
            request_s.observe(seconds)
        else:
            self._requests.labels(model, reason.value).inc()

    def passed(self, model: str, requests: int, seconds: float, streamed_bytes: int) -> None:
        """One pass of the engine, of so many requests, has ended."""
        _, _, pass_s, executed, streamed = self._of_models[model]
        pass_s.observe(seconds)
        executed.inc(requests)
        streamed.inc(streamed_bytes)

    def watch(self, name: str, text: str, read: Readings) -> None:
        """Show what `read` gives as a gauge."""
        self._registry.register(_Watched(name, text, read, GaugeMetricFamily))

    def watch_count(self, name: str, text: str, read: Readings) -> None:
        """Show what `read` gives as a counter, which begins again where a model is loaded anew."""
        self._registry.register(_Watched(name, text, read, CounterMetricFamily))

    def watch_one(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show `read()` as a gauge of the agent as a whole."""
        Gauge(name, text, registry=self._registry).set_function(read)

    def degraded(self, cause: str, up: bool) -> None:
        """The level of degradation has changed."""
        self._degradations.labels(cause, "up" if up else "down").inc()

    def stood_in(self, model: str) -> None:
        """A lighter variant answers for the model."""
        self._stood_in.labels(model).inc()

    def watch_memory(self, engines: Callable[[], Iterable[tuple[str, int | None]]]) -> None:
        """Show the PSS of gateway and engines by kind; `engines` gives (model, process)."""
        self._registry.register(_Memory(engines))

    def text(self) -> bytes:
        """Everything, as Prometheus reads it. Takes milliseconds on a large engine (the kernel walks its pages)."""
        return generate_latest(self._registry)


class _Watched(Collector):
    def __init__(
        self, name: str, text: str, read: Readings, family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    ) -> None:
        self._name, self._text, self._read, self._family = name, text, read, family

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        sums: dict[str, float] = {}
        for model, value in self._read():
            sums[model] = sums.get(model, 0.0) + value
        family = self._family(self._name, self._text, labels=["model"])
        for model, value in sums.items():
            family.add_metric([model], value)
        yield family


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
