"""Spans of requests, for an OpenTelemetry collector (docs/observability.md; the extra `otel`).

Theory of operation. Nothing is made while a request runs: a call notes its times anyway, and when it is settled they
become spans, with the client's span above them:

    client's span --> infer MODEL --> door, decode, queue, engine, encode

A batch processor of the SDK sends them from a thread of its own; what waits there is bounded, and dropped past that.
Whoever configures no endpoint imports none of this, and pays nothing.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from agent import log
from agent.calls import TRACE_PARENT, Call
from agent.config import Tracing
from agent.errors import TABLE, Reason

# Spans leave so often, so many at once, and one sending may take so long, other tries included.
_EVERY_MS, _AT_ONCE, _SEND_S = 1000, 512, 5.0
# A stop waits so long for the last of them.
_CLOSE_S = 2.0
_NS = 1_000_000_000


class Tracer:
    """Makes spans of calls that have ended, and hands them to `processor`."""

    def __init__(
        self, ratio: float, processor: SpanProcessor, version: str, sent: Callable[[], int] = lambda: 0
    ) -> None:
        """Of requests without a `traceparent`, a part of `ratio` (0..1) is traced."""
        self._ratio = ratio
        self.made = 0
        """Spans, whatever became of them."""
        self.sent = sent
        """How many of them somebody took."""
        resource = Resource.create({"service.name": log.SERVICE, "service.version": version})
        # Which requests have spans is decided here.
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tightfit", version)

    def settled(self, call: Call, reason: Reason) -> None:
        """One request has ended."""
        above = _parent_of(call)
        if above is None:
            if TRACE_PARENT in call.echo or random.random() >= self._ratio:  # noqa: S311 - a sample, no secret
                return
            above = Context()
        now = time.monotonic()
        # What the wall clock says of a moment of the monotonic one.
        epoch_ns = time.time_ns() - round(now * _NS)
        model = call.entry.name if call.entry else call.name
        span = self._tracer.start_span(
            f"infer {model}".rstrip(),
            above,
            trace.SpanKind.SERVER,
            attributes=_attributes(call, reason, model),
            start_time=epoch_ns + round(call.arrived * _NS),
        )
        below = trace.set_span_in_context(span, Context())
        for stage in stages_of(call, now):
            part = self._tracer.start_span(stage.name, below, start_time=epoch_ns + round(stage.began * _NS))
            part.end(epoch_ns + round(stage.ended * _NS))
            self.made += 1
        if TABLE[reason].status >= 500:
            span.set_status(trace.StatusCode.ERROR)
            span.set_attribute("error.type", reason.value)
        span.end(epoch_ns + round(now * _NS))
        self.made += 1

    def close(self) -> None:
        """Send what was not sent, if that is quickly done. Blocks."""
        # The SDK waits for half a minute, and other tries with it.
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)


class Stage(NamedTuple):
    """A part of a request's way. Times are of the monotonic clock, in seconds."""

    name: str
    began: float
    ended: float


def stages_of(call: Call, now: float) -> Iterator[Stage]:
    """The stages that a call went through, one after the other; it ended, at `now`, in the last."""
    reached = [
        (name, began)
        for name, began in (
            ("door", call.arrived),
            ("decode", call.seated),
            ("queue", call.queued),
            ("engine", call.began),
            ("encode", call.ended),
        )
        if began
    ]
    for (name, began), (_, ended) in zip(reached, [*reached[1:], ("", now)], strict=True):
        yield Stage(name, began, ended)


def _parent_of(call: Call) -> Context | None:
    """The client's span, where somebody keeps its trace."""
    if not call.is_traced:
        return None
    _, trace_id, span_id, *_ = call.echo[TRACE_PARENT].split("-")
    parent = trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(trace.TraceFlags.SAMPLED))
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _attributes(call: Call, reason: Reason, model: str) -> dict[str, str | int | bool]:
    found: dict[str, str | int | bool | None] = {
        "http.response.status_code": TABLE[reason].status,
        "client.address": call.client or None,
        "tightfit.request_id": call.request_id,
        "tightfit.model": model or None,
        "tightfit.version": call.served.version if call.served else None,
        "tightfit.reason": reason.value,
        "tightfit.priority": call.priority or None,
        "tightfit.batch_size": call.batch_rows or None,
        "tightfit.cache_hit": call.cache_hit,
    }
    return {name: value for name, value in found.items() if value is not None}


class _Told(SpanExporter):
    """Sends as another exporter does, and says once when that fails, and once when it works again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._log = log.get("tracing")
        self._lost = 0
        self.sent = 0
        # It would say so with every batch, in words of its own.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._lost:
                self._log.warning("spans cannot be sent: does a collector listen where [tracing] says?")
            self._lost += len(spans)
            return result
        self.sent += len(spans)
        if self._lost:
            self._log.info("spans are sent again", lost=self._lost)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def to_collector(options: Tracing, version: str) -> Tracer:
    """One that sends to the endpoint."""
    exporter = _Told(OTLPSpanExporter(options.endpoint, timeout=_SEND_S))
    processor = BatchSpanProcessor(
        exporter,
        max_queue_size=options.queue_length,
        schedule_delay_millis=_EVERY_MS,
        max_export_batch_size=min(_AT_ONCE, options.queue_length),
    )
    return Tracer(options.ratio, processor, version, lambda: exporter.sent)
