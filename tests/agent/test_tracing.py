"""Spans of requests: what they say, which requests have some, and that a collector gets them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.calls import REQUEST_ID, TRACE_PARENT, Call
from agent.errors import TABLE, Reason
from tests.support import bundles
from tests.support.agents import ROOT, Agent, serving, until
from tests.support.wire import LANES

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agent.tracing import Tracer, stages_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ["door", "decode", "queue", "engine", "encode"]
TIMES = {"seated": 11.0, "queued": 11.5, "began": 13.0, "compute_s": 2.0, "ended": 15.0}


class Traced:
    """A tracer whose spans stay in memory."""

    def __init__(self, ratio: float = 0.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = Tracer(ratio, SimpleSpanProcessor(self._exporter), "1.2.3")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


def call(flags: str | None = "01", **fields: Any) -> Call:
    made = Call(1, 10.0, 99.0, "client", 64, name="m")
    parent = {} if flags is None else {TRACE_PARENT: f"00-{TRACE}-{SPAN}-{flags}"}
    made.echo = {REQUEST_ID: "wiper-7", **parent}
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_stages_are_below_the_request_and_that_is_below_the_clients_span() -> None:
    traced = Traced()
    traced.tracer.settled(call(**TIMES), Reason.OK)
    *parts, request = traced.spans
    assert [each.name for each in parts] == STAGES
    assert {each.parent.span_id for each in parts if each.parent} == {request.context.span_id}
    assert {each.context.trace_id for each in traced.spans} == {int(TRACE, 16)}
    assert request.parent is not None
    assert (request.parent.span_id, request.parent.is_remote) == (int(SPAN, 16), True)
    assert request.name == "infer m"
    assert request.kind.name == "SERVER"
    assert dict(request.attributes or {}) == {
        "http.response.status_code": 200, "client.address": "client", "tightfit.request_id": "wiper-7",
        "tightfit.model": "m", "tightfit.reason": "ok", "tightfit.priority": 64,
    }  # fmt: skip
    assert request.resource.attributes["service.name"] == "tightfit-agent"
    lengths = [(each.end_time or 0) - (each.start_time or 0) for each in parts]
    assert lengths[:4] == pytest.approx([1e9, 0.5e9, 1.5e9, 2e9], abs=2)
    assert [each.start_time for each in parts[1:]] == [each.end_time for each in parts[:-1]]
    assert (parts[0].start_time, parts[-1].end_time) == (request.start_time, request.end_time)


@given(st.integers(0, 5), st.floats(0, 9))
def test_a_request_ends_in_the_stage_that_it_has_reached(reached: int, more: float) -> None:
    times = dict(zip(["seated", "queued", "began", "ended"], [11.0, 12.0, 13.0, 14.0][:reached], strict=False))
    now = max([10.0, *times.values()]) + more
    stages = list(stages_of(call(**times), now))
    assert [stage.name for stage in stages] == STAGES[: len(times) + 1]
    assert (stages[0].began, stages[-1].ended) == (10.0, now)
    assert [stage.ended for stage in stages[:-1]] == [stage.began for stage in stages[1:]]


@pytest.mark.parametrize("reason", Reason)
def test_what_the_server_did_wrong_is_an_error(reason: Reason) -> None:
    traced = Traced()
    traced.tracer.settled(call(), reason)
    request = traced.spans[-1]
    failed = TABLE[reason].status >= 500
    assert request.status.is_ok is not failed
    assert (request.attributes or {}).get("error.type") == (reason.value if failed else None)


@pytest.mark.parametrize(
    ("flags", "ratio", "expected"),
    [
        ("01", 0.0, True),
        ("03", 0.0, True),
        ("00", 1.0, False),
        ("02", 1.0, False),
        (None, 0.0, False),
        (None, 1.0, True),
    ],
)
def test_the_client_decides_and_the_ratio_where_it_says_nothing(
    flags: str | None, ratio: float, expected: bool
) -> None:
    traced = Traced(ratio)
    traced.tracer.settled(call(flags), Reason.OK)
    assert bool(traced.spans) is expected
    if expected:
        assert (traced.spans[-1].parent is None) is (flags is None)


class Collector(ThreadingHTTPServer):
    """Takes traces over OTLP/HTTP, where its `status` is 200."""

    def __init__(self) -> None:
        self.status = 200
        self.goes = threading.Event()
        """While it is not set nothing is answered."""
        self.goes.set()
        self.refused = 0
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), Exports)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def named(self, request_id: str) -> list[Any]:
        """The spans of a request, once all are there."""
        found = [span for span in list(self.spans) if value_of(span, "tightfit.request_id") == request_id]
        if not found:
            return []
        (request,) = found
        return [request, *(span for span in list(self.spans) if span.parent_span_id == request.span_id)]


class Exports(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
        assert self.server.goes.wait(60)
        if self.server.status == 200:
            for traces in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resources.append({each.key: each.value.string_value for each in traces.resource.attributes})
                self.server.spans += [span for scope in traces.scope_spans for span in scope.spans]
        else:
            traces = ExportTraceServiceRequest.FromString(body).resource_spans
            self.server.refused += sum(len(scope.spans) for each in traces for scope in each.scope_spans)
        self.send_response(self.server.status)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


def value_of(span: Any, name: str) -> Any:
    values = [each.value for each in span.attributes if each.key == name]
    return getattr(values[0], values[0].WhichOneof("value")) if values else None


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def configured(folder: Path, endpoint: str) -> tuple[str, str]:
    (folder / "agent.toml").write_text(f'[tracing]\nendpoint = "{endpoint}"\nratio = 0\n', encoding="utf-8")
    return "--config", str(folder / "agent.toml")


def ask(agent: Agent, id_: str, flags: str = "01", body: bytes | None = None) -> int:
    tensors = {"inputs": [{"name": n, "shape": [1, 8], "datatype": "FP32", "data": [1] * 8} for n in "ab"]}
    headers = {"X-Request-Id": id_, TRACE_PARENT: f"00-{TRACE}-{SPAN}-{flags}"}
    status, _, echoed = agent.post(tensors if body is None else body, headers)
    assert echoed[TRACE_PARENT] == headers[TRACE_PARENT]
    return status


def counted(agent: Agent) -> dict[str, int]:
    text = agent.request("/metrics")[1].decode()
    return {name: int(float(value)) for name, value in re.findall(r"^tightfit_spans_(\w+)_total (\S+)$", text, re.M)}


def test_spans_for_which_there_is_no_room_are_counted(tmp_path: Path, collector: Collector) -> None:
    """While the collector takes its time, 16 are on their way to it, 16 wait, and the rest finds no room."""
    arguments = configured(tmp_path, collector.endpoint)
    config = tmp_path / "agent.toml"
    config.write_text(config.read_text("utf-8") + "queue_length = 16\n", encoding="utf-8")
    with serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments) as agent:
        collector.goes.clear()
        try:
            for turn in range(20):
                assert ask(agent, f"{turn}") == 200
        finally:
            collector.goes.set()
        until(lambda: 0 < counted(agent)["sent"] == len(collector.spans))
        made = counted(agent)["made"]
        assert made == 120
        assert agent.stop() == 0
    assert 16 <= len(collector.spans) < made


def test_a_collector_gets_the_spans_of_both_lanes(tmp_path: Path, collector: Collector) -> None:
    bundle = bundles.add(tmp_path / "add.tfb")
    with serving(bundle, tmp_path / "log", *configured(tmp_path, collector.endpoint)) as agent:
        for lane, headers in LANES.items():
            agent.headers = headers
            id_ = lane.replace(" ", "-")
            assert ask(agent, f"{id_}-not-kept", "00") == 200
            assert ask(agent, id_) == 200
            assert ask(agent, f"{id_}-bad", body=b"{}") == 400
            until(lambda id_=id_: len(collector.named(id_)) == 6 and len(collector.named(f"{id_}-bad")) == 3)
            request, *parts = collector.named(id_)
            assert [each.name for each in parts] == STAGES
            assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, SPAN)
            assert value_of(request, "tightfit.batch_size") == 1
            refused, *parts = collector.named(f"{id_}-bad")
            assert [each.name for each in parts] == ["door", "decode"]
            assert value_of(refused, "tightfit.reason") == "bad_request"
            # Spans leave in order, so one that was kept would be there by now.
            assert not collector.named(f"{id_}-not-kept")
        assert collector.resources[0]["service.name"] == "tightfit-agent"
        assert agent.stop() == 0


def test_a_stop_sends_what_was_not_sent(tmp_path: Path, collector: Collector) -> None:
    bundle = bundles.add(tmp_path / "add.tfb")
    with serving(bundle, tmp_path / "log", *configured(tmp_path, collector.endpoint)) as agent:
        assert ask(agent, "last") == 200
        assert agent.stop() == 0
    assert len(collector.named("last")) == 6


def test_a_collector_that_fails_is_said_once_and_harms_nobody(tmp_path: Path, collector: Collector) -> None:
    collector.status = 400
    bundle = bundles.add(tmp_path / "add.tfb")
    with serving(bundle, tmp_path / "log", *configured(tmp_path, collector.endpoint)) as agent:
        for turn in range(3):
            assert ask(agent, f"lost-{turn}") == 200
            until(lambda turn=turn: collector.refused == 6 * (turn + 1))
        collector.status = 200
        assert ask(agent, "sent") == 200
        until(lambda: len(collector.named("sent")) == 6)
        until(lambda: "spans are sent again" in agent.log)
        assert agent.log.count("spans cannot be sent") == 1
        assert '"lost": 18' in agent.log
        until(lambda: counted(agent) == {"made": 24, "sent": 6})
        assert agent.stop() == 0
        assert "Traceback" not in agent.log


def test_nobody_there_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    with Collector() as nobody:
        endpoint = nobody.endpoint
    bundle = bundles.add(tmp_path / "add.tfb")
    with serving(bundle, tmp_path / "log", *configured(tmp_path, endpoint)) as agent:
        assert ask(agent, "lost") == 200
        assert agent.stop() == 0
        assert "Traceback" not in agent.log


def test_nothing_of_it_is_imported_where_nobody_traces() -> None:
    program = "import agent.__main__, agent.app, sys; sys.exit(any('opentelemetry' in name for name in sys.modules))"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
