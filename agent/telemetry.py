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
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from agent.errors import Reason
from agent.memory import pss_by_kind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A `_created` series beside every counter would double the text and tell nothing that a scraper uses.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From what a tiny model needs (half a millisecond) to what nobody waits for.
_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Telemetry:
    """What the gateway counts. Gauges are read when asked for, from the functions given to `watch`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        requests = Counter(
            "tightfit_requests", "Inference requests by how they ended.", ["reason"], registry=self._registry
        )
        self._requests = {reason: requests.labels(reason.value) for reason in Reason}
        self._request_s = Histogram(
            "tightfit_request_seconds",
            "From the request's head to its answer, answered requests only.",
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._pass_s = Histogram(
            "tightfit_pass_seconds",
            "In the engine, once through all segments; requests that wait go together where weights are streamed.",
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._streamed = Counter(
            "tightfit_streamed_bytes", "Weights brought in for the turn of a segment.", registry=self._registry
        )

    def settled(self, reason: Reason, seconds: float) -> None:
        """One request has ended."""
        self._requests[reason].inc()
        if reason is Reason.OK:
            self._request_s.observe(seconds)

    def passed(self, seconds: float, streamed_bytes: int) -> None:
        """One pass of the engine has ended."""
        self._pass_s.observe(seconds)
        self._streamed.inc(streamed_bytes)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show `read()` as a gauge."""
        Gauge(name, text, registry=self._registry).set_function(read)

    def watch_memory(self, engine_pid: Callable[[], int | None]) -> None:
        """Show the PSS of gateway and engine by kind."""
        self._registry.register(_MemoryCollector(engine_pid))

    def text(self) -> bytes:
        """Everything, as Prometheus reads it. Takes milliseconds on a large engine (the kernel walks its pages)."""
        return generate_latest(self._registry)


class _MemoryCollector(Collector):
    def __init__(self, engine_pid: Callable[[], int | None]) -> None:
        self._engine_pid = engine_pid

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "tightfit_memory_bytes", "Proportional set size by process and kind.", labels=["process", "kind"]
        )
        for process, pid in (("gateway", os.getpid()), ("engine", self._engine_pid())):
            for kind, nbytes in pss_by_kind(pid).items() if pid else ():
                family.add_metric([process, kind], nbytes)
        yield family
